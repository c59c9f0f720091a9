"""What a command does differently as one of several processes."""

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
"""For so long a rank leaves it to the first of its machine to tell what is wrong with the command line."""
GRACE_S = 1.0
"""For so long that one, having told it, lets others find the same before its end makes the launcher end them."""
AS_THE_FIRST = "as the first rank says"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""What a rank writes there torchrun prints of it at the end, below its own lines."""


def is_first() -> bool:
    """Whether this process tells what all have to tell."""
    return os.environ.get("RANK", "0") == "0"


def alone() -> bool:
    """Whether this process was started as the only one."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def prefix() -> str:
    """What lines of other ranks than the first begin with."""
    return "" if is_first() else f"rank {os.environ.get('RANK')}: "


@contextmanager
def alike() -> Iterator[None]:
    """What the body finds wrong with the words of the command line and the number of processes, every rank finds."""
    try:
        yield
    except HostwardError as error:
        error.everywhere = True
        raise


def tell(text: str) -> None:
    """Say an error on stderr, and have torchrun repeat it at its end: its own thirty lines come in between."""
    print(f"{prefix()}{text}", file=sys.stderr)
    leave_for_launcher(text)


def leave_for_launcher(text: str) -> None:
    """Have torchrun say this of this rank at its end, instead of how to enable a traceback."""
    file = os.environ.get(_ERROR_FILE)
    if file:
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):  # it has been said on stderr
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def tells(everywhere: bool) -> bool:
    """Whether this rank tells an error; `everywhere`: all of them have it, and one need tell it.

    Before they have met, that is the first of each machine, for only what one machine was given is surely alike. The
    others wait until the launcher ends them, as it does when that one has ended, and then end with their own exit code.
    Where nothing ends them they tell it themselves.
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
    """Wait for SIGTERM, for as long as this rank is patient. Returns whether it has come."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return signal.sigtimedwait({signal.SIGTERM}, PATIENCE_S) is not None
    except KeyboardInterrupt:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_others() -> None:
    """Wait until every rank has come to the error that all of them have: one that ends has the launcher end the rest,
    also the one that is about to tell it.
    """
    if alone():
        return
    if not met():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            time.sleep(GRACE_S)
        return
    import torch.distributed as dist

    with suppress(RuntimeError):  # another one is gone: this one has nothing to wait for
        dist.all_gather_object([None] * dist.get_world_size(), None)


def met() -> bool:
    """Whether this process belongs to a process group."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def of_lost_rank(error: BaseException) -> RankError | None:
    """What to tell of a collective that failed because another rank is gone; None for any other error."""
    if not met():
        return None
    import torch.distributed as dist

    text = str(error).partition("\n")[0]
    # Gloo has no class of its own for it, and names the place in its source.
    if not (isinstance(error, dist.DistNetworkError) or (isinstance(error, RuntimeError) and "/gloo/" in text)):
        return None
    slow = "; for one that is only slow, a larger dist.distributed_timeout_minutes" if "imed out" in text else ""
    return RankError(
        "another rank ended or did not answer",
        why=text.partition("] ")[2].partition(". ")[0] or text,
        fix=f"see the output of the other ranks{slow}; checkpoints that were complete are intact",
    )


def end_at_once(code: int) -> NoReturn:
    """End this rank; one that failed so that the launcher ends the others. An interpreter that ends in the ordinary way
    lets go of communicators, and may wait there for ranks that wait for this one; and threads of a backend that want
    Python's lock then are ended in the middle of C++, which aborts the process (seen with gloo, behind a PASS).
    """
    with suppress(BrokenPipeError):  # as in `hostward train | head`
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
