"""Lanes of work: order, waits, shared speed.

Seen red: waits ignored, a lane that starts two pieces at once, speeds that nothing slows.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.errors import NativeError
from hostward.plan.lane_simulator import UNSHARED, Program, Queue, Slowdown, run

HALVED: Slowdown = tuple(
    (1.0, *((0.5, 0.5) if bits & 3 == 3 else (1.0, 1.0)), 1.0 - 0.25 * bool(bits & 3)) for bits in range(8)
)


def test_a_lane_works_in_order_and_waits() -> None:
    program = Program()
    first = program.add("a", Queue.COMPUTE, 2.0)
    copied = program.add("b", Queue.D2H, 3.0, [first])
    program.add("c", Queue.COMPUTE, 1.0)
    program.add("d", Queue.COMPUTE, 1.0, [copied])
    timeline = run(program)
    assert list(timeline.starts_s) == [0.0, 2.0, 2.0, 5.0]
    assert list(timeline.ends_s) == [2.0, 5.0, 3.0, 6.0]


def test_speed_changes_when_another_lane_starts_and_ends() -> None:
    program = Program()
    program.add("up", Queue.H2D, 4.0)
    wait = program.add("compute", Queue.COMPUTE, 2.0)
    program.add("down", Queue.D2H, 1.0, [wait])
    timeline = run(program, HALVED)
    # 2 s alone, then both at half speed: down ends after 2 s more, when one second of up is left.
    assert timeline.ends_s[2] == pytest.approx(4.0)
    assert timeline.ends_s[0] == pytest.approx(5.0)


def test_the_host_slows_beside_copies() -> None:
    program = Program()
    program.add("host", Queue.HOST, 3.0)
    program.add("down", Queue.D2H, 2.0)
    assert run(program, HALVED).ends_s[0] == pytest.approx(2.0 + 1.5)


def test_rounds_wait_for_those_before() -> None:
    """Seen red: waits for the round before that are for work of the first round."""
    program = Program()
    program.add("copy", Queue.H2D, 1.0, [-1])  # waits for the compute of the round before
    program.add("compute", Queue.COMPUTE, 2.0)
    timeline = run(program, rounds=3)
    assert list(timeline.starts_s) == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    assert list(timeline.ends_s) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_what_waits_for_later_work_is_an_error() -> None:
    """Seen red: times of a lane that never goes on."""
    program = Program()
    program.add("first", Queue.H2D, 1.0, [1])
    program.add("second", Queue.H2D, 1.0)
    with pytest.raises(NativeError, match="issued after it"):
        run(program)
    assert list(run(Program(), rounds=2).ends_s) == []


programs = st.lists(
    st.tuples(st.sampled_from(list(Queue)), st.floats(0, 5), st.lists(st.integers(0, 30), max_size=3)),
    min_size=1,
    max_size=30,
)


def build(rows: list[tuple[Queue, float, list[int]]]) -> Program:
    program = Program()
    for i, (queue, seconds, waits) in enumerate(rows):
        program.add("w", queue, seconds, [w % i for w in waits] if i else ())
    return program


@given(programs)
def test_no_lane_is_faster_than_its_work_and_nothing_starts_before_what_it_waits_for(
    rows: list[tuple[Queue, float, list[int]]],
) -> None:
    program = build(rows)
    timeline = run(program, HALVED)
    for i, (seconds, waits) in enumerate(zip(program.seconds, program.waits, strict=True)):
        assert timeline.ends_s[i] - timeline.starts_s[i] >= seconds - 1e-9
        assert all(timeline.ends_s[w] <= timeline.starts_s[i] for w in waits)
    for numbers in program.lanes:
        ends = [timeline.ends_s[i] for i in numbers]
        assert all(end <= timeline.starts_s[after] + 1e-9 for end, after in zip(ends[:-1], numbers[1:], strict=True))
        assert max(ends, default=0.0) <= sum(program.seconds) * 4 + 1e-6


def definition(program: Program, slowdown: Slowdown) -> tuple[list[float], list[float]]:
    """Starts and ends, by the next moment at which something ends, of one round."""
    left, starts, ends = dict[Queue, float](), [math.inf] * len(program.seconds), [math.inf] * len(program.seconds)
    queues, now = {queue: list(lane) for queue, lane in zip(Queue, program.lanes, strict=True)}, 0.0
    while any(queues.values()):
        for queue, lane in queues.items():
            if lane and queue not in left and all(ends[w] <= now for w in program.waits[lane[0]]):
                left[queue], starts[lane[0]] = program.seconds[lane[0]], now
        busy = sum(1 << (queue - 1) for queue in left if queue)
        passed = min(seconds / slowdown[busy][queue] for queue, seconds in left.items())
        now += passed
        for queue in list(left):
            left[queue] -= passed * slowdown[busy][queue]
            if left[queue] <= 1e-12:
                del left[queue]
                ends[queues[queue].pop(0)] = now
    return starts, ends


@given(programs)
def test_native_times_are_those_of_the_definition_bit_by_bit(rows: list[tuple[Queue, float, list[int]]]) -> None:
    """Seen red: a lane that starts after the others have gone on; a lane's own speed for all."""
    program = build(rows)
    timeline = run(program, HALVED)
    assert (list(timeline.starts_s), list(timeline.ends_s)) == definition(program, HALVED)


@given(programs, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5))
def test_rounds_are_one_program_in_which_the_work_is_repeated(
    rows: list[tuple[Queue, float, list[int]]], before: list[tuple[int, int]]
) -> None:
    """Compare times bit by bit. Seen red: waits for the round before that point one piece of work too far."""
    count = len(rows)
    waits = [[w % i for w in waits] if i else [] for i, (_, _, waits) in enumerate(rows)]
    for number, wait in before:
        waits[number % count].append(wait % count - count)
    short, long = Program(), Program()
    for (queue, seconds, _), of in zip(rows, waits, strict=True):
        short.add("w", queue, seconds, of)
    for start in (0, count):
        for (queue, seconds, _), of in zip(rows, waits, strict=True):
            long.add("w", queue, seconds, [start + w for w in of if start + w >= 0])
    assert run(short, HALVED, rounds=2) == run(long, HALVED)


@given(programs)
def test_sharing_makes_no_program_end_earlier_on_lanes_that_share(
    rows: list[tuple[Queue, float, list[int]]],
) -> None:
    program = build([(queue, seconds, []) for queue, seconds, _ in rows])
    alone, shared = run(program, UNSHARED), run(program, HALVED)
    assert max(shared.ends_s) >= max(alone.ends_s) - 1e-9
