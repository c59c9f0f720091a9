"""Device staging of streamed buckets: slots that several buckets take in turn, and when they are there.

Slots are taken during backward, when it has freed enough, and given back during the next forward, before activations
need the memory. How many fit, and when, comes from a profile of one step: the most device memory that was allocated
from each gradient point or use point to the next. Staging may then use what backward has freed, and two slots besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hostward.engine.backend import Backend, Buffer, Tier, empty_buffer
from hostward.errors import MemoryLimitError
from hostward.inventory import align
from hostward.lowering.optimizer import slot_of
from hostward.plan import Placement

from .state import BucketState

FEWEST = 2
"""One slot is read or written while the other is stepped."""
_STAGED_SHARE = 0.4
"""Share of backward, by elements, that is left when the slots are taken: reading them takes about as long."""
_ALIGNMENT_BYTES = 256


_Layout = tuple[tuple[int, torch.dtype], ...]
"""Bytes and dtype of each tensor of a bucket's state."""


class Gauge(Protocol):
    """Device bytes allocated by this process, at most since `restart`."""

    def peak_bytes(self) -> int: ...

    def restart(self) -> None: ...


class CudaGauge:
    """Torch's own counters. `restart` resets the peak that `torch.cuda.max_memory_allocated` tells."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(slots=True)
class _Span:
    """From a use point (`layer`) or a gradient point (`bucket`) to the next of any kind."""

    layer: str | None
    bucket: int | None
    held_bytes: int
    """By slots, when it began."""
    peak_bytes: int = 0
    """Besides."""


class Slots:
    """Slots for the streamed buckets among `states`; `count` is 0 without any.

    Args:
        gauge: the profile's measure; None where there is none, and then the fewest slots are taken.
        staging_bytes: the most memory that all slots take; one is always there.
        in_backward: False: they are taken at the step, not before.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        *,
        gauge: Gauge | None,
        staging_bytes: int | None = None,
        in_backward: bool = True,
    ) -> None:
        self._backend = backend
        self._in_backward = in_backward
        self._placements = [s.placement for s in states]
        self._streamed = [b for b, p in enumerate(self._placements) if p is Placement.STREAMED]
        self._layouts: dict[int, _Layout] = {
            b: tuple((t.nbytes, t.data.dtype) for t in states[b].streamed()) for b in self._streamed
        }
        whole = [sum(align(n, _ALIGNMENT_BYTES) for n, _ in layout) for layout in self._layouts.values()]
        self.slot_bytes = max(whole, default=0)
        self._numels = [s.bucket.numel for s in states]
        self._layers = [s.bucket.layer for s in states]
        most = len(self._streamed) if staging_bytes is None else max(1, staging_bytes // max(1, self.slot_bytes))
        self._most = min(len(self._streamed), most)
        self._set_count(min(FEWEST, self._most))
        self.transient = True
        self._slab: list[Buffer] = []
        self._views = {b: [empty_buffer("slots") for _ in layout] for b, layout in self._layouts.items()}
        self._gauge = gauge
        self._spans: list[_Span] = []
        self._profiled = gauge is None or not self._streamed
        self._stage_at = self._late_bucket()
        self._unstage_at: str | None = None
        self._seen = 0
        self._profiling = False

    def _set_count(self, count: int) -> None:
        self.count = count
        self._slot_of = {b: slot_of(self._placements, b, count) for b in self._streamed}

    # ---------------------------------------------------------------- memory

    def of(self, bucket: int) -> list[Buffer]:
        """The slot of a streamed bucket as its state's tensors: exp_avg, exp_avg_sq, and the remainder or master."""
        return self._views[bucket]

    def buffers(self) -> list[Buffer]:
        return self._slab

    def acquire(self) -> None:
        """Take the memory, on the compute lane, unless it is taken. Raises MemoryLimitError."""
        while len(self._slab) < self.count:  # one by one: a caching allocator rarely has room for all in one piece
            try:
                self._slab += self._backend.allocate(
                    Tier.DEVICE, [self.slot_bytes], torch.uint8, "staging slots", zero=False
                )
            except MemoryLimitError:
                self._backend.free(self._slab)
                self._slab.clear()
                raise
        cut: dict[tuple[int, _Layout], list[torch.Tensor]] = {}
        for b, slot in self._slot_of.items():
            key = slot, self._layouts[b]
            if key not in cut:
                cut[key] = _cut(self._slab[slot].data, self._layouts[b])
            for view, data in zip(self._views[b], cut[key], strict=True):
                self._backend.refill(view, data)

    def give_back(self) -> None:
        """Return the memory, behind what the compute lane has waited for."""
        nothing = torch.empty(0, device="cpu")
        for views in self._views.values():
            for view in views:
                view.data = nothing
        self._backend.free(self._slab)
        self._slab.clear()

    # ---------------------------------------------------------------- when

    def ready(self, bucket: int) -> bool:
        """Whether the slots may be taken at this bucket's gradient point."""
        return self._in_backward and self.count > 0 and self._profiled and bucket <= self._stage_at

    def wanted_back(self, layer: str) -> bool:
        """Whether the slots must be back before this layer's forward."""
        return layer == self._unstage_at

    def sample(self, bucket: int) -> None:
        """Backward has reached a bucket's gradient point."""
        self._begin_span(None, bucket)

    def sample_use(self, layer: str) -> None:
        """Forward has reached a layer."""
        self._begin_span(layer, None)

    def _begin_span(self, layer: str | None, bucket: int | None) -> None:
        if self._gauge is not None and self._profiling:
            self._end_span(self._gauge)
            self._spans.append(_Span(layer, bucket, sum(b.nbytes for b in self._slab)))

    def _end_span(self, gauge: Gauge) -> None:
        if self._spans:
            self._spans[-1].peak_bytes = gauge.peak_bytes() - self._spans[-1].held_bytes
        gauge.restart()

    def settle(self) -> bool:
        """A step has been issued: choose number and time of the slots once the profile is whole. Whether the number
        has changed.

        The first step allocates what others keep (cuBLAS workspaces, tables), so the second is the one profiled.
        """
        self._seen += 1
        if self._gauge is None or self._profiled:
            return False
        if self._seen == _PROFILED_STEP - 1:
            self._profiling = True
        if self._seen < _PROFILED_STEP:
            return False
        self._end_span(self._gauge)
        self._profiled, self._profiling = True, False
        spans, self._spans = self._spans, []
        limit = max((span.peak_bytes for span in spans), default=0) + FEWEST * self.slot_bytes
        points = [i for i, span in enumerate(spans) if span.bucket is not None]
        if not points:
            return False
        staged = next((i for i in points if (spans[i].bucket or 0) <= self._stage_at), points[0])
        later = max(span.peak_bytes for span in spans[staged:])
        before = self.count
        self._set_count(min(self._most, (limit - later) // self.slot_bytes))
        held = self.count * self.slot_bytes
        uses = ((span.layer, span.peak_bytes) for span in spans if span.layer is not None)
        self._unstage_at = next((layer for layer, peak in uses if peak + held > limit), None)
        return self.count != before

    def _late_bucket(self) -> int:
        """The bucket at whose gradient point _STAGED_SHARE of backward is left, if it goes from last to first."""
        total, left = sum(self._numels), 0
        for b, numel in enumerate(self._numels):
            left += numel
            if left >= _STAGED_SHARE * total:
                return b
        return 0


_PROFILED_STEP = 3


def _cut(slot: torch.Tensor, layout: _Layout) -> list[torch.Tensor]:
    found, start = [], 0
    for nbytes, dtype in layout:
        found.append(slot[start : start + nbytes].view(dtype))
        start = align(start + nbytes, _ALIGNMENT_BYTES)
    return found
