"""State is reloaded to the device when it is read, and offloaded when only `optimizer.state` refers to it.

    compute      acquire    use/0     use/1     use/2   release 0 ...
    h2d          read/0  read/1  read/2               read/3
    d2h                                  drain/0      drain/1  ...

Each tensor has memory of its own, as without offloading: it can be kept, viewed, copied and saved. State is moved by
the chunk. The order in which chunks were used in the last step says what is prefetched.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from hostward.core.full_device import fix_of
from hostward.core.units import MIB
from hostward.errors import MemoryLimitError
from hostward.model.parameters import local_of
from hostward.optim.any_optimizer.host_state import (
    HOST_OWNER,
    Bundle,
    Chunk,
    Layout,
    Share,
    bundle_bytes,
    bundles,
    cut,
    may_leave,
    padded_bytes,
    settle,
    span_bytes,
)
from hostward.optim.any_optimizer.state_entry import Entry, Maker, State, alias, at_rest, had_elsewhere, version_of
from hostward.runtime.backend import Backend, Buffer, Event, Tier
from hostward.runtime.pinned_memory import require_host_memory
from hostward.schedule.ops import Lane

CHUNKS_AT_ONCE = 4
"""Chunks on the device at most: one is reloaded, one is used, one is offloaded, and one more.

Of that one, an optimizer's loop may still have the last tensors. There are more only while other code has tensors of
more than these.
"""

DEVICE_OWNER = f"{HOST_OWNER} on the device"


@dataclass(eq=False, slots=True)
class Staged:
    """Staged holds what of a chunk is on the device.

    read: copies of the state, or copies under way. buffers: their bytes, for copies; the references that a backend
    keeps to these do not count among those to a tensor. arriving: H2D copies that the compute stream does not wait for
    yet. given: the parameters whose entries have got their tensors, and the tensors' versions then. stream: whose
    memory it is.
    """

    chunk: Chunk
    stream: torch.Stream | None
    read: dict[torch.Tensor, Bundle] = field(default_factory=dict)
    buffers: dict[torch.Tensor, list[Buffer]] = field(default_factory=dict)
    arriving: dict[torch.Tensor, Event] = field(default_factory=dict)
    given: dict[torch.Tensor, list[int]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Going:
    """_Going holds device memory that may be released after an event."""

    after: Event
    bundles: list[Bundle]
    buffers: list[Buffer]
    stream: torch.Stream | None


class Staging:
    """Staging manages the chunks that are on the device."""

    def __init__(self, backend: Backend, entries: dict[torch.Tensor, Entry]) -> None:
        self._backend = backend
        self._entries = entries
        self._staged: dict[Chunk, Staged] = {}
        self._going: deque[_Going] = deque()
        self._last: Chunk | None = None
        self._plan: Sequence[Chunk] = ()
        self._at = 0
        self._used: list[Chunk] = []
        self._unsettled: dict[torch.Tensor, None] = {}
        self._held_bytes = 0
        self.peak_bytes = 0
        """Peak device bytes in this step of state that belongs on the host."""
        self.wrote = False
        """True if something offloaded in this step had been written."""

    # ---------------------------------------------------------------- a step

    def begin(self, chunks: Sequence[Chunk], plan: Sequence[Chunk] | None = None) -> None:
        """Begin a step that is going to use `plan` in this order; by default what the last one used."""
        known = set(chunks)
        self._plan = [c for c in (self._used or chunks if plan is None else plan) if c in known]
        self._at, self._used, self.wrote = 0, [], False
        self.peak_bytes = self._held_bytes
        self._ahead()

    def finish(self) -> None:
        """Offload all state that nothing else refers to. Whatever the compute stream does next comes after that."""
        self._plan = ()
        for staged in list(self._staged.values()):
            self._send(staged, [p for p in staged.given if not self._had_elsewhere(staged, p)])
            self._drop_unused(staged)
        self._last = None
        self._let_go()

    # ---------------------------------------------------------------- reloading

    def bring(self, parameter: torch.Tensor, chunk: Chunk) -> None:
        """Put the parameter's state on the device into its entry. The compute stream waits for it."""
        # In the middle of a chunk the loop's own variables no longer refer to the one before.
        self.send_home(keep=chunk, at_most=None if chunk is not self._last else 1)
        staged = self._staged.get(chunk)
        if staged is None:
            staged = self._fetch(chunk, parameter)
        if parameter not in staged.read:
            self._read(staged, [parameter])
        if staged.arriving:
            came = [buffer for p in staged.arriving for buffer in staged.buffers[p]]
            waits = list(staged.arriving.values())
            self._backend.mark(f"offload/update/{chunk.name}", Lane.COMPUTE, writes=came, waits=waits).issue()
            staged.arriving.clear()
        if chunk is not self._last:
            self._follow(chunk)
        entry, bundle = self._entries[parameter], staged.read[parameter]
        for key, home in chunk.homes(parameter).items():
            if dict.get(entry, key) is home:
                dict.__setitem__(entry, key, bundle[key])
        entry.away = ()
        staged.given[parameter] = [version_of(t) for t in bundle.values()]
        self._ahead()

    def _follow(self, chunk: Chunk) -> None:
        self._last = chunk
        self._used.append(chunk)
        later = [i for i in range(self._at, len(self._plan)) if self._plan[i] is chunk]
        if later:
            self._at = later[0] + 1

    def _ahead(self) -> None:
        """Prefetch the next chunks of the plan, as far as there is room."""
        self._let_go(keep=1)
        while self._at < len(self._plan) and self._has_room():
            later = (c for c in self._plan[self._at :] if c not in self._staged and _with_gradients(c))
            chunk = next(later, None)
            if chunk is None:
                return
            self._fetch(chunk, None)

    def _has_room(self) -> bool:
        taken = len(self._staged) + len(self._going)
        if taken < CHUNKS_AT_ONCE - 1:
            return True
        return taken < CHUNKS_AT_ONCE and all(staged.given for staged in self._staged.values())

    def _fetch(self, chunk: Chunk, parameter: torch.Tensor | None) -> Staged:
        """Reload a chunk: the state of all its parameters that have a gradient, unless `parameter` has none."""
        if len(self._staged) >= CHUNKS_AT_ONCE - 1:
            for staged in list(self._staged.values()):
                if not staged.given:
                    self._drop_unused(staged)
        if len(self._staged) + len(self._going) >= CHUNKS_AT_ONCE:
            self._let_go()
        staged = self._staged[chunk] = Staged(chunk, self._backend.caller_stream())
        alone = parameter is not None and parameter.grad is None
        self._read(staged, [parameter] if alone and parameter is not None else _with_gradients(chunk))
        return staged

    def _read(self, staged: Staged, parameters: Sequence[torch.Tensor]) -> None:
        chunk, backend = staged.chunk, self._backend
        targets: list[Buffer] = []
        for p in parameters:
            places = chunk.places[p]
            bundle = staged.read[p] = {k: device_tensor(place.home, backend.device) for k, place in places.items()}
            sizes = (place.layout.nbytes for place in places.values())
            memory = (alias(local_of(t), nbytes) for t, nbytes in zip(bundle.values(), sizes, strict=True))
            staged.buffers[p] = [Buffer(Tier.DEVICE, data, DEVICE_OWNER) for data in memory]
            targets += staged.buffers[p]
        self._count(targets, 1)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        sources = [place.memory for p in parameters for place in chunk.places[p].values()]
        acquired = backend.mark("offload/acquire", Lane.COMPUTE).issue()
        pairs, name = list(zip(targets, sources, strict=True)), f"offload/h2d/state/{chunk.name}"
        arrived = backend.copy(Lane.H2D, pairs, name=name, waits=[acquired, chunk.drained]).issue()
        staged.arriving.update(dict.fromkeys(parameters, arrived))

    def _count(self, buffers: Sequence[Buffer], sign: int) -> None:
        for buffer in buffers:
            self._backend.ledger.add(buffer, sign)
            self._held_bytes += sign * buffer.nbytes

    # ---------------------------------------------------------------- offloading

    def send_home(self, keep: Chunk | None = None, at_most: int | None = None) -> None:
        """Offload chunks whose tensors nothing else refers to.

        `keep` stays, and the first `at_most` others are looked at.
        """
        others = [staged for chunk, staged in self._staged.items() if chunk is not keep and staged.given]
        for staged in others[:at_most]:
            if not any(self._had_elsewhere(staged, p) for p in staged.given):
                self._send(staged, list(staged.given))
                self._drop_unused(staged)

    def _had_elsewhere(self, staged: Staged, parameter: torch.Tensor) -> bool:
        bundle = staged.read[parameter]
        return not all(map(may_leave, bundle.values())) or had_elsewhere(self._entries[parameter], bundle)

    def _send(self, staged: Staged, parameters: Sequence[torch.Tensor]) -> None:
        if not parameters:
            return
        chunk, backend = staged.chunk, self._backend
        moved = [p for p in parameters if self._follow_memory(staged, p)]
        bundles = {p: staged.read.pop(p) for p in parameters}
        buffers = {p: staged.buffers.pop(p) for p in parameters}
        self.wrote |= bool(moved)
        with torch.no_grad():
            settled = {p: settle(self._entries[p], b, chunk.layouts(p), backend.device) for p, b in bundles.items()}
        for p, bundle in bundles.items():
            versions = staged.given.pop(p)
            self.wrote |= not settled[p] or versions != [version_of(t) for t in bundle.values()]
            if settled[p]:
                put_home(self._entries[p], chunk, p)
        self._unsettled |= dict.fromkeys(p for p in settled if not settled[p])
        after = backend.mark(f"offload/updated/{chunk.name}", Lane.COMPUTE).issue()
        returning = [p for p in settled if settled[p]]
        if returning:
            sources = [buffer for p in returning for buffer in buffers[p]]
            targets = [place.memory for p in returning for place in chunk.places[p].values()]
            pairs, name = list(zip(targets, sources, strict=True)), f"offload/d2h/state/{chunk.name}"
            after = chunk.drained = backend.copy(Lane.D2H, pairs, name=name, waits=[after]).issue()
        self._going.append(_Going(after, list(bundles.values()), list(chain(*buffers.values())), staged.stream))

    def _follow_memory(self, staged: Staged, parameter: torch.Tensor) -> bool:
        """Let the buffers of a parameter be those of the memory that its tensors have now; return whether it is other.

        `tensor.data = other`, `set_` and `resize_` give a tensor other memory, and free what it had.
        """
        places, buffers = staged.chunk.places[parameter].values(), staged.buffers[parameter]
        found, moved = [], False
        for tensor, place, buffer in zip(staged.read[parameter].values(), places, buffers, strict=True):
            if Layout.of(tensor) == place.layout and local_of(tensor).data_ptr() == buffer.data.data_ptr():
                found.append(buffer)
                continue
            moved = True
            if Layout.of(tensor) == place.layout and tensor.device == self._backend.device:
                found.append(Buffer(Tier.DEVICE, alias(local_of(tensor), place.layout.nbytes), DEVICE_OWNER))
            else:
                self._count([buffer], -1)  # the tensor is made independent, see `settle`
        staged.buffers[parameter] = found
        return moved

    def _drop_unused(self, staged: Staged) -> None:
        """Release what was prefetched and not asked for, and the chunk if nothing else of it is here."""
        unused = [p for p in staged.read if p not in staged.given]
        if unused:
            waits = list({id(event): event for event in staged.arriving.values()}.values())
            arrived = self._backend.mark("offload/unused", Lane.H2D, waits=waits).issue()
            buffers = [buffer for p in unused for buffer in staged.buffers.pop(p)]
            self._going.append(_Going(arrived, [staged.read.pop(p) for p in unused], buffers, staged.stream))
            staged.arriving.clear()
        if not staged.read:
            del self._staged[staged.chunk]

    def _let_go(self, keep: int = 0) -> None:
        """Release memory that is being copied, except for the newest `keep` chunks.

        The compute stream, which may get it next, waits for the copies.
        """
        while len(self._going) > keep:
            going = self._going.popleft()
            self._backend.retire(going.buffers, Lane.COMPUTE, waits=[going.after]).issue()
            self._backend.mark("offload/release", Lane.COMPUTE).issue()
            self._count(going.buffers, -1)
            going.bundles.clear()
            self._backend.return_memory("state", [going.stream])

    # ---------------------------------------------------------------- without copies

    def forget(self, parameter: torch.Tensor, chunk: Chunk) -> None:
        """Stop treating what is here of the parameter as offloaded state; whoever refers to it keeps it."""
        # The next step would forget it again, and with it whatever state has been offloaded since.
        self._unsettled.pop(parameter, None)
        staged = self._staged.get(chunk)
        if staged is not None and parameter in staged.given:
            del staged.given[parameter]
            del staged.read[parameter]
            self._count(staged.buffers.pop(parameter), -1)
            if not staged.read:
                del self._staged[chunk]

    def given(self, parameter: torch.Tensor, chunk: Chunk) -> bool:
        """Return whether the parameter's entry has its tensors on the device now."""
        staged = self._staged.get(chunk)
        return staged is not None and parameter in staged.given

    def take_unsettled(self) -> list[torch.Tensor]:
        """Return, once, the parameters that have other tensors than those that were offloaded."""
        found, self._unsettled = self._unsettled, {}
        return list(found)


def device_tensor(home: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate device memory for what is stored at `home`, in its layout. Raises MemoryLimitError."""
    try:
        return Layout.of(home).empty(device)
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"{HOST_OWNER}: {local_of(home).nbytes:,} bytes of device memory could not be allocated",
            why=str(error).splitlines()[0],
            fix=fix_of(error, "free device memory; a smaller chunk_size_mb takes less during a step"),
        ) from error


def put_home(entry: Entry, chunk: Chunk, parameter: torch.Tensor) -> None:
    """Put the host tensors into the entry."""
    homes: dict[Hashable, torch.Tensor] = chunk.homes(parameter)
    for key, home in homes.items():
        dict.__setitem__(entry, key, home)
    entry.away = homes.keys()


def _with_gradients(chunk: Chunk) -> list[torch.Tensor]:
    return [p for p in chunk.places if p.grad is not None]


# Offloaded state: moving it to the host, forgetting it, reloading it.


log = logging.getLogger("hostward")

_CHUNKS = 64
_LEAST_CHUNK_BYTES = 16 * MIB


class AwayState:
    """AwayState holds the chunks of state in host slabs, and by parameter the chunk that has its state."""

    def __init__(self, backend: Backend, fraction: float, chunk_bytes: int) -> None:
        """Start without chunks. `chunk_bytes`: the largest chunk; 0 goes by the size of all state."""
        self.backend = backend
        self.share = Share(fraction)
        self._chunk_bytes = chunk_bytes
        self.chunks: list[Chunk] = []
        self.chunk_of: dict[torch.Tensor, Chunk] = {}
        self.staying: set[torch.Tensor] = set()
        """Parameters whose state the fraction leaves on the device."""
        self.entries: dict[torch.Tensor, Entry] = {}
        """Offloaded parameters' entries of `optimizer.state`."""
        self.staging = Staging(backend, self.entries)
        self.refused: MemoryLimitError | None = None
        """Error that kept new state on the device in the present step. The step is complete all the same."""
        self._making: State | None = None
        """Optimizer state, while a step may make more of it."""
        self._parameters: set[torch.Tensor] = set()
        self._seen = 0
        self._made: dict[torch.Tensor, int] = {}
        self._lock = threading.RLock()
        self._leaving: deque[tuple[Event, list[Bundle]]] = deque()
        self._numbers = itertools.count()

    def limit_bytes(self, expected_bytes: int = 0) -> int:
        """Return the size of the largest chunk, with `expected_bytes` of state to come."""
        total = self.share.total_bytes + expected_bytes
        return self._chunk_bytes or max(_LEAST_CHUNK_BYTES, -(-total // _CHUNKS))

    # ---------------------------------------------------------------- a step

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, state: State, parameters: Iterable[torch.Tensor], plan: Sequence[Chunk] | None = None) -> None:
        """Begin a step of these parameters that uses `plan` in this order; None: as the last one did."""
        self.refused, self._seen, self._made = None, len(state), {}
        self._parameters = set(parameters)
        if isinstance(state, defaultdict) and state.default_factory is dict:
            state.default_factory = Maker(self)
        self._making = state
        self.staging.begin(self.chunks, plan)

    def follow(self, state: State, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the state that other code has replaced."""
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
        """End the step and offload all state that may be, what the step has made included."""
        self._making = None
        self.staging.finish()
        self.take_new(state, parameters)
        self.release()

    @torch.inference_mode(False)
    @torch.no_grad()
    def abort(self, state: State) -> None:
        """Clean up after an error: streams are idle, and state is on the host wherever the error releases it."""
        self._making = None
        self.backend.drain()
        self.staging.finish()
        self.release()
        self.backend.drain()

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_new(self, state: State, parameters: Iterable[torch.Tensor]) -> None:
        """Offload the new state of these parameters, if it is to be. A full host is remembered in `refused`."""
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
        """Put offloaded state on the device, into the entry that has been read."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self.entries[parameter].away:
                self.staging.bring(parameter, self.chunk_of[parameter])

    def made(self) -> None:
        """Offload the state that a step has made so far, once it is a chunk.

        It is called before the step makes state for one more parameter.
        """
        state = self._making
        if state is None:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            for p in [p for p in itertools.islice(state, self._seen, None) if p in self._parameters]:
                self._made[p] = bundle_bytes({k: v for k, v in at_rest(state[p]).items() if may_leave(v)})
            self._seen = len(state)
            if sum(self._made.values()) >= self.limit_bytes():
                self.release(keep=1)
                # Variables of the optimizer's loop still refer to tensors of the last one.
                self.take_new(state, list(self._made)[:-1])
                self._made = {p: n for p, n in self._made.items() if p not in self.chunk_of and p not in self.staying}

    def take(
        self, state: State, parameters: Iterable[torch.Tensor], *, limit_bytes: int = 0, loaded: bool = False
    ) -> None:
        """Offload the state of these parameters, within the share, in chunks of at most `limit_bytes`.

        With 0 the limit goes by the size of all state. `loaded`: whatever else refers to it.

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
        """Make a new chunk for the content; `state` points to it at once, and the copy is under way."""
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
        """Release device tensors that were offloaded, except for the newest `keep` chunks.

        The compute stream, which may get their memory next, waits for the copies.
        """
        while len(self._leaving) > keep:
            event, _ = self._leaving.popleft()
            self.backend.mark("offload/release", Lane.COMPUTE, waits=[event]).issue()

    def forget(self, parameter: torch.Tensor) -> None:
        """Stop treating what is stored here of the parameter as its state."""
        chunk = self.chunk_of.pop(parameter)
        self.entries.pop(parameter).away = ()
        self.staging.forget(parameter, chunk)
        self.share.forget(chunk.bytes_of(parameter))
        del chunk.places[parameter]
        if not chunk.places:
            self._free(chunk)

    def clear(self) -> None:
        """Forget everything, what stays on the device included. All streams are idle."""
        self._leaving.clear()
        self.staging.finish()
        for p in list(self.chunk_of):
            self.forget(p)
        self.staying.clear()
        self.share = Share(self.share.fraction)

    def bring_back(self, state: State) -> None:
        """Reload all state into device tensors of its own, chunk by chunk, and leave plain dicts of them.

        Raises:
            MemoryLimitError: the device has no room; the chunks that were not reloaded are still here.
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
        for p, entry in list(state.items()):
            if isinstance(entry, Entry):  # of which torch.load takes no copy with weights_only=True
                state[p] = dict(entry)

    def _free(self, chunk: Chunk) -> None:
        self.chunks.remove(chunk)
        self.backend.free([chunk.slab])
