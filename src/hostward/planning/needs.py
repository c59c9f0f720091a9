"""Budgets in bytes, and what exceeds them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from hostward.choice import Choice
from hostward.memory_model import Needs
from hostward.workload import Workload

STEPPING = ("load", "first step", "steady step")
"""The phases that every run goes through. Others (save, resume, sleep) are covered where a run asks."""

Required = Callable[[Workload, Choice], Needs]
"""What tells the needs of a choice: `hostward.memory_model.required`."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Most bytes of one rank; None: no limit."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None

    def over(self, needs: Needs) -> dict[str, int]:
        """By how many bytes which budget is exceeded; empty where all are kept."""
        pairs = {
            "device": (needs.device_peak_bytes, self.device_bytes),
            "host": (needs.host_bytes, self.host_bytes),
            "pinned": (needs.pinned_bytes, self.pinned_bytes),
        }
        return {name: need - limit for name, (need, limit) in pairs.items() if limit is not None and need > limit}


def limited(needs: Needs, phases: Collection[str]) -> Needs:
    """The phases that budgets cover."""
    return Needs(tuple(phase for phase in needs.phases if phase.name in phases), needs.slots)
