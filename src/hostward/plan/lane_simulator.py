"""Lanes of work side by side: when each piece of work ends, given what slows what down. Pure arithmetic; no torch.

Every lane does its work in order. A piece of work starts when the one before it on its lane has ended and all that it
waits for has. Lanes that run at the same time share the link and host memory: each then goes on at a part of its speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Queue(IntEnum):
    """The lanes of a step that take time of their own."""

    COMPUTE = 0
    D2H = 1
    H2D = 2
    HOST = 3


_LANES = range(len(Queue))


@dataclass(slots=True)
class Work:
    """One piece of work: `seconds` where nothing else runs."""

    name: str
    queue: Queue
    seconds: float
    waits: tuple[int, ...] = ()


Slowdown = tuple[tuple[float, float, float, float], ...]
"""Speed of each lane, 1 alone, by which of D2H, H2D and HOST run: the entry at `d2h + 2 * h2d + 4 * host`."""
UNSHARED: Slowdown = ((1.0, 1.0, 1.0, 1.0),) * 8


@dataclass(slots=True)
class Program:
    """Pieces of work, in order of issue; a piece waits only for earlier ones."""

    works: list[Work] = field(default_factory=list)

    def add(self, name: str, queue: Queue, seconds: float, waits: Sequence[int | None] = ()) -> int:
        """Append one piece of work; None among `waits` is nothing to wait for. Its number."""
        self.works.append(Work(name, queue, seconds, tuple([w for w in waits if w is not None])))
        return len(self.works) - 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each piece of work started and ended, in seconds, in order of issue."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


def run(program: Program, slowdown: Slowdown = UNSHARED) -> Timeline:
    """Play the program from an idle machine.

    Speeds change only when a piece of work starts or ends, so the time from one such moment to the next is exact.
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
    """Seconds of work per lane, alone, among the pieces first <= number < last."""
    found = dict.fromkeys(Queue, 0.0)
    for work in program.works[first:last]:
        found[work.queue] += work.seconds
    return found
