"""A workload of which each of several GPUs holds a part: parameters, gradients and state in equal shares. No torch."""

from __future__ import annotations

from dataclasses import replace

from hostward.choice import Choice
from hostward.errors import ConfigError
from hostward.inventory import Inventory, cut_buckets
from hostward.memory_model import FIRST_STEP, STEADY_STEP, MemoryModel, Needs, PhaseNeeds, required
from hostward.workload import Layer, Workload

from .needs import Required

GATHERED = "gathered weights"


def sharded(workload: Workload, ranks: int) -> Workload:
    """One rank's part: an `ranks`-th of every parameter, and of the microbatches of a step.

    Raises ConfigError where the microbatches cannot be divided.
    """
    if ranks == 1:
        return workload
    if workload.microbatches % ranks:
        sequences = workload.microbatches * workload.microbatch_sequences
        raise ConfigError(
            f"a step of {sequences} sequences in microbatches of {workload.microbatch_sequences} cannot be divided "
            f"among {ranks} GPUs",
            fix=f"train.global_batch_size={ranks * workload.microbatch_sequences}, or another multiple of it",
        )
    inventory = workload.inventory
    parts = tuple(replace(p, numel=-(-p.numel // ranks)) for p in inventory.parameters)
    return replace(
        workload,
        inventory=Inventory(parts, cut_buckets(parts)),
        layers=tuple(_part(layer, ranks) for layer in workload.layers),
        microbatches=workload.microbatches // ranks,
        ranks=ranks,
    )


def _part(layer: Layer, ranks: int) -> Layer:
    return replace(
        layer,
        trained_weight_bytes=-(-layer.trained_weight_bytes // ranks),
        frozen_weight_bytes=-(-layer.frozen_weight_bytes // ranks),
    )


def required_of(workload: Workload) -> Required:
    """The memory model of a workload and of others of the same ranks: with several, whole layers are gathered for their
    forward and backward, two at a time, and what is outside of the layers for both.
    """
    model = MemoryModel(workload)

    def whole(asked: Workload, choice: Choice) -> Needs:
        return model.required(choice) if asked is workload else required(asked, choice)

    if workload.ranks == 1:
        return whole
    repeated = [layer.weight_bytes * workload.ranks for layer in workload.repeated]
    outside = sum(layer.weight_bytes * workload.ranks for layer in workload.layers if not layer.repeated)
    # Besides the two, the gradient of one before it is scattered.
    gathered_bytes = outside + 3 * max(repeated, default=0)

    def needs(asked: Workload, choice: Choice) -> Needs:
        found = whole(asked, choice)
        phases = tuple(_gathering(phase, gathered_bytes) for phase in found.phases)
        return replace(found, phases=phases)

    return needs


def _gathering(phase: PhaseNeeds, gathered_bytes: int) -> PhaseNeeds:
    if phase.name not in (FIRST_STEP, STEADY_STEP):
        return phase
    return replace(phase, device={**phase.device, GATHERED: gathered_bytes})
