"""Locks of folders that several processes write into. A lock goes with the process that holds it, however that ends.

They are flock's, which Linux carries to other machines over NFS and, where it is mounted so, Lustre. No torch in here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

from hostward.errors import ConfigError

log = logging.getLogger("hostward")

CLAIM = ".run.lock"
_KNOWS_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_POLL_S = 1.0


def lock(descriptor: int, folder: Path) -> bool:
    """Lock an open file of the folder; False: another process (or thread) holds the lock. Where the file system keeps
    none, that is said, and the caller goes on as if it had it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _KNOWS_NO_LOCKS:
            raise
        log.warning(
            "the file system of %s keeps no locks (%s): nothing keeps other runs out", folder, error.strerror or error
        )
    return True


def unlock(descriptor: int) -> None:
    """Let go of a lock. A child that was forked meanwhile has the file open too, so closing it is not enough."""
    with suppress(OSError):  # of a file system that keeps none
        fcntl.flock(descriptor, fcntl.LOCK_UN)


class Claim:
    """A folder that a run has to itself, from before it looks what is there until it is over.

    As a context, an error in its body leaves the folder as it was before.

    Args:
        told: what errors call it, as in "checkpoint.save=run".
        folder: made if it is missing.
        patience_s: for so long another run that has it is waited for.

    Raises:
        ConfigError: another run has it.
        OSError: it cannot be made or written.
    """

    def __init__(self, told: str, folder: Path, *, patience_s: float = 0.0) -> None:
        self._descriptor: int | None = None
        self._folder, self._path = folder, folder / CLAIM
        self._made_folder, self._made_file = not folder.exists(), not self._path.exists()
        until_s, waited = time.monotonic() + patience_s, False
        while (descriptor := self._locked()) is None:
            if time.monotonic() >= until_s:
                raise ConfigError(
                    f"{told} is the folder of a run that goes on",
                    why=f"{self._holder()}, writes there; each would outdate what the other one saves",
                    fix="name another folder, or wait until that run is over",
                )
            if not waited:
                log.info("%s: waiting up to %.0f s for %s, to let go of it", told, patience_s, self._holder())
            waited = True
            time.sleep(_POLL_S)
        self._descriptor = descriptor
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}, since {since}\n".encode())

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._descriptor is not None:
            with suppress(OSError):  # what lies in it by now stays
                if self._made_file:
                    self._path.unlink()
                if self._made_folder:
                    self._folder.rmdir()
        self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Others may have the folder. Again: nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            unlock(descriptor)
            os.close(descriptor)

    def _locked(self) -> int | None:
        """The file of the lock, opened and locked; None where another run has it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        held = False
        try:
            # A run that is refused removes the file that it has made: whoever opened that one has a lock of nothing.
            held = lock(descriptor, self._folder) and _is(descriptor, self._path)
        finally:
            if not held:
                os.close(descriptor)
        return descriptor if held else None

    def _holder(self) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return self._path.read_text().strip() or "another run"
        return "another run"


def _is(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
