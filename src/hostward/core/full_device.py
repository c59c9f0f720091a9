"""What torch's message of a full device says, and the fix that follows from it. No torch."""

from __future__ import annotations

import os
import re

from hostward.core.units import GIB, KIB, MIB, size

_UNITS = {"bytes": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB}
SIZE = r"(\d+(?:\.\d+)?) (bytes|kib|mib|gib)"
"""A size in a message in lower case: number and unit, for `bytes_of`."""
# Torch 2.1 wrote "capacty".
OF_TORCH = re.compile(rf"tried to allocate {SIZE}\..*? total capaci?ty of {SIZE} of which {SIZE} is free")
IN_PIECES = re.compile(rf"{SIZE} is reserved by pytorch but unallocated")
ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Environment variables with options of torch's allocator; the second one is the name before torch 2.9."""
EXPANDABLE = "expandable_segments:True"
"""The option with which the allocator's memory is one piece that grows."""


def bytes_of(number: str, unit: str) -> int:
    """Return the bytes of a size that `SIZE` has found."""
    return round(float(number.replace(",", "")) * _UNITS[unit])


def fix_of(error: BaseException, otherwise: str) -> str:
    """Return the fix for a device without room: the allocator's option where its pieces, and what is free, add up to
    what was asked; `otherwise` where they do not, or the option is set.
    """
    message = str(error).lower()
    asked, pieces = OF_TORCH.search(message), IN_PIECES.search(message)
    if asked is None or pieces is None or any(EXPANDABLE.lower() in _options(name) for name in ALLOCATOR_VARIABLES):
        return otherwise
    asked_bytes, free_bytes = bytes_of(*asked.group(1, 2)), bytes_of(*asked.group(5, 6))
    pieces_bytes = bytes_of(*pieces.group(1, 2))
    if pieces_bytes + free_bytes < asked_bytes:
        return otherwise
    return (
        f"set {ALLOCATOR_VARIABLES[0]}={EXPANDABLE} before the program starts: torch keeps {size(pieces_bytes)} "
        f"in pieces that are too small; or {otherwise}"
    )


def _options(variable: str) -> str:
    return os.environ.get(variable, "").replace(" ", "").lower()
