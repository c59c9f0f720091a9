"""The state that has left the device: moving it to the host, forgetting it, bringing it back."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import torch

from hostward.engine.backend import Backend, Event
from hostward.engine.pools import require_host_memory
from hostward.errors import MemoryLimitError
from hostward.schedule import Lane
from hostward.sizes import MIB

from .foreign_entry import Entry, Maker, State, at_rest
from .foreign_staging import Staging, device_tensor, put_home
from .foreign_state import (
    HOST_OWNER,
    Bundle,
    Chunk,
    Share,
    bundle_bytes,
    bundles,
    cut,
    may_leave,
    padded_bytes,
    span_bytes,
)

log = logging.getLogger("hostward")

_CHUNKS = 64
_LEAST_CHUNK_BYTES = 16 * MIB


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
        self.entries: dict[torch.Tensor, Entry] = {}
        """What `optimizer.state` has for the parameters that have left."""
        self.staging = Staging(backend, self.entries)
        self.refused: MemoryLimitError | None = None
        """What kept new state on the device in the present step. The step is whole all the same."""
        self._making: State | None = None
        """The optimizer's state, while a step may make more of it."""
        self._parameters: set[torch.Tensor] = set()
        self._seen = 0
        self._made: dict[torch.Tensor, int] = {}
        self._lock = threading.RLock()
        self._leaving: deque[tuple[Event, list[Bundle]]] = deque()
        self._numbers = itertools.count()

    def limit_bytes(self, expected_bytes: int = 0) -> int:
        """The largest chunk, with `expected_bytes` of state to come."""
        total = self.share.total_bytes + expected_bytes
        return self._chunk_bytes or max(_LEAST_CHUNK_BYTES, -(-total // _CHUNKS))

    # ---------------------------------------------------------------- a step

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, state: State, parameters: Iterable[torch.Tensor], plan: Sequence[Chunk] | None = None) -> None:
        """A step of these parameters begins, that uses `plan` in this order; None: as the last one did."""
        self.refused, self._seen, self._made = None, len(state), {}
        self._parameters = set(parameters)
        if isinstance(state, defaultdict) and state.default_factory is dict:
            state.default_factory = Maker(self)
        self._making = state
        self.staging.begin(self.chunks, plan)

    def follow(self, state: State, parameters: Iterable[torch.Tensor]) -> None:
        """Forget what somebody has put other state in place of."""
        for p in parameters:
            chunk = self.chunk_of.get(p)
            if chunk is None:
                continue
            same = state.get(p) is self.entries[p]
            if not same or (not self.staging.given(p, chunk) and not chunk.holds(p, state)):
                self.forget(p)

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, state: State, parameters: Iterable[torch.Tensor]) -> None:
        """The step is over: everything leaves that may, what it has made included."""
        self._making = None
        self.staging.finish()
        self.take_new(state, parameters)
        self.release()

    @torch.inference_mode(False)
    @torch.no_grad()
    def abort(self, state: State) -> None:
        """After an error that is on its way: empty lanes, and state at home wherever the error lets it go."""
        self._making = None
        self.backend.drain()
        self.staging.finish()
        self.release()
        self.backend.drain()

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_new(self, state: State, parameters: Iterable[torch.Tensor]) -> None:
        """Move what these parameters have got, if it shall leave. A full host is remembered in `refused`."""
        for p in self.staging.take_unsettled():
            if p in self.chunk_of:
                self.forget(p)
        new = [p for p in parameters if p not in self.chunk_of and p not in self.staying]
        if not new or self.refused is not None:
            return
        try:
            self.take(state, new)
        except MemoryLimitError as error:
            self.refused = error

    def bring(self, parameter: torch.Tensor) -> None:
        """Put state that is away on the device, into the entry that has been read."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self.entries[parameter].away:
                self.staging.bring(parameter, self.chunk_of[parameter])

    def made(self) -> None:
        """Before a step makes state for one more parameter: what it has made so far leaves, once it is a chunk."""
        state = self._making
        if state is None:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            for p in [p for p in itertools.islice(state, self._seen, None) if p in self._parameters]:
                self._made[p] = bundle_bytes({k: v for k, v in at_rest(state[p]).items() if may_leave(v)})
            self._seen = len(state)
            if sum(self._made.values()) >= self.limit_bytes():
                self.release(keep=1)
                # Variables of the optimizer's loop still have tensors of the last one.
                self.take_new(state, list(self._made)[:-1])
                self._made = {p: n for p, n in self._made.items() if p not in self.chunk_of and p not in self.staying}

    def take(
        self, state: State, parameters: Iterable[torch.Tensor], *, limit_bytes: int = 0, loaded: bool = False
    ) -> None:
        """Move the state of these parameters, the share of it that leaves, in chunks of at most `limit_bytes` (0: as
        all state asks for). `loaded`: whoever else has it.

        Raises:
            MemoryLimitError: the host has no room; what has not moved is as it was and may be taken again.
        """
        found = bundles(state, parameters, self.backend.device, loaded=loaded)
        if not found:
            return
        leaving = {p: bundle for p, bundle in found.items() if self.share.leaves(bundle_bytes(bundle))}
        self.staying |= found.keys() - leaving.keys()
        limit_bytes = limit_bytes or self.limit_bytes()
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
        targets = [place.memory for places in chunk.places.values() for place in places.values()]
        made = backend.mark("offload/made", Lane.COMPUTE).issue()
        pairs = list(zip(targets, sources, strict=True))
        chunk.drained = backend.copy(Lane.D2H, pairs, name=f"offload/d2h/state/{chunk.name}", waits=[made]).issue()
        self._leaving.append((chunk.drained, list(content.values())))
        self.chunks.append(chunk)
        for p in content:
            self.chunk_of[p] = chunk
            if not isinstance(state[p], Entry):
                state[p] = Entry(state[p])
            entry = self.entries[p] = state[p]
            entry.belongs_to(self, p)
            put_home(entry, chunk, p)

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
        self.entries.pop(parameter).away = ()
        self.staging.forget(parameter, chunk)
        self.share.forget(chunk.bytes_of(parameter))
        del chunk.places[parameter]
        if not chunk.places:
            self._free(chunk)

    def clear(self) -> None:
        """Forget everything, what stays included. All lanes are empty."""
        self._leaving.clear()
        self.staging.finish()
        for p in list(self.chunk_of):
            self.forget(p)
        self.staying.clear()
        self.share = Share(self.share.fraction)

    def bring_back(self, state: State) -> None:
        """Put all state into device tensors of its own, chunk by chunk.

        Raises:
            MemoryLimitError: the device has no room; the chunks that have not come back are still here.
        """
        self.staging.finish()
        self.backend.synchronise()
        self._leaving.clear()
        self.follow(state, list(self.chunk_of))
        for p in [p for p, chunk in self.chunk_of.items() if self.staging.given(p, chunk)]:
            self.forget(p)
        for chunk in list(self.chunks):
            held = [p for p in chunk.places if chunk.holds(p, state)]
            back = {
                p: {key: device_tensor(home, self.backend.device) for key, home in chunk.homes(p).items()} for p in held
            }
            targets = [self.backend.adopt(span_bytes(t), HOST_OWNER) for b in back.values() for t in b.values()]
            sources = [place.memory for p in held for place in chunk.places[p].values()]
            made = self.backend.mark("offload/made", Lane.COMPUTE).issue()
            pairs = list(zip(targets, sources, strict=True))
            if pairs:
                name = f"offload/h2d/state/{chunk.name}"
                self.backend.copy(Lane.H2D, pairs, name=name, waits=[made]).issue()
            self.backend.synchronise()
            for p, bundle in back.items():
                self.entries[p].away = ()
                state[p].update(bundle)
            for p in list(chunk.places):
                self.forget(p)

    def _free(self, chunk: Chunk) -> None:
        self.chunks.remove(chunk)
        self.backend.free([chunk.slab])
