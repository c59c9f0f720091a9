"""A bucket's operands as a native AdamW task: for host buckets, and for device buckets of the simulated backend."""

from __future__ import annotations

import os

from hostward.host.adamw import AdamWTask
from hostward.host.library import Isa, load
from hostward.host.threads import default_threads, read_cpu_facts

from .backend import AdamWOperands, Scalars


def host_task(operands: AdamWOperands, scalars: Scalars, threads: int) -> AdamWTask:
    """The task, which keeps its operands alive. Raises PlacementError or ConfigError for operands that do not fit."""
    return AdamWTask(
        operands.ranges,
        exp_avg=operands.exp_avg,
        exp_avg_sq=operands.exp_avg_sq,
        remainder=operands.remainder,
        master=operands.master,
        hyper=operands.hyper.as_array(),
        tables=operands.tables,
        scale=scalars.scale.data,
        skip=scalars.skip.data,
        threads=threads,
    )


def own_threads() -> int:
    """Threads for host kernels of this process, by the rule of `hostward.host.threads`."""
    return default_threads(os.environ, read_cpu_facts())


def isa_name() -> str:
    """The instruction set that host kernels use on this machine."""
    return Isa(load().isa_best()).name.lower()
