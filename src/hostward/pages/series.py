"""Columns of a report as what charts draw: stacks by role, lines thinned to what can be seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hostward.run_report import OwnerSamples

from .words import REST, ROLES, role_of

ALL_MOMENTS = 48
"""Up to so many samples, each is drawn; of more, that moment of each iteration which holds most."""
SEEN = 600
"""Points of a line that can be told apart."""
UNSEEN = 0.002
"""Layers that never reach this share of the most are too thin to be seen, and left to the table."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Bytes by role over iterations; every layer is as long as `at`. Roles that hold next to nothing are left out."""

    at: tuple[float, ...]
    layers: Mapping[str, tuple[int, ...]]

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.layers.values(), strict=True))) if self.layers else ()

    @property
    def most(self) -> int:
        return max(self.totals, default=0)


def device_stack(samples: OwnerSamples) -> Stack:
    """Bytes by role on the device. A rest below 0 is drawn as nothing: `overcounted_bytes` says what it amounts to."""
    found = samples.rest_of_device_bytes
    rest = {} if found is None else {REST: tuple(max(0, n) for n in found)}
    return _stack(samples.at_iteration, {**samples.device_by_owner_bytes, **rest})


def host_stack(samples: OwnerSamples) -> Stack:
    return _stack(samples.at_iteration, samples.host_by_owner_bytes)


def _stack(at: Sequence[float], columns: Mapping[str, Sequence[int]]) -> Stack:
    chosen = _chosen(at, columns)
    if len(chosen) < len(at):  # one moment of each iteration: it stands for the whole of it
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
    """4.33, 4.67 and 5.0 belong to the iteration that ends at 5."""
    return math.ceil(at)


def line(values: Sequence[float | None], first: int) -> list[tuple[float, float]]:
    """(iteration, value) of those that are there, from iteration `first` + 1 on; beyond SEEN, means of neighbours."""
    points = [(float(first + 1 + i), float(v)) for i, v in enumerate(values) if v is not None]
    width = -(-len(points) // SEEN)
    if width <= 1:
        return points
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
