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


@dataclass(slots=True)
class Work:
    """Describe one piece of work, which takes `seconds` when no other lane is busy."""

    name: str
    queue: Queue
    seconds: float
    waits: tuple[int, ...] = ()


Slowdown = tuple[tuple[float, float, float, float], ...]
"""Speed of each lane (1 when it runs alone) by which of D2H, H2D and HOST are busy: the entry at `d2h + 2 * h2d + 4 *
host`.
"""
UNSHARED: Slowdown = ((1.0, 1.0, 1.0, 1.0),) * 8


@dataclass(slots=True)
class Program:
    """Hold pieces of work in order of issue; a piece waits only for earlier ones."""

    works: list[Work] = field(default_factory=list)

    def add(self, name: str, queue: Queue, seconds: float, waits: Sequence[int | None] = ()) -> int:
        """Append one piece of work and return its number; a None in `waits` is ignored."""
        self.works.append(Work(name, queue, seconds, tuple([w for w in waits if w is not None])))
        return len(self.works) - 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """Hold the start and the end of each piece of work, in seconds, in order of issue."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


def run(program: Program, slowdown: Slowdown = UNSHARED) -> Timeline:
    """Simulate the program, starting from an idle machine.

    Speeds change only when a piece of work starts or ends, so the time from one such moment to the next is exact.

    Raises ValueError if a piece of work waits for one that was issued after it.
    """
    works = program.works
    count = len(works)
    queues: list[list[int]] = [[], [], [], []]
    for number, work in enumerate(works):
        queues[work.queue].append(number)
    nexts = [iter(queue) for queue in queues]
    heads = [next(n, -1) for n in nexts]
    left = [0.0, 0.0, 0.0, 0.0]
    running = [-1, -1, -1, -1]
    starts, ends = [0.0] * count, [math.inf] * count
    now, done = 0.0, 0
    while done < count:
        for lane in _LANES:
            number = heads[lane]
            if number < 0 or running[lane] >= 0:
                continue
            work = works[number]
            for wait in work.waits:
                if ends[wait] > now:
                    break
            else:
                running[lane], left[lane], starts[number] = number, work.seconds, now
                heads[lane] = next(nexts[lane], -1)
        speeds = slowdown[(running[1] >= 0) + 2 * (running[2] >= 0) + 4 * (running[3] >= 0)]
        least = math.inf
        for lane in _LANES:  # no comprehension: thousands of works in each of hundreds of programs
            if running[lane] >= 0 and left[lane] / speeds[lane] < least:
                least = left[lane] / speeds[lane]
        if least == math.inf:
            raise ValueError("a piece of work waits for one that was issued after it")
        now += least
        for lane in _LANES:
            if running[lane] >= 0:
                left[lane] -= least * speeds[lane]
                if left[lane] <= 1e-12:
                    ends[running[lane]], running[lane] = now, -1
                    done += 1
    return Timeline(tuple(starts), tuple(ends))


def busy_s(program: Program, first: int, last: int) -> dict[Queue, float]:
    """Sum the seconds of work per lane, as if each ran alone, of the pieces first <= number < last."""
    found = dict.fromkeys(Queue, 0.0)
    for work in program.works[first:last]:
        found[work.queue] += work.seconds
    return found
