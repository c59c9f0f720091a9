"""The processes of a run, as torchrun starts them: who they are, what they agree on, what they tell each other.

Callers never ask whether there are several: with one process every verb here is that process's own.
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
"""Torch's watchdog of NCCL, once it has found a rank missing, waits four times so long before it ends this process, so
that all ranks can write down what they were at; of its own default, 15 s, that is a minute.
"""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among those of a run.

    Args:
        rank, size: of all; local_rank, local_size: of those on this node.
        sharing: neighbours, among whom one microbatch is divided: they train on the same samples.
        stages: parts of a pipeline, each of `size // stages` neighbours, which have layers that the others have not.
        divided: weights, gradients and state are divided over all of a stage; else each of these has all of them.
        resharded: divided weights of a layer are whole only while it runs; else from its forward to its backward.
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
        """As torchrun's variables say. Raises ConfigError for what is no number, or no rank."""
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
        """This process, with the place that the options give it."""
        model = config.model
        placed = replace(self, sharing=model.tensor_model_parallel_size, stages=model.pipeline_model_parallel_size)
        divided = placed.of_stage > 1 and config.ddp.use_distributed_optimizer
        return replace(placed, divided=divided, resharded=divided and resharded(config))

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def of_stage(self) -> int:
        """Ranks of one stage."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.of_stage

    def has_layer(self, layer: int, layers: int, rounds: int) -> bool:
        """Whether a layer of a model of so many is in one of the `rounds` stages that this rank has."""
        return layer // (layers // (self.stages * rounds)) % self.stages == self.stage

    @property
    def data_rank(self) -> int:
        """Of those of a stage that train on samples of their own."""
        return self.rank % self.of_stage // self.sharing

    @property
    def data_size(self) -> int:
        return self.of_stage // self.sharing

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {platform.node()}"

    def join(self, device: torch.device, limit: timedelta) -> None:
        """Meet the other processes, for which each waits `limit` at most, now and later. Nothing to do for one, or
        where the caller has made them meet.

        Raises ConfigError where the launcher has not said where.
        """
        if self.size == 1 or dist.is_initialized():
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{self.size} processes, and {' and '.join(missing)} not set",
                why="processes meet there",
                fix="start with torchrun --nproc-per-node",
            )
        if device.type == "cuda":
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(_WATCHDOG_WAIT_MS))
        # Errors and names go by way of the host on either device.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=limit))
        start = PrefixStore(f"hostward/{_start(os.environ)}", store)
        dist.init_process_group(backend, store=start, rank=self.rank, world_size=self.size, timeout=limit)

    def leave(self) -> None:
        """The run is over on every rank. Waits for all: when one ends with an exit code the launcher ends the rest."""
        if self.size > 1 and dist.is_initialized():
            self.gather(None)
            dist.destroy_process_group()

    def agreed(self, check: Callable[[], T]) -> T:
        """What `check` returns here, if it raises on no rank; else every rank raises the error of the first that did,
        which is named.
        """
        if self.size == 1:
            return check()
        found, error = attempted(check)
        of_all = self.gather((self.name, None if error is None else Failure.of(error)))
        if any(failure is not None for _, failure in of_all):
            raise raised_by_all(of_all) from error
        return cast("T", found)

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on every rank. Waits for all."""
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]

    def of_model(self, number: int) -> int:
        """The sum over stages of what each rank knows of its stage."""
        return number if self.stages == 1 else sum(self.gather(number)) // self.of_stage

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a tensor on the run's device, for reports; of a pipeline over those of the last stage,
        and it is 0 on the others. With NCCL nothing waits on the host.
        """
        if self.size > 1:
            dist.all_reduce(loss)
            loss /= self.of_stage
        return loss

    def torch_threads(self, facts: CpuFacts | None = None) -> int | None:
        """CPU threads of torch in this process: those of this node in equal shares; None: torch's own default."""
        if self.local_size == 1:
            return None
        facts = facts or read_cpu_facts()
        cpus = facts.affinity_cpus if facts.quota_cpus is None else min(facts.affinity_cpus, facts.quota_cpus)
        return max(1, int(cpus // self.local_size))


def _start(environ: Mapping[str, str]) -> str:
    """Which start of the run this is, for torchrun keeps one store over all of them: a rank that is early would find
    there where others listened before. Agents of several machines count their starts each for itself.
    """
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") if environ.get("GROUP_WORLD_SIZE") == "1" else "0"


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal() or int(text) < default:
        kind = "a positive number" if default else "a number"
        raise ConfigError(f"{name}={text!r} is not {kind}", fix="start with torchrun, or unset it")
    return int(text)


# Each rank's threads on the CPUs beside its GPU. (Its page-locked memory is taken there by the backend.)


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
    from hostward.runtime.cuda.driver import pci_address
    from hostward.runtime.pinned_memory import numa_node_of

    return numa_node_of(pci_address(device.index), root)
