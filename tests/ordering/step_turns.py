"""Turns of a step's schedule in the orders that training may reach its points in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from hostward.lowering.optimizer import STAGE, STEP, UNSTAGE, StepShape, lower
from hostward.plan import Placement
from hostward.schedule import Kind, Op, Schedule

D, H, S = Placement.DEVICE, Placement.HOST, Placement.STREAMED


@st.composite
def shapes(draw: st.DrawFn, *, buckets: int = 5, absent: bool = True) -> StepShape:
    """Up to `buckets` buckets of any placement, in layers that are runs of buckets or not."""
    placements = tuple(draw(st.lists(st.sampled_from(Placement), min_size=1, max_size=buckets)))
    n = len(placements)
    layers = tuple(draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n)))
    without = draw(absent_sets(n)) if absent else frozenset()
    slots = draw(st.integers(1, 3)) if S in placements else 0
    return StepShape(placements, layers, without, slots, transient=draw(st.booleans()), overlap=draw(st.booleans()))


def absent_sets(n: int) -> st.SearchStrategy[frozenset[int]]:
    """Buckets without a gradient: never all of them, since then there is no step."""
    return st.frozensets(st.integers(0, n - 1), max_size=n - 1)


def waits_of(schedule: Schedule) -> list[tuple[str, str]]:
    """Every wait as `Schedule.without_wait` takes it; those of the turn before are marked."""
    return [(op.name, wait) for op in schedule.ops for wait in (*op.waits, *(f"~{w}" for w in op.prior))]


def as_reached(whole: Schedule, schedule: Schedule, random: Random) -> list[Op]:
    """The operations of one turn as training issues them: gradient points in any order, a release after its gradient,
    the slots at any time before the step and back at any time after it, and use points in any order.

    `whole` is the schedule of a turn in which every bucket has a gradient: until the step nobody knows which will not,
    so what is issued before it comes from there.
    """
    points, before = dict(schedule.points), whole.points
    # A point that only the model reaches, or none: with overlap off everything of ours is in the step.
    order: list[str] = []
    for point in random.sample(sorted(p for p in points if p.startswith("gradient/")), k=_count(points, "gradient/")):
        order.append(point)
    for point in sorted(p for p in points if p.startswith("release/")):
        order.insert(random.randint(order.index(point.replace("release/", "gradient/")) + 1, len(order)), point)
    ops = [list(before[point]) for point in order]
    if STAGE in points:
        if random.random() < 0.7:
            ops.insert(random.randint(0, len(ops)), list(before[STAGE]))
        else:  # too little was freed in backward, or too late
            ops.append(list(points[STAGE]))
    after = random.sample(sorted(p for p in points if p.startswith("use/")), k=_count(points, "use/"))
    if UNSTAGE in points:
        after.insert(random.randint(0, len(after)), UNSTAGE)
    assert {*order, *after, STEP} == points.keys() - {STAGE}
    return [op for group in ops for op in group] + [op for point in (STEP, *after) for op in points[point]]


def _count(points: dict[str, tuple[Op, ...]], prefix: str) -> int:
    return sum(point.startswith(prefix) for point in points)


def in_a_row(turns: Sequence[Sequence[Op]]) -> Schedule:
    """Turns one after the other. As events do, a wait for the turn before stands for the newest issue before this."""
    newest: dict[str, str] = {}
    ops = []
    for turn, issued in enumerate(turns):
        before = dict(newest)
        for op in issued:
            waits = [newest[w] for w in op.waits] + [before[w] for w in op.prior if w in before]
            name = f"{op.name}.{turn}"
            ops.append(replace(op, name=name, waits=tuple(waits), prior=()))
            newest[op.name] = name
    return Schedule(tuple(ops))


def turns_of(shape: StepShape, absent: Sequence[frozenset[int]], random: Random) -> Schedule:
    """One turn for each of `absent`, as training may reach them."""
    whole = lower(replace(shape, absent=frozenset()))
    return in_a_row([as_reached(whole, lower(replace(shape, absent=missing)), random) for missing in absent])


def stepped(schedule: Schedule) -> list[int | None]:
    return [op.bucket for op in schedule.ops if op.kind is Kind.ADAMW]
