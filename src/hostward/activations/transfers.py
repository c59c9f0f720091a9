"""Groups of saved tensors on their way to the host and back: what is issued when, and what waits for what, by the
operations of `hostward.schedule.activations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hostward.activations.saved_tensors import Arrival, Group, Span
from hostward.core.inventory import align
from hostward.errors import ModelError
from hostward.runtime.backend import Backend, Buffer, Event, Tier
from hostward.runtime.pinned_arena import ALIGNMENT_BYTES, HostArena
from hostward.schedule.activations import LAYER_CALL_OPS
from hostward.schedule.ops import Lane

_OWNER = "saved activations"


class Movement:
    """Copies groups out and spans back, and frees nothing that a lane still works on.

    Within the capture of a CUDA graph all of it becomes part of the graph, which gets host memory of its own. There
    events count in their own capture alone, and every copy is waited for before the capture ends.

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
        self.orphans: deque[tuple[list[torch.Tensor], Event, int]] = deque()
        self._graphs: list[HostArena] = []
        """Memory of CUDA graphs, by capture."""
        self._capture = 0
        """The newest one."""
        self._last_copies: dict[Lane, Event] = {}
        """Of that capture, unless they have been waited for."""
        self._joining = -1
        """The backward at whose end they will be."""

    def stream(self) -> int:
        """The compute stream of the caller."""
        return self._backend.compute_key()

    @property
    def host_bytes(self) -> int:
        """Host memory held."""
        return self.arena.slab_bytes + sum(arena.slab_bytes for arena in self._graphs)

    def enter(self) -> int:
        """A layer is about to run. Returns the capture that it is part of; 0: of none. With the first layer of a
        capture all host memory passes to the graph. Raises ModelError where there can be no capture.
        """
        capture = self._backend.capture()
        if capture and capture != self._capture:
            what = "a layer with offloaded activations inside the capture of a CUDA graph"
            if not self.arena.retain:
                raise ModelError(
                    what,
                    why="replays copy to the host memory of the capture, which is given back between steps",
                    fix="Activations(retain_pinned_buffers=True), or detach() before the capture",
                )
            if self.arena.blocks_in_use:
                raise ModelError(
                    what,
                    why="what an earlier forward has saved is on the host yet, in memory that would be the graph's",
                    fix="run backward, or drop the losses of earlier forwards, before the capture",
                )
            self._graphs.append(self.arena.hand_over())
            self._capture = capture
            self._last_copies.clear()
        return capture

    def begin(self, capture: int) -> None:
        """A forward begins, in that capture."""
        arena = self._graphs[-1] if capture else self.arena
        if arena.blocks_in_use:
            return
        self.collect()
        arena.rest()
        if self._turns and not self._backend.capturing():
            self._backend.end_turn()
            self._backend.begin_turn()

    def offload(self, name: str, group: Group) -> None:
        """Copy a group to the host: all of it has been written, by what the compute lane holds now."""
        self.collect()
        group.stream = self._backend.caller_stream()
        spans = group.spans
        start = 0
        for span in spans:
            span.host_start = start
            start += align(span.nbytes, ALIGNMENT_BYTES)
        group.arena = arena = self._graphs[-1] if group.capture else self.arena
        group.block = block = arena.take(start)
        here = [Buffer(Tier.DEVICE, _of(span.data), _OWNER) for span in spans]
        events = {"made": self._mark("made", {}, writes=here)}
        pairs = [(self._parked(block.buffer, span), source) for span, source in zip(spans, here, strict=True)]
        after = [] if block.after is None else [block.after]
        group.offloaded = group.last_read = self._copy(
            "offload", f"offload/d2h/activation/{name}", pairs, events, after, group.capture
        )
        self.offloaded += group.nbytes

    def release(self, groups: Iterable[Group]) -> None:
        """The compute lane waits for the copies; then the device memory may go to somebody else. It goes back to the
        streams that made what was copied, which wait as well.
        """
        groups = [g for g in groups if g.offloaded is not None and not g.released]
        if groups:
            here = self._backend.capture()
            groups = [g for g in groups if g.capture == here]  # others keep what they have
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
        self._backend.retire(gone, LAYER_CALL_OPS["release"].lane, waits=waits).issue()
        self._backend.let_overwrite("activations", [g.stream for g in groups if not g.capture])
        for buffer in gone:
            buffer.data = buffer.data.new_empty(0)

    def reload(self, group: Group, name: str, *, on_demand: bool = False) -> None:
        """Copy what handles still need of a group back, unless it is there."""
        if not group.released or group.block is None or group.offloaded is None:
            return
        wanted = [s for s in group.spans if s.handles and s.held is None]
        if not wanted:
            return
        self._require_same(group.capture)
        self.collect()
        events = {"offload": group.offloaded}
        buffers = [self._room(span) for span in wanted]
        events["room"] = self._mark("room", events)
        pairs = [(room, self._parked(group.block.buffer, span)) for room, span in zip(buffers, wanted, strict=True)]
        event = self._copy("reload", f"offload/h2d/activation/{name}", pairs, events, [], group.capture)
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
                self.orphans.append(([span.data], group.offloaded, group.capture))
            if span.held is not None and span.arrival is not None and not span.arrival.waited:
                self.orphans.append(([span.held], span.arrival.event, group.capture))
        if group.block is not None and group.arena is not None:
            group.arena.give(group.block, group.last_read)

    def collect(self) -> None:
        """Let memory go that died while a lane was at it, behind that lane. Outside of a capture, what died in it goes
        at once: it returns to the pool of its graph, which takes nothing from there any more.
        """
        if not self.orphans:
            return
        here = self._backend.capture()
        for _ in range(len(self.orphans)):
            tensors, event, capture = self.orphans.popleft()
            if here and not capture:
                self.orphans.append((tensors, event, capture))  # when the capture is over
                continue
            if capture == here:
                self._backend.mark("offload/let go", Lane.COMPUTE, waits=[event]).issue()
            tensors.clear()

    # ---------------------------------------------------------------- captures

    def backward(self, capture: int) -> None:
        """Backward is at a layer that ran in that capture (0: in none). Raises ModelError if it is in another one."""
        self._require_same(capture)
        task = torch._C._current_graph_task_id()
        if capture and task not in (-1, self._joining):
            self._joining = task
            torch.autograd.Variable._execution_engine.queue_callback(self.join)

    def join(self) -> None:
        """In a capture: the compute lane waits for all copies, since a capture ends on one stream."""
        if self._last_copies:
            waits = list(self._last_copies.values())
            self._backend.mark("offload/join", Lane.COMPUTE, waits=waits).issue()
            self._last_copies.clear()

    def _require_same(self, capture: int) -> None:
        here = self._backend.capture()
        if capture != here:
            raise ModelError(
                f"backward {_where(here, capture)} of a forward {_where(capture, here)}",
                why="a replay repeats the copies of its own graph, and no others: what comes back would be of another "
                "forward. make_graphed_callables captures forward and backward apart",
                fix="capture forward and backward together, with torch.cuda.graph",
            )

    def close(self) -> None:
        """Return host memory, that of CUDA graphs as well, unless autograd still needs it, or during a capture."""
        if self._backend.capturing():
            return
        self.collect()
        self._backend.synchronise()
        for arena in (self.arena, *self._graphs):
            if arena.blocks_in_use == 0:
                arena.close()

    # ---------------------------------------------------------------- operations

    def _mark(self, op: str, events: Mapping[str, Event], **operands: Any) -> Event:
        template = LAYER_CALL_OPS[op]
        waits = [events[w] for w in template.waits]
        return self._backend.mark(f"offload/wait/activation/{op}", template.lane, waits=waits, **operands).issue()

    def _copy(
        self,
        op: str,
        name: str,
        pairs: Sequence[tuple[Buffer, Buffer]],
        events: Mapping[str, Event],
        prior: Sequence[Event],
        capture: int,
    ) -> Event:
        template = LAYER_CALL_OPS[op]
        waits = [*(events[w] for w in template.waits), *prior]
        event = self._backend.copy(template.lane, pairs, name=name, waits=waits).issue()
        if capture:
            self._last_copies[template.lane] = event
        return event

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


def _where(capture: int, other: int) -> str:
    if not capture:
        return "outside of any CUDA graph"
    return "in the capture of another CUDA graph" if other else "in the capture of a CUDA graph"
