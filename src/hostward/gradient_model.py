"""Which gradients the device holds, at each moment of backward. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from .choice import Choice
from .inventory import Bucket, Dtype
from .lowering.optimizer import GRADIENTS_IN_FLIGHT
from .plan import Placement
from .planner import summed_on_host
from .workload import Layer, Workload


@dataclass(frozen=True, slots=True)
class Made:
    """After a gradient was made: bytes of all that are on the device, and buckets whose gradient points have come."""

    held_bytes: int
    completed: tuple[int, ...] = ()


class Gradients:
    """Of one step in steady state.

    With one microbatch, or where the host adds them up, gradients of host buckets leave during backward, a few at a
    time; with more, all are there from the second microbatch on, in float32.
    """

    def __init__(self, workload: Workload, choice: Choice) -> None:
        self._workload, self._choice = workload, choice
        buckets = workload.inventory.buckets
        several = workload.microbatches > 1
        self._in_fp32 = several or choice.gradients_on_host
        self.summed = summed_on_host(buckets, choice.placements) if choice.gradients_on_host else frozenset[int]()
        self._leaving = {
            b
            for b, placement in enumerate(choice.placements)
            if placement is Placement.HOST and (not several or b in self.summed)
        }
        self.accumulate = several
        """Whether those that stay are added to what is there already."""
        self._buckets_of: dict[str, list[int]] = {}
        for b, bucket in enumerate(buckets):
            for r in bucket.ranges:
                self._buckets_of.setdefault(r.name, []).append(b)
        self._bytes_of = {p.name: p.numel * self._itemsize(p.name, p.dtype) for p in workload.inventory.parameters}
        self._names_of = [tuple(dict.fromkeys(r.name for r in bucket.ranges)) for bucket in buckets]
        self._added_bytes = {
            p.name: p.numel * (p.dtype.itemsize_bytes + (4 if p.dtype is not Dtype.FP32 else 0))
            for p in workload.inventory.parameters
            if self._stays(p.name)
        }

    def _itemsize(self, name: str, dtype: Dtype) -> int:
        leaves = all(b in self.summed for b in self._buckets_of.get(name, ()))
        return 4 if self._in_fp32 and not (self.summed and leaves) else dtype.itemsize_bytes

    def _stays(self, name: str) -> bool:
        """Whether a gradient is on the device until the step."""
        return not set(self._buckets_of.get(name, ())) <= self._leaving

    def landed_itemsize_bytes(self, bucket: Bucket) -> int:
        """Of a gradient on the host."""
        return 4 if self._in_fp32 else bucket.dtype.itemsize_bytes

    @property
    def staying_bytes(self) -> int:
        """Of those that stay on the device until the step."""
        return sum(n for name, n in self._bytes_of.items() if self._stays(name))

    @property
    def before_bytes(self) -> int:
        """On the device when backward begins."""
        return self.staying_bytes if self.accumulate else 0

    def temporary_bytes(self, layer: Layer, made: int) -> int:
        """Of a gradient on its way to be added to what is there: as autograd made it, and in float32."""
        sizes = (self._added_bytes.get(name, 0) for name in layer.gradients[:made])
        return max(sizes, default=0) if self.accumulate else 0

    def backward(self) -> Iterator[list[Made]]:
        """By layer, from last to first: after each of its gradients, in order."""
        held = self.before_bytes
        missing = [len(names) for names in self._names_of]
        unreleased = {name: len(buckets) for name, buckets in self._buckets_of.items()}
        in_flight: deque[int] = deque()
        for layer in reversed(self._workload.layers):
            found = []
            for name in layer.gradients:
                there = self.accumulate and self._stays(name)
                held += 0 if there else self._bytes_of.get(name, 0)
                completed = []
                for b in dict.fromkeys(self._buckets_of.get(name, ())):
                    missing[b] -= 1
                    if missing[b] == 0:
                        completed.append(b)
                found.append(Made(held, tuple(completed)))
                for b in completed:
                    if b in self._leaving:
                        in_flight.append(b)
                    if len(in_flight) > GRADIENTS_IN_FLIGHT:
                        held -= self._released(in_flight.popleft(), unreleased)
            yield found

    def _released(self, bucket: int, unreleased: dict[str, int]) -> int:
        freed = 0
        for name in self._names_of[bucket]:
            unreleased[name] -= 1
            if unreleased[name] == 0:
                freed += self._bytes_of[name]
        return freed

    def used_in_forward(self) -> list[tuple[str, int]]:
        """(layer, bytes) of gradients that wait for their layer's next forward: of streamed buckets."""
        found: dict[str, int] = {}
        seen = set[str]()
        for bucket, placement in zip(self._workload.inventory.buckets, self._choice.placements, strict=True):
            for name in {r.name for r in bucket.ranges} - seen if placement is Placement.STREAMED else ():
                seen.add(name)
                found[bucket.layer] = found.get(bucket.layer, 0) + self._bytes_of[name]
        return list(found.items())
