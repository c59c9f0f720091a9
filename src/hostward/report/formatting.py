"""Format the words and figures of a report page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostward.core.units import UNKNOWN, size
from hostward.report.schema import Ended, OwnerSamples, RunReport

WEIGHTS, STATE, GRADIENTS, SLOTS = "weights", "optimizer state", "gradients", "staging slots"
ACTIVATIONS, OTHER = "activations", "other"
ROLES = (WEIGHTS, STATE, GRADIENTS, SLOTS, ACTIVATIONS, OTHER)
"""Memory categories, in the order in which they are stacked."""
REST = "activations and workspaces"
"""Device bytes other than those that hostward or torch's optimizer own."""

_ROLE_OF = {
    "weights": WEIGHTS,
    "weights for upload": WEIGHTS,
    "offloaded weights": WEIGHTS,
    "exp_avg": STATE,
    "exp_avg_sq": STATE,
    "master": STATE,
    "remainder": STATE,
    "gradients": GRADIENTS,
    "staging slots": SLOTS,
    "saved activations": ACTIVATIONS,
    REST: ACTIVATIONS,
}


def role_of(owner: str) -> str:
    """Return the category of an owner, one of ROLES."""
    return _ROLE_OF.get(owner, OTHER)


def duration(seconds: float | None) -> str:
    """Format seconds, in ms or µs if few."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 0.9995 or seconds == 0:
        return f"{seconds:,.2f} s"
    scaled, unit = (seconds * 1e3, "ms") if seconds >= 0.9995e-3 else (seconds * 1e6, "µs")
    return f"{scaled:.0f} {unit}" if scaled >= 99.95 else f"{scaled:.1f} {unit}"


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with about this many digits."""
    if value is None:
        return UNKNOWN
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.1f} %"


def per_second(report: RunReport) -> str:
    """Return the tokens per second of the median step."""
    step_s = report.measured.step_s
    return f"{report.tokens_per_iteration / step_s:,.0f}" if step_s else UNKNOWN


def error_percent(predicted: float | None, measured: float | None) -> str:
    """Format the error of a prediction, relative to the measured value."""
    if predicted is None or measured is None:
        return UNKNOWN
    if measured == 0:
        return "0.0 %" if predicted == 0 else UNKNOWN
    return f"{100 * (predicted - measured) / measured:+.1f} %"


def answer(report: RunReport) -> str:
    """Say in one sentence how much memory was offloaded, and its cost in time."""
    left = _left(report)
    if left is None:
        return f"Nothing was offloaded: all {size(report.state_bytes)} of optimizer state stayed on the device."
    where = "the simulated device" if report.simulated else "the device"
    return f"{left} left {where}{_cost(report)}."


def _left(report: RunReport) -> str | None:
    parts = []
    if report.offloaded_bytes:
        parts.append(f"{size(report.offloaded_bytes)} of optimizer state ({percent(report.placed_fraction)} of it)")
    done = max(1, report.last_iteration - report.first_iteration)
    freed = _count(report.activations, "freed_bytes")
    if freed:
        parts.append(f"{size(freed / done)} of saved activations per step")
    weights = _count(weights_of(report), "offloaded_bytes")
    if weights:
        parts.insert(-1 if freed else len(parts), f"{size(weights)} of weights of layers")
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or None


def weights_of(report: RunReport) -> Mapping[str, Any]:
    """Return the report's part about offloaded weights of layers.

    `activations` is validated only here.
    """
    found = (report.activations or {}).get("weights")
    return found if isinstance(found, Mapping) else {}


def _count(found: Mapping[str, Any] | None, key: str) -> int:
    """Return a count by its key, 0 if it is missing."""
    value = (found or {}).get(key, 0)
    return value if type(value) is int else 0


def _cost(report: RunReport) -> str:
    if report.simulated:
        return "; without a GPU there is no cost in time to report"
    offload, step_s = report.offload, report.measured.step_s
    if offload is None or not step_s:
        return "; what that cost in time was not measured"
    share = percent(min(1.0, offload.exposed_s / step_s))
    return (
        f", at the cost of {duration(offload.exposed_s)} in each step, of {duration(step_s)} in the median ({share}), "
        f"in which the GPU was idle for it; {duration(offload.hidden_s)} of copies and CPU optimizer steps were "
        "overlapped"
    )


def status(report: RunReport) -> str | None:
    """Return a sentence about a run that did not finish; None for one that did."""
    done = f"{report.last_iteration} of {report.planned_iterations} iterations"
    sentences = {
        Ended.RUNNING: f"When this was written the run was still running, after {done}. If it is over, it ended in a "
        "way that leaves no trace, such as signal 9.",
        Ended.FAILED: f"The run failed after {done}: {report.reason}.",
        Ended.INTERRUPTED: f"The run was interrupted after {done}: {report.reason}.",
        Ended.TERMINATED: f"The run was terminated after {done}: {report.reason}.",
    }
    return sentences.get(report.ended)


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """Holds neighbouring buckets with one placement."""

    first: str
    last: str
    buckets: int
    numel: int
    state_bytes: int
    placement: str


def placed_runs(report: RunReport) -> list[PlacedRun]:
    """Return the plan with neighbours of one placement merged, in order of use in forward."""
    found: list[PlacedRun] = []
    for b in report.plan:
        if found and found[-1].placement == b.placement:
            p = found[-1]
            found[-1] = PlacedRun(
                p.first, b.name, p.buckets + 1, p.numel + b.numel, p.state_bytes + b.state_bytes, b.placement
            )
        else:
            found.append(PlacedRun(b.name, b.name, 1, b.numel, b.state_bytes, b.placement))
    return found


# Data of charts from the columns of a report: stacks by category, lines thinned to visible points.


ALL_MOMENTS = 48
"""Up to this many samples are all drawn; of more, the moment of each iteration with the most bytes."""
SEEN = 600
"""Line points that can be distinguished."""
UNSEEN = 0.002
"""Layers that never reach this share of the most are too thin to be seen, and only in the table."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Bytes by category over iterations, every layer as long as `at`.

    Categories with almost no bytes are left out.
    """

    at: tuple[float, ...]
    layers: Mapping[str, tuple[int, ...]]

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.layers.values(), strict=True))) if self.layers else ()

    @property
    def most(self) -> int:
        return max(self.totals, default=0)


def device_stack(samples: OwnerSamples) -> Stack:
    """Return bytes by category on the device.

    A rest below 0 is drawn as 0: `overcounted_bytes` gives its size.
    """
    found = samples.rest_of_device_bytes
    rest = {} if found is None else {REST: tuple(max(0, n) for n in found)}
    return _stack(samples.at_iteration, {**samples.device_by_owner_bytes, **rest})


def host_stack(samples: OwnerSamples) -> Stack:
    return _stack(samples.at_iteration, samples.host_by_owner_bytes)


def _stack(at: Sequence[float], columns: Mapping[str, Sequence[int]]) -> Stack:
    chosen = _chosen(at, columns)
    if len(chosen) < len(at):  # one moment represents each iteration
        at = [_iteration(a) for a in at]
    layers = {}
    for role in ROLES:
        own = [column for owner, column in columns.items() if role_of(owner) == role]
        layers[role] = tuple(sum(column[i] for column in own) for i in chosen)
    most = max(map(sum, zip(*layers.values(), strict=True)), default=0)
    return Stack(
        tuple(at[i] for i in chosen),
        {role: layer for role, layer in layers.items() if max(layer, default=0) > most * UNSEEN},
    )


def _chosen(at: Sequence[float], columns: Mapping[str, Sequence[int]]) -> list[int]:
    if len(at) <= ALL_MOMENTS:
        return list(range(len(at)))
    best: dict[int, int] = {}
    for i, iteration in enumerate(at):
        total = sum(column[i] for column in columns.values())
        key = _iteration(iteration)
        if key not in best or total > sum(column[best[key]] for column in columns.values()):
            best[key] = i
    return sorted(best.values())


def _iteration(at: float) -> int:
    """Return the iteration of a moment: 4.33, 4.67 and 5.0 belong to the iteration that ends at 5."""
    return math.ceil(at)


def points_each(values: Sequence[object]) -> int:
    """Return how many known values are drawn as one point."""
    return -(-len(values) // SEEN)


def line(values: Sequence[float | None], first: int) -> list[tuple[float, float]]:
    """Return (iteration, value) of known values, from iteration `first` + 1 on; beyond SEEN, means of neighbours."""
    points = [(float(first + 1 + i), float(v)) for i, v in enumerate(values) if v is not None]
    width = points_each(points)
    if width <= 1:
        return points
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
