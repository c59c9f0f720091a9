"""Predict the bytes that a run needs, by phase and category, from a workload and a choice. No torch.

The device's peak is the largest sum at any moment of a step. Moments are those of the workload's curves; the memory
around them (weights, tensors that earlier layers keep, gradients that are not offloaded yet, GPU staging buffers)
follows the schedules that the runtime carries out: `hostward.schedule.optimizer` for gradients,
`hostward.schedule.activations` for saved tensors, `hostward.schedule.weights` for weights. Staging buffers are counted
by `hostward.schedule.staging` from the same spans that the runtime measures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hostward.core.inventory import SPLIT_ELEMENTS
from hostward.core.placement import Placement, stepped_early
from hostward.core.units import MIB
from hostward.errors import ConfigError
from hostward.plan.decisions import Choice
from hostward.plan.gradient_memory import Facts, Gradients
from hostward.plan.step_memory import Owner, Passes, StepModel
from hostward.plan.workload import Workload

CUBLAS_WORKSPACES = 2
"""Workspaces for the thread that runs forward and for autograd's; as many more on the stream of a capture."""
CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""Workspace size on a GPU of compute capability 9.0 and later; earlier ones use less."""
KERNEL_TABLES_BYTES = 2 * MIB
"""Pinned memory for addresses and constants on their way to kernels: one table for each stream that launches them."""
_PARTIAL_BYTES = 12
"""Gradient norm's bytes for each chunk of a gradient."""
_SCALARS_BYTES = 12
_GUESS_BYTES = 56
"""Record of the guess of a bucket that is stepped during backward."""
_NAMES = {owner: owner.value for owner in Owner}


@dataclass(frozen=True, slots=True)
class PhaseNeeds:
    """Hold bytes by category: on the device at its peak, on the host, and the pinned part of the host bytes."""

    name: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    pinned: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(self.pinned.values())


LOAD, FIRST_STEP, STEADY_STEP, SAVE, RESUME = "load", "first step", "steady step", "save", "resume"
EVALUATION, SLEEP = "evaluation", "sleep"
TRAINING = (LOAD, FIRST_STEP, STEADY_STEP)
"""Phases that every run has."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Hold bytes by phase, in the order of `LOAD` to `SLEEP`.

    Totals are the largest of the phases that every run has (`TRAINING`).
    """

    phases: tuple[PhaseNeeds, ...]
    slots: int = 0
    """GPU staging buffers from the fourth step on."""
    stage_at: tuple[int, ...] = ()
    """Buckets whose ready gradients trigger the acquisition of a staging buffer, one by one."""

    @property
    def device_peak_bytes(self) -> int:
        return max(phase.device_bytes for phase in self.phases if phase.name in TRAINING)

    @property
    def host_bytes(self) -> int:
        return max(phase.host_bytes for phase in self.phases if phase.name in TRAINING)

    @property
    def pinned_bytes(self) -> int:
        return max(phase.pinned_bytes for phase in self.phases if phase.name in TRAINING)

    def phase(self, name: str) -> PhaseNeeds:
        """Return the phase with that name. Raises KeyError."""
        return {phase.name: phase for phase in self.phases}[name]


def required(workload: Workload, choice: Choice) -> Needs:
    """Predict the needs of a run in each of its phases.

    The context of the CUDA driver and its modules (about 0.5 GiB on either side) are not counted, nor the memory that
    the caching allocator reserves and does not allocate.

    Raises:
        ConfigError: the choice is not of this workload.
    """
    return MemoryModel(workload).required(choice)


class MemoryModel:
    """Compute `required` for many choices of one workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._facts = Facts(workload)
        self._passes = Passes(self._facts)
        sizes = workload.inventory.saved_bytes
        self._loaded_bytes = min(sum(sizes), LOADED_AT_ONCE_BYTES)
        """Host bytes of what is read of a state at a time, besides the state that is being filled."""
        chunks = (-(-r.numel // SPLIT_ELEMENTS) for bucket in workload.inventory.buckets for r in bucket.ranges)
        self._partial_bytes = _PARTIAL_BYTES * sum(chunks)
        self._save_bytes = save_bytes(workload)
        self._weight_bytes = workload.weight_bytes
        self._repeated = workload.repeated
        self._frozen = [layer for layer in self._repeated if layer.frozen_weight_bytes]
        self._gradients: dict[tuple[tuple[Placement, ...], bool, bool], Gradients] = {}

    def required(self, choice: Choice) -> Needs:
        """Predict the needs of a run in each of its phases. Raises ConfigError for a choice of another workload."""
        self._check(choice)
        # Gradients do not depend on the treatment of activations.
        key = choice.placements, choice.gradients_on_host, choice.overlapped
        gradients = self._gradients[key] = self._gradients.get(key) or Gradients(self._facts, choice)
        layers = self._passes.layers(choice)
        step = StepModel(self._facts, layers, choice, gradients)
        frozen = sum([la.frozen_weight_bytes for la in self._frozen if la.name in choice.offloaded_weights])
        host, pinned = self._host(choice, gradients, layers.parked_bytes, frozen)
        stepped = self._facts.state_bytes + self._facts.step_counts_bytes
        state = int(stepped[gradients.is_on[Placement.DEVICE]].sum())
        streams = 2 if choice.captured else 1
        workspaces = streams * CUBLAS_WORKSPACES * CUBLAS_WORKSPACE_BYTES + self._partial_bytes
        rest: dict[Owner, float] = {Owner.STATE: state, Owner.WORKSPACE: workspaces}
        slots = step.slots()
        first: dict[Owner, float] = {**rest, **step.peak(step.first_slots)}
        steady: dict[Owner, float] = {**rest, **step.peak(slots)}
        resident = layers.resident_weight_bytes
        # Offloaded weights are loaded on the CPU, and are on the device one layer at a time (`hostward.move`). They
        # cannot stay on the CPU where several ranks shard a model.
        alone = self.workload.layers if self.workload.ranks == 1 else ()
        waiting = [layer.weight_bytes for layer in alone if layer.name in choice.offloaded_weights]
        there = self._weight_bytes - sum(waiting) + max(waiting, default=0)
        loading = {**rest, Owner.WEIGHTS: there, Owner.WORKSPACE: self._partial_bytes}
        buffers, copy = self._save_bytes
        kept = copy if self.workload.snapshot else 0
        copied = kept or frozen  # untrained offloaded weights while they are saved, unless a snapshot has them
        loaded = {Owner.WEIGHTS: host[Owner.WEIGHTS] + sum(waiting), Owner.ACTIVATIONS: 0.0}
        locked = {**pinned, Owner.ACTIVATIONS: 0.0}
        phases = (
            _phase(LOAD, loading, {**host, **loaded}, locked),
            _phase(FIRST_STEP, first, host, pinned),
            _phase(STEADY_STEP, steady, {**host, Owner.COPIES: kept}, pinned),
            _phase(
                SAVE,
                {**rest, Owner.WEIGHTS: resident},
                {**host, Owner.COPIES: copied + buffers},
                {**pinned, Owner.COPIES: buffers},
            ),
            _phase(RESUME, loading, {**host, Owner.ACTIVATIONS: 0.0, Owner.COPIES: self._loaded_bytes}, locked),
            _phase(EVALUATION, {**rest, **layers.evaluation}, {**host, Owner.COPIES: kept}, pinned),
            _phase(SLEEP, {}, _with(host, state, resident), _with(pinned, state, resident)),
        )
        return Needs(phases, slots.count, slots.stage_at)

    def _check(self, choice: Choice) -> None:
        buckets, layers = len(self.workload.inventory.buckets), len(self._repeated)
        fix = "make the choice for this workload"
        if len(choice.placements) != buckets:
            raise ConfigError(f"{len(choice.placements)} placements for {buckets} buckets", fix=fix)
        if len(choice.activations) != layers:
            raise ConfigError(f"{len(choice.activations)} choices of activations for {layers} layers", fix=fix)
        if choice.offloaded_weights:
            unknown = choice.offloaded_weights - {layer.name for layer in self._repeated}
            if unknown:
                raise ConfigError(
                    f"weights of {min(unknown)!r} are to be offloaded, which is none of the layers", fix=fix
                )

    def _host(
        self, choice: Choice, gradients: Gradients, parked_bytes: float, frozen: int
    ) -> tuple[dict[Owner, float], dict[Owner, float]]:
        """Return the host bytes of a step, and the pinned bytes among them, which copies reach.

        Args:
            frozen: bytes of offloaded weights that are not trained.
        """
        buckets, facts, workload = self.workload.inventory.buckets, self._facts, self.workload
        here = gradients.is_on[Placement.HOST]
        elements = facts.padded_numel[here]
        streamed = float(facts.state_bytes[gradients.is_on[Placement.STREAMED]].sum())
        stepped = float((facts.state_bytes + facts.step_counts_bytes)[here].sum())
        weights = float((elements * facts.bucket_itemsize[here]).sum())
        twins = sorted(stepped_early(buckets, choice.placements, workload.step_early))
        stepped += float((facts.state_bytes + facts.step_counts_bytes)[twins].sum()) + _GUESS_BYTES * len(twins)
        weights += float((facts.padded_numel[twins] * facts.bucket_itemsize[twins]).sum())
        landing = float((elements * gradients.landed_itemsize[here]).sum())
        landing += gradients.landing_buffers_bytes
        partials = self._partial_bytes if gradients.summed else 0
        lanes = 2 if Placement.STREAMED in choice.placements else 1
        rest = {
            Owner.ACTIVATIONS: parked_bytes,
            Owner.WORKSPACE: float(lanes * KERNEL_TABLES_BYTES + _SCALARS_BYTES),
        }
        host = {
            Owner.STATE: streamed + stepped,
            Owner.WEIGHTS: weights + frozen,
            Owner.GRADIENTS: landing + partials,
            **rest,
        }
        pinned = {
            Owner.STATE: streamed,
            Owner.WEIGHTS: (weights if workload.pin_weights else 0.0) + frozen,
            Owner.GRADIENTS: (landing if workload.pin_gradients else 0.0) + partials,
            **rest,
        }
        return host, pinned


def _with(held: Mapping[Owner, float], state: float, weights: float) -> dict[Owner, float]:
    return {**held, Owner.STATE: held[Owner.STATE] + state, Owner.WEIGHTS: held[Owner.WEIGHTS] + weights}


def save_bytes(workload: Workload) -> tuple[int, int]:
    """Return the host bytes that a save needs besides the state: of write buffers and of a snapshot.

    Write buffers are an upper bound: several ranks share the threads that write. A snapshot, where one is taken,
    includes weights that are not trained.
    """
    parameters = workload.inventory.parameters
    frozen = [layer.frozen_weight_bytes for layer in workload.layers]
    written = sum(workload.inventory.saved_bytes) + sum(p.numel * p.dtype.itemsize_bytes for p in parameters)
    threads = max(1, min(MOST_WRITERS, (written + sum(frozen)) // PIECE_BYTES))
    largest = max(
        [*(4 * p.numel for p in parameters), *frozen], default=0
    )  # of frozen weights the size per layer is known, not per tensor
    copied = sum(bucket.host_bytes for bucket in workload.inventory.buckets) + sum(frozen)
    return threads * 2 * min(PIECE_BYTES, largest), copied


def _phase(
    name: str, device: Mapping[Owner, float], host: Mapping[Owner, float], pinned: Mapping[Owner, float]
) -> PhaseNeeds:
    return PhaseNeeds(name, *({_NAMES[o]: round(v) for o, v in held.items() if v} for held in (device, host, pinned)))


# Host memory that a save needs besides the state: constants of the checkpoint writer that plans count with.


PIECE_BYTES = 32 * 1024 * 1024
"""Largest piece in which tensors are read, written and checked."""
LOADED_AT_ONCE_BYTES = 512 * 1024 * 1024
"""State of parameters that is read from a checkpoint at a time."""
BLOCK_BYTES = 4096
"""Unit of places in files and of lengths where I/O bypasses the page cache: a multiple of a page and of any disk's
block.
"""
MOST_WRITERS = 8
"""Largest number of writer threads on one machine, each with its own file.

Reading, checking and submitting as much as a disk takes in parallel needs several threads.
"""


def writer_count(ranks: int = 1) -> int:
    """Return the number of writer threads for one of `ranks` ranks on this machine.

    The ranks share the disk, and the cores that their steps need. Each has at least two threads, so that one reads
    while the other writes.
    """
    most = min(MOST_WRITERS, len(os.sched_getaffinity(0)))
    return max(min(2, most), most // ranks)
