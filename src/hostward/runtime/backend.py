"""Define the interface of a backend: a short list of verbs over lanes, buffers and events.

`cuda` runs on a GPU. `simulated` runs on any machine: its device tier is separate memory in RAM, and every lane is a
queue. A *lane* is a stream of the schedule (compute, h2d, d2h, update, host). Code above this module decides what runs
in which order; it never asks which backend runs it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from hostward.errors import HostwardError, PlacementError
from hostward.runtime.global_norm import Across
from hostward.runtime.operands import (
    ALL_ZERO as ALL_ZERO,
    CHUNK_ELEMENTS as CHUNK_ELEMENTS,
    DTYPES as DTYPES,
    LOW_DTYPES as LOW_DTYPES,
    STATE_DTYPES as STATE_DTYPES,
    TORCH_DTYPES as TORCH_DTYPES,
    AdamWOperands as AdamWOperands,
    BoundRange as BoundRange,
    Buffer as Buffer,
    Clipping as Clipping,
    Constants as Constants,
    Hyper as Hyper,
    Partials as Partials,
    Scalars as Scalars,
    SecondSet as SecondSet,
    Tier as Tier,
    chunks_of as chunks_of,
    empty_buffer as empty_buffer,
    require_tier as require_tier,
)
from hostward.schedule.ops import Lane

_DRAIN_ATTEMPTS = 1000
"""Attempts of `drain` at most; each failing operation ends one."""


class Meter(Protocol):
    """Receives the times at which works ran, in seconds from the meter's start."""

    def __call__(self, name: str, lane: Lane, start_s: float, end_s: float, nbytes: int, turn: int) -> None: ...


@dataclass(eq=False, slots=True)
class Event:
    """Stands for the completion of the latest issue of one operation; before the first issue it is complete.

    `native` belongs to the backend that created the event.
    """

    native: object = None


Held = tuple[int, int]
"""Timed events before and after one `Backend.wait_on_stream_timed`, on the waiting stream."""


class DeviceMemory(NamedTuple):
    """Counts bytes of a device: free for all processes, says the driver; allocated by this one, says torch."""

    free_bytes: int
    allocated_bytes: int


class Work(ABC):
    """Bind one operation to its buffers once and issue it any number of times.

    The address of a device buffer is looked up at each issue: buffers over gradients get another tensor in every step.
    Host memory keeps its address as long as works use it.
    """

    __slots__ = ("done", "lane", "name")

    def __init__(self, name: str, lane: Lane, done: Event) -> None:
        self.name = name
        self.lane = lane
        self.done = done

    @abstractmethod
    def issue(self) -> Event:
        """Enqueue the operation and return `done`, which from now on stands for this issue."""


class Batch:
    """Issues works together; the effect is that of issuing one after the other, in this order."""

    def __init__(self, works: Sequence[Work | Batch]) -> None:
        self._works = tuple(works)

    def issue(self) -> None:
        for work in self._works:
            work.issue()


@dataclass(slots=True)
class Ledger:
    """Counts bytes held, by tier and owner, and bytes copied, by direction."""

    held_bytes: defaultdict[tuple[Tier, str], int] = field(default_factory=lambda: defaultdict(int))
    pinned_bytes: int = 0
    copied_bytes: defaultdict[Lane, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, buffer: Buffer, sign: int = 1) -> None:
        self.held_bytes[buffer.tier, buffer.owner] += sign * buffer.nbytes
        if buffer.pinned:
            self.pinned_bytes += sign * buffer.nbytes

    def by_owner(self, tier: Tier) -> dict[str, int]:
        return {owner: n for (t, owner), n in sorted(self.held_bytes.items()) if t is tier and n}

    def total_bytes(self, tier: Tier) -> int:
        return sum(self.by_owner(tier).values())


RING = 4
"""Steps whose host functions and small uploads may be pending at once; the host waits before it begins another."""


class Backend(ABC):
    """Provides the lanes of one device; its methods are called from one thread at a time.

    The verbs from `copy` to `mark` bind an operation and enqueue nothing; `Work.issue` does. `waits` are events of
    other works, `done` the event that the work records (a new one by default). The compute lane is the stream that is
    current when a work is issued.
    """

    device: torch.device
    ledger: Ledger
    threads: int
    """CPU threads of the optimizer step."""
    meter: Meter | None = None
    """Receives the times of works; None: nothing is timed."""

    @abstractmethod
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
        """Allocate one slab of exactly sum(sizes) elements, divided into one buffer per size. Raises MemoryLimitError.

        Host slabs are zero; device slabs are zero unless `zero` is False, and belong to the compute lane.
        """

    @abstractmethod
    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        """Free buffers of `allocate`, after the events `after`: a free is a write.

        Host memory is freed only when all lanes are empty.
        """

    @abstractmethod
    def event(self) -> Event:
        """Return a new event, which is complete until a work records it."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second tensor of each pair, of the device or the host, into the first, on the host, and wait.

        Unlike the other methods it may be called from any thread, while no CUDA graph is captured. The caller makes
        sure that earlier writes of the sources are complete and that no other code writes them meanwhile.
        """
        for into, data in pairs:
            into.copy_(data)

    @abstractmethod
    def refill(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Point `buffer` to another contiguous tensor, of any shape, that the compute lane has produced."""

    @abstractmethod
    def copy(
        self,
        lane: Lane,
        pairs: Sequence[tuple[Buffer, Buffer]],
        *,
        name: str,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        """Bind copies (destination, source) of equal dtype and length, on a copy lane."""

    @abstractmethod
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
        """Bind torch operations on device buffers, on the compute or the update lane."""

    @abstractmethod
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
        """Bind the partial sums of the gradient norm, over gradients of these lengths.

        They run on the compute lane or, for gradients on the host, on the host lane. The partial sums of `gradients[i]`
        are written to the chunks from `firsts[i]` on.
        """

    @abstractmethod
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
        """Bind the accumulation of gradients in fp32, on the host lane: total = gradient if `first`, else += gradient.

        `partials`: also write the partial sums of the new totals; those of `totals[i]` to the chunks from element i of
        its second item on.
        """

    @abstractmethod
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
        """Bind the global norm, clip factor and finite flag, written to device scalars, on the compute lane.

        See docs/exactness.md. `across`: take the norm over the gradients of all these ranks, the same on each of them.
        """

    @abstractmethod
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
        """Bind AdamW of one bucket: a host function on the host lane, a kernel on the compute or the update lane.

        Operands with a second set are for the host lane. All operands have to be in the tier that steps. Raises
        PlacementError.
        """

    @abstractmethod
    def retire(
        self, buffers: Sequence[Buffer], lane: Lane, *, waits: Sequence[Event] = (), done: Event | None = None
    ) -> Work:
        """Bind the end of use of `buffers` on `lane`. `simulated` poisons them, `cuda` only waits."""

    @abstractmethod
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
        """Bind a wait of `lane` for `waits`; on the compute lane, the caller's own code that follows waits as well.

        `writes`: buffers that this code has written before; `reads`: buffers that it reads next.
        """

    @abstractmethod
    def wait_on_stream(self, stream: torch.Stream, waits: Sequence[Event]) -> None:
        """Make an external stream wait for these events; no lane waits for the stream."""

    def wait_on_stream_timed(self, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
        """Make an external stream wait, and return timed events for `wait_behind`; None if there is no meter."""
        self.wait_on_stream(stream, waits)
        return None

    def wait_behind(self, name: str, held: Held, event: torch.Event | None) -> None:  # noqa: B027
        """Time the wait of the compute lane for an event of an external stream that had to wait before.

        With a meter the compute lane waits for the event here, and the meter receives at most the last part of this
        wait that is as long as `held`: without that earlier wait, this one would have been shorter by no more.
        """

    def return_memory(self, what: str, streams: Iterable[torch.Stream | None]) -> None:
        """Order the reuse of freed memory by the streams that allocated it after its last readers.

        Each of these streams but the current one waits for the work that the compute lane holds now; the compute lane
        has waited for the readers.
        """
        here = self.caller_stream()
        others = {stream for stream in streams if stream is not None and stream != here}
        if others:
            behind = self.mark(f"offload/{what}/gone", Lane.COMPUTE).issue()
            for stream in others:
                self.wait_on_stream(stream, [behind])

    def batch(self, works: Sequence[Work]) -> Work | Batch:
        """Return what issues these works together; each can still be issued alone."""
        return works[0] if len(works) == 1 else Batch(works)

    @abstractmethod
    def begin_step(self) -> None:
        """Begin a step. Waits on the host only if RING steps are pending."""

    @abstractmethod
    def end_step(self) -> None:
        """End a step: all its work has been issued, except for waits in the next forward."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Wait on the host for one event."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait on the host until all lanes are empty; raises what a host function reported."""

    def caller_stream(self) -> torch.Stream | None:
        """Return the caller's current stream; None if the backend has no streams."""
        return None

    def memory_of(self, stream: torch.Stream | None) -> AbstractContextManager[None]:
        """Allocate memory of `stream` inside the block; afterwards the compute lane waits for that stream's work."""
        return contextlib.nullcontext()

    def compute_key(self) -> int:
        """Return a key that identifies the caller's current compute stream."""
        return 0

    def at_compute(self) -> bool:
        """Return whether the caller's current stream is the compute lane."""
        return True

    def on_compute(self) -> AbstractContextManager[None]:
        """Make the compute lane's stream the current one inside the block."""
        return contextlib.nullcontext()

    def wait_for(self, stream: torch.Stream) -> None:  # noqa: B027
        """Make the compute lane wait for all work enqueued on an external stream so far."""

    def follow_compute(self) -> int:
        """Make the caller's current stream the compute lane, after the work of the previous one; return its key."""
        return self.compute_key()

    def capturing(self) -> bool:
        """Return whether works issued now would become part of a CUDA graph."""
        return self.capture() != 0

    def capture(self) -> int:
        """Return the number of the active CUDA graph capture; 0: none.

        An event that was recorded in one capture, or outside of any, cannot be waited for in another.
        """
        return 0

    def drain(self) -> None:
        """Empty all lanes after an error that is being raised already; further errors are dropped."""
        for _ in range(_DRAIN_ATTEMPTS):
            try:
                self.synchronise()
            except (HostwardError, RuntimeError):
                continue
            return

    def device_memory(self, *, release: bool) -> DeviceMemory | None:
        """Return what the driver and torch count of the device, once all of its streams are idle.

        None: the device has no driver to ask. `release`: first return memory that torch's allocator caches.
        """
        self.synchronise()
        return None

    @abstractmethod
    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        """Return a buffer over device memory that other code allocated. `counted`: add its bytes to the ledger."""

    @abstractmethod
    def describe(self) -> Mapping[str, object]:
        """Return facts for reports: name, device, CPU threads, instruction set."""


def require_copyable(lane: Lane, pairs: Iterable[tuple[Buffer, Buffer]]) -> None:
    """Raise PlacementError unless both sides of all pairs have the dtype, length and tier that `lane` copies."""
    for destination, source in pairs:
        _require_copyable(lane, destination, source)


def _require_copyable(lane: Lane, destination: Buffer, source: Buffer) -> None:
    down, up = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)
    tiers = {Lane.D2H: down, Lane.H2D: up}
    if lane not in tiers or (source.tier, destination.tier) != tiers[lane]:
        raise PlacementError(
            f"lane {lane.value} cannot copy from {source.tier.value} to {destination.tier.value}",
            fix="use d2h for device to host and h2d for host to device",
        )
    if source.data.dtype != destination.data.dtype or source.data.numel() != destination.data.numel():
        raise PlacementError(
            f"copy of {source.owner!r}: {source.data.dtype} {tuple(source.data.shape)} into "
            f"{destination.data.dtype} {tuple(destination.data.shape)}",
            why="a copy never converts: conversion would round",
            fix="give both sides the same dtype and length",
        )
    if not (source.data.is_contiguous() and destination.data.is_contiguous()):
        raise PlacementError(
            f"copy of {source.owner!r}: one side is not contiguous",
            why="a strided copy uses an internal kernel and buffer, on a stream that no event covers",
            fix="make the tensor contiguous before it is adopted",
        )
