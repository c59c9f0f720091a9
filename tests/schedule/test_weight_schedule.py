"""Weights that come and go as a schedule: no race, no wait for nothing, two layers at a time on the device.

Seen red: a fetch that does not wait for the step that writes its source, an arrival that does not wait for its fetch, a
step that overwrites what is still being read.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hostward.core.placement import Placement
from hostward.errors import OrderingError
from hostward.schedule import optimizer as steps, weights as lowering
from hostward.schedule.ops import Lane, Op, Schedule
from hostward.schedule.optimizer import (
    StepShape,
    deferred_uploads,
    lower,
    lower_step,
    pre_forward_trigger,
    upload_trigger,
)
from hostward.schedule.race_check import races, repeated, same_order
from hostward.schedule.weights import WEIGHT_OPS, WeightsShape, lower_weights


@st.composite
def shapes(draw: st.DrawFn) -> WeightsShape:
    layers = draw(st.integers(2, 6))
    offloaded = draw(st.integers(1, layers - 1))
    trained = draw(st.frozensets(st.integers(0, offloaded - 1)))
    unused = draw(st.frozensets(st.integers(0, layers - 1), max_size=2))
    return WeightsShape(layers, offloaded, trained, unused, draw(st.booleans()))


@given(shapes())
def test_no_race_however_often_it_repeats(shape: WeightsShape) -> None:
    schedule = lower_weights(shape)
    assert races(repeated(schedule, 3)) == []
    assert Schedule.from_text(schedule.to_text()) == schedule


@given(shapes())
def test_each_offloaded_layer_comes_and_goes(shape: WeightsShape) -> None:
    names = [op.name for op in lower_weights(shape).ops]
    for v in range(shape.layers):
        for way in "fb":
            wanted = [f"{op}/{v}.{way}" for op in ("room", "fetch", "empty")]
            found = [names.index(name) for name in wanted if name in names]
            skipped = shape.gathered and way == "b" and v in shape.unused  # and nothing else was gathered near it
            assert len(found) in ((3, 0) if skipped else (3 if v < shape.offloaded else 0,))
            assert found == sorted(found)


@pytest.mark.parametrize("gathered", [False, True])
def test_how_many_layers_at_a_time(gathered: bool) -> None:
    """The one in use and the next; of those that are gathered the one that is being read and two ahead."""
    here: set[str] = set()
    most = 0
    for op in lower_weights(WeightsShape(8, 7, gathered=gathered)).ops:
        kind, _, stay = op.name.partition("/")
        here |= {stay} if kind == "room" else set()
        here -= {stay} if kind == "empty" else set()
        most = max(most, len(here))
    assert most == (3 if gathered else 2)
    assert not here


def test_what_is_gathered_is_gone_while_its_layer_runs() -> None:
    names = [op.name for op in lower_weights(WeightsShape(4, 3, gathered=True)).ops]
    for v in range(3):
        for way, run in (("f", "forward"), ("b", "backward")):
            order = [names.index(name) for name in (f"gather/{v}.{way}", f"empty/{v}.{way}", f"{run}/{v}")]
            assert order == sorted(order)


@pytest.mark.parametrize("trained", [(), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("unused", [(), (1,), (0, 3)])
@pytest.mark.parametrize("gathered", [False, True])
def test_each_wait_deleted_is_a_race_or_changes_no_order(
    trained: tuple[int, ...], unused: tuple[int, ...], gathered: bool
) -> None:
    schedule = lower_weights(WeightsShape(4, 3, frozenset(trained), frozenset(unused), gathered))
    whole, caught = repeated(schedule, 3), 0
    for op in schedule.ops:
        for wait in (*op.waits, *(f"~{w}" for w in op.prior)):
            broken = repeated(schedule.without_wait(op.name, wait), 3)
            caught += bool(races(broken))
            assert races(broken) or same_order(whole, broken), f"nothing tells that {op.name} does not wait for {wait}"
    assert caught


@pytest.mark.parametrize("op", ["fetch", "arrive", "empty"])
def test_lowering_runs_the_rule(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "WEIGHT_OPS", {**WEIGHT_OPS, op: replace(WEIGHT_OPS[op], waits=())})
    with pytest.raises(OrderingError, match="nothing orders them"):
        lower_weights(WeightsShape(3, 2, unused=frozenset({0, 1})))


# ---------------------------------------------------------------- the optimizer's own schedule

HOST, DEVICE, STREAMED = Placement.HOST, Placement.DEVICE, Placement.STREAMED
SHAPES = [
    StepShape((HOST,) * 5, ("a", "b", "c", "d", "e"), prefetched=frozenset({1, 2})),
    StepShape((HOST,) * 5, ("a", "b", "b", "c", "c"), prefetched=frozenset({1})),
    StepShape((HOST,) * 4, ("a", "b", "c", "d"), prefetched=frozenset({0, 2})),
    StepShape((HOST, HOST, DEVICE, STREAMED), ("a", "b", "c", "d"), prefetched=frozenset({0}), staging_buffers=1),
    StepShape((HOST,) * 4, ("a", "b", "c", "d"), prefetched=frozenset({0, 1}), overlap=False),
    StepShape((HOST,) * 4, ("a", "b", "c", "d"), prefetched=frozenset({1, 2}), accumulated_on_host=frozenset(range(4))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_what_stands_behind_fetched_weights_is_uploaded_later(shape: StepShape) -> None:
    ops = {op.name: op for op in lower_step(shape).ops}
    for b, placement in enumerate(shape.placements):
        if placement is HOST:
            assert (f"upload/{b}" in ops) is (b not in shape.prefetched)
            if b not in shape.prefetched and shape.overlap:
                late = b > min(shape.prefetched)
                assert ops[f"upload/{b}"].trigger == (upload_trigger(shape.layers[b]) if late else steps.STEP)


def test_behind_which_layer() -> None:
    assert deferred_uploads(SHAPES[0]) == {"b": [], "c": ["d", "e"]}
    assert deferred_uploads(SHAPES[2]) == {"a": ["b"], "c": ["d"]}
    assert deferred_uploads(StepShape((HOST,), ("a",))) == {}


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.overlap], ids=str)
def test_no_race_in_whatever_order_layers_are_used(shape: StepShape) -> None:
    """Uploads come when a fetched layer before them is used, or their own."""
    schedule = lower(shape)
    layers, behind = list(dict.fromkeys(shape.layers)), deferred_uploads(shape)
    rest = [op for op in schedule.ops if not op.trigger.startswith(("use/", "upload/"))]
    for order in itertools.permutations(layers):
        ops: list[Op] = []
        uploaded: set[str] = set()
        for layer in order:
            for wanted in (layer, None, *behind.get(layer, ())):
                if wanted is None:
                    ops += schedule.triggers[pre_forward_trigger(layer)]
                elif wanted not in uploaded:
                    uploaded.add(wanted)
                    ops += schedule.triggers.get(upload_trigger(wanted), ())
        assert len(rest) + len(ops) == len(schedule.ops)
        assert races(repeated(Schedule((*rest, *ops)), 2)) == []


def test_fetches_do_not_stand_behind_the_last_upload() -> None:
    """The link's lane is a queue: an upload that waits for the last host step must not be in it before them."""
    points = lower_step(SHAPES[0]).triggers
    at_step = [op.name for op in points[steps.STEP] if op.lane is Lane.H2D]
    assert at_step == ["upload/0"]
