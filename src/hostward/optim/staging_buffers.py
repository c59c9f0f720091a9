"""Manage the GPU staging buffers of streamed buckets, and when each is acquired and released.

Several buckets use each buffer alternately. Buffers are acquired during backward, when it has freed enough memory, and
released during the next forward, one by one, before activations or gathered weights need the memory. How many fit, and
when, comes from a profile of one step: the most device memory that was allocated from each gradient trigger or
pre-forward trigger to the next. Staging may then use what backward has freed, and two buffers besides. State is read as
soon as there is room, unless activations or weights are reloaded in backward, which come first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hostward.core.inventory import align
from hostward.core.placement import Placement
from hostward.errors import MemoryLimitError
from hostward.optim.bucket_state import BucketState
from hostward.runtime.backend import Backend, Buffer, Tier, empty_buffer
from hostward.schedule.ops import Lane
from hostward.schedule.optimizer import staging_buffer_by_bucket, staging_buffers_by_last_use
from hostward.schedule.staging import (
    MIN_STAGING_BUFFERS,
    STAGING_ALIGNMENT_BYTES,
    TriggerInterval,
    decide_staging,
    late_trigger_bucket,
    max_staging_buffers,
    staging_buffer_bytes,
)

if TYPE_CHECKING:
    from hostward.runtime.cuda.backend import CudaBackend


# How much state is read while backward runs, and how much in order of use after the norm, with the host's weights.
#
# Reads are on the H2D stream before every upload of the step. Those that are overlapped with backward cost nothing
# there; exposed ones make the first layers wait for the last ones' state. How many are overlapped is measured once, in
# the step after the buffers were settled, in which every buffer is filled as soon as it is acquired.


class Clock(Protocol):
    """Measures when streams reach a place in their order."""

    def stamp(self, lane: Lane) -> Any:
        """Mark the present place on the stream of `lane`."""

    def seconds(self, first: Any, last: Any) -> float | None:
        """Return the seconds between two places, which may be on different streams.

        None while the device has not reached both.
        """


class Pace:
    """Times the staging of one step. Without a clock it never has a result."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._armed = False
        self._began: Any = None
        self._read: list[Any] = []
        self._over: Any = None

    def arm(self) -> None:
        """Time the next step."""
        self._armed = self._clock is not None
        self._began, self._read, self._over = None, [], None

    def begins(self) -> None:
        """Record that a buffer is acquired and its read is issued next."""
        if self._armed and self._began is None and self._clock is not None:
            self._began = self._clock.stamp(Lane.COMPUTE)

    def interrupted(self) -> None:
        """Begin anew if this step is timed, because its buffers have been returned before their use."""
        if self._armed:
            self.arm()

    def issued(self) -> None:
        """Record that the read was issued."""
        if self._began is not None and self._over is None and self._clock is not None:
            self._read.append(self._clock.stamp(Lane.H2D))

    def backward_is_over(self) -> None:
        """Record that backward is over and the norm comes next."""
        if self._read and self._over is None and self._clock is not None:
            self._over = self._clock.stamp(Lane.COMPUTE)
            self._armed = False

    def ahead(self, reads: int) -> int | None:
        """Return how many of `reads` reads had begun when backward was over.

        It is at least MIN_STAGING_BUFFERS, so that one buffer is read while another is stepped. None: not measured, or
        already returned.
        """
        if self._over is None or self._clock is None:
            return None
        over_s, *read_s = (self._clock.seconds(self._began, at) for at in (self._over, *self._read))
        if over_s is None or None in read_s:
            return None
        self._began, self._read, self._over = None, [], None
        done = sum(at_s is not None and at_s <= over_s for at_s in read_s)
        return min(reads, max(MIN_STAGING_BUFFERS, done + 1))


_Layout = tuple[tuple[int, torch.dtype], ...]
"""Bytes and dtype of each tensor of a bucket's state."""


class Gauge(Clock, Protocol):
    """Measures the peak of device bytes allocated by this process since `restart`, and is a clock."""

    def peak_bytes(self) -> int: ...

    def restart(self) -> None: ...


class CudaGauge:
    """Reads torch's own counters.

    `restart` resets the peak that `torch.cuda.max_memory_allocated` reports.
    """

    def __init__(self, backend: CudaBackend) -> None:
        self._context = backend.context
        self._device = backend.device

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def stamp(self, lane: Lane) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with self._context.current(lane):
            event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
        there = all(event.query() for event in (first, last))  # type: ignore[no-untyped-call]
        return first.elapsed_time(last) / 1e3 if there else None


class StagingBuffers:
    """Holds the GPU staging buffers for the streamed buckets among `states`.

    `count` is 0 if there are no streamed buckets, and `ahead` of the buffers are filled in backward.

    Args:
        gauge: measures the profile; None: there is none, and the fewest buffers are acquired.
        staging_bytes: the most memory that all buffers use; one buffer is always there.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        *,
        gauge: Gauge | None,
        staging_bytes: int | None = None,
    ) -> None:
        self._backend = backend
        self._placements = tuple(s.placement for s in states)
        self._streamed = [b for b, p in enumerate(self._placements) if p is Placement.STREAMED]
        self._layouts: dict[int, _Layout] = {
            b: tuple((t.nbytes, t.data.dtype) for t in states[b].streamed()) for b in self._streamed
        }
        self.slot_bytes = staging_buffer_bytes([[n for n, _ in layout] for layout in self._layouts.values()])
        self._most = max_staging_buffers(len(self._streamed), self.slot_bytes, staging_bytes)
        self._late = late_trigger_bucket([s.bucket.numel for s in states])
        self._set_count(min(MIN_STAGING_BUFFERS, self._most))
        self.pace = Pace(gauge)
        self.stream: torch.Stream | None = None
        """Stream that owns the buffers' memory; None: the stream that is current when they are acquired."""
        self.transient = True
        self._held: dict[int, Buffer] = {}
        """Buffer memory, by buffer index."""
        self._taken_from: dict[int, torch.Stream | None] = {}
        """Stream that owns this memory, by buffer index."""
        self._gauge = gauge
        self._spans: list[TriggerInterval] = []
        self._profiled = gauge is None or not self._streamed
        self._seen = 0
        self._uploaded: list[int] = []
        """Bytes that had been enqueued to go to the device at each gradient trigger of the profiled step."""
        self._profiling = False

    def _set_count(self, count: int) -> None:
        """Lay out `count` buffers anew. Memory that is acquired stays so."""
        slots = staging_buffer_by_bucket(self._placements, count)
        views: dict[tuple[int, _Layout], list[Buffer]] = {}
        for b, slot in slots.items():
            layout = self._layouts[b]
            views.setdefault((slot, layout), [empty_buffer("slots") for _ in layout])
        self._slot_of, self._by_last_use, self._views = slots, staging_buffers_by_last_use(slots, count), views
        self._stage_at: tuple[int, ...] = (self._late,) * count
        self._unstage_at: tuple[str | None, ...] = (None,) * count
        self.count = self.ahead = count  # last: shows the step that its schedule is of other buffers

    # ---------------------------------------------------------------- memory

    def of(self, bucket: int) -> list[Buffer]:
        """Return the staging buffer of a streamed bucket as its state's tensors.

        They are exp_avg, exp_avg_sq, and the low 16 bits of the fp32 main weight or that weight itself.
        """
        return self._views[self._slot_of[bucket], self._layouts[bucket]]

    def all_of(self, slot: int) -> list[Buffer]:
        """Return a staging buffer as the tensors of any bucket that uses it."""
        return [view for (taken, _), views in self._views.items() if taken == slot for view in views]

    @property
    def held(self) -> list[int]:
        """List the buffers that have memory, first those that are written back first."""
        return [slot for slot in self._by_last_use if slot in self._held]

    def acquire(self, count: int) -> None:
        """Allocate the memory of the first `count` buffers, on the compute stream, unless they have it.

        Raises MemoryLimitError. Buffers acquired before the call stay: they are being filled.
        """
        taken: list[int] = []
        with self._backend.memory_of(self.stream):
            for slot in range(count):  # one by one: a caching allocator rarely has room for all in one piece
                if slot in self._held:
                    continue
                try:
                    (self._held[slot],) = self._backend.allocate(
                        Tier.DEVICE, [self.slot_bytes], torch.uint8, "staging slots", zero=False
                    )
                except MemoryLimitError:
                    self.give_back(taken)
                    raise
                self._taken_from[slot] = self._backend.caller_stream() if self.stream is None else self.stream
                taken.append(slot)
        for (slot, layout), views in self._views.items():
            if slot < count:  # the others too: an interrupt may have come between memory and views
                for view, data in zip(views, _cut(self._held[slot].data, layout), strict=True):
                    if view.address != data.data_ptr():  # else it may be being filled
                        self._backend.refill(view, data)

    def give_back(self, slots: Collection[int]) -> None:
        """Return the memory of these buffers, after what the compute stream has waited for.

        It goes back to the stream that it was allocated from, which waits for that as well: this need not be the stream
        that is current now.
        """
        nothing = torch.empty(0, device="cpu")
        self._backend.return_memory("slots", [self._taken_from.pop(slot, None) for slot in slots])
        for (slot, _), views in self._views.items():
            for view in views if slot in slots else ():
                view.point_to(nothing)
        self._backend.free([self._held.pop(slot) for slot in slots])

    # ---------------------------------------------------------------- when

    def ready(self, bucket: int) -> int:
        """Return how many buffers may be acquired, and are filled in backward, at this bucket's gradient trigger."""
        return sum(bucket <= at for at in self._stage_at[: self.ahead]) if self._profiled else 0

    def wanted_back(self, layers: Collection[str]) -> list[int]:
        """List the buffers that must be released before the forward of one of these layers."""
        wanted = zip(self._by_last_use, self._unstage_at, strict=True)
        return [slot for slot, layer in wanted if slot in self._held and layer in layers]

    def sample(self, bucket: int) -> None:
        """Sample memory when backward has reached a bucket's gradient trigger."""
        if self._profiling:
            self._uploaded.append(self._backend.ledger.copied_bytes[Lane.H2D])
        self._begin_span(None, bucket)

    def sample_use(self, layer: str) -> None:
        """Sample memory when forward has reached a layer."""
        self._begin_span(layer, None)

    def _begin_span(self, layer: str | None, bucket: int | None) -> None:
        if self._gauge is not None and self._profiling:
            self._end_span(self._gauge)
            self._spans.append(TriggerInterval(layer, bucket, len(self._held) * self.slot_bytes))

    def _end_span(self, gauge: Gauge) -> None:
        if self._spans:
            self._spans[-1].peak_bytes = gauge.peak_bytes() - self._spans[-1].held_bytes
        gauge.restart()

    def settle(self) -> bool:
        """Adapt the buffers after a step has been issued, and report whether the schedule must change.

        Once the profile is complete, it chooses number and time of the buffers, and later how many are filled in
        backward.

        The first steps allocate what others keep (cuBLAS workspaces, tables), so step `_PROFILED_STEP` is the one
        profiled.
        """
        self._seen += 1
        if self._gauge is None or self._profiled:
            before = self.ahead
            self.ahead = self.pace.ahead(self.count) or before
            return self.ahead != before
        if self._seen == _PROFILED_STEP - 1:
            self._profiling = True
        if self._seen < _PROFILED_STEP:
            return False
        self._end_span(self._gauge)
        self._profiled, self._profiling = True, False
        spans, self._spans = self._spans, []
        settled = decide_staging(
            spans,
            slot_size_bytes=self.slot_bytes,
            most=self._most,
            acquire_at=self._late,
            early=self._uploaded[:1] == self._uploaded[-1:],  # reloaded activations and weights would wait
        )
        if settled is None:
            return False
        before = self.count
        if settled.count != before:  # else operations stay bound to the existing views
            self._set_count(settled.count)
        self._stage_at, self._unstage_at = settled.acquire_at, settled.release_at
        if self.count > MIN_STAGING_BUFFERS:
            self.pace.arm()
        return self.count != before


_PROFILED_STEP = 3


def _cut(slot: torch.Tensor, layout: _Layout) -> list[torch.Tensor]:
    found, start = [], 0
    for nbytes, dtype in layout:
        found.append(slot[start : start + nbytes].view(dtype))
        start = align(start + nbytes, STAGING_ALIGNMENT_BYTES)
    return found
