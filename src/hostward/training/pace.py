"""How much state is read while backward runs, and how much in order of use behind the norm, with the host's weights.

Reads stand on the link's lane before every upload of the step. Those that backward hides cost nothing there; those that
it does not hide let the first layers wait for the last ones' state. How many it hides is measured once, in the turn
after the slots were settled, in which all slots are filled in backward.
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
        self._read: Any = None
        self._over: Any = None

    def arm(self) -> None:
        """Time the next turn."""
        self._armed = self._clock is not None
        self._began = self._read = self._over = None

    def begins(self) -> None:
        """The slots are taken; reads are issued next."""
        if self._armed and self._clock is not None:
            self._began = self._clock.stamp(Lane.COMPUTE)

    def issued(self) -> None:
        """All reads into empty slots have been."""
        if self._began is not None and self._read is None and self._clock is not None:
            self._read = self._clock.stamp(Lane.H2D)

    def backward_is_over(self) -> None:
        """The norm comes next."""
        if self._read is not None and self._over is None and self._clock is not None:
            self._over = self._clock.stamp(Lane.COMPUTE)
            self._armed = False

    def ahead(self, reads: int) -> int | None:
        """Of so many reads of equal size, those that had begun when backward was over, and FEWEST at least, so that one
        is read while another is stepped. None: not measured, or told before.
        """
        if self._over is None or self._clock is None:
            return None
        hidden_s, read_s = (self._clock.seconds(self._began, at) for at in (self._over, self._read))
        if hidden_s is None or read_s is None:
            return None
        self._began = self._read = self._over = None
        if hidden_s >= read_s:
            return reads
        return min(reads, max(FEWEST, int(reads * max(0.0, hidden_s) / read_s) + 1))
