"""Elements of chunks that several processes share, kept from the gradients for the norm."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hostward.engine.backend import Backend, Buffer, Event, Work
from hostward.schedule import Lane

Part = tuple[Buffer, Buffer, slice]
"""Where to, from which gradient, and which elements of that."""


class KeepFragments(Work):
    """Copies parts of the gradients that there are when it is issued, as float32, on the compute lane."""

    __slots__ = ("_launch", "_parts", "_pending")

    def __init__(self, backend: Backend, name: str, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)
        self._pending: deque[list[tuple[torch.Tensor, torch.Tensor]]] = deque()
        reads, writes = [gradient for _, gradient, _ in parts], [kept for kept, _, _ in parts]
        self._launch = backend.launch(name, self._run, reads=reads, writes=writes)
        super().__init__(name, Lane.COMPUTE, self._launch.done)

    def issue(self) -> Event:
        # The buffers stand for other gradients by the time a queued kernel runs.
        self._pending.append([(kept.data, gradient.data.view(-1)[span]) for kept, gradient, span in self._parts])
        try:
            return self._launch.issue()
        except BaseException:
            self._pending.clear()
            raise

    def _run(self) -> None:
        for to, from_ in self._pending.popleft():
            to.copy_(from_)
