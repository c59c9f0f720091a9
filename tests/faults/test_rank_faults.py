"""Ranks that die, are stopped, run out of disk or race while they save together: all others stop soon, with the cause,
and a whole checkpoint is left.

Ranks are children of one helper process (this file, run as a program), so that torch is imported once.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hostward.checkpoint import api, collective
from hostward.errors import HostwardError

SIZE = 3
POINTS = 6
SEED = 7
ELEMENTS = 1_500_000
SOON_S = 25.0
"""Far below a minute, on a busy machine too."""
MODES: tuple[api.Mode | None, ...] = (None, "snapshot", "stream")


def values(rank: int, value: int) -> dict[str, torch.Tensor]:
    """Of one rank; the content tells which save they come from."""
    return {f"own/{rank}": torch.full((ELEMENTS,), float(value)), "all": torch.full((1000,), float(value))}


def save(directory: Path, iteration: int, value: int, mode: api.Mode | None = None) -> None:
    saver = api.Saver(directory, mode=mode, group=dist.group.WORLD, most_recent_k=1)
    try:
        saver.save(iteration, tensors=values(dist.get_rank(), value), plain={"value": value})
        saver.finish()
    finally:
        saver.close()


def read_value(path: Path) -> int:
    """Load a checkpoint and return the one value that all of it holds."""
    into = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in api.tensor_index(path).items()}
    api.load(path, into)
    found = {int(value) for tensor in into.values() for value in tensor.unique()} | {api.read_plain(path)["value"]}
    assert len(found) == 1
    assert len(into) == SIZE + 1
    return int(found.pop())  # type: ignore[arg-type]


# --- the helper process ---


def _be_rank(folder: Path, body: Callable[[int], None], name: str, rank: int) -> None:
    outcome = "nothing"
    start_s = time.perf_counter()
    try:
        store = dist.FileStore(str(folder / f"store{name}"), SIZE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=SOON_S))
        start_s = time.perf_counter()
        body(rank)
        outcome = "saved"
    except HostwardError as error:
        outcome = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        outcome = "interrupted"
    finally:
        # A signal that comes this late must not leave half a file.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        seconds = time.perf_counter() - start_s
        (folder / f"rank{name}{rank}").write_text(f"{seconds}\n{outcome}")


def start_ranks(folder: Path, body: Callable[[int], None], name: str = "") -> list[int]:
    """Fork ranks that carry out `body` and leave behind what became of it, in how many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            try:
                _be_rank(folder, body, name, rank)
            finally:
                os._exit(0)  # a signal that comes late must not let it go on as a second helper
        pids.append(pid)
    return pids


def end(pids: list[int]) -> None:
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert -signal.SIGABRT not in ended, "Gloo aborts a process that gathers something of another size"


def signalled(base: Path, number: signal.Signals, points: int) -> None:
    """In `base/N`: all save iteration 1, then iteration 2, while one rank gets the signal at a random time."""
    generator = random.Random(SEED)
    for point in range(points):
        folder, chosen, mode = base / f"{point}", generator.randrange(SIZE), MODES[point % len(MODES)]
        share = (point + generator.uniform(0.3, 1.0)) / points

        def body(rank: int, mode: api.Mode | None = mode, folder: Path = folder) -> None:
            start_s = time.perf_counter()
            save(folder / "saved", 1, 1)
            (folder / f"half{rank}").write_text(str(time.perf_counter() - start_s))
            (folder / f"half{rank}").rename(folder / f"ready{rank}")
            save(folder / "saved", 2, 2, mode)

        pids = start_ranks(folder, body)
        while not (folder / f"ready{chosen}").exists():
            time.sleep(0.002)
        time.sleep(share * float((folder / f"ready{chosen}").read_text()))
        os.kill(pids[chosen], number)
        if number == signal.SIGSTOP:
            end([pid for pid in pids if pid != pids[chosen]])
            os.kill(pids[chosen], signal.SIGKILL)
        end([pids[chosen]] if number == signal.SIGSTOP else pids)


def missing(base: Path) -> None:
    """One rank ends when all have come to a save, before it connects to the others."""

    def body(rank: int) -> None:
        save(base / "saved", 1, 1)
        collective.CONNECT_S = 1.0
        if rank == 1:
            dist.ProcessGroupGloo = lambda *_: os._exit(0)  # type: ignore[misc]
        save(base / "saved", 2, 2)

    end(start_ranks(base, body))


def disk_full(base: Path) -> None:
    def body(rank: int) -> None:
        save(base / "saved", 1, 1)
        if rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (ELEMENTS, ELEMENTS))
        save(base / "saved", 2, 2)

    end(start_ranks(base, body))


def racing(base: Path) -> None:
    """Two runs of several ranks save into one folder again and again."""

    def body(rank: int) -> None:
        for iteration in range(1, 4):
            save(base / "saved", iteration, iteration)

    end([*start_ranks(base, body, "A"), *start_ranks(base, body, "B")])


def main(base: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    collective.ANSWER_S, collective.ARRIVE_S, collective.CONNECT_S = 4.0, 6.0, 3.0
    api.save(base / "warm-up", 1, tensors=values(0, 1), plain={})
    signalled(base / "killed", signal.SIGKILL, POINTS)
    signalled(base / "interrupted", signal.SIGINT, POINTS)
    signalled(base / "stopped", signal.SIGSTOP, 2)
    missing(base / "missing")
    disk_full(base / "full")
    racing(base / "racing")


# --- the tests ---


@pytest.fixture(scope="module")
def accidents() -> Iterator[Path]:
    """The folders that the helper process left, by the way of failing."""
    with tempfile.TemporaryDirectory() as base:
        subprocess.run([sys.executable, __file__, base], check=True, timeout=240)
        yield Path(base)


def outcomes(folder: Path, name: str = "") -> dict[int, str]:
    """What became of each rank that was left to tell it, soon enough."""
    found = {}
    for rank in range(SIZE):
        file = folder / f"rank{name}{rank}"
        if file.exists():
            seconds, _, found[rank] = file.read_text().partition("\n")
            assert float(seconds) < SOON_S
    return found


def check_left(folder: Path) -> int:
    """Whatever happened, a whole checkpoint is named, and loads; returns which."""
    path = api.latest(folder / "saved")
    assert path is not None
    return read_value(path)


@pytest.mark.parametrize("way", ["killed", "stopped", "interrupted"])
def test_ranks_without_one_of_them_stop_soon_and_leave_a_whole_checkpoint(accidents: Path, way: str) -> None:
    ends: list[str] = []
    for folder in sorted((accidents / way).iterdir()):
        found = outcomes(folder)
        value = check_left(folder)
        assert value == 2 or "saved" not in found.values()
        assert len(found) >= SIZE - 1
        ends += found.values()
        assert all(end in ("saved", "interrupted") or end.startswith("CheckpointError: cannot save") for end in ends)
    told = [end for end in ends if end.startswith("CheckpointError")]
    assert told or way != "killed", "no save was hit half-way: the times are off"
    causes = ("KeyboardInterrupt", "cancelled", "another rank ended or did not answer")
    assert all(any(cause in end for cause in causes) for end in told)


def test_ranks_without_one_of_them_do_not_connect_and_say_so(accidents: Path) -> None:
    found = outcomes(accidents / "missing")
    assert sorted(found) == [0, 2]
    assert all("cannot connect the ranks" in end and "another rank ended" in end for end in found.values())
    assert check_left(accidents / "missing") == 1


def test_a_full_disk_under_one_rank_stops_all_with_its_cause(accidents: Path) -> None:
    found = outcomes(accidents / "full")
    assert len(found) == SIZE
    assert len(set(found.values())) == 1
    assert "why: rank 2: " in found[0]
    assert "File too large" in found[0]
    assert "ulimit -f" in found[0]
    assert check_left(accidents / "full") == 1
    assert not list((accidents / "full" / "saved").glob(".iter*"))


def test_runs_that_race_for_a_folder_leave_it_whole(accidents: Path) -> None:
    folder = accidents / "racing"
    for name in "AB":
        found = outcomes(folder, name)
        assert len(set(found.values())) == 1
        assert found[0] == "saved" or "another process is saving there" in found[0]
    assert check_left(folder) in (1, 2, 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
