"""Copies of a CUDA device: those from host memory that is not page-locked wait on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hostward.schedule import Lane

from .backend import Buffer, Event, Work, require_copyable
from .cuda_work import CommandWork

if TYPE_CHECKING:
    from .cuda import CudaBackend


class UnlockedCopy(Work):
    """A copy to the device from memory that is not page-locked. The driver may read that when the copy is enqueued,
    whatever the stream still waits for: so the caller waits for it first.
    """

    __slots__ = ("_backend", "_copy", "_waits")

    def __init__(self, backend: CudaBackend, copy: CommandWork, waits: Sequence[Event]) -> None:
        super().__init__(copy.name, copy.lane, copy.done)
        self._backend = backend
        self._copy = copy
        self._waits = tuple(waits)

    def issue(self) -> Event:
        for event in self._waits:
            self._backend.wait(event)
        return self._copy.issue()


def copying(
    backend: CudaBackend,
    name: str,
    lane: Lane,
    waits: Sequence[Event],
    done: Event,
    pairs: Sequence[tuple[Buffer, Buffer]],
) -> Work:
    """Copies (destination, source) on a copy lane. Raises PlacementError."""
    for destination, source in pairs:
        require_copyable(lane, destination, source)
    copy = CommandWork(backend, name, lane, waits, done, pairs)
    if lane is Lane.H2D and not all(source.pinned for _, source in pairs):
        return UnlockedCopy(backend, copy, waits)
    return copy
