"""Plans for several ranks, made without the planner, and what each rank does with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sharded_cases import Net, adamw, backward, mesh_of, sharded, snapshot
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from train_cases import launched, small, state_of

import hostward
from hostward.config.rules.table import resharded, widened
from hostward.core.inventory import Inventory, cut_buckets
from hostward.core.placement import Placement
from hostward.errors import HostwardError
from hostward.plan.budgets import Budgets
from hostward.plan.cost_model import Costs, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.plan_file import BucketRow, Fingerprint, LayerRow, Limits, Machine, PlanFile, Predicted, plan_of
from hostward.plan.rank_partition import first_parts, required_of, sharded as part_of
from hostward.plan.search import Candidate
from hostward.plan.workload import Workload
from hostward.profiler.workload import inventory_of
from hostward.trainer import setup
from hostward.trainer.workload import recipe_workload

MIXED = (Placement.HOST, Placement.DEVICE, Placement.STREAMED)
LAYERS = ("model.layers.0", "model.layers.1")


@cache
def traces() -> TemporaryDirectory[str]:
    """Where traces are kept: most cases divide the same models."""
    return TemporaryDirectory(prefix="traces-")


def workload(words: Sequence[str], recipe: str, ranks: int) -> Workload:
    """One rank's part of a small recipe."""
    config = small(*words, recipe=recipe)
    whole = recipe_workload(config, folder=Path(traces().name))
    return part_of(whole, ranks, reduced_in_fp32=widened(config, ranks), resharded=resharded(config))


def choice_of(of: Workload, keeps: tuple[Keep, ...], **options: Any) -> Choice:
    """Every placement, in turns."""
    return Choice(tuple(MIXED[i % 3] for i in range(len(of.inventory.buckets))), keeps, **options)


def plan(of: Workload, choice: Choice) -> PlanFile:
    hardware = profile("h200")
    made = Candidate(choice, required_of(of)(of, choice), Costs(of, speeds_of(hardware)))
    return plan_of(of, hardware, of.ranks, Budgets(), made)


def refused(words: list[str], recipe: str, plan: str) -> str:
    """What `hostward train --plan` says."""
    launched()
    try:
        setup.prepare(recipe, small(*words, recipe=recipe), plan=PlanFile.from_json(plan))
    except HostwardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---------------------------------------------------------------- a custom training loop


def net_inventory(ranks: int) -> Inventory:
    """What the first of so many ranks has of the network."""
    parts = first_parts(inventory_of(Net()).parameters, ranks)
    return Inventory(parts, cut_buckets(parts))


def net_plan(ranks: int, turn: int = 0) -> PlanFile:
    """A plan for the network, whose root owns what comes before and behind the blocks."""
    buckets = net_inventory(ranks).buckets
    rows = tuple(BucketRow(b.name, b.numel, MIXED[(i + turn) % 3]) for i, b in enumerate(buckets))
    keeps = (Keep.OFFLOAD, Keep.KEEP, Keep.KEEP)
    return PlanFile(
        "hostward-plan",
        1,
        Fingerprint("net", sum(row.numel for row in rows), "", 3, 4, 1, ranks),
        Machine("h200", "NVIDIA H200", ranks),
        Limits(None, None, None),
        Predicted(0.0, 0.0, 0.0, 0, 0, 0),
        False,
        None,
        rows,
        tuple(LayerRow(f"blocks.{i}", kept, "device") for i, kept in enumerate(keeps)),
    )


def net_by_plan(plan: str | None, dtype: str = "bf16") -> dict[str, Any]:
    """Three steps of the network, sharded over all ranks; where its state is."""
    model: Any = sharded("all", dtype)
    made = None if plan is None else PlanFile.from_json(plan)
    optimizer = adamw(model, "device", "late", plan=made)
    run = None if made is None else hostward.attach(model, optimizer, plan=made)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        backward(model, optimizer, step, 1, True, True, False)
        optimizer.step()
        norms.append(optimizer.grad_norm.hex())
    left = 0 if run is None else run.report().offloaded_bytes + sum(run.report().kept_bytes.values())
    return {"norms": norms, "bits": snapshot(model, optimizer), "state": state_of(optimizer), "attached_bytes": left}


def net_refused(mesh: str, plan: str, what: str, *, resharded: bool = True) -> str:
    """What `AdamW(plan=...)` or `attach(plan=...)` say of the network on a mesh; "whole": it is not sharded."""
    model: Any = Net() if mesh == "whole" else sharded(mesh, reshard_after_forward=resharded)
    try:
        made = PlanFile.from_json(plan)
        _ = adamw(model, plan=made) if what == "AdamW" else hostward.attach(model, plan=made)
    except HostwardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def columns_refused(plan: str) -> str:
    """The same of a network that is divided by columns."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))
    fully_shard(model, mesh=mesh_of("all"), shard_placement_fn=lambda _: Shard(1))
    try:
        adamw(model, plan=PlanFile.from_json(plan))
    except HostwardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
