"""What a command does differently as one of several processes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from hostward.errors import RankError


def is_first() -> bool:
    """Whether this process tells what all have to tell."""
    return os.environ.get("RANK", "0") == "0"


def alone() -> bool:
    """Whether this process was started as the only one."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def prefix() -> str:
    """What lines of other ranks than the first begin with."""
    return "" if is_first() else f"rank {os.environ.get('RANK')}: "


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
