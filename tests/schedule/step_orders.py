"""Turns of a step's schedule in the orders that training may reach its points in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from hostward.core.placement import Placement
from hostward.schedule.ops import Kind, Op, Schedule
from hostward.schedule.optimizer import GUESSES, STEP, StepShape, lower

D, H, S = Placement.DEVICE, Placement.HOST, Placement.STREAMED


@st.composite
def shapes(draw: st.DrawFn, *, buckets: int = 5, absent: bool = True) -> StepShape:
    """Up to `buckets` buckets of any placement, in layers that are runs of buckets or not."""
    placements = tuple(draw(st.lists(st.sampled_from(Placement), min_size=1, max_size=buckets)))
    n = len(placements)
    layers = tuple(draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n)))
    without = draw(absent_sets(n)) if absent else frozenset()
    slots = draw(st.integers(1, 3)) if S in placements else 0
    overlap = draw(st.booleans())
    on_host = [b for b, p in enumerate(placements) if p is H]
    summed = draw(st.frozensets(st.sampled_from(on_host))) if on_host and overlap else frozenset()
    ahead = draw(st.none() | st.integers(1, slots)) if slots else None
    can = [b for b in on_host if b not in summed]
    guessed = draw(st.frozensets(st.sampled_from(can))) if can and overlap else frozenset()
    transient = draw(st.booleans())
    return StepShape(placements, layers, without, slots, ahead, transient, overlap, summed, guessed=guessed)


def absent_sets(n: int) -> st.SearchStrategy[frozenset[int]]:
    """Buckets without a gradient: never all of them, since then there is no step."""
    return st.frozensets(st.integers(0, n - 1), max_size=n - 1)


def waits_of(schedule: Schedule) -> list[tuple[str, str]]:
    """Every wait as `Schedule.without_wait` takes it; those of the turn before are marked."""
    return [(op.name, wait) for op in schedule.ops for wait in (*op.waits, *(f"~{w}" for w in op.prior))]


def as_reached(whole: Schedule, schedule: Schedule, random: Random) -> list[Op]:
    """The operations of one turn as training issues them: gradient points in any order, a release after its gradient,
    the slots one by one at any time before the step and back at any time after it, and use points in any order, each
    behind its own upload point. Gradient points of summed and of guessed buckets come in up to three microbatches, at
    least once. Buckets that have come are guessed in groups, those that come last perhaps not.

    `whole` is the schedule of a turn in which every bucket has a gradient: until the step nobody knows which will not,
    so what is issued before it comes from there.
    """
    points, before = dict(schedule.triggers), whole.triggers
    # A point that only the model reaches, or none: with overlap off everything of ours is in the step.
    order: list[str] = []
    every = sorted(p for p in points if p.startswith("gradient/"))
    guessed = {p.replace("guess/", "gradient/") for p in points if p.startswith("guess/")}
    added = [p for p in every if p in guessed or any(op.kind is Kind.ADD for op in points[p])]
    for microbatch in range(random.choice([1, 1, 2, 3]) if added else 1, 0, -1):
        within = random.sample(added, k=random.randint(0, len(added))) if microbatch > 1 else every
        again = [p for p in within if p not in order or random.random() < 0.7]
        order += _microbatch(points, random.sample(again, k=len(again)), random)
    order = _with_guesses(order, guessed, random)
    ops = [list(before[point]) for point in order]
    stages = sorted((p for p in points if p.startswith("stage/")), key=lambda p: int(p.removeprefix("stage/")))
    at = 0
    for point in stages:
        at = random.randint(at, len(ops)) + 1 if random.random() < 0.7 else len(ops) + 1
        # Of the others too little was freed in backward, or too late.
        ops.insert(at - 1, list((before if at <= len(ops) else points)[point]))
    # An addition may have made the partial sums already.
    made = {f"sums/{b}" for b in range(len(points)) if random.random() < 0.5}
    points[STEP] = tuple(op for op in points[STEP] if op.name not in made)
    after = random.sample(sorted(p for p in points if p.startswith("use/")), k=_count(points, "use/"))
    for point in random.sample(sorted(p for p in points if p.startswith("unstage/")), k=_count(points, "unstage/")):
        after.insert(random.randint(0, len(after)), point)
    for point in random.sample(sorted(p for p in points if p.startswith("upload/")), k=_count(points, "upload/")):
        after.insert(random.randint(0, after.index(point.replace("upload/", "use/"))), point)
    left_out = {GUESSES, *(p for p in points if p.startswith("guess/"))} - {*order}
    assert {*order, *after, STEP} == points.keys() - {*stages} - left_out
    return [op for group in ops for op in group] + [op for point in (STEP, *after) for op in points[point]]


def _microbatch(points: Mapping[str, Sequence[Op]], gradients: Sequence[str], random: Random) -> list[str]:
    order = list(gradients)
    for point in gradients:
        release = point.replace("gradient/", "release/")
        if release in points:
            order.insert(random.randint(order.index(point) + 1, len(order)), release)
    return order


def _with_guesses(order: Sequence[str], guessed: Collection[str], random: Random) -> list[str]:
    """Return the order with groups of guesses after their gradients."""
    found: list[str] = []
    waiting: list[str] = []
    for point in order:
        found.append(point)
        if point in guessed and point not in waiting:
            waiting.append(point)
        if waiting and random.random() < 0.5:
            found += [GUESSES, *(p.replace("gradient/", "guess/") for p in waiting)]
            waiting = []
    return found


def _count(points: dict[str, tuple[Op, ...]], prefix: str) -> int:
    return sum(point.startswith(prefix) for point in points)


def in_a_row(turns: Sequence[Sequence[Op]]) -> Schedule:
    """Turns one after the other. As events do, a wait stands for the newest issue of what it names, if there is one."""
    newest: dict[str, str] = {}
    ops = []
    for turn, issued in enumerate(turns):
        for number, op in enumerate(issued):
            waits = [newest[w] for w in (*op.waits, *op.prior) if w in newest]
            name = f"{op.name}.{turn}.{number}"
            ops.append(replace(op, name=name, waits=tuple(waits), prior=()))
            newest[op.name] = name
    return Schedule(tuple(ops))


def turns_of(shape: StepShape, absent: Sequence[frozenset[int]], random: Random) -> Schedule:
    """One turn for each of `absent`, as training may reach them."""
    whole = lower(replace(shape, absent=frozenset()))
    return in_a_row([as_reached(whole, lower(replace(shape, absent=missing)), random) for missing in absent])


def stepped(schedule: Schedule) -> list[int | None]:
    return [op.bucket for op in schedule.ops if op.kind is Kind.ADAMW]
