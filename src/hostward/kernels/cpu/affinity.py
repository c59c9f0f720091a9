"""Choose the threads of the CPU optimizer step, and the CPUs that each rank runs on."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from hostward.core.host_limits import cgroup_directories

LAUNCH_THREADS_PER_RANK = 2
"""Kept free on each rank: one for Python, which launches kernels, and one for autograd."""


@dataclass(frozen=True)
class CpuFacts:
    """Hold the CPU limits of this process: its affinity mask, and the cgroup's quota (None: no limit)."""

    affinity_cpus: int
    quota_cpus: float | None


def default_threads(environ: Mapping[str, str], facts: CpuFacts) -> int:
    """Return the number of threads for the CPU optimizer step of one rank, at least 1.

    The CPUs that this process may use (affinity mask and cgroup quota) are divided by the ranks of this host
    (LOCAL_WORLD_SIZE), and two per rank are kept free for launching. OMP_NUM_THREADS is not read: launchers set it to 1
    for other libraries. Where each rank is bound to its own CPUs, `facts` must hold their number times the number of
    ranks (`hostward train` does so), or the caller must set the number of threads.
    """
    cpus = float(facts.affinity_cpus)
    if facts.quota_cpus is not None:
        cpus = min(cpus, facts.quota_cpus)
    return max(1, math.floor(cpus / local_ranks(environ)) - LAUNCH_THREADS_PER_RANK)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return the number of ranks on this host, from the launcher's LOCAL_WORLD_SIZE."""
    return _positive_int(environ.get("LOCAL_WORLD_SIZE", "1"))


def read_cpu_facts(root: Path = Path("/")) -> CpuFacts:
    """Read the affinity mask of this process and the CPU quota of its cgroup (version 2 or 1) below `root`."""
    return CpuFacts(affinity_cpus=len(os.sched_getaffinity(0)), quota_cpus=read_quota_cpus(root))


def read_quota_cpus(root: Path) -> float | None:
    """Return the smallest CPU quota between this process's cgroup and the root, in CPUs, or None."""
    quotas = map(_quota_of, cgroup_directories("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a kernel list such as "0-3,8"; any other text gives none."""
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


# A rank runs on the CPUs on the NUMA node of its GPU, divided among the ranks whose GPUs are on that node.


@dataclass(frozen=True, slots=True)
class RankCpus:
    """Describe the CPUs and the GPU's NUMA node of a rank to the other ranks.

    Args:
        machine: name of the host.
        numa_node: of its GPU; None: unknown, or there is one node.
        allowed: the CPUs of its affinity mask.
    """

    machine: str
    numa_node: int | None
    allowed: frozenset[int]


def cpus_for(rank: int, told: Sequence[RankCpus], root: Path = Path("/")) -> frozenset[int] | None:
    """Return the CPUs that `rank` should run on; None leaves its CPUs as they are, shared with other ranks.

    A rank gets the CPUs of its mask on the NUMA node of its GPU, if there are any. Whole cores (both threads of one)
    are divided among the ranks of the same machine that would run there too, in order of ranks, unless there are fewer
    cores than ranks. A rank that a launcher has bound to its own CPUs keeps them.

    Args:
        told: the description of each rank, in order of ranks.
        root: where `sys` of this machine is looked up.
    """
    own = told[rank]
    here = [i for i, other in enumerate(told) if other.machine == own.machine]
    near = {i: _near(told[i], root) for i in here}
    sharing = [i for i in here if near[i] & near[rank]]
    if sharing == [rank]:
        return near[rank] if len(here) > 1 else None
    cores = _cores(near[rank], root)
    known = own.numa_node is not None and near[rank] <= _node_cpus(own.numa_node, root)
    if not known or len(cores) < len(sharing):
        return None
    first, end = (len(cores) * (sharing.index(rank) + i) // len(sharing) for i in (0, 1))
    return frozenset().union(*cores[first:end])


def bind(cpus: Set[int]) -> None:
    """Let all threads of this process, and those that they start, run on these CPUs alone.

    Raises:
        OSError: the system does not allow it.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)


def _near(told: RankCpus, root: Path) -> frozenset[int]:
    """Return the CPUs of the mask on the GPU's NUMA node, or all if there are none or it is unknown."""
    return (told.numa_node is not None and told.allowed & _node_cpus(told.numa_node, root)) or told.allowed


def _node_cpus(numa_node: int, root: Path) -> frozenset[int]:
    return _listed(root / f"sys/devices/system/node/node{numa_node}/cpulist")


def _cores(cpus: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Group the CPUs by core."""
    siblings = "topology/thread_siblings_list"
    cores = {(_listed(root / f"sys/devices/system/cpu/cpu{cpu}" / siblings) & cpus) | {cpu} for cpu in cpus}
    return sorted(cores, key=min)


def _listed(path: Path) -> frozenset[int]:
    try:
        return cpu_list(path.read_text(encoding="utf-8"))
    except OSError:
        return frozenset()
