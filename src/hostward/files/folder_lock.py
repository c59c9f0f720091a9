"""Lock folders that several processes write into; a lock ends with the process that holds it.

The locks are flock's: they hold on one machine, and over NFS and Lustre on all machines where these are mounted so. No
torch in here.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import platform
import re
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

from hostward.errors import ConfigError

log = logging.getLogger("hostward")

FILE = ".run.lock"
_KNOWS_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_POLL_S = 0.5
_ENDING_S = 5.0
"""Grace period: a killed process frees its memory before its locks."""
_LEASE_S = 120.0
"""Longest time for which a file system may keep a lock of another machine that is gone (NFS 4: 90 s)."""


def lock(descriptor: int, folder: Path) -> bool:
    """Lock an open file of the folder; return False if another process (or thread) holds the lock.

    Where the file system supports no locks, a warning is logged and the caller goes on as if it had the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _KNOWS_NO_LOCKS:
            raise
        _tell(folder, error.strerror or str(error))
    return True


@functools.cache
def _tell(folder: Path, reason: str) -> None:
    """Warn once per reason."""
    log.warning("the file system of %s supports no locks (%s): other runs are not kept out", folder, reason)


def unlock(descriptor: int) -> None:
    """Release a lock explicitly: a child that was forked meanwhile has the file open too, so closing is not enough."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)


class FolderLock:
    """Reserve a folder for one run, from before the run reads its contents until it is over.

    Another run that holds the folder may be ending: it is waited for, for seconds if it is a process of this machine,
    and for as long as a file system may keep its lock if it is one of another machine.

    As a context, an error in its body leaves the folder as it was before.

    Args:
        told: the folder's name in errors, as in "checkpoint.save=run".
        folder: made if it is missing.
        most_s: longest time to wait, in seconds.

    Raises:
        ConfigError: another run has it.
        OSError: it cannot be made or written.
    """

    def __init__(self, told: str, folder: Path, *, most_s: float = _LEASE_S) -> None:
        self._descriptor: int | None = None
        self._process = os.getpid()
        self._folder, self._path = folder, folder / FILE
        self._made_folders = [f for f in (folder, *folder.parents) if not f.exists()]
        self._made_file = not self._path.exists()
        begun_s, waited = time.monotonic(), False
        while (descriptor := self._locked()) is None:
            holder, elsewhere = self._holder()
            patience_s = min(most_s, _LEASE_S if elsewhere else _ENDING_S)
            if time.monotonic() - begun_s >= patience_s:
                gone = f"; if that machine is gone for good, remove {self._path}" if elsewhere else ""
                raise ConfigError(
                    f"{told} is the folder of a run that goes on",
                    why=f"{holder}, writes there; each would outdate what the other one saves",
                    fix=f"name another folder, or wait until that run is over{gone}",
                )
            if not waited:
                log.info("%s: waiting up to %.0f s for %s to release it", told, patience_s, holder)
            waited = True
            time.sleep(_POLL_S)
        self._descriptor = descriptor
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        with suppress(OSError):  # a full disk, or another user's file: then the holder is not recorded
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {self._process} on {platform.node()}, since {since}\n".encode())

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.leave_as_found()
        self.release()

    def leave_as_found(self) -> None:
        """Remove what the lock has made, unless something else is in it, and release the folder."""
        if self._descriptor is not None:
            with suppress(OSError):  # its contents stay
                if self._made_file:
                    self._path.unlink()
                for folder in self._made_folders:
                    folder.rmdir()
        self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Release the folder to others; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if os.getpid() == self._process:  # not a forked child, which shares the lock
                unlock(descriptor)
            os.close(descriptor)

    def _locked(self) -> int | None:
        """Return the lock file, opened and locked; None where another run holds it."""
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = self._opened()
            except FileNotFoundError:
                if self._folder.is_dir():  # a folder that cannot be written
                    raise
                continue  # a run that raised has removed it
            held = False
            try:
                if not lock(descriptor, self._folder):
                    return None
                # A run that raised removes the file too: a lock of that removed file protects nothing.
                held = _is(descriptor, self._path)
            finally:
                if not held:
                    os.close(descriptor)
            if held:
                return descriptor

    def _opened(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            # The file is another user's. Most file systems lock one that is open for reading as well.
            if not self._path.exists():
                raise
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _holder(self) -> tuple[str, bool]:
        """Return who holds the lock, and whether that is a process of another machine."""
        text = ""
        with suppress(OSError, UnicodeDecodeError):
            text = self._path.read_text().strip()
        found = re.match(r"process \d+ on (.*), since ", text)
        return text or "another run", found is not None and found[1] != platform.node()


def _is(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
