"""Represent the processes of a run, as torchrun starts them: identity, agreement and exchange.

Callers never ask whether there are several: with one process every method acts on that process alone.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hostward.config.rules.table import resharded
from hostward.config.schema import Config
from hostward.distributed.rank_failures import Failure, raised_by_all
from hostward.errors import ConfigError
from hostward.kernels.cpu.affinity import CpuFacts, RankCpus, bind, cpus_for, read_cpu_facts, read_quota_cpus
from hostward.model.collective_errors import attempted

T = TypeVar("T")
_WATCHDOG_WAIT_MS = 2000
"""Poll interval of torch's NCCL watchdog.

Once it has found a rank missing it waits four times as long before it ends this process, so that all ranks can record
their state; by its own default, 15 s, that is a minute.
"""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Identifies one process among those of a run.

    Args:
        rank, size: position among all processes; local_rank, local_size: among those on this node.
        sharing: number of neighbouring ranks that share one microbatch: they train on the same samples.
        stages: pipeline stages, each of `size // stages` neighbouring ranks with layers of its own.
        divided: weights, gradients and state are sharded over the ranks of a stage; else replicated.
        resharded: sharded weights of a layer are unsharded only while it runs; else from its forward to its backward.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    sharing: int = 1
    stages: int = 1
    divided: bool = False
    resharded: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Ranks:
        """Read torchrun's environment variables.

        Raises ConfigError for a value that is not a number, or not a rank.
        """
        size, rank = _number(environ, "WORLD_SIZE", 1), _number(environ, "RANK", 0)
        local_size, local_rank = _number(environ, "LOCAL_WORLD_SIZE", 1), _number(environ, "LOCAL_RANK", 0)
        if rank >= size or local_rank >= local_size:
            raise ConfigError(
                f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}",
                why="ranks count from 0, so they are below the number of processes",
                fix="start with torchrun, or unset these variables",
            )
        return cls(rank, size, local_rank, local_size)

    def placed(self, config: Config) -> Ranks:
        """Return this process with the position that the options give it."""
        model = config.model
        placed = replace(self, sharing=model.tensor_model_parallel_size, stages=model.pipeline_model_parallel_size)
        divided = placed.of_stage > 1 and config.ddp.use_distributed_optimizer
        return replace(placed, divided=divided, resharded=divided and resharded(config))

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def of_stage(self) -> int:
        """Return the number of ranks in one stage."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.of_stage

    def has_layer(self, layer: int, layers: int, rounds: int) -> bool:
        """Return whether a layer of a model of `layers` layers is in one of the `rounds` stages of this rank."""
        return layer // (layers // (self.stages * rounds)) % self.stages == self.stage

    @property
    def data_rank(self) -> int:
        """Return the position among those ranks of a stage that train on different samples."""
        return self.rank % self.of_stage // self.sharing

    @property
    def data_size(self) -> int:
        return self.of_stage // self.sharing

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {platform.node()}"

    def join(self, device: torch.device, limit: timedelta) -> None:
        """Initialize the process group, in which each process waits at most `limit` for the others, now and later.

        Does nothing for one process, or if the caller has initialized it. Raises ConfigError if the launcher has not
        set an address.
        """
        if self.size == 1 or dist.is_initialized():
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{self.size} processes, and {' and '.join(missing)} not set",
                why="processes rendezvous there",
                fix="start with torchrun --nproc-per-node",
            )
        if device.type == "cuda":
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(_WATCHDOG_WAIT_MS))
        # Errors and names are exchanged through host memory on either device.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=limit))
        start = PrefixStore(f"hostward/{_start(os.environ)}", store)
        dist.init_process_group(backend, store=start, rank=self.rank, world_size=self.size, timeout=limit)

    def leave(self) -> None:
        """Leave when the run is over on every rank.

        Waits for all: when one ends with an exit code the launcher ends the rest.
        """
        if self.size > 1 and dist.is_initialized():
            self.gather(None)
            dist.destroy_process_group()

    def agreed(self, check: Callable[[], T]) -> T:
        """Return the result of `check`, or raise on every rank if it raises on one.

        All ranks raise the error of the first rank that failed, with that rank's name.
        """
        if self.size == 1:
            return check()
        found, error = attempted(check)
        of_all = self.gather((self.name, None if error is None else Failure.of(error)))
        if any(failure is not None for _, failure in of_all):
            raise raised_by_all(of_all) from error
        return cast("T", found)

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank, on every rank.

        Waits for all.
        """
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]

    def of_model(self, number: int) -> int:
        """Return the sum over stages of a number that each rank knows for its stage."""
        return number if self.stages == 1 else sum(self.gather(number)) // self.of_stage

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Average a tensor on the run's device over ranks, for reports.

        In a pipeline the average is over the ranks of the last stage, and 0 on the others. With NCCL the host does not
        wait.
        """
        if self.size > 1:
            dist.all_reduce(loss)
            loss /= self.of_stage
        return loss

    def torch_threads(self, facts: CpuFacts | None = None) -> int | None:
        """Return torch's number of CPU threads here, an equal share of the node's; None keeps torch's default."""
        if self.local_size == 1:
            return None
        facts = facts or read_cpu_facts()
        cpus = facts.affinity_cpus if facts.quota_cpus is None else min(facts.affinity_cpus, facts.quota_cpus)
        return max(1, int(cpus // self.local_size))


def _start(environ: Mapping[str, str]) -> str:
    """Identify this start of the run, so that a restarted rank does not read the previous start's address.

    torchrun keeps one store over all starts. Agents of several machines count their starts independently.
    """
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") if environ.get("GROUP_WORLD_SIZE") == "1" else "0"


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal() or int(text) < default:
        kind = "a positive number" if default else "a number"
        raise ConfigError(f"{name}={text!r} is not {kind}", fix="start with torchrun, or unset it")
    return int(text)


# Bind each rank's threads to the CPUs of its GPU's NUMA node. (The backend allocates its pinned memory there.)


log = logging.getLogger("hostward")


def bind_beside_gpu(ranks: Ranks, device: torch.device, root: Path = Path("/")) -> CpuFacts | None:
    """Bind this process, one of several on its machine, to CPUs of its GPU's NUMA node.

    Does nothing and returns None if it shares these CPUs with other processes.

    Returns:
        the machine's CPUs, as if every rank on it had as many of its own as this one.
    """
    if ranks.size == 1:
        return None
    allowed = frozenset(os.sched_getaffinity(0))
    reported = ranks.gather(RankCpus(platform.node(), _numa_node(device, root), allowed))
    cpus = cpus_for(ranks.rank, reported, root)
    if cpus is None:
        return None
    if cpus != allowed:
        try:
            bind(cpus)
        except OSError as error:
            log.warning(
                "threads could not be bound to the CPUs on the NUMA node of the GPU (%s): they run on any",
                error.strerror,
            )
            return None
        log.info("threads of this rank are bound to %d CPUs on the NUMA node of its GPU", len(cpus))
    return CpuFacts(len(cpus) * ranks.local_size, read_quota_cpus(root))


def _numa_node(device: torch.device, root: Path) -> int | None:
    if device.type != "cuda":
        return None
    from hostward.runtime.cuda.driver import pci_address
    from hostward.runtime.pinned_memory import numa_node_of

    return numa_node_of(pci_address(device.index), root)
