"""Run all checks over the facts and show their result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hostward import __version__
from hostward.doctor import Finding, Severity
from hostward.doctor.checks import CHECKS, gib
from hostward.kernels.cpu.affinity import default_threads
from hostward.machine.facts import Facts

if TYPE_CHECKING:
    from rich.table import Table

_ORDER = list(Severity)
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def examine(facts: Facts) -> list[Finding]:
    """Return the findings of all checks, errors first."""
    return sorted((f for check in CHECKS for f in check(facts)), key=lambda finding: _ORDER.index(finding.severity))


def is_bad(findings: Sequence[Finding]) -> bool:
    """Return whether one of the findings is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def to_dict(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return plain values, for JSON."""
    return {"facts": _plain(facts), "findings": [_plain(finding) for finding in findings]}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    return value.value if isinstance(value, Severity) else value


def summary(facts: Facts) -> dict[str, str]:
    """Describe the machine in a few lines."""
    cpu, quota = facts.cpu, facts.cpu.quota_cpus
    cpus = f"{cpu.affinity_cpus} of {facts.machine_cpus} CPUs" + ("" if quota is None else f", quota {quota:g}")
    nodes = f"{facts.numa_nodes} NUMA node{'s' * (facts.numa_nodes != 1)}"
    kernel = facts.instruction_sets[-1] if facts.instruction_sets else "no native library"
    memory = facts.memory
    versions = {"hostward": __version__, "python": facts.python, **facts.packages}
    rows = {
        "processor": f"{facts.cpu_model or 'unknown'}; {cpus}; {nodes}",
        "CPU optimizer step": f"threads: {default_threads(facts.environ, cpu)}; {kernel}",
        "host memory": f"{gib(memory.available_bytes)} left of {gib(memory.total_bytes)} (limit: {memory.limited_by})",
        "limits": f"locked {_limit(facts.locked_limit_bytes)}, addresses {_limit(facts.address_limit_bytes)}, "
        f"/dev/shm {_limit(facts.shared_memory_bytes, 'missing')}, "
        f"huge pages {facts.transparent_huge_pages or 'unknown'}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
    }
    for index, gpu in enumerate(facts.devices.gpus):
        node = "" if gpu.numa_node is None or gpu.numa_node < 0 else f", NUMA node {gpu.numa_node}"
        rows[f"GPU {index}"] = f"{gpu.name}, {gib(gpu.memory_bytes)}, PCI {gpu.pci_address}{node}"
    if not facts.devices.gpus:
        rows["GPU"] = "none seen by torch"
    if facts.environ:
        rows["environment"] = ", ".join(f"{key}={value}" for key, value in facts.environ.items())
    return rows


def _limit(size_bytes: int | None, none: str = "unlimited") -> str:
    return none if size_bytes is None else gib(size_bytes)


def render(facts: Facts, findings: Sequence[Finding]) -> list[Table]:
    """Return tables for the terminal."""
    from rich.table import Table
    from rich.text import Text

    machine = Table(title="this machine", show_header=False)
    machine.add_column(no_wrap=True)
    machine.add_column(overflow="fold")
    for name, value in summary(facts).items():
        machine.add_row(Text(name), Text(value))
    if not findings:
        return [machine]
    table = Table(title="findings", show_header=False, show_lines=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        severity = Text(finding.severity.value, style=_STYLES[finding.severity])
        table.add_row(severity, Text(f"{finding.what}\nwhy: {finding.why}\nfix: {finding.fix}"))
    return [machine, table]
