"""Schedules print and parse back, and refuse what is no schedule.

Seen red: `waits` left out of the text; the check of names, of doubles and of forward waits taken out.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostward.errors import ConfigError
from hostward.schedule import Kind, Lane, Op, Schedule, operands

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
                draw(st.none() | st.integers(0, 999)),
                tuple(draw(st.lists(NAMES, max_size=3))),
                tuple(draw(st.lists(NAMES, max_size=3))),
                tuple(draw(earlier)),
            )
        )
    return Schedule(tuple(ops))


@given(schedules())
def test_the_text_parses_back(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_comments_and_blank_lines() -> None:
    text = "# a step\n\nop a kind=norm lane=compute writes=x\n  op b kind=copy lane=d2h reads=x waits=a\n"
    schedule = Schedule.from_text(text)
    assert [op.name for op in schedule.ops] == ["a", "b"]
    assert operands(schedule.ops) == {"x"}
    assert schedule.by_name["b"].waits == ("a",)
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
        ("op a kind=norm lane=compute reads=x,,y", "'' is no name"),
        ("op a kind=norm lane=compute waits=b", "'a' waits for 'b', which is not issued before it"),
        ("op a kind=norm lane=compute waits=a", "'a' waits for 'a', which is not issued before it"),
        ("op a kind=norm lane=compute\nop a kind=norm lane=compute", "two operations are named 'a'"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule.from_text(text)
    assert says in str(caught.value)
