"""How many threads the host step may use."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LAUNCH_THREADS_PER_RANK = 2
"""Kept free on each rank: one for Python, which launches kernels, and one for autograd."""


@dataclass(frozen=True)
class CpuFacts:
    """What limits this process: CPUs of its affinity mask, and the cgroup's quota in CPUs (None: no limit)."""

    affinity_cpus: int
    quota_cpus: float | None


def default_threads(environ: Mapping[str, str], facts: CpuFacts) -> int:
    """Threads for the host step of one rank, at least 1.

    The CPUs that this process may use (affinity mask and cgroup quota) are divided by the ranks of this host
    (LOCAL_WORLD_SIZE), and two per rank are kept free for launching. OMP_NUM_THREADS is not read: launchers set it to 1
    for reasons of their own (H52). Where each rank is bound to CPUs of its own, `facts` should hold those times the
    ranks (`hostward train` sees to it), or the number of threads be given.
    """
    cpus = float(facts.affinity_cpus)
    if facts.quota_cpus is not None:
        cpus = min(cpus, facts.quota_cpus)
    return max(1, math.floor(cpus / local_ranks(environ)) - LAUNCH_THREADS_PER_RANK)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Ranks of this host, as launchers say."""
    return _positive_int(environ.get("LOCAL_WORLD_SIZE", "1"))


def read_cpu_facts(root: Path = Path("/")) -> CpuFacts:
    """Reads the affinity mask of this process and the CPU quota of its cgroup (version 2 or 1) below `root`."""
    return CpuFacts(affinity_cpus=len(os.sched_getaffinity(0)), quota_cpus=read_quota_cpus(root))


def read_quota_cpus(root: Path) -> float | None:
    """The smallest CPU quota on the way from this process's cgroup to the root, in CPUs, or None."""
    quotas = []
    for directory in _cgroup_directories(root):
        quota = _quota_of(directory)
        if quota is not None:
            quotas.append(quota)
    return min(quotas, default=None)


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a kernel list, as in "0-3,8"; what is no list gives none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if match:
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _positive_int(text: str) -> int:
    return max(1, int(text)) if text.strip().isdecimal() else 1


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _cgroup_directories(root: Path) -> list[Path]:
    directories = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
        else:
            continue
        group = mount / path.strip("/")
        # Inside a container the path may be one of the host that is not mounted here; its parents then are what counts.
        while group != mount:
            directories.append(group)
            group = group.parent
        directories.append(mount)
    return directories


def _quota_of(directory: Path) -> float | None:
    version_2 = _read(directory / "cpu.max")
    if version_2 is not None:
        quota, _, period = version_2.strip().partition(" ")
        return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) > 0 else None
    quota_us, period_us = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
    if quota_us is None or period_us is None:
        return None
    quota, period = quota_us.strip(), period_us.strip()
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) > 0 else None
