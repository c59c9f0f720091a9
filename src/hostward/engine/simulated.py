"""The backend of a machine without a GPU: lanes are queues, and any legal order of them may be asked for.

The caller's own torch code runs at once; every operation of hostward, those of the compute lane included, is queued
and carried out when somebody waits. Memory that is given back or retired is overwritten with 0xFF, which is NaN in
every float format. Each operation declares what it reads and writes, and a vector clock per lane tells whether a
conflicting pair is ordered: a missing event raises OrderingError when the operation is issued, whatever the order of
execution.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from hostward.errors import OrderingError
from hostward.host import reference
from hostward.host.adamw import adamw_step
from hostward.host.norm import norm_partials
from hostward.ordering import Accesses, LaneClocks, Stamp, unordered
from hostward.schedule import Lane

from .backend import (
    AdamWOperands,
    Backend,
    Buffer,
    Event,
    Ledger,
    Scalars,
    Tier,
    require_copyable,
    require_tier,
)
from .host_task import host_task, isa_name, own_threads
from .pools import host_slab

LANES = tuple(Lane)
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Order:
    """Which of the lanes that could go on goes on: lanes in `late` only when no other can, else by `seed` (None: as
    issued).
    """

    seed: int | None = None
    late: frozenset[Lane] = frozenset()


@dataclass(eq=False, slots=True)
class _Operation:
    lane: Lane
    name: str
    number: int
    stamp: Stamp
    waits: tuple[_Operation, ...]
    run: Callable[[], None] | None
    done: bool = False


@dataclass(slots=True)
class _Span:
    """Who has used the bytes [start, stop).

    `memory` keeps the address from being given out again while the accesses are remembered.
    """

    start: int
    stop: int
    memory: torch.Tensor
    accesses: Accesses[_Operation] = field(default_factory=Accesses)


class SimulatedBackend(Backend):
    """Lanes as queues over plain CPU memory."""

    def __init__(self, *, order: Order | None = None, threads: int | None = None, poison: bool = True) -> None:
        self.device = torch.device("cpu")
        self.ledger = Ledger()
        self.threads = own_threads() if threads is None else threads
        self._order = order or Order()
        self._random = random.Random(self._order.seed)
        self._poison = poison
        self._queues: dict[Lane, deque[_Operation]] = {lane: deque() for lane in LANES}
        self._clocks = LaneClocks()
        self._spans: dict[int, list[_Span]] = {}  # by address of the storage that the buffers view
        self._issued = 0

    def allocate(
        self, tier: Tier, sizes: Sequence[int], dtype: torch.dtype, owner: str, *, pinned: bool = False
    ) -> list[Buffer]:
        total_bytes = sum(sizes) * dtype.itemsize
        slab = host_slab(total_bytes, owner=owner, threads=self.threads).view(dtype)
        ends = np.cumsum([0, *sizes]).tolist()
        buffers = [Buffer(tier, slab[a:b], owner, pinned) for a, b in pairwise(ends)]
        for buffer in buffers:
            self.ledger.add(buffer)
        return buffers

    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        self.join(after)
        for buffer in buffers:
            for span in self._overlapping(buffer)[1]:
                for operation, stamp in (*span.accesses.readers, *filter(None, [span.accesses.writer])):
                    if not self._clocks.joined(stamp):
                        raise OrderingError(
                            f"{buffer.owner!r} is freed while {operation.name!r} may still use it",
                            why="a free is a write",
                            fix="pass that operation's event to free()",
                        )
        for buffer in buffers:
            self.ledger.add(buffer, -1)
            self._overwrite(buffer)
            buffer.data = buffer.data.new_empty(0)

    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        buffer = Buffer(Tier.DEVICE, tensor, owner)
        if counted:
            self.ledger.add(buffer)
        # Whoever made the tensor did so on the compute lane before now.
        self._issue(Lane.COMPUTE, f"made {owner}", None, (), (buffer,), ())
        return buffer

    def copy(self, lane: Lane, destination: Buffer, source: Buffer, *, name: str, waits: Sequence[Event] = ()) -> Event:
        require_copyable(lane, destination, source)
        self.ledger.copied_bytes[lane] += source.nbytes
        return self._issue(lane, name, lambda: _copy(destination.data, source.data), (source,), (destination,), waits)

    def launch(
        self,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        require_tier((*reads, *writes), Tier.DEVICE, name)
        return self._issue(Lane.COMPUTE, name, kernel, reads, writes, waits)

    def norm(
        self,
        gradients: Sequence[Buffer],
        out: Scalars,
        *,
        max_norm: float,
        inv_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        waits: Sequence[Event] = (),
    ) -> Event:
        require_tier((*gradients, *out.all()), Tier.DEVICE, "norm")

        def run() -> None:
            dtypes = sorted({g.data.dtype for g in gradients}, key=str)
            by_dtype = [[g.data for g in gradients if g.data.dtype is dtype] for dtype in dtypes]
            partials = [norm_partials(group, threads=self.threads) for group in by_dtype]
            sums, exponents = (np.concatenate(columns) for columns in zip(*partials, strict=True))
            norm, finite = reference.norm_from_partials(sums, exponents)
            inverse = np.float32(1.0) if inv_scale is None else np.float32(inv_scale.item())
            overflow = not finite or (found_inf is not None and found_inf.item() != 0)
            out.norm.data[0] = float(norm * inverse)
            out.skip.data[0] = int(overflow)
            scale = reference.clip_scale(float(norm), max_norm or None, float(inverse))
            out.scale.data[0] = float(scale) if finite else 0.0

        return self._issue(Lane.COMPUTE, "norm", run, gradients, out.all(), waits)

    def device_adamw(
        self,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        require_tier((*reads, *writes, *scalars.all()), Tier.DEVICE, name)
        return self._adamw(Lane.COMPUTE, name, operands, scalars, reads, writes, waits)

    def host_adamw(
        self,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        require_tier((*reads, *writes, *scalars.all()), Tier.HOST, name)
        return self._adamw(Lane.HOST, name, operands, scalars, reads, writes, waits)

    def record(self) -> Event:
        return self._issue(Lane.COMPUTE, "record", None, (), (), ())

    def retire(self, buffers: Sequence[Buffer], lane: Lane, waits: Sequence[Event] = ()) -> Event:
        def run() -> None:
            for buffer in buffers:
                self._overwrite(buffer)

        return self._issue(lane, "retire", run, (), buffers, waits)

    def join(self, events: Sequence[Event]) -> None:
        for event in events:
            operation = _operation(event)
            self._clocks.join(operation.stamp)
            while not operation.done:
                self._advance()

    def synchronise(self) -> None:
        while any(self._queues.values()):
            self._advance()
        self._clocks.join_all()
        self._spans.clear()

    def describe(self) -> Mapping[str, object]:
        return {"backend": "simulated", "device": "cpu", "host_threads": self.threads, "isa": isa_name()}

    def _adamw(
        self,
        lane: Lane,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event],
    ) -> Event:
        task = host_task(operands, scalars, self.threads)
        reads = (*reads, scalars.scale, scalars.skip)
        return self._issue(lane, name, lambda: adamw_step(task), reads, writes, waits)

    def _issue(
        self,
        lane: Lane,
        name: str,
        run: Callable[[], None] | None,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event],
    ) -> Event:
        before = tuple(_operation(event) for event in waits)
        stamp = self._clocks.stamp(lane, [earlier.stamp for earlier in before])
        operation = _Operation(lane, name, self._issued, stamp, before, run)
        self._issued += 1
        self._check(operation, reads, writes)
        if run is None and not self._queues[lane]:
            operation.done = True
        else:
            self._queues[lane].append(operation)
        return Event(operation)

    def _check(self, operation: _Operation, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """The ordering rule, on bytes."""
        for buffers, writing in ((reads, False), (writes, True)):
            for buffer in buffers:
                own, overlapping = self._overlapping(buffer)
                for span in overlapping:
                    earlier = span.accesses.unordered(operation.stamp, writes=writing)
                    if earlier is not None and earlier is not operation:
                        raise unordered(earlier.name, earlier.lane, operation.name, operation.lane, buffer.owner)
                own.accesses.add(operation, operation.stamp, writes=writing)

    def _overlapping(self, buffer: Buffer) -> tuple[_Span, list[_Span]]:
        """Accesses of exactly these bytes, and of every buffer that shares one: ranges of a bucket are views of it."""
        start = buffer.data.data_ptr()
        stop = start + buffer.nbytes
        spans = self._spans.setdefault(buffer.data.untyped_storage().data_ptr(), [])
        own = next((s for s in spans if (s.start, s.stop) == (start, stop)), None)
        if own is None:
            own = _Span(start, stop, buffer.data)
            spans.append(own)
        return own, [s for s in spans if s.start < stop and start < s.stop]

    def _advance(self) -> None:
        """Carry out the first operation of one lane whose waits are over."""
        ready = [q[0] for q in self._queues.values() if q and all(w.done for w in q[0].waits)]
        if not ready:
            names = [q[0].name for q in self._queues.values() if q]
            raise OrderingError(f"deadlock: {names} all wait", fix="an event is waited for that nobody records")
        early = [o for o in ready if o.lane not in self._order.late] or ready
        chosen = min(early, key=lambda o: o.number) if self._order.seed is None else self._random.choice(early)
        self._queues[chosen.lane].popleft()
        try:
            if chosen.run is not None:
                chosen.run()
        finally:
            # Even if it failed: what waits for it goes on, as on a stream, and the error is on its way to the caller.
            chosen.run = None
            chosen.done = True

    def _overwrite(self, buffer: Buffer) -> None:
        if self._poison:
            buffer.data.view(torch.uint8).fill_(POISON)


def _operation(event: Event) -> _Operation:
    if not isinstance(event.native, _Operation):
        raise OrderingError("an event of another backend", fix="use events of the backend that is waited on")
    return event.native


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        destination.copy_(source)
