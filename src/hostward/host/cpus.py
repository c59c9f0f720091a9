"""Which CPUs a rank runs on: those beside its GPU, divided among the ranks whose GPUs are there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from .threads import cpu_list


@dataclass(frozen=True, slots=True)
class RankCpus:
    """What a rank tells the others.

    Args:
        numa_node: of its GPU; None: unknown, or there is one node.
        allowed: the CPUs of its affinity mask.
    """

    machine: str
    numa_node: int | None
    allowed: frozenset[int]


def cpus_for(rank: int, told: Sequence[RankCpus], root: Path = Path("/")) -> frozenset[int] | None:
    """The CPUs that `rank` should run on; None: as it is, sharing them with others.

    Of its mask those on the NUMA node of its GPU, if there are any. Whole cores (both threads of one) are divided among
    the ranks of the same machine that would run there too, in order of ranks, unless there are fewer cores than ranks.
    A rank that has CPUs of its own, because a launcher has bound it, keeps them.

    Args:
        told: what each rank has told, in order of ranks.
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

    Raises OSError where the system does not allow it.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)


def _near(told: RankCpus, root: Path) -> frozenset[int]:
    """The CPUs of the mask that are beside the GPU, or all of them where there are none, or it is not known."""
    return (told.numa_node is not None and told.allowed & _node_cpus(told.numa_node, root)) or told.allowed


def _node_cpus(numa_node: int, root: Path) -> frozenset[int]:
    return _listed(root / f"sys/devices/system/node/node{numa_node}/cpulist")


def _cores(cpus: frozenset[int], root: Path) -> list[frozenset[int]]:
    """The CPUs by core, each core whole as far as it is among them."""
    siblings = "topology/thread_siblings_list"
    cores = {(_listed(root / f"sys/devices/system/cpu/cpu{cpu}" / siblings) & cpus) | {cpu} for cpu in cpus}
    return sorted(cores, key=min)


def _listed(path: Path) -> frozenset[int]:
    try:
        return cpu_list(path.read_text(encoding="utf-8"))
    except OSError:
        return frozenset()
