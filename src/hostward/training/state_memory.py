"""Memory for the state of new buckets: all of it or none, and where pages could not be locked, what to do without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from hostward.engine.backend import Backend, Buffer
from hostward.engine.pools import require_host_memory
from hostward.errors import HostwardError, PageLockError
from hostward.inventory import Bucket, state_bytes_per_element
from hostward.lowering.optimizer import inbox_bytes
from hostward.plan import Placement
from hostward.planner import summed_on_host

from .state import BucketState, allocate_gradients, allocate_states, host_bytes

_CHANGES = ("streamed_fraction=0.0", "pin_gradients=False", "pin_weights=False")
_OPTIONS = (
    "no optimizer.offload_mix and no optimizer.offload_optimizer_states, optimizer.pin_cpu_grads=False, "
    "optimizer.pin_cpu_params=False"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Buckets that want memory, where they are placed, the dtypes in which their gradients land on the host, whether
    the host adds gradients up, and what of its memory is page-locked besides streamed state.
    """

    buckets: Sequence[Bucket]
    placements: Sequence[Placement]
    gradients: Sequence[torch.dtype]
    sums: bool
    pin_gradients: bool
    pin_weights: bool

    @property
    def summed(self) -> frozenset[int]:
        """Buckets whose gradients the host adds up."""
        return summed_on_host(self.buckets, self.placements) if self.sums else frozenset()

    def host_bytes(self) -> int:
        """On the host, padding and landing places included."""
        return host_bytes(self.buckets, self.placements, self.gradients) + self._inbox_bytes()

    def locked_bytes(self) -> int:
        """Those of them that are page-locked."""
        found = self._inbox_bytes() if self.pin_gradients else 0
        for bucket, placement, gradient in zip(self.buckets, self.placements, self.gradients, strict=True):
            per_element = 0
            if placement is Placement.STREAMED:
                per_element = state_bytes_per_element(bucket.kind)
            elif placement is Placement.HOST:
                per_element = gradient.itemsize * self.pin_gradients
                per_element += bucket.dtype.itemsize_bytes * self.pin_weights
            found += bucket.offsets[-1] * per_element
        return found

    def _inbox_bytes(self) -> int:
        return sum(inbox_bytes([self.buckets[b] for b in self.summed]))

    def _changed(self, changes: Sequence[str]) -> Asked:
        stepped, gradients, weights = (change in changes for change in _CHANGES)
        placements = [Placement.HOST if stepped and p.offloaded else p for p in self.placements]
        return replace(
            self,
            placements=placements,
            pin_gradients=self.pin_gradients and not gradients,
            pin_weights=self.pin_weights and not weights,
        )

    def smaller(self) -> dict[str, int]:
        """Changes of options, fewest first, that leave fewer bytes page-locked than those before them, and how many."""
        found: dict[str, int] = {}
        least = self.locked_bytes()
        for count in range(1, len(_CHANGES) + 1):
            for changes in combinations(_CHANGES, count):
                locked = self._changed(changes).locked_bytes()
                if locked < least:
                    found[", ".join(changes)] = least = locked
        return found


def take_states(backend: Backend, asked: Asked) -> list[BucketState]:
    """Zero state for these buckets, with the landing places of their gradients. Raises MemoryLimitError; nothing stays
    allocated then.
    """
    # All of it, before the first byte is taken: slab by slab the last one would fail.
    require_host_memory(asked.host_bytes(), owner="optimizer state")
    taken: list[Buffer] = []
    states: list[BucketState] = []
    try:
        with explained(backend, asked):
            states = allocate_states(backend, asked.buckets, asked.placements, taken, pin_weights=asked.pin_weights)
            # Landing places are made now rather than in the first step, where locking pages would stall it (H27).
            pairs = zip(states, asked.gradients, strict=True)
            landing = [(s, dtype) for s, dtype in pairs if s.placement is Placement.HOST]
            allocate_gradients(backend, [s for s, _ in landing], [d for _, d in landing], pinned=asked.pin_gradients)
    except HostwardError:
        backend.free([*taken, *(s.gradient for s in states if s.gradient is not None)])
        raise
    return states


@contextmanager
def explained(backend: Backend, asked: Asked) -> Iterator[None]:
    """A refusal to lock pages inside says how many were locked, and which options need fewer."""
    try:
        yield
    except PageLockError as error:
        there = (
            f"the optimizer page-locks {asked.locked_bytes():,} bytes, and {backend.ledger.pinned_bytes:,} were locked"
        )
        smaller = "; ".join(f"{changes} leaves {size:,} bytes" for changes, size in asked.smaller().items())
        cures = [f"{smaller} (in a run: {_OPTIONS})"] if smaller else []
        raise PageLockError(
            error.what,
            why="; ".join(filter(None, (error.why, there))),
            fix="; or ".join(filter(None, (*cures, error.fix))),
        ) from error
