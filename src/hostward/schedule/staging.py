"""Decide the size and number of GPU staging buffers, and when they are acquired and released. Moves no data."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hostward.core.inventory import Bucket, align

MIN_STAGING_BUFFERS = 2
"""One buffer is read or written while the state in the other is stepped."""
STAGING_BACKWARD_SHARE = 0.4
"""Share of backward, by elements, that is left when the staging buffers are acquired, if other copies use the H2D lane
in backward too. It is long enough to fill most of the buffers, and late enough not to delay the other copies.
"""
STAGING_ALIGNMENT_BYTES = 256


@dataclass(slots=True)
class TriggerInterval:
    """Measure device memory from one `on_pre_forward` (`layer`) or `on_grad_ready` trigger (`bucket`) to the next."""

    layer: str | None
    bucket: int | None
    held_bytes: int = 0
    """Bytes of staging buffers when the interval began."""
    peak_bytes: int = 0
    """Peak of the device memory besides the staging buffers."""


@dataclass(frozen=True, slots=True)
class StagingDecision:
    """State how many staging buffers there are from now on, and when each is acquired and released.

    Attributes:
        count: number of staging buffers.
        acquire_at: for each buffer the bucket at whose `on_grad_ready`, or at that of the first bucket below it, the
            buffer is acquired.
        release_at: for each release the layer before whose forward a buffer is released; None: the last layer.
    """

    count: int
    acquire_at: tuple[int, ...]
    release_at: tuple[str | None, ...]


def streamed_bytes(bucket: Bucket) -> tuple[int, ...]:
    """Return the bytes of each part of a streamed bucket's state: exp_avg, exp_avg_sq and, if any, the master's part.

    Padding is included.
    """
    return bucket.padded_parts


def staging_buffer_bytes(parts: Sequence[Sequence[int]]) -> int:
    """Return the bytes of a staging buffer that is large enough for each of these buckets, given by their parts."""
    return max((sum(align(n, STAGING_ALIGNMENT_BYTES) for n in part) for part in parts), default=0)


def max_staging_buffers(streamed: int, slot_size_bytes: int, staging_bytes: int | None) -> int:
    """Return the largest useful number of staging buffers.

    Args:
        streamed: number of streamed buckets.
        slot_size_bytes: bytes of one staging buffer.
        staging_bytes: limit of the bytes of all; None: no limit.
    """
    if staging_bytes is None:
        return streamed
    return min(streamed, max(1, staging_bytes // max(1, slot_size_bytes)))


def late_trigger_bucket(numels: Sequence[int]) -> int:
    """Return the bucket at whose `on_grad_ready` STAGING_BACKWARD_SHARE of backward is left.

    Backward is taken to go from the last bucket to the first.
    """
    total, left = sum(numels), 0
    for b, numel in enumerate(numels):
        left += numel
        if left >= STAGING_BACKWARD_SHARE * total:
            return b
    return 0


def decide_staging(
    spans: Sequence[TriggerInterval], *, slot_size_bytes: int, most: int, acquire_at: int, early: bool
) -> StagingDecision | None:
    """Decide the number of staging buffers, and when to acquire and release them, from the memory of one step.

    Staging buffers may use the memory that backward has freed, and the bytes of MIN_STAGING_BUFFERS besides.

    Args:
        spans: the intervals of one step, in order.
        slot_size_bytes: bytes of one staging buffer.
        most: largest number of staging buffers.
        acquire_at: bucket from whose `on_grad_ready` on the buffers must fit.
        early: acquire each buffer as soon as that raises no peak, for no other copy uses the H2D lane.

    Returns:
        The decision; None if backward reported no `on_grad_ready`.
    """
    most_bytes = max((span.peak_bytes for span in spans), default=0)
    limit = most_bytes + MIN_STAGING_BUFFERS * slot_size_bytes
    triggers = [i for i, span in enumerate(spans) if span.bucket is not None]
    if not triggers:
        return None
    later = list(accumulate((span.peak_bytes for span in reversed(spans)), max))[::-1]
    """By interval: the highest peak from it on."""

    acquired = next((i for i in triggers if (spans[i].bucket or 0) <= acquire_at), triggers[0])
    count = min(most, (limit - later[acquired]) // slot_size_bytes)
    same = max(most_bytes, later[acquired] + count * slot_size_bytes)
    lowest = list(accumulate((spans[i].bucket or 0 for i in triggers), min))
    # Triggers of buckets lower than all before them, and the room that is needed at each: ever less.
    first = [i for i, low in zip(triggers, lowest, strict=True) if spans[i].bucket == low]
    needed = [-later[i] for i in first]
    layers = [span for span in spans if span.layer is not None]
    highest = list(accumulate((span.peak_bytes for span in layers), max))

    def acquired_at(buffers: int) -> int:
        """Return the bucket at whose trigger there is room for so many buffers."""
        at = bisect_left(needed, buffers * slot_size_bytes - same) if early else len(first)
        return spans[first[at]].bucket or 0 if at < len(first) else acquire_at

    def released_at(buffers: int) -> str | None:
        """Return the first layer before whose forward there is no room for so many buffers."""
        at = bisect_right(highest, limit - buffers * slot_size_bytes)
        return layers[at].layer if at < len(layers) else None

    numbers = range(1, count + 1)
    return StagingDecision(count, tuple(map(acquired_at, numbers)), tuple(map(released_at, reversed(numbers))))
