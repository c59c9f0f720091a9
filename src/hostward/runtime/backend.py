"""What a backend does: a short list of verbs over lanes, buffers and events.

`cuda` is the real one. `simulated` runs on any machine: there the device tier is separate memory in RAM and every
lane is a queue. Code above this module decides what to do and in which order; it never asks which backend carries it
out.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hostward.errors import HostwardError, PlacementError
from hostward.runtime.global_norm import Across
from hostward.runtime.operands import (
    ALL_ZERO as ALL_ZERO,
    CHUNK_ELEMENTS as CHUNK_ELEMENTS,
    DTYPES as DTYPES,
    TORCH_DTYPES as TORCH_DTYPES,
    AdamWOperands as AdamWOperands,
    BoundRange as BoundRange,
    Buffer as Buffer,
    Clipping as Clipping,
    Constants as Constants,
    Hyper as Hyper,
    Partials as Partials,
    Scalars as Scalars,
    Tier as Tier,
    chunks_of as chunks_of,
    empty_buffer as empty_buffer,
    require_tier as require_tier,
)
from hostward.schedule.ops import Lane

_DRAIN_ATTEMPTS = 1000
"""Each failing operation ends one attempt."""


class Meter(Protocol):
    """Takes note of when works ran; times in seconds from the meter's start."""

    def __call__(self, name: str, lane: Lane, start_s: float, end_s: float, nbytes: int, turn: int) -> None: ...


@dataclass(eq=False, slots=True)
class Event:
    """Completion of the newest issue of one operation; of nothing, before the first. `native` belongs to the backend
    that made it.
    """

    native: object = None


Held = tuple[int, int]
"""Timed events before and after one `Backend.hold_timed`, on the stream that it holds."""


class Work(ABC):
    """One operation, bound to its buffers once and issued any number of times.

    What lies at a device buffer's `data` is looked up when the work is issued: buffers over gradients get another
    tensor in every step. Host memory stays where it is for as long as there are works over it.
    """

    __slots__ = ("done", "lane", "name")

    def __init__(self, name: str, lane: Lane, done: Event) -> None:
        self.name = name
        self.lane = lane
        self.done = done

    @abstractmethod
    def issue(self) -> Event:
        """Enqueue it; returns `done`, which from now on stands for this issue."""


class Batch:
    """Works that are issued together, in this order: `issue` does what issuing one after the other does."""

    def __init__(self, works: Sequence[Work | Batch]) -> None:
        self._works = tuple(works)

    def issue(self) -> None:
        for work in self._works:
            work.issue()


@dataclass(slots=True)
class Ledger:
    """Bytes held, by tier and owner, and bytes copied, by direction."""

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
"""Turns whose host functions and small uploads may be pending at once; before the next, the host waits."""


class Backend(ABC):
    """Lanes of one device. All methods are called from one thread at a time.

    The verbs from `copy` to `retire` bind an operation and enqueue nothing; `Work.issue` does. `waits` are events of
    other works, `done` the event that the work records (a new one by default). The compute lane is the stream that is
    current when a work is issued.
    """

    device: torch.device
    ledger: Ledger
    threads: int
    """So many step on the host."""
    meter: Meter | None = None
    """Where works report when they ran; None: nobody looks."""

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
        """One slab of exactly sum(sizes) elements, cut into one buffer per size. Raises MemoryLimitError.

        Host slabs are zero; device slabs are unless `zero` is False, and belong to the compute lane.
        """

    @abstractmethod
    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        """Give buffers of `allocate` back. A free is a write: it is ordered after `after`. Host memory is given back
        only when all lanes are empty.
        """

    @abstractmethod
    def event(self) -> Event:
        """A new event, of nothing."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second of each, of the device or the host, into the first, on the host; return when all are there.
        Unlike the others it may be called from any thread, while no CUDA graph is captured. Whoever calls it sees to it
        that nobody writes what is copied meanwhile, and that what wrote it before is over.
        """
        for into, data in pairs:
            into.copy_(data)

    @abstractmethod
    def refill(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Let `buffer` stand for another contiguous tensor, of any shape, which the compute lane has made."""

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
        """Copies (destination, source) of equal dtype and length, on a copy lane."""

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
        """Torch operations on device buffers, on the compute or the update lane."""

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
        """Partial sums of the norm over gradients of these lengths, on the compute lane or, for gradients on the host,
        on the host lane; those of `gradients[i]` go to the chunks from `firsts[i]` on.
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
        """total = gradient, where `first`, or total + gradient, in fp32, on the host lane. `partials` also takes the
        partial sums of the new totals, those of `totals[i]` in the chunks from its second item's element i on.
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
        """Global norm, clip factor and finite flag, into device scalars (docs/exactness.md), on the compute lane. With
        `across`, of the gradients of all its ranks, and the same on each of them.
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
        """AdamW of one bucket: a host function on the host lane, a kernel on the compute or the update lane. All
        operands lie on the side that steps. Raises PlacementError.
        """

    @abstractmethod
    def retire(
        self, buffers: Sequence[Buffer], lane: Lane, *, waits: Sequence[Event] = (), done: Event | None = None
    ) -> Work:
        """The contents of `buffers` are dead once `lane` gets here. `simulated` poisons them, `cuda` only waits."""

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
        """`lane` waits for `waits`; on the compute lane, so does the caller's own code that follows. `writes` is what
        that code has written before, `reads` what it is about to read.
        """

    @abstractmethod
    def hold(self, stream: torch.Stream, waits: Sequence[Event]) -> None:
        """A stream of somebody else waits for these events. No lane waits for it, nor it for a lane."""

    def hold_timed(self, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
        """The same; while somebody looks, it returns what `wait_behind` is told."""
        self.hold(stream, waits)
        return None

    def wait_behind(self, name: str, held: Held, event: torch.Event | None) -> None:  # noqa: B027
        """The caller is about to let the compute lane wait for an event of somebody else's, on a stream that was held.
        While somebody looks, the lane waits for it here, and the meter hears of the last part of that, as long as the
        hold took, or of all of it: without the hold it would have been shorter by no more.
        """

    def let_overwrite(self, what: str, streams: Iterable[torch.Stream | None]) -> None:
        """Memory that these streams made is given up, and goes back to them: each but the current one waits for what
        the compute lane, which has waited for its readers, holds now.
        """
        here = self.caller_stream()
        others = {stream for stream in streams if stream is not None and stream != here}
        if others:
            behind = self.mark(f"offload/{what}/gone", Lane.COMPUTE).issue()
            for stream in others:
                self.hold(stream, [behind])

    def batch(self, works: Sequence[Work]) -> Batch:
        """These works to be issued together; each also alone."""
        return Batch(works)

    @abstractmethod
    def begin_turn(self) -> None:
        """A step begins. Waits on the host only if RING steps are pending."""

    @abstractmethod
    def end_turn(self) -> None:
        """Everything of the step has been issued, later arrivals excepted."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Wait on the host for one event."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait on the host until all lanes are empty; raises what a host function reported."""

    def caller_stream(self) -> torch.Stream | None:
        """Where the caller's operations go now; None: there are no streams."""
        return None

    def memory_of(self, stream: torch.Stream | None) -> AbstractContextManager[None]:
        """What is allocated inside is memory of `stream`; the compute lane goes on behind what that has been given."""
        return contextlib.nullcontext()

    def compute_key(self) -> int:
        """Tells the caller's current compute stream from others."""
        return 0

    def at_compute(self) -> bool:
        """Whether the caller's current stream is the compute lane as it is."""
        return True

    def on_compute(self) -> AbstractContextManager[None]:
        """Inside, the compute lane's stream is the current one."""
        return contextlib.nullcontext()

    def wait_for(self, stream: torch.Stream) -> None:  # noqa: B027
        """Make the compute lane wait for all that an external stream has been given so far."""

    def follow_compute(self) -> int:
        """Make the caller's current stream the compute lane, behind the one that was; returns `compute_key`."""
        return self.compute_key()

    def capturing(self) -> bool:
        """Whether what is issued now would become part of a CUDA graph."""
        return self.capture() != 0

    def capture(self) -> int:
        """The number of the capture whose CUDA graph what is issued now becomes part of; 0: of none. An event that was
        recorded in one capture, or in none, is waited for in no other.
        """
        return 0

    def drain(self) -> None:
        """Empty all lanes after an error that is already on its way: what they report besides is dropped."""
        for _ in range(_DRAIN_ATTEMPTS):
            try:
                self.synchronise()
            except (HostwardError, RuntimeError):
                continue
            return

    @abstractmethod
    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        """A buffer over device memory that somebody else allocated: weights, gradients. `counted`: in the ledger."""

    @abstractmethod
    def describe(self) -> Mapping[str, object]:
        """Plain facts for reports: name, device, host threads, instruction set."""


def require_copyable(lane: Lane, destination: Buffer, source: Buffer) -> None:
    """Raises PlacementError unless both sides have the dtype, length and tier that `lane` copies."""
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
            why="a copy never converts: conversion on the way would round",
            fix="make both sides of one dtype and length",
        )
    if not (source.data.is_contiguous() and destination.data.is_contiguous()):
        raise PlacementError(
            f"copy of {source.owner!r}: one side is not contiguous",
            why="a strided copy goes through a hidden kernel and buffer, on a stream that no event covers",
            fix="make the tensor contiguous before it is adopted",
        )
