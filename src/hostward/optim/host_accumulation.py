"""Accumulate gradients on the host: each microbatch's gradients land in a buffer and are added to the totals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hostward.optim.bucket_state import BucketState
from hostward.runtime.backend import Backend, Buffer, Tier
from hostward.schedule.optimizer import landing_buffer_by_bucket, landing_buffer_bytes


class HostGradAccumulator:
    """Holds the accumulated gradients of the buckets `summed`, float32 at `state.gradient`.

    Each microbatch's gradients land in a landing buffer and are added to the totals from there.

    Args:
        pinned: allocate the landing buffers in pinned memory.
    """

    def __init__(
        self, backend: Backend, states: Sequence[BucketState], summed: frozenset[int], *, pinned: bool
    ) -> None:
        self._states = states
        self.summed = summed
        self._inbox_of = landing_buffer_by_bucket(summed)
        sizes = landing_buffer_bytes([states[b].bucket for b in summed])
        self._inboxes: list[Buffer] = []
        if sizes:
            self._inboxes = backend.allocate(Tier.HOST, sizes, torch.uint8, "gradients", pinned=pinned)
        self._dtypes: dict[int, torch.dtype] = {}

    def lands(self, bucket: int, dtype: torch.dtype) -> bool:
        """Record the dtype in which the bucket's next gradients land, and report whether it has changed.

        The first dtype recorded for a bucket is no change.
        """
        before = self._dtypes.get(bucket)
        self._dtypes[bucket] = dtype
        return before is not None and before is not dtype

    def inbox(self, bucket: int, index: int) -> Buffer:
        """Return the part of the landing buffer where the gradient of one range lands."""
        slot, whole, dtype = self._inboxes[self._inbox_of[bucket]], self._states[bucket], self._dtypes[bucket]
        start = whole.bucket.offsets[index]
        data = slot.data.view(dtype)[start : start + whole.bucket.ranges[index].numel]
        return Buffer(slot.tier, data, slot.owner, slot.pinned)
