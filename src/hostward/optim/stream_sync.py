"""Order streams against the compute stream: producers of gradients, readers of weights, owners of returned memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hostward.optim.bucket_lifecycle import BucketStep, LayerStep
from hostward.runtime.backend import Backend, Event


class StreamSync:
    """Makes streams of the caller and of other libraries wait where the compute stream's own order does not suffice.

    Streams are identified by the keys of `Backend.compute_key`. A backend without streams has one key and waits for
    nothing.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._streams: dict[int, torch.Stream | None] = {}
        """Streams by key."""
        self._made_on: set[int] = set()
        """Stream keys of the streams on which backward has made gradients of this step that stay in `.grad` for now."""
        self._makers: set[torch.Stream] = set()
        """Streams that may own the memory of any gradient, whichever stream its hook runs on: those of FSDP2's
        reductions.
        """

    def grad_made(self) -> None:
        """Record that backward made or added to a gradient on the current stream. The gradient is offloaded later."""
        self._made_on.add(self._here())

    def grads_made_on(self, stream: torch.Stream) -> None:
        """Record that gradients offloaded later may be memory of `stream`, on whichever stream their hooks run."""
        self._makers.add(stream)

    def sources(self) -> set[int]:
        """Return the keys of the streams that may own the memory of a gradient offloaded now."""
        return {self._here(), *self._made_on}

    @property
    def made_before(self) -> bool:
        """Report whether some gradients of this step were made before they are offloaded."""
        return bool(self._made_on)

    def forget(self) -> None:
        """Forget which streams made the gradients of this step, which no longer exist."""
        self._made_on.clear()

    def return_memory(self, buckets: Iterable[BucketStep]) -> None:
        """Return the device memory of these buckets' gradients to the allocator.

        The allocator gives it back to the streams on which the gradients were made. These streams wait for the compute
        stream, which has waited for the readers.
        """
        keys: set[int] = set()
        for bucket in buckets:
            keys |= bucket.return_memory()
        if not keys:
            return
        others = keys - {self._backend.compute_key()}
        if others or self._makers:
            self._backend.return_memory("gradient", {self._streams[key] for key in others} | self._makers)

    def must_wait(self, layer: LayerStep, stream: torch.Stream) -> bool:
        """Return whether a stream has not waited for a layer's weights since the last step.

        It need not before the first step, nor within the capture of a CUDA graph.
        """
        return layer.external is not None and stream not in layer.external and not self._backend.capturing()

    def wait(self, layer: LayerStep, stream: torch.Stream, weights: Sequence[Event]) -> None:
        """Make a stream other than the compute stream wait for the events that make a layer's `weights` new."""
        layer.waited_on(stream)
        self._backend.wait_on_stream(stream, weights)

    def _here(self) -> int:
        key = self._backend.compute_key()
        if key not in self._streams:
            self._streams[key] = self._backend.caller_stream()
        return key
