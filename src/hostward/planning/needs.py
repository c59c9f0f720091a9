"""Budgets in bytes, and what exceeds them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostward.choice import Choice
from hostward.memory_model import TRAINING, Needs
from hostward.workload import Workload

Required = Callable[[Workload, Choice], Needs]
"""What tells the needs of a choice: `hostward.memory_model.required`, or one of `hostward.planning.shards`."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Most bytes of one rank; None: no limit. `phases` are those that must keep to them."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    phases: tuple[str, ...] = TRAINING

    def over(self, needs: Needs) -> dict[str, int]:
        """By how many bytes which budget is exceeded; empty where all are kept."""
        limits = {"device": self.device_bytes, "host": self.host_bytes, "pinned": self.pinned_bytes}
        found = needed(needs, self.phases)
        return {
            name: found[name] - limit for name, limit in limits.items() if limit is not None and found[name] > limit
        }


def needed(needs: Needs, phases: Sequence[str]) -> dict[str, int]:
    """The most of each kind of memory in these phases."""
    chosen = [phase for phase in needs.phases if phase.name in phases]
    return {
        "device": max((phase.device_bytes for phase in chosen), default=0),
        "host": max((phase.host_bytes for phase in chosen), default=0),
        "pinned": max((phase.pinned_bytes for phase in chosen), default=0),
    }
