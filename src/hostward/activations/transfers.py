"""Offload and reload saved tensors by the operations of `hostward.schedule.activations`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hostward.activations.saved_tensors import Arrival, StorageSpan, TransferGroup
from hostward.core.inventory import align
from hostward.errors import ModelError
from hostward.runtime.backend import Backend, Buffer, Event, Tier
from hostward.runtime.pinned_arena import ALIGNMENT_BYTES, HostArena
from hostward.schedule.activations import LAYER_CALL_OPS
from hostward.schedule.ops import Lane

_OWNER = "saved activations"


class ActivationTransfers:
    """Offload groups, reload spans, and free no memory that a stream still reads or writes.

    Within the capture of a CUDA graph all transfers become part of the graph, which gets host memory of its own. Events
    of one capture are valid in that capture only, and every copy is waited for before the capture ends.

    Counters, in bytes: `offloaded`; `freed`, the part of it whose device memory was freed on release; `held`, the part
    that other code still holds; `reloaded`; `on_demand`, the part of it that was not prefetched (a miss).
    """

    def __init__(self, backend: Backend, arena: HostArena, *, turns: bool) -> None:
        """`turns`: no optimizer begins and ends the steps of the backend, so forwards do."""
        self._backend = backend
        self._turns = turns
        self.arena = arena
        self.offloaded = self.freed = self.held = self.reloaded = self.on_demand = 0
        # Tensors that were dropped while a stream works on them; finalisers append, the next operation here empties.
        self.orphans: deque[tuple[list[torch.Tensor], Event, int]] = deque()
        self._graphs: list[HostArena] = []
        """Host memory of CUDA graphs, one arena for each capture."""
        self._capture = 0
        """Newest capture; 0: none."""

        self._last_copies: dict[Lane, Event] = {}
        """Last copy of that capture on each lane, unless it has been waited for."""
        self._joining = -1
        """Graph task of the backward at whose end those copies are waited for."""

    def stream(self) -> int:
        """Return the key of the caller's compute stream."""
        return self._backend.compute_key()

    @property
    def host_bytes(self) -> int:
        """Host memory held, in bytes, that of CUDA graphs included."""
        return self.arena.slab_bytes + sum(arena.slab_bytes for arena in self._graphs)

    def enter(self) -> int:
        """Return the identifier of the CUDA graph capture that is active before a layer runs; 0: none.

        At the first layer of a capture all host memory is handed to the graph.

        Raises:
            ModelError: a capture is not possible now.
        """
        capture = self._backend.capture()
        if capture and capture != self._capture:
            what = "a layer with offloaded activations inside the capture of a CUDA graph"
            if not self.arena.retain:
                raise ModelError(
                    what,
                    why="replays copy to the host memory of the capture, which is returned between steps",
                    fix="Activations(retain_pinned_buffers=True), or detach() before the capture",
                )
            if self.arena.blocks_in_use:
                raise ModelError(
                    what,
                    why="tensors saved by an earlier forward are still on the host, in memory that the graph would own",
                    fix="run backward, or drop the losses of earlier forwards, before the capture",
                )
            self._graphs.append(self.arena.hand_over())
            self._capture = capture
            self._last_copies.clear()
        return capture

    def begin(self, capture: int) -> None:
        """Start a forward in the given capture (0: none)."""
        arena = self._graphs[-1] if capture else self.arena
        if arena.blocks_in_use:
            return
        self.collect()
        arena.rest()
        if self._turns and not self._backend.capturing():
            self._backend.end_step()
            self._backend.begin_step()

    def offload(self, name: str, group: TransferGroup) -> None:
        """Copy a group to the host after the work that the compute stream holds now, which has written all of it."""
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

    def release(self, groups: Iterable[TransferGroup]) -> None:
        """Free the device memory of groups once their copies have completed.

        The compute stream waits for the copies, and so do the streams to which the memory is returned.
        """
        groups = [g for g in groups if g.offloaded is not None and not g.released]
        if groups:
            here = self._backend.capture()
            groups = [g for g in groups if g.capture == here]  # groups of other captures keep their memory
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
                # Only this Python object and `data` hold the storage.
                sole = torch._C._storage_Use_Count(storage._cdata) <= 2
                if sole:
                    self.freed += span.nbytes
                    gone.append(Buffer(Tier.DEVICE, data, _OWNER))
                else:
                    self.held += span.nbytes
        self._backend.retire(gone, LAYER_CALL_OPS["release"].lane, waits=waits).issue()
        self._backend.return_memory("activations", [g.stream for g in groups if not g.capture])
        for buffer in gone:
            buffer.point_to(buffer.data.new_empty(0))

    def reload(self, group: TransferGroup, name: str, *, on_demand: bool = False) -> None:
        """Reload the spans of a group that live handles need and that are not on the device."""
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

    def arrive(self, group: TransferGroup, span: StorageSpan) -> None:
        """Make the compute stream wait for the reload of `span`."""
        arrival, stream = span.arrival, self._backend.compute_key()
        if arrival is None or stream in arrival.waited:
            return
        together = [s for s in group.spans if s.arrival is arrival and s.held is not None]
        reads = [Buffer(Tier.DEVICE, _of(s.held), _OWNER) for s in together]
        self._mark("arrive", {"reload": arrival.event}, reads=reads)
        arrival.waited.add(stream)

    def let_go(self, group: TransferGroup) -> None:
        """Return the memory of a group without handles; a finaliser may call this, so it issues no work.

        Device memory that a copy still uses is kept until `collect`.
        """
        for span in group.spans:
            if span.data is not None and group.offloaded is not None:
                self.orphans.append(([span.data], group.offloaded, group.capture))
            if span.held is not None and span.arrival is not None and not span.arrival.waited:
                self.orphans.append(([span.held], span.arrival.event, group.capture))
        if group.block is not None and group.arena is not None:
            group.arena.give(group.block, group.last_read)

    def collect(self) -> None:
        """Free the memory of dropped tensors after the copies that use it.

        Outside of a capture, tensors of a finished capture are freed at once: they return to the pool of their graph,
        which allocates nothing any more.
        """
        if not self.orphans:
            return
        here = self._backend.capture()
        for _ in range(len(self.orphans)):
            tensors, event, capture = self.orphans.popleft()
            if here and not capture:
                self.orphans.append((tensors, event, capture))  # to be freed after the capture
                continue
            if capture == here:
                self._backend.mark("offload/let go", Lane.COMPUTE, waits=[event]).issue()
            tensors.clear()

    # ---------------------------------------------------------------- captures

    def backward(self, capture: int) -> None:
        """Check that backward runs in the capture of its forward (0: none), and join the streams at its end.

        Raises:
            ModelError: backward runs in another capture than forward.
        """
        self._require_same(capture)
        task = torch._C._current_graph_task_id()
        if capture and task not in (-1, self._joining):
            self._joining = task
            torch.autograd.Variable._execution_engine.queue_callback(self.join)

    def join(self) -> None:
        """Make the compute stream wait for all copies of the capture, since a capture must end on one stream."""
        if self._last_copies:
            waits = list(self._last_copies.values())
            self._backend.mark("offload/join", Lane.COMPUTE, waits=waits).issue()
            self._last_copies.clear()

    def _require_same(self, capture: int) -> None:
        here = self._backend.capture()
        if capture != here:
            raise ModelError(
                f"backward {_where(here, capture)} of a forward {_where(capture, here)}",
                why="a replay repeats the copies of its own graph only: the reloaded tensors would be those of another "
                "forward. make_graphed_callables captures forward and backward separately",
                fix="capture forward and backward together, with torch.cuda.graph",
            )

    def close(self) -> None:
        """Return host memory, also that of CUDA graphs, unless autograd still needs it or a capture is active."""
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

    def _room(self, span: StorageSpan) -> Buffer:
        # One allocation for each span, since backward frees them one by one; on the compute stream, which uses them.
        device = self._backend.device
        return self._backend.adopt(torch.empty(span.nbytes, dtype=torch.uint8, device=device), _OWNER)

    @staticmethod
    def _parked(block: Buffer, span: StorageSpan) -> Buffer:
        return Buffer(Tier.HOST, block.data[span.host_start : span.host_start + span.nbytes], block.owner, block.pinned)


def _of(data: torch.Tensor | None) -> torch.Tensor:
    assert data is not None
    return data


def _where(capture: int, other: int) -> str:
    if not capture:
        return "outside of any CUDA graph"
    return "in the capture of another CUDA graph" if other else "in the capture of a CUDA graph"
