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
    for limit, used, cache in _cgroup_limits(root):
        available = max(0, limit - used + cache)
        if available < best.available_bytes:
            best = HostMemory(min(limit, best.total_bytes), available, "the container's cgroup")
    return best


def _cgroup_limits(root: Path) -> list[tuple[int, int, int]]:
    """Return (limit, used, reclaimable cache) of every cgroup of this process that has a limit, ancestors included."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's while the mount shows the container's own group at its root.
        for directory in (folder, *folder.parents):
            entry = _read_cgroup(directory, *names)
            if entry is not None:
                found.append(entry)
            if directory == base:
                break
    return found


def _read_cgroup(directory: Path, limit_name: str, used_name: str, cache_prefix: str) -> tuple[int, int, int] | None:
    try:
        limit_text = (directory / limit_name).read_text().strip()
        used = int((directory / used_name).read_text())
    except OSError:
        return None
    if limit_text == "max":  # v1 writes a number near 2^63 instead, which is never the least
        return None
    try:
        rows = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
    except OSError:
        rows = []
    cache_keys = (f"{cache_prefix}inactive_file", f"{cache_prefix}active_file")
    return int(limit_text), used, sum(int(row[1]) for row in rows if row[0] in cache_keys)


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the resident set size of this process in bytes; 0 where it is not known."""
    for line in (root / "proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Hold measured rates of a machine.

    `host_parameters_per_s` is the rate of the CPU optimizer step; `duplex_bytes_per_s` sums equal copies in both
    directions. The `busy_` rates are measured while the other kind of work runs. `d2h_bytes_per_s` is the rate of
    offloading copies that run alone.
    """

    host_parameters_per_s: float
    duplex_bytes_per_s: float
    busy_host_parameters_per_s: float
    busy_duplex_bytes_per_s: float
    d2h_bytes_per_s: float
