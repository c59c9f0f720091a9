"""Time operations on a CUDA device: every issue has separate timed events, read once its step is complete.

Host functions are clocked by the thread that runs them. With timed events around it, cuLaunchHostFunc would block its
caller until the stream gets there, so a timed step would wait for the device, and delay the next forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hostward.kernels.cpu.library import ClockedCall
from hostward.runtime.backend import RING, Held, Meter
from hostward.runtime.cuda.driver import event_create, event_destroy, stream_synchronize
from hostward.schedule.ops import Lane

UNTIMED = (0, 0)
"""Stands for no timed events: recording event 0 does nothing."""
_ATTEMPTS = 5

Timed = tuple[int, int] | ClockedCall
"""Timed events before and after an issue, or its clocked call."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """Records one issue, to be read later; with `held`, at most its last part that is as long as that wait counts."""

    name: str
    lane: Lane
    nbytes: int
    timed: Timed
    held: Held | None


class Timings:
    """Provides pairs of timed events and clocked calls for one issue each, and reuses them after they have been read.

    Args:
        event: creates a timed event.
        elapsed_ms: returns the milliseconds from one event to another.
    """

    def __init__(self, event: Callable[[], int], elapsed_ms: Callable[[int, int], float]) -> None:
        self._event = event
        self._elapsed_ms = elapsed_ms
        self._spare: list[tuple[int, int]] = []
        self._spare_calls: list[ClockedCall] = []
        self._noted: list[list[_Noted]] = [[] for _ in range(RING)]
        self._turns = [-1] * RING
        """Last step that has a base, by slot."""
        self._bases = [event() for _ in range(RING)]
        self._origin, self._moment = event(), event()
        self._anchor_s, self._anchor_ns = 0.0, 0

    def anchor(self, recorded: Callable[[int], None]) -> None:
        """Relate the host's clock to the device's; call this before the first timed step, while the device is idle.

        Args:
            recorded: records an event and waits for it.
        """
        recorded(self._origin)  # again: floats would hold the hours since an old event only to a millisecond
        shortest_ns = math.inf
        for _ in range(_ATTEMPTS):
            before_ns = time.monotonic_ns()
            recorded(self._moment)
            after_ns = time.monotonic_ns()
            if after_ns - before_ns < shortest_ns:
                shortest_ns = after_ns - before_ns
                self._anchor_ns = (before_ns + after_ns) // 2
                self._anchor_s = self._elapsed_ms(self._origin, self._moment) / 1e3

    def begin(self, turn: int) -> list[int]:
        """Return the events to record at the beginning of a step.

        Times count from there, and the time of that event from the last anchor: floats hold short spans more exactly.
        """
        slot = turn % RING
        self._turns[slot] = turn
        return [self._bases[slot]]

    def take(self, turn: int) -> tuple[int, int]:
        """Return the events to record before and after an operation issued in this step; UNTIMED without `begin`.

        Events that are not passed to `note` afterwards are not reused.
        """
        if self._turns[turn % RING] != turn:
            return UNTIMED
        return self._spare.pop() if self._spare else (self._event(), self._event())

    def take_call(self, turn: int) -> ClockedCall | None:
        """Return a clocked call for a host function issued in this step; None without `begin`."""
        if self._turns[turn % RING] != turn:
            return None
        return self._spare_calls.pop() if self._spare_calls else ClockedCall()

    def note(self, turn: int, name: str, lane: Lane, nbytes: int, timed: Timed, *, held: Held | None = None) -> None:
        """Note that an operation has been issued between these events, or by this call.

        `held`: as in `Backend.wait_behind`; its events complete before those of `timed`.
        """
        if timed is not UNTIMED:
            self._noted[turn % RING].append(_Noted(name, lane, nbytes, timed, held))

    def read(self, slot: int, meter: Meter | None) -> None:
        """Report the operations of the last step of this slot, which is complete."""
        noted, self._noted[slot] = self._noted[slot], []
        for one in noted:
            if not isinstance(one.timed, ClockedCall):
                self._spare.append(one.timed)
            if one.held is not None:
                self._spare.append(one.held)
        if meter is not None and noted:
            self._report(noted, slot, meter)
        self._spare_calls += [one.timed for one in noted if isinstance(one.timed, ClockedCall)]

    def _report(self, noted: list[_Noted], slot: int, meter: Meter) -> None:
        base = self._bases[slot]
        offset_s = self._elapsed_ms(self._origin, base) / 1e3
        for one in noted:
            if isinstance(one.timed, ClockedCall):
                start_s, end_s = map(self._host_s, (one.timed.started_ns, one.timed.ended_ns))
            else:
                start_s, end_s = (offset_s + self._elapsed_ms(base, event) / 1e3 for event in one.timed)
            if one.held is not None:
                start_s = max(start_s, end_s - self._elapsed_ms(*one.held) / 1e3)
            meter(one.name, one.lane, start_s, end_s, one.nbytes, self._turns[slot])

    def _host_s(self, clock_ns: int) -> float:
        return self._anchor_s + (clock_ns - self._anchor_ns) / 1e9


# Events of the driver are created once, and destroyed with their backend.


class DriverEvents:
    """Owns the handles of all events of a backend."""

    def __init__(self) -> None:
        self._all: list[int] = []

    def timed(self) -> int:
        return self._made(timing=True)

    def plain(self, unused: list[int]) -> int:
        """Return one of `unused`, or a new event."""
        return unused.pop() if unused else self._made(timing=False)

    def drain(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Wait for the streams that use the events, and destroy the events."""

        for stream in streams:
            stream_synchronize(stream.cuda_stream)
        for event in self._all:
            event_destroy(event)

    def _made(self, *, timing: bool) -> int:
        self._all.append(event_create(timing=timing))
        return self._all[-1]
