"""The best choice within budgets, and what less device memory costs. No torch.

First the *frontier* is made, without regard to budgets: a linear programme for each of a ladder of device limits, and
of host limits, each solution weighed by the memory model, and timed by `hostward.plan.step_time` where it may be the
best. Budgets then select among these. So what fits in a budget also fits in a larger one, and a larger budget never
gives a slower plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby

from hostward.core.placement import Placement, place_fraction, summed_on_host
from hostward.plan.budgets import Budgets, Required
from hostward.plan.cost_model import SUM_BYTES, Costs, Speeds, balanced_share
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.memory_model import LOAD, MemoryModel, Needs
from hostward.plan.solver import LAST_STAY, Forced, Limits, Programme
from hostward.plan.step_time import Prediction, least_s, predict_of
from hostward.plan.workload import Workload
from hostward.schedule.staging import staging_buffer_bytes, streamed_bytes

DEVICE_LEVELS = 10
"""Steps of the ladder in equal differences, and as many in equal ratios: rungs are closest where memory is short."""
HOST_LEVELS = (0.7, 0.4, 0.2)
"""Of the most host memory that any choice on the ladder of device limits takes."""
_HOST_DEVICE_LEVELS = 4
_REACH = 1.1
"""Times what the device has, by the programme's own count of bytes, which is a little off that of the memory model."""
_EVEN_PARTS = 16
_HOST_PARTS = 8
_SAME_SHARE = 0.05
"""Shares of streamed state that differ by no more are not both tried."""
_BOTH_AT = 2
"""They are tried at every second fraction, and at the least ones: each candidate takes a plan some milliseconds."""
_EVEN = (Keep.KEEP, Keep.ELEMENTWISE, Keep.RECOMPUTE)


def _only(share: float, _: int) -> Sequence[float]:
    return (share,)


def _ladder(low: float, high: float, levels: int) -> list[float]:
    """Device limits from `low` to `high`."""
    equal = [low + (high - low) * level / levels for level in range(levels + 1)]
    ratios = [low * (high / low) ** (level / levels) for level in range(1, levels)] if low > 0 else []
    return sorted({*equal, *ratios})


@dataclass(frozen=True)
class Candidate:
    """A choice and its needs. `plain`: where nothing is offloaded that need not be; None where this is that."""

    choice: Choice
    needs: Needs
    costs: Costs = field(repr=False, compare=False)
    plain: Candidate | None = field(default=None, repr=False, compare=False)

    @cached_property
    def prediction(self) -> Prediction:
        """Its predicted time. What the device saves by not stepping some state itself has never been seen in a measured
        step: no offloading is promised to be faster than none.
        """
        found = predict_of(self.costs, self.choice, self.needs)
        return replace(found, step_s=max(found.step_s, self.plain.prediction.step_s)) if self.plain else found

    @cached_property
    def least_s(self) -> float:
        """A bound on its predicted step from below, which takes no playing of it."""
        return max(least_s(self.costs, self.choice), self.plain.prediction.step_s if self.plain else 0.0)

    @property
    def order(self) -> tuple[float, int, int]:
        """Faster first; of equally fast ones, what takes less of the host, then of the device."""
        return self.prediction.step_s, self.needs.host_bytes, self.needs.device_peak_bytes


def fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The first by `order`; None of none."""
    best: Candidate | None = None
    for candidate in sorted(candidates, key=lambda c: c.least_s):
        if best is not None and candidate.least_s > best.prediction.step_s:
            break
        best = candidate if best is None else min(best, candidate, key=lambda c: c.order)
    return best


class Frontier:
    """Candidates for one workload on one machine.

    Args:
        required: the memory model.
        forced: what is not to be chosen.
        most_bytes: that the device has: what takes more is weighed as far as it is met, until `widen`. None: all is.
    """

    def __init__(
        self,
        workload: Workload,
        speeds: Speeds,
        required: Required,
        forced: Forced | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self.workload = workload
        self._most_bytes = math.inf if most_bytes is None else most_bytes
        self.costs = Costs(workload, speeds)
        self._required = required
        self._forced = forced or Forced()
        self._seen: dict[Choice, Candidate] = {}
        plain = self._plain()
        choice = self._settled(plain, on_host=bool(self._forced.gradients_on_host))
        self.base = self._seen[choice] = Candidate(choice, required(workload, choice), self.costs)
        """Everything on the device, nothing computed twice, as far as nothing else is forced."""
        self._add(plain)
        last_resort = workload.ranks > 1 and self._forced.offloaded_weights is None
        self._sets = [frozenset()] if last_resort else self._weight_sets()
        self._weigh_all()

    def widen(self) -> None:
        """Weigh what takes more than the device has as well: what else it would take is asked then."""
        self._most_bytes = math.inf
        self._weigh_all()

    def best_at_last(self, budgets: Budgets) -> Candidate | None:
        """As `best`, and if that is none, among all there is. Parts of weights that ranks share leave only then: what
        gathers wait for is not timed.
        """
        found = self.best(budgets)
        if found is None:
            self._sets = self._weight_sets()
            self.widen()
            found = self.best(budgets)
        return found

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
        """Weights leave as a last resort, so few numbers of layers are tried: none, half, all but the last."""
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
        """With gradients added up where less device memory is taken; on the device as well where that is another place,
        and it has the memory: every microbatch's gradients take the link, and the host's memory.
        """
        asked = self._forced.gradients_on_host
        if asked is not None:
            return self._weigh(choice, on_host=asked)
        frees = _summed_elsewhere(self.costs, choice)
        found = self._weigh(choice, on_host=frees)
        before_bytes = found.needs.phase(LOAD).device_bytes
        if frees and before_bytes + SUM_BYTES * sum(self.costs.numels) <= self._most_bytes:
            self._weigh(choice, on_host=False)
        return found

    def _weigh(self, choice: Choice, *, on_host: bool) -> Candidate:
        choice = self._settled(choice, on_host=on_host)
        if choice not in self._seen:
            needs = self._required(self.workload, choice)
            self._seen[choice] = Candidate(choice, needs, self.costs, self.base)
        return self._seen[choice]

    def _settled(self, choice: Choice, *, on_host: bool) -> Choice:
        on_host = on_host and Placement.HOST in choice.placements
        return replace(choice, gradients_on_host=on_host, staging_bytes=self._forced.staging_bytes)

    def _climb(self, weights: frozenset[str]) -> None:
        programme = Programme(self.costs, self._forced, weights)
        least = programme.solve(Limits(), least_device=True)
        if least is None:
            return
        for keep in (Keep.RECOMPUTE, Keep.RECOMPUTE_OFFLOAD):
            self._alike(1.0, 0.0, keep, weights)
        low = programme.device_bytes(least)
        self._add(least)
        best = programme.solve(Limits())
        if best is None:
            return
        high = programme.device_bytes(best)
        found = [self._add(best)]
        whole = not weights or self._forced.offloaded_weights is not None
        reach = _REACH * self._most_bytes
        for limit in _ladder(low, high, DEVICE_LEVELS if whole else 2):
            choice = programme.solve(Limits(device_bytes=limit * (1 + 1e-9))) if limit <= reach else None
            if choice is not None:
                found.append(self._add(choice))
        most = max(programme.host_bytes(candidate.choice) for candidate in found)
        for share in HOST_LEVELS if whole else ():
            for level in range(_HOST_DEVICE_LEVELS):
                limit = low + (high - low) * level / _HOST_DEVICE_LEVELS
                choice = programme.solve(Limits(limit, most * share)) if limit <= reach else None
                if choice is not None:
                    self._add(choice)

    def _even(self) -> None:
        """All layers alike, and a share of the state off the device: what the programme, whose times are linear, may
        pass by.
        """
        speeds, workload = self.costs.speeds, self.workload
        ahead = {keep: self._read_ahead(keep) for keep in _EVEN}
        share = balanced_share(speeds, workload)

        def shares(part: int, keep: Keep) -> Sequence[float]:
            early = balanced_share(speeds, workload, min(1.0, ahead[keep] * _EVEN_PARTS / part))
            # What is streamed takes slots and page-locked memory: two shares, two ways of using it.
            both = part % _BOTH_AT == 0 or part <= _BOTH_AT
            return (share, early) if both and abs(early - share) > _SAME_SHARE else (share,)

        for keep in _EVEN:
            self._alike(0.0, 0.0, keep, frozenset())
            self._less_and_less(keep, _EVEN_PARTS, partial(shares, keep=keep))
            # Nothing streamed: that state is not page-locked, and takes no staging slots.
            self._less_and_less(keep, _HOST_PARTS, partial(_only, 0.0))
        if self.workload.microbatches > 1:
            # Gradients of what the host steps are added up there; those of streamed state stay, and take memory.
            for part in range(4):
                streamed = share * part / 4
                self._less_and_less(Keep.RECOMPUTE, 8, partial(_only, streamed), down_to=5)

    def _less_and_less(
        self, keep: Keep, parts: int, shares: Callable[[int], Sequence[float]], down_to: int = 1
    ) -> None:
        """From all of the state off the device to little of it, until the device has no memory for what stays."""
        before = math.inf
        for part in range(parts, down_to - 1, -1):
            found = [self._alike(part / parts, streamed, keep, frozenset()) for streamed in shares(part)]
            least = min(candidate.needs.device_peak_bytes for candidate in found)
            if least > max(before, self._most_bytes):  # it may fall at first: staging is less
                return
            before = least

    def _read_ahead(self, keep: Keep) -> float:
        streamed = self._alike(1.0, 1.0, keep, frozenset())
        return read_ahead(self.costs, streamed.choice, streamed.needs)

    def _alike(self, fraction: float, streamed: float, keep: Keep, weights: frozenset[str]) -> Candidate:
        forced, buckets = self._forced, self.workload.inventory.buckets
        rows = place_fraction(buckets, fraction, streamed).buckets
        placements = tuple(
            forced.placements.get(i, Placement.HOST if bucket.layer in weights else row.placement)
            for i, (bucket, row) in enumerate(zip(buckets, rows, strict=True))
        )
        keeps = [keep] * len(self.workload.repeated)
        if keep is Keep.RECOMPUTE_OFFLOAD:
            keeps[-LAST_STAY:] = [Keep.RECOMPUTE] * min(LAST_STAY, len(keeps))
        chosen = tuple(forced.activations.get(i, keep) for i, keep in enumerate(keeps))
        return self._add(Choice(placements, chosen, weights))

    # ------------------------------------------------------------------ answers

    def best(self, budgets: Budgets) -> Candidate | None:
        """The fastest candidate within the budgets; None where none fits."""
        return fastest(c for c in self._seen.values() if not budgets.over(c.needs))

    def nearest(self, budgets: Budgets) -> Candidate:
        """The candidate that needs the smallest change of the budgets."""
        missing = {choice: sum(budgets.over(c.needs).values()) for choice, c in self._seen.items()}
        least = min(missing.values())
        return fastest([self._seen[choice] for choice, size in missing.items() if size == least]) or self.base

    def unbeaten(self, budgets: Budgets | None = None) -> Sequence[Candidate]:
        """Candidates than which none is both faster and smaller on the device, by device memory; within the budgets of
        host memory, and of what the device has, but for everything on the device.
        """
        within = replace(budgets or Budgets(), device_bytes=None)
        ordered = sorted(
            (
                c
                for c in self._seen.values()
                if not within.over(c.needs) and (c is self.base or c.needs.device_peak_bytes <= self._most_bytes)
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


def _summed_elsewhere(costs: Costs, choice: Choice) -> bool:
    """Whether adding gradients up on the host frees device memory: several microbatches, and whole parameters there."""
    if costs.workload.microbatches == 1:
        return False
    return bool(summed_on_host(costs.workload.inventory.buckets, choice.placements))


# How much streamed state can be read while backward runs: as far as its time and the memory that it frees allow.


def read_ahead(costs: Costs, choice: Choice, needs: Needs) -> float:
    """That state as a share of all of the workload's.

    Args:
        choice: that streams all state which may be streamed.
        needs: of that choice: its staging slots, and the buckets at whose gradient points they are taken.
    """
    buckets = costs.workload.inventory.buckets
    streamed = [b for b, p in zip(buckets, choice.placements, strict=True) if p is Placement.STREAMED]
    if not streamed or not choice.overlapped:
        return 0.0
    size_bytes = staging_buffer_bytes([streamed_bytes(b.kind, b.offsets[-1]) for b in streamed])
    slot_s = size_bytes / costs.speeds.h2d_bytes_per_s
    keep = costs.keep_of(choice)
    over_s, ends_s = 0.0, {}
    for i in reversed(range(len(costs.layers))):
        over_s += costs.layers[i].backward_s + (costs.layers[i].again_s(keep[i]) if i in keep else 0.0)
        ends_s[costs.layers[i].layer.name] = over_s
    # Saved tensors that come back go first.
    reloaded = sum(costs.layers[i].held_bytes(kept) for i, kept in keep.items() if kept in LEAVES)
    read_s, count = reloaded / costs.speeds.h2d_bytes_per_s, 0
    for bucket in needs.stage_at:
        read_s = max(read_s, ends_s.get(buckets[bucket].layer, over_s)) + slot_s
        count += read_s <= over_s
    return min(1.0, count * size_bytes / sum(b.state_bytes for b in buckets))


# The mix of streamed and host-stepped state whose predicted step is the shortest.


_COARSE, _FINE = 10, 40
"""Shares are tried in such parts of the whole, the fine ones beside the best of the coarse."""


def best_share(costs: Costs, choice: Choice, offload_fraction: float, budgets: Budgets | None = None) -> float:
    """Of the offloaded state, the share to stream: of those in steps of 0.1, and then of 0.025 beside the best of them,
    that with the shortest predicted step, and of several the one that streams least.

    Args:
        choice: what else is chosen; its placements are not read.
        offload_fraction: of the state's bytes that is off the device.
        budgets: shares that keep to them come first. None: there are none.
    """
    buckets, seen = costs.workload.inventory.buckets, dict[int, tuple[bool, float]]()
    if not buckets or not offload_fraction:
        return 0.0
    memory = MemoryModel(costs.workload)

    def judged(part: int) -> tuple[bool, float]:
        if part not in seen:
            rows = place_fraction(buckets, offload_fraction, part / _FINE).buckets
            tried = replace(choice, placements=tuple(row.placement for row in rows))
            needs = memory.required(tried)
            seen[part] = bool(budgets and budgets.over(needs)), predict_of(costs, tried, needs).step_s
        return seen[part]

    wide = _FINE // _COARSE
    coarse = min(range(0, _FINE + 1, wide), key=judged)
    return min(range(max(0, coarse - wide + 1), min(_FINE, coarse + wide - 1) + 1), key=judged) / _FINE
