"""Search for faster choices within budgets by the exact memory model and the predicted time. No torch.

The frontier's linear program knows times and bytes approximately, and no more than a few numbers of offloaded layers.
Here each treatment of all layers, and some of half of them, is tried with several numbers of layers whose weights are
offloaded, the fewest that fit among them, and several streamed shares, each with the least state offloaded that the
device's memory allows. From the best of them, of several kinds, one decision is varied at a time, or two that trade
memory with each other, in steps that get smaller, as long as the predicted step gets shorter (a pattern search, as of
Hooke and Jeeves, 1961). Among them is the order of offloaded buckets: streamed ones and those that the CPU steps
alternate, or half or all of the streamed ones come first; with several microbatches, the CPU also steps all of the last
ones, or the embedding. At last one decision is changed by much, the rest is varied in small steps from there even if
that is slower at first, and where it ends faster all begins anew from there (iterated local search, as of Lourenço,
Martin and Stützle, 2003).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, product
from typing import Generic, NamedTuple, Protocol, TypeVar

from hostward.core.placement import Placement, alternating, offloaded_count
from hostward.plan.cost_model import Costs
from hostward.plan.decisions import ELEMENTWISE, LEAVES, RECOMPUTED, Choice, Keep
from hostward.plan.solver import LAST_STAY, STAYING, TREATMENTS, Forced
from hostward.plan.workload import Workload

AWAY = (0.0, 1 / 3, 2 / 3, 1.0)
"""Shares of the layers whose weights are offloaded that are tried with each treatment of all layers."""
SHARES = (0.0, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Streamed shares of the offloaded state that are tried with each of them."""
SHARES_FIRST = (1 / 2, 3 / 4)
"""Streamed shares that are tried with all of it before what the CPU steps, where nothing like it fits in turns."""
CLOSER = (1 / 8, 1 / 16)
"""Distances from the best of these shares that are tried next."""
AWAY_JUMPS = (0.0, 1 / 16, 1 / 6)
"""Shares of the layers, one layer at least, by which the number of offloaded ones is changed at last."""
FEWER_AWAY = 1 / 8
"""Share of the layers by which fewer are offloaded where the CPU steps what comes before them."""
TREATED_JUMP = 1 / 4
"""Share of the layers whose treatment is changed at last."""
WORTH_LANDING = 0.02
"""Share of the step's time by which such a change may be slower where the planner searches around it."""
WORTH_JUMPING = 0.002
"""Share of the step's time that it must save for all to begin anew."""
JUMPED = 300
"""Variations, from all such changes together, after which the planner tries no other one."""
WORTH_FOLLOWING = 0.1
"""Share of the step's time by which choices of several kinds may differ where the planner searches around each."""
GUESSES = 6
"""Most shares of the state that are tried to find the smallest one that fits."""
FEW_BUCKETS = 32
"""Numbers of buckets up to which the device's memory is far from linear in the share of the state."""
FEW_MICROBATCHES = 4
"""Numbers of microbatches of one GPU up to which more is tried: of many, the end of a step is a small part."""
FEW_LAYERS = 3
"""Numbers of layers up to which all their treatments are tried with few buckets."""
GRID = 8
"""Parts in which the streamed share of few buckets is tried."""
STEPS = ((1 / 4, 0.01), (1 / 8, 0.005), (1 / 16, 0.003), (1 / 32, 0.002), (1 / 64, 0.0002))
"""Sizes of the last variations, as shares of the layers or of the state, and the share of the step's time that one must
save to be followed.
"""
VARIED_TOGETHER = 1 / 64
"""Size of the variations of which treatments of layers and the streamed share are also varied together."""
SLACK = 0.01
"""Share of the step's time by which a variation's lower bound may tell less of it than that of the varied choice."""
FOLLOWED = (5, 2, 2, 1, 1)
"""Numbers of the best choices, each of another kind, from which variations of each of these sizes are tried."""
FOLLOWED_AGAIN = (3, 2, 1, 1, 1)
"""The same where what they lead to is known with other staging buffers."""
FOLLOWED_HOST_LAST = (2, 1, 1, 1, 1)
"""The same where it is known with another order."""
FOLLOWED_EMBEDDING = (3, 2, 1)
"""The same of the smallest variations, where what comes before the layers changes its place."""
FOLLOWED_NEAR = (1, 1, 1)
"""The same of the smallest variations, where the best of them is slower than what is known."""


class Ends(NamedTuple):
    """Say which offloaded buckets come before and behind those among which streamed and CPU-stepped ones alternate."""

    streamed: float = 0.0
    """Share of the streamed buckets that come first. With 1, the CPU steps what backward makes first, and has the most
    time for it.
    """
    host: float = 0.0
    """Share of the offloaded buckets that come last, which the CPU steps, and whose gradients backward makes first."""
    host_first: int = 0
    """Number of buckets that come first, which the CPU steps as well, as far as they are offloaded."""


ENDS = (Ends(), Ends(streamed=1 / 2), Ends(streamed=1.0))
"""Orders that are tried."""
HOST_LAST = Ends(host=1 / 8)
"""Order that is tried besides, with several microbatches."""


@dataclass(frozen=True)
class _Free:
    """Hold the buckets whose placement may vary, by their numbers, and the bytes of their state."""

    numbers: Sequence[int]
    sizes: Sequence[int]

    @cached_property
    def cumulative(self) -> Sequence[int]:
        """Return the bytes of none of them, of the last one, of the last two, and so on to all."""
        return [0, *accumulate(reversed(self.sizes))]


@dataclass(frozen=True)
class Neighbourhood:
    """Make variations of a choice that the engine can carry out and nothing that is forced forbids.

    Args:
        weights_vary: whether the number of layers with offloaded weights may change.
        order_varies: whether the order of offloaded buckets may, which hardly changes bytes.
        few_buffers_bytes: bytes of the least number of GPU staging buffers; None: they may not change.
    """

    costs: Costs
    forced: Forced
    weights_vary: bool = True
    order_varies: bool = True
    few_buffers_bytes: int | None = None
    _placements: dict[tuple[frozenset[str], int, float, Ends], tuple[Placement, ...]] = field(default_factory=dict)
    _ends: dict[tuple[Placement, ...], Ends] = field(default_factory=dict)
    _shares: dict[tuple[tuple[Placement, ...], frozenset[str]], tuple[float, float]] = field(default_factory=dict)
    _free_beside: dict[frozenset[str], _Free] = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return self.costs.workload

    @cached_property
    def names(self) -> Sequence[str]:
        """Return the repeated layers in order; the first ones' weights are offloaded."""
        return [layer.name for layer in self.workload.repeated]

    @cached_property
    def most_away(self) -> int:
        """Return the largest number of layers whose weights may be offloaded."""
        if self.forced.offloaded_weights is not None or not self.weights_vary:
            return 0
        stuck = {
            self.workload.inventory.buckets[i].layer
            for i, placement in self.forced.placements.items()
            if placement is not Placement.HOST
        }
        free = next((at for at, name in enumerate(self.names) if name in stuck), len(self.names))
        return min(free, max(0, len(self.names) - 1))

    @cached_property
    def before_layers(self) -> int:
        """Return how many buckets whose placement may vary come before those of the repeated layers."""
        names, buckets = frozenset(self.names), self.workload.inventory.buckets
        first = next((at for at, bucket in enumerate(buckets) if bucket.layer in names), len(buckets))
        return sum(at not in self.forced.placements for at in range(first))

    @cached_property
    def treatments(self) -> Sequence[Keep]:
        """Return the treatments that layers may have, from the first layer on."""
        cheap = any(part.elementwise for layer in self.workload.repeated for part in layer.saved)
        return [keep for keep in TREATMENTS if cheap or keep not in ELEMENTWISE]

    def by(self, choice: Choice, step: float) -> Iterator[tuple[Choice, Iterable[float]]]:
        """Return variations of one size, with streamed shares to try: of shares, weights, and then of treatments."""
        count = max(1, round(step * len(self.names)))
        fraction, streamed = self.shares(choice)
        varied = [share for share in (max(0.0, streamed - step), min(1.0, streamed + step)) if share != streamed]
        yield from ((self.placed(choice, fraction, share), (share,)) for share in varied)
        yield self.placed(choice, min(1.0, fraction + step), streamed), (streamed, *varied)
        if fraction and self.order_varies:
            now = self.ends(choice)
            between = [share for share in (streamed, *varied) if 0.0 < share < 1.0]
            for ends, share in product((ends for ends in ENDS if ends != now), between):
                yield self.placed(choice, fraction, share, ends), (share,)
        for away in self._more_or_fewer_away(choice, count):
            # The CPU has the state of these layers to step, and the best share of the rest may be all.
            yield away, dict.fromkeys((streamed, *varied, 1.0))
        # What a treatment takes or frees may have its best streamed share elsewhere, and either alone be slower.
        shares = (streamed, *varied) if step <= VARIED_TOGETHER else (streamed,)
        for before, after in self._pairs(choice):
            for first in (True, False):
                treated = self._treat(choice, before, after, count, first=first)
                if treated is not None:
                    yield treated, shares if fraction else SHARES  # of nothing, there is no share

    def jumps(self, choice: Choice) -> Iterator[Choice]:
        """Return the choice with one decision changed by much: buffers, order, offloaded weights, and treatments."""
        if self.few_buffers_bytes is not None:
            yield replace(choice, staging_bytes=self.few_buffers_bytes if choice.staging_bytes is None else None)
        fraction, streamed = self.shares(choice)
        if fraction:
            yield from (self.placed(choice, fraction, streamed, ends) for ends in ENDS if ends != self.ends(choice))
        for count in sorted({max(1, round(part * len(self.names))) for part in AWAY_JUMPS}):
            yield from self._more_or_fewer_away(choice, count)
        count = max(1, round(TREATED_JUMP * len(self.names)))
        for first, (before, after) in product((True, False), self._pairs(choice)):
            treated = self._treat(choice, before, after, count, first=first)
            if treated is not None:
                yield treated

    def alike(self, choice: Choice) -> Iterator[Choice]:
        """Return the choice with each treatment for all layers: some do not go with others, so no step leads there.

        The half of the layers that is not recomputed may be kept, and that which has but some tensors offloaded may
        have none: the best choices that offload much mix treatments, and steps from such halves lead there.
        """
        rest = dict.fromkeys(RECOMPUTED, Keep.KEEP) | {Keep.ELEMENTWISE_OFFLOAD: Keep.ELEMENTWISE}
        for keep in self.treatments:
            keeps = [keep] * len(self.names)
            if keep in LEAVES:
                keeps[-LAST_STAY:] = [STAYING[keep]] * min(LAST_STAY, len(keeps))
            half = len(keeps) // 2
            mixed = [*keeps[:half], *[rest.get(keep, keep)] * (len(keeps) - half)]
            for each in (keeps, mixed) if keep in rest else (keeps,):
                treated = tuple(self.forced.activations.get(i, keep) for i, keep in enumerate(each))
                if self._allowed(treated) and treated != choice.activations:
                    yield replace(choice, activations=treated)

    def treated_each(self, choice: Choice) -> Iterator[Choice]:
        """Return the choice with every other treatment of its layers."""
        for keeps in product(self.treatments, repeat=len(self.names)):
            treated = tuple(self.forced.activations.get(i, keep) for i, keep in enumerate(keeps))
            if treated != choice.activations and self._allowed(treated):
                yield replace(choice, activations=treated)

    def balanced(self, choice: Choice, free_bytes: int) -> Iterator[Choice]:
        """Return variations whose layers have as much more on the device as is free, or less where it is negative."""
        position = next(iter(self.costs.repeated), None)
        if position is None:
            return
        cost = self.costs.layers[position]
        if cost.layer.weight_bytes:
            number = len(choice.offloaded_weights) - math.floor(free_bytes / cost.layer.weight_bytes)
            number = min(max(number, 0), self.most_away)
            if number != len(choice.offloaded_weights):
                yield self.away(choice, number)
        held = {keep: 0.0 if keep in LEAVES else cost.held_bytes(keep) for keep in self.treatments}
        for before, after in self._pairs(choice):
            more = held[after] - held[before]
            if more * free_bytes > 0:
                count = free_bytes / more
                count = int(count) if more > 0 else math.ceil(count)
                treated = self._treat(choice, before, after, count) if count else None
                if treated is not None:
                    yield treated

    def _more_or_fewer_away(self, choice: Choice, count: int) -> Iterator[Choice]:
        if not self.most_away:
            return
        now = len(choice.offloaded_weights)
        for number in (now - count, now + count):
            if 0 <= number <= self.most_away:
                yield self.away(choice, number)

    def away(self, choice: Choice, number: int) -> Choice:
        """Return the choice with the weights of the first `number` layers offloaded, if that may vary."""
        if not self.most_away:
            return choice
        fraction, streamed = self.shares(choice)
        names = frozenset(self.names[:number])
        return self.placed(replace(choice, offloaded_weights=names), fraction, streamed)

    def _pairs(self, choice: Choice) -> Iterator[tuple[Keep, Keep]]:
        """Return treatments that layers have, each with every other one."""
        present = set(choice.activations)
        return ((a, b) for a in self.treatments if a in present for b in self.treatments if b is not a)

    def _treat(self, choice: Choice, before: Keep, after: Keep, count: int, first: bool | None = None) -> Choice | None:
        """Return the choice with another treatment of `count` layers; None where it is not possible.

        Args:
            first: of the first layers with treatment `before`, or of the last ones; None: so that the order stays.
        """
        keeps, forced = list(choice.activations), self.forced.activations
        having = [i for i, keep in enumerate(keeps) if keep is before and i not in forced]
        if first is None:
            first = TREATMENTS.index(after) < TREATMENTS.index(before)
        chosen = having[:count] if first else having[-count:]
        for i in chosen:
            keeps[i] = after
        return replace(choice, activations=tuple(keeps)) if chosen and self._allowed(keeps) else None

    def _allowed(self, keeps: Sequence[Keep]) -> bool:
        """Return whether training supports these treatments of the layers that are not forced."""
        free = [keep for i, keep in enumerate(keeps) if i not in self.forced.activations]
        for first in (LEAVES, ELEMENTWISE):  # these are counted from the first layer on
            count = sum(keep in first for keep in free)
            if not all(keep in first for keep in free[:count]):
                return False
        leave = sum(keep in LEAVES for keep in keeps)
        return leave <= max(0, len(keeps) - LAST_STAY) or not any(keep in LEAVES for keep in free)

    # ------------------------------------------------------------------ placements

    def _free(self, choice: Choice) -> _Free:
        """Return the buckets whose placement may vary."""
        away = choice.offloaded_weights
        if away not in self._free_beside:
            buckets, forced = self.workload.inventory.buckets, self.forced.placements
            numbers = [i for i, b in enumerate(buckets) if i not in forced and b.layer not in away]
            self._free_beside[away] = _Free(numbers, [buckets[i].state_bytes for i in numbers])
        return self._free_beside[away]

    @cached_property
    def _held(self) -> Sequence[Placement]:
        """Return the placements that are forced, and the host for all others."""
        return [self.forced.placements.get(i, Placement.HOST) for i in range(len(self.workload.inventory.buckets))]

    def shares(self, choice: Choice) -> tuple[float, float]:
        """Return the share of the free buckets' state that is offloaded, and the share of that which is streamed."""
        key = choice.placements, choice.offloaded_weights
        if key not in self._shares:
            free, sizes = self._free(choice), dict.fromkeys(Placement, 0)
            for i, nbytes in zip(free.numbers, free.sizes, strict=True):
                sizes[choice.placements[i]] += nbytes
            offloaded = sizes[Placement.STREAMED] + sizes[Placement.HOST]
            total = offloaded + sizes[Placement.DEVICE]
            streamed = sizes[Placement.STREAMED] / offloaded if offloaded else 0.0
            self._shares[key] = offloaded / total if total else 1.0, streamed
        return self._shares[key]

    def free_state(self, choice: Choice) -> tuple[int, int]:
        """Return the number of buckets whose placement may vary, and the bytes of their state."""
        free = self._free(choice)
        return len(free.numbers), free.cumulative[-1]

    def placed(self, choice: Choice, fraction: float, streamed: float, ends: Ends | None = None) -> Choice:
        """Return the choice with these shares of the free buckets' state; those of offloaded layers are on the host.

        Args:
            ends: what comes before and behind the buckets that alternate; None: as it is.
        """
        free, ends = self._free(choice), self.ends(choice) if ends is None else ends
        stay = len(free.numbers) - offloaded_count(free.cumulative, fraction)
        key = choice.offloaded_weights, stay, streamed, ends
        if key not in self._placements:
            found = list(self._held)
            offloaded = free.sizes[stay:]
            behind = ends._replace(host_first=max(0, ends.host_first - stay))
            placements = [Placement.DEVICE] * stay + with_ends(offloaded, streamed, behind)
            for i, placement in zip(free.numbers, placements, strict=True):
                found[i] = placement
            self._placements[key] = tuple(found)
            self._ends.setdefault(self._placements[key], ends)
        return replace(choice, placements=self._placements[key])

    def kind(self, choice: Choice) -> tuple[bool, Keep | None, Ends]:
        """Return what few small variations change: offloaded weights, the most frequent treatment, and the order."""
        most = Counter(choice.activations).most_common(1)
        return bool(choice.offloaded_weights), most[0][0] if most else None, self.ends(choice)

    def ends(self, choice: Choice) -> Ends:
        """Return the order of the offloaded buckets; `Ends()` for placements that were not made here."""
        return self._ends.get(choice.placements, Ends())


def with_ends(sizes: Sequence[int], streamed: float, ends: Ends) -> list[Placement]:
    """Return placements as `alternating`, but with these buckets before and behind those that alternate.

    Args:
        streamed: share of all bytes to stream; where the buckets between the ends are less than that, all of them.
    """
    first = min(ends.host_first, len(sizes))
    last = min(round(ends.host * len(sizes)), len(sizes) - first)
    if first or last:
        between = sizes[first : len(sizes) - last]
        share = min(1.0, streamed * sum(sizes) / max(1, sum(between)))
        return [*[Placement.HOST] * first, *with_ends(between, share, Ends(ends.streamed)), *[Placement.HOST] * last]
    if not ends.streamed or not 0.0 < streamed < 1.0:
        return alternating(sizes, streamed)
    cumulative = [0, *accumulate(sizes)]
    before = offloaded_count(cumulative, ends.streamed * streamed)  # as many as are nearest to that share of the bytes
    rest = cumulative[-1] - cumulative[before]
    share = min(1.0, (1 - ends.streamed) * streamed * cumulative[-1] / rest) if rest else 0.0
    return [*[Placement.STREAMED] * before, *alternating(sizes[before:], share)]


class Judged(Protocol):
    """A choice whose bytes and predicted time are known, as `hostward.plan.search.Candidate`."""

    @property
    def choice(self) -> Choice: ...

    @property
    def order(self) -> tuple[float, int, int]:
        """Seconds first; smaller is better."""
        ...

    @property
    def least_s(self) -> float:
        """Return a lower bound on these seconds that needs no simulation."""
        ...

    @property
    def closer_s(self) -> float:
        """Return a bound that is closer and needs a simulation of less than a step."""
        ...


J = TypeVar("J", bound=Judged)


def fastest(judged: Iterable[J]) -> J | None:
    """Return the first by `order`, and simulate no more than it takes to know it; None if there are none."""
    ordered = sorted(judged, key=lambda c: c.least_s)
    bounds = [(candidate.least_s, False, at) for at, candidate in enumerate(ordered)]
    best: tuple[tuple[float, int, int], int] | None = None
    while bounds and (best is None or bounds[0][0] <= best[0][0]):
        _, close, at = heappop(bounds)
        if close:
            found = ordered[at].order, at
            best = found if best is None else min(best, found)
        else:
            heappush(bounds, (ordered[at].closer_s, True, at))
    return None if best is None else ordered[best[1]]


@dataclass
class PatternSearch(Generic[J]):
    """Follow variations that are better until there is none.

    Args:
        judge: returns the bytes and time of a choice, and takes whether the host accumulates its gradients.
        places: whether the host may accumulate gradients, and whether it may not.
        excess_bytes: by how much a judged choice exceeds the budgets.
        free_bytes: the device memory that a judged choice leaves within its budget; negative where it exceeds it.
    """

    neighbourhood: Neighbourhood
    judge: Callable[[Choice, bool], J]
    places: Sequence[bool]
    excess_bytes: Callable[[J], int]
    free_bytes: Callable[[J], int]
    tried: set[tuple[Choice, float]] = field(default_factory=set)
    """Variations that were tried, and with what streamed share where none of their state is offloaded."""
    hopeless: frozenset[bool] = frozenset()
    """Those of `places` with which nothing fits, where something does with the others."""
    last: int = 0
    """Number of the variation that was better last: it is tried first, as it may be better again."""

    def best(self, found: Iterable[J]) -> J:
        """Return the fastest of what fits, or what fits best where nothing does. Raises ValueError if there is none."""
        excess = [(self.excess_bytes(judged), judged) for judged in found]
        least = min(over for over, _ in excess)
        alike = [judged for over, judged in excess if over == least]
        return alike[0] if least else fastest(alike) or alike[0]

    def follow(self, starts: Sequence[J], followed: Sequence[int] = FOLLOWED) -> J:
        """Return the best choice that small variations lead to, in large steps from the best starts of several kinds.

        Args:
            followed: as `FOLLOWED`; fewer numbers are of the smallest variations.
        """
        found = list(starts)
        for (step, gain), count in zip(STEPS[-len(followed) :], followed, strict=True):
            different: dict[tuple[object, ...], J] = {}
            for judged in sorted(found, key=self._order):
                different.setdefault(self.neighbourhood.kind(judged.choice), judged)
            found = [self._followed(start, step, gain) for start in list(different.values())[:count]]
        found.sort(key=self._order)
        return found[0]

    def jump(self, best: J) -> J:
        """Return the best choice that small variations of one large change lead to, for as long as there is a faster.

        Args:
            best: fits, and is returned if nothing is faster.
        """
        tried = last = 0
        better: J | None = best
        while better is not None:
            best, better = better, None
            self.tried.clear()  # from elsewhere, a variation may be better than what it is a variation of
            jumps = list(self.neighbourhood.jumps(best.choice))
            for at in (*range(last, len(jumps)), *range(min(last, len(jumps)))):
                landed = self._landed(jumps[at], best.order[0])
                if landed is not None and landed.order[0] < best.order[0] * (1 - WORTH_JUMPING):
                    better, last = landed, at + 1
                if better is not None or tried + len(self.tried) > JUMPED:
                    break
            tried += len(self.tried)
        return best

    def _landed(self, choice: Choice, best_s: float) -> J | None:
        """Return what the smallest variations of a choice lead to; None where it is too slow, or does not fit."""
        limit_s = best_s * (1 + WORTH_LANDING)
        filled = self.filled(choice, (self.neighbourhood.shares(choice)[1],))
        found = fastest(c for c in filled if not self.excess_bytes(c) and c.least_s < limit_s)
        if found is None or found.order[0] > limit_s:
            return None
        for step, gain in STEPS[-2:]:
            found = self._followed(found, step, gain)
        return found

    def _order(self, judged: J) -> tuple[int, float]:
        excess = self.excess_bytes(judged)
        return excess, 0.0 if excess else judged.order[0]

    def _followed(self, start: J, step: float, gain: float) -> J:
        best, excess = start, self.excess_bytes(start)
        while (better := self._better(best, excess, step, gain)) is not None:
            best, excess = better, self.excess_bytes(better)
        return best

    def spread(self, start: Choice, shares: Sequence[float] = SHARES, limit_s: float = math.inf) -> list[J]:
        """Return the best choices with each treatment of all layers and several numbers of offloaded layers.

        Those that cannot be worth following are left out.

        Args:
            shares: streamed shares to try with each.
            limit_s: what takes longer than so many seconds is not worth following.
        """
        around, made = self.neighbourhood, list[tuple[Choice, list[J], list[J]]]()
        numbers = {round(part * around.most_away) for part in AWAY}
        for treated in (start, *around.alike(start)):
            for choice in (around.away(treated, n) for n in sorted(numbers | {self._fewest_away(treated)})):
                judged, first = self.filled(choice, shares), list[J]()
                # The CPU's share of the gradients leaves the device soonest where it steps what backward makes first.
                if around.workload.ranks == 1 and not any(map(self._fits_mixed, judged)):
                    first = self._streamed_first(choice, SHARES_FIRST)
                made.append((choice, judged + first, first))
        made.sort(key=lambda each: min(map(self._bound, each[1])))
        found = list[J]()
        for choice, judged, first in made:
            excess, least_s = min(map(self._bound, judged))
            if found and not excess and least_s > min(limit_s, self.best(found).order[0] * (1 + WORTH_FOLLOWING)):
                break
            best = self.best(judged)
            if not excess:
                best = self._closer(choice, best, self._streamed_first if best in first else self.filled)
            found.append(best)
            if not excess and around.workload.step_early:  # where that order is not worth as much, a jump finds it
                share = around.shares(best.choice)[1]
                first = self._streamed_first(choice, [share, *(share + by for by in (-CLOSER[0], CLOSER[0]))])
                found += [self._closer(choice, self.best(first), self._streamed_first)] if first else []
        return found

    def _closer(self, choice: Choice, best: J, fill: Callable[[Choice, Sequence[float]], list[J]]) -> J:
        """Return the best of a choice and those that stream somewhat less or more of the state."""
        for distance in CLOSER:
            share = self.neighbourhood.shares(best.choice)[1]
            best = self.best([best, *fill(choice, (max(0.0, share - distance), min(1.0, share + distance)))])
        return best

    def host_last(self, found: Iterable[J], limit_s: float) -> list[J]:
        """Return the best of these with the last offloaded buckets stepped by the CPU, as far as they fit.

        Args:
            limit_s: what takes longer than so many seconds is left out.
        """
        around, made = self.neighbourhood, list[J]()
        for choice in (judged.choice for judged in sorted(found, key=self._order)[: FOLLOWED[0]]):
            fraction, streamed = around.shares(choice)
            if 0.0 < streamed < 1.0:
                best = self.best(self.filled(around.placed(choice, fraction, streamed, HOST_LAST), (streamed,)))
                if not self.excess_bytes(best) and best.order[0] < limit_s:
                    made.append(best)
        return made

    def embedding_on_host(self, found: Iterable[J], best: J) -> list[J]:
        """Return the best with each treatment of these in which the CPU steps what comes before the layers.

        The gradients of that come last, when the device may hold all others: with them on the host, fewer layers'
        weights have to be offloaded.

        Args:
            best: what they have in common with it otherwise.
        """
        around, made, like = self.neighbourhood, list[J](), best.choice
        fraction, streamed = around.shares(like)
        ends = around.ends(like)._replace(host_first=around.before_layers)
        most = len(like.offloaded_weights)
        numbers = range(max(0, most - max(1, round(FEWER_AWAY * len(around.names)))), most + 1)
        for keeps in dict.fromkeys(judged.choice.activations for judged in (best, *found)):
            treated = replace(like, activations=keeps)
            each = (around.placed(around.away(treated, number), fraction, streamed, ends) for number in numbers)
            judged = [self.judge(choice, like.gradients_on_host) for choice in each]
            fitting = fastest(choice for choice in judged if not self.excess_bytes(choice))
            made += [] if fitting is None else [fitting]
        return made

    def _streamed_first(self, choice: Choice, shares: Sequence[float]) -> list[J]:
        """Return the choices that fit and stream about these shares of the state, all of it before the rest."""
        found = list[J]()
        for share in (share for share in shares if 0.0 < share < 1.0):
            first = self.neighbourhood.placed(choice, 1.0, share, Ends(streamed=1.0))
            found += [judged for judged in self.filled(first, (share,)) if not self.excess_bytes(judged)]
        return found

    def _fits_mixed(self, judged: J) -> bool:
        """Return whether a choice fits that streams some of the offloaded state, and not nearly all of it."""
        return not self.excess_bytes(judged) and 1 / 8 < self.neighbourhood.shares(judged.choice)[1] < 7 / 8

    def _fewest_away(self, choice: Choice) -> int:
        """Return how many layers' weights must be offloaded if all state is on the host; the most if none fits."""
        around = self.neighbourhood

        def fits(number: int) -> bool:
            tried = around.placed(around.away(choice, number), 1.0, 0.0)
            places = (place for place in self.places if place not in self.hopeless)
            return any(not self.excess_bytes(self.judge(tried, place)) for place in places)

        return bisect_left(range(around.most_away), True, key=fits)

    def _bound(self, judged: J) -> tuple[int, float]:
        """Return the bytes beyond the budgets, and the lower bound of the step's time."""
        return self.excess_bytes(judged), judged.least_s

    def gridded(self, found: Sequence[J]) -> None:
        """Judge all shares, with the treatments and offloaded layers of each choice worth following.

        For workloads of few buckets: one more or less of them changes the step by much, and the number of staging
        buffers with it, so the best shares may have worse ones all around them.

        Args:
            found: choices, some of which fit; those that do not are worth following as well.
        """
        around, best = self.neighbourhood, self.best(found)
        best_s = math.inf if self.excess_bytes(best) else best.order[0]
        limit_s = best_s * (1 + WORTH_FOLLOWING)
        kinds: dict[tuple[object, ...], Choice] = {}
        for choice in (c.choice for c in sorted(found, key=lambda c: c.least_s) if c.least_s < limit_s):
            if (choice.activations, choice.offloaded_weights, choice.gradients_on_host) in kinds:
                continue
            each = around.treated_each(choice) if len(around.names) <= FEW_LAYERS else ()
            for treated in (choice, *each):
                kinds.setdefault((treated.activations, treated.offloaded_weights, treated.gradients_on_host), treated)
        for choice in kinds.values():
            count, _ = around.free_state(choice)
            if self.judge(around.placed(choice, 0.0, 0.0), choice.gradients_on_host).least_s >= best_s:
                continue
            for part, share in product(range(1, count + 1), range(GRID + 1)):
                self.judge(around.placed(choice, part / count, share / GRID), choice.gradients_on_host)

    def filled(self, choice: Choice, shares: Iterable[float]) -> list[J]:
        """Return the choice with each of these streamed shares, and as little state offloaded as memory allows.

        Where the share of the state that the choice offloads fits, it is among them, too: the device may have more to
        step than forward and backward hide on the host.
        """
        found, fraction = list[J](), self.neighbourhood.shares(choice)[0]
        for streamed in shares:
            for place in self.places:
                if place in self.hopeless:
                    fraction = 1.0
                    continue
                judged, fraction = self._filled(choice, fraction, streamed, place)
                found += judged
        return found

    def _filled(self, choice: Choice, fraction: float, streamed: float, place: bool) -> tuple[list[J], float]:
        """Return what fits on the device with shares of the state offloaded, or that with all of it, and the smallest.

        The device's memory is nearly linear in that share, so each guess is where the last one leads, as long as that
        is between the largest known not to fit and the smallest known to.
        """
        around, fitting = self.neighbourhood, list[J]()
        count, state_bytes = around.free_state(choice)
        low, high, step = -1.0, 2.0, 1
        for _ in range(GUESSES):
            judged = self.judge(around.placed(choice, fraction, streamed), place)
            free = self.free_bytes(judged)
            if free < 0:
                low = fraction
            else:
                fitting.append(judged)
                high = fraction
            at_end = not state_bytes or low >= 1.0 or high <= 0.0
            # Of few buckets, each also changes how many staging buffers there are, and how large.
            if at_end or high - low <= 1 / count or (count > FEW_BUCKETS and 0 <= free < state_bytes / count):
                break
            guess = fraction - free / state_bytes
            if free < 0:  # some buckets more, at least: a smaller step may lead to the same placements
                guess, step = max(guess, fraction + step / count), 2 * step
            guess = min(1.0, max(0.0, guess))
            fraction = guess if low < guess < high else (max(low, 0.0) + min(high, 1.0)) / 2
        return (fitting, high) if fitting else ([judged], fraction)

    def _better(self, best: J, excess: int, step: float, gain: float) -> J | None:
        """Return the first variation that fits better, or as well and is faster."""
        limit_s = best.order[0] * (1 - gain)
        # The bound of a variation is about as far from its time as that of what is varied.
        bound_s = min(limit_s, best.least_s * (1 - gain) * (1 + SLACK))
        around, place = self.neighbourhood, best.choice.gradients_on_host

        def better(choice: Choice, shares: Sequence[float]) -> J | None:
            for streamed in shares:
                fraction = around.shares(choice)[0]
                first = around.placed(choice, fraction, streamed), 0.0 if fraction else streamed
                if first in self.tried:
                    continue
                self.tried.add(first)
                for judged in self.filled(choice, (streamed,)):
                    over = self.excess_bytes(judged)
                    fits = over == excess == 0 and judged.least_s < bound_s
                    if over < excess or (fits and judged.closer_s < limit_s and judged.order[0] < limit_s):
                        return judged
            return None

        moves = list(around.by(best.choice, step))
        for at in (*range(self.last, len(moves)), *range(min(self.last, len(moves)))):
            choice, shares = moves[at]
            found = better(choice, shares)
            if found is None:
                # What the variation takes or frees may as well come from weights and activations, not from the state.
                streamed, free = around.shares(choice)[1], self.free_bytes(self.judge(choice, place))
                balanced = (better(other, (streamed,)) for other in around.balanced(choice, free))
                found = next((judged for judged in balanced if judged is not None), None)
            if found is not None:
                self.last = at
                return found
        return None
