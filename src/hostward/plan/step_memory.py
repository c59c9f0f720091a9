"""Device memory along a training step, from forward's first operation to the end of backward. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from hostward.core.placement import Placement
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.gradient_memory import Facts, Gradients, Made
from hostward.plan.workload import Curve, Layer, Moment, PerToken, Way
from hostward.schedule.staging import (
    MIN_STAGING_BUFFERS,
    StagingDecision,
    TriggerInterval,
    decide_staging,
    late_trigger_bucket,
    max_staging_buffers,
    staging_buffer_bytes,
    streamed_bytes,
)
from hostward.schedule.weights import weight_prefetch_depth

_WAYS = {
    Keep.KEEP: Way.KEEP,
    Keep.OFFLOAD: Way.KEEP,
    Keep.RECOMPUTE: Way.RECOMPUTE,
    Keep.RECOMPUTE_OFFLOAD: Way.RECOMPUTE,
    Keep.ELEMENTWISE: Way.ELEMENTWISE,
    Keep.ELEMENTWISE_OFFLOAD: Way.ELEMENTWISE,
}
_NOTHING = PerToken(0.0)


class Owner(StrEnum):
    """Name the categories of device memory."""

    WEIGHTS = "weights"
    GATHERED = "gathered weights"
    """Weights gathered from several ranks, with the gradients of whole layers that are scattered again."""
    GRADIENTS = "gradients"
    STATE = "optimizer state"
    SLOTS = "staging slots"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    WORKSPACE = "workspaces"
    COPIES = "copies for a checkpoint"


class Sample(NamedTuple):
    """Hold the device memory at one moment, without GPU staging buffers and optimizer state."""

    weights: float
    gradients: float
    activations: float
    loss: float = 0.0
    gathered: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Describe GPU staging buffers: how many there are, and how many there would be at most.

    `stage_at` names the buckets whose ready gradients trigger the acquisition of one buffer each, and `unstage_at` the
    layers whose next forward releases it; None: the last layer.
    """

    count: int
    most: int
    stage_at: tuple[int, ...]
    unstage_at: tuple[str | None, ...]


@dataclass(slots=True)
class Timeline:
    samples: list[Sample] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    """Sums of the samples."""
    points: list[tuple[int, str | None, int | None]] = field(default_factory=list)
    """Triggers, as (first sample after it, layer of a pre-forward or pre-backward trigger, bucket of a ready gradient).
    """

    def add(self, weights: float, gradients: float, kept: float, loss: float = 0.0, gathered: float = 0.0) -> None:
        self.samples.append(Sample(weights, gradients, kept, loss, gathered))
        self.totals.append(weights + gradients + kept + loss + gathered)

    def use(self, layer: str) -> None:
        self.points.append((len(self.samples), layer, None))

    def gradient(self, bucket: int) -> None:
        self.points.append((len(self.samples), None, bucket))


class StepModel:
    """Simulate the memory of one step in steady state: the last microbatch, and what earlier ones left."""

    def __init__(self, facts: Facts, choice: Choice, gradients: Gradients) -> None:
        workload = self._workload = facts.workload
        self._gradients, self._captured, self._serial = gradients, choice.captured, choice.serial
        self._tokens, self._length = workload.microbatch_tokens, workload.sequence_tokens
        layers = workload.layers
        self._numbers = [i for i, layer in enumerate(layers) if layer.repeated]
        self._visits = [0, *accumulate(int(layer.repeated) for layer in layers)][:-1]
        """Listed layers before each layer."""
        keeps: list[Keep | None] = [None] * len(layers)
        for i, keep in zip(self._numbers, choice.activations, strict=True):
            keeps[i] = keep
        ways = [Way.KEEP if keep is None else _WAYS[keep] for keep in keeps]
        self._curves = [_curve_of(layer, way, facts.curves) for layer, way in zip(layers, ways, strict=True)]
        self._fullest_at = facts.fullest_at
        kept = [self._at((curve.kept,))[0][1] for curve in self._curves]
        self._recomputed = [keep is Keep.RECOMPUTE_OFFLOAD for keep in keeps]
        self._away = [keep in LEAVES for keep in keeps]
        self._kept = [0.0 if away else n for away, n in zip(self._away, kept, strict=True)]
        self.parked_bytes = sum(n for away, n in zip(self._away, kept, strict=True) if away)
        """Bytes in saved tensors on the host."""
        self._parked = [n if away else 0.0 for away, n in zip(self._away, kept, strict=True)]
        self._parked_before = [0.0, *accumulate(self._parked[i] for i in self._numbers)]
        """Host bytes of all layers before a place among the listed layers."""
        last_away = max((at for at, i in enumerate(self._numbers) if self._away[i]), default=-1)
        self._window = max(1, len(self._numbers) - 1 - last_away)
        self._weights = [layer.weight_bytes for layer in layers]
        self._whole = [n * workload.ranks if workload.ranks > 1 else 0 for n in self._weights]
        """Bytes that each layer has when it is gathered from several ranks."""
        self._whole_before = [0, *accumulate(self._whole), sum(self._whole)]
        """Gathered bytes of all layers before each layer."""
        tied = not layers[0].repeated and layers[-1].weight_bytes < layers[0].weight_bytes
        self._root = self._whole[0] if tied and workload.resharded else 0
        """Bytes in an embedding that is the output layer as well: the root gathers it, so it is unsharded in all of a
        pass.
        """
        self._reduced = 2 if workload.reduced_in_fp32 else 1
        """Bytes of what is scattered over those of the gradients in it, which are 16-bit."""
        self._left = self._reduced * self._whole[0]
        """Bytes scattered last in a backward: they stay until the next microbatch has something to scatter."""
        self._left_until = len(layers) - (2 if tied else 1)
        self._offloaded = [layer.name in choice.offloaded_weights for layer in layers]
        self._fetched = bool(choice.offloaded_weights)
        self._ahead = weight_prefetch_depth(gathered=workload.ranks > 1)
        self._always = sum(n for n, away in zip(self._weights, self._offloaded, strict=True) if not away)
        buckets = workload.inventory.buckets
        streamed = [b for b, p in enumerate(choice.placements) if p is Placement.STREAMED]
        self._slot_bytes = staging_buffer_bytes([streamed_bytes(buckets[b]) for b in streamed])
        self._most = max_staging_buffers(len(streamed), self._slot_bytes, choice.staging_bytes)
        self._late = late_trigger_bucket(facts.numels)

    def _at(self, moments: Sequence[Moment]) -> Sequence[tuple[int, float]]:
        """Return the fullest of each run of moments with as many gradients: their number, and the layer's bytes."""
        if not moments:
            return ()
        key = id(moments[0]), len(moments)
        found = self._fullest_at.get(key)
        if found is None:
            sizes = [(moment.gradients, moment.of(self._tokens, self._length)) for moment in moments]
            runs = groupby(sizes, key=itemgetter(0))
            found = self._fullest_at[key] = [(made, max(nbytes for _, nbytes in run)) for made, run in runs]
        return found

    @property
    def resident_weight_bytes(self) -> int:
        """Return the bytes of weights between steps, when the first offloaded layers are already being prefetched."""
        first = [self._weights[i] for i in self._numbers[: self._ahead] if self._offloaded[i]]
        return round(self._always + sum(first))

    # ---------------------------------------------------------------- along the step

    @cached_property
    def timeline(self) -> Timeline:
        timeline = Timeline()
        self._forward(timeline)
        self._backward(timeline)
        return timeline

    @cached_property
    def _between(self) -> Timeline:
        """Return a backward before the last, in which gathered layers stay so and no staging buffer is acquired."""
        timeline, total = Timeline(), sum(self._kept)
        if self._workload.fetched_anew or self._workload.microbatches == 1:
            return timeline  # the last is the fullest
        for i in reversed(range(len(self._workload.layers))):
            total -= self._kept[i]
            gathered = self._whole_before[-1] + self._scattered(i, self._workload.microbatches > 2)
            held, weights = self._gradients.before_bytes, self._weights_at(i, -1)
            self._sample(timeline, i, self._curves[i].backward, total + self._back(i), held, weights, gathered)
            reducing = self._whole_before[-1] + (1 + self._reduced) * self._whole[i]
            timeline.add(weights, held, total + self._back(i), 0.0, reducing)
        return timeline

    def _forward(self, timeline: Timeline) -> None:
        layers = self._workload.layers
        waiting = {} if self._gradients.accumulate else self._gradients.used_in_forward()
        held = self._gradients.before_bytes + sum(waiting.values())
        kept = 0.0
        for i, layer in enumerate(layers):
            timeline.use(layer.name)
            held -= waiting.pop(layer.name, 0)
            base = kept + self._leaving(i)
            gathered = self._gathered(i)
            self._sample(timeline, i, self._curves[i].forward, base, held, self._weights_at(i, 1), gathered)
            kept += self._kept[i]

    def _backward(self, timeline: Timeline) -> None:
        layers, total = self._workload.layers, sum(self._kept)
        made_by_layer = iter(self._gradients.backward)
        held = self._gradients.before_bytes
        for i in reversed(range(len(layers))):
            made = next(made_by_layer)
            total -= self._kept[i]
            base = total + self._back(i)
            weights = self._weights_at(i, -1), self._gathered_behind(i), self._reducing(i)
            after = [held, *(m.held_bytes for m in made)]
            self._moments(timeline, i, made, base, after, weights)
            held = after[-1]
        timeline.add(self.resident_weight_bytes, held, self._kept[0])

    @property
    def _first(self) -> int:
        return self._numbers[0] if self._numbers else 0

    def _moments(
        self,
        timeline: Timeline,
        i: int,
        made: Sequence[Made],
        base: float,
        after: Sequence[int],
        weights: tuple[float, float, float],
    ) -> None:
        """Add the moments of a layer's backward, with the triggers of its gradients.

        Args:
            weights: bytes of weights, of gathered layers, and of those that remain gathered when the layer is done.
        """
        done = 0
        # After a layer was recomputed, nothing holds its reloaded input; the first gradient marks that moment.
        reloaded = self._parked[i] if self._recomputed[i] else 0.0
        behind, layer = self._behind(i), self._workload.layers[i]
        temporary = self._gradients.temporary_bytes if self._gradients.accumulate else None
        for count, own in self._at(self._curves[i].backward):
            while done < min(count, len(made)):
                for bucket in made[done].completed:
                    timeline.gradient(bucket)
                done += 1
            held = after[min(count, len(after) - 1)] + (temporary(layer, count) if temporary else 0)
            kept = base - reloaded if count else base
            timeline.add(weights[0], held, *((kept, own) if behind else (kept + own, 0.0)), weights[1])
        for left in range(done, len(made)):
            for bucket in made[left].completed:
                timeline.gradient(bucket)
        timeline.add(weights[0], after[-1], base, 0.0, max(weights[1:]))

    def _behind(self, i: int) -> bool:
        """Return whether a layer comes after the repeated ones: its saved tensors are logits and loss."""
        return not self._workload.layers[i].repeated and i > self._first

    def _sample(
        self,
        timeline: Timeline,
        i: int,
        moments: Sequence[Moment],
        base: float,
        held: int,
        weights: float,
        gathered: float,
    ) -> None:
        """Add the moments of a curve with these bytes of gradients."""
        behind, layer = self._behind(i), self._workload.layers[i]
        for made, own in self._at(moments):
            gradients = held + self._gradients.temporary_bytes(layer, made)
            timeline.add(weights, gradients, *((base, own) if behind else (base + own, 0.0)), gathered)

    def _leaving(self, i: int) -> float:
        """Return the bytes of earlier layers' saved tensors whose D2H copies still hold device memory, in forward of
        layer `i`.
        """
        at = self._visits[i]
        return self._parked_before[at] - self._parked_before[min(at, max(0, at - self._window + 1))]

    def _back(self, i: int) -> float:
        """Return the bytes of earlier layers' saved tensors that are reloaded or being reloaded, in backward of layer
        `i`.
        """
        at = self._visits[i]
        if at == len(self._numbers):
            return 0.0
        return self._parked_before[at] - self._parked_before[max(0, at - self._window)]

    def _weights_at(self, i: int, step: int) -> float:
        """Return the bytes of weights while layer `i` runs and the next ones are prefetched.

        Args:
            step: 1 in forward, -1 in backward.
        """
        whole = not self._workload.fetched_anew and (step < 0 or self._workload.microbatches > 1)
        if whole or not self._fetched:
            return self._always
        here = (i + step * k for k in range(self._ahead + 1))
        return self._always + sum(
            self._weights[at] for at in here if 0 <= at < len(self._weights) and self._offloaded[at]
        )

    def _gathered(self, i: int) -> float:
        """Return the gathered bytes while layer `i` runs forward.

        Layers are gathered one by one, the next one while this one runs, and stay until their backward; with several
        microbatches, until that of the last. With resharding, the memory that a layer was copied from stays until the
        next layer is gathered.
        """
        if self._workload.resharded:
            left = self._left if self._workload.microbatches > 1 else 0
            return 2 * self._whole[i] + (self._root if i > 0 else 0) + left
        if self._workload.microbatches > 1:
            return self._whole_before[-1] + self._left
        return self._whole_before[i + 2]

    def _gathered_behind(self, i: int) -> float:
        """Return the gathered bytes in backward of layer `i`, while its gradient is made and the previous one is
        scattered.

        A resharded layer is gathered one layer ahead; the root's parameters are unsharded until the end. (Where a
        gradient has two halves, the curves show how long the first waits for the other.)
        """
        return self._others(i) + self._whole[i] + self._scattered(i, self._workload.microbatches > 1)

    def _others(self, i: int) -> float:
        """Return the unsharded bytes of other layers in backward of layer `i`."""
        if not self._workload.resharded:
            return self._whole_before[i]
        return (self._whole[i - 1] if i > 0 else 0) + (self._root if i > 1 else 0)

    def _reducing(self, i: int) -> float:
        """Return the gathered bytes when backward of layer `i` is done.

        The layer is sharded again, and its gradient is copied to where it is scattered from. The memory from which the
        previous layer's gradient was scattered is free by then.
        """
        return self._others(i) + (1 + self._reduced) * self._whole[i]

    def _scattered(self, i: int, again: bool) -> float:
        """Return the bytes of layer `i`'s gradient and of the one being scattered.

        Args:
            again: whether another microbatch's backward ran before.
        """
        before, left = self._whole_before, self._left if again and i >= self._left_until else 0
        return before[i + 1] - before[i] + self._reduced * (before[i + 2] - before[i + 1]) + left

    # ---------------------------------------------------------------- GPU staging buffers

    def slots(self) -> SlotCount:
        """Count the staging buffers that the runtime settles on after its profile of the third step."""
        if not self._most:
            return SlotCount(0, 0, (), ())
        if self._serial:  # acquired when backward is over
            return replace(self.first_slots, stage_at=(-1,) * self.first_slots.count)
        settled = decide_staging(
            self._spans(),
            slot_size_bytes=self._slot_bytes,
            most=self._most,
            acquire_at=self._late,
            early=not any(self._away) and not self._fetched,
        ) or StagingDecision(self._most, (self._late,) * self._most, (None,) * self._most)
        return SlotCount(settled.count, self._most, settled.acquire_at, settled.release_at)

    @property
    def first_slots(self) -> SlotCount:
        """Return the staging buffers before that profile of the third step."""
        count = min(MIN_STAGING_BUFFERS, self._most)
        return SlotCount(count, self._most, (self._late,) * count, (None,) * count)

    def _spans(self) -> list[TriggerInterval]:
        samples, points = self.timeline.totals, self.timeline.points
        ends, last = [*(at for at, _, _ in points[1:]), len(samples)], len(samples) - 1
        found = []
        for (start, layer, bucket), end in zip(points, ends, strict=True):
            # Bytes at a trigger count for its span, even if no moment falls into it.
            first = min(start, last)
            peak = samples[first] if end <= first + 1 else max(samples[first:end])
            found.append(TriggerInterval(layer, bucket, 0, round(peak)))
        return found

    def peak(self, slots: SlotCount) -> Mapping[Owner, float]:
        """Return the bytes by category at the moment at which the device holds the most."""
        samples, totals, points = self.timeline.samples, self.timeline.totals, self.timeline.points
        last = len(samples) - 1
        staged = [next((at for at, _, b in points if b is not None and b <= stage), last) for stage in slots.stage_at]
        uses = {layer: at for at, layer, _ in reversed(points) if layer is not None}
        behind = max(uses.values(), default=0)
        back = [uses.get(layer, behind) if layer is not None else behind for layer in slots.unstage_at]

        def slots_at(t: int) -> int:
            # The graph's memory exists during the step as well.
            kept = slots.count if self._captured else slots.count - bisect_right(back, t)
            return max(kept, bisect_right(staged, t)) * self._slot_bytes

        # Between two changes of the staging buffers, the other memory decides.
        spans = pairwise(sorted({0, *staged, *back, len(samples)}))
        fullest_of = [(max(totals[start:end]), slots_at(start), start, end) for start, end in spans]
        most, slots_held, start, end = max(fullest_of, key=lambda span: span[0] + span[1])
        found = samples[totals.index(most, start, end)]
        between = self._between
        if between.totals and (fullest := max(between.totals)) > most + slots_held:
            found, slots_held = between.samples[between.totals.index(fullest)], 0
        return {
            Owner.WEIGHTS: found.weights,
            Owner.GRADIENTS: found.gradients,
            Owner.SLOTS: slots_held,
            Owner.ACTIVATIONS: found.activations,
            Owner.LOSS: found.loss,
            Owner.GATHERED: found.gathered,
        }


def _curve_of(layer: Layer, way: Way, made: dict[tuple[str, Way], Curve]) -> Curve:
    """Return the curve of a layer; one without layer norms and activations to recompute keeps all.

    Without curves, build one from the known sums, once per layer and way, in `made`.
    """
    if layer.curves:
        return layer.curves.get(way) or layer.curves[Way.KEEP]
    key = layer.name, way
    if key not in made:
        made[key] = _curve_in_sum(layer, way)
    return made[key]


def _curve_in_sum(layer: Layer, way: Way) -> Curve:
    saved, kept = layer.saved_bytes, layer.saved_bytes
    if way is Way.RECOMPUTE:
        kept = layer.input_bytes
    elif way is Way.ELEMENTWISE:
        kept = sum((part.bytes for part in layer.saved if not part.elementwise), _NOTHING)
    running = Moment(layer.input_bytes + saved)
    backward = Moment(running.bytes + layer.workspace_bytes, 0.0, len(layer.gradients))
    return Curve((running,), Moment(kept), (backward,))
