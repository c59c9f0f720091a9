"""Turn a run into its report (data) and into tables for the terminal."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from hostward.config.schema import Config, get_option, options
from hostward.config.validate import shown
from hostward.core.host_limits import host_memory, resident_bytes
from hostward.core.placement import Placement
from hostward.core.units import size, unit_of
from hostward.report.better_plans import better_plans
from hostward.report.formatting import duration, per_second
from hostward.report.schema import (
    FORMAT,
    VERSION,
    Ended,
    Estimate,
    MemoryReport,
    NodeRow,
    OffloadPart,
    OffloadReport,
    RankRow,
    RanksReport,
    RunReport,
    StepMemory,
    StepRow,
    iterations,
    step_row,
)
from hostward.runtime.backend import Tier
from hostward.runtime.step_trace import Trace
from hostward.schedule.ops import Lane
from hostward.trainer.offload_options import gradient_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from hostward.config.schema import Config
    from hostward.trainer.process_group import Ranks
    from hostward.trainer.run import Run


SLOTS = "staging slots"
GRAPH = "CUDA graph"


def measured(trace: Trace, iterations: int, traced: int) -> OffloadReport | None:
    """Average over the steps of a trace of `traced` iterations, the last of them `iterations` - 1; None if it is empty.

    The last step is left out if there are others: no forward follows that it could overlap with. The copies of the
    first forward are left out too: a step begins with its gradients, and the step before that forward is not in the
    trace.
    """
    steps = trace.steps()[-traced:] if traced else ()
    if not steps:
        return None
    chosen = steps[:-1] or steps
    summary, n = trace.summary(chosen), len(chosen)
    first = iterations - len(steps)
    return OffloadReport(
        first_iteration=first,
        last_iteration=first + n,
        hidden_s=summary.hidden_s / n,
        exposed_s=summary.exposed_s / n,
        offload_s=summary.offload_s / n,
        host_step_s=summary.host_step_s / n,
        transfer_s={direction: seconds / n for direction, seconds in summary.transfer_s.items()},
        transfer_bytes={direction: count / n for direction, count in summary.transfer_bytes.items()},
        lines=tuple(summary.explain().splitlines()),
        parts={
            name: OffloadPart(
                transfer_s={direction: seconds / n for direction, seconds in part.transfer_s.items()},
                transfer_bytes={direction: count / n for direction, count in part.transfer_bytes.items()},
                exposed_s=None if part.exposed_s is None else part.exposed_s / n,
            )
            for name, part in summary.parts.items()
        },
    )


def report(run: Run, circumstances: Mapping[str, Any], *, ended: Ended, reason: str | None = None) -> RunReport:
    """Report what the run did and what it holds now, from counters, without waiting for the device.

    Args:
        circumstances: `date`, `command` and `versions` of the report.
    """
    plan, ledger, config = run.optimizer.plan, run.optimizer.backend.ledger, run.config
    tokens = run.tokens_per_iteration
    steady = run.iteration_s[1:] or run.iteration_s
    memory, offload = _memory(run), run.offload
    return RunReport(
        format=FORMAT,
        version=VERSION,
        **circumstances,
        recipe=run.recipe,
        ended=ended,
        reason=reason,
        first_iteration=run.first_iteration,
        last_iteration=run.iteration,
        planned_iterations=config.train.train_iters,
        losses=tuple(run.losses),
        grad_norms=tuple(run.grad_norms),
        learning_rates=tuple(run.learning_rates),
        skipped_iterations=tuple(run.skipped),
        tokens_per_iteration=tokens,
        tokens_per_s=tokens * len(steady) / sum(steady) if steady else 0.0,
        iteration_s=tuple(run.iteration_s),
        step_memory=run.sampler.step_memory(),
        memory_over_time=run.sampler.owners(),
        asked_fraction=plan.asked_fraction,
        placed_fraction=plan.placed_fraction,
        state_bytes=plan.state_bytes,
        offloaded_bytes=plan.offloaded_bytes,
        buckets=len(plan.buckets),
        host_buckets=plan.count(Placement.HOST),
        streamed_buckets=plan.count(Placement.STREAMED),
        placements=plan.explain(),
        plan=plan.buckets,
        activations=_activations(run),
        offload=offload,
        memory=memory,
        predicted=run.predicted,
        measured=Estimate(
            device_peak_bytes=memory.device_peak_bytes,
            host_bytes=sum(memory.host_by_owner_bytes.values()),
            pinned_bytes=memory.pinned_bytes,
            step_s=median(steady) if steady else None,
            exposed_s=None if offload is None else offload.exposed_s,
        ),
        frontier=run.frontier,
        moved_d2h_bytes=ledger.copied_bytes[Lane.D2H],
        moved_h2d_bytes=ledger.copied_bytes[Lane.H2D],
        parameters=run.trained_parameters,
        model_parameters=run.model_parameters,
        data=run.dataset.description,
        options=options_set(config),
        machine={**run.optimizer.backend.describe(), "torch": torch.__version__, **_device_facts(run.device)},
        host=_host_facts(),
        checkpoint=None if run.saved is None else str(run.saved),
        ranks=run.of_ranks,
        start_s=dict(run.startup.seconds),
        division=division(config, run.ranks),
    )


def newest_row(run: Run) -> StepRow:
    """Return the newest iteration whose loss and norm have reached the host; there must be one."""
    i = len(run.losses) - 1
    return step_row(run, i, run.sampler.steps[i], run.skipped[-1:])


def _activations(run: Run) -> dict[str, Any] | None:
    if run.attachment is None:
        return None
    found = run.attachment.report()
    weights = None if found.weights is None else {**asdict(found.weights), "words": found.weights.explain()}
    return {**asdict(found), "weights": weights, "words": "\n".join(found.of_activations())}


def _memory(run: Run) -> MemoryReport:
    ledger, cuda = run.optimizer.backend.ledger, run.device.type == "cuda"
    at_most = {"gradients": gradient_bytes(run.share, run.optimizer.inventory, run.optimizer.plan)}
    at_most |= {SLOTS: run.slot_bytes} if run.slot_bytes else {}
    at_most |= {GRAPH: run.graph_bytes} if run.graph_bytes else {}
    return MemoryReport(
        device_by_owner_bytes={**ledger.by_owner(Tier.DEVICE), **at_most},
        host_by_owner_bytes={**ledger.by_owner(Tier.HOST), **run.save_bytes},
        pinned_bytes=ledger.pinned_bytes + run.save_pinned_bytes,
        resident_bytes=resident_bytes(),
        device_allocated_bytes=torch.cuda.memory_allocated(run.device) if cuda else None,
        device_peak_bytes=torch.cuda.max_memory_allocated(run.device) if cuda else None,
    )


def options_set(config: Config) -> dict[str, str]:
    """Return the options that differ from their defaults, as typed on a command line."""
    values = {name: get_option(config, name) for name in options()}
    return {name: shown(value) for name, value in values.items() if value != options()[name].default}


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return {"device_memory_bytes": torch.cuda.get_device_properties(device).total_memory}


def _host_facts() -> dict[str, Any]:
    limit = host_memory()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": limit.total_bytes,
        "limited_by": limit.limited_by,
    }


def render(report: RunReport) -> list[Table]:
    """Return tables for a terminal of 80 columns."""
    from rich.table import Table

    run = Table(
        title=f"{report.recipe}: {iterations(report.first_iteration, report.last_iteration)}",
        box=None,
        show_header=False,
        title_justify="left",
        pad_edge=False,
    )
    run.add_column("subject")
    run.add_column("facts", overflow="fold")  # so that names of options can be copied
    placed = f"{report.placed_fraction:.2%} offloaded, {report.asked_fraction:.2%} asked for"
    on_device = report.buckets - report.host_buckets - report.streamed_buckets
    rows = {
        "loss, first and last": _first_and_last(report.losses),
        "step, median": duration(report.measured.step_s),
        "tokens/s, median step": per_second(report),
        "parameters": f"{report.parameters:,} trained of {report.model_parameters:,}",
        "optimizer state": f"{size(report.offloaded_bytes)} of {size(report.state_bytes)}: {placed}",
        "buckets": f"{report.host_buckets} stepped by the CPU, {report.streamed_buckets} streamed, {on_device} on the "
        "device",
        "moved in all": f"{size(report.moved_d2h_bytes)} to the host, {size(report.moved_h2d_bytes)} to the device",
        "skipped steps": str(len(report.skipped_iterations)),
        "data": report.data,
        "machine": ", ".join(f"{k} {v}" for k, v in report.machine.items()),
    }
    if report.activations is not None:
        weights = report.activations.get("weights")
        rows |= {"offloaded weights": weights["words"]} if weights else {}
        rows |= {"saved activations": report.activations["words"]} if report.activations["words"] else {}
    if report.offload is not None:
        span = iterations(report.offload.first_iteration, report.offload.last_iteration)
        notes = ["copies within host memory: times and rates are not those of a GPU"] if report.simulated else []
        rows |= {"offloading": "\n".join([f"measured in {span}", *report.offload.lines, *notes])}
    faster = better_plans(report)
    rows |= {"a faster plan": "\n".join(faster)} if faster else {}
    rows |= _allocator_row(report.step_memory)
    rows |= {"each rank has": report.division} if report.division else {}
    if report.ranks is not None:
        rows |= _rank_rows(report.ranks, simulated=report.simulated)
    if report.checkpoint:
        rows["checkpoint"] = report.checkpoint
    for name, value in rows.items():
        run.add_row(name, value)
    reserved_bytes = report.step_memory.device_reserved_bytes
    return [run, _memory_table(report.memory, reserved_bytes, simulated=report.simulated)]


def _allocator_row(memory: StepMemory) -> dict[str, str]:
    """Describe cache flushes of torch's allocator after the first iteration, in which pools grow."""
    retries = memory.alloc_retries
    if not retries or retries[-1] == retries[0]:
        return {}
    n = sum(now > before for before, now in pairwise(retries))
    return {
        "device memory was full": f"in {n} of {len(retries) - 1} iterations after the first, torch's allocator gave\n"
        "back its cached blocks; the host then waits for the whole GPU"
    }


def _rank_rows(ranks: RanksReport, *, simulated: bool) -> dict[str, str]:
    nodes = [
        f"{n.node}: {n.ranks} ranks, host {size(n.host_bytes)}{'' if simulated else f', pinned {size(n.pinned_bytes)}'}"
        for n in ranks.nodes
    ]
    rows = {f"{len(ranks.ranks)} ranks, by node": "\n".join(nodes)}
    return rows | ({"stragglers": "\n".join(ranks.stragglers)} if ranks.stragglers else {})


def _first_and_last(losses: Sequence[float | None]) -> str:
    if not losses:
        return "no iteration was run"
    return " → ".join("not finite" if loss is None else f"{loss:.6f}" for loss in (losses[0], losses[-1]))


def _memory_table(memory: MemoryReport, reserved_bytes: tuple[int, ...] | None, *, simulated: bool) -> Table:
    """Return the table of bytes by owner, all in the unit of the largest sum."""
    from rich.table import Table

    device, host = memory.device_by_owner_bytes, memory.host_by_owner_bytes
    unit_bytes, unit = unit_of(max(sum(device.values()), sum(host.values())))

    def shown(nbytes: int | None) -> str:
        return f"{nbytes / unit_bytes:,.{1 if unit_bytes > 1 else 0}f}" if nbytes else ""

    table = Table(title=f"\nmost memory at any time, {unit}", box=None, title_justify="left", pad_edge=False)
    if simulated:
        table.caption = "The device is simulated: its bytes are ordinary host memory too."
        table.caption_justify = "left"
    for column in ("owner", "simulated device" if simulated else "device", "host"):
        table.add_column(column, justify="left" if column == "owner" else "right")
    for owner in dict.fromkeys((*device, *host)):
        table.add_row(owner, shown(device.get(owner)), shown(host.get(owner)))
    table.add_row("sum", shown(sum(device.values())), shown(sum(host.values())))
    if not simulated:
        table.add_row("of it pinned", "", shown(memory.pinned_bytes))
    table.add_row("process, resident", "", shown(memory.resident_bytes))
    if memory.device_allocated_bytes is not None:
        table.add_row("torch, allocated between steps", shown(memory.device_allocated_bytes), "")
        table.add_row("torch, peak", shown(memory.device_peak_bytes), "")
    if reserved_bytes:
        table.add_row("torch, reserved", shown(reserved_bytes[-1]), "")
    return table


# The report of all ranks at the end of a run: sums by node, and stragglers.


SLOW = 1.25
"""A rank is a straggler if it takes this many times as long as the median rank,"""
MATTERS = 0.02
"""and longer by at least this share of an iteration."""
_WORK: dict[str, Callable[[RankRow], float | None]] = {
    "reading samples": lambda row: row.data_s,
    "its CPU optimizer step": lambda row: row.host_step_s,
    "its copies": lambda row: row.transfer_s,
}
"""Work that a rank does by itself, by its name. The other ranks wait for it in their next collective, so iterations
take equally long on all ranks.
"""


def ranks_report(run: Run) -> RanksReport | None:
    """Gather the report of all ranks; None for a run of one process.

    This is a collective: every rank must call it.
    """
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
    """Describe in words which part of the model each process has; None for one process."""
    if ranks.size == 1:
        return None
    model, among, found = config.model, ranks.of_stage, []
    if ranks.stages > 1:
        several = model.virtual_pipeline_model_parallel_size
        found.append(f"layers in {ranks.stages} stages" + (f" of {several} parts each" if several else ""))
    if ranks.divided:
        found.append(f"weights, gradients and state sharded over {among} ranks{' of each' if found else ''}")
        if ranks.sharing > 1:
            found.append(f"matrices first among {ranks.sharing} neighbours")
        if model.expert_model_parallel_size > 1:
            found.append(f"experts first among {model.expert_model_parallel_size}")
        whole = "only while it runs" if ranks.resharded else "from its forward to its backward"
        strategy = config.ddp.data_parallel_sharding_strategy
        found.append(f"a layer unsharded {whole} (ddp.data_parallel_sharding_strategy={strategy})")
    elif among > 1:
        found.append(f"all weights, gradients and state on each of {among} ranks (ddp.use_distributed_optimizer=false)")
    return "; ".join(found)


def nodes(rows: Sequence[RankRow]) -> tuple[NodeRow, ...]:
    """Sum over ranks by node, in the order of their first rank."""
    names = dict.fromkeys(row.node for row in rows)
    held = {name: [row for row in rows if row.node == name] for name in names}
    return tuple(
        NodeRow(name, len(those), sum(r.host_bytes for r in those), sum(r.pinned_bytes for r in those))
        for name, those in held.items()
    )


def stragglers(rows: Sequence[RankRow], iteration_s: float) -> tuple[str, ...]:
    """Return one sentence for each rank and work that the others wait for."""
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
