"""Saved activations as a schedule: no race however microbatches interleave, and no wait for nothing.

Seen red: a release, a reload or an arrival that does not wait; a reload of what was never released; host memory that is
written while the reload of the turn before still reads it.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, strategies as st

from hostward.errors import OrderingError
from hostward.schedule import activations as lowering
from hostward.schedule.activations import LAYER_CALL_OPS, LayerCallsShape, lower_layer_calls
from hostward.schedule.ops import Kind, Op, Schedule
from hostward.schedule.race_check import races, repeated, same_order


@st.composite
def shapes(draw: st.DrawFn) -> LayerCallsShape:
    visits = draw(st.integers(1, 6))
    unused = draw(st.frozensets(st.integers(0, visits - 1), max_size=2))
    window, ahead = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    in_flight = draw(st.none() | st.integers(0, 4))
    return LayerCallsShape(visits, draw(st.integers(0, visits)), window, ahead, unused, in_flight)


@given(shapes())
def test_forward_and_backward_have_no_race_however_often_they_repeat(shape: LayerCallsShape) -> None:
    schedule = lower_layer_calls(shape)
    assert races(repeated(schedule, 3)) == []
    assert Schedule.from_text(schedule.to_text()) == schedule


@given(shapes())
def test_what_left_the_device_comes_back_and_goes_again(shape: LayerCallsShape) -> None:
    names = [op.name for op in lower_layer_calls(shape).ops]
    for v in range(shape.layer_calls):
        few = shape.in_flight is not None and shape.in_flight < shape.window
        landed = shape.offloaded - shape.in_flight if few and shape.in_flight is not None else 0
        released = v < max(landed, min(shape.offloaded, shape.layer_calls - shape.window))
        assert (f"offload/{v}" in names) is (v < shape.offloaded)
        assert (f"reload/{v}" in names) is released
        assert (f"drop/{v}" in names) is released
        assert (f"release/{v}" in names) is (v < shape.offloaded)
        if released:
            order = [names.index(f"{op}/{v}") for op in ("made", "offload", "release", "room", "reload", "drop")]
            assert order == sorted(order)


def test_at_most_a_window_of_visits_and_the_one_that_runs_is_on_the_device() -> None:
    for window in (1, 2, 3):
        for ahead in (0, 1):
            here: set[int] = set()
            most = 0
            for op in lower_layer_calls(LayerCallsShape(8, 8, window, ahead)).ops:
                kind, _, visit = op.name.partition("/")
                if kind in ("forward", "room"):
                    here.add(int(visit))
                elif kind in ("release", "drop"):
                    here.discard(int(visit))
                most = max(most, len(here))
            assert most <= window + 1 + ahead


@given(shapes())
def test_a_bound_on_copies_in_flight_holds_after_each_layer(shape: LayerCallsShape) -> None:
    sent: set[str] = set()
    most = shape.offloaded if shape.in_flight is None else shape.in_flight
    ops = lower_layer_calls(shape).ops
    for i, op in enumerate(ops):
        kind, _, visit = op.name.partition("/")
        if kind == "offload":
            sent.add(visit)
        elif kind == "release":
            sent.discard(visit)
        if op.trigger.startswith("back/"):
            break
        if i + 1 == len(ops) or ops[i + 1].trigger != op.trigger:
            assert len(sent) <= most


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("offloaded", "window"), [(3, 1), (4, 1), (2, 2), (4, 3), (1, 3)])
@pytest.mark.parametrize("unused", [(), (1,)])
@pytest.mark.parametrize("in_flight", [None, 0, 1])
def test_h6_each_wait_deleted_is_a_race_or_changes_no_order(
    offloaded: int, window: int, ahead: int, unused: tuple[int, ...], in_flight: int | None
) -> None:
    schedule = lower_layer_calls(LayerCallsShape(4, offloaded, window, ahead, frozenset(unused), in_flight))
    whole, caught = repeated(schedule, 3), 0
    for op in schedule.ops:
        for wait in (*op.waits, *(f"~{w}" for w in op.prior)):
            broken = repeated(schedule.without_wait(op.name, wait), 3)
            caught += bool(races(broken))
            assert races(broken) or same_order(whole, broken), f"nothing tells that {op.name} does not wait for {wait}"
    assert caught


def interleaved(shape: LayerCallsShape, microbatches: int, random: Random) -> Schedule:
    """Several forwards and backwards, each in its own order, mixed at random; each with host memory of its own, which
    the next microbatch in the same place takes over.
    """
    whole = lower_layer_calls(shape).ops
    split = next((i for i, op in enumerate(whole) if op.trigger.startswith("back/")), len(whole))
    waiting = {m: list(whole) for m in range(microbatches)}
    order: list[tuple[int, Op]] = []
    while waiting:
        m = random.choice(sorted(waiting))
        # A visit's operations of one point stay together: hooks are not interrupted.
        point = waiting[m][0].trigger
        while waiting[m] and waiting[m][0].trigger == point:
            order.append((m, waiting[m].pop(0)))
        if not waiting[m]:
            del waiting[m]
    assert split
    ops = []
    for m, op in order:

        def own(names: tuple[str, ...], m: int = m) -> tuple[str, ...]:
            return tuple(f"{name}.{m}" for name in names)

        ops.append(
            replace(
                op, name=f"{op.name}.{m}", reads=own(op.reads), writes=own(op.writes), waits=own(op.waits), prior=()
            )
        )
    return Schedule(tuple(ops))


@given(shapes(), st.integers(2, 4), st.integers(0, 2**32))
def test_h37_microbatches_may_interleave_in_any_way(shape: LayerCallsShape, microbatches: int, seed: int) -> None:
    assert races(interleaved(shape, microbatches, Random(seed))) == []


def test_lowering_runs_the_rule_on_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LayerCallsShape(3, 2)
    for name, waits, prior in (("reload", (), ()), ("release", (), ()), ("arrive", (), ())):
        broken = {**LAYER_CALL_OPS, name: replace(LAYER_CALL_OPS[name], waits=waits, prior=prior)}
        monkeypatch.setattr(lowering, "LAYER_CALL_OPS", broken)
        with pytest.raises(OrderingError, match="nothing orders them"):
            lower_layer_calls(shape)


def test_the_model_is_part_of_the_schedule() -> None:
    kinds = [op.kind for op in lower_layer_calls(LayerCallsShape(3, 2)).ops]
    assert kinds.count(Kind.MODEL) == 6
    assert kinds.count(Kind.COPY) == 4
