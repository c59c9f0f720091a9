"""Adapt a command to being one of several processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from hostward.errors import HostwardError, RankError

PATIENCE_S = 20.0
"""Seconds that a rank waits for the first rank of its machine to report an error of the command line."""
GRACE_S = 1.0
"""Seconds that the first rank, after reporting, lets others find the same error before its exit makes the launcher end
them.
"""
AS_THE_FIRST = "as the first rank says"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Names the file whose content torchrun prints at the end, below its own lines."""


def is_first() -> bool:
    """Return whether this process reports what all ranks have to report."""
    return os.environ.get("RANK", "0") == "0"


def alone() -> bool:
    """Return whether this process was started alone."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def prefix() -> str:
    """Return the prefix of lines of other ranks than the first."""
    return "" if is_first() else f"rank {os.environ.get('RANK')}: "


@contextmanager
def same_errors_on_all_ranks() -> Iterator[None]:
    """Mark errors of the body as found by every rank, as are wrong options or a wrong number of processes."""
    try:
        yield
    except HostwardError as error:
        error.everywhere = True
        raise


def report_error(text: str) -> None:
    """Print an error on stderr, and have torchrun repeat it at its end, after its own thirty lines."""
    print(f"{prefix()}{text}", file=sys.stderr)
    leave_for_launcher(text)


def leave_for_launcher(text: str) -> None:
    """Have torchrun print this for this rank at its end, instead of how to enable a traceback."""
    file = os.environ.get(_ERROR_FILE)
    if file:
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):  # it was printed on stderr
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def reports_error(everywhere: bool) -> bool:
    """Return whether this rank reports an error; `everywhere`: all of them have it, so that one report is enough.

    Before they have met, the first rank of each machine reports, since only ranks of one machine surely have the same
    input. The others wait until the launcher ends them, as it does when that one has ended, and then end with their own
    exit code. If nothing ends them they report it themselves.
    """
    if not everywhere or alone():
        return True
    first = is_first() if met() else os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        return True
    if met() or _ended_by_launcher():
        leave_for_launcher(AS_THE_FIRST)
        return False
    return True


def _ended_by_launcher() -> bool:
    """Wait for SIGTERM up to PATIENCE_S, and return whether it has come."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return signal.sigtimedwait({signal.SIGTERM}, PATIENCE_S) is not None
    except KeyboardInterrupt:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_others() -> None:
    """Wait until every rank has reached the error that all of them have.

    A rank that exits makes the launcher end the rest, also the one that is about to report.
    """
    if alone():
        return
    if not met():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            time.sleep(GRACE_S)
        return
    import torch.distributed as dist

    with suppress(RuntimeError):  # another rank is gone, so there is nothing to wait for
        dist.all_gather_object([None] * dist.get_world_size(), None)


def met() -> bool:
    """Return whether this process belongs to a process group."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def lost_rank_error(error: BaseException) -> RankError | None:
    """Return the error for a collective that failed because another rank is gone; None for any other error."""
    if not met():
        return None
    import torch.distributed as dist

    text = str(error).partition("\n")[0]
    # Gloo has no exception class for it, and its message names the place in its source.
    if not (isinstance(error, dist.DistNetworkError) or (isinstance(error, RuntimeError) and "/gloo/" in text)):
        return None
    slow = "; for one that is only slow, a larger dist.distributed_timeout_minutes" if "imed out" in text else ""
    return RankError(
        "another rank ended or did not answer",
        why=text.partition("] ")[2].partition(". ")[0] or text,
        fix=f"see the output of the other ranks{slow}; checkpoints that were complete are intact",
    )


def end_at_once(code: int) -> NoReturn:
    """End this rank; if it failed, the launcher then ends the others.

    An interpreter that exits normally releases communicators, and may then wait for ranks that wait for this one; and
    backend threads that want the GIL then are ended in the middle of C++, which aborts the process (seen with gloo,
    after a PASS).
    """
    with suppress(BrokenPipeError):  # as in `hostward train | head`
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
