"""What differs between two plans, for people. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hostward.core.placement import Placement
from hostward.core.units import size
from hostward.plan.plan_file import PlanFile

_LINES = 4
"""That tell of the state of repeated layers, at most. Plans often place it in another way in nearly each: where that
makes more lines, one says what the layers hold together; the files say the rest.
"""
_NONE = "(not there)"


def differences(a: PlanFile, b: PlanFile) -> list[str]:
    """What differs, line by line; empty for equal plans."""
    lines = []
    for part in ("workload", "machine", "limits", "predicted"):
        old, new = getattr(a, part), getattr(b, part)
        for name in type(old).__dataclass_fields__:
            before, after = getattr(old, name), getattr(new, name)
            if before != after:
                lines.append(f"{part}.{name}: {_value(before)} -> {_value(after)}")
    for name in ("gradients_on_host", "staging_bytes", "pin_gradients", "pin_weights"):
        if getattr(a, name) != getattr(b, name):
            lines.append(f"{name}: {_value(getattr(a, name))} -> {_value(getattr(b, name))}")
    lines += _state_differences(a, b)
    for column, what in (("activations", "saved activations"), ("weights", "weights")):
        old_rows, new_rows = ({row.layer: str(getattr(row, column)) for row in plan.layers} for plan in (a, b))
        lines += [run.told(what) for run in _runs(_changes(old_rows, new_rows))]
    return lines


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours that changed alike."""

    names: tuple[str, ...]
    change: str

    def told(self, what: str) -> str:
        return f"{what} of {_range(self.names)}: {self.change}"

    @property
    def stem(self) -> str:
        """What the names of repeated layers begin with, as `model.layers`; empty if they are not of one list."""
        stems = {_stem(name) for name in self.names}
        return stems.pop() if len(stems) == 1 else ""


def _state_differences(a: PlanFile, b: PlanFile) -> list[str]:
    what, lines = "optimizer state", []
    old, new = _state_by_layer(a), _state_by_layer(b)
    changes = _changes(*({layer: _shares(held) for layer, held in state.items()} for state in (old, new)))
    for layer, change in changes.items():
        if not change and _rows_of(a, layer) != _rows_of(b, layer):
            changes[layer] = f"{_shares(old[layer])} in both plans, but not of the same parameters"
    names = list(changes)
    for stem, group in groupby(_runs(changes), key=lambda run: run.stem):
        runs = list(group)
        if not stem or len(runs) <= _LINES:
            lines += [run.told(what) for run in runs]
            continue
        between = names[names.index(runs[0].names[0]) : names.index(runs[-1].names[-1]) + 1]
        before, after = (_shares(sum((s.get(name, Counter()) for name in between), Counter())) for s in (old, new))
        lines.append(f"{what} of {_range(between)}, taken together: {before} -> {after}")
    return lines


def _rows_of(plan: PlanFile, layer: str) -> list[tuple[int, Placement]]:
    return [(row.numel, row.placement) for row in plan.buckets if row.layer == layer]


def _state_by_layer(plan: PlanFile) -> dict[str, Counter[Placement]]:
    """By layer, how many of its parameters have their state where."""
    counts: dict[str, Counter[Placement]] = {}
    for row in plan.buckets:
        counts.setdefault(row.layer, Counter())[Placement(row.placement)] += row.numel
    return counts


def _shares(held: Counter[Placement]) -> str:
    """A placement, or shares of the parameters."""
    if not held:
        return _NONE
    if len(held) == 1:
        return next(iter(held)).value
    return ", ".join(f"{p.value} {held[p] / held.total():.0%}" for p in Placement if held[p])


def summary(a: PlanFile, b: PlanFile) -> str:
    """What the second gains and loses, in a line."""
    if a.predicted == b.predicted and a != b:
        return "both hold the same predictions: those of the second plan are from before it was edited"
    changes = []
    for name, what in (("device_peak_bytes", "device memory"), ("host_bytes", "host memory")):
        more = getattr(b.predicted, name) - getattr(a.predicted, name)
        changes.append(f"{size(abs(more))} {'more' if more > 0 else 'less'} {what}" if more else f"as much {what}")
    longer_s = b.predicted.step_s - a.predicted.step_s
    share = f" ({longer_s / a.predicted.step_s:+.1%})" if a.predicted.step_s else ""
    longer = f"{abs(longer_s):.4g} s {'longer' if longer_s > 0 else 'shorter'}{share}" if longer_s else "as long"
    return f"predicted of the second plan: {', '.join(changes)}, a step {longer}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """By name, how it changed; empty where it did not."""
    pairs = {name: (old.get(name, _NONE), new.get(name, _NONE)) for name in (*old, *new)}
    return {name: "" if before == after else f"{before} -> {after}" for name, (before, after) in pairs.items()}


def _runs(changes: Mapping[str, str]) -> list[_Run]:
    runs = groupby(changes, key=lambda name: changes[name])
    return [_Run(tuple(names), change) for change, names in runs if change]


def _stem(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return stem if last.isdecimal() else ""


def _range(names: Sequence[str]) -> str:
    first, last = names[0], names[-1]
    if first == last:
        return first
    alike = _stem(first) and _stem(first) == _stem(last)
    return f"{first}-{last.rpartition('.')[2]}" if alike else f"{first} to {last}"
