"""Streams that are not the compute lane: who made a gradient, who waits for weights, when memory goes back to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hostward.optim.bucket_lifecycle import BucketStep, LayerStep
from hostward.runtime.backend import Backend, Event


class StreamSync:
    """Makes streams of the caller and of other libraries wait where the compute lane's own order does not suffice.

    Streams are known by the keys of `Backend.compute_key`. A backend without streams has one key and waits for nothing.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._streams: dict[int, torch.Stream | None] = {}
        """By key."""
        self._made_on: set[int] = set()
        """Keys of streams on which backward has made gradients of this step that stay in `.grad` for now."""
        self._makers: set[torch.Stream] = set()
        """Streams whose memory any gradient may be, whichever its hook runs on: those of FSDP2's reductions."""

    def grad_made(self) -> None:
        """Backward has made a gradient, or added to one, on the current stream; it is offloaded later."""
        self._made_on.add(self._here())

    def grads_made_on(self, stream: torch.Stream) -> None:
        """Gradients that are offloaded from here on may be memory of this stream, whichever their hooks run on."""
        self._makers.add(stream)

    def sources(self) -> set[int]:
        """Keys of the streams whose memory a gradient that is offloaded now may be."""
        return {self._here(), *self._made_on}

    @property
    def made_before(self) -> bool:
        """Whether some gradients of this step were made before they are offloaded."""
        return bool(self._made_on)

    def forget(self) -> None:
        """The gradients of this step are gone."""
        self._made_on.clear()

    def return_memory(self, buckets: Iterable[BucketStep]) -> None:
        """Give up the device memory of the gradients of these buckets. The allocator gives it back to the streams on
        which they were made: these wait for the compute lane, which has waited for the readers.
        """
        keys: set[int] = set()
        for bucket in buckets:
            keys |= bucket.return_memory()
        if not keys:
            return
        others = keys - {self._backend.compute_key()}
        if others or self._makers:
            self._backend.return_memory("gradient", {self._streams[key] for key in others} | self._makers)

    def wait(self, layer: LayerStep, stream: torch.Stream, weights: Sequence[Event]) -> None:
        """A stream besides the compute lane is about to read a layer: it waits once for the events that make `weights`
        new. Nothing happens before the first step, and within the capture of a CUDA graph.
        """
        if layer.external is None or stream in layer.external or self._backend.capturing():
            return
        layer.external.add(stream)
        self._backend.wait_on_stream(stream, weights)

    def _here(self) -> int:
        key = self._backend.compute_key()
        if key not in self._streams:
            self._streams[key] = self._backend.caller_stream()
        return key
