"""Groups of saved tensors on their way to the host and back: what is issued when, and what waits for what, by the
operations of `hostward.lowering.activations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hostward.engine.backend import Backend, Buffer, Event, Tier
from hostward.engine.host_arena import ALIGNMENT_BYTES, HostArena
from hostward.inventory import align
from hostward.lowering.activations import VISIT
from hostward.schedule import Lane

from .saved_tensors import Arrival, Group, Span

_OWNER = "saved activations"


class Movement:
    """Copies groups out and spans back, and frees nothing that a lane still works on.

    Counts, in bytes: `offloaded`, `freed` (of these, device memory that went with the release), `held` (that somebody
    else holds), `reloaded`, and of these `on_demand` (nobody had foreseen it).
    """

    def __init__(self, backend: Backend, arena: HostArena, *, turns: bool) -> None:
        """`turns`: nobody else counts the turns of the backend, so they change here, between forwards."""
        self._backend = backend
        self._turns = turns
        self.arena = arena
        self.offloaded = self.freed = self.held = self.reloaded = self.on_demand = 0
        # What dies while a lane works on it; filled by finalisers, emptied by the next operation here.
        self._orphans: deque[tuple[list[torch.Tensor], Event]] = deque()

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._backend.capturing()

    def stream(self) -> int:
        """The compute stream of the caller."""
        return self._backend.compute_key()

    def begin(self) -> None:
        """A forward begins."""
        if self.arena.blocks_in_use:
            return
        self.collect()
        self.arena.rest()
        if self._turns:
            self._backend.end_turn()
            self._backend.begin_turn()

    def offload(self, name: str, group: Group) -> None:
        """Copy a group to the host: all of it has been written, by what the compute lane holds now."""
        self.collect()
        spans = group.spans
        start = 0
        for span in spans:
            span.host_start = start
            start += align(span.nbytes, ALIGNMENT_BYTES)
        group.block = block = self.arena.take(start)
        here = [Buffer(Tier.DEVICE, _of(span.data), _OWNER) for span in spans]
        events = {"made": self._mark("made", {}, writes=here)}
        pairs = [(self._parked(block.buffer, span), source) for span, source in zip(spans, here, strict=True)]
        after = [] if block.after is None else [block.after]
        group.offloaded = group.last_read = self._copy(
            "offload", f"offload/d2h/activation/{name}", pairs, events, after
        )
        self.offloaded += group.nbytes

    def release(self, groups: Iterable[Group]) -> None:
        """The compute lane waits for the copies; then the device memory may go to somebody else."""
        groups = [g for g in groups if g.offloaded is not None and not g.released]
        if not groups:
            return
        waits = [g.offloaded for g in groups if g.offloaded is not None]
        gone = []
        for group in groups:
            group.released = True
            for span in group.spans:
                data, span.data = span.data, None
                if data is None:
                    continue
                storage = data.untyped_storage()
                # This Python object and `data`: nobody else.
                sole = torch._C._storage_Use_Count(storage._cdata) <= 2
                if sole:
                    self.freed += span.nbytes
                    gone.append(Buffer(Tier.DEVICE, data, _OWNER))
                else:
                    self.held += span.nbytes
        self._backend.retire(gone, VISIT["release"].lane, waits=waits).issue()
        for buffer in gone:
            buffer.data = buffer.data.new_empty(0)

    def reload(self, group: Group, name: str, *, on_demand: bool = False) -> None:
        """Copy what handles still need of a group back, unless it is there."""
        if not group.released or group.block is None or group.offloaded is None:
            return
        wanted = [s for s in group.spans if s.handles and s.held is None]
        if not wanted:
            return
        self.collect()
        events = {"offload": group.offloaded}
        buffers = [self._room(span) for span in wanted]
        events["room"] = self._mark("room", events)
        pairs = [(room, self._parked(group.block.buffer, span)) for room, span in zip(buffers, wanted, strict=True)]
        event = self._copy("reload", f"offload/h2d/activation/{name}", pairs, events, [])
        group.last_read = event
        arrival = Arrival(event)
        for span, room in zip(wanted, buffers, strict=True):
            span.held, span.arrival, span.awaiting = room.data, arrival, span.handles
        nbytes = sum(span.nbytes for span in wanted)
        self.reloaded += nbytes
        self.on_demand += nbytes if on_demand else 0

    def arrive(self, group: Group, span: Span) -> None:
        """The compute lane waits for what has been reloaded together with `span`."""
        arrival, stream = span.arrival, self._backend.compute_key()
        if arrival is None or stream in arrival.waited:
            return
        together = [s for s in group.spans if s.arrival is arrival and s.held is not None]
        reads = [Buffer(Tier.DEVICE, _of(s.held), _OWNER) for s in together]
        self._mark("arrive", {"reload": arrival.event}, reads=reads)
        arrival.waited.add(stream)

    def let_go(self, group: Group) -> None:
        """No handle on the group is left. Called from a finaliser: notes what there is to wait for, and no more."""
        for span in group.spans:
            if span.data is not None and group.offloaded is not None:
                self._orphans.append(([span.data], group.offloaded))
            if span.held is not None and span.arrival is not None and not span.arrival.waited:
                self._orphans.append(([span.held], span.arrival.event))
        if group.block is not None:
            self.arena.give(group.block, group.last_read)

    def collect(self) -> None:
        """Let memory go that died while a lane was at it, behind that lane."""
        while self._orphans:
            tensors, event = self._orphans.popleft()
            self._backend.mark("offload/let go", Lane.COMPUTE, waits=[event]).issue()
            tensors.clear()

    # ---------------------------------------------------------------- operations

    def _mark(self, op: str, events: Mapping[str, Event], **operands: Any) -> Event:
        template = VISIT[op]
        waits = [events[w] for w in template.waits]
        return self._backend.mark(f"offload/wait/{op}", template.lane, waits=waits, **operands).issue()

    def _copy(
        self,
        op: str,
        name: str,
        pairs: Sequence[tuple[Buffer, Buffer]],
        events: Mapping[str, Event],
        prior: Sequence[Event],
    ) -> Event:
        template = VISIT[op]
        waits = [*(events[w] for w in template.waits), *prior]
        return self._backend.copy(template.lane, pairs, name=name, waits=waits).issue()

    def _room(self, span: Span) -> Buffer:
        # One allocation for each: backward frees them one by one. On the compute lane, where they will be used.
        device = self._backend.device
        return self._backend.adopt(torch.empty(span.nbytes, dtype=torch.uint8, device=device), _OWNER)

    @staticmethod
    def _parked(block: Buffer, span: Span) -> Buffer:
        return Buffer(Tier.HOST, block.data[span.host_start : span.host_start + span.nbytes], block.owner, block.pinned)


def _of(data: torch.Tensor | None) -> torch.Tensor:
    assert data is not None
    return data
