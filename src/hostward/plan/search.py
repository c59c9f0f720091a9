"""Find the best choice within budgets, and the price in time of less device memory. No torch.

The *frontier* is made first, without regard to budgets: a linear program for each of a ladder of device limits, and of
host limits. The memory model estimates each solution, and `hostward.plan.step_time` predicts its time where it may be
the best. Budgets then select among these solutions. So a choice that fits in a budget also fits in a larger one, and a
larger budget never gives a slower plan.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import groupby

from hostward.core.placement import Placement, placements_of, summed_among
from hostward.plan.budgets import Budgets, Required, needed
from hostward.plan.cost_model import SUM_BYTES, Costs, Speeds, balanced_share
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.memory_model import LOAD, MemoryModel, Needs
from hostward.plan.refinement import (
    FEW_BUCKETS,
    FEW_MICROBATCHES,
    FOLLOWED_AGAIN,
    FOLLOWED_EMBEDDING,
    FOLLOWED_HOST_LAST,
    FOLLOWED_NEAR,
    WORTH_FOLLOWING,
    WORTH_LANDING,
    Ends,
    Neighbourhood,
    PatternSearch,
    fastest,
)
from hostward.plan.solver import LAST_STAY, Forced, Limits, LinearProgram
from hostward.plan.step_time import Prediction, least_s, predict_of
from hostward.plan.workload import Workload
from hostward.schedule.staging import MIN_STAGING_BUFFERS, staging_buffer_bytes, streamed_bytes

DEVICE_LEVELS = 10
"""Ladder rungs in equal differences, and as many in equal ratios: they are closest where memory is short."""
HOST_LEVELS = (0.7, 0.4, 0.2)
"""Tried shares of the largest host memory that any choice on the ladder of device limits takes."""
_HOST_DEVICE_LEVELS = 4
_REACH = 1.1
"""Factor on the device's memory, by the program's own count of bytes, which differs a little from the memory model's.
"""
_FINE_PARTS = 1024
"""Parts of the state in which what is offloaded at the limits is tried."""
_EVEN_PARTS = 16
_HOST_PARTS = 8
_SAME_SHARE = 0.05
"""Streamed shares that differ by no more are not both tried."""
_BOTH_AT = 2
"""Both are tried at every second fraction, and at the least ones: each candidate costs a plan some milliseconds."""
FEW_BUFFERS_SHARES = (1 / 2, 1.0)
"""Streamed shares that are tried at first with the least number of GPU staging buffers."""
NOT_MUCH = 0.02
"""Share of the step's time without offloading that a plan may take besides, so that they are not tried."""
WORTH_FEW_BUFFERS = 0.002
"""Share of the step's time that one of these must save to be followed in large steps."""
NEAR_FEW_BUFFERS = 0.012
"""Share of the step's time by which one may be slower where the planner searches around it in small steps."""
_ALIKE = 0.005
"""Share of the step's time by which a plan with fewer offloaded layers of weights may be slower."""
_NEARLY = 0.1
"""Share of a budget by which the nearest candidate may exceed it where the planner still searches around it."""
_LESS = 0.97
"""Part of the least memory that is known which a search for less device memory fills with state, and below which it is
worth another search.
"""
_FAR = 1 << 62
"""Bytes by which whatever exceeds another budget is further away than what does not."""
_EVEN = (Keep.KEEP, Keep.ELEMENTWISE, Keep.RECOMPUTE)
_SMALLEST = Keep.RECOMPUTE_OFFLOAD
"""Treatment of all layers that keeps least of them on the device."""


def _only(share: float, _: int) -> Sequence[float]:
    return (share,)


def _ladder(low: float, high: float, levels: int) -> list[float]:
    """Return device limits from `low` to `high`."""
    equal = [low + (high - low) * level / levels for level in range(levels + 1)]
    ratios = [low * (high / low) ** (level / levels) for level in range(1, levels)] if low > 0 else []
    return sorted({*equal, *ratios})


@dataclass(frozen=True)
class Candidate:
    """Hold a choice and its needs.

    `plain` is the candidate that offloads only what is forced; None where this is that candidate.
    """

    choice: Choice
    needs: Needs
    costs: Costs = field(repr=False, compare=False)
    plain: Candidate | None = field(default=None, repr=False, compare=False)

    @cached_property
    def prediction(self) -> Prediction:
        """Predict the time of a step.

        The time that the device saves when it does not step some of the state has never been seen in a measured step,
        so offloading is never predicted to be faster than no offloading.
        """
        found = predict_of(self.costs, self.choice, self.needs)
        return replace(found, step_s=max(found.step_s, self.plain.prediction.step_s)) if self.plain else found

    @property
    def is_predicted(self) -> bool:
        """Return whether the time of a step, or a close bound on it, has been asked for."""
        return not vars(self).keys().isdisjoint(("prediction", "closer_s"))

    @cached_property
    def least_s(self) -> float:
        """Return a lower bound on the predicted step time, which needs no simulation."""
        return max(least_s(self.costs, self.choice, self.needs), self.plain.prediction.step_s if self.plain else 0.0)

    @cached_property
    def closer_s(self) -> float:
        """Return a closer lower bound, which needs a simulation of one microbatch."""
        if self.costs.workload.microbatches <= 2:
            return self.least_s
        return max(self.least_s, least_s(self.costs, self.choice, self.needs, simulated=True))

    @property
    def order(self) -> tuple[float, int, int]:
        """Return a sort key: faster first, then less host memory, then less device memory."""
        return self.prediction.step_s, self.needs.host_bytes, self.needs.device_peak_bytes


class Frontier:
    """Hold candidates for one workload on one machine.

    Args:
        required: the memory model.
        forced: what the planner may not choose.
        most_bytes: the device's memory. Choices beyond it are estimated only as they come up, until `widen`; None:
            all are.
        weighed: False: no choice is estimated yet.
    """

    def __init__(
        self,
        workload: Workload,
        speeds: Speeds,
        required: Required,
        forced: Forced | None = None,
        most_bytes: int | None = None,
        *,
        weighed: bool = True,
    ) -> None:
        self.workload = workload
        self._most_bytes = math.inf if most_bytes is None else most_bytes
        self.costs = Costs(workload, speeds)
        self._required = required
        self._forced = forced or Forced()
        if workload.step_early:  # gradients that the host accumulates are final only after the last addition
            self._forced = replace(self._forced, gradients_on_host=False)
        self._seen: dict[Choice, Candidate] = {}
        self._probes: set[Choice] = set()
        """Choices that a search came past and whose time was not needed: `unbeaten` does not predict it, either."""
        self._approached: dict[Budgets, Sequence[Candidate]] = {}
        self._least: dict[tuple[Budgets, str], int | None] = {}
        self._placed: dict[tuple[float, float, frozenset[str]], tuple[Placement, ...]] = {}
        self._frees: dict[tuple[Placement, ...], bool] = {}
        self._programs: dict[frozenset[str], LinearProgram] = {}
        plain = self._plain()
        choice = self._settled(plain, on_host=bool(self._forced.gradients_on_host))
        self.base = self._seen[choice] = Candidate(choice, required(workload, choice), self.costs)
        """Candidate with everything on the device and nothing recomputed, as far as nothing else is forced."""
        self._add(plain)
        last_resort = workload.ranks > 1 and self._forced.offloaded_weights is None
        self._sets = [frozenset()] if last_resort else self._weight_sets()
        if weighed:
            self._weigh_all()

    def widen(self) -> None:
        """Estimate also the choices beyond the device's memory, to find what more memory would allow."""
        self._most_bytes = math.inf
        self._weigh_all()

    def fits(self, budgets: Budgets) -> bool:
        """Return whether any candidate fits within the budgets, with sharded weights offloaded only if nothing else
        does.

        Sharded weights are a last resort because the time for which gathers wait for them is not predicted.
        """
        if not self._holds_fitting(budgets):
            self._sets = self._weight_sets()
            self.widen()
            if not self._holds_fitting(budgets) and self._may_fit(budgets):
                self.approach(budgets)
        return self._holds_fitting(budgets)

    def approach(self, budgets: Budgets) -> Sequence[Candidate]:
        """Add, of the choices that treat all layers alike, those nearest to these budgets; return what is known then.

        They offload as little of the state, or the weights of as few layers, as the device's budget allows, or as much
        as the others allow. So what nothing fits for is known to a thousandth of the state, and not only by the ladder.
        """
        if budgets in self._approached:
            return self._approached[budgets]
        before, most_away = set(self._seen), max(map(len, self._weight_sets()), default=0)
        beside = replace(budgets, device_bytes=None)
        device = Budgets(budgets.device_bytes, phases=budgets.phases)

        def within(candidate: Candidate) -> bool:
            return not device.over(candidate.needs)

        def beyond(candidate: Candidate) -> bool:
            return bool(beside.over(candidate.needs))

        def first(reached: Callable[[Candidate], bool], line: Callable[[int], Candidate], last: int) -> None:
            if reached(line(last)):
                bisect_left(range(last), True, key=lambda part: reached(line(part)))

        for streamed in (0.0, 1.0):
            for weights in self._weight_sets():
                offloaded = partial(self._part, streamed, weights)
                first(within, offloaded, _FINE_PARTS)
                first(beyond, offloaded, _FINE_PARTS)
            if self._forced.offloaded_weights is None:
                for keep in (Keep.RECOMPUTE, _SMALLEST):
                    first(within, partial(self._away, streamed, keep), most_away)
        self._probes |= {choice for choice, c in self._seen.items() if choice not in before and not c.is_predicted}
        self._approached[budgets] = self.candidates
        return self._approached[budgets]

    def _part(self, streamed: float, weights: frozenset[str], part: int) -> Candidate:
        return self._alike(part / _FINE_PARTS, streamed, Keep.RECOMPUTE, weights)

    def _away(self, streamed: float, keep: Keep, count: int) -> Candidate:
        return self._alike(1.0, streamed, keep, frozenset(layer.name for layer in self.workload.repeated[:count]))

    def _may_fit(self, budgets: Budgets) -> bool:
        """Return False where no choice can fit, by a bound that needs no estimate."""
        return budgets.may_hold(self.workload.least_bytes)

    def _holds_fitting(self, budgets: Budgets) -> bool:
        return any(not budgets.over(candidate.needs) for candidate in self._seen.values())

    def smallest(self, budgets: Budgets) -> Candidate | None:
        """Return the first choice within the budgets of those that keep least on the device: then `fits` is true, too.

        All state is on the host, and so are the inputs of layers, which are recomputed.
        """
        smallest = (self._alike(1.0, 0.0, _SMALLEST, weights) for weights in self._weight_sets())
        return next((candidate for candidate in smallest if not budgets.over(candidate.needs)), None)

    def fits_at_last(self, budgets: Budgets) -> bool:
        """Return whether the frontier fits, or a search where it nearly does; then `best_at_last` finds a choice."""
        return self.fits(budgets) or (self._nearly_fits(budgets) and self.refined(budgets) is not None)

    def fits_by_bytes(self, budgets: Budgets) -> bool:
        """Return whether the frontier fits, or a search by bytes alone; then `best_at_last` finds a choice, too."""
        if self.fits(budgets):
            return True
        if not self._may_fit(budgets):
            return False
        found = ((self.least(name, budgets), limit) for name, limit in budgets.limits.items())
        return any(size is not None and size <= limit for size, limit in found)

    def best_at_last(self, budgets: Budgets) -> Candidate | None:
        """Return the fastest choice that is found within the budgets; None where none fits.

        Of those that predictions do not tell apart, it is the one with the fewest offloaded layers of weights. What is
        found around the frontier's candidates becomes part of it.
        """
        if not self.fits_by_bytes(budgets) and not self._nearly_fits(budgets):
            return None
        best = self.refined(budgets)
        if best is None or not best.choice.offloaded_weights:
            return best
        limit_s = best.prediction.step_s * (1 + _ALIKE)
        fewer = (c for c in self._seen.values() if c.least_s <= limit_s and not budgets.over(c.needs))
        alike = [c for c in fewer if c.closer_s <= limit_s and c.prediction.step_s <= limit_s]
        return min(alike, key=lambda c: (len(c.choice.offloaded_weights), c.order))

    def least(self, name: str, budgets: Budgets) -> int | None:
        """Return the least bytes of this kind of memory with which a choice keeps the other limits; None if none does.

        It is asked where the frontier does not fit, and searches by bytes alone, from the frontier's candidate with the
        least. With this limit raised to what was found the same search leads there again.
        """
        if (budgets, name) not in self._least:
            others = budgets.without(name)
            far = not self._may_fit(budgets) and not self._holds_fitting(others)
            in_vain = far and self.smallest(others) is None
            self._least[budgets, name] = None if in_vain else self._least_of(name, budgets, self.approach(budgets))
        return self._least[budgets, name]

    def _least_of(self, name: str, budgets: Budgets, known: Sequence[Candidate]) -> int | None:
        others = budgets.without(name)

        def need(candidate: Candidate) -> int:
            return needed(candidate.needs, budgets.phases)[name]

        def smallest(among: Iterable[Candidate]) -> Candidate | None:
            return min((c for c in among if not others.over(c.needs)), key=need, default=None)

        start = smallest(known)
        if start is None:
            return None
        least = need(start)

        def excess(candidate: Candidate) -> int:
            nonlocal least
            if over := sum(others.over(candidate.needs).values()):
                return _FAR + over
            least = min(least, need(candidate))
            return need(candidate)

        def free(candidate: Candidate) -> int:
            within = replace(others, device_bytes=int(_LESS * least)) if name == "device" else others
            return self._free(candidate, within)

        before = set(self._seen)
        reached = math.inf
        # Small steps may have led to where large ones lead on.
        while start is not None and least < _LESS * reached:
            reached = least
            self._search(excess, free, order_varies=False).follow([start])
            start = smallest(self._seen.values())
        self._probes |= {c.choice for c in self._seen.values() if c.choice not in before and not c.is_predicted}
        return least

    def _nearly_fits(self, budgets: Budgets) -> bool:
        """Return whether the nearest candidate exceeds each budget so little that a search may find one that fits.

        Of few buckets all shares are searched, and each is much of the memory.
        """
        if not self._may_fit(budgets):
            return False
        if len(self.workload.inventory.buckets) <= FEW_BUCKETS:
            return True
        over = budgets.over(self.nearest(budgets).needs)
        return all(size <= _NEARLY * budgets.limits[name] for name, size in over.items())

    def refined(self, budgets: Budgets) -> Candidate | None:
        """Return the best that a search around the best candidates finds within the budgets; None where none fits."""

        def excess(candidate: Candidate) -> int:
            return sum(budgets.over(candidate.needs).values())

        before = set(self._seen)
        search = self._search(excess, lambda candidate: self._free(candidate, budgets))
        start = search.best(self._seen.values())
        if not excess(start) and start.prediction.step_s <= self.base.prediction.step_s:
            return self.best(budgets)  # nothing is predicted to be faster
        gradients_bytes = SUM_BYTES * sum(self.costs.numels) if self.workload.microbatches > 1 else 0
        if not excess(start) and gradients_bytes > budgets.limits.get("device", math.inf):
            search.hopeless = frozenset({False})  # the device would hold all of them
        starts = self._starts(search, [start, *search.spread(start.choice)])
        search.follow(starts)
        few = self._with_few_buffers(search, budgets)
        if len(self.workload.inventory.buckets) <= FEW_BUCKETS:
            search.gridded(self.candidates)
        fastest_yet = self.best(budgets)
        if fastest_yet is not None and self._leaves_much(fastest_yet):
            search.jump(fastest_yet)
            self._from_slower(search, starts, few, budgets)
            fastest_yet = self.best(budgets)
        self._probes |= {c.choice for c in self._seen.values() if c.choice not in before and not c.is_predicted}
        return fastest_yet

    @staticmethod
    def _starts(search: PatternSearch[Candidate], found: Sequence[Candidate]) -> list[Candidate]:
        """Return the best of each kind, as far as they are worth following."""
        apart: dict[tuple[bool, Keep | None, Ends], list[Candidate]] = {}
        for candidate in found:
            apart.setdefault(search.neighbourhood.kind(candidate.choice), []).append(candidate)
        starts = [search.best(alike) for alike in apart.values()]
        best = search.best(starts)
        limit_s = best.prediction.step_s * (1 + WORTH_FOLLOWING)
        return [c for c in starts if c is best or (not search.excess_bytes(c) and c.prediction.step_s < limit_s)]

    def _with_few_buffers(self, search: PatternSearch[Candidate], budgets: Budgets) -> Sequence[Candidate]:
        """Return choices with the least number of GPU staging buffers, and search from them if one is faster.

        More of them take what weights and activations could have, and state that is read early delays weights. None
        are returned where the buffers' bytes are forced.
        """
        best = self.best(budgets)
        if best is None or self._forced.staging_bytes is not None or not self._leaves_much(best):
            return ()
        few = replace(best.choice, staging_bytes=self._few_buffers_bytes)  # which what it is varied to has as well
        start = self._weigh(few, on_host=few.gradients_on_host)
        limit_s = best.prediction.step_s * (1 + NOT_MUCH)
        found = [start, *search.spread(start.choice, FEW_BUFFERS_SHARES, limit_s)]
        if search.best(found).prediction.step_s < best.prediction.step_s * (1 - WORTH_FEW_BUFFERS):
            search.follow(self._starts(search, found), FOLLOWED_AGAIN)
        return found

    def _from_slower(
        self, search: PatternSearch[Candidate], starts: Sequence[Candidate], few: Sequence[Candidate], budgets: Budgets
    ) -> None:
        """Search from what is a little slower than the best, where it is known to lead on at times.

        That is on one GPU with the least number of staging buffers, and, with several microbatches, where the CPU steps
        what backward makes first, or last.

        Args:
            starts: choices of several kinds.
            few: choices with the least number of staging buffers.
        """
        best = self.best(budgets)
        if best is None or self.workload.ranks > 1 or self.workload.microbatches > FEW_MICROBATCHES:
            return
        search.tried.clear()
        near = search.best(few) if few else best
        if best.prediction.step_s < near.prediction.step_s < best.prediction.step_s * (1 + NEAR_FEW_BUFFERS):
            search.follow([near], FOLLOWED_NEAR)
        if self.workload.microbatches == 1:
            return  # the host accumulates no gradients, so the order of buckets hardly changes the device's memory
        limit_s = best.prediction.step_s * (1 + WORTH_LANDING)
        if best.choice.offloaded_weights:
            found = [c for c in search.embedding_on_host(starts, best) if c.prediction.step_s < limit_s]
            if found:
                search.follow(found, FOLLOWED_EMBEDDING)
        if not self.workload.step_early:
            found = search.host_last(starts, limit_s)
            if found:
                search.follow(found, FOLLOWED_HOST_LAST)

    def _leaves_much(self, best: Candidate) -> bool:
        """Return whether there is much to save: what the candidate takes longer than no offloading."""
        return best.prediction.step_s > self.base.prediction.step_s * (1 + NOT_MUCH)

    @cached_property
    def _few_buffers_bytes(self) -> int:
        """Return the bytes of the least number of GPU staging buffers, for whatever is streamed."""
        return MIN_STAGING_BUFFERS * staging_buffer_bytes([streamed_bytes(b) for b in self.workload.inventory.buckets])

    def _search(
        self, excess: Callable[[Candidate], int], free: Callable[[Candidate], int], *, order_varies: bool = True
    ) -> PatternSearch[Candidate]:
        few_bytes = self._few_buffers_bytes if self._forced.staging_bytes is None else None
        around = Neighbourhood(self.costs, self._forced, self._sets != [frozenset()], order_varies, few_bytes)
        asked = self._forced.gradients_on_host
        places = (False, True)[: min(2, self.workload.microbatches)] if asked is None else (asked,)

        def judge(choice: Choice, on_host: bool) -> Candidate:
            return self._weigh(choice, on_host=on_host)

        return PatternSearch(around, judge, places, excess, free)

    @staticmethod
    def _free(candidate: Candidate, budgets: Budgets) -> int:
        """Return the device memory that the candidate leaves within the budgets, in bytes; negative beyond them."""
        peak = candidate.needs.device_peak_bytes
        return budgets.limits.get("device", peak) - peak

    def _weigh_all(self) -> None:
        for weights in self._sets:
            self._climb(weights)
        if frozenset() in self._sets:
            self._even()

    @property
    def candidates(self) -> list[Candidate]:
        return list(self._seen.values())

    def _plain(self) -> Choice:
        forced = self._forced
        weights = forced.offloaded_weights or frozenset()
        placements = tuple(
            forced.placements.get(i, Placement.HOST if b.layer in weights else Placement.DEVICE)
            for i, b in enumerate(self.workload.inventory.buckets)
        )
        count = len(self.workload.repeated)
        keeps = tuple(forced.activations.get(i, Keep.KEEP) for i in range(count))
        return Choice(placements, keeps, weights)

    def _weight_sets(self) -> list[frozenset[str]]:
        """List the sets of offloaded layers to try: none, half, all but the last.

        Weights are offloaded as a last resort, so few numbers of layers are tried.
        """
        if self._forced.offloaded_weights is not None:
            return [self._forced.offloaded_weights]
        names = [layer.name for layer in self.workload.repeated]
        elsewhere = {
            self.workload.inventory.buckets[i].layer
            for i, placement in self._forced.placements.items()
            if placement is not Placement.HOST
        }
        counts = sorted({0, len(names) // 2, max(0, len(names) - 1)})
        sets = [frozenset(names[:count]) for count in counts]
        return [chosen for chosen in sets if not chosen & elsewhere]

    def _add(self, choice: Choice) -> Candidate:
        """Add a choice with the place of gradient accumulation that takes less device memory.

        Accumulation on the device is added as well where that differs and fits: on the host, every microbatch's
        gradients take PCIe bandwidth and host memory.
        """
        asked = self._forced.gradients_on_host
        if asked is not None:
            return self._weigh(choice, on_host=asked)
        frees = self._frees_device(choice.placements)
        found = self._weigh(choice, on_host=frees)
        before_bytes = found.needs.phase(LOAD).device_bytes
        if frees and before_bytes + SUM_BYTES * sum(self.costs.numels) <= self._most_bytes:
            self._weigh(choice, on_host=False)
        return found

    def _frees_device(self, placements: tuple[Placement, ...]) -> bool:
        """Return whether accumulating gradients on the host frees device memory.

        It does with several microbatches, and parameters that are wholly there.
        """
        if self.workload.microbatches == 1:
            return False
        if placements not in self._frees:
            self._frees[placements] = bool(summed_among(self.costs.sharing, placements))
        return self._frees[placements]

    def _weigh(self, choice: Choice, *, on_host: bool) -> Candidate:
        choice = self._settled(choice, on_host=on_host)
        if choice not in self._seen:
            needs = self._required(self.workload, choice)
            self._seen[choice] = Candidate(choice, needs, self.costs, self.base)
        return self._seen[choice]

    def _settled(self, choice: Choice, *, on_host: bool) -> Choice:
        on_host = on_host and Placement.HOST in choice.placements
        asked = self._forced.staging_bytes
        staging_bytes = choice.staging_bytes if asked is None else asked
        keeps = self._forced.carried_out(choice.activations)
        return replace(choice, activations=keeps, gradients_on_host=on_host, staging_bytes=staging_bytes)

    def _climb(self, weights: frozenset[str]) -> None:
        program = self._programs.get(weights) or LinearProgram(self.costs, self._forced, weights)
        self._programs[weights] = program
        least = program.solve(Limits(), least_device=True)
        if least is None:
            return
        for keep in (Keep.RECOMPUTE, _SMALLEST):
            self._alike(1.0, 0.0, keep, weights)
        low = program.device_bytes(least)
        self._add(least)
        best = program.solve(Limits())
        if best is None:
            return
        high = program.device_bytes(best)
        found = [self._add(best)]
        whole = not weights or self._forced.offloaded_weights is not None
        reach = _REACH * self._most_bytes
        # From wide limits to narrow ones: within these, much of what was slower is known to be.
        for limit in reversed(_ladder(low, high, DEVICE_LEVELS if whole else 2)):
            choice = program.solve(Limits(device_bytes=limit * (1 + 1e-9))) if limit <= reach else None
            if choice is not None:
                found.append(self._add(choice))
        most = max(program.host_bytes(candidate.choice) for candidate in found)
        for share in HOST_LEVELS if whole else ():
            for level in reversed(range(_HOST_DEVICE_LEVELS)):
                limit = low + (high - low) * level / _HOST_DEVICE_LEVELS
                choice = program.solve(Limits(limit, most * share)) if limit <= reach else None
                if choice is not None:
                    self._add(choice)

    def _even(self) -> None:
        """Add choices that treat all layers alike and offload a share of the state.

        The program, whose times are linear, may miss them.
        """
        speeds, workload = self.costs.speeds, self.workload
        ahead = {keep: self._read_ahead(keep) for keep in _EVEN}
        backward_s = {keep: self._backward_s(keep) for keep in _EVEN}

        balanced = cache(partial(balanced_share, speeds, workload))

        def shares(part: int, keep: Keep) -> Sequence[float]:
            # Streamed state needs staging buffers and pinned memory: two shares use it in two ways.
            of_all = part / _EVEN_PARTS
            over_s = backward_s[keep] / of_all if workload.step_early else 0.0
            share = balanced(None, over_s)
            if part % _BOTH_AT and part > _BOTH_AT:
                return (share,)
            read = balanced(min(1.0, ahead[keep] / of_all), over_s)
            return (share, read) if abs(read - share) > _SAME_SHARE else (share,)

        for keep in _EVEN:
            self._alike(0.0, 0.0, keep, frozenset())
            self._less_and_less(keep, _EVEN_PARTS, partial(shares, keep=keep))
            # Nothing streamed: CPU-stepped state is not pinned, and needs no staging buffers.
            self._less_and_less(keep, _HOST_PARTS, partial(_only, 0.0))
        if self.workload.microbatches > 1:
            # Gradients of CPU-stepped buckets are accumulated on the host; those of streamed ones stay on the device.
            share = balanced(None, 0.0)
            for part in range(4):
                streamed = share * part / 4
                self._less_and_less(Keep.RECOMPUTE, 8, partial(_only, streamed), down_to=5)

    def _less_and_less(
        self, keep: Keep, parts: int, shares: Callable[[int], Sequence[float]], down_to: int = 1
    ) -> None:
        """Add choices from all of the state offloaded to little of it, until the device's memory is exceeded."""
        before = math.inf
        for part in range(parts, down_to - 1, -1):
            found = [self._alike(part / parts, streamed, keep, frozenset()) for streamed in shares(part)]
            least = min(candidate.needs.device_peak_bytes for candidate in found)
            if least > max(before, self._most_bytes):  # the peak may fall at first: fewer staging buffers
                return
            before = least

    def _read_ahead(self, keep: Keep) -> float:
        streamed = self._alike(1.0, 1.0, keep, frozenset())
        return read_ahead(self.costs, streamed.choice, streamed.needs)

    def _backward_s(self, keep: Keep) -> float:
        """Return the seconds of the last backward."""
        costs = self.costs
        return costs.backward_s + sum(costs.layers[i].again_s(keep) for i in costs.repeated)

    def _alike(self, fraction: float, streamed: float, keep: Keep, weights: frozenset[str]) -> Candidate:
        forced, buckets = self._forced, self.workload.inventory.buckets
        key = fraction, streamed, weights
        if key not in self._placed:
            found = placements_of(buckets, fraction, streamed)
            if forced.placements or weights:
                found = [
                    forced.placements.get(i, Placement.HOST if bucket.layer in weights else placement)
                    for i, (bucket, placement) in enumerate(zip(buckets, found, strict=True))
                ]
            self._placed[key] = tuple(found)
        keeps = [keep] * len(self.workload.repeated)
        if keep is Keep.RECOMPUTE_OFFLOAD:
            keeps[-LAST_STAY:] = [Keep.RECOMPUTE] * min(LAST_STAY, len(keeps))
        chosen = tuple(forced.activations.get(i, keep) for i, keep in enumerate(keeps))
        return self._add(Choice(self._placed[key], chosen, weights))

    # ------------------------------------------------------------------ answers

    def best(self, budgets: Budgets) -> Candidate | None:
        """Return the fastest candidate within the budgets; None where none fits."""
        return fastest(c for c in self._seen.values() if not budgets.over(c.needs))

    def nearest(self, budgets: Budgets) -> Candidate:
        """Return the candidate that needs the smallest change of the budgets."""
        missing = {choice: sum(budgets.over(c.needs).values()) for choice, c in self._seen.items()}
        least = min(missing.values())
        return fastest([self._seen[choice] for choice, size in missing.items() if size == least]) or self.base

    def unbeaten(self, budgets: Budgets | None = None) -> Sequence[Candidate]:
        """Return candidates that no other one beats in both time and device memory, by device memory.

        They keep to the budgets of host memory and to the device's memory; the candidate with everything on the device
        always counts.
        """
        within = replace(budgets or Budgets(), device_bytes=None)
        ordered = sorted(
            (
                c
                for choice, c in self._seen.items()
                if choice not in self._probes
                and not within.over(c.needs)
                and (c is self.base or c.needs.device_peak_bytes <= self._most_bytes)
            ),
            key=_peak,
        )
        found: list[Candidate] = []
        for _, alike in groupby(ordered, key=_peak):
            faster = (c for c in alike if not found or c.least_s < found[-1].prediction.step_s)
            best = fastest(faster)
            if best and (not found or best.prediction.step_s < found[-1].prediction.step_s):
                found.append(best)
        return found


def _peak(candidate: Candidate) -> int:
    return candidate.needs.device_peak_bytes


# The streamed state that can be prefetched during backward, as far as time and freed memory allow.


def read_ahead(costs: Costs, choice: Choice, needs: Needs) -> float:
    """Return the state that can be prefetched during backward, as a share of the workload's state.

    Args:
        choice: streams all state which may be streamed.
        needs: of that choice: its staging buffers, and the buckets whose ready gradients trigger their acquisition.
    """
    buckets = costs.workload.inventory.buckets
    streamed = [b for b, p in zip(buckets, choice.placements, strict=True) if p is Placement.STREAMED]
    if not streamed or not choice.overlapped:
        return 0.0
    size_bytes = staging_buffer_bytes(list({streamed_bytes(b) for b in streamed}))
    slot_s = size_bytes / costs.speeds.h2d_bytes_per_s
    keep = costs.keep_of(choice)
    over_s, ends_s = 0.0, {}
    for i in reversed(range(len(costs.layers))):
        over_s += costs.layers[i].backward_s + (costs.layers[i].again_s(keep[i]) if i in keep else 0.0)
        ends_s[costs.layers[i].layer.name] = over_s
    # Reloads of saved tensors go first.
    reloaded = sum(costs.layers[i].held_bytes(kept) for i, kept in keep.items() if kept in LEAVES)
    read_s, count = reloaded / costs.speeds.h2d_bytes_per_s, 0
    for bucket in needs.stage_at:
        read_s = max(read_s, ends_s.get(buckets[bucket].layer, over_s)) + slot_s
        count += read_s <= over_s
    return min(1.0, count * size_bytes / sum(b.state_bytes for b in buckets))


# The share of streamed and CPU-stepped state with the shortest predicted step.


_COARSE, _FINE = 10, 40
"""Shares are tried in such parts of the whole, the fine ones around the best of the coarse."""


def best_share(costs: Costs, choice: Choice, offload_fraction: float, budgets: Budgets | None = None) -> float:
    """Return the share of the offloaded state to stream for the shortest predicted step.

    Shares in steps of 0.1 are tried, and then of 0.025 around the best; of equal ones, the least streamed state wins.

    Args:
        choice: what else is chosen; its placements are not read.
        offload_fraction: share of the state's bytes that is offloaded.
        budgets: shares that keep to them come first. None: there are none.
    """
    buckets, seen = costs.workload.inventory.buckets, dict[int, tuple[bool, float]]()
    if not buckets or not offload_fraction:
        return 0.0
    memory = MemoryModel(costs.workload)

    def judged(part: int) -> tuple[bool, float]:
        if part not in seen:
            tried = replace(choice, placements=tuple(placements_of(buckets, offload_fraction, part / _FINE)))
            needs = memory.required(tried)
            seen[part] = bool(budgets and budgets.over(needs)), predict_of(costs, tried, needs).step_s
        return seen[part]

    wide = _FINE // _COARSE
    coarse = min(range(0, _FINE + 1, wide), key=judged)
    return min(range(max(0, coarse - wide + 1), min(_FINE, coarse + wide - 1) + 1), key=judged) / _FINE
