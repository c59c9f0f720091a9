"""What a run reports: facts as plain data, a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hostward.engine.trace import Trace
from hostward.training.attach import ActivationReport

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes in steady state, by owner, and what the system counts beside them. Device bytes of gradients and of staging
    slots come and go: these are the most at any time.
    """

    device_by_owner_bytes: Mapping[str, int]
    host_by_owner_bytes: Mapping[str, int]
    pinned_bytes: int
    resident_bytes: int
    """Resident set size of the process."""
    device_allocated_bytes: int | None
    """What torch's CUDA allocator holds between steps; None without a GPU."""
    device_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What moving and stepping cost per step, measured over the iterations [first, last), and what of it was hidden.

    `exposed_s`: seconds in which the device stood still for an arrival; `hidden_s`: the rest of the offload work.
    Transfers by direction, "d2h" and "h2d".
    """

    first_iteration: int
    last_iteration: int
    hidden_s: float
    exposed_s: float
    offload_s: float
    host_step_s: float
    transfer_s: Mapping[str, float]
    transfer_bytes: Mapping[str, float]
    lines: list[str]
    """The same for people."""


def measured(trace: Trace, iterations: int, traced: int) -> OffloadReport | None:
    """Averages over the steps of a trace of `traced` iterations, the last of them `iterations` - 1; None for a trace of
    nothing.

    The last step is left out where there are others: no forward follows, so there is nothing for it to hide behind. So
    is what the first forward moves: a step begins with its gradients, and that forward's own is not in the trace.
    """
    steps = trace.steps()[-traced:] if traced else ()
    if not steps:
        return None
    chosen = steps[:-1] or steps
    summary, n = trace.summary(chosen), len(chosen)
    first = iterations - len(steps)
    return OffloadReport(
        first_iteration=first,
        last_iteration=first + n,
        hidden_s=summary.hidden_s / n,
        exposed_s=summary.exposed_s / n,
        offload_s=summary.offload_s / n,
        host_step_s=summary.host_step_s / n,
        transfer_s={direction: seconds / n for direction, seconds in summary.transfer_s.items()},
        transfer_bytes={direction: count / n for direction, count in summary.transfer_bytes.items()},
        lines=summary.explain().splitlines(),
    )


@dataclass(frozen=True, slots=True)
class RunReport:
    """One training run."""

    recipe: str
    first_iteration: int
    last_iteration: int
    losses: list[float]
    grad_norms: list[float]
    skipped_iterations: list[int]
    tokens_per_s: float
    iteration_s: list[float]
    asked_fraction: float
    placed_fraction: float
    state_bytes: int
    offloaded_bytes: int
    buckets: int
    host_buckets: int
    streamed_buckets: int
    placements: str
    """Of the optimizer state, in words."""
    activations: ActivationReport | None
    """Of what layers saved for backward, where it is offloaded."""
    offload: OffloadReport | None
    """None where nothing was offloaded and no trace was asked for."""
    memory: MemoryReport
    moved_d2h_bytes: int
    moved_h2d_bytes: int
    parameters: int
    model_parameters: int
    data: str
    machine: Mapping[str, Any]
    checkpoint: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)


def render(report: RunReport) -> list[Table]:
    """Tables for a terminal."""
    from rich.table import Table

    run = Table(title=f"{report.recipe}: iterations {report.first_iteration} to {report.last_iteration}")
    run.add_column("run")
    run.add_column("value", justify="right")
    losses, simulated = report.losses, report.machine["backend"] == "simulated"
    rows = {
        "loss, first and last": f"{losses[0]:.6f} → {losses[-1]:.6f}" if losses else "no iteration was run",
        "tokens/s": f"{report.tokens_per_s:,.0f}",
        "parameters (trained)": f"{report.model_parameters:,} ({report.parameters:,})",
        "state offloaded, asked": f"{report.asked_fraction:.4f}",
        "state offloaded, placed": f"{report.placed_fraction:.4f}",
        "state offloaded, bytes": f"{report.offloaded_bytes:,} of {report.state_bytes:,}",
        "buckets stepped on the host": f"{report.host_buckets} of {report.buckets}",
        "buckets streamed": f"{report.streamed_buckets} of {report.buckets}",
        "placements": report.placements,
        "moved device to host, bytes": f"{report.moved_d2h_bytes:,}",
        "moved host to device, bytes": f"{report.moved_h2d_bytes:,}",
        "skipped steps": str(len(report.skipped_iterations)),
        "data": report.data,
        "backend": ", ".join(f"{k} {v}" for k, v in report.machine.items()),
    }
    if report.activations is not None:
        rows |= {"saved activations": report.activations.explain()}
    if report.offload is not None:
        span = f"iterations {report.offload.first_iteration} to {report.offload.last_iteration}"
        notes = ["copies within host memory: times and rates of no GPU"] if simulated else []
        rows |= {f"measured, {span}": "\n".join([*report.offload.lines, *notes])}
    if report.checkpoint:
        rows["checkpoint"] = report.checkpoint
    for name, value in rows.items():
        run.add_row(name, value)
    return [run, _memory_table(report.memory, simulated=simulated)]


def _memory_table(memory: MemoryReport, *, simulated: bool) -> Table:
    from rich.table import Table

    table = Table(title="memory in steady state")
    if simulated:
        table.caption = "The device is simulated: its bytes are host memory too, and nothing is page-locked."
    for column in ("owner", "simulated device bytes" if simulated else "device bytes", "host bytes"):
        table.add_column(column, justify="left" if column == "owner" else "right")
    owners = [*memory.device_by_owner_bytes]
    owners += [o for o in memory.host_by_owner_bytes if o not in memory.device_by_owner_bytes]
    for owner in owners:
        on_device, on_host = memory.device_by_owner_bytes.get(owner, 0), memory.host_by_owner_bytes.get(owner, 0)
        table.add_row(owner, f"{on_device:,}" if on_device else "", f"{on_host:,}" if on_host else "")
    table.add_section()
    table.add_row(
        "sum", f"{sum(memory.device_by_owner_bytes.values()):,}", f"{sum(memory.host_by_owner_bytes.values()):,}"
    )
    table.add_row("of it pinned on a GPU" if simulated else "of it pinned", "", f"{memory.pinned_bytes:,}")
    table.add_row("process, resident", "", f"{memory.resident_bytes:,}")
    if memory.device_allocated_bytes is not None:
        table.add_row("torch, allocated between steps", f"{memory.device_allocated_bytes:,}", "")
        table.add_row("torch, peak", f"{memory.device_peak_bytes:,}", "")
    return table
