"""A bucket's operands as a native AdamW task: for host buckets, and for every bucket of the simulated backend."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from hostward.host.adamw import AdamWRange, AdamWTask
from hostward.host.library import Isa, load
from hostward.host.threads import default_threads, read_cpu_facts
from hostward.inventory import MasterKind

from .backend import AdamWOperands, Scalars


def host_task(
    operands: AdamWOperands,
    scalars: Scalars,
    threads: int,
    *,
    hyper: npt.NDArray[np.float64] | None = None,
    error: npt.NDArray[np.int32] | None = None,
) -> AdamWTask:
    """The task over what lies at the operands' buffers now, which it keeps alive. `hyper` float64 [5] is read when it
    runs; None: the present constants. Raises PlacementError or ConfigError for operands that do not fit.
    """
    low = None if operands.low is None else operands.low.data
    return AdamWTask(
        [AdamWRange(r.offset, r.length, r.gradient.data, r.weight.data, r.count.data) for r in operands.ranges],
        exp_avg=operands.exp_avg.data,
        exp_avg_sq=operands.exp_avg_sq.data,
        remainder=low if operands.kind is MasterKind.SPLIT else None,
        master=low if operands.kind is MasterKind.PLAIN else None,
        hyper=operands.constants.hyper.as_array() if hyper is None else hyper,
        tables=operands.constants.tables,
        scale=scalars.scale.data,
        skip=scalars.skip.data,
        error=error,
        threads=threads,
    )


def own_threads() -> int:
    """Threads for host kernels of this process, by the rule of `hostward.host.threads`."""
    return default_threads(os.environ, read_cpu_facts())


def isa_name() -> str:
    """The instruction set that host kernels use on this machine."""
    return Isa(load().isa_best()).name.lower()
