"""Lanes of work: order, waits, shared speed.

Seen red: waits ignored, a lane that starts two pieces at once, speeds that nothing slows.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.plan.lane_simulator import NOTHING, UNSHARED, Program, Queue, Slowdown, run

HALVED: Slowdown = tuple(
    (1.0, *((0.5, 0.5) if bits & 3 == 3 else (1.0, 1.0)), 1.0 - 0.25 * bool(bits & 3)) for bits in range(8)
)


def test_a_lane_works_in_order_and_waits() -> None:
    program = Program()
    first = program.add("a", Queue.COMPUTE, 2.0)
    copied = program.add("b", Queue.D2H, 3.0, [first])
    program.add("c", Queue.COMPUTE, 1.0)
    program.add("d", Queue.COMPUTE, 1.0, [copied, NOTHING])
    timeline = run(program)
    assert timeline.starts_s == (0.0, 2.0, 2.0, 5.0)
    assert timeline.ends_s == (2.0, 5.0, 3.0, 6.0)


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


@given(programs)
def test_sharing_makes_no_program_end_earlier_on_lanes_that_share(
    rows: list[tuple[Queue, float, list[int]]],
) -> None:
    program = build([(queue, seconds, []) for queue, seconds, _ in rows])
    alone, shared = run(program, UNSHARED), run(program, HALVED)
    assert max(shared.ends_s) >= max(alone.ends_s) - 1e-9
