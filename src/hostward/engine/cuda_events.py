"""Events of the driver: made once, and destroyed with the backend that has made them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .driver import event_create, event_destroy, stream_synchronize


class DriverEvents:
    """Handles of all events of a backend."""

    def __init__(self) -> None:
        self._all: list[int] = []

    def timed(self) -> int:
        return self._made(timing=True)

    def plain(self, unused: list[int]) -> int:
        """One of `unused`, or a new one."""
        return unused.pop() if unused else self._made(timing=False)

    def drain(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Wait for the streams, which use them, and destroy them."""
        for stream in streams:
            stream_synchronize(stream.cuda_stream)
        for event in self._all:
            event_destroy(event)

    def _made(self, *, timing: bool) -> int:
        self._all.append(event_create(timing=timing))
        return self._all[-1]
