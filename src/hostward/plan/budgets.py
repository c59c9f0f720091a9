"""Hold budgets in bytes and find which of them are exceeded. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hostward.core.units import GIB, MIB, size
from hostward.errors import MemoryLimitError
from hostward.plan.decisions import Choice
from hostward.plan.memory_model import EVALUATION, RESUME, SAVE, SLEEP, TRAINING, Needs
from hostward.plan.workload import Workload

Required = Callable[[Workload, Choice], Needs]
"""Function that returns the needs of a choice: `hostward.plan.memory_model.required`, or one from
`hostward.plan.rank_partition`.
"""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limit the bytes of one rank in `phases`; None: no limit."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    phases: tuple[str, ...] = TRAINING

    @property
    def limits(self) -> dict[str, int]:
        """Return the limits that there are, by kind of memory."""
        found = {"device": self.device_bytes, "host": self.host_bytes, "pinned": self.pinned_bytes}
        return {name: limit for name, limit in found.items() if limit is not None}

    def may_hold(self, nbytes: float) -> bool:
        """Return False for more bytes than device and host together may hold."""
        return self.device_bytes is None or self.host_bytes is None or nbytes <= self.device_bytes + self.host_bytes

    def without(self, name: str) -> Budgets:
        """Return these budgets without that of this kind of memory."""
        if name == "device":
            return replace(self, device_bytes=None)
        return replace(self, host_bytes=None) if name == "host" else replace(self, pinned_bytes=None)

    def over(self, needs: Needs) -> dict[str, int]:
        """Return the excess in bytes of each exceeded budget; empty where all are kept."""
        found = needed(needs, self.phases)
        return {name: found[name] - limit for name, limit in self.limits.items() if found[name] > limit}


def needed(needs: Needs, phases: Sequence[str]) -> dict[str, int]:
    """Return the largest need of each kind of memory in these phases."""
    chosen = [phase for phase in needs.phases if phase.name in phases]
    return {
        "device": max((phase.device_bytes for phase in chosen), default=0),
        "host": max((phase.host_bytes for phase in chosen), default=0),
        "pinned": max((phase.pinned_bytes for phase in chosen), default=0),
    }


# Needs by phase compared with their limits, as a table in text.


_NOT_COUNTED = {
    SAVE: "a run without checkpoint.save does not do it",
    RESUME: "a run without checkpoint.load does not do it",
    EVALUATION: "hostward train does not evaluate",
    SLEEP: "a run that does not call optimizer.sleep() does not do it",
}
"""Reasons by phase that training does not need."""


@dataclass(frozen=True, slots=True)
class Units:
    """Choose the units of size and time in which the figures of an answer differ from 0."""

    scale_bytes: int
    memory: str
    per_s: float = 1.0
    time: str = "s"

    def size(self, nbytes: float) -> str:
        return f"{nbytes / self.scale_bytes:,.1f}"

    def seconds(self, seconds: float) -> str:
        return f"{seconds * self.per_s:.3f}"

    def shows(self, nbytes: float) -> bool:
        return nbytes >= self.scale_bytes // 20


def units_of(needs: Needs, step_s: float = 1.0) -> Units:
    """Choose the units for this device peak and a step of `step_s` seconds."""
    small, quick = needs.device_peak_bytes < GIB, step_s < 0.1
    return Units(*((MIB, "MiB") if small else (GIB, "GiB")), *((1e3, "ms") if quick else (1.0, "s")))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows as columns: the first is left-aligned, the numbers are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def by_phase(needs: Needs, budgets: Budgets, units: Units, gpus: int) -> str:
    """Render a row for each phase and one for the limits, as text.

    Where training fits, lines below name the phases that exceed the limits and are not counted.

    Args:
        gpus: number of GPUs of the node, each with these needs.
    """
    rows = [[f"{units.memory} per GPU", "device", "host", "pinned", *(["host, node"] if gpus > 1 else [])]]
    outside, fits = [], not budgets.over(needs)
    for phase in needs.phases:
        sizes = [phase.device_bytes, phase.host_bytes, phase.pinned_bytes]
        sizes += [phase.host_bytes * gpus] if gpus > 1 else []
        rows.append([phase.name, *(units.size(size) for size in sizes)])
        over = replace(budgets, phases=(phase.name,)).over(needs)
        if fits and over and phase.name not in budgets.phases:
            kinds = f"{' and '.join(over)} memory than the limit"
            outside.append(f"{phase.name} takes more {kinds}, which is not counted: {_NOT_COUNTED[phase.name]}")
    limits = [budgets.device_bytes, budgets.host_bytes, budgets.pinned_bytes]
    limits += [None if budgets.host_bytes is None else budgets.host_bytes * gpus] if gpus > 1 else []
    rows.append(["limit", *("none" if limit is None else units.size(limit) for limit in limits)])
    limit = nearest(needs, budgets)
    short = short_of(needs, budgets, gpus)
    binding = f"short of {short}" if short else f"nearest to its limit: {limit}" if limit else ""
    return "\n".join([columns(rows), *filter(None, [binding]), *outside])


def nearest(needs: Needs, budgets: Budgets) -> str:
    """Name the kind of memory and the phase that come nearest to their limit, and the share; "" without limits."""
    shares = [
        (needed(needs, (phase,))[kind] / limit, kind, phase)
        for kind, limit in budgets.limits.items()
        for phase in budgets.phases
        if limit
    ]
    if not shares:
        return ""
    share, kind, phase = max(shares, key=lambda found: found[0])
    return f"{kind} memory, {phase}, {share:.0%}"


def short_of(needs: Needs, budgets: Budgets, gpus: int = 1) -> str:
    """Name the kinds of memory that exceed their limits, the excess and the phase that needs most; "" if none does.

    Args:
        gpus: number of GPUs of the node, each with these needs.
    """
    phases = [phase.name for phase in needs.phases if phase.name in budgets.phases]
    each = " per GPU" if gpus > 1 else ""
    return " and ".join(
        f"{size(excess)} of {kind} memory{each} ({most})"
        for kind, excess in budgets.over(needs).items()
        for most in [max(phases, key=lambda name: needed(needs, (name,))[kind])]
    )


def by_owner(needs: Needs, units: Units) -> str:
    """Render the memory of the fullest phases by category, as text."""
    # Of equally full phases, take the later one, which lasts.
    training = [phase for phase in reversed(needs.phases) if phase.name in TRAINING]
    fullest = max(training, key=lambda phase: phase.device_bytes)
    on_host = max(training, key=lambda phase: phase.host_bytes)
    lines = [f"device, {fullest.name}: {_list(fullest.device, units)}"]
    if units.shows(on_host.host_bytes):
        lines.append(f"host, {on_host.name}: {_list(on_host.host, units)}")
    return "\n".join(lines)


def _list(sizes: Mapping[str, int], units: Units) -> str:
    shown = sorted(((size, name) for name, size in sizes.items() if units.shows(size)), reverse=True)
    return ", ".join(f"{name} {units.size(size)}" for size, name in shown)


# Raising for needs that do not fit, with the table that `hostward plan` shows.


def refuse(needs: Needs, free: Budgets, cure: str) -> None:
    """Raise MemoryLimitError, with needs by phase and by category, if they exceed the free memory."""
    over = free.over(needs)
    if not over:
        return
    units = units_of(needs)
    named = " and ".join(f"{name} memory" for name in over)
    there = ", ".join(f"{name} {units.size(free.limits[name])} {units.memory}" for name in over)
    raise MemoryLimitError(
        f"the run needs more {named} than there is: free are {there}",
        why=f"by the memory model, compared with what is free:\n{table(needs, free)}",
        fix=cure,
    )


def table(needs: Needs, free: Budgets) -> str:
    """Render needs by phase, and by category where known, with the free memory: indented lines."""
    units = units_of(needs)
    lines = by_phase(needs, free, units, gpus=1).splitlines()
    if any(len(phase.device) > 1 or len(phase.host) > 1 for phase in needs.phases):  # a plan file has only the sums
        lines += by_owner(needs, units).splitlines()
    return "\n".join(f"    {line}" for line in lines)
