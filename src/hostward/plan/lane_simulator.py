"""Simulate lanes of work that run concurrently, and return when each piece of work ends. No torch.

Every lane (compute, both directions of PCIe or NVLink, the CPU) does its work in order. A piece of work starts when its
predecessor on the lane has ended and so have all the pieces that it waits for. Lanes that run at the same time share
PCIe and memory bandwidth, so each of them then runs at a fraction of its speed.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, chain
from typing import Any

from hostward.kernels.cpu.library import Lanes, check, load


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

    Speeds change only when a piece of work starts or ends, so the time from one such moment to the next is exact. A
    plan simulates hundreds of programs of thousands of pieces, so it is done in native code.

    Raises:
        NativeError: a piece of work waits for one that was issued after it, or the native library is missing.
    """
    count = len(program.seconds)
    seconds, orders = array("d", program.seconds), array("i", chain.from_iterable(program.lanes))
    wait_ends = array("q", accumulate(map(len, program.waits)))
    waits, speeds = array("i", chain.from_iterable(program.waits)), array("d", chain.from_iterable(slowdown))
    starts, ends = array("d", bytes(8 * rounds * count)), array("d", bytes(8 * rounds * count))
    lanes = Lanes(
        works=count,
        rounds=rounds,
        seconds=_address(seconds),
        orders=_address(orders),
        lane_ends=(*accumulate(map(len, program.lanes)),),
        wait_ends=_address(wait_ends),
        waits=_address(waits),
        speeds=_address(speeds),
    )
    check(load().simulate_lanes(ctypes.byref(lanes), _address(starts), _address(ends)), "hostward_simulate_lanes")
    return Timeline(starts, ends)


def _address(column: array[Any]) -> int:
    return column.buffer_info()[0]
