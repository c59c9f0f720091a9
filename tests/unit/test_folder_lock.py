"""A folder that one run has to itself, and what ends that."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hostward import checkpoint, folder_lock
from hostward.errors import ConfigError
from hostward.folder_lock import CLAIM, Claim

HOLD = """
import sys, time
from pathlib import Path
from hostward.folder_lock import Claim
claim = Claim("theirs", Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_POLL_S", 0.01)


def test_one_run_has_a_folder_until_it_lets_go(tmp_path: Path) -> None:
    first = Claim("mine", tmp_path / "run")
    text = rf"--run-dir x is the folder of a run that goes on\n  why: process {os.getpid()} on .*, since 20.*\n  fix: "
    for _ in range(2):
        with pytest.raises(ConfigError, match=text):
            Claim("--run-dir x", tmp_path / "run")
    first.release()
    first.release()
    with Claim("mine", tmp_path / "run"), pytest.raises(ConfigError):
        Claim("--run-dir x", tmp_path / "run")
    Claim("mine", tmp_path / "run").release()


def test_one_that_nobody_has_any_more_is_free(tmp_path: Path) -> None:
    claim = Claim("mine", tmp_path)
    del claim
    Claim("mine", tmp_path).release()


def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on"):
            Claim("mine", tmp_path)
        process.send_signal(signal.SIGKILL)
    Claim("mine", tmp_path).release()


def test_a_run_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    for folder, left in ((tmp_path / "new", False), (tmp_path, True)):
        with pytest.raises(RuntimeError), Claim("mine", folder):
            raise RuntimeError
        assert folder.exists() == left
        assert list(tmp_path.iterdir()) == []
    refused = Claim("mine", tmp_path / "new")
    (tmp_path / "new" / "something").touch()
    refused.__exit__(RuntimeError, RuntimeError(), None)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["something"]
    Claim("mine", tmp_path).release()
    with pytest.raises(RuntimeError), Claim("mine", tmp_path):
        raise RuntimeError
    assert (tmp_path / CLAIM).exists()


@pytest.mark.usefixtures("quick_polls")
def test_one_that_ends_soon_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Claim("mine", tmp_path)
    threading.Timer(0.1, first.release).start()
    with caplog.at_level(logging.INFO):
        Claim("checkpoint.save=x", tmp_path, patience_s=30).release()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("checkpoint.save=x: waiting up to 30 s for process")


@pytest.mark.usefixtures("quick_polls")
def test_a_lock_of_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run opens the file; the other, refused, removes it and lets go; a third makes it anew."""
    lock, removed = folder_lock.lock, []

    def late(descriptor: int, folder: Path) -> bool:
        if not removed:
            removed.append(None)
            (folder / CLAIM).unlink()
        return lock(descriptor, folder)

    monkeypatch.setattr(folder_lock, "lock", late)
    claim = Claim("mine", tmp_path, patience_s=30)
    with pytest.raises(ConfigError):
        Claim("theirs", tmp_path)
    claim.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """As Lustre where it is mounted without `flock`."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    Claim("mine", tmp_path).release()
    checkpoint.save(tmp_path, 1, tensors={}, plain={})
    assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000001"
    told = f"the file system of {tmp_path} keeps no locks ({os.strerror(number)}): nothing keeps other runs out"
    assert caplog.messages == [told, told]


def test_another_failure_of_the_lock_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Claim("mine", tmp_path)
