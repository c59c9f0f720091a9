"""The backend of a CUDA device: lanes are streams, waits happen on the GPU, host functions run in stream order."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from hostward.errors import DeviceError, PlacementError
from hostward.kernels.cpu.library import check
from hostward.runtime.backend import (
    RING,
    AdamWOperands,
    Backend,
    Batch,
    Buffer,
    Clipping,
    Event,
    Held,
    Ledger,
    Meter,
    Partials,
    Scalars,
    Tier,
    Work,
    require_tier,
)
from hostward.runtime.cuda.commands import Command, CommandList, Verb, driver_table
from hostward.runtime.cuda.driver import capture_number, event_elapsed_ms, event_query, event_synchronize, pci_address
from hostward.runtime.cuda.kernels import KernelTables
from hostward.runtime.cuda.memory import device_slab, fetch, host_blocks, memory_of
from hostward.runtime.cuda.streams import INDEX, LANES, ComputeLane, LaneStreams
from hostward.runtime.cuda.timing import DriverEvents, Timings
from hostward.runtime.cuda.work import (
    CommandWork,
    CudaEvent,
    HostWork,
    KernelWork,
    TableWork,
    TaskWork,
    batch_of,
    copying,
    hold,
    hold_timed,
    wait_behind,
)
from hostward.runtime.global_norm import Across
from hostward.runtime.host_tasks import add_task, added_partials, isa_name, own_threads, partials_task
from hostward.runtime.pinned_memory import numa_node_of
from hostward.schedule.ops import Lane

_UPLOAD_BYTES = 2 * 1024 * 1024


class CudaBackend(Backend):
    """Streams of one device. Side streams are made once.

    The compute lane is whatever stream is current when an operation is issued; when that changes, the new one waits
    for the old one, so that the lane stays one queue.
    """

    _meter: Meter | None = None

    def __init__(self, device: torch.device | None = None, *, threads: int | None = None) -> None:
        """Raises DeviceError without a CUDA device."""
        if not torch.cuda.is_available():
            raise DeviceError("no CUDA device", why="torch.cuda.is_available() is false", fix="train.device=cpu")
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._ordinal = self.device.index
        self.ledger = Ledger()
        self.threads = own_threads() if threads is None else threads
        self.driver = driver_table()
        self.turn = 0
        self.errors = [np.zeros(1, dtype=np.int32) for _ in range(RING)]
        """Error words of the host functions of each pending turn."""
        self._lanes = LaneStreams(self.device)
        self._side, self.streams, self.context = self._lanes.side, self._lanes.table, self._lanes.context
        self._events = DriverEvents()
        self._unused: list[int] = []
        self._unused_in_captures: list[int] = []
        now, turned = torch.cuda.current_stream(self.device).cuda_stream, self._events.plain(self._unused)
        self._compute = ComputeLane(self.streams, INDEX[Lane.COMPUTE], now, turned, self.driver)
        self._fences = [[self._events.plain(self._unused) for _ in LANES] for _ in range(RING)]
        self._fence_lists: dict[int, CommandList] = {}
        # Between the streams of copy lanes: recording one anew changes no wait that is enqueued.
        self.turned = {lane: self._events.plain(self._unused) for lane in LANES}
        self._kept: list[list[object]] = [[] for _ in range(RING)]
        self.timings = Timings(self._events.timed, event_elapsed_ms)
        numa_node = numa_node_of(pci_address(self.device.index))
        self._host_blocks = functools.partial(host_blocks, self.device, self.threads, numa_node)
        current = functools.partial(self.current, Lane.COMPUTE)
        self._kernels = KernelTables(self.device, self._upload_arena, current)
        # Pending host functions write to memory of this process: they end before it, and before this object.
        weakref.finalize(self, self._events.drain, self._lanes.all())

    # ---------------------------------------------------------------- memory

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
        if tier is Tier.HOST:
            blocks = self._host_blocks(sizes, dtype, owner, pinned)
        else:
            blocks = list(torch.split(device_slab(self.device, sum(sizes), dtype, owner, zero), list(sizes)))
        buffers = [Buffer(tier, block, owner, pinned) for block in blocks]
        for buffer in buffers:
            self.ledger.add(buffer)
        return buffers

    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        if any(b.tier is Tier.HOST for b in buffers):
            self.synchronise()  # host pages may go only after every copy and host function over them
        if after:
            self.mark("free", Lane.COMPUTE, waits=after).issue()
        for buffer in buffers:
            self.ledger.add(buffer, -1)
            buffer.data = buffer.data.new_empty(0)

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        # Not on a copy lane: gradients queue there, and what is fetched would wait for the backward that makes them.
        fetch(self._lanes.fetches, pairs)

    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        buffer = Buffer(Tier.DEVICE if tensor.is_cuda else Tier.HOST, tensor, owner)
        if counted:
            self.ledger.add(buffer)
        return buffer

    def refill(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        buffer.data = tensor

    # ---------------------------------------------------------------- operations

    def event(self) -> Event:
        # Outside of its capture the driver refuses to wait for an event, until it is recorded anew.
        unused = self._unused_in_captures if self.capturing() else self._unused
        return CudaEvent(self._events.plain(unused), unused)

    def copy(
        self,
        lane: Lane,
        pairs: Sequence[tuple[Buffer, Buffer]],
        *,
        name: str,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        return copying(self, name, lane, waits, done or self.event(), pairs)

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
        return KernelWork(self, name, lane, kernel, waits, done or self.event())

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
        if lane is Lane.HOST:
            task = functools.partial(partials_task, gradients, firsts, out, self.threads)
            return TaskWork(self, name, task, waits, done or self.event())
        kernel = self._kernels.partials(gradients, lengths, firsts, out)
        return TableWork(self, name, Lane.COMPUTE, kernel, waits, done or self.event())

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
        require_tier([*totals, *gradients, *added_partials(totals, partials)], Tier.HOST, name)
        task = functools.partial(add_task, totals, gradients, self.threads, first=first, partials=partials)
        return TaskWork(self, name, task, waits, done or self.event())

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
        from hostward.kernels.cuda import norm as kernels

        def run() -> None:
            outputs = out.scale.data, out.skip.data, out.norm.data
            inputs = clipping.inv_scale, clipping.found_inf
            if across is None:
                kernels.launch_finish(partials.sums.data, partials.exponents.data, clipping.max_norm, inputs, outputs)
            else:
                totals, top, found = across.totals(partials, clipping.found_inf)
                kernels.bind_finish(totals, top, clipping.max_norm, (clipping.inv_scale, found), outputs)()
            if clipping.overflow_out is not None:
                clipping.overflow_out.add_(out.skip.data.view(clipping.overflow_out.shape))

        return self.launch("offload/norm", run, reads=partials.all(), writes=out.all(), waits=waits, done=done)

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
        require_tier([*operands.read(), *operands.written(), *scalars.all()], tier, name)
        if lane is Lane.HOST:
            return HostWork(self, name, operands, scalars, waits, done or self.event())
        return TableWork(self, name, lane, self._kernels.adamw(lane, operands, scalars), waits, done or self.event())

    def _upload_arena(self, size_bytes: int) -> torch.Tensor:
        size_bytes = max(size_bytes, _UPLOAD_BYTES)
        (arena,) = self._host_blocks([size_bytes], torch.uint8, "upload tables", pinned=True)
        self.ledger.add(Buffer(Tier.HOST, arena, "upload tables", pinned=True))
        return arena

    def retire(
        self, buffers: Sequence[Buffer], lane: Lane, *, waits: Sequence[Event] = (), done: Event | None = None
    ) -> Work:
        return CommandWork(self, "offload/retire", lane, waits, done or self.event())

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
        return CommandWork(self, name, lane, waits, done or self.event())

    def hold(self, stream: torch.Stream, waits: Sequence[Event]) -> None:
        hold(self, stream, waits)

    def hold_timed(self, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
        return hold_timed(self, stream, waits)

    def wait_behind(self, name: str, held: Held, event: torch.Event | None) -> None:
        wait_behind(self, name, held, event)

    def batch(self, works: Sequence[Work]) -> Batch:
        return batch_of(self, works)

    # ---------------------------------------------------------------- turns

    @property
    def meter(self) -> Meter | None:
        return self._meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        if meter is not None:
            self.follow_compute()
            self.timings.anchor(self._record_and_wait)
        self._meter = meter

    def _record_and_wait(self, event: int) -> None:
        CommandList([Command(Verb.RECORD, INDEX[Lane.COMPUTE], event)], self.driver).issue(self.streams)
        event_synchronize(event)

    def begin_turn(self) -> None:
        self.turn += 1
        slot = self.turn % RING
        # Timed events of arrivals are recorded in the forward of the next turn, whose fence is therefore waited for.
        for handle in self._fences[(slot + 1) % RING]:
            if not event_query(handle):
                event_synchronize(handle)
        self._kept[slot].clear()
        self.timings.read(slot, self.meter)
        self._raise_error(slot)
        if self.meter is not None:
            self.follow_compute()
            records = [Command(Verb.RECORD, INDEX[Lane.COMPUTE], event) for event in self.timings.begin(self.turn)]
            CommandList(records, self.driver).issue(self.streams)

    def end_turn(self) -> None:
        self.follow_compute()
        slot = self.turn % RING
        found = self._fence_lists.get(slot)
        if found is None:
            commands = [Command(Verb.RECORD, i, handle) for i, handle in enumerate(self._fences[slot])]
            found = self._fence_lists[slot] = CommandList(commands, self.driver)
        found.issue(self.streams)

    def wait(self, event: Event) -> None:
        event_synchronize(self.handle_of(event))

    def synchronise(self) -> None:
        self.follow_compute()  # the lane may be on another stream than the caller
        for stream in (*self._lanes.all(), torch.cuda.current_stream(self.device)):
            stream.synchronize()
        for kept in self._kept:
            kept.clear()
        for slot in range(RING):
            self._raise_error(slot)
        for turn in range(self.turn + 1, self.turn + 1 + RING):
            self.timings.read(turn % RING, self.meter)

    def caller_stream(self) -> torch.Stream | None:
        return torch.cuda.current_stream(self.device)

    def memory_of(self, stream: torch.Stream | None) -> AbstractContextManager[None]:
        return memory_of(self.device, stream)

    def compute_key(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def capture(self) -> int:
        return capture_number(self.compute_key()) if self.capturing() else 0

    def describe(self) -> Mapping[str, object]:
        name = torch.cuda.get_device_name(self.device)
        return {"backend": "cuda", "device": name, "host_threads": self.threads, "isa": isa_name()}

    # ---------------------------------------------------------------- for works

    def at_compute(self) -> bool:
        return self._compute.is_at(self.compute_key())

    @contextlib.contextmanager
    def on_compute(self) -> Iterator[None]:
        stream: torch.cuda.Stream = torch.cuda.ExternalStream(self._compute.now, self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield

    def wait_for(self, stream: torch.Stream) -> None:
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def follow_compute(self) -> int:
        handle: int = torch._C._cuda_getCurrentRawStream(self._ordinal)
        if not self._compute.is_at(handle):
            self._compute.go_to(handle, capturing=self.capturing())
        return handle

    @contextlib.contextmanager
    def current(self, lane: Lane) -> Iterator[None]:
        """Torch's operations go to `lane` inside the block, on this device."""
        if lane is Lane.COMPUTE:
            if torch.cuda.current_device() == self.device.index:
                yield
            else:
                with torch.cuda.device(self.device):
                    yield
        else:
            with torch.cuda.stream(self._side[lane]):
                yield

    def handle_of(self, event: Event) -> int:
        """The driver's handle. Raises PlacementError for an event of another backend."""
        if not isinstance(event.native, int):
            raise PlacementError("an event of another backend", fix="use events of the backend that is waited on")
        return event.native

    def keep(self, memory: object) -> None:
        """Keep it alive until this turn is over: a host function uses it."""
        self._kept[self.turn % RING].append(memory)

    def _raise_error(self, slot: int) -> None:
        code = int(self.errors[slot][0])
        if code:
            self.errors[slot][0] = 0
            check(code, "a host step")
