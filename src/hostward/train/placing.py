"""From options to the optimizer: which share of its state is stepped where, and what that leaves on the device."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch

from hostward.config import Config
from hostward.errors import ConfigError
from hostward.host.threads import CpuFacts, default_threads
from hostward.inventory import Inventory
from hostward.lowering.optimizer import GRADIENTS_IN_FLIGHT
from hostward.lowering.staging import FEWEST, slot_bytes, streamed_bytes
from hostward.plan import Placement, Plan
from hostward.planner import summed_on_host
from hostward.planning.plan_file import PlanFile
from hostward.rule_table import captured, serial
from hostward.sizes import MIB
from hostward.training.mix import ShareOf
from hostward.training.optimizer import AdamW
from hostward.training.workload_of import inventory_of

from . import resume
from .parts import Held
from .planning import require_planned
from .shares import shares


def share_of(config: Config, data_ranks: int) -> Config:
    """The options as one of so many ranks sees them, each of which trains on its share of the global batch. One rank
    alone reduces nothing; those that share matrices and samples reduce gradients of experts.
    """
    found = copy.deepcopy(config)
    found.train.global_batch_size //= data_ranks
    found.ddp.grad_reduce_in_fp32 &= data_ranks * config.model.tensor_model_parallel_size > 1
    return found


def accumulates(config: Config) -> bool:
    """Whether several microbatches add to the gradients of one step."""
    return config.train.global_batch_size > config.train.micro_batch_size


def gradients_leave(config: Config) -> bool:
    """Whether gradients of the host share leave the device while backward makes others."""
    return not _all_stay(config) and (not accumulates(config) or sums_on_host(config))


def _all_stay(config: Config) -> bool:
    """Whether no gradient leaves before the step: the serial schedule takes them in it, a CUDA graph writes them."""
    return serial(config) or captured(config)


def sums_on_host(config: Config) -> bool:
    """Whether gradients of the host share are added up on the host, and the others in float32."""
    return config.optimizer.optimizer_cpu_offload and config.optimizer.gradients == "host"


def accumulates_in_fp32(config: Config) -> bool:
    """Whether gradients that stay on the device do so in float32."""
    return accumulates(config) or sums_on_host(config) or config.ddp.grad_reduce_in_fp32


def with_plan(config: Config, plan: PlanFile) -> Config:
    """The options of a run with a plan: what they say of placements is what the plan says.

    Raises ConfigError where options place something themselves, NotBuiltError for what no plan carries out.
    """
    own = {
        "optimizer.optimizer_cpu_offload": config.optimizer.optimizer_cpu_offload,
        "optimizer.offload_optimizer_states": config.optimizer.offload_optimizer_states,
        "model.cpu_offloading": config.model.cpu_offloading,
        "model.recompute_granularity": config.model.recompute_granularity is not None,
    }
    require_planned(config, "--plan")
    for option, used in own.items():
        if used:
            raise ConfigError(
                f"--plan and {option}",
                why="the plan says where everything goes",
                fix=f"leave {option} out, or make the plan with it: hostward plan {option}=... --json FILE",
            )
    found = copy.deepcopy(config)
    found.optimizer.optimizer_cpu_offload = plan.asked_fraction > 0
    found.optimizer.optimizer_offload_fraction = plan.asked_fraction
    found.optimizer.offload_mix = plan.streamed_fraction or None
    found.optimizer.gradients = "host" if plan.gradients_on_host else None
    found.optimizer.pin_cpu_grads, found.optimizer.pin_cpu_params = plan.pin_gradients, plan.pin_weights
    return found


def make_optimizer(
    held: Held,
    config: Config,
    plan: PlanFile | None = None,
    cpus: CpuFacts | None = None,
    mix_of: ShareOf | None = None,
) -> AdamW:
    """The optimizer that the options describe; `plan` says where its state goes instead.

    Args:
        cpus: of the machine, for the threads of the host step where options give no number. None: as the system says.
        mix_of: tells what an "auto" mix streams; None: rates alone do.
    """
    options, asked = config.optimizer, shares(config)
    streamed: float | str | ShareOf = asked.streamed_fraction if plan is None else 0.0
    if isinstance(streamed, str) and mix_of is not None:
        streamed = mix_of
    return AdamW(
        held.model,
        lr=options.lr,
        **resume.group_settings(config),
        max_grad_norm=options.clip_grad,
        offload_fraction=asked.offload_fraction if plan is None else 0.0,
        plan=plan,
        streamed_fraction=streamed,
        overlap=options.overlap_cpu_optimizer_d2h_h2d,
        pin_gradients=options.pin_cpu_grads,
        pin_weights=options.pin_cpu_params,
        use_torch_optimizer=options.use_torch_optimizer_for_cpu_offload,
        gradients=options.gradients,
        grad_dtype=torch.float32 if accumulates_in_fp32(config) and config.model.params_dtype != "fp32" else None,
        staging_bytes=staging_bytes(config, lambda: inventory_of(held.model)),
        host_threads=options.host_threads or (None if cpus is None else default_threads(os.environ, cpus)),
        stages=held.stages,
        tied=held.tied,
    )


def staging_bytes(config: Config, inventory: Callable[[], Inventory]) -> int | None:
    """Most device bytes of staging slots; None: what backward frees, and two slots. A CUDA graph frees nothing."""
    asked = config.optimizer.optimizer_state_offload_chunk_size_mb * MIB
    if asked or not captured(config):
        return asked or None
    parts = [streamed_bytes(bucket.kind, bucket.offsets[-1]) for bucket in inventory().buckets]
    return FEWEST * slot_bytes(parts)


def gradient_bytes(config: Config, inventory: Inventory, plan: Plan) -> int:
    """Most bytes that gradients take on the device at once, if every parameter has one.

    With several microbatches that is all of them, before the last, unless the host adds them up. Those that leave in
    every backward, or in the only one: at any time there are those of the other buckets, and of a run of buckets that
    are filled or on their way out.
    """
    leaving, names = _leaving(config, inventory, plan), _names(inventory)
    stay = _names_besides(leaving, names)
    in_fp32 = accumulates_in_fp32(config)
    sizes = {
        p.name: p.numel * (4 if in_fp32 and (p.name in stay or not sums_on_host(config)) else p.dtype.itemsize_bytes)
        for p in inventory.parameters
    }
    if not gradients_leave(config):
        return sum(sizes.values())
    on_host = [names[b] for b in leaving]
    runs = [set().union(*on_host[i : i + GRADIENTS_IN_FLIGHT + 1]) - stay for i in range(len(on_host))]
    in_flight = max((sum(sizes[name] for name in run) for run in runs), default=0)
    return sum(sizes[name] for name in stay) + in_flight


def staying_gradients(config: Config, inventory: Inventory, plan: Plan) -> frozenset[str]:
    """Names of parameters whose gradients are on the device until the step; others leave in the last backward."""
    leaving = [] if _all_stay(config) else _leaving(config, inventory, plan)
    return frozenset(_names_besides(leaving, _names(inventory)))


def _leaving(config: Config, inventory: Inventory, plan: Plan) -> list[int]:
    """Buckets whose gradients go to the host."""
    placements = [b.placement for b in plan.buckets]
    if sums_on_host(config):
        return sorted(summed_on_host(inventory.buckets, placements))
    return [b for b, placement in enumerate(placements) if placement is Placement.HOST]


def _names(inventory: Inventory) -> list[set[str]]:
    """By bucket, the parameters that it holds ranges of."""
    return [{r.name for r in bucket.ranges} for bucket in inventory.buckets]


def _names_besides(leaving: list[int], names: list[set[str]]) -> set[str]:
    return {name for b, held in enumerate(names) if b not in leaving for name in held}
