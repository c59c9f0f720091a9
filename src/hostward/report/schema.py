"""Define the report of a training run, as data and as the file `report.json`, without torch.

A run writes it at its end, whatever ends it, and at intervals before. Columns run over iterations: entry i of
`losses`, `grad_norms`, `iteration_s`, `learning_rates` and of the columns in `step_memory` is that of iteration
`first_iteration + i`. A run that was cut short may have more entries in the columns that are known when a step is
issued than in those that are read from the device; `steps()` gives complete rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from hostward.core.placement import PlacedBucket
from hostward.errors import ConfigError
from hostward.files.atomic_file import read_text, replace_text
from hostward.files.json_schema import parse, require_version
from hostward.plan.decisions import FrontierPoint

REPORT_FILE = "report.json"
TRACE_FILE = "trace.json"
PAGE_FILE = "report.html"
FORMAT = "hostward-run"
VERSION = 1


def iterations(first: int, end: int) -> str:
    """Name [first, end), counted from 0, as people count iterations: from 1, the last one included."""
    if end <= first:
        return "no iteration"
    return f"iteration {end}" if end == first + 1 else f"iterations {first + 1} to {end}"


class Ended(StrEnum):
    """Names the state of a run."""

    RUNNING = "running"
    """The report was written while the run was running. A run that was killed leaves such a report."""
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Stopped by Ctrl-C (SIGINT)."""
    TERMINATED = "terminated"
    """Stopped by SIGTERM."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Holds the most bytes of each owner at any time, with the system's own counts.

    Device bytes of gradients and of GPU staging buffers vary, and have their peaks at different moments: the sum of the
    owners is above what is held at any one.
    """

    device_by_owner_bytes: Mapping[str, int]
    host_by_owner_bytes: Mapping[str, int]
    pinned_bytes: int
    resident_bytes: int
    """Resident set size of the process."""
    device_allocated_bytes: int | None
    """Bytes that torch's CUDA allocator holds between steps; None without a GPU."""
    device_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class OffloadPart:
    """Holds the costs of offloading one category, as in `OffloadReport`.

    exposed_s: None if the GPU's idle time for it is not known.
    """

    transfer_s: Mapping[str, float]
    transfer_bytes: Mapping[str, float]
    exposed_s: float | None


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Costs of copies and optimizer steps per step, averaged over the iterations [first, last), and their overlapped
    part.

    `exposed_s`: seconds in which the GPU was idle waiting for offload work; `hidden_s`: the overlapped rest of it.
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
    lines: tuple[str, ...]
    """Text with the same figures."""
    parts: Mapping[str, OffloadPart] = field(default_factory=dict)
    """Costs by category, "weights of layers" and "saved activations", if they are offloaded."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Holds one entry of each column of `StepMemory`."""

    device_allocated_bytes: int | None
    device_peak_bytes: int | None
    host_resident_bytes: int
    pinned_bytes: int
    device_reserved_bytes: int | None = None
    alloc_retries: int | None = None


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Holds columns with one entry per iteration, sampled on the host after its step was issued.

    Device bytes are those of torch's CUDA allocator, None without a GPU; the peak is that since the run started.
    device_reserved_bytes: including cached blocks. alloc_retries: how often since the process started it had to return
    these to get more memory, for which the host waits for the GPU. Both are None without a GPU, and in older reports.
    """

    device_allocated_bytes: tuple[int, ...] | None
    device_peak_bytes: tuple[int, ...] | None
    host_resident_bytes: tuple[int, ...]
    pinned_bytes: tuple[int, ...]
    device_reserved_bytes: tuple[int, ...] | None = None
    alloc_retries: tuple[int, ...] | None = None

    def entry(self, i: int) -> StepBytes:
        """Return the entry of iteration `i` of the columns."""
        columns = {each.name: getattr(self, each.name) for each in fields(StepBytes)}
        row: dict[str, Any] = {name: None if column is None else column[i] for name, column in columns.items()}
        return StepBytes(**row)


@dataclass(frozen=True, slots=True)
class OwnerSamples:
    """Holds bytes by owner at some moments of some iterations, in order of time.

    at_iteration: 4.5 is the middle of the iteration that leads from 4 steps to 5. moments: "forward" is the end of the
    last microbatch's forward, which an iteration by CUDA graph does not have, "backward" that of its backward,
    "step" is when the step has been issued. Every owner's column is as long as these. rest_of_device_bytes: what
    torch's CUDA allocator holds besides, which is saved activations and workspaces; None without a GPU, where they
    are not counted. An entry below 0 means that the owners' counts exceeded what was allocated then.
    """

    at_iteration: tuple[float, ...]
    moments: tuple[str, ...]
    device_by_owner_bytes: Mapping[str, tuple[int, ...]]
    rest_of_device_bytes: tuple[int, ...] | None
    host_by_owner_bytes: Mapping[str, tuple[int, ...]]
    pinned_bytes: tuple[int, ...]

    @property
    def overcounted_bytes(self) -> int:
        """Return the most bytes by which the owners exceed what torch's CUDA allocator held at the same moment.

        It is 0 unless some bytes were counted twice, and without a GPU.
        """
        return max(0, -min(self.rest_of_device_bytes or (0,)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Describes a run by five numbers, predicted or measured; None: unknown.

    host_bytes: state, gradients, weights and activations on the host. step_s: of a steady iteration. exposed_s: of
    it, seconds in which the GPU is idle waiting for offload work.
    """

    device_peak_bytes: int | None
    host_bytes: int | None
    pinned_bytes: int | None
    step_s: float | None
    exposed_s: float | None


@dataclass(frozen=True, slots=True)
class StepRow:
    """Holds one iteration; numbers that are not finite are None."""

    iteration: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    step_s: float
    tokens_per_s: float
    skipped: bool
    device_allocated_bytes: int | None
    device_peak_bytes: int | None
    device_reserved_bytes: int | None
    host_resident_bytes: int
    pinned_bytes: int


class Columns(Protocol):
    """Gives the columns that both a report and a running run have."""

    @property
    def first_iteration(self) -> int: ...
    @property
    def losses(self) -> Sequence[float | None]: ...
    @property
    def grad_norms(self) -> Sequence[float | None]: ...
    @property
    def learning_rates(self) -> Sequence[float]: ...
    @property
    def iteration_s(self) -> Sequence[float]: ...
    @property
    def tokens_per_iteration(self) -> int: ...


def step_row(of: Columns, i: int, memory: StepBytes, skipped: Container[int]) -> StepRow:
    """Return entry `i` of the columns.

    `skipped`: iterations whose step was skipped.
    """
    iteration, step_s = of.first_iteration + i, of.iteration_s[i]
    return StepRow(
        iteration=iteration,
        loss=of.losses[i],
        grad_norm=of.grad_norms[i],
        learning_rate=of.learning_rates[i],
        step_s=step_s,
        tokens_per_s=of.tokens_per_iteration / step_s if step_s else 0.0,
        skipped=iteration in skipped,
        device_allocated_bytes=memory.device_allocated_bytes,
        device_peak_bytes=memory.device_peak_bytes,
        device_reserved_bytes=memory.device_reserved_bytes,
        host_resident_bytes=memory.host_resident_bytes,
        pinned_bytes=memory.pinned_bytes,
    )


@dataclass(frozen=True, slots=True)
class RunReport:
    """Holds the report of one training run."""

    format: str
    version: int
    date: str
    """Written at this time, UTC, ISO 8601."""
    command: str
    versions: Mapping[str, str]
    recipe: str
    ended: Ended
    reason: str | None
    """Why the run ended, unless it finished."""
    first_iteration: int
    last_iteration: int
    """Iterations whose step has been issued."""
    planned_iterations: int
    losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...]
    learning_rates: tuple[float, ...]
    skipped_iterations: tuple[int, ...]
    tokens_per_iteration: int
    tokens_per_s: float
    """Of all iterations after the first together; the page and the terminal show those of the median step."""
    iteration_s: tuple[float, ...]
    step_memory: StepMemory
    memory_over_time: OwnerSamples
    asked_fraction: float
    placed_fraction: float
    state_bytes: int
    offloaded_bytes: int
    buckets: int
    host_buckets: int
    streamed_buckets: int
    placements: str
    """Optimizer state's placements, in words."""
    plan: tuple[PlacedBucket, ...]
    activations: Mapping[str, Any] | None
    """Activation offloading, if any: an ActivationReport as plain values, and "words", which are "" if all of them
    stay. Its "weights" are those of layers with offloaded weights, with their own "words"; or None.
    """
    offload: OffloadReport | None
    """None if nothing was offloaded and no trace was requested, or before anything was measured."""
    memory: MemoryReport
    predicted: Estimate | None
    measured: Estimate
    frontier: tuple[FrontierPoint, ...]
    moved_d2h_bytes: int
    moved_h2d_bytes: int
    parameters: int
    """Trained parameters of the whole model, on all ranks and tiers."""
    model_parameters: int
    """Parameter number of the whole model, trained or not."""
    data: str
    options: Mapping[str, str]
    """Options that differ from their defaults, as typed."""
    machine: Mapping[str, Any]
    host: Mapping[str, Any]
    """Facts about the host: system, CPUs of this process, bytes of memory and what limits them."""
    checkpoint: str | None
    ranks: RanksReport | None = None
    """Reports by all processes of a finished run; the rest of the report is that of rank 0."""
    start_s: Mapping[str, float] | None = None
    """Seconds of each phase before the first iteration, in order; None in older reports."""
    division: str | None = None
    """Words for the part of the model that each of several processes has."""

    @property
    def simulated(self) -> bool:
        """Return whether there was no GPU: the device was host memory, and times are those of copies within it."""
        return self.machine.get("backend") == "simulated"

    def steps(self) -> tuple[StepRow, ...]:
        """Return the iterations whose numbers have all been read from the device."""
        skipped = set(self.skipped_iterations)
        return tuple(step_row(self, i, self.step_memory.entry(i), skipped) for i in range(len(self.iteration_s)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, for JSON; numbers that are not finite become None."""
        plain: dict[str, Any] = finite(asdict(self))
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises ConfigError if it cannot be written.
        """
        replace_text(path, self.to_json(), what="report")


def finite(content: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None, wherever they are in mappings and sequences."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_report(path: Path) -> RunReport:
    """Read the report in a file, or in a run's folder.

    Raises:
        ConfigError: there is none, it cannot be read, or it is not a report of hostward; names the place in it.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ConfigError(
            f"folder {path} holds no report of a run",
            why=f"it has no {REPORT_FILE}",
            fix="name a run's folder (--run-dir, else checkpoint.save), or a file that --json wrote",
        )
    fix = f"name a file that --json wrote, or a run's folder, which holds {REPORT_FILE}"
    text = read_text(file, fix, what="report")
    try:
        require_version(text, VERSION, FORMAT)
        report = parse(RunReport, text)
        _require_whole(report)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not a report of a run",
            why=str(error),
            fix="train again with --run-dir FOLDER, or with --json FILE",
        ) from error
    return report


def _require_whole(report: RunReport) -> None:
    """Raise ValueError if columns do not belong together."""
    steps, memory, samples = len(report.iteration_s), report.step_memory, report.memory_over_time
    for name, column in (("losses", report.losses), ("grad_norms", report.grad_norms)):
        _require_length(name, column, steps, exactly=True)
    at_least: dict[str, Iterable[Any] | None] = {
        "learning_rates": report.learning_rates,
        "step_memory.device_allocated_bytes": memory.device_allocated_bytes,
        "step_memory.device_peak_bytes": memory.device_peak_bytes,
        "step_memory.host_resident_bytes": memory.host_resident_bytes,
        "step_memory.pinned_bytes": memory.pinned_bytes,
        "step_memory.device_reserved_bytes": memory.device_reserved_bytes,
        "step_memory.alloc_retries": memory.alloc_retries,
    }
    for name, found in at_least.items():
        _require_length(name, found, steps, exactly=False)
    columns: dict[str, Iterable[Any] | None] = {
        "moments": samples.moments,
        "rest_of_device_bytes": samples.rest_of_device_bytes,
        "pinned_bytes": samples.pinned_bytes,
        **{f"device_by_owner_bytes.{k}": v for k, v in samples.device_by_owner_bytes.items()},
        **{f"host_by_owner_bytes.{k}": v for k, v in samples.host_by_owner_bytes.items()},
    }
    for name, found in columns.items():
        _require_length(f"memory_over_time.{name}", found, len(samples.at_iteration), exactly=True)


def _require_length(name: str, column: Iterable[Any] | None, length: int, *, exactly: bool) -> None:
    found = length if column is None else len(tuple(column))
    if found < length or (exactly and found != length):
        raise ValueError(f"{name} has {found} entries where there are {length} iterations or samples")


# The reports of a run's processes, as a part of its report. No torch.


@dataclass(frozen=True, slots=True)
class RankRow:
    """Holds one process of a run of several.

    Bytes are those at its end; seconds are per iteration, None if not measured.
    """

    rank: int
    node: str
    device: str
    host_bytes: int
    pinned_bytes: int
    device_peak_bytes: int | None
    data_s: float
    """Time for reading samples."""
    host_step_s: float | None
    transfer_s: float | None
    """Seconds for both directions together."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Holds sums over the ranks of one node."""

    node: str
    ranks: int
    host_bytes: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class RanksReport:
    """Holds the reports of a run's ranks, in order."""

    ranks: tuple[RankRow, ...]
    nodes: tuple[NodeRow, ...]
    stragglers: tuple[str, ...]
    """Ranks that take much longer for something than the others, one sentence each."""
