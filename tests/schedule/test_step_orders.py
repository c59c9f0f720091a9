"""Training steps in every order of lanes: the same bits as with nothing offloaded; and no wait is there for nothing.

Seen red: in `lower`, the upload not waiting for the host step, arrivals not waiting for uploads or for streamed steps,
the read of a slot not waiting for the write of its last bucket, a release not waiting for its copy. In the engine: a
layer marked as arrived without a wait, a release that forgets another bucket's gradients, partial sums of absent
buckets left as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
import torch
from step_orders import waits_of
from test_race_check import IMPLIED
from trained import MAX_NORM, MIXES, Net, differing, train

import hostward
from hostward.errors import OrderingError
from hostward.optim import op_binding as lowered
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule import optimizer as lowering
from hostward.schedule.ops import Lane, Schedule
from hostward.schedule.race_check import races, repeated

SEEDS = 160


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def base(dtype: torch.dtype, microbatches: int) -> Mapping[str, torch.Tensor]:
    """Nothing offloaded, serial."""
    found = train({"offload_fraction": 0.0}, dtype=dtype, microbatches=microbatches, overlap=False, context=False)
    clipped = [float(found[f"norm {step}"]) > MAX_NORM for step in range(4)]
    assert clipped == [True, False, True, False]
    return found


def simulated(order: Order) -> SimulatedBackend:
    return SimulatedBackend(threads=1, order=order)


@pytest.mark.parametrize("first", range(0, SEEDS, 40))
def test_random_orders_give_the_bits_of_no_offloading(first: int) -> None:
    """Each seed with another mix of placements, dtype, number of microbatches, and way of taking gradients."""
    for seed in range(first, first + 40):
        draw = Random(seed)
        dtype, microbatches = draw.choice([torch.bfloat16, torch.float32]), draw.choice([1, 4])
        name, late = draw.choice(sorted(MIXES)), frozenset(draw.sample(tuple(Lane), draw.choice([0, 0, 1, 2])))
        options: dict[str, Any] = {
            "context": draw.random() < 0.7,
            "norms": draw.random() < 0.3,
            "overlap": draw.random() < 0.9,
        }
        options["gradients"] = "host" if options["overlap"] and draw.random() < 0.4 else "device"
        options["step_early"] = options["overlap"] and options["gradients"] == "device" and draw.random() < 0.5
        on = simulated(Order(seed=seed, late=late))
        found = train(MIXES[name], on, dtype=dtype, microbatches=microbatches, **options)
        assert differing(found, base(dtype, microbatches)) == [], (seed, name, dtype, microbatches, late, options)


@pytest.mark.parametrize(
    "late", [frozenset(), *(frozenset({lane}) for lane in Lane)], ids=lambda s: "+".join(s) or "none"
)
@pytest.mark.parametrize("mix", MIXES)
def test_h9_each_lane_as_late_as_can_be(mix: str, late: frozenset[Lane]) -> None:
    """The four ways of taking gradients in turn, so that each meets every lane and every mix."""
    turn = list(MIXES).index(mix) + (list(Lane).index(*late) if late else len(Lane))
    options = {"context": turn % 2 == 0, "norms": False, "gradients": ("device", "host")[turn // 2 % 2]}
    for more in ({}, {"gradients": "device", "step_early": True}):
        found = train(MIXES[mix], simulated(Order(late=late)), microbatches=4, **(options | more))  # type: ignore[arg-type]
        assert differing(found, base(torch.bfloat16, 4)) == []


@pytest.mark.parametrize("mix", MIXES)
def test_an_eager_order_and_a_serial_schedule_give_the_same_bits(mix: str) -> None:
    for options in ({}, {"context": False}, {"overlap": False}, {"step_early": True}):
        found = train(MIXES[mix], simulated(Order(eager=True)), microbatches=4, **options)  # type: ignore[arg-type]
        assert differing(found, base(torch.bfloat16, 4)) == []


MIX = MIXES["all three"]


WAYS: Mapping[str, Mapping[str, Any]] = {
    "device": {"microbatches": 1},
    "host": {"gradients": "host", "microbatches": 2},
    "early": {"step_early": True, "microbatches": 1},
}
"""What becomes of gradients of host buckets."""


@functools.cache
def the_schedule(way: str) -> Schedule:
    backend = simulated(Order())
    options = {name: value for name, value in WAYS[way].items() if name != "microbatches"}
    optimizer = hostward.AdamW(Net(torch.bfloat16), backend=backend, **options, **MIX)  # type: ignore[arg-type]
    lanes = {op.lane for op in optimizer.schedule.ops}
    assert lanes == set(Lane)
    return optimizer.schedule


def broken_at(name: str, wait: str, patch: pytest.MonkeyPatch) -> None:
    """Every schedule that the engine makes from now on lacks this wait."""
    patch.setattr(lowered, "lower_step", lambda shape: lowering.lower(shape).without_wait(name, wait))


ORDERS = [Order(late=frozenset(late)) for late in ([], *([lane] for lane in Lane))]
ORDERS += [Order(seed, frozenset(late)) for seed, late in enumerate([[Lane.HOST, Lane.H2D], [Lane.D2H], [Lane.UPDATE]])]
UNSEEN = {
    ("arrive/norm", "upload"): "the head's weights are waited for as well before the norm runs, and come later",
    ("arrive/layers.3", "step"): "the norm's are waited for as well before the layer runs, behind the release",
    ("read/5", "acquire"): "both slots are taken together, and the read before waits for the first of them",
}
"""Races by the rule that cannot come about in this network."""
IMPLIED_HERE = {
    ("arrive", "retire"): "the host lane is waited for later",
    ("lift", "summed"): "of lifts the first waits",
    ("step", "read"): "the norm waited for what came behind the read",
    (
        "download",
        "~add",
    ): "between two turns; between microbatches nothing else orders the two",
    ("download", "~guess"): "between two turns; a gradient that comes again is ordered by nothing else",
}


@pytest.mark.parametrize(
    ("way", "name", "wait"), [(way, *pair) for way in WAYS for pair in waits_of(the_schedule(way))]
)
def test_each_wait_deleted_is_reported_or_gives_wrong_bits_or_was_redundant(
    way: str, name: str, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detector sees what the engine does; what forward reads too early shows in the numbers."""
    broken_at(name, wait, monkeypatch)
    needed = bool(races(repeated(the_schedule(way).without_wait(name, wait), 3)))
    options = {"norms": False, **WAYS[way]}
    reported = wrong = False
    for order in ORDERS if needed else ORDERS[:3]:
        try:
            found = train(MIX, simulated(order), **options)
            wrong |= differing(found, base(torch.bfloat16, options["microbatches"])) != []
        except OrderingError:
            reported = True
        if wrong or reported:
            break
    what, why = name.partition("/")[0], wait.partition("/")[0]
    assert needed or (what, why) in {*IMPLIED, *IMPLIED_HERE}
    assert wrong or reported or not needed or (name, why) in UNSEEN
