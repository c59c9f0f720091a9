"""Compute how fast a machine does each kind of work of a training step, from its hardware file. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from hostward.core.host_limits import Rates
from hostward.core.inventory import Bucket
from hostward.core.placement import HOST_STEP_BYTES, Placement, last_of, sharing, step_speed, streamed_share_of
from hostward.errors import ConfigError
from hostward.plan.decisions import ELEMENTWISE, LEAVES, RECOMPUTED, Choice, Keep
from hostward.plan.hardware_profile import Hardware, profile_of
from hostward.plan.lane_simulator import Queue, Slowdown
from hostward.plan.workload import Layer, PerToken, Workload
from hostward.schedule.optimizer import LANDING_BUFFERS
from hostward.schedule.staging import MIN_STAGING_BUFFERS

# Measured on forward and backward of decoder models in benchmarks/results (1.7 B at 8 K and 32 K tokens, 8 B at 16 K):
# shares of one large matrix product's rate and of the device memory's peak bandwidth.
MATMUL_SHARE = 0.877
TRAFFIC_SHARE = 0.81
GROUPED_SHARE = 0.36
"""Rate reached by experts' matrix products over that of other ones, including the routing of tokens to the experts and
back.

Derived from how forward and backward grow with the tokens: Qwen3-30B-A3B, 12 layers on two GPUs, 8 K to 32 K
(benchmarks/results, 2026-11-22-scaling-two-8k-fractions.json, 16k and 32k). Rows of one GPU were not used; they are 2 %
below to 12 % below.
"""
EXCHANGE_TRAFFIC = 7.0
"""Device memory traffic that compute loses by one all-gather of a layer or one reduce-scatter of its gradient, over the
layer's bytes.

Writing what is gathered and copying it to its place and back are 3 to 4; the rest are kernels that share the device
with those of the collective. Derived from the steps without offloading of the same runs: the part that does not grow
with the tokens. With layers unsharded one at a time, and on H100s, it predicts the measurements within 6 %. NVLink
between GPUs is assumed, which is fast enough to overlap with a layer.
"""
LAYER_S = 150e-6
"""Seconds that one pass over a layer takes beyond its operations and traffic: kernels that do not fill the device."""
GUESS_SECONDS = 1.25
"""Seconds of a CPU optimizer step during backward (`step_early`) over those of one in place."""
COPY_S = 13e-6
"""Seconds that a copy takes beyond its bytes."""

# Defaults for rates that a hardware file does not have. `Speeds.assumed` lists each use.
_MATMUL_OF_PEAK = 0.7
_LINK_OF_PEAK = 0.85
_DUPLEX_OF_LINK = 1.6
_HOST_PARAMETERS_PER_S = 2.0e9
_BUSY_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Speeds:
    """Hold rates of one GPU and its share of the node, each for work that runs alone.

    `slowdown` gives the speeds of lanes that share bandwidth.
    """

    flops_per_s: float
    """Rate reached by a model's matrix products."""
    traffic_bytes_per_s: float
    """Rate reached by its other operations, in device memory."""
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    host_parameters_per_s: float
    slowdown: Slowdown
    assumed: tuple[tuple[str, float], ...]
    """Rates that the hardware file does not have, by their name in it, and the assumed values."""

    def copy_s(self, size_bytes: float, rate_bytes_per_s: float) -> float:
        """Return the seconds of one copy."""
        return COPY_S + size_bytes / rate_bytes_per_s if size_bytes else 0.0


def balanced_share(speeds: Speeds, workload: Workload, ahead: float | None = None, backward_s: float = 0.0) -> float:
    """Return the share of offloaded state to stream for the shortest step.

    See `hostward.core.placement.streamed_share`.

    Args:
        ahead: share of the offloaded state that can be prefetched during backward.
        backward_s: seconds of backward over the share of the state that is offloaded.
    """
    bucket = workload.inventory.as_asked
    if bucket is None:
        return 0.0

    def duplex(speed: Sequence[float]) -> float:
        return speed[Queue.H2D] * speeds.h2d_bytes_per_s + speed[Queue.D2H] * speeds.d2h_bytes_per_s

    alone, busy = speeds.slowdown[3], speeds.slowdown[7]
    host = speeds.host_parameters_per_s * step_speed(bucket, gradients_in_fp32=workload.gradients_in_fp32)
    rates = Rates(host, duplex(alone), busy[Queue.HOST] * host, duplex(busy), speeds.d2h_bytes_per_s)
    guessed = 0.0
    if backward_s:
        guessed = backward_s * rates.busy_host_parameters_per_s / GUESS_SECONDS / workload.inventory.numel
    return streamed_share_of(bucket, rates, ahead, (workload.step_early, guessed))


def measured(speeds: Speeds, rates: Rates, bucket: Bucket | None) -> Speeds:
    """Replace the CPU and PCIe rates of `speeds` by those measured on the machine, by all of its ranks at once.

    The direction to the device counts as fast as the other. `bucket`: one with the state that was stepped.
    """
    link, host, busy_host = rates.d2h_bytes_per_s, rates.host_parameters_per_s, rates.busy_host_parameters_per_s
    slowdown = _slowdown(link, link, rates.duplex_bytes_per_s, rates.busy_duplex_bytes_per_s, host, busy_host)
    if bucket is not None:
        host /= step_speed(bucket)
    return replace(
        speeds,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_parameters_per_s=host,
        slowdown=slowdown,
        assumed=tuple((name, rate) for name, rate in speeds.assumed if name.startswith("gpu.")),
    )


def speeds_of(hardware: Hardware, gpus: int = 1) -> Speeds:
    """Compute the speeds of one of `gpus` GPUs of a machine that all do the same.

    Raises ConfigError for a machine without a GPU, and where not even the vendor's rates of it are known.
    """
    gpu = hardware.gpu
    if gpu is None:
        raise ConfigError(
            f"the hardware file of {hardware.name!r} has no GPU",
            why="a plan is about the time and the memory of a GPU",
            fix="name a shipped profile or a file that was measured on a GPU machine: --hardware h200",
        )
    assumed: list[tuple[str, float]] = []

    def known(value: float | None, name: str, instead: float | None) -> float:
        if value is not None and value <= 0:
            raise ConfigError(
                f"the hardware file {hardware.name!r} says {name} is {value:g}",
                fix="measure it (hostward bench machine --json FILE), or write null where it is not known",
            )
        if value is not None:
            return value
        if instead is None:
            raise ConfigError(
                f"the hardware file {hardware.name!r} does not say {name}",
                fix="measure it (hostward bench machine --json FILE) or write it into the file, if it is the vendor's",
            )
        assumed.append((name, instead))
        return instead

    peak, link_peak = gpu.bf16_peak_flops_per_s, gpu.link_peak_bytes_per_s
    matmul = known(gpu.bf16_matmul_flops_per_s, "gpu.bf16_matmul_flops_per_s", peak and peak * _MATMUL_OF_PEAK)
    shipped = profile_of(gpu.name)  # a measured file has no figures of the vendor
    vendors = shipped.gpu.memory_peak_bytes_per_s if shipped is not None and shipped.gpu is not None else None
    memory = known(gpu.memory_peak_bytes_per_s, "gpu.memory_peak_bytes_per_s", vendors)
    largest = hardware.links[-1] if hardware.links else None
    link = link_peak and link_peak * _LINK_OF_PEAK
    h2d = largest.h2d_bytes_per_s if largest else known(None, "links", link)
    d2h = largest.d2h_bytes_per_s if largest else h2d
    duplex = known(hardware.duplex_bytes_per_s, "duplex_bytes_per_s", _DUPLEX_OF_LINK * min(h2d, d2h))
    busy_duplex = known(hardware.busy_duplex_bytes_per_s, "busy_duplex_bytes_per_s", duplex)
    host = known(hardware.host_parameters_per_s, "host_parameters_per_s", _HOST_PARAMETERS_PER_S)
    busy_host = known(hardware.busy_host_parameters_per_s, "busy_host_parameters_per_s", host * _BUSY_SHARE)
    if gpus > 1:
        # All GPUs of a node share its memory bandwidth: a rank gets its part where that is less than its rate alone.
        node_host = known(hardware.node_host_parameters_per_s, "node_host_parameters_per_s", host * 1.6)
        node_duplex = known(hardware.node_duplex_bytes_per_s, "node_duplex_bytes_per_s", duplex * 2)
        alone_bytes_per_s = busy_host * HOST_STEP_BYTES + busy_duplex
        shared_host, shared_duplex = min(host, node_host / gpus), min(duplex, node_duplex / gpus)
        busy_host *= shared_host / host
        busy_duplex *= shared_duplex / duplex
        # Memory bandwidth limits one direction alone as well, at the node's rate for both.
        h2d, d2h = min(h2d, shared_duplex), min(d2h, shared_duplex)
        # If it is not known, the largest known use is assumed: of one rank alone, or of one kind of work on all ranks.
        largest_use = max(node_host * HOST_STEP_BYTES, node_duplex, alone_bytes_per_s)
        given = known(hardware.node_memory_bytes_per_s, "node_memory_bytes_per_s", largest_use) / gpus
        part = min(1.0, given / (busy_host * HOST_STEP_BYTES + busy_duplex))
        busy_host, busy_duplex = busy_host * part, busy_duplex * part
        host, duplex = shared_host, shared_duplex
    return Speeds(
        matmul * (hardware.matmul_share or MATMUL_SHARE),
        memory * (hardware.traffic_share or TRAFFIC_SHARE),
        h2d,
        d2h,
        host,
        _slowdown(h2d, d2h, duplex, busy_duplex, host, busy_host),
        tuple(assumed),
    )


def _slowdown(h2d: float, d2h: float, duplex: float, busy_duplex: float, host: float, busy_host: float) -> Slowdown:
    """Compute the speeds of lanes that run concurrently.

    With copies in both directions the CPU runs at its busy rate; with one copy it loses a part of that slowdown, in
    proportion to the copy's part of the bytes.
    """
    both = min(1.0, duplex / (h2d + d2h))
    busy_both = min(both, busy_duplex / (h2d + d2h))
    lost = max(0.0, 1.0 - busy_host / host)
    table = []
    for bits in range(8):
        copies, steps = bits & 3, bits & 4
        moved = {0: 0.0, 1: d2h, 2: h2d, 3: busy_duplex if steps else duplex}[copies]
        link = both if copies == 3 else 1.0
        if steps and copies:  # one direction gets at most the rate of both
            link = busy_both if copies == 3 else min(1.0, busy_duplex / moved)
        table.append((1.0, link, link, 1.0 - lost * min(1.0, moved / busy_duplex)))
    return tuple(table)


def _busy(slowdown: Slowdown) -> list[tuple[float, float, float]]:
    """Return the speeds of D2H, H2D and HOST for each set of busy lanes, 0 where a lane is idle."""
    found = []
    for bits, (_, d2h, h2d, host) in enumerate(slowdown):
        found.append((d2h * (bits & 1), h2d * (bits >> 1 & 1), host * (bits >> 2)))
    return found


# Costs of each layer and bucket of a workload on a machine, before anything is decided.


_ATTENTION_BACKWARD = 2.5
"""Operations in attention's backward over those of its forward: it recomputes the scores."""
_TRAFFIC_BACKWARD = 2.0
EXPERTS = "expert_fc1"
"""Name for the part of a layer whose matrix products are in groups, one for each expert."""
SUM_BYTES = 4
"""Bytes per element in a gradient that waits for the step in fp32, wherever it is stored."""
LAYERS_IN_FLIGHT = 2
"""Layers after which the memory of gradients that are being offloaded is needed again."""
_LANE_WEIGHTS = (
    *((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (0.0, 1.0, 1.0), (0.0, 1.0, 3.0)),
    *((1.0, 0.0, 1.0), (1.0, 0.0, 3.0), (1.0, 1.0, 0.5), (1.0, 1.0, 1.0), (1.0, 1.0, 2.0), (1.0, 1.0, 4.0)),
)
"""Weights of work on D2H, H2D and HOST. So weighed, work is done no faster than by the best set of lanes."""
LARGEST_UNIT = 160
"""Neighbouring buckets are timed as one where they are less than one part in so many of the model."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Hold seconds and bytes of one layer and one microbatch.

    Args:
        computed_s: seconds of forward.
        forward_s, backward_s: seconds including the collectives of several GPUs.
    """

    layer: Layer
    computed_s: float
    forward_s: float
    backward_s: float
    elementwise_s: float
    """Seconds to recompute layer norms and activations."""
    saved_bytes: float
    elementwise_bytes: float
    """Bytes that layer norms and activations save, part of `saved_bytes`."""
    input_bytes: float
    fetch_s: float
    """Seconds to copy its weights to the device, where they are offloaded."""

    def held_bytes(self, keep: Keep) -> float:
        """Return the bytes that the layer keeps for backward, wherever they are stored."""
        if keep in RECOMPUTED:
            return self.input_bytes
        return self.saved_bytes - (self.elementwise_bytes if keep in ELEMENTWISE else 0.0)

    def again_s(self, keep: Keep) -> float:
        """Return the seconds of recomputation in backward."""
        if keep in RECOMPUTED:
            return self.computed_s
        return self.elementwise_s if keep in ELEMENTWISE else 0.0


@dataclass(frozen=True, slots=True)
class Unit:
    """Describe neighbouring buckets of one layer with one placement, timed as one."""

    layer: str
    placement: Placement
    numel: int
    weight_bytes: int
    state_bytes: int
    largest_bytes: int
    """State bytes of the largest of the buckets."""
    gradient_bytes: int
    host_s: float
    device_s: float
    upload_s: float
    """Seconds to copy its weights to the device; those of its state to the device and back are `read_s`, `write_s`."""
    read_s: float
    write_s: float
    gradient_s: float
    """Seconds to offload its gradient."""
    summed_gradient_s: tuple[float, float]
    """The same where the host accumulates gradients, and the seconds in which it adds it to its sum."""

    def offloaded_gradient_s(self, *, summed: bool) -> tuple[float, float]:
        """Return the seconds to offload its gradient and to add it to the sum where the host accumulates gradients."""
        return self.summed_gradient_s if summed else (self.gradient_s, 0.0)


@dataclass(frozen=True, slots=True)
class KeepCost:
    """Hold the seconds of one layer's treatment in one microbatch."""

    again_s: float
    offload_s: float
    reload_s: float


@dataclass(frozen=True, slots=True)
class Moved:
    """Sum up what one step does on each lane for the state of all units, in seconds of work that runs alone."""

    device_s: float
    """These are seconds of the norm and of steps on the device."""
    host_s: float
    """These are seconds of CPU optimizer steps after the norm."""
    guessed_s: float
    """These are seconds of CPU optimizer steps during backward."""
    offloaded: Sequence[Unit]
    """Units that are stepped on the CPU or streamed, in order of use in forward."""
    guessed: Sequence[bool]
    """Whether each of them is stepped during backward."""
    streamed: Sequence[Unit]
    gradients_s: float
    """These are seconds of gradients that are offloaded in one backward."""
    added_s: float
    """These are seconds of their accumulation on the host."""
    gradients_between_s: float
    """The part of `gradients_s` that is over when compute of that backward is, and of `added_s` likewise."""
    added_between_s: float
    uploads_s: float
    uploads_by_layer: Mapping[str, float]
    reads_s: float
    writes_s: float
    slot_bytes: int
    """Bytes of the largest streamed bucket, and of the largest streamed unit."""
    largest_bytes: int

    def staged(self, slots: int) -> int:
        """Return the number of streamed units that are in staging buffers at a time.

        A unit is of several buckets. Where not two of them fit, one bucket is still read while another is written.
        """
        fitting = slots * self.slot_bytes // self.largest_bytes if self.streamed else 0
        return min(len(self.streamed), max(MIN_STAGING_BUFFERS, fitting))


_Key = tuple[tuple[Placement, ...], bool, frozenset[str]]


class Costs:
    """Compute the costs of one workload on one machine; what depends on no choice is computed once."""

    def __init__(self, workload: Workload, speeds: Speeds) -> None:
        self.workload, self.speeds = workload, speeds
        self.layers = tuple(self._layer(layer) for layer in workload.layers)
        self.repeated = [i for i, cost in enumerate(self.layers) if cost.layer.repeated]
        self.place_of = {i: place for place, i in enumerate(self.repeated)}
        """Place of each repeated layer among these, by position in `layers`."""
        names = [cost.layer.name for cost in self.layers]
        self._places = {name: i for i, name in reversed(list(enumerate(names)))}
        self.numels = [bucket.numel for bucket in workload.inventory.buckets]
        self._buckets = _bucket_costs(workload, speeds)
        self.weight_bytes = [bucket.weight_bytes for bucket in self._buckets]
        self.state_bytes = [bucket.state_bytes for bucket in self._buckets]
        self.host_s = [bucket.host_s for bucket in self._buckets]
        """Seconds of each bucket's CPU optimizer step."""
        self.host_bytes = [bucket.host_bytes for bucket in workload.inventory.buckets]
        self._stretches = _stretches(self._buckets)
        self._merge_below = sum(self.numels) / LARGEST_UNIT
        self._units: dict[tuple[Placement, ...], list[Unit]] = {}
        self._gradient_copies: dict[_Key, dict[str, list[tuple[float, float]]]] = {}
        self._units_of: dict[tuple[int, tuple[Placement, ...]], list[Unit]] = {}
        """Of each stretch, by the placements of its buckets: those of one layer are few."""
        self._moved: dict[_Key, Moved] = {}
        self._activations_s: dict[tuple[Keep, ...], tuple[float, float, float]] = {}
        self._kept: dict[tuple[int, Keep], KeepCost] = {}
        self.between_s: dict[tuple[object, ...], tuple[float, Mapping[Queue, float]]] = {}
        """Known seconds of a microbatch that is not next to a step, which `hostward.plan.step_time` predicts."""
        self._weighed = [
            (weights, max(sum(w * s for w, s in zip(weights, speed, strict=True)) for speed in _busy(speeds.slowdown)))
            for weights in _LANE_WEIGHTS
        ]

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
            speeds.copy_s(layer.weight_bytes, speeds.h2d_bytes_per_s),
        )

    def _exchange_s(self, layer: Layer) -> tuple[float, float]:
        """Return the compute seconds lost to gathering a layer and reducing its gradient: forward, backward."""
        workload = self.workload
        if workload.ranks == 1:
            return 0.0, 0.0
        traffic_bytes_per_s = self.speeds.traffic_bytes_per_s / EXCHANGE_TRAFFIC
        gather_s = workload.ranks * layer.weight_bytes / traffic_bytes_per_s
        wider = SUM_BYTES / workload.weight_dtype.itemsize_bytes if workload.reduced_in_fp32 else 1.0
        reduce_s = wider * workload.ranks * layer.trained_weight_bytes / traffic_bytes_per_s
        if workload.resharded:
            return gather_s, reduce_s + (gather_s if layer.repeated else 0.0)
        return gather_s / workload.microbatches, reduce_s  # gathered once for all microbatches

    @cached_property
    def accumulation_s(self) -> float:
        """Return the seconds per parameter to accumulate one microbatch's gradients: read, then read and write the fp32
        sum.
        """
        made_bytes = SUM_BYTES if self.workload.reduced_in_fp32 else self.workload.weight_dtype.itemsize_bytes
        several = self.workload.microbatches > 1
        return (made_bytes + 2 * SUM_BYTES) / self.speeds.traffic_bytes_per_s if several else 0.0

    @cached_property
    def forward_s(self) -> float:
        """Return the compute seconds of one microbatch's forward."""
        return sum(cost.forward_s for cost in self.layers)

    @cached_property
    def forward_from_s(self) -> Sequence[float]:
        """Return the compute seconds of forward from each layer on."""
        return list(accumulate(cost.forward_s for cost in reversed(self.layers)))[::-1]

    @cached_property
    def backward_s(self) -> float:
        """Return the compute seconds of one microbatch's backward without recomputation."""
        return sum(cost.backward_s for cost in self.layers) + sum(self.numels) * self.accumulation_s

    def activations_s(self, activations: tuple[Keep, ...]) -> tuple[float, float, float]:
        """Return the seconds in one microbatch of recomputation, of D2H copies that forward waits for, and of reloads,
        cached.

        Forward waits for the copies of as many first layers as offload anything.
        """
        if activations not in self._activations_s:
            kept = [self.kept(i, keep) for i, keep in zip(self.repeated, activations, strict=True)]
            leaving = sum([cost.offload_s > 0 for cost in kept])
            self._activations_s[activations] = (
                sum([cost.again_s for cost in kept]),
                sum([cost.offload_s for cost in kept[:leaving]]),
                sum([cost.reload_s for cost in kept]),
            )
        return self._activations_s[activations]

    @cached_property
    def accumulated_s(self) -> Sequence[float]:
        """Return the seconds of each layer to accumulate one microbatch's gradients."""
        numels = dict.fromkeys(self._places, 0)
        for bucket in self._buckets:
            numels[bucket.layer] = numels.get(bucket.layer, 0) + bucket.numel
        return [numels[cost.layer.name] * self.accumulation_s for cost in self.layers]

    @cached_property
    def sharing(self) -> Sequence[Sequence[int]]:
        """Return the buckets of each parameter that several of them share."""
        return sharing(self.workload.inventory.buckets)

    def keep_of(self, choice: Choice) -> dict[int, Keep]:
        """Return the treatment of repeated layers, by position in `layers`."""
        return dict(zip(self.repeated, choice.activations, strict=True))

    def units(self, choice: Choice) -> Sequence[Unit]:
        """Return the units in order of use in forward, cached by placements."""
        if choice.placements not in self._units:
            found = self._units[choice.placements] = []
            for start, stop in self._stretches:
                key = start, choice.placements[start:stop]
                if key not in self._units_of:
                    self._units_of[key] = self._made(self._buckets[start:stop], key[1])
                found += self._units_of[key]
        return self._units[choice.placements]

    def _made(self, buckets: Sequence[_BucketCost], placements: Sequence[Placement]) -> list[Unit]:
        """Return the units of neighbouring buckets of one layer: those of a placement while they are few parameters."""
        found, runs = list[Unit](), dict[Placement, list[_BucketCost]]()
        numels, on_device = dict.fromkeys(Placement, 0), Placement.DEVICE
        for bucket, placement in zip(buckets, placements, strict=True):
            run = runs.setdefault(placement, [])
            if run and placement is not on_device and numels[placement] + bucket.numel > self._merge_below:
                found.append(self._unit(placement, run))
                runs[placement] = run = []
                numels[placement] = 0
            run.append(bucket)
            numels[placement] += bucket.numel
        return found + [self._unit(placement, run) for placement, run in runs.items()]

    def gradient_copies(self, choice: Choice) -> Mapping[str, Sequence[tuple[float, float]]]:
        """Return the seconds of each layer's copies of gradients to the host and of what the CPU does with each in
        backward, in order of backward, cached by placements: accumulate it, or step what it is of.
        """
        key = self._key(choice)
        if key not in self._gradient_copies:
            found = self._gradient_copies[key] = dict[str, list[tuple[float, float]]]()
            guessed = self._guessed(choice)
            for at, unit in reversed(list(enumerate(self.units(choice)))):
                if unit.placement is Placement.HOST:
                    copy_s, then_s = unit.offloaded_gradient_s(summed=choice.gradients_on_host)
                    then_s += GUESS_SECONDS * unit.host_s if at in guessed else 0.0
                    found.setdefault(unit.layer, []).append((copy_s, then_s))
        return self._gradient_copies[key]

    def _key(self, choice: Choice) -> _Key:
        """Return what the work on state depends on."""
        kept = choice.offloaded_weights if self.workload.step_early else frozenset()
        return choice.placements, choice.gradients_on_host, kept

    def _guessed(self, choice: Choice) -> frozenset[int]:
        """Return the positions of the units that the CPU steps during backward: `stepped_early`, to within a unit.

        Layers whose weights are offloaded are stepped after the norm.
        """
        if not self.workload.step_early or choice.gradients_on_host or not choice.overlapped:
            return frozenset()
        units = self.units(choice)
        on_host = [at for at, unit in enumerate(units) if unit.placement is Placement.HOST]
        early = last_of(on_host, [units[at].state_bytes for at in on_host], self.workload.step_early)
        return frozenset(at for at in early if units[at].layer not in choice.offloaded_weights)

    def layer_of_bucket(self, bucket: int) -> int:
        """Return the layer of a bucket; the first layer where none has that name, as a caller may name layers
        otherwise.
        """
        layers = [b.layer for b in self._buckets[bucket : bucket + 1]]
        return self._places.get(layers[0], 0) if layers else 0

    def kept(self, i: int, keep: Keep) -> KeepCost:
        """Return the seconds that a treatment of layer `i` takes."""
        if (i, keep) not in self._kept:
            cost, speeds = self.layers[i], self.speeds
            size = cost.held_bytes(keep) if keep in LEAVES else 0.0
            copies = (speeds.copy_s(size, rate) for rate in (speeds.d2h_bytes_per_s, speeds.h2d_bytes_per_s))
            self._kept[i, keep] = KeepCost(cost.again_s(keep), *copies)
        return self._kept[i, keep]

    def moved(self, choice: Choice) -> Moved:
        """Return what the step moves on each lane for the state, cached by placements."""
        key = self._key(choice)
        if key not in self._moved:
            self._moved[key] = self._move(choice)
        return self._moved[key]

    def _move(self, choice: Choice) -> Moved:
        units, summed = self.units(choice), choice.gradients_on_host
        of = {placement: [u for u in units if u.placement is placement] for placement in Placement}
        host, streamed = of[Placement.HOST], of[Placement.STREAMED]
        on_device = Placement.DEVICE
        copies = [u.offloaded_gradient_s(summed=summed) for u in host]
        # Compute waits for gradients with a delay of some layers, and their copies for landing buffers.
        late = {cost.layer.name for cost in self.layers[:LAYERS_IN_FLIGHT]}
        over = [copy for unit, copy in zip(host, copies, strict=True) if unit.layer not in late]
        largest_add_s = max((added_s for _, added_s in copies), default=0.0)
        uploads = dict.fromkeys((u.layer for u in host), 0.0)
        for u in host:
            uploads[u.layer] += u.upload_s
        guessed = self._guessed(choice)
        guessed_s = sum([units[at].host_s for at in guessed])
        return Moved(
            sum([u.device_s for u in of[on_device]])
            + sum([u.gradient_bytes for u in units]) / self.speeds.traffic_bytes_per_s,
            sum([u.host_s for u in host]) - guessed_s,
            GUESS_SECONDS * guessed_s,
            [u for u in units if u.placement is not on_device],
            [at in guessed for at, u in enumerate(units) if u.placement is not on_device],
            streamed,
            sum([copy_s for copy_s, _ in copies]),
            sum([added_s for _, added_s in copies]),
            sum([copy_s for copy_s, _ in over]),
            max(0.0, sum([added_s for _, added_s in over]) - LANDING_BUFFERS * largest_add_s),
            sum(uploads.values()),
            uploads,
            sum([u.read_s for u in streamed]),
            sum([u.write_s for u in streamed]),
            max((u.largest_bytes for u in streamed), default=0),
            max((u.state_bytes for u in streamed), default=0),
        )

    def lanes_s(self, d2h_s: float, h2d_s: float, host_s: float) -> float:
        """Return a lower bound on the seconds in which three lanes that share bandwidth do this work."""
        return max([(d * d2h_s + h * h2d_s + c * host_s) / most for (d, h, c), most in self._weighed])

    def _unit(self, placement: Placement, run: Sequence[_BucketCost]) -> Unit:
        speeds = self.speeds
        numel = sum([b.numel for b in run])
        weights = sum([b.weight_bytes for b in run])
        state = sum([b.state_bytes for b in run])
        gradients = SUM_BYTES * numel if self.workload.gradients_in_fp32 else weights
        # Where the host accumulates gradients they are offloaded as they are made, else as they are kept.
        summed = gradients if self.workload.reduced_in_fp32 else weights
        added_s = (summed + 2 * SUM_BYTES * numel) / HOST_STEP_BYTES / speeds.host_parameters_per_s
        return Unit(
            run[0].layer,
            placement,
            numel,
            weights,
            state,
            max([b.state_bytes for b in run]),
            gradients,
            sum([b.host_s for b in run]),
            (gradients + 2 * state + 2 * weights) / speeds.traffic_bytes_per_s,
            speeds.copy_s(weights, speeds.h2d_bytes_per_s),
            speeds.copy_s(state, speeds.h2d_bytes_per_s),
            speeds.copy_s(state, speeds.d2h_bytes_per_s),
            speeds.copy_s(gradients, speeds.d2h_bytes_per_s),
            (speeds.copy_s(summed, speeds.d2h_bytes_per_s), added_s),
        )


@dataclass(frozen=True, slots=True)
class _BucketCost:
    layer: str
    numel: int
    weight_bytes: int
    state_bytes: int
    host_s: float
    """Seconds of its CPU optimizer step."""


def _bucket_costs(workload: Workload, speeds: Speeds) -> list[_BucketCost]:
    buckets, in_fp32 = workload.inventory.buckets, workload.gradients_in_fp32
    kinds = {(b.dtype, b.form): b for b in buckets}
    rates = {
        kind: speeds.host_parameters_per_s * step_speed(bucket, gradients_in_fp32=in_fp32)
        for kind, bucket in kinds.items()
    }
    return [
        _BucketCost(b.layer, b.numel, b.numel * b.dtype.itemsize_bytes, b.state_bytes, b.numel / rates[b.dtype, b.form])
        for b in buckets
    ]


def _stretches(buckets: Sequence[_BucketCost]) -> list[tuple[int, int]]:
    """Return where neighbouring buckets of one layer begin and end."""
    starts = [i for i, bucket in enumerate(buckets) if not i or bucket.layer != buckets[i - 1].layer]
    return list(pairwise([*starts, len(buckets)]))
