"""State that has come to the device: brought when it is read, sent home when nobody but `optimizer.state` has it.

    compute      allocate   use/0     use/1     use/2  ...       free
    h2d          read/0  read/1  read/2            read/3 (slot of 0)
    d2h                                  drain/0      drain/1  ...

A slot holds one chunk. The order in which chunks were used in the last step says what is read ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hostward.engine.backend import Backend, Buffer, Event, Tier
from hostward.schedule import Lane

from .foreign_entry import Entry, alias, had_elsewhere, storage_uses
from .foreign_state import HOST_OWNER, Bundle, Chunk, may_leave, pieces, settle

SLOTS = 3
"""One chunk comes, one is used, one goes. More only while somebody has tensors of more than these."""


@dataclass(eq=False, slots=True)
class Slot:
    """Device memory for one chunk at a time.

    lanes: the same memory, for copies: what a backend keeps of these is not counted among those who have a tensor.
    storage, uses: of the memory, and how many use it while no tensor is given out. idle: the copy after which it may be
    filled or freed.
    """

    buffer: Buffer
    lanes: Buffer
    storage: torch.UntypedStorage
    uses: int
    stream: torch.Stream | None
    idle: Event


@dataclass(eq=False, slots=True)
class Staged:
    """A chunk in its slot.

    read: the parameters whose state has been copied into it. arriving: those whose copies the compute lane does not
    wait for yet. given: the tensors that entries have got, and their versions then.
    """

    chunk: Chunk
    slot: Slot
    read: set[torch.Tensor] = field(default_factory=set)
    arriving: dict[torch.Tensor, Event] = field(default_factory=dict)
    given: dict[torch.Tensor, Bundle] = field(default_factory=dict)
    versions: dict[torch.Tensor, list[int]] = field(default_factory=dict)


class Staging:
    """The chunks that are on the device."""

    def __init__(self, backend: Backend, entries: dict[torch.Tensor, Entry]) -> None:
        self._backend = backend
        self._entries = entries
        self._staged: dict[Chunk, Staged] = {}
        self._free: list[Slot] = []
        self._last: Chunk | None = None
        self._plan: Sequence[Chunk] = ()
        self._at = 0
        self._used: list[Chunk] = []
        self._nominal_bytes = 0
        self.peak_bytes = 0
        """The most that slots have taken in this step."""
        self.wrote = False
        """Whether something that went home in this step had been written."""
        self._unsettled: list[torch.Tensor] = []

    # ---------------------------------------------------------------- a step

    def begin(self, chunks: Sequence[Chunk], plan: Sequence[Chunk] | None = None) -> None:
        """A step that is going to use `plan` in this order; by default what the last one used."""
        known = set(chunks)
        self._plan = [c for c in (self._used or chunks if plan is None else plan) if c in known]
        self._at, self._used, self.wrote = 0, [], False
        self._nominal_bytes = max((c.size_bytes for c in chunks if len(c.places) > 1), default=0)
        self.peak_bytes = self._held_bytes()
        self._ahead()

    def finish(self) -> None:
        """Send home what may go, and give back the slots. Whatever the compute lane does next comes behind that."""
        self._plan = ()
        self.send_home()
        self._last = None
        self._drop_unused()
        free, self._free = self._free, []
        self._give_back(free)
        self._backend.let_overwrite("state", {slot.stream for slot in free})

    # ---------------------------------------------------------------- coming

    def bring(self, parameter: torch.Tensor, chunk: Chunk) -> None:
        """Put the parameter's state on the device into its entry. The compute lane waits for it."""
        if chunk is not self._last:
            self.send_home(keep=chunk)
        elif len(self._staged) > 1:
            # The loop's own variables have had tensors of the chunk before until now.
            self.send_home(keep=chunk, at_most=1)
        staged = self._staged.get(chunk)
        if staged is None:
            staged = self._fetch(chunk, parameter)
        if parameter not in staged.read:
            self._read(staged, [parameter])
        if staged.arriving:
            came = pieces(staged.slot.lanes, chunk.runs(list(staged.arriving)))
            waits = list(staged.arriving.values())
            self._backend.mark(f"offload/update/{chunk.name}", Lane.COMPUTE, writes=came, waits=waits).issue()
            staged.arriving.clear()
        if chunk is not self._last:
            self._follow(chunk)
        entry, bundle = self._entries[parameter], chunk.staged(parameter, staged.slot.buffer)
        for key, home in chunk.homes(parameter).items():
            if dict.get(entry, key) is home:
                dict.__setitem__(entry, key, bundle[key])
        entry.away = ()
        staged.given[parameter] = bundle
        staged.versions[parameter] = [t._version for t in bundle.values()]
        self._ahead()

    def _follow(self, chunk: Chunk) -> None:
        self._last = chunk
        self._used.append(chunk)
        later = [i for i in range(self._at, len(self._plan)) if self._plan[i] is chunk]
        if later:
            self._at = later[0] + 1

    def _ahead(self) -> None:
        while self._at < len(self._plan) and len(self._staged) < SLOTS:
            later = (c for c in self._plan[self._at :] if c not in self._staged and _with_gradients(c))
            chunk = next(later, None)
            if chunk is None:
                return
            self._fetch(chunk, None)

    def _fetch(self, chunk: Chunk, parameter: torch.Tensor | None) -> Staged:
        """Read a chunk: of all its parameters that have a gradient, unless `parameter` has none."""
        if len(self._staged) >= SLOTS:
            self._drop_unused()
        staged = self._staged[chunk] = Staged(chunk, self._slot(chunk.size_bytes))
        alone = parameter is not None and parameter.grad is None
        self._read(staged, [parameter] if alone and parameter is not None else _with_gradients(chunk))
        return staged

    def _read(self, staged: Staged, parameters: Sequence[torch.Tensor]) -> None:
        chunk, slot = staged.chunk, staged.slot
        runs, name = chunk.runs(parameters), f"offload/h2d/state/{chunk.name}"
        pairs = list(zip(pieces(slot.lanes, runs), pieces(chunk.slab, runs), strict=True))
        slot.idle = self._backend.copy(Lane.H2D, pairs, name=name, waits=[slot.idle, chunk.drained]).issue()
        staged.arriving.update(dict.fromkeys(parameters, slot.idle))
        staged.read.update(parameters)

    def _drop_unused(self) -> None:
        """What was read ahead and not asked for."""
        for chunk in [chunk for chunk, staged in self._staged.items() if not staged.given]:
            self._free.append(self._staged.pop(chunk).slot)

    def _slot(self, size_bytes: int) -> Slot:
        fitting = [slot for slot in self._free if slot.buffer.nbytes >= size_bytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.buffer.nbytes)
            self._free.remove(slot)
            return slot
        if self._free and len(self._free) + len(self._staged) >= SLOTS:
            small = self._free.pop(0)
            self._give_back([small])
        size_bytes = max(size_bytes, self._nominal_bytes)
        backend = self._backend
        (buffer,) = backend.allocate(Tier.DEVICE, [size_bytes], torch.uint8, f"{HOST_OWNER} slots", zero=False)
        made = backend.mark("offload/acquire", Lane.COMPUTE).issue()
        storage = buffer.data.untyped_storage()
        lanes = Buffer(Tier.DEVICE, alias(buffer.data), buffer.owner)
        slot = Slot(buffer, lanes, storage, storage_uses(storage), backend.caller_stream(), made)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes() + size_bytes)
        return slot

    def _give_back(self, slots: Sequence[Slot]) -> None:
        """Memory of which somebody still has a tensor goes when that does."""
        unused = [slot for slot in slots if storage_uses(slot.storage) <= slot.uses]
        self._backend.free([slot.buffer for slot in unused], after=[slot.idle for slot in unused])
        for slot in slots:
            if slot not in unused:
                self._backend.ledger.add(slot.buffer, -1)

    def _held_bytes(self) -> int:
        return sum(s.slot.buffer.nbytes for s in self._staged.values()) + sum(s.buffer.nbytes for s in self._free)

    # ---------------------------------------------------------------- going

    def send_home(self, keep: Chunk | None = None, at_most: int | None = None) -> None:
        """Send home what nobody has any more; `keep` stays, and the first `at_most` others are looked at."""
        others = [staged for chunk, staged in self._staged.items() if chunk is not keep and staged.given]
        for staged in others[:at_most]:
            if not self._had_elsewhere(staged):
                self._send(staged)

    def _had_elsewhere(self, staged: Staged) -> bool:
        slot = staged.slot
        if storage_uses(slot.storage) > slot.uses + sum(map(len, staged.given.values())):
            return True
        for p, bundle in staged.given.items():
            if not all(map(may_leave, bundle.values())) or had_elsewhere(self._entries[p], bundle):
                return True
        return False

    def _send(self, staged: Staged) -> None:
        chunk, slot, device = staged.chunk, staged.slot, self._backend.device
        del self._staged[chunk]
        with torch.no_grad():
            settled = {p: settle(self._entries[p], bundle, device) for p, bundle in staged.given.items()}
        for p, bundle in staged.given.items():
            self.wrote |= not settled[p] or staged.versions[p] != [t._version for t in bundle.values()]
            if settled[p]:
                put_home(self._entries[p], chunk, p)
        stepped = self._backend.mark(f"offload/updated/{chunk.name}", Lane.COMPUTE).issue()
        runs = chunk.runs([p for p in settled if settled[p]])
        if runs:
            name, waits = f"offload/d2h/state/{chunk.name}", [stepped]
            pairs = list(zip(pieces(chunk.slab, runs), pieces(slot.lanes, runs), strict=True))
            chunk.drained = slot.idle = self._backend.copy(Lane.D2H, pairs, name=name, waits=waits).issue()
        else:
            slot.idle = stepped
        self._free.append(slot)
        self._unsettled += [p for p in settled if not settled[p]]

    # ---------------------------------------------------------------- without copies

    def forget(self, parameter: torch.Tensor, chunk: Chunk) -> None:
        """What lies in the slot is no longer the parameter's state."""
        staged = self._staged.get(chunk)
        if staged is not None:
            staged.given.pop(parameter, None)

    def leave(self) -> None:
        """Whoever has tensors of a slot keeps them; all lanes are empty."""
        for slot in [*self._free, *(staged.slot for staged in self._staged.values())]:
            self._backend.ledger.add(slot.buffer, -1)
        self._free, self._staged, self._last, self._plan, self._used = [], {}, None, (), []

    def given(self, parameter: torch.Tensor, chunk: Chunk) -> Bundle | None:
        """The tensors of the parameter that its entry has been given, while they are on the device."""
        staged = self._staged.get(chunk)
        return None if staged is None else staged.given.get(parameter)

    def take_unsettled(self) -> list[torch.Tensor]:
        """Parameters that have other tensors than those that left, independent of any slot; asked for once."""
        found, self._unsettled = self._unsettled, []
        return found


def put_home(entry: Entry, chunk: Chunk, parameter: torch.Tensor) -> None:
    """Let the entry have host tensors."""
    homes = chunk.homes(parameter)
    for key, home in homes.items():
        dict.__setitem__(entry, key, home)
    entry.away = homes.keys()


def _with_gradients(chunk: Chunk) -> list[torch.Tensor]:
    return [p for p in chunk.places if p.grad is not None]
