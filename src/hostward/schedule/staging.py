"""Decide the size and number of GPU staging buffers, and when they are acquired and released. Moves no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    """Decide the number of staging buffers, and when to acquire and release them, from the intervals of one step.

    The other arguments and the result are those of `decide_staging_of`.
    """
    return decide_staging_of(
        [span.layer for span in spans],
        np.array([-1 if span.bucket is None else span.bucket for span in spans], np.int64),
        np.array([span.peak_bytes for span in spans], np.int64),
        slot_size_bytes=slot_size_bytes,
        most=most,
        acquire_at=acquire_at,
        early=early,
    )


def decide_staging_of(
    layers: Sequence[str | None],
    buckets: npt.NDArray[np.int64],
    peaks: npt.NDArray[np.int64],
    *,
    slot_size_bytes: int,
    most: int,
    acquire_at: int,
    early: bool,
) -> StagingDecision | None:
    """Decide the number of staging buffers, and when to acquire and release them, from the memory of one step.

    Staging buffers may use the memory that backward has freed, and the bytes of MIN_STAGING_BUFFERS besides.

    Args:
        layers: by interval of the step, in order, the layer whose `on_pre_forward` begins it, or None.
        buckets: the bucket whose `on_grad_ready` begins each interval, or -1; int64 [intervals].
        peaks: peak of the device memory besides the staging buffers, in bytes; int64 [intervals].
        slot_size_bytes: bytes of one staging buffer.
        most: largest number of staging buffers.
        acquire_at: bucket from whose `on_grad_ready` on the buffers must fit.
        early: acquire each buffer as soon as that raises no peak, for no other copy uses the H2D lane.

    Returns:
        The decision; None if backward reported no `on_grad_ready`.
    """
    triggers = np.flatnonzero(buckets >= 0)
    if not len(triggers):
        return None
    most_bytes = int(peaks.max())
    limit = most_bytes + MIN_STAGING_BUFFERS * slot_size_bytes
    later = np.maximum.accumulate(peaks[::-1])[::-1]
    """By interval: the highest peak from it on."""

    ready = buckets[triggers]
    acquired_bytes = int(later[triggers[(ready <= acquire_at).argmax()]])  # the first trigger where no bucket is so low
    count = min(most, (limit - acquired_bytes) // slot_size_bytes)
    same = max(most_bytes, acquired_bytes + count * slot_size_bytes)
    sizes = slot_size_bytes * np.arange(1, count + 1)
    # Triggers of buckets lower than all before them, and the room that is needed at each: ever less.
    first = triggers[ready == np.minimum.accumulate(ready)]
    room = np.searchsorted(-later[first], sizes - same) if early else np.full(count, len(first))
    acquire = np.append(buckets[first], acquire_at)[room]
    # Buffers are released before the first layer before whose forward there is no room for so many.
    named = [i for i in np.flatnonzero(buckets < 0).tolist() if layers[i] is not None]
    fitting = np.searchsorted(np.maximum.accumulate(peaks[named]), limit - sizes[::-1], "right")
    names = [*(layers[i] for i in named), None]
    return StagingDecision(count, tuple(acquire.tolist()), tuple([names[at] for at in fitting.tolist()]))
