"""A workload of which each of several GPUs holds a part: parameters, gradients and state, divided by rows. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hostward.choice import Choice
from hostward.errors import ConfigError
from hostward.inventory import Inventory, Parameter, cut_buckets, master_kind
from hostward.memory_model import MemoryModel, Needs, required
from hostward.rank_parts import first_parts
from hostward.workload import Layer, Workload

from .needs import Required


class UndividedError(ConfigError):
    """A step has not as many microbatches as would do for each GPU to have some."""


def sharded(workload: Workload, ranks: int, *, reduced_in_fp32: bool = False, resharded: bool = False) -> Workload:
    """The first rank's part, which is the largest: of every parameter its rows, and a `ranks`-th of the microbatches of
    a step.

    Args:
        reduced_in_fp32: gradients are, which of 16-bit weights takes more than their own dtype.
        resharded: layers are whole only while they run.

    Raises ConfigError where the microbatches cannot be divided.
    """
    if ranks == 1:
        return workload
    if workload.microbatches % ranks:
        sequences = workload.microbatches * workload.microbatch_sequences
        raise UndividedError(
            f"a step of {sequences} sequences in microbatches of {workload.microbatch_sequences} cannot be divided "
            f"among {ranks} GPUs",
            fix=f"train.global_batch_size={ranks * workload.microbatch_sequences}, or another multiple of it",
        )
    inventory = workload.inventory
    parts = first_parts(inventory.parameters, ranks)
    split_master = all(b.kind is master_kind(b.dtype) for b in inventory.buckets)
    return replace(
        workload,
        inventory=Inventory(parts, cut_buckets(parts, split_master=split_master)),
        layers=tuple(_part(layer, parts, ranks) for layer in workload.layers),
        microbatches=workload.microbatches // ranks,
        ranks=ranks,
        reduced_in_fp32=reduced_in_fp32,
        resharded=resharded,
    )


def _part(layer: Layer, parts: Sequence[Parameter], ranks: int) -> Layer:
    return replace(
        layer,
        # Layers that a caller has named have parameters of other names.
        trained_weight_bytes=sum(p.numel * p.dtype.itemsize_bytes for p in parts if p.layer == layer.name)
        or -(-layer.trained_weight_bytes // ranks),
        frozen_weight_bytes=-(-layer.frozen_weight_bytes // ranks),
    )


def required_of(workload: Workload) -> Required:
    """The memory model of a workload and of others of the same ranks."""
    model = MemoryModel(workload)

    def needs(asked: Workload, choice: Choice) -> Needs:
        return model.required(choice) if asked is workload else required(asked, choice)

    return needs
