"""Compute the part of row-sharded parameters that each rank has, and buckets that match on all ranks.

FSDP2 gives each rank the same number of rows, and the last ranks the remaining rows, if any, so the first rank's part
is the largest. A plan for several GPUs is a plan for the first rank's part; the other ranks cut theirs in the same
places. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hostward.core.inventory import FP8_BLOCK, SPLIT_ELEMENTS, Bucket, Inventory, Parameter, Range, align, cut_buckets
from hostward.errors import ConfigError
from hostward.plan.budgets import Required
from hostward.plan.decisions import Choice
from hostward.plan.memory_model import MemoryModel, Needs
from hostward.plan.workload import Layer, Workload


def first_parts(parameters: Iterable[Parameter], ranks: int) -> tuple[Parameter, ...]:
    """Return the first rank's part of each unsharded parameter; elements are divided where rows are not known."""
    return tuple(replace(p, numel=_largest(p.numel, p.rows, ranks)) for p in parameters)


def _largest(numel: int, rows: int, ranks: int) -> int:
    rows = rows or numel
    return -(-rows // ranks) * (numel // rows) if rows else 0


def cut_alike(
    first: Sequence[Bucket], parts: Mapping[str, Parameter], *, first_index: int = 0
) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
    """Cut another rank's `parts` (by name) into buckets that match the buckets of the `first` rank.

    A bucket holds the same places of the rank's part as the first rank's bucket. A cut moves on to the next chunk of
    the gradient norm, by less than 4,096 elements. Where a rank has no elements, no bucket is made. A bucket of the
    first rank that holds parameters of several groups becomes one for each.

    Returns:
        The buckets, and for each of them its number among those of the first rank.
    """
    ends: dict[str, int] = {}
    for r in (r for bucket in first for r in bucket.ranges):
        ends[r.name] = max(ends.get(r.name, 0), r.stop)
    buckets: list[Bucket] = []
    origins: list[int] = []
    for i, bucket in enumerate(first):
        for group in sorted({parts[r.name].group for r in bucket.ranges}):
            held = [r for r in bucket.ranges if parts[r.name].group == group]
            ranges = tuple(piece for r in held for piece in _pieces(r, parts[r.name], ends[r.name]))
            if ranges:
                buckets.append(replace(bucket, index=first_index + len(buckets), group=group, ranges=ranges))
                origins.append(i)
    return tuple(buckets), tuple(origins)


def _pieces(of_first: Range, part: Parameter, end: int) -> list[Range]:
    """Map a range of the first rank's part to another rank's part.

    The rest of a chunk that begins before the part becomes a range of its own.
    """
    start = _cut(of_first.start, part)
    stop = part.numel if of_first.stop == end else _cut(of_first.stop, part)
    head = min(_cut_up(0, part), stop) if start == 0 else start
    return [Range(part.name, a, b) for a, b in ((start, head), (head, stop)) if a < b]


def _cut(at: int, part: Parameter) -> int:
    return min(_cut_up(at, part), part.numel) if at else 0


def _cut_up(at: int, part: Parameter) -> int:
    """Return the first place from `at` on where a chunk of the gradient norm begins."""
    return align(part.first + at, SPLIT_ELEMENTS) - part.first


# A workload whose parameters, gradients and state are sharded by rows among several GPUs.


class UndividedError(ConfigError):
    """Report what cannot be divided among so many GPUs: the microbatches of a step, or blocks of FP8 moments."""


def _cuts_block(whole: Parameter, part: Parameter) -> bool:
    return part.numel < whole.numel and part.numel % FP8_BLOCK > 0


def sharded(workload: Workload, ranks: int, *, reduced_in_fp32: bool = False, resharded: bool = False) -> Workload:
    """Return the first rank's part of a workload, which is the largest.

    The part has the rank's rows of every parameter and a `ranks`-th of the microbatches of a step.

    Args:
        reduced_in_fp32: gradients are reduced in fp32, where 16-bit weights need more than their own dtype.
        resharded: layers are unsharded only while they run (`reshard_after_forward=True`).

    Raises UndividedError where the microbatches cannot be divided, or blocks of FP8 moments would be.
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
    pairs, form = zip(inventory.parameters, parts, strict=True), inventory.form
    cut = [p.name for p, first in pairs if form.of(p.dims).fp8_moments and _cuts_block(p, first)]
    if cut:
        raise UndividedError(
            f"moments in FP8, of {cut[0]!r} as well, of which each of {ranks} GPUs has rows",
            why=f"{FP8_BLOCK} elements share a scale, and a GPU's rows are no multiple of that",
            fix="moments in bf16 (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype), or another number of GPUs",
        )
    return replace(
        workload,
        inventory=Inventory(parts, cut_buckets(parts, form=form)),
        layers=tuple(_part(layer, parts, ranks) for layer in workload.layers),
        microbatches=workload.microbatches // ranks,
        ranks=ranks,
        reduced_in_fp32=reduced_in_fp32,
        resharded=resharded,
    )


def _part(layer: Layer, parts: Sequence[Parameter], ranks: int) -> Layer:
    return replace(
        layer,
        # A caller may have named layers otherwise than their parameters.
        trained_weight_bytes=sum(p.numel * p.dtype.itemsize_bytes for p in parts if p.layer == layer.name)
        or -(-layer.trained_weight_bytes // ranks),
        frozen_weight_bytes=-(-layer.frozen_weight_bytes // ranks),
    )


def required_of(workload: Workload) -> Required:
    """Build the memory model of a workload and of other workloads with the same ranks."""
    models: dict[bool, MemoryModel] = {}
    """Of that workload, and of the one that was asked for last: many choices are, one after the other."""

    def needs(asked: Workload, choice: Choice) -> Needs:
        own = asked is workload
        if own not in models or models[own].workload is not asked:
            models[own] = MemoryModel(asked)
        return models[own].required(choice)

    return needs
