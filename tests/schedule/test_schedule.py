"""Schedules print and parse back, and refuse what is no schedule.

Seen red: `waits`, `prior` and `point` left out of the text or not parsed; the check of names, of doubles, of forward
waits and of unknown ones taken out; `points` out of order; `without_wait` that takes `~x` for `x`.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hostward.errors import ConfigError
from hostward.schedule.ops import Kind, Lane, Op, Schedule, operands

NAMES = st.from_regex(r"[a-z][a-z0-9_.]{0,6}(/[0-9]{1,3})?", fullmatch=True)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    names = draw(st.lists(NAMES, unique=True, max_size=12))
    ops = []
    for i, name in enumerate(names):
        earlier = st.lists(st.sampled_from(names[:i]), unique=True, max_size=3) if i else st.just([])
        ops.append(
            Op(
                name,
                draw(st.sampled_from(Kind)),
                draw(st.sampled_from(Lane)),
                draw(st.just("step") | NAMES),
                draw(st.none() | st.integers(0, 999)),
                tuple(draw(st.lists(NAMES, max_size=3))),
                tuple(draw(st.lists(NAMES, max_size=3))),
                tuple(draw(earlier)),
                tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=2))),
            )
        )
    return Schedule(tuple(ops))


@given(schedules())
def test_the_text_parses_back(schedule: Schedule) -> None:
    parsed = Schedule.from_text(schedule.to_text())
    assert parsed == schedule
    assert parsed.to_text() == schedule.to_text()


@given(schedules())
def test_points_hold_every_operation_once_in_order_of_issue(schedule: Schedule) -> None:
    points = schedule.triggers
    assert sorted(op.name for ops in points.values() for op in ops) == sorted(schedule.by_name)
    for point, ops in points.items():
        assert ops == tuple(op for op in schedule.ops if op.trigger == point)
    firsts = [schedule.ops.index(ops[0]) for ops in points.values()]
    assert firsts == sorted(firsts)


@given(schedules(), st.data())
def test_without_wait_takes_one_wait_of_one_operation(schedule: Schedule, data: st.DataObject) -> None:
    waits = [(op.name, w) for op in schedule.ops for w in (*op.waits, *(f"~{w}" for w in op.prior))]
    if not waits:
        return
    name, wait = data.draw(st.sampled_from(waits))
    changed = schedule.without_wait(name, wait)
    for before, after in zip(schedule.ops, changed.ops, strict=True):
        if before.name != name:
            assert after == before
        elif wait.startswith("~"):
            assert after.prior == tuple(w for w in before.prior if w != wait[1:])
            assert after.waits == before.waits
        else:
            assert after.waits == tuple(w for w in before.waits if w != wait)
            assert after.prior == before.prior


def test_comments_and_blank_lines() -> None:
    text = "# a step\n\nop a kind=norm lane=compute writes=x\n"
    text += "  op b point=use/a kind=copy lane=d2h reads=x waits=a prior=b\n"
    schedule = Schedule.from_text(text)
    assert [op.name for op in schedule.ops] == ["a", "b"]
    assert operands(schedule.ops) == {"x"}
    assert schedule.by_name["b"] == Op("b", Kind.COPY, Lane.D2H, "use/a", None, ("x",), (), ("a",), ("b",))
    assert schedule.by_name["a"].trigger == "step"
    assert schedule.without_wait("b", "a").by_name["b"].waits == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step a", "line 1: expected 'op NAME ...'"),
        ("op", "line 1: expected 'op NAME ...'"),
        ("op a lane=compute", "line 1: 'kind'"),
        ("op a kind=norm lane=moon", "'moon' is not a valid Lane"),
        ("op a kind=norm lane=compute bucket=x", "line 1: invalid literal"),
        ("op a kind=norm lane=compute colour=red", "cannot read 'colour=red'"),
        ("op a kind=norm lane=compute reads=", "cannot read 'reads='"),
        ("op a kind=norm kind=copy lane=compute", "cannot read 'kind=copy'"),
        ("op a kind=norm lane=compute reads=x,,y", "'' is not a valid name"),
        ("op a kind=norm lane=compute waits=b", "'a' waits for 'b', which is not issued before it"),
        ("op a kind=norm lane=compute waits=a", "'a' waits for 'a', which is not issued before it"),
        ("op a kind=norm lane=compute prior=b", "'a' waits for 'b', which is not issued before it"),
        ("op a kind=norm lane=compute prior=", "cannot read 'prior='"),
        ("op a kind=norm lane=compute point=a,b", "'a,b' is not a valid name"),
        ("op a point=b point=c kind=norm lane=compute", "cannot read 'point=c'"),
        ("op a kind=norm lane=compute\nop a kind=norm lane=compute", "two operations are named 'a'"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule.from_text(text)
    assert says in str(caught.value)
