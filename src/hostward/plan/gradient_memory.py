"""Predict which gradients the device holds at each moment of backward. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hostward.core.inventory import Bucket, Dtype
from hostward.core.placement import Placement, summed_on_host
from hostward.plan.decisions import Choice
from hostward.plan.workload import Curve, Layer, Way, Workload
from hostward.schedule.optimizer import GRADIENTS_IN_FLIGHT, grads_to_copy_out


@dataclass(frozen=True, slots=True)
class Made:
    """Hold the state after a gradient was made: bytes of all gradients on the device, and buckets that are ready."""

    held_bytes: int
    completed: Sequence[int] = ()


class Facts:
    """Map buckets to parameters and back: everything that does not depend on the choice."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.parameters = {p.name: p for p in workload.inventory.parameters}
        buckets = workload.inventory.buckets
        self.names_of = [tuple(dict.fromkeys(r.name for r in bucket.ranges)) for bucket in buckets]
        found: dict[str, list[int]] = {name: [] for name in self.parameters}
        for b, names in enumerate(self.names_of):
            for name in names:
                found.setdefault(name, []).append(b)
        self.buckets_of = {name: tuple(held) for name, held in found.items()}
        self.reduced_together = {
            layer.name: frozenset(b for name in layer.gradients for b in self.buckets_of.get(name, ()))
            for layer in (workload.layers if workload.ranks > 1 else ())
        }
        """Buckets whose gradients are reduced into one memory by several ranks, by layer."""
        self.numels = [bucket.numel for bucket in buckets]
        self.padded = [bucket.offsets[-1] for bucket in buckets]
        """Bucket sizes in elements, with the padding that aligns ranges."""
        self.state_bytes = [n * bucket.state_element_bytes for n, bucket in zip(self.padded, buckets, strict=True)]
        """Bytes of each bucket's state, with that padding."""
        self.curves: dict[tuple[str, Way], Curve] = {}
        """Made for layers that come without."""
        self.fullest_at: dict[tuple[int, int], list[tuple[int, float]]] = {}
        """The fullest moments of a curve, by its first moment's object and the number of moments: layers of a kind
        share their curves.
        """


class Gradients:
    """Predict the gradient memory of one step in steady state.

    With one microbatch, or where the host accumulates gradients, those of host buckets are offloaded during backward, a
    few at a time. With more microbatches, all gradients are on the device from the second microbatch on, in fp32, and
    so are those that several ranks reduce in fp32. Gradients that a CUDA graph writes all stay, and so do those of a
    serial step.

    Several ranks reduce a layer's gradients into one memory, which is freed when the last gradient offloaded from it
    has gone; gradients that stay are copied out of it.
    """

    def __init__(self, facts: Facts, choice: Choice) -> None:
        self._facts, self._choice = facts, choice
        workload = facts.workload
        several = workload.microbatches > 1
        self._in_fp32 = workload.gradients_in_fp32 or choice.gradients_on_host
        self._reduced_in_fp32 = workload.reduced_in_fp32
        self.summed = (
            summed_on_host(workload.inventory.buckets, choice.placements)
            if choice.gradients_on_host
            else frozenset[int]()
        )
        self._leaving = {
            b
            for b, placement in enumerate(choice.placements)
            if placement is Placement.HOST and choice.overlapped and (not several or b in self.summed)
        }
        together = {} if several or not choice.overlapped else facts.reduced_together
        self._apart = grads_to_copy_out(choice.placements, together.values())
        self._memory_of = {name: name for name in facts.buckets_of}
        """Memory in which a parameter's gradient is made, by parameter: its own, or its layer's if parts of it are
        offloaded.
        """
        for layer in workload.layers if self._apart else ():
            if not self._apart.isdisjoint(together[layer.name]):
                self._memory_of |= dict.fromkeys(layer.gradients, layer.name)
        self.accumulate = several
        """True if gradients that stay are accumulated."""
        self._stays = {name: not self._leaving.issuperset(held) for name, held in facts.buckets_of.items()}
        self._bytes_of = {p.name: p.numel * self._itemsize(p.name, p.dtype) for p in facts.parameters.values()}
        self._added_bytes = {
            p.name: p.numel * (made if made == 4 else made + 4)
            for p in (facts.parameters.values() if several else ())
            if self._stays[p.name] and (made := self._reduced_bytes(p.dtype))
        }
        self.staying_bytes = sum(n for name, n in self._bytes_of.items() if self._stays[name])
        """Bytes that stay on the device until the step."""

    def _itemsize(self, name: str, dtype: Dtype) -> int:
        if not self._in_fp32 or (self.summed and self.summed.issuperset(self._facts.buckets_of[name])):
            return self._reduced_bytes(dtype)
        return 4

    def _reduced_bytes(self, dtype: Dtype) -> int:
        """Return the bytes per element as autograd made it, or as several ranks have reduced it."""
        return 4 if self._reduced_in_fp32 else dtype.itemsize_bytes

    def landed_itemsize_bytes(self, bucket: Bucket) -> int:
        """Return the bytes per element of an offloaded gradient."""
        return 4 if self._in_fp32 else bucket.dtype.itemsize_bytes

    @property
    def before_bytes(self) -> int:
        """Return the bytes on the device when backward begins."""
        return self.staying_bytes if self.accumulate else 0

    def temporary_bytes(self, layer: Layer, made: int) -> int:
        """Return the bytes of a gradient that is being accumulated: as autograd made it, and in fp32."""
        if not self.accumulate:
            return 0
        return max((self._added_bytes.get(name, 0) for name in layer.gradients[:made]), default=0)

    @cached_property
    def backward(self) -> Sequence[Sequence[Made]]:
        """Compute the state after each gradient, in order, for each layer from last to first."""
        facts, held = self._facts, self.before_bytes
        missing = [len(names) for names in facts.names_of]
        nbytes, users = self._memories()
        in_flight: deque[int] = deque()
        made = []
        for layer in reversed(facts.workload.layers):
            found = []
            for name in layer.gradients:
                buckets = facts.buckets_of.get(name, ())
                if buckets and not (self.accumulate and self._stays[name]):
                    held += self._bytes_of[name] + sum(
                        self._part_bytes(b, name) for b in self._apart.intersection(buckets)
                    )
                completed = []
                for b in buckets:
                    missing[b] -= 1
                    if not missing[b]:
                        completed.append(b)
                found.append(Made(held, completed))
                for b in completed:
                    if b in self._leaving:
                        in_flight.append(b)
                    if len(in_flight) > GRADIENTS_IN_FLIGHT:
                        held -= self._released(in_flight.popleft(), nbytes, users)
            made.append(found)
        return made

    def _memories(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes of each memory that gradients are made in, and how many buckets use it."""
        nbytes: dict[str, int] = {}
        for name, memory in self._memory_of.items():
            nbytes[memory] = nbytes.get(memory, 0) + self._bytes_of.get(name, 0)
        users = {name: len(buckets) for name, buckets in self._facts.buckets_of.items()}
        return nbytes, users | {n: len(found - self._apart) for n, found in self._facts.reduced_together.items()}

    def _released(self, bucket: int, nbytes: Mapping[str, int], users: dict[str, int]) -> int:
        freed = 0
        for memory in {self._memory_of[name] for name in self._facts.names_of[bucket]}:
            users[memory] -= 1
            if not users[memory]:
                freed += nbytes[memory]
        return freed

    def _part_bytes(self, bucket: int, name: str) -> int:
        """Return the bytes of a parameter's gradient that are in a bucket."""
        ranges = self._facts.workload.inventory.buckets[bucket].ranges
        numel = sum(r.numel for r in ranges if r.name == name)
        return numel * self._bytes_of[name] // self._facts.parameters[name].numel

    def used_in_forward(self) -> dict[str, int]:
        """Return the bytes of streamed buckets' gradients that wait for the next forward, by layer."""
        found: dict[str, int] = {}
        seen = set[str]()
        for b, bucket in enumerate(self._facts.workload.inventory.buckets):
            if self._choice.placements[b] is not Placement.STREAMED:
                continue
            names = set(self._facts.names_of[b])
            if b in self._apart:
                nbytes = sum(self._part_bytes(b, name) for name in names)
            else:
                nbytes = sum(self._bytes_of[name] for name in names - seen)
                seen |= names
            found[bucket.layer] = found.get(bucket.layer, 0) + nbytes
        return found
