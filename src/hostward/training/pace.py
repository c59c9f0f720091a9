"""How much state is read while backward runs, and how much in order of use behind the norm, with the host's weights.

Reads stand on the link's lane before every upload of the step. Those that backward hides cost nothing there; those that
it does not hide let the first layers wait for the last ones' state. How many it hides is measured once, in the turn
after the slots were settled, in which every slot is filled as soon as it is taken.
"""

from __future__ import annotations

from typing import Any, Protocol

from hostward.lowering.staging import FEWEST
from hostward.schedule import Lane


class Clock(Protocol):
    """When lanes come to a place."""

    def stamp(self, lane: Lane) -> Any:
        """This place on the lane."""

    def seconds(self, first: Any, last: Any) -> float | None:
        """From one place to another, which may be on another lane; None while the device has not been to both."""


class Pace:
    """Times one turn's staging. Without a clock there is never an answer."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._armed = False
        self._began: Any = None
        self._read: list[Any] = []
        self._over: Any = None

    def arm(self) -> None:
        """Time the next turn."""
        self._armed = self._clock is not None
        self._began, self._read, self._over = None, [], None

    def begins(self) -> None:
        """A slot is taken, and a read issued next."""
        if self._armed and self._began is None and self._clock is not None:
            self._began = self._clock.stamp(Lane.COMPUTE)

    def issued(self) -> None:
        """It has been."""
        if self._began is not None and self._over is None and self._clock is not None:
            self._read.append(self._clock.stamp(Lane.H2D))

    def backward_is_over(self) -> None:
        """The norm comes next."""
        if self._read and self._over is None and self._clock is not None:
            self._over = self._clock.stamp(Lane.COMPUTE)
            self._armed = False

    def ahead(self, reads: int) -> int | None:
        """Of so many reads, those that had begun when backward was over, and FEWEST at least, so that one is read while
        another is stepped. None: not measured, or told before.
        """
        if self._over is None or self._clock is None:
            return None
        over_s, *read_s = (self._clock.seconds(self._began, at) for at in (self._over, *self._read))
        if over_s is None or None in read_s:
            return None
        self._began, self._read, self._over = None, [], None
        done = sum(at_s is not None and at_s <= over_s for at_s in read_s)
        return min(reads, max(FEWEST, done + 1))
