"""Budgets in bytes, and what exceeds them. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hostward.choice import Choice
from hostward.memory_model import Needs
from hostward.workload import Workload

SLEEP = "sleep"
"""The phase in which everything has left the device: runs that never sleep do not need it, so no budget covers it."""

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


def awake(needs: Needs) -> Needs:
    """Without the phase `sleep`."""
    return Needs(tuple(phase for phase in needs.phases if phase.name != SLEEP), needs.slots)
