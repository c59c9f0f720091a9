"""No choice that somebody makes by hand is faster than the plan, within the same limits and by more than 2 %."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from plan_cases import llama

from hostward.core.placement import Placement, place_fraction
from hostward.core.units import GIB
from hostward.plan.budgets import Budgets
from hostward.plan.cost_model import speeds_of
from hostward.plan.decisions import ELEMENTWISE, LEAVES, RECOMPUTED, Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.rank_partition import required_of, sharded
from hostward.plan.search import Candidate, Frontier
from hostward.plan.solver import LAST_STAY, Forced
from hostward.plan.step_time import predict_of
from hostward.plan.workload import Workload

pytest.importorskip("scipy", reason="planning needs SciPy")

AS_GOOD = 1.02
LLAMA = llama("llama-8b", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, sequence=2048)
GEMMA = llama("gemma-27b", layers=62, hidden=5376, ffn=21504, heads=32, kv_heads=16, vocab=262208, sequence=4096)
SMALL = llama(layers=4, hidden=1024, ffn=4096, heads=8, kv_heads=8, vocab=4000, sequence=2048)


def planned(workload: Workload, machine: str, budgets: Budgets, forced: Forced | None = None) -> Candidate | None:
    hardware = profile(machine)
    assert hardware.gpu is not None
    speeds = speeds_of(hardware, workload.ranks)
    frontier = Frontier(workload, speeds, required_of(workload), forced or Forced(), hardware.gpu.memory_bytes)
    return frontier.best_at_last(budgets)


def by_hand(workload: Workload, away: tuple[int, ...]) -> Iterator[Forced]:
    """Return the choices of one flag each: layers with weights away, one treatment of all, all state in one place."""
    layers, buckets = workload.repeated, workload.inventory.buckets
    for count in away if workload.ranks == 1 else ():
        yield Forced(offloaded_weights=frozenset(layer.name for layer in layers[:count]))
    for keep in (Keep.RECOMPUTE, Keep.ELEMENTWISE):
        yield Forced(activations=dict.fromkeys(range(len(layers)), keep))
    yield Forced(dict.fromkeys(range(len(buckets)), Placement.HOST))


@pytest.mark.parametrize(
    ("workload", "machine", "budgets", "away"),
    [
        (LLAMA, "rtx-4090", Budgets(int(20.35 * GIB), 128 * GIB), (12, 16)),
        (GEMMA, "h100", Budgets(int(72.5 * GIB), 500 * GIB), (25,)),
        (replace(LLAMA, microbatches=4), "h100", Budgets(60 * GIB, 140 * GIB), ()),
        (sharded(replace(LLAMA, microbatches=4), 4), "h100", Budgets(30 * GIB, 40 * GIB), ()),
    ],
    ids=["llama on a 4090", "gemma on an h100", "microbatches", "four ranks"],
)
def test_no_flag_makes_it_faster(workload: Workload, machine: str, budgets: Budgets, away: tuple[int, ...]) -> None:
    """Seen red: without the search around the frontier 25 layers of the second one are 20 % faster than the plan."""
    found = planned(workload, machine, budgets)
    assert found is not None
    assert not budgets.over(found.needs)
    for forced in by_hand(workload, away):
        other = planned(workload, machine, budgets, forced)
        if other is not None:
            assert found.prediction.step_s <= AS_GOOD * other.prediction.step_s, forced


def every_choice(workload: Workload) -> Iterator[Choice]:
    """Return all choices of a small model, with the state in quarters, that the engine can carry out."""
    layers, buckets = workload.repeated, workload.inventory.buckets
    apart = (*RECOMPUTED, Keep.OFFLOAD)
    for keeps in product(Keep, repeat=len(layers)):
        mixed = any(k in ELEMENTWISE for k in keeps) and any(k in apart for k in keeps)
        order = [list(Keep).index(k) for k in keeps]
        if mixed or sum(k in LEAVES for k in keeps) > len(layers) - LAST_STAY or order != sorted(order, reverse=True):
            continue
        for count, fraction, streamed in product(range(len(layers)), (0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)):
            names = frozenset(layer.name for layer in layers[:count])
            rows = place_fraction(buckets, fraction, streamed).buckets
            placements = tuple(
                Placement.HOST if bucket.layer in names else row.placement
                for bucket, row in zip(buckets, rows, strict=True)
            )
            yield Choice(placements, keeps, names)


def test_no_choice_of_a_small_model_is_faster() -> None:
    hardware = profile("rtx-4090")
    required, whole = required_of(SMALL), Budgets(24 * GIB, 64 * GIB)
    frontier = Frontier(SMALL, speeds_of(hardware, 1), required)
    known = [(choice, required(SMALL, choice)) for choice in every_choice(SMALL)]
    times = [predict_of(frontier.costs, choice, needs).step_s for choice, needs in known]
    most = frontier.base.needs.device_peak_bytes
    assert len(known) > 1000
    for share, host_bytes in ((0.75, whole.host_bytes), (0.5, whole.host_bytes), (0.4, 2 * GIB)):
        budgets = Budgets(int(most * share), host_bytes)
        fitting = [s for s, (_, needs) in zip(times, known, strict=True) if not budgets.over(needs)]
        found = planned(SMALL, "rtx-4090", budgets)
        if fitting:
            assert found is not None
            assert found.prediction.step_s <= AS_GOOD * min(fitting), share
