"""Check the ordering rule on the bytes of buffers, as operations are issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hostward.runtime.backend import Buffer
from hostward.schedule.ops import Lane
from hostward.schedule.race_check import Accesses, Stamp, unordered


@dataclass(eq=False, slots=True)
class Operation:
    """Records one issue of an operation of the simulated backend."""

    lane: Lane
    name: str
    number: int
    stamp: Stamp
    waits: tuple[Operation, ...]
    run: Callable[[], None] | None
    nbytes: int = 0
    turn: int = 0
    done: bool = False


@dataclass(slots=True)
class _Span:
    """Records the accesses to the bytes [start, stop).

    `memory` prevents that the address is reused while the accesses are remembered.
    """

    start: int
    stop: int
    memory: torch.Tensor
    accesses: Accesses[Operation] = field(default_factory=Accesses)


class ByteRule:
    """Records all accesses to bytes, and raises OrderingError for a conflicting pair that nothing orders."""

    def __init__(self) -> None:
        self._spans: dict[int, list[_Span]] = {}  # by address of the storage that the buffers view

    def clear(self) -> None:
        """Forget all accesses: everything so far is ordered before everything that follows."""
        self._spans.clear()

    def check(self, operation: Operation, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """Check the ordering rule for the bytes that an operation reads and writes."""
        for buffers, writing in ((reads, False), (writes, True)):
            for buffer in buffers:
                own, overlapping = self._overlapping(buffer)
                for span in overlapping:
                    earlier = span.accesses.unordered(operation.stamp, writes=writing)
                    if earlier is not None and earlier is not operation:
                        raise unordered(earlier.name, earlier.lane, operation.name, operation.lane, buffer.owner)
                own.accesses.add(operation, operation.stamp, writes=writing)

    def _overlapping(self, buffer: Buffer) -> tuple[_Span, list[_Span]]:
        """Return the accesses to exactly these bytes, and to every overlapping buffer, such as ranges of a bucket."""
        start = buffer.data.data_ptr()
        stop = start + buffer.nbytes
        spans = self._spans.setdefault(buffer.data.untyped_storage().data_ptr(), [])
        own = next((s for s in spans if (s.start, s.stop) == (start, stop)), None)
        if own is None:
            own = _Span(start, stop, buffer.data)
            spans.append(own)
        return own, [s for s in spans if s.start < stop and start < s.stop]
