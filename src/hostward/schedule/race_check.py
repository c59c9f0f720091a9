"""Check the ordering rule for schedules, for the simulated backend and for tests, without importing torch.

    Whenever two operations use the same bytes and at least one of them writes them, one must come before the other:
    because both are on one lane, because the later one waits for the earlier one's event, or through a chain of both.
    A free, and the reuse of a staging buffer, are writes.

Order is kept as a vector clock: for each operation, how many operations of each lane come before it (itself included).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from hostward.errors import OrderingError
from hostward.schedule.ops import Lane, Op, Schedule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stamp:
    """Record the position of an operation in the order, as a vector clock."""

    lane: Lane
    clock: Mapping[Lane, int]

    def precedes(self, later: Stamp) -> bool:
        """Return whether `later` is ordered after this operation, or is the same one."""
        return later.clock[self.lane] >= self.clock[self.lane]


class LaneClocks:
    """Give each operation its stamp, in the order of issue."""

    def __init__(self) -> None:
        self._last: dict[Lane, Stamp | None] = dict.fromkeys(Lane)
        self._joined: dict[Lane, int] = dict.fromkeys(Lane, 0)

    def stamp(self, lane: Lane, after: Iterable[Stamp]) -> Stamp:
        """Return the stamp of the next operation of `lane`, which waits for `after`."""
        clock = dict(self._joined)
        last = self._last[lane]
        for earlier in (*after, *(() if last is None else (last,))):
            for other, count in earlier.clock.items():
                clock[other] = max(clock[other], count)
        clock[lane] += 1
        made = self._last[lane] = Stamp(lane, clock)
        return made

    def join(self, stamp: Stamp) -> None:
        """Order all operations that are stamped from now on, on any lane, after `stamp`."""
        for lane, count in stamp.clock.items():
            self._joined[lane] = max(self._joined[lane], count)

    def join_all(self) -> None:
        """Order all later operations after everything so far, since all lanes are empty."""
        for last in self._last.values():
            if last is not None:
                self.join(last)

    def joined(self, stamp: Stamp) -> bool:
        """Return whether all later operations are ordered after `stamp`."""
        return self._joined[stamp.lane] >= stamp.clock[stamp.lane]


@dataclass(slots=True)
class Accesses(Generic[T]):
    """Keep the last writer of some bytes and the last reader per lane since then.

    Earlier readers of a lane come before its last one, so one per lane suffices. T is the caller's type of name for an
    operation.
    """

    writer: tuple[T, Stamp] | None = None
    readers: dict[Lane, tuple[T, Stamp]] = field(default_factory=dict)

    def unordered(self, stamp: Stamp, *, writes: bool) -> T | None:
        """Return an earlier access that conflicts with one at `stamp` and is not ordered before it, or None."""
        if self.writer is not None and not self.writer[1].precedes(stamp):
            return self.writer[0]
        if writes:
            return next((who for who, when in self.readers.values() if not when.precedes(stamp)), None)
        return None

    def add(self, who: T, stamp: Stamp, *, writes: bool) -> None:
        if writes:
            self.writer, self.readers = (who, stamp), {}
        else:
            self.readers[stamp.lane] = who, stamp


@dataclass(frozen=True, slots=True)
class Race:
    """Name two operations of a schedule that nothing orders, and the operand that both use."""

    earlier: Op
    later: Op
    operand: str


def stamps(schedule: Schedule) -> dict[str, Stamp]:
    """Return the stamp of every operation, by name.

    Waits for the step before are not part of the stamps; use `repeated` to include them.
    """
    clocks = LaneClocks()
    found: dict[str, Stamp] = {}
    for op in schedule.ops:
        found[op.name] = clocks.stamp(op.lane, [found[w] for w in op.waits])
    return found


def races(schedule: Schedule) -> list[Race]:
    """Return every pair that breaks the rule, the first for each operation and operand."""
    when = stamps(schedule)
    accesses: defaultdict[str, Accesses[Op]] = defaultdict(Accesses)
    found = []
    for op in schedule.ops:
        stamp = when[op.name]
        for names, writes in ((op.reads, False), (op.writes, True)):
            for name in names:
                seen = accesses[name]
                earlier = seen.unordered(stamp, writes=writes)
                if earlier is not None and earlier is not op:
                    found.append(Race(earlier, op, name))
                seen.add(op, stamp, writes=writes)
    return found


def require_ordered(schedule: Schedule) -> None:
    """Raise OrderingError for the first race, if there is one; the error names the fix."""
    found = races(schedule)
    if not found:
        return
    race = found[0]
    raise unordered(race.earlier.name, race.earlier.lane, race.later.name, race.later.lane, race.operand)


def unordered(earlier: str, earlier_lane: Lane, later: str, later_lane: Lane, operand: str) -> OrderingError:
    """Return the error for a pair that breaks the rule, with its fix."""
    return OrderingError(
        f"{later!r} on lane {later_lane.value} and {earlier!r} on lane {earlier_lane.value} both use {operand!r}, and "
        "nothing orders them",
        why="one of them writes it",
        fix=f"let {later!r} wait for the event of {earlier!r}",
    )


def same_order(a: Schedule, b: Schedule) -> bool:
    """Return whether two schedules of the same operations order every pair alike.

    Then a wait that only one of the two has is redundant.
    """
    first, second = stamps(a), stamps(b)
    return first == second


def repeated(schedule: Schedule, times: int) -> Schedule:
    """Return the schedule issued `times` in a row, with the step's number in each name.

    Checking the result finds races between one step and the next.
    """
    ops = []
    for step in range(times):
        for op in schedule.ops:
            waits = [f"{w}.{step}" for w in op.waits] + [f"{w}.{step - 1}" for w in op.prior if step]
            ops.append(replace(op, name=f"{op.name}.{step}", waits=tuple(waits), prior=()))
    return Schedule(tuple(ops))
