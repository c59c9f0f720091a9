"""The mix of streamed and host-stepped state whose predicted step is the shortest."""

from __future__ import annotations

from dataclasses import replace

from hostward.choice import Choice
from hostward.memory_model import MemoryModel
from hostward.planner import place_fraction

from .costs import Costs
from .needs import Budgets
from .time_model import predict_of

_COARSE, _FINE = 10, 40
"""Shares are tried in such parts of the whole, the fine ones beside the best of the coarse."""


def best_share(costs: Costs, choice: Choice, offload_fraction: float, budgets: Budgets | None = None) -> float:
    """Of the offloaded state, the share to stream: of those in steps of 0.1, and then of 0.025 beside the best of them,
    that with the shortest predicted step, and of several the one that streams least.

    Args:
        choice: what else is chosen; its placements are not read.
        offload_fraction: of the state's bytes that is off the device.
        budgets: shares that keep to them come first. None: there are none.
    """
    buckets, seen = costs.workload.inventory.buckets, dict[int, tuple[bool, float]]()
    if not buckets or not offload_fraction:
        return 0.0
    memory = MemoryModel(costs.workload)

    def judged(part: int) -> tuple[bool, float]:
        if part not in seen:
            rows = place_fraction(buckets, offload_fraction, part / _FINE).buckets
            tried = replace(choice, placements=tuple(row.placement for row in rows))
            needs = memory.required(tried)
            seen[part] = bool(budgets and budgets.over(needs)), predict_of(costs, tried, needs).step_s
        return seen[part]

    wide = _FINE // _COARSE
    coarse = min(range(0, _FINE + 1, wide), key=judged)
    return min(range(max(0, coarse - wide + 1), min(_FINE, coarse + wide - 1) + 1), key=judged) / _FINE
