"""Order streams against the compute stream: producers of gradients, readers of weights, owners of returned memory."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from hostward.optim.bucket_lifecycle import LayerStep
from hostward.runtime.backend import Backend, Event


class StreamSync:
    """Makes streams of the caller and of other libraries wait where the compute stream's own order does not suffice.

    Streams are identified by the keys of `Backend.compute_key`. A backend without streams has one key and waits for
    nothing.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.known: dict[int, torch.Stream | None] = {}
        """Streams by key."""
        self.made_on: set[int] = set()
        """Stream keys of the streams on which backward has made gradients of this step that stay in `.grad` for now."""
        self.makers: set[torch.Stream] = set()
        """Streams that may own the memory of any gradient, whichever stream its hook runs on: those of FSDP2's
        reductions.
        """

    def grad_made(self) -> None:
        """Record that backward made or added to a gradient on the current stream. The gradient is offloaded later."""
        key = self._backend.compute_key()
        if key not in self.known:
            self.note(key)
        self.made_on.add(key)

    def note(self, key: int) -> None:
        """Note the current stream, whose key this is."""
        self.known[key] = self._backend.caller_stream()

    def return_memory(self, others: Set[int]) -> None:
        """Return the device memory of gradients to the allocator, which gives it back to the streams that made them.

        These streams wait for the compute stream, which has waited for the readers. `others`: keys of those that are
        not the current stream.
        """
        self._backend.return_memory("gradient", {self.known[key] for key in others} | self.makers)

    def must_wait(self, layer: LayerStep, stream: torch.Stream) -> bool:
        """Return whether a stream has not waited for a layer's weights since the last step.

        It need not before the first step, nor within the capture of a CUDA graph.
        """
        return layer.external is not None and stream not in layer.external and not self._backend.capturing()

    def wait(self, layer: LayerStep, stream: torch.Stream, weights: Sequence[Event]) -> None:
        """Make a stream other than the compute stream wait for the events that make a layer's `weights` new."""
        layer.waited_on(stream)
        self._backend.wait_on_stream(stream, weights)
