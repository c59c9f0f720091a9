"""Choose placements of buckets and treatments of layers by a linear program, solved by HiGHS through SciPy. No torch.

Equal layers are counted, not distinguished: the program chooses how many of them get which treatment, and which shares
of the state get which placement; `hostward.core.placement.placements_of` then selects the buckets. Numbers of layers
are rounded towards less device memory, and both values of a binary decision are tried: an integer program takes ten
times as long. Times are linear: what the GPU computes, plus the work on each lane that does not fit within forward or
backward. `hostward.plan.step_time` judges the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any

from hostward.core.placement import Placement, placements_of
from hostward.errors import needed_for
from hostward.plan.cost_model import GUESS_SECONDS, SUM_BYTES, Costs
from hostward.plan.decisions import ELEMENTWISE, LEAVES, RECOMPUTED, Choice, Keep
from hostward.plan.lane_simulator import Queue
from hostward.schedule.staging import MIN_STAGING_BUFFERS, STAGING_BACKWARD_SHARE
from hostward.schedule.weights import weight_prefetch_depth

_GB = 1e9
_ROUNDED = 1e-6
"""Solver's tolerance, in layers."""
LAST_STAY = 2
"""Layers whose activations stay: with fewer, each layer would wait for the copy of the previous one."""
TREATMENTS = (*LEAVES, Keep.RECOMPUTE, Keep.ELEMENTWISE, Keep.KEEP)
"""Treatments in order, from the first layer on.

The first layers are offloaded: backward reaches them last, so their copies have the most time. Treatments that keep
less on the device come before those that keep more.
"""
STAYING = dict(zip(LEAVES, (Keep.KEEP, Keep.RECOMPUTE, Keep.ELEMENTWISE), strict=True))
"""Treatments by offloading one, where its tensors stay."""
_LEAVING = {stays: leaves for leaves, stays in STAYING.items()}


@dataclass(frozen=True, slots=True)
class Forced:
    """Hold the decisions that are not the planner's.

    They are placements by bucket, activations by position among repeated layers, layers with offloaded weights, whether
    the host accumulates gradients (None: the planner's choice), and the most device bytes of GPU staging buffers (None:
    what backward has freed).
    """

    placements: Mapping[int, Placement] = field(default_factory=dict)
    activations: Mapping[int, Keep] = field(default_factory=dict)
    offloaded_weights: frozenset[str] | None = None
    gradients_on_host: bool | None = None
    staging_bytes: int | None = None

    def _first_layers(self, among: Sequence[Keep]) -> tuple[float, float]:
        """Return the least and the largest number of first layers that may have these treatments, as training counts
        them from the first one on; the least is the larger one where what is forced cannot be carried out.
        """
        inside = [i for i, keep in self.activations.items() if keep in among]
        outside = [i for i, keep in self.activations.items() if keep not in among]
        return max(inside, default=-1) + 1, min(outside, default=math.inf)

    def carried_out(self, keeps: Sequence[Keep]) -> tuple[Keep, ...]:
        """Return the treatments of all layers as training can carry them out with the forced ones, if it can these.

        Args:
            keeps: of the free layers, those that offload are the first, and so are those that recompute layer norms.
        """
        if not self.activations:
            return tuple(keeps)
        away, cheap = self._first_layers(LEAVES), self._first_layers(ELEMENTWISE)
        if away[0] > away[1] or cheap[0] > cheap[1]:
            return tuple(keeps)
        found = []
        for i, keep in enumerate(keeps):
            leaves = i < away[0] or (keep in LEAVES and i < away[1])
            parts = i < cheap[0] or (keep in ELEMENTWISE and i < cheap[1])
            stays = Keep.ELEMENTWISE if parts else Keep.RECOMPUTE if keep in RECOMPUTED else Keep.KEEP
            found.append(_LEAVING[stays] if leaves else stays)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limit the memory of a choice; None: no limit."""

    device_bytes: float | None = None
    host_bytes: float | None = None

    def within(self, other: Limits) -> bool:
        """Return whether what keeps to these limits keeps to the other ones."""
        pairs = ((self.device_bytes, other.device_bytes), (self.host_bytes, other.host_bytes))
        return all(wide is None or (own is not None and own <= wide) for own, wide in pairs)


@dataclass(slots=True)
class _Rows:
    """Hold constraints `coefficients . x <= bound`, with coefficients by variable."""

    coefficients: list[dict[int, float]] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def at_most(self, terms: Mapping[int, float], bound: float) -> None:
        self.coefficients.append(dict(terms))
        self.bounds.append((-math.inf, bound))

    def equal(self, terms: Mapping[int, float], bound: float) -> None:
        self.coefficients.append(dict(terms))
        self.bounds.append((bound, bound))


Terms = dict[int, float]


def _sum(*parts: tuple[Terms, float]) -> Terms:
    """Return a linear combination of linear expressions."""
    found: Terms = {}
    for terms, factor in parts:
        for variable, coefficient in terms.items():
            found[variable] = found.get(variable, 0.0) + factor * coefficient
    return found


class LinearProgram:
    """Build the linear program of one workload on one machine, for many limits.

    Args:
        weights: names of layers whose weights are on the host; their buckets have CPU optimizer steps.
    """

    def __init__(self, costs: Costs, forced: Forced, weights: frozenset[str]) -> None:
        self.costs, self.forced, self.weights = costs, forced, weights
        self.upper: list[float] = []
        self.either: list[int] = []
        """Variables that are 0 or 1."""
        self.rows = _Rows()
        self._choices: dict[tuple[Limits, bool], Choice | None] = {}
        self._solved: list[tuple[Limits, dict[tuple[float, ...], float]]] = []
        """The objectives that were found within limits, by the values of `either`."""
        self.buckets = costs.workload.inventory.buckets
        self.bucket_kinds = self._bucket_kinds()
        self.layer_kinds = self._layer_kinds()
        self.placed = [self._shared(1, self._placements(members[0])) for members in self.bucket_kinds]
        self.kept = [self._shared(len(members), self._keeps(members[0])) for members in self.layer_kinds]
        self._counted_from_the_first()
        self._last_stay()
        self._time()
        self._memory()

    # ------------------------------------------------------------------ variables

    def _variable(self, upper: float = math.inf) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def _so_or_so(self) -> int:
        self.either.append(self._variable(1.0))
        return self.either[-1]

    def _shared(self, count: int, options: Sequence[Any]) -> dict[Any, int]:
        found = {option: self._variable(count) for option in options}
        self.rows.equal(dict.fromkeys(found.values(), 1.0), count)
        return found

    def _bucket_kinds(self) -> list[list[int]]:
        kinds: dict[Any, list[int]] = {}
        for i, bucket in enumerate(self.buckets):
            key = bucket.kind, bucket.dtype, self.forced.placements.get(i), bucket.layer in self.weights
            kinds.setdefault(key, []).append(i)
        return list(kinds.values())

    def _layer_kinds(self) -> list[list[int]]:
        kinds: dict[Any, list[int]] = {}
        for position, i in enumerate(self.costs.repeated):
            cost = self.costs.layers[i]
            key = (
                cost.forward_s,
                cost.saved_bytes,
                cost.elementwise_bytes,
                cost.input_bytes,
                self.forced.activations.get(position),
            )
            kinds.setdefault(key, []).append(position)
        return list(kinds.values())

    def _placements(self, bucket: int) -> list[Placement]:
        if bucket in self.forced.placements:
            return [self.forced.placements[bucket]]
        return [Placement.HOST] if self.buckets[bucket].layer in self.weights else list(Placement)

    def _keeps(self, position: int) -> list[Keep]:
        if position in self.forced.activations:
            return [self.forced.activations[position]]
        cost = self.costs.layers[self.costs.repeated[position]]
        return [k for k in Keep if k not in ELEMENTWISE or cost.elementwise_bytes]

    def _counted_from_the_first(self) -> None:
        """Exclude what cannot be both counted from the first layer on: layers that offload but do not recompute layer
        norms, before others that recompute them but do not offload.
        """
        plain = self._so_or_so()  # whether any layer offloads without that
        count = sum(len(members) for members in self.layer_kinds)
        free = [k for k in self.kept if len(k) > 1]
        others = [keep for keep in LEAVES if keep not in ELEMENTWISE]
        self.rows.at_most({**{k[o]: 1.0 for k in free for o in others if o in k}, plain: -count}, 0.0)
        inside = [k[Keep.ELEMENTWISE] for k in free if Keep.ELEMENTWISE in k]
        self.rows.at_most({**dict.fromkeys(inside, 1.0), plain: count}, count)

    def _last_stay(self) -> None:
        leaving = [k[o] for k in self.kept if len(k) > 1 for o in LEAVES if o in k]
        forced = sum(
            len(members) for members, k in zip(self.layer_kinds, self.kept, strict=True) if set(k) <= {*LEAVES}
        )
        self.most_leave = max(0, len(self.costs.repeated) - LAST_STAY - forced)
        self.rows.at_most(dict.fromkeys(leaving, 1.0), self.most_leave)

    # ------------------------------------------------------------------ expressions

    def _of_buckets(self, of: Sequence[float], *placements: Placement) -> Terms:
        """Return the sum of what there is of each bucket, over buckets with one of the placements."""
        return {
            kinds[p]: float(sum([of[member] for member in members]))
            for members, kinds in zip(self.bucket_kinds, self.placed, strict=True)
            for p in placements
            if p in kinds
        }

    def _of_layers(self, of: Any, keeps: Sequence[Keep]) -> Terms:
        """Return the sum of `of(cost, keep)` over repeated layers with one of `keeps`."""
        return {
            kinds[k]: float(of(self.costs.layers[self.costs.repeated[members[0]]], k))
            for members, kinds in zip(self.layer_kinds, self.kept, strict=True)
            for k in keeps
            if k in kinds
        }

    def _time(self) -> None:
        costs, speeds = self.costs, self.costs.speeds
        microbatches = costs.workload.microbatches
        forward = sum(c.forward_s for c in costs.layers)
        backward = sum(c.backward_s for c in costs.layers)
        again = self._of_layers(lambda c, k: c.again_s(k), list(Keep))
        parked = self._of_layers(lambda c, k: c.held_bytes(k), LEAVES)
        host_s = self._of_buckets(costs.host_s, Placement.HOST)
        weights = self._of_buckets(costs.weight_bytes, Placement.HOST)
        uploads = weights if not self.weights else {}
        state = self._of_buckets(costs.state_bytes, Placement.STREAMED)
        stepped_bytes = [2 * state + 6 * numel for state, numel in zip(costs.state_bytes, costs.numels, strict=True)]
        device = self._of_buckets([size / speeds.traffic_bytes_per_s for size in stepped_bytes], Placement.DEVICE)
        after, behind, middle, staged = (self._variable() for _ in range(4))
        duplex = speeds.h2d_bytes_per_s + speeds.d2h_bytes_per_s
        busy = speeds.slowdown[7][Queue.D2H] * duplex
        lost = (1 - speeds.slowdown[7][Queue.HOST]) / busy
        # In seconds of copies.
        staged_terms = {staged: speeds.h2d_bytes_per_s}
        moved = _sum((uploads, 1.0), (state, 2.0), (staged_terms, -1.0))
        rows = self.rows
        rows.at_most(_sum((staged_terms, 1.0), (state, -1.0)), 0.0)
        rows.at_most({staged: 1.0}, STAGING_BACKWARD_SHARE * backward)
        one = ({after: 1.0}, -1.0)
        stepped = self._guessed(host_s, again, backward)
        rows.at_most(_sum((stepped, 1.0), (moved, lost), one), forward)
        rows.at_most(_sum((moved, 1 / busy), one), forward)
        rows.at_most(
            _sum((uploads, 1 / speeds.h2d_bytes_per_s), (state, 1 / speeds.h2d_bytes_per_s), one,
                 ({staged: 1.0}, -1.0)), forward,
        )  # fmt: skip
        rows.at_most(_sum((state, 1 / speeds.d2h_bytes_per_s), (parked, 1 / speeds.d2h_bytes_per_s), one), forward)
        back = (_sum(({behind: 1.0}, 1.0), (again, 1.0)), -1.0)
        rows.at_most(_sum((weights, 1 / speeds.d2h_bytes_per_s), back), backward)
        rows.at_most(_sum((parked, 1 / speeds.h2d_bytes_per_s), ({staged: 1.0}, 1.0), back), backward)
        pause = ({middle: 1.0}, -1.0)
        rows.at_most(_sum((parked, 1 / speeds.d2h_bytes_per_s), pause), forward)
        rows.at_most(_sum((parked, 1 / speeds.h2d_bytes_per_s), pause), backward)
        # Of equal times, prefer the fewest copied bytes.
        self.objective = _sum(
            (again, float(microbatches)), (device, 1.0), ({after: 1.0, behind: 1.0}, 1.0),
            ({middle: 1.0}, float(microbatches - 1)), (moved, 0.01 / duplex), (parked, 0.01 / duplex),
            (host_s, 0.01),
        )  # fmt: skip

    def _guessed(self, host_s: Terms, again: Terms, backward_s: float) -> Terms:
        """Return the seconds of CPU optimizer steps after the norm, where a share is made during backward."""
        share = self.costs.workload.step_early
        if not share or not host_s:
            return host_s
        guessed = {self._variable(): 1.0}
        self.rows.at_most(_sum((guessed, 1.0), (host_s, -share)), 0.0)
        self.rows.at_most(_sum((guessed, GUESS_SECONDS), (again, -1.0)), backward_s)
        return _sum((host_s, 1.0), (guessed, -1.0))

    def _memory(self) -> None:
        costs = self.costs
        several, wide = costs.workload.microbatches > 1, SUM_BYTES if costs.workload.gradients_in_fp32 else 0
        largest = max(costs.state_bytes, default=0)
        self.streams = streams = self._so_or_so()
        state = self._of_buckets(costs.numels, Placement.STREAMED)
        self.rows.at_most({**state, streams: -float(sum(costs.numels) or 1)}, 0.0)
        here = [layer for layer in costs.workload.layers if layer.name not in self.weights]
        away = sorted((c.layer.weight_bytes for c in costs.layers if c.layer.name in self.weights), reverse=True)
        at_once = 1 + weight_prefetch_depth(gathered=costs.workload.ranks > 1)
        fixed = float(sum(layer.weight_bytes for layer in here) + sum(away[:at_once]))
        held = self._of_buckets(costs.state_bytes, Placement.DEVICE)
        always = _sum((held, 1.0), ({streams: float(MIN_STAGING_BUFFERS * largest)}, 1.0))
        gradients = [wide * numel for numel in costs.numels] if wide else costs.weight_bytes
        stays = self._of_buckets(gradients, *Placement)
        if not several:
            stays = {v: c for v, c in stays.items() if v not in {k.get(Placement.HOST) for k in self.placed}}
        kept = self._of_layers(lambda c, k: c.held_bytes(k), [k for k in Keep if k not in LEAVES])
        outside = sum(c.saved_bytes for c in costs.layers if not c.layer.repeated)
        once = max((c.saved_bytes for c in costs.layers if c.layer.repeated), default=0.0)
        before = (stays, 1.0) if several else ({}, 1.0)
        self.device = [
            (_sum((always, 1.0), (kept, 1.0), before), fixed + outside),
            (_sum((always, 1.0), (stays, 1.0)), fixed + once),
        ]
        parked = self._of_layers(lambda c, k: c.held_bytes(k), LEAVES)
        early = costs.workload.step_early  # in a second set
        # Pools grow by an eighth on a prefetch miss; the memory model has the last word.
        host = _sum(
            (self._of_buckets(costs.host_bytes, Placement.HOST), 1.0),
            (self._of_buckets(costs.weight_bytes, Placement.HOST), 1.0 + early),
            (self._of_buckets(costs.state_bytes, Placement.HOST), early),
            (self._of_buckets(costs.state_bytes, Placement.STREAMED), 1.0),
            (parked, 1.0),
        )
        self.host = host, float(sum(c.layer.frozen_weight_bytes for c in costs.layers if c.layer.name in self.weights))

    # ------------------------------------------------------------------ solving

    def solve(self, limits: Limits, *, least_device: bool = False) -> Choice | None:
        """Return the fastest choice within the limits by linear times, or the one with the least device memory.

        None where there is no such choice. What was found once is not sought again.
        """
        key = limits, least_device
        if key not in self._choices:
            self._choices[key] = self._solve(limits, least_device=least_device)
        return self._choices[key]

    def _solve(self, limits: Limits, *, least_device: bool) -> Choice | None:
        rows, bounds = list(self.rows.coefficients), list(self.rows.bounds)
        objective, count = self.objective, len(self.upper)
        for terms, fixed in self.device:
            if least_device:
                rows.append({**terms, count: -_GB})
                bounds.append((-math.inf, -fixed))
            elif limits.device_bytes is not None:
                rows.append(terms)
                bounds.append((-math.inf, limits.device_bytes - fixed))
        if limits.host_bytes is not None:
            rows.append(self.host[0])
            bounds.append((-math.inf, limits.host_bytes - self.host[1]))
        upper = list(self.upper)
        if least_device:
            objective = {count: 1.0}
            upper.append(math.inf)
        found = self._best(_Linear(objective, rows, bounds, upper), None if least_device else limits)
        return None if found is None else self._choice(found[: len(self.upper)])

    def _best(self, program: _Linear, limits: Limits | None) -> list[float] | None:
        """Return the values with the least objective over both values of each binary decision; None where there are
        none.

        Args:
            limits: those within which it is the fastest choice. Where a decision was no better within wider ones, it is
                not tried again. None: it is something else.
        """
        wider = [solved for of, solved in self._solved if limits is not None and limits.within(of)]
        least = {
            decided: max((solved.get(decided, -math.inf) for solved in wider), default=-math.inf)
            for decided in product((0.0, 1.0), repeat=len(self.either))
        }
        solved, best = dict[tuple[float, ...], float](), (math.inf, list[float]())
        for decided in sorted(least, key=lambda decided: least[decided]):
            if least[decided] >= best[0]:
                break
            fastest = program.solve(dict(zip(self.either, decided, strict=True)))
            solved[decided] = fastest[0]
            best = min(best, fastest, key=lambda pair: pair[0])
        if limits is not None:
            self._solved.append((limits, solved))
        return best[1] or None

    def _values(self, choice: Choice) -> list[float]:
        """Return the variables of a choice that this program made."""
        values, state_bytes = [0.0] * len(self.upper), self.costs.state_bytes
        for members, kinds in zip(self.bucket_kinds, self.placed, strict=True):
            total = sum([state_bytes[m] for m in members]) or 1
            for member in members:
                values[kinds[choice.placements[member]]] += state_bytes[member] / total
        for members, options in zip(self.layer_kinds, self.kept, strict=True):
            for member in members:
                values[options[choice.activations[member]]] += 1
        values[self.streams] = float(Placement.STREAMED in choice.placements)
        return values

    def device_bytes(self, choice: Choice) -> float:
        """Return the device bytes by linear estimate."""
        values = self._values(choice)
        return max(fixed + sum(c * values[v] for v, c in terms.items()) for terms, fixed in self.device)

    def host_bytes(self, choice: Choice) -> float:
        """Return the host bytes by linear estimate."""
        values = self._values(choice)
        return self.host[1] + sum(c * values[v] for v, c in self.host[0].items())

    def _choice(self, values: Sequence[float]) -> Choice:
        placements = [Placement.DEVICE] * len(self.buckets)
        for members, kinds in zip(self.bucket_kinds, self.placed, strict=True):
            if len(kinds) == 1:
                for member in members:
                    placements[member] = next(iter(kinds))
                continue
            of = {p: min(1.0, max(0.0, values[v])) for p, v in kinds.items()}
            streamed, host = of.get(Placement.STREAMED, 0.0), of.get(Placement.HOST, 0.0)
            share = streamed / (streamed + host) if streamed + host else 0.0
            of_members = [self.buckets[m] for m in members]
            found = placements_of(of_members, min(1.0, streamed + host), min(1.0, share))
            for member, placement in zip(members, found, strict=True):
                placements[member] = placement
        keeps = [Keep.KEEP] * len(self.costs.repeated)
        for members, options in zip(self.layer_kinds, self.kept, strict=True):
            order = [k for k in TREATMENTS if k in options]
            until = rounded_up([values[options[k]] for k in order])
            for at, position in enumerate(members):
                keeps[position] = next((k for k, end in zip(order, until, strict=True) if at < end), order[-1])
        # Each kind of layers was rounded by itself, and training counts those that are offloaded from the first one.
        free = [i for i in range(len(keeps)) if i not in self.forced.activations]
        ordered = sorted((keeps[i] for i in free), key=lambda keep: (keep not in LEAVES, keep not in ELEMENTWISE))
        for at, (i, keep) in enumerate(zip(free, ordered, strict=True)):
            keeps[i] = keep if at < self.most_leave else STAYING.get(keep, keep)
        return Choice(tuple(placements), tuple(keeps), self.weights)


def rounded_up(counts: Sequence[float]) -> list[int]:
    """Return the running sums of the counts, each rounded up to a whole number."""
    return [math.ceil(total - _ROUNDED) for total in accumulate(counts)]


def require_scipy() -> None:
    """Raise MissingPackageError without SciPy, whose solver chooses placements."""
    with needed_for("planning", "train,plan"):
        import scipy.optimize  # noqa: F401


class _Linear:
    """Hold a linear program: the rows are limits of linear expressions.

    Args:
        upper: largest value of each variable; the smallest is 0.
    """

    def __init__(
        self,
        objective: Mapping[int, float],
        rows: Sequence[Mapping[int, float]],
        bounds: Sequence[tuple[float, float]],
        upper: Sequence[float],
    ) -> None:
        require_scipy()
        import numpy as np
        from scipy.optimize import LinearConstraint

        self._upper = upper
        matrix = np.zeros((len(rows), len(upper)))
        for r, terms in enumerate(rows):
            for variable, coefficient in terms.items():
                matrix[r, variable] = coefficient
        # Bytes and seconds in one matrix: each row by its largest coefficient.
        scale = np.maximum(np.abs(matrix).max(axis=1), 1e-30)
        low, high = (np.array(side) / scale for side in zip(*bounds, strict=True))
        self._constraints = LinearConstraint(matrix / scale[:, None], low, high)
        self._weights = np.zeros(len(upper))
        for variable, coefficient in objective.items():
            self._weights[variable] = coefficient
        self._weights /= max(np.abs(self._weights).max(), 1e-30)

    def solve(self, fixed: Mapping[int, float]) -> tuple[float, list[float]]:
        """Return the least objective and its values, with the given values of some variables; infinity and no values
        where there are none.
        """
        import numpy as np
        from scipy.optimize import Bounds, milp

        least, most = np.zeros(len(self._upper)), np.array(self._upper)
        for variable, value in fixed.items():
            least[variable] = most[variable] = value
        found = milp(self._weights, constraints=self._constraints, bounds=Bounds(least, most))
        return (math.inf, []) if found.x is None else (float(found.fun), [float(v) for v in found.x])
