"""Own the streams, events, argument tables and timings of a CUDA device, and the memory that pending steps use."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from hostward.errors import DeviceError, PlacementError
from hostward.kernels.cpu.library import check
from hostward.runtime.backend import RING, Buffer, Event, Ledger, Meter, Tier
from hostward.runtime.cuda.commands import Command, CommandList, Verb, driver_table
from hostward.runtime.cuda.driver import capture_number, event_elapsed_ms, event_query, event_synchronize, pci_address
from hostward.runtime.cuda.kernels import KernelTables
from hostward.runtime.cuda.memory import host_blocks
from hostward.runtime.cuda.streams import INDEX, LANES, ComputeLane, LaneStreams
from hostward.runtime.cuda.timing import DriverEvents, Timings
from hostward.runtime.host_tasks import own_threads
from hostward.runtime.pinned_memory import numa_node_of
from hostward.schedule.ops import Lane

_UPLOAD_BYTES = 2 * 1024 * 1024


class CudaEvent(Event):
    """Returns its handle for reuse when freed; enqueued waits keep the meaning of the event at that time."""

    __slots__ = ("_unused",)

    def __init__(self, handle: int, unused: list[int]) -> None:
        super().__init__(handle)
        self._unused = unused

    def __del__(self) -> None:
        if isinstance(self.native, int):
            self._unused.append(self.native)


class CudaContext:
    """Owns the streams, events and pending steps of one device; side streams are made once.

    The compute lane is the stream that is current when an operation is issued; when that changes, the new stream waits
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
        """Error words of host functions, one for each pending step."""
        self.lanes = LaneStreams(self.device)
        self.streams, self.handle = self.lanes.table, self.lanes.context
        """Stream table for commands, and the driver's CUcontext."""
        self._events = DriverEvents()
        self._unused: list[int] = []
        self._unused_in_captures: list[int] = []
        now, turned = torch.cuda.current_stream(self.device).cuda_stream, self._events.plain(self._unused)
        self._compute = ComputeLane(self.streams, INDEX[Lane.COMPUTE], now, turned, self.driver)
        self._fences = [[self._events.plain(self._unused) for _ in LANES] for _ in range(RING)]
        self._fence_lists: dict[int, CommandList] = {}
        # For waits between the two streams of a copy lane: recording an event again changes no enqueued wait.
        self.turned = {lane: self._events.plain(self._unused) for lane in LANES}
        self._kept: list[list[object]] = [[] for _ in range(RING)]
        self.timings = Timings(self._events.timed, event_elapsed_ms)
        numa_node = numa_node_of(pci_address(self.device.index))
        self.host_blocks = functools.partial(host_blocks, self.device, self.threads, numa_node)
        """Allocates as `hostward.runtime.cuda.memory.host_blocks`, for this device."""
        self.kernels = KernelTables(self.device, self.upload_arena, functools.partial(self.current, Lane.COMPUTE))
        # Pending host functions write to memory of this process, so they have to end before this object is freed.
        weakref.finalize(self, self._events.drain, self.lanes.all())

    # ---------------------------------------------------------------- events and memory

    def event(self) -> Event:
        """Return a new event, which is complete until a work records it."""
        # The driver raises for waits on an event outside of its capture, until it is recorded again.
        unused = self._unused_in_captures if self.capturing() else self._unused
        return CudaEvent(self._events.plain(unused), unused)

    def handle_of(self, event: Event) -> int:
        """Return the driver's handle. Raises PlacementError for an event of another backend."""
        if not isinstance(event.native, int):
            raise PlacementError("an event of another backend", fix="use events of the backend that is waited on")
        return event.native

    def wait(self, event: Event) -> None:
        """Wait on the host for an event."""
        event_synchronize(self.handle_of(event))

    def keep(self, memory: object) -> None:
        """Keep memory alive until this step is complete, because a host function uses it."""
        self._kept[self.turn % RING].append(memory)

    def upload_arena(self, size_bytes: int) -> torch.Tensor:
        """Allocate a pinned block of at least so many bytes, uint8, for argument tables. Raises MemoryLimitError."""
        size_bytes = max(size_bytes, _UPLOAD_BYTES)
        (arena,) = self.host_blocks([size_bytes], torch.uint8, "upload tables", pinned=True)
        self.ledger.add(Buffer(Tier.HOST, arena, "upload tables", pinned=True))
        return arena

    # ---------------------------------------------------------------- times

    @property
    def meter(self) -> Meter | None:
        """Return the meter, see `Backend.meter`."""
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

    # ---------------------------------------------------------------- steps

    def begin_step(self) -> None:
        """Begin a step, see `Backend.begin_step`."""
        self.turn += 1
        slot = self.turn % RING
        # Timed events of waits for weights are recorded in the forward of the next step, so its fence is waited for.
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

    def end_step(self) -> None:
        """End a step, see `Backend.end_step`."""
        self.follow_compute()
        slot = self.turn % RING
        found = self._fence_lists.get(slot)
        if found is None:
            commands = [Command(Verb.RECORD, i, handle) for i, handle in enumerate(self._fences[slot])]
            found = self._fence_lists[slot] = CommandList(commands, self.driver)
        found.issue(self.streams)

    def synchronise(self) -> None:
        """Wait for all lanes, see `Backend.synchronise`."""
        self.follow_compute()  # the lane may be on another stream than the caller
        for stream in (*self.lanes.all(), torch.cuda.current_stream(self.device)):
            stream.synchronize()
        for kept in self._kept:
            kept.clear()
        for slot in range(RING):
            self._raise_error(slot)
        for turn in range(self.turn + 1, self.turn + 1 + RING):
            self.timings.read(turn % RING, self.meter)

    def _raise_error(self, slot: int) -> None:
        code = int(self.errors[slot][0])
        if code:
            self.errors[slot][0] = 0
            check(code, "a host step")

    # ---------------------------------------------------------------- the compute lane

    def compute_key(self) -> int:
        """Return the key of the current stream, see `Backend.compute_key`."""
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def at_compute(self) -> bool:
        """Return whether the current stream is the compute lane, see `Backend.at_compute`."""
        return self._compute.is_at(self.compute_key())

    @contextlib.contextmanager
    def on_compute(self) -> Iterator[None]:
        """Make the compute lane current inside the block, see `Backend.on_compute`."""
        stream: torch.cuda.Stream
        if handle := self._compute.now:
            stream = torch.cuda.ExternalStream(handle, self.device)  # type: ignore[no-untyped-call]
        else:  # the default stream, whose handle torch would take for none given, and make a new stream
            stream = torch.cuda.default_stream(self.device)
        with torch.cuda.stream(stream):
            yield

    def follow_compute(self) -> int:
        """Make the current stream the compute lane, see `Backend.follow_compute`."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._ordinal)
        if not self._compute.is_at(handle):
            self._compute.go_to(handle, capturing=self.capturing())
        return handle

    @contextlib.contextmanager
    def current(self, lane: Lane) -> Iterator[None]:
        """Run torch's operations on `lane` inside the block, on this device."""
        if lane is Lane.COMPUTE:
            if torch.cuda.current_device() == self.device.index:
                yield
            else:
                with torch.cuda.device(self.device):
                    yield
        else:
            with torch.cuda.stream(self.lanes.side[lane]):
                yield

    def capturing(self) -> bool:
        """Return whether a CUDA graph is being captured, see `Backend.capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def capture(self) -> int:
        """Return the number of the active capture, see `Backend.capture`."""
        return capture_number(self.compute_key()) if self.capturing() else 0

    def is_timed(self) -> bool:
        """Return whether works issued now are timed: a meter is set, and no capture, without times, is active."""
        return self.meter is not None and not self.capturing()
