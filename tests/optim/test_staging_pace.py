"""How many reads of state backward hides, from one turn of which everything was read in it."""

from __future__ import annotations

import pytest

from hostward.optim.staging_buffers import Pace
from hostward.schedule.ops import Lane
from hostward.schedule.staging import MIN_STAGING_BUFFERS


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


def timed(watch: Watch, reads: int = 4) -> Pace:
    pace = Pace(watch)
    pace.arm()
    for _ in range(reads):
        pace.begins()
        pace.issued()
    pace.backward_is_over()
    return pace


@pytest.mark.parametrize(
    ("over", "ahead"),
    [
        (3.5, 3),  # two are there, and one is being read
        (3.0, 3),
        (5.0, 4),
        (9.0, 4),
        (1.5, MIN_STAGING_BUFFERS),
        (0.5, MIN_STAGING_BUFFERS),
    ],
)
def test_those_that_had_begun_when_backward_was_over(over: float, ahead: int) -> None:
    watch = Watch(0.0, 2.0, 3.0, 4.0, 5.0, over)
    assert timed(watch).ahead(4) == ahead
    assert watch.stamped == [Lane.COMPUTE, *[Lane.H2D] * 4, Lane.COMPUTE]


@pytest.mark.parametrize("missing", [1, 4, 5])
def test_nothing_is_told_before_the_device_has_been_there_and_nothing_twice(missing: int) -> None:
    watch = Watch(0.0, 2.0, 3.0, 4.0, 5.0, 3.5)
    watch.at_s[missing], there = None, watch.at_s[missing]
    pace = timed(watch)
    assert pace.ahead(4) is None
    watch.at_s[missing] = there
    assert pace.ahead(4) == 3
    assert pace.ahead(4) is None


def test_one_turn_is_timed() -> None:
    watch = Watch(0.0, 2.0, 3.0, 4.0, 5.0, 3.5)
    pace = timed(watch)
    for _ in range(2):
        pace.begins()
        pace.issued()
        pace.backward_is_over()
    assert len(watch.stamped) == 6


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
