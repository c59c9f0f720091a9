"""Refusing what does not fit, with the table that `hostward plan` shows. No torch."""

from __future__ import annotations

from hostward.errors import MemoryLimitError
from hostward.memory_model import Needs

from .needs import Budgets
from .needs_table import by_owner, by_phase, units_of


def refuse(needs: Needs, free: Budgets, cure: str) -> None:
    """Raises MemoryLimitError, with needs by phase and by owner, if they exceed what is free."""
    over = free.over(needs)
    if not over:
        return
    units = units_of(needs)
    limits = {"device": free.device_bytes, "host": free.host_bytes, "pinned": free.pinned_bytes}
    named = " and ".join(f"{name} memory" for name in over)
    there = ", ".join(f"{name} {units.size(limits[name] or 0)} {units.memory}" for name in over)
    raise MemoryLimitError(
        f"the run needs more {named} than there is: free are {there}",
        why=f"by the memory model, beside what is free:\n{table(needs, free)}",
        fix=cure,
    )


def table(needs: Needs, free: Budgets) -> str:
    """Needs by phase and, where they are known, by owner, beside what is free: indented lines."""
    units = units_of(needs)
    lines = by_phase(needs, free, units, gpus=1).splitlines()
    if any(len(phase.device) > 1 or len(phase.host) > 1 for phase in needs.phases):  # a plan file knows the sums alone
        lines += by_owner(needs, units).splitlines()
    return "\n".join(f"    {line}" for line in lines)
