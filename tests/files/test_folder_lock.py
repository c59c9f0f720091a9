"""A folder that one run has to itself, and what ends that."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hostward.checkpoint import api
from hostward.errors import ConfigError
from hostward.files import folder_lock
from hostward.files.folder_lock import FILE, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from hostward.files.folder_lock import FolderLock
lock = FolderLock("theirs", Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_POLL_S", 0.01)
    monkeypatch.setattr(folder_lock, "_ENDING_S", 0.0)


def test_one_run_has_a_folder_until_it_lets_go(tmp_path: Path) -> None:
    first = FolderLock("mine", tmp_path / "run")
    text = rf"--run-dir x is the folder of a run that goes on\n  why: process {os.getpid()} on .*, since 20.*\n  fix: "
    for _ in range(2):
        with pytest.raises(ConfigError, match=text):
            FolderLock("--run-dir x", tmp_path / "run")
    first.release()
    first.release()
    with FolderLock("mine", tmp_path / "run"), pytest.raises(ConfigError):
        FolderLock("--run-dir x", tmp_path / "run")
    FolderLock("mine", tmp_path / "run").release()


def test_one_that_nobody_has_any_more_is_free(tmp_path: Path) -> None:
    claim = FolderLock("mine", tmp_path)
    del claim
    FolderLock("mine", tmp_path).release()


def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on"):
            FolderLock("mine", tmp_path)
        process.send_signal(signal.SIGKILL)
    FolderLock("mine", tmp_path).release()


def test_a_run_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "new" / "and" / "more", tmp_path):
        with pytest.raises(RuntimeError), FolderLock("mine", folder):
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []
    refused = FolderLock("mine", tmp_path / "new")
    (tmp_path / "new" / "something").touch()
    refused.__exit__(RuntimeError, RuntimeError(), None)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["something"]
    FolderLock("mine", tmp_path).release()
    with pytest.raises(RuntimeError), FolderLock("mine", tmp_path):
        raise RuntimeError
    assert (tmp_path / FILE).exists()


def sleeps(monkeypatch: pytest.MonkeyPatch, *calls: Callable[[], None]) -> list[float]:
    """What happens at each time that is slept; returns how long."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if len(slept) < len(calls):
            calls[len(slept)]()
        slept.append(seconds)

    monkeypatch.setattr(folder_lock.time, "sleep", sleep)
    return slept


def test_a_process_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: the run that was started behind `kill -9` was refused."""
    monkeypatch.setattr(folder_lock, "_ENDING_S", 30.0)
    first = FolderLock("mine", tmp_path)
    slept = sleeps(monkeypatch, lambda: None, first.release)
    with caplog.at_level(logging.INFO):
        FolderLock("checkpoint.save=x", tmp_path).release()
    assert len(slept) == 2
    told = f"checkpoint.save=x: waiting up to 30 s for process {os.getpid()} on {platform.node()}, since "
    assert [message.startswith(told) for message in caplog.messages] == [True]


def test_a_machine_that_may_be_gone_is_waited_for_as_long_as_its_lock_may_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run may have been started again here. But ranks do not wait for each other so long."""
    monkeypatch.setattr(platform, "node", lambda: "another-machine")
    first = FolderLock("mine", tmp_path)
    monkeypatch.undo()
    slept = sleeps(monkeypatch, first.release)
    FolderLock("mine", tmp_path).release()
    assert len(slept) == 1
    with monkeypatch.context() as patched:
        patched.setattr(platform, "node", lambda: "another-machine")
        first = FolderLock("mine", tmp_path)
    text = rf"on another-machine, since .*\n  fix: .*; if that machine is gone for good, remove {tmp_path}/.run.lock"
    with pytest.raises(ConfigError, match=text):
        FolderLock("mine", tmp_path, most_s=0.0)
    first.release()


def test_a_lock_of_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run opens the file; the other, refused, removes it and lets go; a third makes it anew. The first has not been
    refused for it: seen red.
    """
    lock, removed = folder_lock.lock, []

    def late(descriptor: int, folder: Path) -> bool:
        if not removed:
            removed.append(None)
            (folder / FILE).unlink()
        return lock(descriptor, folder)

    monkeypatch.setattr(folder_lock, "lock", late)
    mine = FolderLock("mine", tmp_path)
    with pytest.raises(ConfigError):
        FolderLock("theirs", tmp_path)
    mine.release()


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, removed = os.open, []

    def late(path: Path, *arguments: int) -> int:
        if not removed:
            removed.append(None)
            path.parent.rmdir()
        return opened(path, *arguments)

    monkeypatch.setattr(folder_lock.os, "open", late)
    FolderLock("mine", tmp_path / "run").release()
    assert (tmp_path / "run" / FILE).exists()


def test_a_folder_that_takes_no_files_is_not_asked_for_ever() -> None:
    with pytest.raises(FileNotFoundError):
        FolderLock("mine", Path("/proc/self"))


def test_a_child_that_ends_keeps_the_lock_of_its_parent(tmp_path: Path) -> None:
    """Seen red: it let go of it, and another run came in."""
    mine = FolderLock("mine", tmp_path)
    child = os.fork()
    if child == 0:
        mine.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConfigError):
        FolderLock("theirs", tmp_path)
    mine.release()


def test_the_file_of_another_user_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one who trained before in a folder that a group shares: it may be read only."""
    opened = os.open

    def refuses(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, mode)

    FolderLock("theirs", tmp_path).release()
    before = (tmp_path / FILE).read_text()
    monkeypatch.setattr(folder_lock.os, "open", refuses)
    mine = FolderLock("mine", tmp_path)
    with pytest.raises(ConfigError):
        FolderLock("theirs", tmp_path)
    mine.release()
    assert (tmp_path / FILE).read_text() == before
    (tmp_path / FILE).unlink()
    with pytest.raises(PermissionError):
        FolderLock("mine", tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """As Lustre where it is mounted without `flock`."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    FolderLock("mine", tmp_path).release()
    api.save(tmp_path, 1, tensors={}, plain={})
    assert api.latest(tmp_path) == tmp_path / "iter_0000001"
    told = f"the file system of {tmp_path} supports no locks ({os.strerror(number)}): other runs are not kept out"
    assert caplog.messages == [told]


def test_another_failure_of_the_lock_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        FolderLock("mine", tmp_path)
