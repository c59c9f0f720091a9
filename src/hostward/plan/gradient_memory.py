"""Predict which gradients the device holds at each moment of backward. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hostward.core.placement import Placement, sharing, summed_among
from hostward.plan.decisions import Choice
from hostward.plan.workload import Workload
from hostward.schedule.optimizer import GRADIENTS_IN_FLIGHT, grads_to_copy_out, landing_buffer_bytes
from hostward.schedule.staging import late_trigger_bucket, staging_buffer_bytes, streamed_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
CODES = {placement: code for code, placement in enumerate(Placement)}


class Facts:
    """Map buckets to parameters and back: everything that does not depend on the choice, as arrays.

    Buckets, parameters and layers are numbered as in the workload. A *part* is what one bucket has of one parameter.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        parameters, buckets = workload.inventory.parameters, workload.inventory.buckets
        numbers = {p.name: n for n, p in enumerate(parameters)}
        parts = [(b, numbers[name], numel) for b, bucket in enumerate(buckets) for name, numel in bucket.parts.items()]
        self.part_bucket, self.part_parameter, self.part_numel = np.array(parts, np.int64).reshape(-1, 3).T
        self.parameter_numel = np.array([p.numel for p in parameters], np.int64)
        self.parameter_itemsize = np.array([p.dtype.itemsize_bytes for p in parameters], np.int64)
        self.layer_of_bucket = self._layers_of_buckets()
        buckets_of: dict[str, list[int]] = {p.name: [] for p in parameters}
        for b, bucket in enumerate(buckets):
            for name in bucket.parts:
                buckets_of[name].append(b)
        self._count_made(numbers, buckets_of)
        shared = workload.layers if workload.ranks > 1 else ()
        self.reduced_together = [frozenset(b for n in la.gradients for b in buckets_of.get(n, ())) for la in shared]
        """Buckets whose gradients are reduced into one memory by several ranks, by layer."""
        self.sharing = sharing(buckets)
        self.numels = [bucket.numel for bucket in buckets]
        self.padded = [bucket.offsets[-1] for bucket in buckets]
        """Bucket sizes in elements, with the padding that aligns ranges."""
        self.padded_numel = np.array(self.padded, np.int64)
        self.bucket_itemsize = np.array([bucket.dtype.itemsize_bytes for bucket in buckets], np.int64)
        self.state_bytes = np.array([b.padded_state_bytes for b in buckets], np.int64)
        """Bytes of each bucket's state, with that padding."""
        sizes = [streamed_bytes(bucket) for bucket in buckets]
        slots = {size: staging_buffer_bytes([size]) for size in set(sizes)}  # of thousands of buckets, few differ
        self.slot_bytes = np.array([slots[size] for size in sizes], np.int64)
        """Bytes of a GPU staging buffer for each bucket."""
        self.late = late_trigger_bucket(self.numels)
        """Bucket at whose ready gradient staging buffers are acquired, where other copies use the H2D lane."""
        self.step_counts_bytes = 8 * np.array([len(bucket.ranges) for bucket in buckets], np.int64)
        """Bytes of the step counts of each bucket's ranges."""

    def _layers_of_buckets(self) -> Ints:
        """Return the layer of each bucket; one more than there are where no layer has that name."""
        layers = self.workload.layers
        numbers = {layer.name: i for i, layer in reversed(list(enumerate(layers)))}
        return np.array([numbers.get(b.layer, len(layers)) for b in self.workload.inventory.buckets], np.int64)

    def _count_made(self, numbers: dict[str, int], buckets_of: dict[str, list[int]]) -> None:
        """Number the gradients in the order in which backward makes them, with the buckets that each makes ready."""
        layers = self.workload.layers
        made = [(i, name) for i in reversed(range(len(layers))) for name in layers[i].gradients]
        self.made = np.array([numbers.get(name, len(numbers)) for _, name in made], np.int64)
        """Parameter of each gradient; one more than there are for those that are not trained."""
        self.made_in = np.array([i for i, _ in made], np.int64)
        """This is the layer of each gradient."""
        self.made_count = [len(layer.gradients) for layer in layers]
        """Gradients by layer."""
        self.made_before = [sum(self.made_count[i + 1 :]) for i in range(len(layers))]
        """Gradients that exist when a layer's backward begins."""
        made_bytes = np.append(self.parameter_numel * self.parameter_itemsize, 0)[self.made] * self.workload.gathering
        self.whole_gradient_bytes: list[float] = [0.0, *made_bytes.cumsum(dtype=np.float64).tolist()]
        """Bytes of the first gradients that backward makes, by their number, before several ranks have reduced them."""
        missing = [len(bucket.parts) for bucket in self.workload.inventory.buckets]
        ready = []
        for number, (_, name) in enumerate(made):
            for b in buckets_of.get(name, ()):
                missing[b] -= 1
                if not missing[b]:
                    ready.append((b, number))
        self.ready, self.ready_at = np.array(ready, np.int64).reshape(-1, 2).T
        """Buckets in the order in which their gradients are complete, and the gradient that completes each."""

    @cached_property
    def triggers(self) -> tuple[Sequence[str | None], Ints]:
        """Return the triggers of a step in order: the layers of forward, then the buckets of ready gradients.

        Each has its layer or None, and its bucket or -1.
        """
        names = [layer.name for layer in self.workload.layers]
        return [*names, *[None] * len(self.ready)], np.concatenate((np.full(len(names), -1), self.ready))

    def among(self, chosen: frozenset[int]) -> Bools:
        """Return for each bucket whether it is one of the chosen."""
        found = np.zeros(len(self.numels), np.bool_)
        found[list(chosen)] = True
        return found

    def partly(self, buckets: Bools) -> Bools:
        """Return for each parameter whether any of these buckets has a part of it."""
        found = np.zeros(len(self.parameter_numel), np.bool_)
        found[self.part_parameter[buckets[self.part_bucket]]] = True
        return found


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
        self._facts, workload = facts, facts.workload
        several = workload.microbatches > 1
        self._in_fp32 = workload.gradients_in_fp32 or choice.gradients_on_host
        self.summed = summed_among(facts.sharing, choice.placements) if choice.gradients_on_host else frozenset[int]()
        buckets = workload.inventory.buckets
        self.landing_buffers_bytes = sum(landing_buffer_bytes([buckets[b] for b in self.summed]))
        """Host bytes of the buffers in which gradients arrive that the host sums."""
        placed = np.array([CODES[placement] for placement in choice.placements], np.int8)
        self.is_on: dict[Placement, Bools] = {placement: placed == code for placement, code in CODES.items()}
        """For each placement, the buckets that have it."""
        summed = facts.among(self.summed)
        leaves = self.is_on[Placement.HOST] if choice.overlapped else np.zeros_like(summed)
        self._leaving = leaves & summed if several else leaves
        together = [] if several or not choice.overlapped else facts.reduced_together
        apart = grads_to_copy_out(choice.placements, together)
        self._apart = facts.among(apart)
        self._divided = [i for i, buckets in enumerate(together) if not apart.isdisjoint(buckets)] if apart else []
        """Layers of whose gradients some stay and some are offloaded."""
        self.accumulate = several
        """True if gradients that stay are accumulated."""
        self._stays = facts.partly(~self._leaving)
        # Bytes per element as autograd made it, or as several ranks have reduced it.
        self._reduced = (
            np.full_like(facts.parameter_itemsize, 4) if workload.reduced_in_fp32 else facts.parameter_itemsize
        )
        itemsize = np.where(facts.partly(~summed), 4, self._reduced) if self._in_fp32 else self._reduced
        self._bytes_of = facts.parameter_numel * itemsize
        self._part_bytes = facts.part_numel * itemsize[facts.part_parameter]
        self.staying_bytes = int(self._bytes_of[self._stays].sum())
        """Bytes that stay on the device until the step."""

    @property
    def landed_itemsize(self) -> Ints:
        """Return the bytes per element of an offloaded gradient, by bucket."""
        itemsize = self._facts.bucket_itemsize
        return np.full_like(itemsize, 4) if self._in_fp32 else itemsize

    @property
    def before_bytes(self) -> int:
        """Return the bytes on the device when the last backward begins."""
        return self.staying_bytes + int(self._in_flight.sum()) if self.accumulate else 0

    @cached_property
    def _in_flight(self) -> Ints:
        """Return the bytes of the newest gradients that a microbatch has offloaded, in the order in which the next
        microbatch's gradients free them, the first with its first.
        """
        facts, found = self._facts, np.zeros(GRADIENTS_IN_FLIGHT, np.int64)
        newest = facts.ready[self._leaving[facts.ready]][-GRADIENTS_IN_FLIGHT:]
        counted = self._stays.copy()
        for at, bucket in reversed(list(enumerate(newest.tolist()))):  # a gradient goes with its last bucket
            of = np.unique(facts.part_parameter[facts.part_bucket == bucket])
            found[at] = self._bytes_of[of[~counted[of]]].sum()
            counted[of] = True
        return found

    @cached_property
    def temporary(self) -> Floats:
        """Return the largest bytes of a gradient of a layer that was accumulated, as autograd made it and in fp32, by
        the number of gradients that backward has made.
        """
        facts, made = self._facts, self._facts.made
        found = np.zeros(len(made) + 1)
        if self.accumulate:
            added = np.where(self._reduced == 4, 4, self._reduced + 4) * facts.parameter_numel * self._stays
            # The layers' own maximum: what later layers make counts for more than all of earlier ones.
            apart = float(added.max(initial=0.0) + 1) * (facts.made_in.max(initial=0) - facts.made_in)
            found[1:] = np.maximum.accumulate(np.append(added, 0)[made] + apart) - apart
        return found

    @cached_property
    def of_the_first(self) -> Ints:
        """Return the bytes that the first of several microbatches accumulates, by the number of gradients made."""
        stay = np.where(self._stays, self._bytes_of, 0)
        return np.append(0, np.append(stay, 0)[self._facts.made]).cumsum()

    @cached_property
    def _made(self) -> Ints:
        """Return the bytes of all gradients by the number of them that backward has made, as if none left."""
        facts = self._facts
        added = np.where(self._stays, 0, self._bytes_of) if self.accumulate else self._bytes_of.copy()
        apart = self._apart[facts.part_bucket]
        np.add.at(added, facts.part_parameter[apart], self._part_bytes[apart])
        return np.append(self.before_bytes, np.append(added, 0)[facts.made]).cumsum()

    @cached_property
    def held(self) -> Floats:
        """Return the bytes of all gradients on the device by the number of them that backward has made.

        Of several ranks that is right between layers only, see `at`.
        """
        facts = self._facts
        change = np.zeros(len(facts.made) + 2)
        freed_at, nbytes = self._memories()
        gone = np.isfinite(freed_at)
        # One rank has the next gradient when it frees one; several have all of a layer, and then free those before.
        until = 1 if facts.workload.gathering else 2
        np.add.at(change, freed_at[gone].astype(np.int64) + until, -nbytes[gone])
        if self.accumulate:
            sent = facts.ready_at[self._leaving[facts.ready]][:GRADIENTS_IN_FLIGHT]
            np.add.at(change, sent + until, -self._in_flight[: len(sent)])
        found: Floats = self._made + change[:-1].cumsum()
        return found

    def at(self, made: Ints, layer: Ints, ends: Bools) -> Floats:
        """Return the bytes of all gradients on the device at moments of backward.

        Args:
            made: gradients that the rank has by then.
            layer: the layer that runs.
            ends: whether it is over: then several ranks reduce its gradients, while those before have not left.
        """
        if not self._facts.workload.gathering:
            return self.held[made]
        before = np.array(self._facts.made_before, np.int64)[layer]
        return np.where(ends, self.held[before] + self._made[made] - self._made[before], self.held[made])

    def _memories(self) -> tuple[Floats, Ints]:
        """Return the memories that gradients are made in: the gradient at which each is freed, and its bytes.

        The memory is the parameter's own, or its layer's if parts of that are offloaded.
        """
        facts = self._facts
        memory = np.arange(len(facts.parameter_numel))
        for i in self._divided:
            own = facts.made[facts.made_in == i]
            memory[own[own < len(memory)]] = len(memory) + i
        count = len(memory) + len(facts.workload.layers)
        leaving = self._leaving[facts.ready]
        released = np.full(len(facts.numels), np.inf)
        released[facts.ready[leaving][:-GRADIENTS_IN_FLIGHT]] = facts.ready_at[leaving][GRADIENTS_IN_FLIGHT:]
        freed_at: Floats = np.full(count, -np.inf)
        users = ~self._apart[facts.part_bucket]
        np.maximum.at(freed_at, memory[facts.part_parameter[users]], released[facts.part_bucket[users]])
        nbytes = np.zeros(count, np.int64)
        np.add.at(nbytes, memory, self._bytes_of)
        return freed_at, nbytes

    @cached_property
    def used_in_forward(self) -> Floats:
        """Return the bytes of streamed buckets' gradients that wait for the next forward, by layer.

        The last entry is of buckets whose layer is not known.
        """
        facts = self._facts
        streamed = self.is_on[Placement.STREAMED][facts.part_bucket]
        apart = self._apart[facts.part_bucket]
        whole = np.flatnonzero(streamed & ~apart)
        parameters, first = np.unique(facts.part_parameter[whole], return_index=True)
        divided = np.flatnonzero(streamed & apart)
        buckets = np.concatenate((facts.part_bucket[whole[first]], facts.part_bucket[divided]))
        nbytes = np.concatenate((self._bytes_of[parameters], self._part_bytes[divided]))
        found = np.zeros(len(facts.workload.layers) + 1)
        np.add.at(found, facts.layer_of_bucket[buckets], nbytes)
        return found
