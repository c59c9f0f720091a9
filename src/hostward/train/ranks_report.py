"""What the ranks of a run say of themselves at its end: sums by node, and who was slow."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from hostward.engine.backend import Tier
from hostward.run_ranks import NodeRow, RankRow, RanksReport

if TYPE_CHECKING:
    from hostward.config import Config

    from .loop import Run
    from .ranks import Ranks

SLOW = 1.25
"""A rank is named that takes so many times what the median rank takes,"""
MATTERS = 0.02
"""and by at least this share of an iteration longer."""
_WORK: dict[str, Callable[[RankRow], float | None]] = {
    "reading samples": lambda row: row.data_s,
    "its host step": lambda row: row.host_step_s,
    "its copies": lambda row: row.transfer_s,
}
"""What a rank does by itself. While it does it the others wait for it in their next collective, so iterations take
equally long on all ranks."""


def ranks_report(run: Run) -> RanksReport | None:
    """Gathered from all ranks, so every one must call it; None of a run of one process."""
    if run.ranks.size == 1:
        return None
    ledger, cuda, offload = run.optimizer.backend.ledger, run.device.type == "cuda", run.offload
    iterations = max(1, run.iteration - run.first_iteration)
    row = RankRow(
        rank=run.ranks.rank,
        node=platform.node(),
        device=torch.cuda.get_device_name(run.device) if cuda else "cpu",
        host_bytes=ledger.total_bytes(Tier.HOST),
        pinned_bytes=ledger.pinned_bytes,
        device_peak_bytes=torch.cuda.max_memory_allocated(run.device) if cuda else None,
        data_s=run.data_s / iterations,
        host_step_s=None if offload is None else offload.host_step_s,
        transfer_s=None if offload is None else sum(offload.transfer_s.values()),
    )
    rows = tuple(run.ranks.gather(row))
    steady = run.iteration_s[1:] or run.iteration_s
    return RanksReport(rows, nodes(rows), stragglers(rows, median(steady) if steady else 0.0))


def division(config: Config, ranks: Ranks) -> str | None:
    """What of the model each process has, in words; None of one process."""
    if ranks.size == 1:
        return None
    model, among, found = config.model, ranks.of_stage, []
    if ranks.stages > 1:
        several = model.virtual_pipeline_model_parallel_size
        found.append(f"layers in {ranks.stages} stages" + (f" of {several} parts each" if several else ""))
    if ranks.divided:
        found.append(f"weights, gradients and state divided over {among} ranks{' of each' if found else ''}")
        if ranks.sharing > 1:
            found.append(f"matrices first among {ranks.sharing} neighbours")
        if model.expert_model_parallel_size > 1:
            found.append(f"experts first among {model.expert_model_parallel_size}")
        whole = "only while it runs" if ranks.resharded else "from its forward to its backward"
        strategy = config.ddp.data_parallel_sharding_strategy
        found.append(f"a layer whole {whole} (ddp.data_parallel_sharding_strategy={strategy})")
    elif among > 1:
        found.append(f"all weights, gradients and state on each of {among} ranks (ddp.use_distributed_optimizer=false)")
    return "; ".join(found)


def nodes(rows: Sequence[RankRow]) -> tuple[NodeRow, ...]:
    """Sums over ranks, by node, in order of their first rank."""
    names = dict.fromkeys(row.node for row in rows)
    held = {name: [row for row in rows if row.node == name] for name in names}
    return tuple(
        NodeRow(name, len(those), sum(r.host_bytes for r in those), sum(r.pinned_bytes for r in those))
        for name, those in held.items()
    )


def stragglers(rows: Sequence[RankRow], iteration_s: float) -> tuple[str, ...]:
    """One sentence for each rank and work that the others wait for."""
    found = []
    for work, seconds in _WORK.items():
        taken = [(row, s) for row in rows if (s := seconds(row)) is not None]
        usual_s = median(s for _, s in taken) if taken else 0.0
        found += [
            f"rank {row.rank} on {row.node}: {work} takes {s:.3g} s per iteration, {usual_s:.3g} s on the median rank"
            for row, s in taken
            if s > SLOW * usual_s and s - usual_s > MATTERS * iteration_s
        ]
    return tuple(found)
