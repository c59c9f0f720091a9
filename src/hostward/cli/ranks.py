"""What a command does differently as one of several processes."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def is_first() -> bool:
    """Whether this process tells what all have to tell."""
    return os.environ.get("RANK", "0") == "0"


def prefix() -> str:
    """What lines of other ranks than the first begin with."""
    return "" if is_first() else f"rank {os.environ.get('RANK')}: "


def met() -> bool:
    """Whether this process belongs to a process group."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def end_at_once(code: int) -> NoReturn:
    """End this rank, so that the launcher ends the others. An interpreter that ends in the ordinary way lets go of
    communicators, and may wait there for ranks that wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
