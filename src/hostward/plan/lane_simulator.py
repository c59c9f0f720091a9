"""Simulate lanes of work that run concurrently, and return when each piece of work ends. No torch.

Every lane (compute, both directions of PCIe or NVLink, the CPU) does its work in order. A piece of work starts when its
predecessor on the lane has ended and so have all the pieces that it waits for. Lanes that run at the same time share
PCIe and memory bandwidth, so each of them then runs at a fraction of its speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Queue(IntEnum):
    """Name the lanes of a step that take time of their own."""

    COMPUTE = 0
    D2H = 1
    H2D = 2
    HOST = 3


Slowdown = tuple[tuple[float, float, float, float], ...]
"""Speed of each lane (1 when it runs alone) by which of D2H, H2D and HOST are busy: the entry at `d2h + 2 * h2d + 4 *
host`.
"""
UNSHARED: Slowdown = ((1.0, 1.0, 1.0, 1.0),) * 8


@dataclass(slots=True)
class Program:
    """Hold pieces of work in order of issue, which are done in one or more rounds.

    They are columns, not objects: thousands of works in each of hundreds of programs.
    """

    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """These are the seconds of each piece when no other lane is busy."""
    waits: list[Sequence[int]] = field(default_factory=list)
    """These are the numbers of earlier pieces. Negative ones count from the end of the round before, and in the first
    round there is nothing to wait for.
    """
    lanes: tuple[list[int], ...] = field(default_factory=lambda: tuple([] for _ in Queue))
    """These are the numbers of the pieces of each lane."""

    def add(self, name: str, queue: int, seconds: float, waits: Sequence[int] = ()) -> int:
        """Append one piece of work and return its number."""
        number = len(self.names)
        self.names.append(name)
        self.seconds.append(seconds)
        self.waits.append(waits)
        self.lanes[queue].append(number)
        return number

    def busy_s(self) -> dict[Queue, float]:
        """Sum the seconds of work per lane, as if each ran alone, of one round."""
        return {queue: sum(map(self.seconds.__getitem__, lane)) for queue, lane in zip(Queue, self.lanes, strict=True)}


@dataclass(frozen=True, slots=True)
class Timeline:
    """Hold the start and the end of each piece of work, in seconds, in order of issue, round after round."""

    starts_s: Sequence[float]
    ends_s: Sequence[float]


def run(program: Program, slowdown: Slowdown = UNSHARED, rounds: int = 1) -> Timeline:
    """Simulate rounds of the program, one after the other on each lane, starting from an idle machine.

    Speeds change only when a piece of work starts or ends, so the time from one such moment to the next is exact.

    Raises ValueError if a piece of work waits for one that was issued after it.
    """
    count = len(program.seconds)
    total = rounds * count
    # A piece that waits for what never ends is the last of each lane.
    seconds, waits = program.seconds * rounds, [*program.waits * rounds, (count + total + 1,)]
    shifts: list[int] = []
    orders = [[*lane] for lane in program.lanes]
    for first in range(count, total + 1, count or 1):
        shifts += [first] * count
        for order, lane in zip(orders, program.lanes, strict=True):
            order += [first + number for number in lane] if first < total else [total]
    timeline = _simulated(orders, seconds, waits, [*shifts, 0], slowdown)
    if math.inf in timeline.ends_s:
        raise ValueError("a piece of work waits for one that was issued after it")
    return timeline


_Numbers = Sequence[Sequence[int]]


def _simulated(
    orders: _Numbers, seconds: Sequence[float], waits: _Numbers, shifts: Sequence[int], slowdown: Slowdown
) -> Timeline:
    """Simulate pieces of work, in order by lane; `shifts` lead from the numbers of waits to their places among ends.

    A plan takes millions of steps of this loop, so the lanes are written out: that saves a third of the time.
    """
    count, inf, now, busy = shifts[0], math.inf, 0.0, 0
    # What the first round waits for of the round before has ended, so there is one more round of ends. The last two are
    # of what blocks no lane, and of what blocks one that is busy or has done all of its work.
    starts, ends = [0.0] * len(seconds), [0.0] * count + [inf] * len(seconds) + [0.0, inf]
    free, never = len(ends) - 2, len(ends) - 1
    after0, after1, after2, after3 = (iter(order).__next__ for order in orders)
    next0, next1, next2, next3 = after0(), after1(), after2(), after3()
    wait0 = wait1 = wait2 = wait3 = free
    # Seconds that are left of what each lane does, and where its end is written.
    left0 = left1 = left2 = left3 = inf
    done0 = done1 = done2 = done3 = 0
    while True:
        if ends[wait0] <= now:
            shift = shifts[next0]
            for wait in waits[next0]:
                if ends[shift + wait] > now:
                    wait0 = shift + wait
                    break
            else:
                wait0, left0, starts[next0] = never, seconds[next0], now
                done0, next0 = count + next0, after0()
        if ends[wait1] <= now:
            shift = shifts[next1]
            for wait in waits[next1]:
                if ends[shift + wait] > now:
                    wait1 = shift + wait
                    break
            else:
                wait1, left1, starts[next1] = never, seconds[next1], now
                done1, next1, busy = count + next1, after1(), busy + 1
        if ends[wait2] <= now:
            shift = shifts[next2]
            for wait in waits[next2]:
                if ends[shift + wait] > now:
                    wait2 = shift + wait
                    break
            else:
                wait2, left2, starts[next2] = never, seconds[next2], now
                done2, next2, busy = count + next2, after2(), busy + 2
        if ends[wait3] <= now:
            shift = shifts[next3]
            for wait in waits[next3]:
                if ends[shift + wait] > now:
                    wait3 = shift + wait
                    break
            else:
                wait3, left3, starts[next3] = never, seconds[next3], now
                done3, next3, busy = count + next3, after3(), busy + 4
        speed0, speed1, speed2, speed3 = slowdown[busy]
        least = left0 / speed0
        if left1 / speed1 < least:
            least = left1 / speed1
        if left2 / speed2 < least:
            least = left2 / speed2
        if left3 / speed3 < least:
            least = left3 / speed3
        if least == inf:
            return Timeline(starts, ends[count:-2])
        now += least
        left0 -= least * speed0
        if left0 <= 1e-12:
            ends[done0], left0, wait0 = now, inf, free
        left1 -= least * speed1
        if left1 <= 1e-12:
            ends[done1], left1, wait1, busy = now, inf, free, busy - 1
        left2 -= least * speed2
        if left2 <= 1e-12:
            ends[done2], left2, wait2, busy = now, inf, free, busy - 2
        left3 -= least * speed3
        if left3 <= 1e-12:
            ends[done3], left3, wait3, busy = now, inf, free, busy - 4
