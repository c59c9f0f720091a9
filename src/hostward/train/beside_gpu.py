"""Each rank's threads on the CPUs beside its GPU. (Its page-locked memory is taken there by the backend.)"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

import torch

from hostward.host.cpus import RankCpus, bind, cpus_for
from hostward.host.threads import CpuFacts, read_quota_cpus

from .ranks import Ranks

log = logging.getLogger("hostward")


def bind_beside_gpu(ranks: Ranks, device: torch.device, root: Path = Path("/")) -> CpuFacts | None:
    """Bind this process, one of several on its machine, to its CPUs there; None where it shares them with others.

    Returns:
        the machine's CPUs, as if every rank on it had as many of its own as this one.
    """
    if ranks.size == 1:
        return None
    allowed = frozenset(os.sched_getaffinity(0))
    told = ranks.gather(RankCpus(platform.node(), _numa_node(device, root), allowed))
    cpus = cpus_for(ranks.rank, told, root)
    if cpus is None:
        return None
    if cpus != allowed:
        try:
            bind(cpus)
        except OSError as error:
            log.warning("threads could not be bound to the CPUs beside the GPU (%s): they run anywhere", error.strerror)
            return None
        log.info("threads of this rank are bound to %d CPUs on the NUMA node of its GPU", len(cpus))
    return CpuFacts(len(cpus) * ranks.local_size, read_quota_cpus(root))


def _numa_node(device: torch.device, root: Path) -> int | None:
    if device.type != "cuda":
        return None
    from hostward.engine.driver import pci_address
    from hostward.engine.pools import numa_node_of

    return numa_node_of(pci_address(device.index), root)
