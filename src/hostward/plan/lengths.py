"""Find the workload of another sequence length from those of three that were traced. No torch.

Every quantity of a microbatch is a polynomial of degree two in the length of its sequences: what is there for each
token, for each pair of tokens of a sequence, as masks are, and once. Three lengths tell it exactly. Thresholds, such as
a window that is longer than the sequences, are not crossed between lengths at which the layers do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hostward.plan.workload import Moment, PerToken, Workload


def lengths_around(sequence_tokens: int) -> tuple[int, int, int]:
    """Return the lengths to trace for plans of this one and others: it is the first of them."""
    shorter = max(1, sequence_tokens // 2)
    return sequence_tokens, shorter, 2 * sequence_tokens


def at_length(traced: Sequence[Workload], sequence_tokens: int) -> Workload | None:
    """Return the workload for sequences of this length, from those of the same model at three lengths.

    Between the shortest and twice the longest; for other lengths, and where the three differ in more than bytes and
    operations, None: the model has to be traced.
    """
    lengths = [workload.sequence_tokens for workload in traced]
    if len(set(lengths)) < 3 or not min(lengths) <= sequence_tokens <= 2 * max(lengths):
        return None
    try:
        layers = _Between(lengths, sequence_tokens).of([workload.layers for workload in traced])
    except _OtherwiseError:
        return None
    return replace(traced[0], layers=layers, sequence_tokens=sequence_tokens)


class _OtherwiseError(Exception):
    """The model does something else at one of the lengths."""


class _Between:
    """Interpolate values of any type of a workload, which have one shape at all lengths."""

    def __init__(self, lengths: Sequence[int], at: int) -> None:
        self._lengths, self._at = lengths, at
        self._weights = [self._weight(i) for i in range(len(lengths))]
        self._found: dict[tuple[int, ...], Any] = {}
        """What was found, by the objects that it is found from: layers of a kind share their curves."""

    def _weight(self, i: int) -> float:
        found = 1.0
        for j, other in enumerate(self._lengths):
            if j != i:
                found *= (self._at - other) / (self._lengths[i] - other)
        return found

    def _number(self, values: Sequence[float], power: int) -> float:
        """Interpolate a quantity that is a polynomial when it is multiplied by the length to this power."""
        terms = zip(self._weights, values, self._lengths, strict=True)
        return float(sum(weight * value * (length / self._at) ** power for weight, value, length in terms))

    def of(self, values: Sequence[Any]) -> Any:
        key = tuple(map(id, values))
        if key not in self._found:
            self._found[key] = self._of(values)
        return self._found[key]

    def _of(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, PerToken):
            return PerToken(self._number([v.linear for v in values], 1), self._number([v.square for v in values], 2))
        if isinstance(first, Moment):
            rates = self.of([v.bytes for v in values])
            return Moment(
                rates, self._number([v.fixed_bytes for v in values], 0), self._same([v.gradients for v in values])
            )
        if isinstance(first, tuple):
            self._same([len(v) for v in values])
            return tuple(self.of(items) for items in zip(*values, strict=True))
        if isinstance(first, Mapping):
            self._same([list(v) for v in values])
            return {key: self.of([v[key] for v in values]) for key in first}
        if is_dataclass(first) and not isinstance(first, type):
            return type(first)(**{f.name: self.of([getattr(v, f.name) for v in values]) for f in fields(first)})
        return self._same(values)

    def _same(self, values: Sequence[Any]) -> Any:
        if any(value != values[0] for value in values):
            raise _OtherwiseError
        return values[0]
