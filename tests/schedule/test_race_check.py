"""The ordering rule on literals and on lowered schedules, in every order in which training may reach their points.

Seen red: single waits left out of `lower` (upload after the host step, read after the write of the slot's last bucket,
read after the turn before, retire not waited for by arrivals, a release without its wait); `Accesses.unordered` without
readers, and without the last writer; `repeated` without `prior`; a wait that nothing needs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st
from step_orders import D, H, S, absent_sets, as_reached, in_a_row, shapes, stepped, turns_of, waits_of

from hostward.core.placement import Placement
from hostward.errors import OrderingError
from hostward.optim.op_binding import Schedules
from hostward.schedule import optimizer as lowering
from hostward.schedule.ops import Kind, Lane, Op, Schedule
from hostward.schedule.optimizer import GRADIENTS_IN_FLIGHT, StepShape, lower, lower_step, staging_buffer_by_bucket
from hostward.schedule.race_check import races, repeated, require_ordered, same_order, stamps

SEEDS = st.integers(0, 2**32)


@given(shapes())
def test_lowered_steps_have_no_race_however_often_they_repeat(shape: StepShape) -> None:
    schedule = lower_step(shape)
    assert schedule == lower(shape)
    assert races(repeated(schedule, 3)) == []
    present = set(range(len(shape.placements))) - shape.absent
    assert sorted(stepped(schedule)) == sorted(present)  # type: ignore[type-var]
    assert Schedule.from_text(schedule.to_text()) == schedule


@pytest.mark.parametrize("transient", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_mix_of_up_to_four_placements_is_ordered(slots: int, transient: bool) -> None:
    for n in (1, 2, 3, 4):
        for placements in itertools.product(Placement, repeat=n):
            count = slots if S in placements else 0
            layers = tuple(str(b // 2) for b in range(n))
            for ahead in {None, min(1, count)}:
                lower_step(
                    StepShape(placements, layers, staging_buffers=count, prefetch_depth=ahead, transient=transient)
                )


@settings(max_examples=300)
@given(shapes(absent=False), SEEDS, st.data())
def test_any_order_of_points_and_any_absent_buckets_are_ordered(
    shape: StepShape, seed: int, data: st.DataObject
) -> None:
    absent = data.draw(st.lists(absent_sets(len(shape.placements)), min_size=2, max_size=3))
    assert races(turns_of(shape, absent, Random(seed))) == []


def test_writes_of_state_wait_for_their_steps_alone() -> None:
    """Seen red: they waited for the CPU's steps of earlier buckets, too, and what was streamed next with them."""
    shape = StepShape((S, H, S, H, S, D, H, S, S), ("a",) * 9, staging_buffers=2)
    waits = {op.name: op.waits for op in lower(shape).ops if op.name.startswith("write/")}
    assert waits == {f"write/{b}": (f"step/{b}",) for b in (0, 2, 4, 7, 8)}


MIX = StepShape((D, H, S, H, S, S), tuple("aabbcc"), staging_buffers=2, transient=True)
SHAPES = {
    "mix": MIX,
    "kept slots": replace(MIX, transient=False),
    "one slot": replace(MIX, staging_buffers=1),
    "one ahead": StepShape((S, H, S, S, H, S), tuple("aabbcc"), staging_buffers=3, prefetch_depth=1, transient=True),
    "serial": replace(MIX, overlap=False),
    "host": StepShape((H,) * 3, tuple("aab")),
    "summed": StepShape(
        (H, D, H, H, S, H, H), tuple("aabbcdd"), staging_buffers=1, accumulated_on_host=frozenset((0, 2, 5, 6))
    ),
    "all summed": StepShape((H,) * 5, tuple("aabbc"), accumulated_on_host=frozenset(range(5))),
    "streamed": StepShape((S,) * 4, tuple("aabc"), staging_buffers=3, transient=True),
    "device": StepShape((D,) * 3, tuple("abb")),
    "fetched": StepShape((H,) * 5, tuple("abccd"), prefetched=frozenset((1, 2))),
    "fetched, summed": StepShape(
        (H,) * 4, tuple("abcd"), accumulated_on_host=frozenset(range(4)), prefetched=frozenset((0, 2))
    ),
    "guessed": StepShape((H,) * 4, tuple("aabc"), guessed=frozenset(range(4))),
    "guessed in part": StepShape(
        (H, D, H, S, H, H),
        tuple("aabbcc"),
        staging_buffers=1,
        guessed=frozenset((0, 4)),
        accumulated_on_host=frozenset((2,)),
    ),
    "guessed, fetched": StepShape((H,) * 4, tuple("abcd"), guessed=frozenset((0, 3)), prefetched=frozenset((1,))),
    "fetched, mixed": StepShape((H, H, D, S), tuple("abcd"), staging_buffers=1, prefetched=frozenset((0,))),
}
IMPLIED = {
    ("release", "step"): "the device stepped on this lane, or the arrival before it waited for the step",
    ("step", "norm"): "device buckets are stepped on the lane of the norm; of streamed ones the first waits",
    ("step", "download"): "the release before the norm waited for it",
    ("step", "fetch"): "of host buckets the first waits",
    ("upload", "norm"): "the host step waited for the scalars",
    ("read", "~written"): "the slot's memory was waited for, and with it all writes of the lane up to its own",
    ("read", "acquire"): "of reads the first waits, if it is there",
    ("arrive", "step"): "a later step of the lane was waited for",
}
"""Waits that may be redundant, and what implies them. They are said all the same: which operations a turn leaves out,
and in which order points come, is not known when a schedule is made.
"""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_h6_each_wait_deleted_is_caught_or_proved_redundant(shape: StepShape) -> None:
    schedule = lower_step(shape)
    whole = repeated(schedule, 3)
    assert races(whole) == []
    for name, wait in waits_of(schedule):
        broken = repeated(schedule.without_wait(name, wait), 3)
        if not races(broken) and not raced_in_another_order(shape, name, wait):
            assert same_order_of_memory(whole, broken), f"nothing tells that {name} does not wait for {wait}"
            kinds = name.partition("/")[0], wait.partition("/")[0]
            assert kinds in IMPLIED, f"{name} need not wait for {wait}"


def raced_in_another_order(shape: StepShape, name: str, wait: str) -> bool:
    """Whether some order of points or some absent buckets show a race without this wait."""
    numbers = range(len(shape.placements))
    for seed in range(60):
        random = Random(seed)
        absent = [frozenset(random.sample(numbers, random.randint(0, len(numbers) - 1))) for _ in range(2)]
        whole, *schedules = [
            lower(replace(shape, absent=missing)).without_wait(name, wait) for missing in (frozenset(), *absent)
        ]
        if races(in_a_row([as_reached(whole, schedule, random) for schedule in schedules])):
            return True
    return False


def same_order_of_memory(a: Schedule, b: Schedule) -> bool:
    """Whether every pair of operations that touch memory is ordered alike."""
    first, second = stamps(a), stamps(b)
    touching = [op.name for op in a.ops if op.reads or op.writes]
    return all(
        first[earlier].precedes(first[later]) == second[earlier].precedes(second[later])
        for earlier, later in itertools.combinations(touching, 2)
    )


def test_a_wait_for_the_turn_before_stands_for_the_newest_issue() -> None:
    read = Op("read/0", Kind.COPY, Lane.H2D, reads=("state/0",), prior=("written",))
    write = Op("write/0", Kind.COPY, Lane.D2H, writes=("state/0",), waits=("read/0",))
    written = Op("written", Kind.JOIN, Lane.D2H)
    schedule = Schedule((read, write, written))
    assert races(schedule) == []
    assert races(repeated(schedule, 2)) == []
    assert [r.operand for r in races(repeated(schedule.without_wait("read/0", "~written"), 2))] == ["state/0"]
    assert races(in_a_row([schedule.ops, (), schedule.ops])) == []
    assert repeated(schedule, 2).by_name["read/0.1"].waits == ("written.0",)


def test_a_race_is_told_with_its_cure() -> None:
    schedule = lower_step(StepShape((D, H), ("a", "b"))).without_wait("upload/1", "step/1")
    with pytest.raises(OrderingError) as caught:
        require_ordered(schedule)
    assert caught.value.what.startswith("'upload/1' on lane h2d and 'step/1' on lane host both use 'source/1'")
    assert caught.value.fix == "let 'upload/1' wait for the event of 'step/1'"


def test_lowering_runs_the_rule_on_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = StepShape((S,), ("a",), staging_buffers=1)
    for name, wait in (("step/0", "read/0"), ("read/0", "~written")):
        broken = lower(shape).without_wait(name, wait)
        monkeypatch.setattr(lowering, "lower", lambda _, broken=broken: broken)
        with pytest.raises(OrderingError, match="nothing orders them"):
            lower_step(shape)


def test_a_free_and_a_second_writer_conflict_with_readers() -> None:
    read = Op("read", Kind.COPY, Lane.D2H, reads=("x",))
    for kind in (Kind.RETIRE, Kind.ADAMW):
        later = Op("later", kind, Lane.HOST, writes=("x",))
        assert [r.operand for r in races(Schedule((read, later)))] == ["x"]
    both_read = Schedule((read, Op("also", Kind.COPY, Lane.HOST, reads=("x",))))
    assert races(both_read) == []
    assert set(stamps(both_read)) == {"read", "also"}


def test_order_is_kept_through_lanes_and_through_chains_of_waits() -> None:
    ops = (
        Op("a", Kind.NORM, Lane.COMPUTE, writes=("x",)),
        Op("b", Kind.COPY, Lane.D2H, waits=("a",)),
        Op("c", Kind.ADAMW, Lane.HOST, waits=("b",)),
        Op("d", Kind.ADAMW, Lane.HOST, writes=("x",)),
    )
    schedule = Schedule(ops)
    assert races(schedule) == []
    assert same_order(schedule, Schedule((*ops[:3], replace(ops[3], waits=("a", "c")))))
    for name, wait in waits_of(schedule):
        assert not same_order(schedule, schedule.without_wait(name, wait))
        assert [(r.earlier.name, r.later.name) for r in races(schedule.without_wait(name, wait))] == [("a", "d")]


def test_schedules_without_some_buckets_are_checked_when_they_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = Schedules(StepShape((H, S, H, S), tuple("abcd"), staging_buffers=2, transient=True))
    schedules.points(frozenset({0}))
    download = lowering._download
    monkeypatch.setattr(lowering, "_download", lambda b: replace(download(b), waits=()))
    schedules.points(frozenset({0}))  # kept
    with pytest.raises(OrderingError, match="both use 'gradient/2'"):
        schedules.points(frozenset({1}))


def test_streamed_buckets_take_the_slots_in_turn_and_the_first_are_read_before_the_norm() -> None:
    placements = (D, S, H, S, S, S)
    assert staging_buffer_by_bucket(placements, 2) == {1: 0, 3: 1, 4: 0, 5: 1}
    schedule = lower_step(StepShape(placements, tuple("abcdef"), staging_buffers=2, transient=True))
    at = {op.name: op.trigger for op in schedule.ops}
    assert [at[f"read/{b}"] for b in (1, 3, 4, 5)] == ["stage/0", "stage/1", "step", "step"]
    assert schedule.by_name["read/4"].waits == ("acquire/0", "write/1")
    assert [at[f"acquire/{k}"] for k in (0, 1)] == ["stage/0", "stage/1"]
    assert {k: (at[f"unstage/{k}"], schedule.by_name[f"unstage/{k}"].waits) for k in (0, 1)} == {
        0: ("unstage/0", ("write/4",)),
        1: ("unstage/1", ("write/5",)),
    }
    names = [op.name for op in schedule.ops]
    assert names.index("read/3") < names.index("norm") < names.index("step/1")


def test_state_that_backward_does_not_hide_comes_in_order_of_use_with_the_weights() -> None:
    """Each read stands where the streamed bucket `ahead` before it is stepped, or later, where its slot is written."""
    shape = StepShape((S, H, S, S, H, S, S), ("a",) * 7, staging_buffers=3, prefetch_depth=1, transient=True)
    schedule = lower_step(shape)
    at = {op.name: op.trigger for op in schedule.ops}
    assert [b for b in (0, 2, 3, 5, 6) if at[f"read/{b}"].startswith("stage/")] == [0]
    link = [op.name for op in schedule.ops if op.lane is Lane.H2D]
    assert link == ["read/0", "read/2", "upload/1", "read/3", "read/5", "upload/4", "read/6"]
    waits = [schedule.by_name[f"read/{b}"].waits for b in (2, 3, 5)]
    assert waits == [("acquire/1",), ("acquire/2",), ("acquire/0", "write/0")]
    assert [at[f"acquire/{k}"] for k in range(3)] == ["stage/0", "stage/1", "stage/2"]
    whole = lower_step(replace(shape, prefetch_depth=None))
    assert [op.name for op in whole.ops if op.lane is Lane.H2D][:4] == ["read/0", "read/2", "read/3", "read/5"]


def test_at_most_two_gradients_are_on_their_way_out() -> None:
    schedule = lower_step(StepShape((H,) * 6, ("a",) * 6))
    held = most = 0
    for op in schedule.ops:
        held += op.name.startswith("download/")
        held -= op.name.startswith("release/")
        most = max(most, held)
    assert most == GRADIENTS_IN_FLIGHT


def test_a_serial_step_has_everything_in_the_step() -> None:
    for op in lower_step(replace(MIX, overlap=False)).ops:
        assert op.trigger == "step" or op.kind is Kind.MODEL
