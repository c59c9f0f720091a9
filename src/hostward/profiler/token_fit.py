"""From runs at three sizes to functions of the number of tokens and the length of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hostward.plan.workload import Curve, Moment, PerToken
from hostward.profiler.layer_profiler import PartRun


@dataclass(frozen=True, slots=True)
class Size:
    """Of one microbatch."""

    sequences: int
    tokens: int
    """Of each sequence."""

    @property
    def of_all(self) -> int:
        return self.sequences * self.tokens


def sizes(size: Size) -> tuple[Size, Size, Size]:
    """The sizes that `Fit` wants: the one that is planned for, twice as many sequences, sequences twice as long."""
    return size, Size(2 * size.sequences, size.tokens), Size(size.sequences, 2 * size.tokens)


@dataclass(frozen=True, slots=True)
class Fit:
    """c + a * tokens + b * tokens * sequence_tokens through values at `sizes`, exactly."""

    size: Size

    def __call__(self, values: Sequence[float]) -> tuple[float, PerToken]:
        """Constant, and rates for each token."""
        one, more, longer = values
        if one == more:  # of one sequence, as tables of positions are
            return one, PerToken(0.0)
        size = self.size
        square = (longer - more) / (2 * size.of_all * size.tokens)
        linear = (more - one) / size.of_all - square * size.tokens
        return 2 * one - more, PerToken(linear, square)

    def rates(self, values: Sequence[float]) -> PerToken:
        """For what has no constant; what there is of one counts with the tokens."""
        constant, rates = self(values)
        return rates + PerToken(constant / self.size.of_all)

    def moment(self, values: Sequence[float], gradients: int = 0) -> Moment:
        constant, rates = self(values)
        return Moment(rates, constant, gradients)


def curve(fit: Fit, runs: Sequence[PartRun]) -> Curve:
    """Of one part, from its runs at the three sizes."""
    one = runs[0]
    forward = _moments(fit, [r.forward for r in runs], [0] * len(one.forward))
    backward = _moments(fit, [r.backward for r in runs], one.made)
    return Curve(forward, fit.moment([r.kept_bytes for r in runs]), backward)


def with_layers(fit: Fit, found: Curve, run: PartRun, more: PartRun, times: float) -> Curve:
    """The curve of a part that holds something for every layer, such as the choices of all routers: with a few layers
    it was `run`, with some more `more`, and so much more is still missing `times` times.
    """

    def later(moments: Iterable[Moment], before: Sequence[int], after: Sequence[int]) -> tuple[Moment, ...]:
        rate = PerToken(times * (max(after, default=0) - max(before, default=0)) / fit.size.of_all)
        return tuple(Moment(m.bytes + rate, m.fixed_bytes, m.gradients) for m in moments)

    forward = later(found.forward, run.forward, more.forward)
    return Curve(forward, found.kept, later(found.backward, run.backward, more.backward))


def _moments(fit: Fit, values: Sequence[Sequence[int]], made: Sequence[int]) -> tuple[Moment, ...]:
    if len({len(v) for v in values}) > 1:
        # Loops that depend on the number of tokens, such as a loss in chunks: only the most can be compared.
        peaks = [max(v, default=0) for v in values]
        at = values[0].index(peaks[0])
        return (fit.moment(peaks, made[at]),)
    moments = [fit.moment(at, count) for at, count in zip(zip(*values, strict=True), made, strict=True)]
    return tuple(_most(moments))


def _most(moments: Sequence[Moment]) -> list[Moment]:
    """Those that no other one surpasses in all regards."""
    found: list[Moment] = []
    for m in sorted(moments, key=_regards, reverse=True):
        if not any(all(a >= b for a, b in zip(_regards(kept), _regards(m), strict=True)) for kept in found):
            found.append(m)
    order = {id(m): i for i, m in enumerate(moments)}
    return sorted(found, key=lambda m: order[id(m)])


def _regards(moment: Moment) -> tuple[float, ...]:
    return moment.bytes.square, moment.bytes.linear, moment.fixed_bytes, moment.gradients
