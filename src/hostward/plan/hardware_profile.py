"""Read and write hardware files: a machine's rates and limits, measured or shipped for common GPUs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from hostward.core.host_limits import Rates
from hostward.errors import ConfigError
from hostward.files import json_schema
from hostward.files.atomic_file import read_text, replace_text

VERSION = 1
_FOLDER = Path(__file__).parent / "profiles"

PROFILES = {
    "h200": ("NVIDIA H200",),
    "h100": ("NVIDIA H100 80GB HBM3",),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB",),
    "rtx-4090": ("NVIDIA GeForce RTX 4090",),
}
"""The shipped profiles, and the names under which the driver knows these GPUs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Describe one GPU: `peak` rates are the vendor's, the others are measured; None: unknown."""

    name: str
    memory_bytes: int
    bf16_matmul_flops_per_s: float | None
    bf16_peak_flops_per_s: float | None
    memory_peak_bytes_per_s: float | None
    link_peak_bytes_per_s: float | None
    """Peak rate of PCIe or NVLink to the host, in one direction."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Describe the host's processors.

    `cpus` counts those that the process may use; `quota_cpus` is the cgroup's share of them.
    """

    model: str | None
    cpus: int | None
    quota_cpus: float | None
    numa_nodes: int | None
    instruction_sets: tuple[str, ...]
    """Instruction sets with a CPU kernel, slowest first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Hold limits of the process in bytes; None: no limit, or unknown in a shipped profile."""

    memory_bytes: int | None
    """Machine's memory, or its container's where that is less; `limited_by` names which."""
    limited_by: str | None
    locked_bytes: int | None
    """`ulimit -l`."""
    address_space_bytes: int | None
    """`ulimit -v`."""
    shared_memory_bytes: int | None
    """Size in bytes, from /dev/shm."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Hold bytes per second between pinned host memory and the GPU, in copies of `copy_bytes`."""

    copy_bytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex_bytes_per_s: float | None
    """Copies in both directions at once, in sum."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hold facts and rates of a machine.

    Rates are of one process and one GPU; a rate that is None is unknown.
    """

    version: int
    name: str
    measured_at: str | None
    """UTC, ISO 8601; None for a shipped profile."""
    threads: int | None
    """Thread count for the CPU optimizer step in the rates below."""
    gpu: Gpu | None
    gpu_count: int
    cpu: Cpu
    limits: Limits
    links: tuple[LinkRate, ...]
    """Rates ordered by growing copy size; empty without a GPU."""
    pinned_s_per_gib: float | None
    """Seconds to touch and pin 1 GiB of host memory."""
    dram_bytes_per_s: float | None
    """Bandwidth limit of read-modify-write: bytes that the threads move in a loop with the traffic of a CPU optimizer
    step.
    """
    host_parameters_per_s: float | None
    """CPU AdamW with 16-bit gradient and weight, and a split fp32 main weight."""
    duplex_bytes_per_s: float | None
    """Sum of large copies in both directions while the CPU optimizer step is idle."""
    busy_host_parameters_per_s: float | None
    """CPU AdamW as in `host_parameters_per_s`, while copies run; the next field is the reverse."""
    busy_duplex_bytes_per_s: float | None
    node_host_parameters_per_s: float | None
    """CPU optimizer steps of all processes of a full machine, in sum: they share its memory bandwidth. One process
    cannot measure it.
    """
    node_duplex_bytes_per_s: float | None
    """Sum of copies in both directions of all GPUs of a full machine."""
    sources: Mapping[str, str]
    """Source for each number of a shipped profile, by field."""
    matmul_share: float | None = None
    """Rate reached by a model's matrix products over `gpu.bf16_matmul_flops_per_s`. May be missing, as may the next."""
    traffic_share: float | None = None
    """Rate reached by a model's other operations in device memory over `gpu.memory_peak_bytes_per_s`."""
    node_memory_bytes_per_s: float | None = None
    """Bytes that CPU optimizer steps and copies of all processes of a full machine move in its memory together."""

    @property
    def rates(self) -> Rates | None:
        """Return the rates that choose the mix of CPU-stepped and streamed state; None where one is unknown."""
        found = (
            self.host_parameters_per_s,
            self.duplex_bytes_per_s,
            self.busy_host_parameters_per_s,
            self.busy_duplex_bytes_per_s,
            self.links[-1].d2h_bytes_per_s if self.links else None,
        )
        known = [rate for rate in found if rate is not None]
        return Rates(*known) if len(known) == len(found) else None

    def to_json(self) -> str:
        return json_schema.to_text(self)

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> Hardware:
        """Parse a hardware file; `origin` names the text in errors. Raises ConfigError if it is none."""
        try:
            json_schema.require_version(text, VERSION)
            hardware = json_schema.parse(cls, text)
            _check(hardware)
        except ValueError as error:
            raise ConfigError(f"{origin} is no hardware file", why=str(error), fix=_WRITE_ONE) from error
        return hardware


_WRITE_ONE = "write one with: hostward bench machine --json FILE"


_RATES_OF_GPU = (
    "bf16_matmul_flops_per_s",
    "bf16_peak_flops_per_s",
    "memory_peak_bytes_per_s",
    "link_peak_bytes_per_s",
)
_LEAST_RATE, _MOST_RATE = 1e-3, 1e24
"""Beyond these a predicted time would be infinite, or none."""


def _check(hardware: Hardware) -> None:
    if any(a.copy_bytes >= b.copy_bytes for a, b in pairwise(hardware.links)):
        raise ValueError("links are not in the order of copy_bytes")
    if hardware.gpu is None and (hardware.gpu_count or hardware.links):
        raise ValueError("gpu is null, but gpu_count or links say that there is one")
    if hardware.gpu is not None and not hardware.gpu_count:
        raise ValueError("gpu_count is 0, but there is a gpu")
    gpu = hardware.gpu
    rates = {
        **({f"gpu.{name}": getattr(gpu, name) for name in _RATES_OF_GPU} if gpu else {}),
        "pinned_s_per_gib": hardware.pinned_s_per_gib,
        "dram_bytes_per_s": hardware.dram_bytes_per_s,
        "host_parameters_per_s": hardware.host_parameters_per_s,
        "duplex_bytes_per_s": hardware.duplex_bytes_per_s,
        "busy_host_parameters_per_s": hardware.busy_host_parameters_per_s,
        "busy_duplex_bytes_per_s": hardware.busy_duplex_bytes_per_s,
        "node_host_parameters_per_s": hardware.node_host_parameters_per_s,
        "node_duplex_bytes_per_s": hardware.node_duplex_bytes_per_s,
        "node_memory_bytes_per_s": hardware.node_memory_bytes_per_s,
        "matmul_share": hardware.matmul_share,
        "traffic_share": hardware.traffic_share,
        **{f"links[{i}].h2d_bytes_per_s": link.h2d_bytes_per_s for i, link in enumerate(hardware.links)},
        **{f"links[{i}].d2h_bytes_per_s": link.d2h_bytes_per_s for i, link in enumerate(hardware.links)},
        **{f"links[{i}].duplex_bytes_per_s": link.duplex_bytes_per_s for i, link in enumerate(hardware.links)},
    }
    for name, rate in rates.items():
        if rate == 0:
            raise ValueError(f"{name} is 0; null means unknown")
        if rate is not None and not _LEAST_RATE <= rate <= _MOST_RATE:
            raise ValueError(f"{name} is {rate:g}, which no machine has")


def load(path: Path) -> Hardware:
    """Read a hardware file. Raises ConfigError where it cannot be read or is none."""
    return Hardware.from_json(read_text(path, _WRITE_ONE), str(path))


def save(hardware: Hardware, path: Path) -> None:
    """Write the file atomically. Raises ConfigError where it cannot be written."""
    replace_text(path, hardware.to_json(), what="hardware file")


@cache
def profile(name: str) -> Hardware:
    """Return a shipped profile by its name in `PROFILES`. Raises ConfigError for another name."""
    if name not in PROFILES:
        raise ConfigError(f"there is no hardware profile {name!r}", fix=f"choose from {', '.join(PROFILES)}")
    return load(_FOLDER / f"{name}.json")


def profile_of(gpu_name: str) -> Hardware | None:
    """Return the shipped profile of a GPU by its name in the driver; None where there is none."""
    return next((profile(name) for name, names in PROFILES.items() if gpu_name in names), None)
