"""What differs between two plans, for people. No torch."""

from __future__ import annotations

from collections import Counter

from hostward.plan import Placement
from hostward.sizes import size

from .plan_file import PlanFile


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
    shares = _state_by_layer(a), _state_by_layer(b)
    lines += _row_differences("optimizer state", *shares)
    lines += [
        f"optimizer state of {layer}: {share} in both plans, but not of the same parameters"
        for layer, share in shares[0].items()
        if shares[1].get(layer) == share and _rows_of(a, layer) != _rows_of(b, layer)
    ]
    for column, what in (("activations", "saved activations"), ("weights", "weights")):
        lines += _row_differences(
            what, {r.layer: getattr(r, column) for r in a.layers}, {r.layer: getattr(r, column) for r in b.layers}
        )
    return lines


def _rows_of(plan: PlanFile, layer: str) -> list[tuple[int, Placement]]:
    return [(row.numel, row.placement) for row in plan.buckets if row.layer == layer]


def _state_by_layer(plan: PlanFile) -> dict[str, str]:
    """By layer, where its state is: a placement, or shares of its parameters."""
    counts: dict[str, Counter[Placement]] = {}
    for row in plan.buckets:
        counts.setdefault(row.layer, Counter())[Placement(row.placement)] += row.numel
    return {layer: _shares(held) for layer, held in counts.items()}


def _shares(held: Counter[Placement]) -> str:
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


def _row_differences(what: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Runs of neighbours that changed alike as one line."""
    names = list(dict.fromkeys((*old, *new)))
    runs: list[tuple[str, str, str, str]] = []
    before: tuple[str | None, str | None] = (None, None)
    for name in names:
        change = old.get(name), new.get(name)
        if change[0] != change[1]:
            if change == before and runs:
                runs[-1] = runs[-1][0], name, runs[-1][2], runs[-1][3]
            else:
                runs.append((name, name, change[0] or "(not there)", change[1] or "(not there)"))
        before = change
    return [f"{what} of {a if a == b else f'{a} to {b}'}: {x} -> {y}" for a, b, x, y in runs]
