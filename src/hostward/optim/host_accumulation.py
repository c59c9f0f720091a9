"""Gradients that are added up on the host: which ranges have a total in this turn, and where gradients land before."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from hostward.optim.bucket_state import BucketState
from hostward.optim.range_selection import Addition
from hostward.runtime.backend import Backend, Buffer, Tier
from hostward.schedule.optimizer import landing_buffer_by_bucket, landing_buffer_bytes


class Totals:
    """The totals of the buckets `summed`, float32 at `state.gradient`. Each microbatch's gradients land in an inbox and
    are added from there.

    Args:
        pinned: page-lock the inboxes.
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
        self._has: dict[int, set[int]] = {}
        self._with_sums: dict[int, set[int]] = {}
        self.reset()

    def reset(self) -> None:
        """There are no totals."""
        self._has = {b: set() for b in self.summed}
        self._with_sums = {b: set() for b in self.summed}

    def lands(self, bucket: int, dtype: torch.dtype) -> bool:
        """Gradients of the bucket are about to land in this dtype. Whether they did in another one before."""
        before = self._dtypes.get(bucket)
        self._dtypes[bucket] = dtype
        return before is not None and before is not dtype

    def inbox(self, bucket: int, index: int) -> Buffer:
        """Where the gradient of one range lands."""
        slot, whole, dtype = self._inboxes[self._inbox_of[bucket]], self._states[bucket], self._dtypes[bucket]
        start = whole.bucket.offsets[index]
        data = slot.data.view(dtype)[start : start + whole.bucket.ranges[index].numel]
        return Buffer(slot.tier, data, slot.owner, slot.pinned)

    def addition(self, bucket: int, ranges: Set[int], *, last: bool) -> Addition:
        """What adding these ranges is: which of them begin a total. `last`: the addition makes the partial sums."""
        has = self._has[bucket]
        return Addition(ranges - has, ranges & has, last)

    def added(self, bucket: int, ranges: Set[int], *, last: bool) -> None:
        """That has been issued."""
        self._has[bucket] |= ranges
        if last:
            self._with_sums[bucket] |= ranges
        else:
            self._with_sums[bucket] -= ranges

    def without_sums(self, bucket: int) -> set[int]:
        """Ranges whose total has changed since its partial sums were made."""
        return self._has[bucket] - self._with_sums[bucket]
