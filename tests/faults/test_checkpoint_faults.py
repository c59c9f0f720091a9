"""Saves that are killed, interrupted or run out of disk, and files that are damaged afterwards.

The saves that die do so in children of one helper process (this file, run as a program), so that torch is imported
once. A file operation is the unit of progress: Python's audit events (open, rename, mkdir, remove, ...) let a child die
at each in turn.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from hostward.checkpoint import api, files
from hostward.checkpoint.collective import Ranks
from hostward.errors import CheckpointError

EVENTS = {
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
    "fcntl.flock",
}
INTERRUPTED = 130
INTERRUPTED_FILES = {
    ("checkpoint", "collective.py"),
    ("checkpoint", "saving.py"),
    ("checkpoint", "writer.py"),
    ("torch", "serialization.py"),
}
"""Ours, and the one of torch.save."""
RANDOM_POINTS = 10
SEED = 20240607


def make_tensors(value: int, elements: int = 2_000) -> dict[str, torch.Tensor]:
    """Three tensors whose content tells which save they come from; `b` is a view of a larger storage."""
    slab = torch.full((2 * elements,), float(value))
    return {"a": torch.full((elements,), value, dtype=torch.int16), "b": slab[:elements], "step": torch.tensor(value)}


def save(directory: Path, iteration: int, value: int, elements: int = 2_000) -> Path:
    tensors = make_tensors(value, elements)
    return api.save(directory, iteration, tensors=tensors, plain={"value": value}, most_recent_k=1)


def read_value(path: Path) -> int:
    """Load a checkpoint and return the one value that all of it holds."""
    elements = api.tensor_index(path)["a"][0][0]
    into = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(0, elements).items()}
    api.load(path, into)
    values = {int(value) for tensor in into.values() for value in tensor.reshape(-1).unique()}
    values.add(int(str(api.read_plain(path)["value"])))
    assert len(values) == 1
    return values.pop()


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".") and path.name != ".save.lock"]


# --- the helper process: every save that is to die runs in a child of it ---


def run_child(body: Callable[[], object], during: Callable[[int], None] = lambda pid: None) -> int:
    """Fork, run `body`, and return the exit status: 0, INTERRUPTED, or minus the signal that ended the child."""
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
            body()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # whoever is interrupted now raises here
            status = 0
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
    during(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_event(number: int, act: Callable[[], None]) -> None:
    """From now on, `act` at the file operation of this number, before it is carried out."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == number:
                act()

    sys.addaudithook(hook)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def die_at_each_event(base: Path, iteration: int, act: Callable[[], None]) -> None:
    """In `base/N`: save iteration 1, then save `iteration` in a child that acts at its file operation N."""
    for number in range(1, 1000):
        directory = base / f"{number:03d}"
        save(directory, 1, value=1)

        def body(number: int = number, directory: Path = directory) -> None:
            at_event(number, act)
            save(directory, iteration, value=2)

        status = run_child(body)
        (directory / "status").write_text(str(status))
        if status == 0:
            return


def interrupt_each_line(base: Path) -> None:
    """In `base/N`: save iteration 1, then save iteration 2 in a child that is interrupted at the N-th line, call or
    return that its main thread comes to in a file whose name is in INTERRUPTED_FILES, until one ends otherwise.
    """
    for number in range(1, 10_000):
        directory = base / f"{number:04d}"
        save(directory, 1, value=1)

        def body(number: int = number, directory: Path = directory) -> None:
            seen = 0

            def trace(frame: FrameType, event: str, argument: object) -> Any:
                nonlocal seen
                if Path(frame.f_code.co_filename).parts[-2:] in INTERRUPTED_FILES:
                    seen += 1
                    if seen == number:
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            save(directory, 2, value=2)
            sys.settrace(None)

        status = run_child(body)
        (directory / "status").write_text(str(status))
        if status != INTERRUPTED:
            return


def die_at_random_times(base: Path, signal_number: int) -> None:
    """In `base/N`: save iteration 1, then save iteration 2 in a child that gets the signal at a random time."""
    elements = 2_000_000
    start = time.perf_counter()
    run_child(lambda: save(base / "timing", 2, value=2, elements=elements))
    save_s = time.perf_counter() - start
    shutil.rmtree(base / "timing")
    print(f"seed {SEED}, a save takes {save_s:.3f} s")
    generator = random.Random(SEED)
    for number in range(RANDOM_POINTS):
        directory = base / f"{number:03d}"
        save(directory, 1, value=1)
        delay_s = generator.uniform(0, 1.1) * save_s

        def during(pid: int, delay_s: float = delay_s) -> None:
            time.sleep(delay_s)
            os.kill(pid, signal_number)

        status = run_child(lambda directory=directory: save(directory, 2, value=2, elements=elements), during)
        (directory / "status").write_text(str(status))


def measure_memory(base: Path) -> None:
    """Write into `base/rise_bytes` by how much saving and loading 256 MiB of views raise the peak of this process."""

    def peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    slab = torch.ones(64 * 2**20)
    tensors = {str(index): slab[index * 2**20 : (index + 1) * 2**20] for index in range(64)}
    api.save(base, 0, tensors={"warm-up": torch.ones(3)}, plain={})
    before_bytes = peak_bytes()
    path = api.save(base, 1, tensors=tensors, plain={})
    after_save_bytes = peak_bytes()
    api.load(path, tensors)
    (base / "rise_bytes").write_text(f"{after_save_bytes - before_bytes} {peak_bytes() - after_save_bytes}")


def main(disk: Path, memory: Path) -> None:
    torch.set_num_threads(1)
    # Loads what the first save imports, so that no child dies in an import.
    save(memory / "warm-up", 1, value=1)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of what is imported, hundreds of times
    die_at_each_event(memory / "kill-new", 2, kill_self)
    die_at_each_event(memory / "kill-same", 1, kill_self)
    die_at_each_event(memory / "interrupt-new", 2, interrupt)
    die_at_each_event(memory / "interrupt-same", 1, interrupt)
    interrupt_each_line(memory / "interrupt-line")
    die_at_random_times(disk / "kill-time", signal.SIGKILL)
    die_at_random_times(disk / "interrupt-time", signal.SIGINT)
    measure_memory(disk / "memory")


# --- the tests ---


@pytest.fixture(scope="module")
def deaths() -> Iterator[dict[str, Path]]:
    """The folders that the helper process left, by the way of dying; in each, one folder per save that died."""
    # A process that dies, unlike a machine, takes no written byte with it: hundreds of saves may skip the disk.
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir=in_memory) as memory:
        subprocess.run([sys.executable, __file__, disk, memory], check=True, timeout=120)
        yield {path.name: path for base in (disk, memory) for path in Path(base).iterdir()}


def check_after_death(directory: Path, iterations: set[str]) -> tuple[int, int]:
    """Check that the older or the newer save loads, whole, and that the next save works; return status and value."""
    status = int((directory / "status").read_text())
    path = api.latest(directory)
    assert path is not None
    value = read_value(path)
    assert value in (1, 2)
    if not path.name.startswith("."):
        assert path.name in iterations
    if status == 0:
        assert value == 2
    if status != -signal.SIGKILL:
        assert leftovers(directory) == [] or value == 2
    after = save(directory, 3, value=3)
    assert api.latest(directory) == after
    assert read_value(after) == 3
    assert leftovers(directory) == []
    return status, value


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("kill-new", -signal.SIGKILL),
        ("kill-same", -signal.SIGKILL),
        ("interrupt-new", INTERRUPTED),
        ("interrupt-same", INTERRUPTED),
    ],
)
def test_t54_a_save_that_dies_at_any_file_operation_leaves_a_whole_checkpoint(
    deaths: dict[str, Path], way: str, expected: int
) -> None:
    folders = sorted(deaths[way].iterdir())
    iterations = {"iter_0000001", "iter_0000002"} if way.endswith("new") else {"iter_0000001"}
    outcomes = [check_after_death(folder, iterations) for folder in folders]
    statuses = [status for status, _ in outcomes]
    assert statuses == [expected] * (len(folders) - 1) + [0]
    values = [value for _, value in outcomes]
    assert values == sorted(values), "the old checkpoint until some moment, the new one from then on"
    assert values.count(1) > 10


@pytest.mark.parametrize(("way", "expected"), [("kill-time", -signal.SIGKILL), ("interrupt-time", INTERRUPTED)])
def test_t54_a_save_that_dies_at_a_random_time_leaves_a_whole_checkpoint(
    deaths: dict[str, Path], way: str, expected: int
) -> None:
    folders = sorted(deaths[way].iterdir())
    assert len(folders) == RANDOM_POINTS
    outcomes = [check_after_death(folder, {"iter_0000001", "iter_0000002"}) for folder in folders]
    assert {status for status, _ in outcomes} <= {expected, 0}
    assert (expected, 1) in outcomes, "no save died half-way: the times are off"


def test_t54_a_save_that_is_interrupted_at_any_line_ends_and_leaves_a_whole_checkpoint(
    deaths: dict[str, Path],
) -> None:
    folders = sorted(deaths["interrupt-line"].iterdir())
    outcomes = [check_after_death(folder, {"iter_0000001", "iter_0000002"}) for folder in folders]
    assert [status for status, _ in outcomes] == [INTERRUPTED] * (len(folders) - 1) + [0]
    assert {value for _, value in outcomes} == {1, 2}


def test_an_interrupt_right_behind_the_making_of_the_folder_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, value=1)
    together = Ranks.together

    def interrupted(ranks: Ranks, *arguments: Any, **options: Any) -> Any:
        found = together(ranks, *arguments, **options)
        if leftovers(tmp_path):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Ranks, "together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, value=2)
    assert leftovers(tmp_path) == []
    monkeypatch.undo()
    assert read_value(save(tmp_path, 2, value=2)) == 2


def test_what_cannot_be_removed_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "clear_leftovers", refused)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(tmp_path, 1, value=1)


def test_a_save_that_finds_another_one_leaves_its_files(tmp_path: Path) -> None:
    save(tmp_path, 1, value=1)
    other = tmp_path / ".iter_0000002.partial-0123abcd"
    with files.locked(tmp_path):
        other.mkdir()
        with pytest.raises(CheckpointError, match="another process is saving there"):
            save(tmp_path, 3, value=3)
        assert other.is_dir()
    save(tmp_path, 3, value=3)
    assert not other.exists()


def test_t58_neither_save_nor_load_holds_a_second_copy(deaths: dict[str, Path]) -> None:
    rise_save_bytes, rise_load_bytes = map(int, (deaths["memory"] / "rise_bytes").read_text().split())
    # One tensor of 4 MiB, and a chunk of 16 MiB for each of up to 8 threads.
    threads = min(8, len(os.sched_getaffinity(0)))
    assert rise_save_bytes < (24 + 16 * threads) * 2**20
    assert rise_load_bytes < (24 + 16 * threads) * 2**20
    assert threads > 7 or rise_save_bytes < 100 * 2**20, "the check must be able to fail: a second copy is 256 MiB"


@contextlib.contextmanager
def mounted(point: Path, options: str) -> Iterator[Path]:
    """A small file system in memory; skips the test where it cannot be mounted."""
    point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def check_full_disk(directory: Path, text: str) -> None:
    """Save until the disk is full: the error is typed, training state and the last checkpoint are whole."""
    save(directory, 1, value=1)
    tensors = make_tensors(2, elements=3_000_000)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=text):
        api.save(directory, 2, tensors=tensors, plain={})
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)
    assert leftovers(directory) == []
    path = api.latest(directory)
    assert path == directory / "iter_0000001"
    assert read_value(path) == 1
    assert save(directory, 2, value=2) == api.latest(directory)


def test_t59_disk_full(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        check_full_disk(
            disk,
            r"cannot save checkpoint .*iter_0000002\n.*No space left on device.*\n"
            r".*free space on that disk, or save into a folder on another one",
        )


@pytest.mark.parametrize("limit_bytes", [500, 4_000_000, 12_000_000])
def test_t59_file_size_limit(tmp_path: Path, limit_bytes: int) -> None:
    save(tmp_path, 1, value=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot save .*iter_0000002\n.*File too large.*\n.*file size limit"):
            save(tmp_path, 2, value=2, elements=3_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(tmp_path) == []
    path = api.latest(tmp_path)
    assert path is not None
    assert read_value(path) == 1


def test_no_permission_to_write(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        save(disk, 1, value=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match=r"cannot save .*\n.*Read-only file system.*\n.*mounted for writing"):
            save(disk, 2, value=2)
        path = api.latest(disk)
        assert path is not None
        assert read_value(path) == 1


def test_a_save_folder_that_is_a_file_or_lies_under_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot save .*file/iter_0000001\n.*File exists.*\n.*remove the file"):
        save(tmp_path / "file", 1, value=1)
    with pytest.raises(CheckpointError, match=r"cannot save .*\n.*Not a directory.*\n.*parents are all folders"):
        save(tmp_path / "file" / "sub", 1, value=1)
    with pytest.raises(CheckpointError, match=r"cannot read checkpoints in .*file\n.*Not a directory"):
        api.latest(tmp_path / "file")


FILES = [".metadata", "__0_0.distcp", "plain.json", "manifest.json"]


def check_refused(path: Path, text: str) -> None:
    """`verify` and `load` refuse, and `load` touches nothing."""
    with pytest.raises(CheckpointError, match=text):
        api.verify(path)
    into = make_tensors(-1)
    with pytest.raises(CheckpointError, match=text):
        api.load(path, into)
    assert all(bool((tensor == -1).all()) for tensor in into.values())


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_guarded_against_flipped_bits(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1, value=1)
    content = (path / name).read_bytes()
    generator = random.Random(SEED)
    text = "manifest.json" if name == "manifest.json" else rf"file {name} is damaged in chunk 1 of 1\n.*bytes 0 to \d+ "
    for _ in range(25):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        (path / name).write_bytes(flipped)
        check_refused(path, text)
    (path / name).write_bytes(content)
    assert read_value(path) == 1


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_guarded_against_truncation_growth_and_loss(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1, value=1)
    content = (path / name).read_bytes()
    for changed in (content[:-1], content[: len(content) // 2], b"", content + b"x"):
        (path / name).write_bytes(changed)
        text = "manifest.json" if name == "manifest.json" else f"file {name} has {len(changed)} bytes instead of"
        check_refused(path, text)
    (path / name).unlink()
    check_refused(path, "no manifest.json" if name == "manifest.json" else f"file {name} is missing")


def test_damage_is_named_by_file_and_chunk_with_the_way_out(tmp_path: Path) -> None:
    for iteration in (1, 2):
        tensors = make_tensors(iteration, elements=9_000_000)
        path = api.save(tmp_path, iteration, tensors=tensors, plain={})
    data = path / "__0_0.distcp"
    with data.open("r+b") as stream:
        stream.seek(2 * 16 * 2**20 + 5)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))
    with pytest.raises(CheckpointError) as caught:
        api.verify(path)
    size_bytes = data.stat().st_size
    assert caught.value.what == f"checkpoint {path}: file __0_0.distcp is damaged in chunk 3 of 4"
    assert caught.value.why.startswith(f"bytes 33554432 to {min(50331648, size_bytes)} have another checksum")
    cure = f"to go on from the newest complete one before it, write iter_0000001 into {tmp_path / 'latest'}"
    assert caught.value.fix == cure


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
