"""The ordering rule on bytes, for operations as they are issued: what a schedule cannot name, a buffer can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hostward.errors import OrderingError
from hostward.runtime.backend import Buffer, Event
from hostward.schedule.ops import Lane
from hostward.schedule.race_check import Accesses, Stamp, unordered


@dataclass(eq=False, slots=True)
class Operation:
    """One issue of an operation of the simulated backend."""

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
    """Who has used the bytes [start, stop).

    `memory` keeps the address from being given out again while the accesses are remembered.
    """

    start: int
    stop: int
    memory: torch.Tensor
    accesses: Accesses[Operation] = field(default_factory=Accesses)


class ByteRule:
    """Remembers who used which bytes, and raises OrderingError for a conflicting pair that nothing orders."""

    def __init__(self) -> None:
        self._spans: dict[int, list[_Span]] = {}  # by address of the storage that the buffers view

    def clear(self) -> None:
        """Everything so far comes before everything that follows."""
        self._spans.clear()

    def check(self, operation: Operation, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """The ordering rule, on bytes."""
        for buffers, writing in ((reads, False), (writes, True)):
            for buffer in buffers:
                own, overlapping = self._overlapping(buffer)
                for span in overlapping:
                    earlier = span.accesses.unordered(operation.stamp, writes=writing)
                    if earlier is not None and earlier is not operation:
                        raise unordered(earlier.name, earlier.lane, operation.name, operation.lane, buffer.owner)
                own.accesses.add(operation, operation.stamp, writes=writing)

    def _overlapping(self, buffer: Buffer) -> tuple[_Span, list[_Span]]:
        """Accesses of exactly these bytes, and of every buffer that shares one: ranges of a bucket are views of it."""
        start = buffer.data.data_ptr()
        stop = start + buffer.nbytes
        spans = self._spans.setdefault(buffer.data.untyped_storage().data_ptr(), [])
        own = next((s for s in spans if (s.start, s.stop) == (start, stop)), None)
        if own is None:
            own = _Span(start, stop, buffer.data)
            spans.append(own)
        return own, [s for s in spans if s.start < stop and start < s.stop]


def operation_of(event: Event) -> Operation | None:
    """None: nothing has been issued yet, and there is nothing to wait for."""
    if event.native is not None and not isinstance(event.native, Operation):
        raise OrderingError("an event of another backend", fix="use events of the backend that is waited on")
    return event.native
