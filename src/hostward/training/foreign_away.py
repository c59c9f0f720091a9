"""The state that has left the device: moving it to the host, forgetting it, bringing it back."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, MutableMapping
from typing import Any

import torch

from hostward.engine.backend import Backend, Event
from hostward.engine.pools import require_host_memory
from hostward.errors import MemoryLimitError
from hostward.schedule import Lane
from hostward.sizes import MIB

from .foreign_state import (
    HOST_OWNER,
    Bundle,
    Chunk,
    Share,
    bundle_bytes,
    bundles,
    cut,
    padded_bytes,
    pieces,
    span_bytes,
)

log = logging.getLogger("hostward")

_CHUNKS = 64
_LEAST_CHUNK_BYTES = 16 * MIB

State = MutableMapping[torch.Tensor, Any]
"""`optimizer.state`."""


class AwayState:
    """Chunks of state in host slabs, and by parameter which one holds it."""

    def __init__(self, backend: Backend, fraction: float, chunk_bytes: int) -> None:
        """`chunk_bytes`: the largest chunk; 0 goes by the size of all state."""
        self.backend = backend
        self.share = Share(fraction)
        self._chunk_bytes = chunk_bytes
        self.chunks: list[Chunk] = []
        self.chunk_of: dict[torch.Tensor, Chunk] = {}
        self.staying: set[torch.Tensor] = set()
        """Parameters whose state the fraction leaves on the device."""
        self.stateless: set[torch.Tensor] = set()
        """Parameters that have been stepped and had nothing to move."""
        self._leaving: deque[tuple[Event, list[Bundle]]] = deque()
        self._numbers = itertools.count()

    def limit_bytes(self, expected_bytes: int = 0) -> int:
        """The largest chunk, with `expected_bytes` of state to come."""
        total = self.share.total_bytes + expected_bytes
        return self._chunk_bytes or max(_LEAST_CHUNK_BYTES, -(-total // _CHUNKS))

    def take(self, state: State, parameters: Collection[torch.Tensor], limit_bytes: int) -> None:
        """Move the state of these parameters, the share of it that leaves, in chunks of at most `limit_bytes`.

        Raises:
            MemoryLimitError: the host has no room; what has not moved is as it was and may be taken again.
        """
        found = bundles(state, parameters, self.backend.device)
        leaving = {p: bundle for p, bundle in found.items() if self.share.leaves(bundle_bytes(bundle))}
        self.staying |= found.keys() - leaving.keys()
        self.stateless -= found.keys()
        try:
            require_host_memory(sum(map(padded_bytes, leaving.values())), owner=HOST_OWNER)
            for run in cut([(p, padded_bytes(bundle)) for p, bundle in leaving.items()], limit_bytes):
                self._move(state, {p: leaving[p] for p in run}, limit_bytes)
        finally:
            for p in leaving.keys() - self.chunk_of.keys():
                self.share.forget(bundle_bytes(leaving[p]))

    def _move(self, state: State, content: dict[torch.Tensor, Bundle], limit_bytes: int) -> None:
        """A new chunk for the content; `state` points to it at once, and the copy is under way."""
        backend = self.backend
        chunk = Chunk.allocate(backend, content, next(self._numbers))
        if len(content) == 1 and chunk.size_bytes > limit_bytes:
            log.warning(
                "the state of one parameter %s takes %s bytes, more than a chunk's %s: it is a chunk of its own",
                *(tuple(next(iter(content)).shape), f"{chunk.size_bytes:,}", f"{limit_bytes:,}"),
            )
        sources = [backend.adopt(span_bytes(t), HOST_OWNER) for bundle in content.values() for t in bundle.values()]
        targets = pieces(chunk.slab, [place.extent for places in chunk.places.values() for place in places.values()])
        made = backend.mark("offload/made", Lane.COMPUTE).issue()
        pairs = list(zip(targets, sources, strict=True))
        event = backend.copy(Lane.D2H, pairs, name=f"offload/d2h/state/{chunk.name}", waits=[made]).issue()
        self._leaving.append((event, list(content.values())))
        self.chunks.append(chunk)
        for p in content:
            self.chunk_of[p] = chunk
            state[p].update(chunk.homes(p))

    def release(self, keep: int = 0) -> None:
        """Let go of device tensors that have left, but for the newest `keep` chunks: the compute lane, which may get
        their memory next, waits for the copies.
        """
        while len(self._leaving) > keep:
            event, _ = self._leaving.popleft()
            self.backend.mark("offload/release", Lane.COMPUTE, waits=[event]).issue()

    def forget(self, parameter: torch.Tensor) -> None:
        """What lies here of the parameter is no longer its state."""
        chunk = self.chunk_of.pop(parameter)
        self.share.forget(chunk.bytes_of(parameter))
        del chunk.places[parameter], chunk.extents[parameter]
        if not chunk.places:
            self._free(chunk)

    def clear(self) -> None:
        """Forget everything, what stays included. All lanes are empty."""
        self._leaving.clear()
        for chunk in list(self.chunks):
            self._free(chunk)
        self.chunk_of.clear()
        self.staying.clear()
        self.stateless.clear()
        self.share = Share(self.share.fraction)

    def bring_back(self, state: State) -> None:
        """Put all state into device tensors of its own, chunk by chunk.

        Raises:
            MemoryLimitError: the device has no room; the chunks that have not come back are still here.
        """
        self.backend.synchronise()
        self._leaving.clear()
        for chunk in list(self.chunks):
            held = [p for p in chunk.places if chunk.holds(p, state)]
            back = {p: {key: self._device_tensor(home) for key, home in chunk.homes(p).items()} for p in held}
            targets = [self.backend.adopt(span_bytes(t), HOST_OWNER) for b in back.values() for t in b.values()]
            sources = pieces(chunk.slab, [place.extent for p in held for place in chunk.places[p].values()])
            made = self.backend.mark("offload/made", Lane.COMPUTE).issue()
            pairs = list(zip(targets, sources, strict=True))
            if pairs:
                name = f"offload/h2d/state/{chunk.name}"
                self.backend.copy(Lane.H2D, pairs, name=name, waits=[made]).issue()
            self.backend.synchronise()
            for p, bundle in back.items():
                state[p].update(bundle)
            for p in list(chunk.places):
                self.forget(p)

    def _device_tensor(self, home: torch.Tensor) -> torch.Tensor:
        try:
            return torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=self.backend.device)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"{HOST_OWNER}: {home.nbytes:,} bytes of device memory could not be allocated",
                why=str(error).splitlines()[0],
                fix="free device memory, and call detach() again",
            ) from error

    def _free(self, chunk: Chunk) -> None:
        self.chunks.remove(chunk)
        self.backend.free([chunk.slab])
