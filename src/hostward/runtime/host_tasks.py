"""Build native CPU tasks from a bucket's operands: for host buckets, and for all buckets of the simulated backend."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hostward.core.inventory import MasterKind
from hostward.kernels.cpu.accumulate import AccumulateRange, AccumulateTask, NormRange, NormTask
from hostward.kernels.cpu.adamw import AdamWRange, AdamWTask, OtherSet, Role
from hostward.kernels.cpu.affinity import default_threads, read_cpu_facts
from hostward.kernels.cpu.library import Isa, load
from hostward.runtime.backend import AdamWOperands, Buffer, Partials, Scalars, chunks_of


def host_task(
    operands: AdamWOperands,
    scalars: Scalars,
    threads: int,
    *,
    hyper: npt.NDArray[np.float64] | None = None,
    error: npt.NDArray[np.int32] | None = None,
) -> AdamWTask:
    """Return the AdamW task over the present tensors of the operands' buffers, which it keeps alive.

    `hyper`: float64 [5], read when the task runs; None: the present constants. Raises PlacementError or ConfigError for
    operands that do not fit.
    """
    ranges = [
        AdamWRange(
            r.offset,
            r.length,
            r.gradient.data,
            r.weight.data,
            r.count.data,
            None if r.weight_out is None else r.weight_out.data,
            None if r.count_out is None else r.count_out.data,
        )
        for r in operands.ranges
    ]
    split, plain = operands.kind is MasterKind.SPLIT, operands.kind is MasterKind.PLAIN
    low, second, other = None if operands.low is None else operands.low.data, operands.second, None
    if second is not None:
        low_out = None if second.low is None else second.low.data
        other = OtherSet(
            second.exp_avg.data,
            second.exp_avg_sq.data,
            low_out if split else None,
            low_out if plain else None,
            second.guess.data,
        )
    return AdamWTask(
        ranges,
        exp_avg=operands.exp_avg.data,
        exp_avg_sq=operands.exp_avg_sq.data,
        remainder=low if split else None,
        master=low if plain else None,
        hyper=operands.constants.hyper.as_array() if hyper is None else hyper,
        tables=operands.constants.tables,
        scale=scalars.scale.data,
        skip=scalars.skip.data,
        error=error,
        threads=threads,
        role=Role.STEP if second is None else second.role,
        other=other,
    )


def add_task(
    totals: Sequence[Buffer],
    gradients: Sequence[Buffer],
    threads: int,
    *,
    first: bool,
    partials: tuple[Partials, Sequence[int]] | None,
    error: npt.NDArray[np.int32] | None = None,
) -> AccumulateTask:
    """Return the task of `Backend.add` over the buffers' present tensors. Raises PlacementError or ConfigError."""
    out, firsts = (None, [0] * len(totals)) if partials is None else partials
    ranges = [
        AccumulateRange(total.data, gradient.data, total.data.numel(), chunk)
        for total, gradient, chunk in zip(totals, gradients, firsts, strict=True)
    ]
    return AccumulateTask(
        ranges,
        first=first,
        last=out is not None,
        sums=None if out is None else out.sums.data,
        exponents=None if out is None else out.exponents.data,
        error=error,
        threads=threads,
    )


def added_partials(totals: Sequence[Buffer], partials: tuple[Partials, Sequence[int]] | None) -> list[Buffer]:
    """Return the buffers of `partials` that `Backend.add` writes."""
    if partials is None:
        return []
    out, firsts = partials
    parts = [out.part(first, chunks_of(total.data.numel())) for total, first in zip(totals, firsts, strict=True)]
    return [buffer for part in parts for buffer in part.all()]


def partials_task(
    gradients: Sequence[Buffer],
    firsts: Sequence[int],
    out: Partials,
    threads: int,
    *,
    error: npt.NDArray[np.int32] | None = None,
) -> NormTask:
    """Return the task of `Backend.partials` on the host. Raises PlacementError or ConfigError."""
    ranges = [NormRange(g.data, g.data.numel(), first) for g, first in zip(gradients, firsts, strict=True)]
    return NormTask(ranges, sums=out.sums.data, exponents=out.exponents.data, error=error, threads=threads)


def own_threads() -> int:
    """Return the threads for CPU kernels of this process, by the rule of `hostward.kernels.cpu.affinity`."""
    return default_threads(os.environ, read_cpu_facts())


def isa_name() -> str:
    """Return the instruction set that CPU kernels use on this machine."""
    return Isa(load().isa_best()).name.lower()
