"""Budgets in bytes, and what exceeds them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostward.choice import Choice
from hostward.errors import MemoryLimitError
from hostward.memory_model import TRAINING, Needs
from hostward.sizes import gib
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


def refuse(needs: Needs, free: Budgets, cure: str) -> None:
    """Raises MemoryLimitError, with the needs by phase, if they exceed what is free."""
    over = free.over(needs)
    if not over:
        return
    rows = [
        f"{phase.name}: device {gib(phase.device_bytes)}, host {gib(phase.host_bytes)}"
        f"{f', page-locked {gib(phase.pinned_bytes)}' if 'pinned' in over else ''} GiB"
        for phase in needs.phases
        if phase.name in free.phases
    ]
    limits = {"device": free.device_bytes, "host": free.host_bytes, "pinned": free.pinned_bytes}
    named = " and ".join(f"{name} memory" for name in over)
    there = ", ".join(f"{name} {gib(limits[name] or 0)} GiB" for name in over)
    raise MemoryLimitError(f"the run needs more {named} than there is: free are {there}", why="; ".join(rows), fix=cure)
