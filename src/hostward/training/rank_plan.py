"""A plan carried out by one of several ranks: each places its part of a bucket where the plan places the bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from hostward.errors import ConfigError
from hostward.inspect import Tracked, local_of
from hostward.inventory import Bucket, cut_buckets
from hostward.plan import Plan, placed
from hostward.planning.plan_file import PlanFile
from hostward.rank_parts import cut_alike, first_parts


def placed_by_plan(
    plan: PlanFile, tracked: Sequence[Tracked], *, first_index: int, split_master: bool
) -> tuple[tuple[Bucket, ...], Plan]:
    """Buckets of parameters in order of use in forward, and where the plan places them.

    Raises ConfigError for a plan of another model, of another number of ranks, or of a model divided in another way.
    """
    ranks = require_division(plan, ((t.name, t.parameter) for t in tracked))
    parts = {t.name: t.facts for t in tracked}
    whole = [replace(parts[t.name], numel=t.parameter.numel(), first=0) for t in tracked]
    first = cut_buckets(first_parts(whole, ranks), first_index=first_index, split_master=split_master)
    of_first = plan.placements(first)
    buckets, origins = cut_alike(first, parts, first_index=first_index)
    return buckets, placed(buckets, [of_first.buckets[i].placement for i in origins], of_first.asked_fraction)


def require_division(plan: PlanFile, named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Among how many ranks these parameters are divided.

    Raises ConfigError unless all are divided by rows among as many ranks as the plan is for, and nothing else is done
    with them; for a plan for one GPU, unless they are whole.
    """
    for name, parameter in named:
        ranks, by_rows = _division(name, parameter)
        plan.require_ranks(ranks)
        if not by_rows:
            raise ConfigError(
                f"the plan divides parameters by rows among {ranks} GPUs, and parameter {name!r} is divided otherwise",
                why=f"it is {getattr(parameter, 'placements', '')} on {getattr(parameter, 'device_mesh', '')}",
                fix="fully_shard the model over one mesh of all these ranks and nothing else, or leave plan out",
            )
    return plan.workload.ranks


def _division(name: str, parameter: torch.Tensor) -> tuple[int, bool]:
    """Among how many ranks a parameter is divided, and whether each of them has rows of it that no other has."""
    if local_of(parameter) is parameter:
        return 1, True
    from hostward.adapters import fsdp2

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    (split, *more) = fsdp2.layout_of(name, parameter).splits or (None,)
    return mesh.size(), not more and split is not None and split.dim == 0 and split.n_parts == mesh.size()
