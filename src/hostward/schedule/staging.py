"""Staging slots of streamed buckets: how large, how many, taken and given back when. Decisions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hostward.core.inventory import MasterKind, align

FEWEST = 2
"""One slot is read or written while the other is stepped."""
STAGED_SHARE = 0.4
"""Share of backward, by elements, that is left when the slots are taken, if others read over the link as well: long
enough for most of the slots, and late enough to let the others through.
"""
SLOT_ALIGNMENT_BYTES = 256

_LOW_BYTES = {MasterKind.WEIGHT: 0, MasterKind.SPLIT: 2, MasterKind.PLAIN: 4}


@dataclass(slots=True)
class Span:
    """From a use point (`layer`) or a gradient point (`bucket`) to the next of any kind."""

    layer: str | None
    bucket: int | None
    held_bytes: int = 0
    """By slots, when it began."""
    peak_bytes: int = 0
    """On the device, besides."""


@dataclass(frozen=True, slots=True)
class Settled:
    """How many slots there are from now on, the buckets at whose gradient points they are taken one by one, or at the
    first below, and the layers before whose forward they are given back one by one; None: the last.
    """

    count: int
    stage_at: tuple[int, ...]
    unstage_at: tuple[str | None, ...]


def streamed_bytes(kind: MasterKind, padded: int) -> tuple[int, ...]:
    """What travels when a bucket of so many elements is streamed: exp_avg, exp_avg_sq, and the remainder or master if
    there is one.
    """
    return tuple(padded * size for size in (4, 4, _LOW_BYTES[kind]) if size)


def slot_bytes(parts: Sequence[Sequence[int]]) -> int:
    """Of a slot that takes each bucket of these parts in turn."""
    return max((sum(align(n, SLOT_ALIGNMENT_BYTES) for n in part) for part in parts), default=0)


def most_slots(streamed: int, slot_size_bytes: int, staging_bytes: int | None) -> int:
    """For so many streamed buckets, within `staging_bytes` if that is given."""
    if staging_bytes is None:
        return streamed
    return min(streamed, max(1, staging_bytes // max(1, slot_size_bytes)))


def late_bucket(numels: Sequence[int]) -> int:
    """The bucket at whose gradient point STAGED_SHARE of backward is left, if it goes from last to first."""
    total, left = sum(numels), 0
    for b, numel in enumerate(numels):
        left += numel
        if left >= STAGED_SHARE * total:
            return b
    return 0


def settle(spans: Sequence[Span], *, slot_size_bytes: int, most: int, stage_at: int, early: bool) -> Settled | None:
    """From the spans of one step: slots may use what backward has freed, and FEWEST of them besides. There are as many
    as fit from `stage_at` on. `early`: each is taken as soon as that makes no peak higher, since reading is in nobody's
    way. None: backward reported no point.
    """
    most_bytes = max((span.peak_bytes for span in spans), default=0)
    limit = most_bytes + FEWEST * slot_size_bytes
    points = [i for i, span in enumerate(spans) if span.bucket is not None]
    if not points:
        return None
    later = list(accumulate((span.peak_bytes for span in reversed(spans)), max))[::-1]
    """By span: the most from it on."""

    staged = next((i for i in points if (spans[i].bucket or 0) <= stage_at), points[0])
    count = min(most, (limit - later[staged]) // slot_size_bytes)
    same = max(most_bytes, later[staged] + count * slot_size_bytes)
    lowest = list(accumulate((spans[i].bucket or 0 for i in points), min))
    # Of points that are the first below some bucket.
    first = [i for i, low in zip(points, lowest, strict=True) if spans[i].bucket == low]

    def taken_at(slots: int) -> int:
        """Where there is room for so many."""
        room = same - slots * slot_size_bytes
        return next((spans[i].bucket or 0 for i in first if later[i] <= room), stage_at) if early else stage_at

    def back_at(slots: int) -> str | None:
        """Where there is no room for so many."""
        room = limit - slots * slot_size_bytes
        return next((span.layer for span in spans if span.layer is not None and span.peak_bytes > room), None)

    numbers = range(1, count + 1)
    return Settled(count, tuple(map(taken_at, numbers)), tuple(map(back_at, reversed(numbers))))
