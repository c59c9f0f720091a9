"""`hostward train` on two ranks, of which one dies, is told to end, or was started otherwise: all end soon and say why,
and the run goes on from its newest checkpoint to the bits that it would have had.

Ranks are children of one helper process, which has imported what they need.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import call

from hostward.checkpoint import api
from hostward.cli import main as hostward

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2
ITERATIONS = 16
SEED = 11
SOON_S = 30.0
"""Half a minute, on a busy machine too."""
LIMIT_S = 6.0
"""That ranks wait for each other, where one stands still."""
MODES = ("", "stream", "snapshot")
WORDS = (
    "train",
    "--recipe=qwen3_moe_tiny_pretrain_config",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.seq_length=16",
    "model.moe_ffn_hidden_size=32",
    "model.num_moe_experts=4",
    f"dataset.path={ROOT / 'LICENSE'}",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.device=cpu",
    "train.num_threads=1",
    f"train.train_iters={ITERATIONS}",
    "optimizer.optimizer_cpu_offload=True",
    "optimizer.optimizer_offload_fraction=1.0",
)


# --- the helper process ---


def start(base: Path, name: str, *words: str, of_rank_1: Sequence[str] = (), port: int = 0) -> list[int]:
    """Fork ranks that train with these words, saving below `base`. `base/name.N.err` is what rank N says. They have met
    before, or meet at `port` by themselves.
    """
    base.mkdir(parents=True, exist_ok=True)
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                for number, kind in ((1, "out"), (2, "err")):
                    os.dup2(os.open(base / f"{name}.{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE)}
                os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(SIZE)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                if not port:
                    store = dist.FileStore(str(base / f"{name}.store"), SIZE)
                    limit = timedelta(seconds=60)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=limit)
                folder = f"checkpoint.save={base / 'saved'}"
                code = hostward([*WORDS, folder, *words, *(of_rank_1 if rank == 1 else ())])
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def end(base: Path, name: str, pids: list[int], since_s: float) -> None:
    """Wait for the ranks, and write down how each ended, and how many seconds later."""
    for rank, pid in enumerate(pids):
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        (base / f"{name}.{rank}.end").write_text(f"{code} {time.monotonic() - since_s}")


def run(base: Path, name: str, *words: str, of_rank_1: Sequence[str] = ()) -> None:
    end(base, name, start(base, name, *words, of_rank_1=of_rank_1), time.monotonic())


def going_on(base: Path) -> tuple[str, ...]:
    return f"checkpoint.load={base / 'saved'}", "checkpoint.save_interval=2"


def of_the_guide() -> list[str]:
    """The words of its first line, from those of `train` on."""
    guide = (ROOT / "docs/training/scaling-out.md").read_text()
    words = next(line for line in guide.splitlines() if line.startswith("    torchrun ")).split()
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "-m", "hostward", "train"]
    return words[6:]


def until_saved(base: Path, iteration: int) -> None:
    """Wait until a checkpoint of that iteration or a later one is there."""
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        path = api.latest(base / "saved") if (base / "saved").exists() else None
        if path is not None and int(path.name.removeprefix("iter_")) >= iteration:
            return
        time.sleep(0.002)


def killed(base: Path) -> None:
    """A run that loses a rank at a random time, goes on, loses another one, and so on, until it comes to its end."""
    generator = random.Random(SEED)
    for point, mode in enumerate(MODES):
        beside = ("checkpoint.async_save=true", f"checkpoint.async_save_mode={mode}") if mode else ()
        pids = start(base, f"{point}", *going_on(base), *beside)
        until_saved(base, 4 * point + 2)
        time.sleep(generator.uniform(0.0, 0.2))  # one or two iterations, and a save
        os.kill(pids[generator.randrange(SIZE)], signal.SIGKILL)
        end(base, f"{point}", pids, time.monotonic())
    run(base, "last", *going_on(base))


def terminated(base: Path) -> None:
    """One rank of a run gets SIGTERM when the first checkpoint is there, and the run goes on later."""
    pids = start(base, "asked", *going_on(base), "train.exit_signal_handler=true")
    until_saved(base, 2)
    os.kill(pids[1], signal.SIGTERM)
    end(base, "asked", pids, time.monotonic())
    run(base, "last", *going_on(base))


def standing(base: Path) -> None:
    """One rank of a run stands still once the first checkpoint is there, until the other has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limit = f"dist.distributed_timeout_minutes={LIMIT_S / 60}"
    # Long, so that it does not come to its end first.
    pids = start(base, "only", *going_on(base), limit, "train.train_iters=2000", port=port)
    until_saved(base, 2)
    os.kill(pids[1], signal.SIGSTOP)
    since_s = time.monotonic()
    found = os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    assert found is not None
    os.kill(pids[1], signal.SIGKILL)
    end(base, "only", pids, since_s)


def beside(body: Callable[[], None]) -> int:
    """A child that carries it out, and ends with 0 if it could."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return pid


def main(base: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    run(base / "straight", "only")
    killed(base / "killed")
    terminated(base / "terminated")
    waiting = beside(lambda: standing(base / "standing"))  # most of it is LIMIT_S, in which nothing is done
    run(base / "otherwise", "only", of_rank_1=("optimizer.lr=0.5", "train.num_threads=2"))
    run(base / "guide", "only", *of_the_guide(), *WORDS[1:])
    run(base / "other data", "only", of_rank_1=(f"dataset.path={ROOT / 'README.md'}",))
    assert os.waitpid(waiting, 0)[1] == 0


# --- the tests ---


@dataclass(frozen=True)
class Ended:
    code: int
    seconds: float
    told: str


@pytest.fixture(scope="module")
def accidents() -> Iterator[Path]:
    """The folders that the helper process left, by what happened."""
    with tempfile.TemporaryDirectory() as base:
        call(main, Path(base), limit_s=280)
        yield Path(base)


def ended(base: Path, name: str = "only") -> list[Ended]:
    """How each rank ended."""
    found = []
    for rank in range(SIZE):
        code, seconds = (base / f"{name}.{rank}.end").read_text().split()
        found.append(Ended(int(code), float(seconds), (base / f"{name}.{rank}.err").read_text()))
    return found


def bits(base: Path) -> dict[str, str]:
    """Digests of all that the newest checkpoint holds."""
    path = api.latest(base / "saved")
    assert path is not None
    into = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in api.tensor_index(path).items()}
    api.load(path, into)
    found = {n: hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in into.items()}
    return found | {"iteration": api.read_plain(path)["iteration"]}


def test_a_run_that_loses_ranks_at_random_goes_on_to_the_same_bits(accidents: Path) -> None:
    base, left = accidents / "killed", []
    for point in range(len(MODES)):
        for rank in ended(base, f"{point}"):
            assert rank.seconds < SOON_S
            left += [rank] if rank.code not in (0, -signal.SIGKILL) else []
    assert len(left) == len(MODES), "a run was not hit half-way"
    for rank in left:
        assert rank.code == 2
        assert "Traceback" not in rank.told
        assert "another rank ended or did not answer" in rank.told
    assert [rank.code for rank in ended(base, "last")] == [0, 0]
    assert bits(base) == bits(accidents / "straight")


def test_t62_sigterm_on_one_rank_saves_on_all_and_the_run_goes_on_to_the_same_bits(accidents: Path) -> None:
    base = accidents / "terminated"
    asked = ended(base, "asked")
    assert [rank.code for rank in asked] == [143, 143]
    assert all(rank.seconds < SOON_S for rank in asked)
    *_, said = asked[0].told.splitlines()
    assert said.startswith("terminated after ")
    assert f" of {ITERATIONS} iterations; saved {base / 'saved'}/iter_" in said
    assert asked[1].told == ""
    assert [rank.code for rank in ended(base, "last")] == [0, 0]
    assert bits(base) == bits(accidents / "straight")


def test_a_rank_that_stands_still_is_waited_for_as_long_as_asked_and_no_longer(accidents: Path) -> None:
    base = accidents / "standing"
    first, second = ended(base)
    assert second.code == -signal.SIGKILL
    assert LIMIT_S - 1 < first.seconds < LIMIT_S + SOON_S
    assert first.code == 2
    assert "Traceback" not in first.told
    assert "imed out" in first.told  # in an iteration, or in a save
    assert api.latest(base / "saved") is not None
    bits(base)  # it is whole


def test_the_guides_line_trains_and_the_first_rank_alone_reports(accidents: Path) -> None:
    assert [rank.code for rank in ended(accidents / "guide")] == [0, 0]
    first, second = ((accidents / "guide" / f"only.{rank}.out").read_text() for rank in range(SIZE))
    assert "2 ranks, by node" in first
    assert second == ""


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("otherwise", "optimizer.lr is 0.001 on rank 0 on {node}, 0.5 on rank 1 on {node}\n"),
        ("other data", "the data is byte-level text of LICENSE, "),
    ],
)
def test_t67_ranks_that_were_started_otherwise_are_told_before_training(accidents: Path, how: str, why: str) -> None:
    first, second = ended(accidents / how)
    assert (first.code, second.code) == (2, 2)
    assert "error: the ranks of this run were started with different settings" in first.told
    assert f"why: {why.format(node=os.uname().nodename)}" in first.told
    assert second.told == ""
    assert not (accidents / how / "saved").exists() or api.latest(accidents / how / "saved") is None
