"""How many reads of state backward hides, from one turn of which everything was read in it."""

from __future__ import annotations

import pytest

from hostward.lowering.staging import FEWEST
from hostward.schedule import Lane
from hostward.training.pace import Pace


class Watch:
    """Comes to places at given seconds, in order; None: not yet."""

    def __init__(self, *at_s: float | None) -> None:
        self.at_s = list(at_s)
        self.stamped: list[Lane] = []

    def stamp(self, lane: Lane) -> int:
        self.stamped.append(lane)
        return len(self.stamped) - 1

    def seconds(self, first: int, last: int) -> float | None:
        begin, end = self.at_s[first], self.at_s[last]
        return None if begin is None or end is None else end - begin


def timed(watch: Watch) -> Pace:
    pace = Pace(watch)
    pace.arm()
    pace.begins()
    pace.issued()
    pace.backward_is_over()
    return pace


@pytest.mark.parametrize(
    ("began", "read", "over", "ahead"),
    [
        (1.0, 5.0, 3.0, 6),  # half of ten, and the one that was being read
        (1.0, 5.0, 5.0, 10),
        (1.0, 5.0, 9.0, 10),
        (1.0, 5.0, 1.01, FEWEST),
        (1.0, 5.0, 1.0, FEWEST),
        (0.0, 0.0, 0.0, 10),
    ],
)
def test_those_that_had_begun_when_backward_was_over(began: float, read: float, over: float, ahead: int) -> None:
    watch = Watch(began, read, over)
    assert timed(watch).ahead(10) == ahead
    assert watch.stamped == [Lane.COMPUTE, Lane.H2D, Lane.COMPUTE]


def test_nothing_is_told_before_the_device_has_been_there_and_nothing_twice() -> None:
    watch = Watch(1.0, 5.0, None)
    pace = timed(watch)
    assert pace.ahead(10) is None
    watch.at_s[2] = 3.0
    assert pace.ahead(10) == 6
    assert pace.ahead(10) is None


def test_one_turn_is_timed() -> None:
    watch = Watch(1.0, 5.0, 3.0)
    pace = timed(watch)
    pace.begins()
    pace.issued()
    pace.backward_is_over()
    assert len(watch.stamped) == 3


@pytest.mark.parametrize("armed", [False, True])
def test_without_a_clock_or_before_it_is_asked_for_nothing_is_timed(armed: bool) -> None:
    watch = Watch()
    pace = Pace(None if armed else watch)
    if armed:
        pace.arm()
    pace.begins()
    pace.issued()
    pace.backward_is_over()
    assert pace.ahead(10) is None
    assert watch.stamped == []


def test_a_step_whose_staging_was_not_timed_from_its_beginning_is_not_timed() -> None:
    """The slots were filled before: by a turn that was given up."""
    watch = Watch()
    pace = Pace(watch)
    pace.arm()
    pace.backward_is_over()
    assert watch.stamped == []
