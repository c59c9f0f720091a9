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


_LANES = range(len(Queue))


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
        return {queue: sum([self.seconds[n] for n in self.lanes[queue]]) for queue in Queue}


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
    seconds, waits = program.seconds * rounds, program.waits * rounds
    nexts = [
        iter([start + n for start in range(0, rounds * count, count or 1) for n in lane]) for lane in program.lanes
    ]
    heads = [next(n, -1) for n in nexts]
    left = [0.0, 0.0, 0.0, 0.0]
    running = [-1, -1, -1, -1]
    starts = [0.0] * len(seconds)
    # What the first round waits for of the round before has ended, so there is one more round of ends.
    ends = [0.0] * count + [math.inf] * len(seconds)
    shifts = [count * (1 + number) for number in range(rounds) for _ in range(count)]
    blocked_by = [-1] * len(Queue)
    ends.append(0.0)  # of what blocks no lane
    idle, busy = list(_LANES), list[int]()
    now, busy_bits = 0.0, 0
    while True:
        blocked = []
        for lane in idle:
            number = heads[lane]
            if number < 0:
                continue
            if ends[blocked_by[lane]] > now:
                blocked.append(lane)
                continue
            shift = shifts[number]
            for wait in waits[number]:
                if ends[shift + wait] > now:
                    blocked_by[lane] = shift + wait
                    blocked.append(lane)
                    break
            else:
                running[lane], left[lane], starts[number] = number, seconds[number], now
                heads[lane] = next(nexts[lane], -1)
                busy.append(lane)
                busy_bits |= 1 << lane
        if not busy:
            break
        speeds = slowdown[busy_bits >> 1]
        least = math.inf
        for lane in busy:
            if left[lane] / speeds[lane] < least:
                least = left[lane] / speeds[lane]
        now += least
        idle, still = blocked, []
        for lane in busy:
            left[lane] -= least * speeds[lane]
            if left[lane] <= 1e-12:
                ends[count + running[lane]] = now
                idle.append(lane)
                busy_bits ^= 1 << lane
            else:
                still.append(lane)
        busy = still
    if blocked:
        raise ValueError("a piece of work waits for one that was issued after it")
    return Timeline(starts, ends[count:-1])
