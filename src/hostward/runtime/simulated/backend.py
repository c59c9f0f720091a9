"""Implement the backend without a GPU: lanes are queues, run in any legal order.

The caller's own torch code runs at once; every operation of hostward, also on the compute lane, is queued and run when
the caller waits. Memory that is freed or retired is overwritten with 0xFF, which is NaN in every float format. Each
operation declares the buffers that it reads and writes, and a vector clock per lane decides whether a conflicting pair
is ordered: a missing event raises OrderingError when the operation is issued, whatever the order of execution.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from hostward.errors import OrderingError
from hostward.kernels import reference
from hostward.kernels.cpu.accumulate import accumulate
from hostward.kernels.cpu.adamw import AdamWTask, Role, adamw_step
from hostward.kernels.cpu.norm import norm_partials
from hostward.runtime.backend import (
    AdamWOperands,
    Backend,
    Buffer,
    Clipping,
    Event,
    Hyper,
    Ledger,
    Partials,
    Scalars,
    Tier,
    Work,
    chunks_of,
    require_copyable,
    require_tier,
)
from hostward.runtime.global_norm import Across
from hostward.runtime.host_tasks import add_task, added_partials, host_task, isa_name, own_threads
from hostward.runtime.pinned_memory import host_slab, require_host_memory
from hostward.runtime.simulated.race_detector import ByteRule, Operation
from hostward.schedule.ops import Lane
from hostward.schedule.race_check import LaneClocks

LANES = tuple(Lane)
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Order:
    """Chooses which of the ready lanes runs next: lanes in `late` last, others by `seed` (None: in order of issue).

    `eager`: operations run as they are issued, which is one of the legal orders.
    """

    seed: int | None = None
    late: frozenset[Lane] = frozenset()
    eager: bool = False


LATEST = Order(late=frozenset(set(Lane) - {Lane.COMPUTE}))
"""Runs everything but the compute lane as late as possible, so that code that reads too early on a GPU does so here.
"""


def operation_of(event: Event) -> Operation | None:
    """Return the operation that an event stands for; None if nothing has been issued yet."""
    if event.native is not None and not isinstance(event.native, Operation):
        raise OrderingError("an event of another backend", fix="use events of the backend that is waited on")
    return event.native


class _SimulatedWork(Work):
    """Makes a new operation at each issue, from the buffers' present data."""

    __slots__ = ("_enqueue",)

    def __init__(self, name: str, lane: Lane, done: Event, enqueue: Callable[[], Operation]) -> None:
        super().__init__(name, lane, done)
        self._enqueue = enqueue

    def issue(self) -> Event:
        self.done.native = self._enqueue()
        return self.done


class SimulatedBackend(Backend):
    """Runs lanes as queues over plain CPU memory. `order`: by default `LATEST`."""

    def __init__(self, *, order: Order | None = None, threads: int | None = None, poison: bool = True) -> None:
        self.device = torch.device("cpu")
        self.ledger = Ledger()
        self.threads = own_threads() if threads is None else threads
        self._order = LATEST if order is None else order
        self._random = random.Random(self._order.seed)
        self._poison = poison
        self._alone = threading.RLock()
        """A thread that reads weights beside training waits for operations that the other one is running."""
        self._queues: dict[Lane, deque[Operation]] = {lane: deque() for lane in LANES}
        self._clocks = LaneClocks()
        self._bytes = ByteRule()
        self._issued = 0
        self._turn = 0
        self._started_s = time.perf_counter()

    def allocate(
        self,
        tier: Tier,
        sizes: Sequence[int],
        dtype: torch.dtype,
        owner: str,
        *,
        pinned: bool = False,
        zero: bool = True,
    ) -> list[Buffer]:
        total_bytes = sum(sizes) * dtype.itemsize
        if tier is Tier.HOST:
            slab = host_slab(total_bytes, owner=owner, threads=self.threads).view(dtype)
        else:  # torch's own memory, as on a GPU: its storage can be freed and allocated again
            require_host_memory(total_bytes, owner=owner)
            slab = torch.zeros(total_bytes // dtype.itemsize, dtype=dtype, device="cpu")
        if not zero and self._poison:
            slab.view(torch.uint8).fill_(POISON)
        ends = np.cumsum([0, *sizes]).tolist()
        buffers = [Buffer(tier, slab[a:b], owner, pinned) for a, b in pairwise(ends)]
        for buffer in buffers:
            self.ledger.add(buffer)
            if tier is Tier.DEVICE:
                self._made(buffer)
        return buffers

    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        if any(b.tier is Tier.HOST for b in buffers):
            self.synchronise()
        if after:
            self.mark("free", Lane.COMPUTE, waits=after).issue()
        for buffer in buffers:
            # Any code on the compute lane may be the next owner of the memory.
            poison = functools.partial(self._overwrite, buffer.data)
            self._issue(Lane.COMPUTE, f"free {buffer.owner}", poison, (), (buffer,), ())
            self.ledger.add(buffer, -1)
            buffer.point_to(buffer.data.new_empty(0))

    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        buffer = Buffer(Tier.DEVICE, tensor, owner)
        if counted:
            self.ledger.add(buffer)
        self._made(buffer)
        return buffer

    def refill(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        buffer.point_to(tensor.view(-1))
        if tensor.numel():
            self._made(buffer)

    def event(self) -> Event:
        return Event()

    def copy(
        self,
        lane: Lane,
        pairs: Sequence[tuple[Buffer, Buffer]],
        *,
        name: str,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        def enqueue() -> Operation:
            tensors = [(destination.data, source.data) for destination, source in pairs]
            if _kinds(tensors) != bound:
                require_copyable(lane, pairs)
            nbytes = sum(source.nbytes for _, source in tensors)
            self.ledger.copied_bytes[lane] += nbytes
            return self._issue(lane, name, lambda: _copy(tensors), reads, writes, waits, nbytes)

        require_copyable(lane, pairs)
        reads, writes = [s for _, s in pairs], [d for d, _ in pairs]
        bound = _kinds([(destination.data, source.data) for destination, source in pairs])
        return _SimulatedWork(name, lane, done or Event(), enqueue)

    def launch(
        self,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        lane: Lane = Lane.COMPUTE,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        require_tier((*reads, *writes), Tier.DEVICE, name)

        def enqueue() -> Operation:
            return self._issue(lane, name, kernel, reads, writes, waits)

        return _SimulatedWork(name, lane, done or Event(), enqueue)

    def partials(
        self,
        name: str,
        gradients: Sequence[Buffer],
        lengths: Sequence[int],
        firsts: Sequence[int],
        out: Partials,
        *,
        lane: Lane = Lane.COMPUTE,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        require_tier((*gradients, *out.all()), Tier.HOST if lane is Lane.HOST else Tier.DEVICE, name)
        sizes = [chunks_of(length) for length in lengths]
        parts = [out.part(first, size) for first, size in zip(firsts, sizes, strict=True)]
        writes = [buffer for part in parts for buffer in part.all()]

        def enqueue() -> Operation:
            tensors = [g.data for g in gradients]

            def run() -> None:
                sums, exponents = map(torch.from_numpy, norm_partials(tensors, threads=self.threads))
                start = 0
                for part, size in zip(parts, sizes, strict=True):
                    part.sums.data.copy_(sums[start : start + size])
                    part.exponents.data.copy_(exponents[start : start + size])
                    start += size

            return self._issue(lane, name, run, gradients, writes, waits)

        return _SimulatedWork(name, lane, done or Event(), enqueue)

    def add(
        self,
        name: str,
        totals: Sequence[Buffer],
        gradients: Sequence[Buffer],
        *,
        first: bool,
        partials: tuple[Partials, Sequence[int]] | None = None,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        reads, writes = [*gradients, *([] if first else totals)], [*totals, *added_partials(totals, partials)]
        require_tier([*writes, *gradients], Tier.HOST, name)

        def enqueue() -> Operation:
            task = add_task(totals, gradients, self.threads, first=first, partials=partials)
            return self._issue(Lane.HOST, name, lambda: accumulate(task), reads, writes, waits)

        return _SimulatedWork(name, Lane.HOST, done or Event(), enqueue)

    def norm(
        self,
        partials: Partials,
        out: Scalars,
        clipping: Clipping,
        *,
        across: Across | None = None,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        writes = out.all()
        require_tier((*partials.all(), *writes), Tier.DEVICE, "norm")
        reads = [*partials.all(), *([] if across is None else across.kept())]

        def enqueue() -> Operation:
            taken = replace(clipping)  # the caller changes its own for the next step
            run = functools.partial(finish_norm, partials, out, taken, across)
            return self._issue(Lane.COMPUTE, "norm", run, reads, writes, waits)

        return _SimulatedWork("offload/norm", Lane.COMPUTE, done or Event(), enqueue)

    def adamw(
        self,
        lane: Lane,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        tier = Tier.HOST if lane is Lane.HOST else Tier.DEVICE
        left, guesses = operands.left(), operands.second is not None and operands.second.role is Role.GUESS
        reads = [*operands.read(), *(() if guesses else (scalars.scale, scalars.skip))]
        writes = [*operands.written(), *left]
        require_tier([*reads, *writes, scalars.norm], tier, name)
        made: tuple[AdamWTask, Hyper, object] | None = None

        def run(task: AdamWTask) -> None:
            adamw_step(task)
            for buffer in left:
                self._overwrite(buffer.data)

        def enqueue() -> Operation:
            nonlocal made
            now = operands.constants
            # Tasks are immutable, and host memory keeps its address.
            if made is None or lane is not Lane.HOST or made[1] != now.hyper or made[2] is not now.tables:
                made = host_task(operands, scalars, self.threads), now.hyper, now.tables
            return self._issue(lane, name, functools.partial(run, made[0]), reads, writes, waits)

        return _SimulatedWork(name, lane, done or Event(), enqueue)

    def retire(
        self, buffers: Sequence[Buffer], lane: Lane, *, waits: Sequence[Event] = (), done: Event | None = None
    ) -> Work:
        def enqueue() -> Operation:
            tensors = [b.data for b in buffers if not b.borrowed]

            def run() -> None:
                for tensor in tensors:
                    self._overwrite(tensor)

            return self._issue(lane, "offload/retire", run, (), buffers, waits)

        return _SimulatedWork("offload/retire", lane, done or Event(), enqueue)

    def mark(
        self,
        name: str,
        lane: Lane,
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        def enqueue() -> Operation:
            operation = self._issue(lane, name, None, reads, writes, waits)
            if lane is Lane.COMPUTE:  # the caller's own code runs now, after everything on that lane
                self._finish(operation)
            return operation

        return _SimulatedWork(name, lane, done or Event(), enqueue)

    def wait_on_stream(self, stream: object, waits: Sequence[Event]) -> None:
        # There are no streams, so the only caller waits.
        self.mark("offload/hold", Lane.COMPUTE, waits=waits).issue()

    def begin_step(self) -> None:
        self._turn += 1
        if self._order.eager:
            self.synchronise()

    def end_step(self) -> None:
        pass

    def wait(self, event: Event) -> None:
        operation = operation_of(event)
        if operation is not None:
            self._finish(operation)

    def synchronise(self) -> None:
        with self._alone:
            while any(self._queues.values()):
                self._advance()
            self._clocks.join_all()
            self._bytes.clear()

    def describe(self) -> Mapping[str, object]:
        return {"backend": "simulated", "device": "cpu", "host_threads": self.threads, "isa": isa_name()}

    def _made(self, buffer: Buffer) -> None:
        """Record that the tensor was produced on the compute lane before now."""
        self._issue(Lane.COMPUTE, f"made {buffer.owner}", None, (), (buffer,), ())

    def _issue(
        self,
        lane: Lane,
        name: str,
        run: Callable[[], None] | None,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event],
        nbytes: int = 0,
    ) -> Operation:
        before = tuple(operation for event in waits if (operation := operation_of(event)) is not None)
        with self._alone:
            stamp = self._clocks.stamp(lane, [earlier.stamp for earlier in before])
            operation = Operation(lane, name, self._issued, stamp, before, run, nbytes, self._turn)
            self._issued += 1
            self._bytes.check(operation, reads, writes)
            self._queues[lane].append(operation)
            if self._order.eager:
                self._finish(operation)
        return operation

    def _finish(self, operation: Operation) -> None:
        """Run operations until this one is done."""
        with self._alone:
            while not operation.done:
                self._advance()

    def _advance(self) -> None:
        """Run the first operation of one lane whose waits are complete."""
        ready = [q[0] for q in self._queues.values() if q and all(w.done for w in q[0].waits)]
        if not ready:
            names = [q[0].name for q in self._queues.values() if q]
            raise OrderingError(f"deadlock: {names} all wait", fix="an event is waited for that nobody records")
        early = [o for o in ready if o.lane not in self._order.late] or ready
        chosen = min(early, key=lambda o: o.number) if self._order.seed is None else self._random.choice(early)
        self._queues[chosen.lane].popleft()
        start_s = time.perf_counter()
        try:
            if chosen.run is not None:
                chosen.run()
        finally:
            # Also if it failed: operations that wait for it go on, as on a stream, and the error reaches the caller.
            chosen.run = None
            chosen.waits = ()
            chosen.done = True
        if self.meter is not None and chosen.lane is not Lane.COMPUTE:
            end_s = time.perf_counter()
            times_s = start_s - self._started_s, end_s - self._started_s
            self.meter(chosen.name, chosen.lane, *times_s, chosen.nbytes, chosen.turn)
            # Operations run on the caller's own thread, which waits meanwhile.
            self.meter(f"offload/wait/{chosen.lane.value}", Lane.COMPUTE, *times_s, 0, chosen.turn)

    def _overwrite(self, data: torch.Tensor) -> None:
        if self._poison:
            data.view(torch.uint8).fill_(POISON)


def _kinds(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[object]:
    """Return what a copy depends on, apart from where the bytes are."""
    return [(tensor.dtype, tensor.shape, tensor.stride()) for pair in pairs for tensor in pair]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for destination, source in pairs:
            destination.copy_(source)


# The simulated backend computes the norm by its definition in numpy.


def finish_norm(partials: Partials, out: Scalars, clipping: Clipping, across: Across | None) -> None:
    """Write norm, skip flag and factor of the gradients (docs/exactness.md)."""
    inv_scale, found_inf = clipping.inv_scale, clipping.found_inf
    if across is None:
        sums, exponents = partials.sums.data.numpy(), partials.exponents.data.numpy()
        norm, finite = reference.norm_from_partials(sums, exponents)
    else:
        totals, top, found_inf = across.totals(partials, found_inf)
        high, low = totals.tolist()
        norm, finite = reference.norm_of_total(high, low, int(top.item()))
    inverse = np.float32(1.0) if inv_scale is None else np.float32(inv_scale.item())
    overflow = not finite or (found_inf is not None and found_inf.item() != 0)
    out.norm.data[0] = float(norm * inverse)
    out.skip.data[0] = int(overflow)
    scale = reference.clip_scale(float(norm), clipping.max_norm or None, float(inverse))
    out.scale.data[0] = float(scale) if finite else 0.0
    if clipping.overflow_out is not None:
        clipping.overflow_out.add_(int(overflow))
