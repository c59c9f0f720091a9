"""Copy host memory by several threads without the GIL, and join fp32 main weights from their halves meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostward.errors import ConfigError
from hostward.kernels.cpu.library import CopyRange, Isa, check, load
from hostward.kernels.cpu.operand import Memory, host_operand, require_threads

_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1}
"""Bytes of an element."""


@dataclass(frozen=True)
class Copy:
    """Describe the copy of one contiguous run of elements.

    Attributes:
        into: fp32, bf16, fp16 or uint8; written. Overlaps nothing that the same call writes or reads.
        data: as many elements; of the same dtype, or with `low` bf16.
        low: as many elements, int16; None: bits are copied. Else `into` becomes the fp32 main weights whose upper
            halves are `data` and whose low 16 bits are `low` (`reference.join_master`).
    """

    into: Memory
    data: Memory
    low: Memory | None = None


def copy(copies: Sequence[Copy], *, threads: int = 1, isa: Isa = Isa.BEST) -> None:
    """Make all copies on this thread and its helpers, at most `threads` together.

    Raises:
        PlacementError: memory on a device, of the wrong dtype, strided, or read-only and to be written.
        ConfigError: parts of a copy that do not go together, or fewer than one thread.
        NativeError: the processor lacks `isa`.
    """
    require_threads(threads)
    ranges = (CopyRange * len(copies))()
    for i, each in enumerate(copies):
        ranges[i] = _range(each, f"copies[{i}]")
    check(load().copy(ranges, len(copies), threads, int(isa)), "hostward_copy")


def _range(each: Copy, what: str) -> CopyRange:
    joined = each.low is not None
    into = host_operand(each.into, f"{what}.into", ("fp32",) if joined else tuple(_SIZES), writable=True)
    data = host_operand(each.data, f"{what}.data", ("bf16",) if joined else (into.dtype,))
    low = None if each.low is None else host_operand(each.low, f"{what}.low", ("int16",))
    lengths = {into.elements, data.elements} | ({low.elements} if low is not None else set())
    if len(lengths) > 1:
        raise ConfigError(
            f"{what} is of {', '.join(map(str, sorted(lengths)))} elements",
            why="each element has its place",
            fix="pass as many of each",
        )
    size_bytes = _SIZES[into.dtype] * into.elements
    return CopyRange(into.address, data.address, None if low is None else low.address, size_bytes)
