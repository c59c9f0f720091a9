"""What each layer and bucket of a workload costs on a machine, before anything is decided. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hostward.choice import ELEMENTWISE, RECOMPUTED, Choice, Keep
from hostward.inventory import Bucket, MasterKind
from hostward.plan import Placement
from hostward.workload import Layer, PerToken, Workload

from .speeds import EXCHANGE_TRAFFIC, GROUPED_SHARE, HOST_STEP_BYTES, LAYER_S, Speeds

_ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward over those of its forward: it makes the scores again."""
_TRAFFIC_BACKWARD = 2.0
EXPERTS = "expert_fc1"
"""The part of a layer whose matrix products are in groups, one for each expert."""
SUM_BYTES = 4
"""Of an element of a gradient that waits for the step in float32, wherever it lies."""
LARGEST_UNIT = 160
"""Neighbouring buckets are timed as one where they are less than one part in so many of the model."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds and bytes of one layer and one microbatch.

    Args:
        computed_s: of forward.
        forward_s, backward_s: with what several GPUs exchange.
    """

    layer: Layer
    computed_s: float
    forward_s: float
    backward_s: float
    elementwise_s: float
    """To make norms and activations again."""
    saved_bytes: float
    elementwise_bytes: float
    """Of `saved_bytes`, what norms and activations save."""
    input_bytes: float

    def held_bytes(self, keep: Keep) -> float:
        """What the layer keeps for backward, wherever it lies."""
        if keep in RECOMPUTED:
            return self.input_bytes
        return self.saved_bytes - (self.elementwise_bytes if keep in ELEMENTWISE else 0.0)

    def again_s(self, keep: Keep) -> float:
        """What backward computes again."""
        if keep in RECOMPUTED:
            return self.computed_s
        return self.elementwise_s if keep in ELEMENTWISE else 0.0


@dataclass(frozen=True, slots=True)
class Unit:
    """Neighbouring buckets of one layer with one placement, timed as one."""

    layer: str
    placement: Placement
    numel: int
    weight_bytes: int
    state_bytes: int
    gradient_bytes: int
    host_s: float
    device_s: float


class Costs:
    """Of one workload on one machine; what depends on no choice is computed once."""

    def __init__(self, workload: Workload, speeds: Speeds) -> None:
        self.workload, self.speeds = workload, speeds
        self.layers = tuple(self._layer(layer) for layer in workload.layers)
        self.repeated = [i for i, cost in enumerate(self.layers) if cost.layer.repeated]
        self.numels = [bucket.numel for bucket in workload.inventory.buckets]
        self._units: dict[tuple[Placement, ...], list[Unit]] = {}

    def _layer(self, layer: Layer) -> LayerCost:
        workload, speeds = self.workload, self.speeds
        tokens, sequence = workload.microbatch_tokens, workload.sequence_tokens

        grouped = sum(part.recompute_flops.of(tokens, sequence) for part in layer.saved if part.name == EXPERTS)

        def seconds(flops: float, grouped_flops: float, traffic_bytes: float, passes: float) -> float:
            as_flops = flops + grouped_flops * (1 / GROUPED_SHARE - 1)
            return as_flops / speeds.flops_per_s + traffic_bytes / speeds.traffic_bytes_per_s + passes * LAYER_S

        flops, traffic = layer.forward_flops, layer.forward_traffic_bytes.of(tokens, sequence)
        trained = layer.trained_weight_bytes / layer.weight_bytes if layer.weight_bytes else 1.0
        back = PerToken(flops.linear * (1 + trained), flops.square * _ATTENTION_BACKWARD)
        passes = 1.0 if layer.repeated else 0.0
        again = [part for part in layer.saved if part.elementwise]
        again_flops = sum(part.recompute_flops.of(tokens, sequence) for part in again)
        again_traffic = sum(part.recompute_traffic_bytes.of(tokens, sequence) for part in again)
        computed_s = seconds(flops.of(tokens, sequence), grouped, traffic, passes)
        back_s = seconds(back.of(tokens, sequence), (1 + trained) * grouped, _TRAFFIC_BACKWARD * traffic, 2 * passes)
        there_s, back_there_s = self._exchange_s(layer)
        return LayerCost(
            layer,
            computed_s,
            computed_s + there_s,
            back_s + back_there_s,
            seconds(again_flops, 0.0, again_traffic, 0.0),
            layer.saved_bytes.of(tokens, sequence),
            sum(part.bytes.of(tokens, sequence) for part in again),
            layer.input_bytes.of(tokens, sequence),
        )

    def _exchange_s(self, layer: Layer) -> tuple[float, float]:
        """What gathering a layer and reducing its gradient take from compute, in forward and in backward."""
        workload = self.workload
        if workload.ranks == 1:
            return 0.0, 0.0
        traffic_bytes_per_s = self.speeds.traffic_bytes_per_s / EXCHANGE_TRAFFIC
        gather_s = workload.ranks * layer.weight_bytes / traffic_bytes_per_s
        wider = SUM_BYTES / workload.weight_dtype.itemsize_bytes if workload.reduced_in_fp32 else 1.0
        reduce_s = wider * workload.ranks * layer.trained_weight_bytes / traffic_bytes_per_s
        if workload.resharded:
            return gather_s, reduce_s + (gather_s if layer.repeated else 0.0)
        return gather_s / workload.microbatches, reduce_s  # gathered once for all of them

    @cached_property
    def accumulation_s(self) -> float:
        """Adding one microbatch's gradients, per parameter: read it, read and write the fp32 total."""
        made_bytes = SUM_BYTES if self.workload.reduced_in_fp32 else self.workload.weight_dtype.itemsize_bytes
        several = self.workload.microbatches > 1
        return (made_bytes + 2 * SUM_BYTES) / self.speeds.traffic_bytes_per_s if several else 0.0

    def keep_of(self, choice: Choice) -> dict[int, Keep]:
        """By position in `layers`, for repeated layers."""
        return dict(zip(self.repeated, choice.activations, strict=True))

    @cached_property
    def _buckets(self) -> list[_BucketBytes]:
        return [_bucket_bytes(bucket) for bucket in self.workload.inventory.buckets]

    def units(self, choice: Choice) -> Sequence[Unit]:
        """In order of use in forward; for all choices with the same placements the same."""
        placements, merge_below = choice.placements, sum(self.numels) / LARGEST_UNIT
        if placements not in self._units:
            self._units[placements] = [self._unit(*run) for run in _runs(self._buckets, placements, merge_below)]
        return self._units[placements]

    def _unit(self, layer: str, placement: Placement, run: Sequence[_BucketBytes]) -> Unit:
        numel = sum(b.numel for b in run)
        weights = sum(b.weight_bytes for b in run)
        state = sum(b.state_bytes for b in run)
        gradients = SUM_BYTES * numel if self.workload.gradients_in_fp32 else weights
        host_bytes = gradients + 2 * state + sum(b.source_bytes for b in run)
        return Unit(
            layer,
            placement,
            numel,
            weights,
            state,
            gradients,
            host_bytes / HOST_STEP_BYTES / self.speeds.host_parameters_per_s,
            (gradients + 2 * state + 2 * weights) / self.speeds.traffic_bytes_per_s,
        )


@dataclass(frozen=True, slots=True)
class _BucketBytes:
    layer: str
    numel: int
    weight_bytes: int
    state_bytes: int
    source_bytes: int
    """What the host's step reads and writes of the weight."""


def _bucket_bytes(bucket: Bucket) -> _BucketBytes:
    weight_bytes = bucket.numel * bucket.dtype.itemsize_bytes
    source_bytes = weight_bytes * (2 if bucket.kind is MasterKind.WEIGHT else 1)
    return _BucketBytes(bucket.layer, bucket.numel, weight_bytes, bucket.state_bytes, source_bytes)


def _runs(
    buckets: Sequence[_BucketBytes], placements: Sequence[Placement], merge_below: float
) -> Iterator[tuple[str, Placement, list[_BucketBytes]]]:
    """Buckets of one layer and placement together while they are few parameters; those of a layer interleave."""
    open_runs: dict[Placement, list[_BucketBytes]] = {}
    layer = None
    for bucket, placement in zip(buckets, placements, strict=True):
        if bucket.layer != layer:
            yield from ((layer or "", p, run) for p, run in open_runs.items())
            open_runs, layer = {}, bucket.layer
        run = open_runs.setdefault(placement, [])
        if run and placement is not Placement.DEVICE and sum(b.numel for b in run) + bucket.numel > merge_below:
            yield layer, placement, run
            open_runs[placement] = run = []
        run.append(bucket)
    yield from ((layer or "", p, run) for p, run in open_runs.items())
