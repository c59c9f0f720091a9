"""When operations of a CUDA device ran: every issue has timed events of its own, read once its turn is over."""

from __future__ import annotations

from collections.abc import Callable

from .backend import RING, Meter, Work

UNTIMED = (0, 0)
"""Recording event 0 does nothing."""


class Timings:
    """Pairs of timed events, taken for one issue each and used again when they have been read.

    Args:
        event: makes a timed event.
        elapsed_ms: milliseconds from one event to another.
    """

    def __init__(self, event: Callable[[], int], elapsed_ms: Callable[[int, int], float]) -> None:
        self._event = event
        self._elapsed_ms = elapsed_ms
        self._spare: list[tuple[int, int]] = []
        self._noted: list[list[tuple[Work, int, tuple[int, int]]]] = [[] for _ in range(RING)]
        self._turns = [-1] * RING
        """By slot: the last turn that has a base."""
        self._bases = [event() for _ in range(RING)]
        self._origin, self._has_origin = event(), False

    def begin(self, turn: int) -> list[int]:
        """Events to record where the turn begins. Times count from there, and the time of that from the very first
        turn: floats hold short spans better.
        """
        slot = turn % RING
        self._turns[slot] = turn
        first = [] if self._has_origin else [self._origin]
        self._has_origin = True
        return [*first, self._bases[slot]]

    def take(self, turn: int) -> tuple[int, int]:
        """Events to record before and after an operation that is issued in this turn. UNTIMED if `begin` was not called
        for it. What is not noted afterwards is not used again.
        """
        if self._turns[turn % RING] != turn:
            return UNTIMED
        return self._spare.pop() if self._spare else (self._event(), self._event())

    def note(self, turn: int, work: Work, nbytes: int, events: tuple[int, int]) -> None:
        """An operation has been issued between these events."""
        if events is not UNTIMED:
            self._noted[turn % RING].append((work, nbytes, events))

    def read(self, slot: int, meter: Meter | None) -> None:
        """Report what was issued in the last turn of this slot, which is over."""
        noted, self._noted[slot] = self._noted[slot], []
        self._spare += [events for *_, events in noted]
        if meter is None or not noted:
            return
        base = self._bases[slot]
        offset_s = self._elapsed_ms(self._origin, base) / 1e3
        for work, nbytes, events in noted:
            start_s, end_s = (offset_s + self._elapsed_ms(base, event) / 1e3 for event in events)
            meter(work.name, work.lane, start_s, end_s, nbytes, self._turns[slot])
