"""Read the memory limits of this process, container limits included. Holds no state; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Hold the bytes of host memory that this process may still take, and the name of the limit."""

    total_bytes: int
    available_bytes: int
    limited_by: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory that this process may use: the machine's, or its cgroup's where that is smaller (v1 and v2).

    `root` is where `proc` and `sys` are looked up. Page cache charged to the cgroup counts as available, used once
    (inactive) or often (active), since the kernel drops both before it kills.
    """
    meminfo = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        meminfo[key] = int(rest.split()[0]) * 1024 if rest.split() else 0
    best = HostMemory(meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo["MemTotal"]), "the machine")
    limits = map(_memory_limit, cgroup_directories("memory", root))
    for limit, used, cache in filter(None, limits):
        available = max(0, limit - used + cache)
        if available < best.available_bytes:
            best = HostMemory(min(limit, best.total_bytes), available, "the container's cgroup")
    return best


def cgroup_directories(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's cgroup for a controller, innermost first, ancestors included (v1 and v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    directories = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Controllers of v1 that are mounted together have a folder of their names together, or of one of them.
        for name in dict.fromkeys([controllers, controller if controllers else ""]):
            mount = root / "sys/fs/cgroup" / name
            group = mount / path.strip("/")
            # Inside a container the path may be the host's, while the mount shows the container's group at its root.
            directories += [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return directories


def _memory_limit(directory: Path) -> tuple[int, int, int] | None:
    """Return (limit, used, reclaimable cache) of a cgroup; None for one without a limit."""
    for limit_name, used_name, cache_prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            limit_text = (directory / limit_name).read_text().strip()
            used = int((directory / used_name).read_text())
        except OSError:
            continue
        if limit_text == "max":  # v1 writes a number near 2^63 instead, which is never the least
            return None
        try:
            rows = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
        except OSError:
            rows = []
        cache_keys = (f"{cache_prefix}inactive_file", f"{cache_prefix}active_file")
        return int(limit_text), used, sum(int(row[1]) for row in rows if row[0] in cache_keys)
    return None


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the resident set size of this process in bytes; 0 where it is not known."""
    for line in (root / "proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Hold measured rates of a machine.

    `host_parameters_per_s` is the rate of the CPU optimizer step with one format of the state; `duplex_bytes_per_s`
    sums equal copies in both directions. The `busy_` rates are measured while the other kind of work runs.
    `d2h_bytes_per_s` is the rate of offloading copies that run alone.
    """

    host_parameters_per_s: float
    duplex_bytes_per_s: float
    busy_host_parameters_per_s: float
    busy_duplex_bytes_per_s: float
    d2h_bytes_per_s: float
