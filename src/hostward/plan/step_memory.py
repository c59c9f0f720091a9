"""Device memory along a training step, from forward's first operation to the end of backward. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import numpy as np

from hostward.core.placement import Placement
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.gradient_memory import Bools, Facts, Floats, Gradients, Ints
from hostward.plan.workload import Curve, Layer, Moment, PerToken, Way, Workload
from hostward.schedule.staging import (
    MIN_STAGING_BUFFERS,
    StagingDecision,
    decide_staging_of,
    max_staging_buffers,
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
    """Weights gathered from several ranks, and whole gradients until they are scattered again."""
    GRADIENTS = "gradients"
    STATE = "optimizer state"
    SLOTS = "staging slots"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    WORKSPACE = "workspaces"
    COPIES = "copies for a checkpoint"


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


Columns = tuple[Floats, Floats, Floats, Floats]
"""Bytes of weights, activations, logits and loss, and gathered weights, by moment."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Hold the device memory moment by moment, without GPU staging buffers and optimizer state, in bytes."""

    weights: Floats
    activations: Floats
    loss: Floats
    gathered: Floats
    gradients: Floats
    totals: Floats
    """Sums of the others."""

    @classmethod
    def of(cls, *parts: Columns) -> Timeline:
        """Return the timeline of these parts of a step, one after the other, without gradients."""
        weights, kept, loss, gathered = map(np.concatenate, zip(*parts, strict=True))
        return cls(weights, kept, loss, gathered, np.zeros(len(weights)), weights + kept + loss + gathered)

    def holding(self, *gradients: Floats) -> Timeline:
        """Return the timeline with gradients, in bytes by moment, of one part of the step after the other."""
        held = np.concatenate(gradients)
        return replace(self, gradients=held, totals=self.totals + held)


@dataclass(frozen=True, slots=True)
class Moments:
    """Hold the moments of all layers in one pass, in order, as far as only the ways in which they run matter."""

    layer: Ints
    own: Floats
    """Bytes of the layer itself."""
    loss: Floats
    """Bytes of the layer itself where these are logits and loss: it comes after the repeated ones."""
    whole: Floats
    """Bytes of the gradients that the layer has made, as long as several ranks have not reduced them; of one rank 0."""
    made: Ints
    """Gradients that the rank has, of all layers: that backward has made, or that several ranks have reduced, which
    they do when backward of a layer is over.
    """
    summed: Ints
    """The same while gradients are accumulated, else 0: of several ranks, when they are reduced."""
    begun: Bools
    """Whether the layer has made a gradient and goes on."""
    ends: Bools
    """Whether backward of the layer is over."""
    starts: Ints
    """First moment of each layer in forward; in backward the first at which the rank has each gradient."""


class LayerSizes:
    """Hold what does not depend on the choice: the bytes of each layer's weights, and of what several ranks gather and
    scatter.

    Arrays are by layer, in the workload's order.
    """

    def __init__(self, workload: Workload) -> None:
        layers = workload.layers
        self.repeated = repeated = np.array([layer.repeated for layer in layers], np.bool_)
        self.visits: Ints = repeated.cumsum() - repeated
        """Listed layers before each layer."""
        self.weights = np.array([layer.weight_bytes for layer in layers], np.int64)
        self.whole: Ints = self.weights * workload.gathering
        """Bytes that each layer has when it is gathered from several ranks."""
        self.trained: Ints = np.array([layer.trained_weight_bytes for layer in layers], np.int64) * workload.gathering
        """Bytes of each layer's gradients before several ranks have reduced them."""
        self.whole_before: Ints = np.concatenate(([0], self.whole.cumsum(), [self.whole.sum()]))
        """Gathered bytes of all layers before each layer."""
        tied = not layers[0].repeated and layers[-1].weight_bytes < layers[0].weight_bytes
        self.root = int(self.whole[0]) if tied and workload.resharded else 0
        """Bytes in an embedding that is the output layer as well: the root gathers it, so it is unsharded in all of a
        pass.
        """
        self.reduced = 2 if workload.reduced_in_fp32 else 1
        """Bytes of what is scattered over those of the gradients in it, which are 16-bit."""
        # The root itself gathers what is between the repeated layers and the output layer, such as the last norm, and
        # an output layer whose weight is the embedding's.
        ends = (0,) if tied else (0, len(layers) - 1)
        groups = [i for i, weights in enumerate(self.whole) if weights and (repeated[i] or i in ends)]
        self.heads_a_group = not tied
        at = np.searchsorted(groups, np.arange(len(layers)))
        behind = np.searchsorted(groups, np.arange(len(layers)), side="right")
        self.of_group_before = np.append(0, self.whole[groups])[at]
        """Gathered bytes of the group before each layer; of the first 0."""
        self.scattered_behind = self.reduced * np.append(self.trained[groups], 0)[behind]
        """Bytes from which the gradients of the group behind each layer are scattered; of the last 0."""
        self.flat = np.append(0, self.whole[groups])[behind]
        """Bytes in the memory into which the group of each layer was gathered, or that before it."""
        self.left = self.reduced * int(next(filter(None, self.trained), 0))
        """Bytes scattered last in a backward: they stay until the next microbatch has something to scatter."""
        self.left_until = len(layers) - (2 if tied else 1)


class Passes:
    """Make the moments of forward and backward of a workload, once for all choices with the same ways."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.workload = workload = facts.workload
        self._tokens, self._length = workload.microbatch_tokens, workload.sequence_tokens
        first = next((i for i, layer in enumerate(workload.layers) if layer.repeated), 0)
        self._behind = [not layer.repeated and i > first for i, layer in enumerate(workload.layers)]
        self._curves: dict[tuple[str, Way], Curve] = {}
        """Made for layers that come without."""
        self._fullest_at: dict[tuple[int, int], list[tuple[int, float]]] = {}
        """The fullest moments of a curve, by its first moment's object and the number of moments: layers of a kind
        share their curves.
        """
        self._known: dict[tuple[Way, ...], tuple[Moments, Moments]] = {}
        self._layers: dict[tuple[tuple[Keep, ...], frozenset[str]], LayerMemory] = {}
        self.sizes = LayerSizes(workload)

    def layers(self, choice: Choice) -> LayerMemory:
        """Return what layers hold under a choice; placements of state make no difference to it."""
        key = choice.activations, choice.offloaded_weights
        if key not in self._layers:
            self._layers[key] = LayerMemory(self, *key)
        return self._layers[key]

    def of(self, ways: tuple[Way, ...]) -> tuple[Moments, Moments]:
        """Return the moments of forward and of backward."""
        if ways not in self._known:
            layers = range(len(ways))
            forward = self._moments([(i, self._at(self.curve(i, ways[i]).forward)) for i in layers], backward=False)
            backward = self._moments(
                [(i, self._at(self.curve(i, ways[i]).backward)) for i in layers][::-1], backward=True
            )
            self._known[ways] = forward, backward
        return self._known[ways]

    def curve(self, i: int, way: Way) -> Curve:
        """Return the curve of a layer that runs in this way."""
        return _curve_of(self._facts.workload.layers[i], way, self._curves)

    def kept_bytes(self, i: int, way: Way) -> float:
        """Return the bytes that a layer keeps for backward."""
        return self._at((self.curve(i, way).kept,))[0][1]

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

    def _unreduced(self, i: int, exist: int) -> float:
        """Return the bytes of the first `exist` gradients of a layer before several ranks reduce them; of one rank 0.

        A layer without their names makes all of them at once.
        """
        facts, layer = self._facts, self.workload.layers[i]
        if not layer.gradients:
            return float(layer.trained_weight_bytes * self.workload.gathering)
        before = facts.made_before[i]
        return facts.whole_gradient_bytes[before + exist] - facts.whole_gradient_bytes[before]

    def _moments(self, of_layers: Sequence[tuple[int, Sequence[tuple[int, float]]]], *, backward: bool) -> Moments:
        """Lay out the moments of layers in this order; in backward there is one more when a layer is done."""
        shared = bool(self.workload.gathering)
        rows: list[tuple[int, float, float, float, int, int, bool, bool]] = []
        layer_starts: list[int] = []
        gradient_starts: list[int] = []
        for i, moments in of_layers:
            before, count = self._facts.made_before[i], self._facts.made_count[i]
            layer_starts.append(len(rows))
            done = 0
            for gradients, nbytes in moments:
                exist = min(gradients, count)
                if not shared:
                    gradient_starts += [len(rows)] * (exist - done)
                    done = max(done, exist)
                own, loss = (0.0, nbytes) if self._behind[i] else (nbytes, 0.0)
                whole = self._unreduced(i, exist) if backward else 0.0
                made = 0 if shared else exist
                rows.append((i, own, loss, whole, before + made, before + made if made else 0, gradients > 0, False))
            if backward:
                rows.append((i, 0.0, 0.0, 0.0, before + count, before + count if shared and count else 0, False, True))
                # Of several ranks the next moment is the first at which all have been reduced.
                gradient_starts += [len(rows) if shared else len(rows) - 1] * (count - done)
        layer, own_bytes, behind, unreduced, has, sums, begun, ends = zip(*rows, strict=True) if rows else ((),) * 8
        return Moments(
            np.array(layer, np.int64),
            np.array(own_bytes, np.float64),
            np.array(behind, np.float64),
            np.array(unreduced, np.float64),
            np.array(has, np.int64),
            np.array(sums, np.int64),
            np.array(begun, np.bool_),
            np.array(ends, np.bool_),
            np.array(gradient_starts if backward else layer_starts, np.int64),
        )


class LayerMemory:
    """Predict what layers hold on the device along a step, apart from gradients and optimizer state.

    Arrays of layers are in the workload's order.

    Args:
        activations: treatments by repeated layer.
        away: names of layers whose weights are offloaded.
    """

    def __init__(self, passes: Passes, activations: Sequence[Keep], away: frozenset[str]) -> None:
        self._passes, self._workload = passes, passes.workload
        workload = self._workload
        layers = workload.layers
        self.count = len(layers)
        self._sizes = passes.sizes
        repeated = self._sizes.repeated
        keeps: list[Keep | None] = [None] * len(layers)
        for i, keep in zip(np.flatnonzero(repeated), activations, strict=True):
            keeps[i] = keep
        ways = tuple([Way.KEEP if keep is None else _WAYS[keep] for keep in keeps])
        self.forward, self.backward = passes.of(ways)
        kept = np.array([passes.kept_bytes(i, way) for i, way in enumerate(ways)])
        leaves = np.array([keep in LEAVES for keep in keeps], np.bool_)
        self._kept = np.where(leaves, 0.0, kept)
        parked = np.where(leaves, kept, 0.0)
        self.parked_bytes = float(parked.cumsum()[-1])
        """Bytes in saved tensors on the host."""
        # After a layer was recomputed, nothing holds its reloaded input, unless the layer has saved it again; the first
        # gradient marks that moment.
        let_go = [k is Keep.RECOMPUTE_OFFLOAD and not layer.saves_input for k, layer in zip(keeps, layers, strict=True)]
        self._let_go = np.where(let_go, parked, 0.0)
        self._parked_before: Floats = np.append(0.0, parked[repeated].cumsum())
        """Host bytes of all layers before a place among the listed layers."""
        last_away = np.flatnonzero(leaves[repeated]).max(initial=-1)
        self._window = max(1, int(repeated.sum()) - 1 - int(last_away))
        self._fetched = bool(away)
        self._ahead = weight_prefetch_depth(gathered=workload.ranks > 1)
        offloaded = np.array([layer.name in away for layer in layers], np.bool_)
        self._offloaded = np.where(offloaded, self._sizes.weights, 0)
        """Bytes of weights by layer, where they are offloaded."""
        self._always = int(self._sizes.weights.sum() - self._offloaded.sum())
        self.resident_weight_bytes = self._always + int(self._offloaded[repeated][: self._ahead].sum())
        """Bytes of weights between steps, when the first offloaded layers are already being prefetched."""
        self.loads = bool(leaves.any()) or self._fetched
        """Whether saved tensors or weights are copied to the device in backward."""

    @cached_property
    def starts(self) -> dict[str, int]:
        """Return the first moment of each layer in forward, by name; of several with one name, that of the first."""
        starts = zip(self._workload.layers, self.forward.starts.tolist(), strict=True)
        return {layer.name: start for layer, start in reversed(list(starts))}

    @cached_property
    def evaluation(self) -> dict[Owner, float]:
        """Return the largest device bytes of a microbatch's forward without backward, once the step is done."""
        # Within a checkpointed layer nothing is saved, as without gradients.
        ways = tuple(Way.RECOMPUTE if layer.repeated else Way.KEEP for layer in self._workload.layers)
        moments = self._passes.of(ways)[0]
        weights, gathered = self._weights_at(1)[moments.layer], self._gathered_at(moments)
        fullest = int((weights + gathered + moments.own + moments.loss).argmax())
        return {
            Owner.WEIGHTS: float(weights[fullest]),
            Owner.GATHERED: float(gathered[fullest]),
            Owner.ACTIVATIONS: float(moments.own[fullest]),
            Owner.LOSS: float(moments.loss[fullest]),
        }

    @cached_property
    def step(self) -> Timeline:
        """Return the last microbatch, forward and backward, without gradients."""
        behind = self._gathered_behind
        backward = self._in_backward(behind, np.maximum(behind, self._reducing))
        nothing = np.zeros(1)
        end = nothing + self.resident_weight_bytes, self._kept[:1], nothing, nothing
        return Timeline.of(self._in_forward(), backward, end)

    @cached_property
    def between(self) -> Timeline | None:
        """Return a backward before the last likewise, in which gathered layers stay so; None where the last is the
        fullest.
        """
        workload = self._workload
        if workload.fetched_anew or workload.microbatches == 1:
            return None
        gathered = self._sizes.whole_before[-1] + self._scattered(again=workload.microbatches > 2)
        reducing = self._sizes.whole_before[-1] + (1 + self._sizes.reduced) * self._sizes.trained
        return Timeline.of(self._in_backward(gathered, reducing, lets_go=False))

    def _in_forward(self) -> Columns:
        """Return the bytes in forward."""
        moments = self.forward
        base = np.append(0.0, self._kept.cumsum()[:-1]) + self._leaving
        return (
            self._weights_at(1)[moments.layer],
            base[moments.layer] + moments.own,
            moments.loss,
            self._gathered_at(moments),
        )

    def _in_backward(self, gathered: Floats, reducing: Floats, *, lets_go: bool = True) -> Columns:
        """Return the bytes in a backward.

        Args:
            gathered: bytes of gathered layers, and of what is being scattered, by layer.
            reducing: of other layers when the layer is done, and of its whole gradients and what they are scattered
                from.
            lets_go: whether reloaded inputs are counted only until the layer has been recomputed.
        """
        moments = self.backward
        total = np.subtract.accumulate(np.append(self._kept.cumsum()[-1], self._kept[::-1]))[:0:-1]
        # Of an output layer that is a group: the one before it is gathered when backward of the loss is over.
        in_loss = (moments.layer == self.count - 1) & ~(moments.begun | moments.ends)
        later = self._sizes.of_group_before[-1] if self._workload.resharded and self._sizes.heads_a_group else 0
        kept = (total + self._back)[moments.layer]
        if lets_go:
            kept = kept - np.where(moments.begun, self._let_go[moments.layer], 0.0)
        return (
            self._weights_at(-1)[moments.layer],
            kept + moments.own,
            moments.loss,
            np.where(moments.ends, reducing[moments.layer], gathered[moments.layer] - later * in_loss) + moments.whole,
        )

    @property
    def _leaving(self) -> Floats:
        """Return the bytes of earlier layers' saved tensors whose D2H copies still hold device memory, in forward of
        each layer.
        """
        at = self._sizes.visits
        return self._parked_before[at] - self._parked_before[np.minimum(at, np.maximum(0, at - self._window + 1))]

    @property
    def _back(self) -> Floats:
        """Return the bytes of earlier layers' saved tensors that are reloaded or being reloaded, in backward of each
        layer.
        """
        at = self._sizes.visits
        back = self._parked_before[at] - self._parked_before[np.maximum(0, at - self._window)]
        return np.where(at == len(self._parked_before) - 1, 0.0, back)

    def _weights_at(self, step: int) -> Floats:
        """Return the bytes of weights while each layer runs and the next ones are prefetched.

        Args:
            step: 1 in forward, -1 in backward.
        """
        found = np.full(len(self._sizes.weights), float(self._always))
        whole = not self._workload.fetched_anew and (step < 0 or self._workload.microbatches > 1)
        if not whole and self._fetched:
            for ahead in range(min(self._ahead, len(found) - 1) + 1):
                to, of = (slice(len(found) - ahead), slice(ahead, None))[::step]
                found[to] += self._offloaded[of]
        return found

    def _gathered_at(self, moments: Moments) -> Floats:
        """Return the gathered bytes at the moments of forward.

        Layers are gathered one by one, and stay until their backward; with several microbatches, until that of the
        last. The memory into which a layer was gathered, and from which it was copied, stays until the next one has
        been copied likewise. The last one's stays until the end of forward.
        """
        whole, left = self._sizes.whole, self._sizes.left if self._workload.microbatches > 1 else 0
        if self._workload.resharded:
            held = self._beyond(0, self._sizes.root) + whole + left
        elif self._workload.microbatches > 1:
            return np.full(len(moments.layer), float(self._sizes.whole_before[-1] + self._sizes.left))
        else:
            held = self._sizes.whole_before[1:-1].astype(np.float64)
        own = moments.own + moments.loss
        copied = held + self._sizes.flat + np.where(whole, self._sizes.of_group_before, 0)  # before the layer runs
        found: Floats = np.maximum((held + self._sizes.flat)[moments.layer] + own, copied[moments.layer]) - own
        return found

    def _beyond(self, layer: int, nbytes: float) -> Floats:
        """Return these bytes for the layers after this one, and none for the others."""
        return np.where(np.arange(len(self._sizes.whole)) > layer, float(nbytes), 0.0)

    @property
    def _gathered_behind(self) -> Floats:
        """Return the gathered bytes in backward of each layer, while the previous one's gradients are scattered.

        A resharded layer is gathered one layer ahead; the root's parameters are unsharded until the end. Gradients of
        the layer itself come one by one. (Where a gradient has two halves, the curves show how long the first waits for
        the other.)
        """
        return self._others + self._sizes.whole + self._scattered(again=self._workload.microbatches > 1)

    @property
    def _others(self) -> Floats:
        """Return the unsharded bytes of other layers in backward of each layer."""
        if not self._workload.resharded:
            return self._sizes.whole_before[:-2].astype(np.float64)
        found: Floats = self._sizes.of_group_before + self._beyond(1, self._sizes.root)
        return found

    @property
    def _reducing(self) -> Floats:
        """Return the gathered bytes when backward of each layer is done.

        The layer is sharded again, and its gradients are copied to where they are scattered from. The memory from which
        the previous layer's were scattered is free by then.
        """
        return self._others + (1 + self._sizes.reduced) * self._sizes.trained

    def _scattered(self, *, again: bool) -> Floats:
        """Return the bytes being scattered in backward of each layer.

        Args:
            again: whether another microbatch's backward ran before.
        """
        found: Floats = (
            self._beyond(self._sizes.left_until - 1, self._sizes.left * again) + self._sizes.scattered_behind
        )
        return found


class StepModel:
    """Simulate the memory of one step in steady state: the last microbatch, and what earlier ones left.

    Arrays of layers are in the workload's order.

    Args:
        layers: of the choice, as `Passes.layers` returns it.
    """

    def __init__(self, facts: Facts, layers: LayerMemory, choice: Choice, gradients: Gradients) -> None:
        self._facts, self.layers = facts, layers
        self._gradients, self._captured, self._serial = gradients, choice.captured, choice.serial
        sizes = facts.slot_bytes[gradients.is_on[Placement.STREAMED]]
        self._slot_bytes = int(sizes.max(initial=0))
        self._most = max_staging_buffers(len(sizes), self._slot_bytes, choice.staging_bytes)

    # ---------------------------------------------------------------- along the step

    @cached_property
    def timeline(self) -> Timeline:
        """Return the last microbatch, forward and backward."""
        layers, gradients = self.layers, self._gradients
        held = np.full(layers.count, float(gradients.before_bytes))
        if not gradients.accumulate:
            waiting = gradients.used_in_forward
            held += waiting.sum() - waiting[:-1].cumsum()
        forward, backward = layers.forward, layers.backward
        return layers.step.holding(
            held[forward.layer] + gradients.temporary[forward.summed],
            gradients.at(backward.made, backward.layer, backward.ends) + gradients.temporary[backward.summed],
            gradients.held[-1:],
        )

    @cached_property
    def _between(self) -> Timeline | None:
        """Return a backward before the last, in which gathered layers stay so and no staging buffer is acquired; None
        where the last is the fullest.
        """
        between, gradients = self.layers.between, self._gradients
        backward = self.layers.backward
        two = self._facts.workload.microbatches == 2
        held = gradients.of_the_first[backward.made] if two else gradients.before_bytes
        return between and between.holding(held + gradients.temporary[backward.summed])

    # ---------------------------------------------------------------- GPU staging buffers

    def slots(self) -> SlotCount:
        """Count the staging buffers that the runtime settles on after its profile of the third step."""
        if not self._most:
            return SlotCount(0, 0, (), ())
        if self._serial:  # acquired when backward is over
            return replace(self.first_slots, stage_at=(-1,) * self.first_slots.count)
        late = self._facts.late
        settled = decide_staging_of(
            *self._facts.triggers,
            self._peaks(),
            slot_size_bytes=self._slot_bytes,
            most=self._most,
            acquire_at=late,
            early=not self.layers.loads,
        ) or StagingDecision(self._most, (late,) * self._most, (None,) * self._most)
        return SlotCount(settled.count, self._most, settled.acquire_at, settled.release_at)

    @property
    def first_slots(self) -> SlotCount:
        """Return the staging buffers before that profile of the third step."""
        count = min(MIN_STAGING_BUFFERS, self._most)
        return SlotCount(count, self._most, (self._facts.late,) * count, (None,) * count)

    @cached_property
    def _ready_at(self) -> Ints:
        """Return the first moment after each trigger of a ready gradient, in the order of `Facts.ready`."""
        return self.layers.backward.starts[self._facts.ready_at] + len(self.layers.forward.layer)

    def _peaks(self) -> Ints:
        """Return the peak from each trigger to the next: those of layers in forward, then those of ready gradients."""
        # Bytes at a trigger count for its interval, even if no moment falls into it.
        at = np.concatenate((self.layers.forward.starts, self._ready_at))
        return np.rint(np.maximum.reduceat(self.timeline.totals, at)).astype(np.int64)

    def peak(self, slots: SlotCount) -> Mapping[Owner, float]:
        """Return the bytes by category at the moment at which the device holds the most."""
        timeline, totals = self.timeline, self.timeline.totals
        # The trigger of a bucket, or of the first one below it.
        lowest = np.minimum.accumulate(self._facts.ready)
        at = np.searchsorted(-lowest, -np.array(slots.stage_at, np.int64))
        staged = np.append(self._ready_at, len(totals) - 1)[at].tolist()
        uses = self.layers.starts if slots.unstage_at else {}
        behind = max(uses.values(), default=0)
        back = [behind if layer is None else uses[layer] for layer in slots.unstage_at]

        def slots_at(t: int) -> int:
            # The graph's memory exists during the step as well.
            kept = slots.count if self._captured else slots.count - bisect_right(back, t)
            return max(kept, bisect_right(staged, t)) * self._slot_bytes

        # Between two changes of the staging buffers, the other memory decides.
        changes = sorted({0, *staged, *back})
        fullest = np.maximum.reduceat(totals, changes).tolist()
        held = [slots_at(start) for start in changes]
        which = max(range(len(changes)), key=lambda change: fullest[change] + held[change])
        stop = [*changes, len(totals)][which + 1]
        found, slots_held = changes[which] + int(totals[changes[which] : stop].argmax()), held[which]
        if self._between is not None and self._between.totals.max() > fullest[which] + slots_held:
            timeline, slots_held = self._between, 0
            found = int(timeline.totals.argmax())
        return {
            Owner.WEIGHTS: float(timeline.weights[found]),
            Owner.GRADIENTS: float(timeline.gradients[found]),
            Owner.SLOTS: slots_held,
            Owner.ACTIVATIONS: float(timeline.activations[found]),
            Owner.LOSS: float(timeline.loss[found]),
            Owner.GATHERED: float(timeline.gathered[found]),
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
