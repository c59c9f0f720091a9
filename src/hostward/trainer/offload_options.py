"""Turn options into the optimizer: which share of its state is stepped where, and what stays on the device."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hostward.attachment import Activations, Attachment, attach, recompute_whole
from hostward.config.rules.table import captured, serial
from hostward.config.schema import Config
from hostward.core.inventory import Inventory
from hostward.core.placement import Placement, Plan, summed_on_host
from hostward.core.units import MIB
from hostward.errors import ConfigError
from hostward.kernels.cpu.affinity import CpuFacts, default_threads
from hostward.optim.adamw import AdamW
from hostward.optim.placement import ShareOf
from hostward.optim.state_dict import state_dtypes
from hostward.plan.plan_file import PlanFile, layers_of
from hostward.profiler.workload import inventory_of
from hostward.schedule.optimizer import GRADIENTS_IN_FLIGHT
from hostward.schedule.staging import MIN_STAGING_BUFFERS, staging_buffer_bytes, streamed_bytes
from hostward.trainer.models import layers_of as of_model
from hostward.trainer.parallel import Held
from hostward.trainer.plan_request import require_early, require_planned, shares, state_format


def share_of(config: Config, data_ranks: int) -> Config:
    """Return the options as one of `data_ranks` ranks sees them, each training on its share of the global batch.

    One rank alone reduces nothing; ranks that share matrices and samples reduce gradients of experts.
    """
    found = copy.deepcopy(config)
    found.train.global_batch_size //= data_ranks
    found.ddp.grad_reduce_in_fp32 &= data_ranks * config.model.tensor_model_parallel_size > 1
    return found


def accumulates(config: Config) -> bool:
    """Return whether several microbatches accumulate into the gradients of one step."""
    return config.train.global_batch_size > config.train.micro_batch_size


def gradients_offloaded_in_backward(config: Config) -> bool:
    """Return whether gradients of the host share are offloaded while backward is running."""
    return not _all_stay(config) and (not accumulates(config) or sums_on_host(config))


def _all_stay(config: Config) -> bool:
    """Return whether all gradients stay until the step.

    The serial schedule offloads them in the step, and a CUDA graph writes them to fixed addresses.
    """
    return serial(config) or captured(config)


def sums_on_host(config: Config) -> bool:
    """Return whether gradients of the host share are accumulated on the host, and the others in float32."""
    return config.optimizer.optimizer_cpu_offload and config.optimizer.gradients == "host"


def accumulates_in_fp32(config: Config) -> bool:
    """Return whether gradients that stay on the device are accumulated in float32."""
    return accumulates(config) or sums_on_host(config) or config.ddp.grad_reduce_in_fp32


def with_plan(config: Config, plan: PlanFile) -> Config:
    """Return the options of a run with a plan: the plan's placements replace those of the options.

    Raises ConfigError if options set placements themselves, NotBuiltError for options that no plan supports.
    """
    own = {
        "optimizer.optimizer_cpu_offload": config.optimizer.optimizer_cpu_offload,
        "optimizer.offload_optimizer_states": config.optimizer.offload_optimizer_states,
        "model.cpu_offloading": config.model.cpu_offloading,
        "model.recompute_granularity": config.model.recompute_granularity is not None,
    }
    require_planned(config, "--plan")
    require_early(config, plan.step_early)
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
    found.optimizer.step_early = plan.step_early if plan.asked_fraction else 0.0
    found.optimizer.pin_cpu_grads, found.optimizer.pin_cpu_params = plan.pin_gradients, plan.pin_weights
    return found


def group_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the parameter group that no schedule changes."""
    o = config.optimizer
    return {"betas": (o.adam_beta1, o.adam_beta2), "eps": o.adam_eps, "weight_decay": o.weight_decay}


def make_optimizer(
    held: Held,
    config: Config,
    plan: PlanFile | None = None,
    cpus: CpuFacts | None = None,
    mix_of: ShareOf | None = None,
) -> AdamW:
    """Build the optimizer that the options describe; `plan` gives the placement of its state instead.

    Args:
        cpus: the machine's CPUs, for the number of CPU optimizer threads if options give none. None: ask the system.
        mix_of: returns the share that an "auto" mix streams; None: measured rates alone decide.
    """
    options, asked = config.optimizer, shares(config)
    streamed: float | str | ShareOf = asked.streamed_fraction if plan is None else 0.0
    if isinstance(streamed, str) and mix_of is not None:
        streamed = mix_of
    return AdamW(
        held.model,
        lr=options.lr,
        **group_settings(config),
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
        state_dtypes=state_dtypes(state_format(config)),
        step_early=options.step_early,
        staging_bytes=staging_bytes(config, lambda: inventory_of(held.model, state_format(config))),
        host_threads=options.host_threads or (None if cpus is None else default_threads(os.environ, cpus)),
        stages=held.stages,
        tied=held.tied,
    )


def staging_bytes(config: Config, inventory: Callable[[], Inventory]) -> int | None:
    """Return the most device bytes of GPU staging buffers; None: the bytes that backward frees, and two buffers.

    A CUDA graph frees nothing.
    """
    asked = config.optimizer.optimizer_state_offload_chunk_size_mb * MIB
    if asked or not captured(config):
        return asked or None
    parts = [streamed_bytes(bucket) for bucket in inventory().buckets]
    return MIN_STAGING_BUFFERS * staging_buffer_bytes(parts)


def gradient_bytes(config: Config, inventory: Inventory, plan: Plan) -> int:
    """Return the most bytes that gradients take on the device at once, if every parameter has one.

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
    if not gradients_offloaded_in_backward(config):
        return sum(sizes.values())
    on_host = [names[b] for b in leaving]
    runs = [set().union(*on_host[i : i + GRADIENTS_IN_FLIGHT + 1]) - stay for i in range(len(on_host))]
    in_flight = max((sum(sizes[name] for name in run) for run in runs), default=0)
    return sum(sizes[name] for name in stay) + in_flight


def staying_gradients(config: Config, inventory: Inventory, plan: Plan) -> frozenset[str]:
    """Return the parameters whose gradients stay on the device until the step; others are offloaded in the last
    backward.
    """
    leaving = [] if _all_stay(config) else _leaving(config, inventory, plan)
    return frozenset(_names_besides(leaving, _names(inventory)))


def _leaving(config: Config, inventory: Inventory, plan: Plan) -> list[int]:
    """Return the buckets whose gradients are offloaded."""
    placements = [b.placement for b in plan.buckets]
    if sums_on_host(config):
        return sorted(summed_on_host(inventory.buckets, placements))
    return [b for b, placement in enumerate(placements) if placement is Placement.HOST]


def _names(inventory: Inventory) -> list[set[str]]:
    """Return for each bucket the parameters that it holds ranges of."""
    return [{r.name for r in bucket.ranges} for bucket in inventory.buckets]


def _names_besides(leaving: list[int], names: list[set[str]]) -> set[str]:
    return {name for b, held in enumerate(names) if b not in leaving for name in held}


# From options to offloading and recomputation of activations, and offloading of weights.


def recompute_layers(model: torch.nn.Module, config: Config, plan: PlanFile | None = None) -> int:
    """Enable the model's own activation checkpointing in the layers to recompute, and return their number.

    These are all layers (uniform), the first `recompute_num_layers` on this stage (block), or those of a plan. Raises
    ConfigError for layers that have no checkpointing.
    """
    options = config.model
    if plan is None and options.recompute_granularity != "full":
        return 0
    layers = [layer for _, layer in of_model(model)]
    if plan is not None:
        chosen = layers_of(plan).whole
    elif options.recompute_method == "uniform":
        chosen = frozenset(range(len(layers)))
    else:
        chosen = frozenset(range(min(options.recompute_num_layers or 0, len(layers))))
    recompute_whole(model, layers, chosen, draws=not captured(config))
    return len(chosen)


def attach_activations(
    model: torch.nn.Module,
    optimizer: AdamW,
    config: Config,
    plan: PlanFile | None = None,
    stages: Sequence[torch.nn.Module] = (),
) -> Attachment | None:
    """Attach the offloading and recomputation that options or plan ask for; return None if they ask for none.

    Args:
        stages: the pipeline stages that `model` consists of.
    """
    if plan is not None:
        layers = layers_of(plan)
        # Memory was checked before the weights were allocated.
        wanted = layers.activations or layers.weights or layers.parts
        return attach(model, optimizer, plan=plan, force=True) if wanted else None
    how, modules, weights = _offloaded(config), None, None
    if config.model.recompute_granularity == "selective":
        modules = tuple(config.model.recompute_modules)
    if config.model.cpu_offloading and config.model.cpu_offloading_weights:
        weights = config.model.cpu_offloading_num_layers or None
    if how is None and modules is None and weights is None:
        return None
    inner = [layer for _, layer in of_model(model)]
    attached = attach(model, optimizer, activations=how, weights=weights, recompute=modules, layers=inner)
    if stages:
        attached.in_runs([len(of_model(stage)) for stage in stages])
    return attached


def _offloaded(config: Config) -> Activations | None:
    options = config.model
    if options.fine_grained_activation_offloading:
        # Megatron counts elements, and offloads in all layers but those whose backward follows immediately.
        return Activations(
            modules=options.offload_modules,
            min_bytes=0,
            min_elements=options.min_offloaded_tensor_size,
            fraction=options.activation_offload_fraction,
            max_in_flight=options.fine_grained_offloading_max_inflight_offloads,
            retain_pinned_buffers=captured(config),  # replays copy to fixed addresses
        )
    count = options.cpu_offloading_num_layers
    if not (options.cpu_offloading and count and options.cpu_offloading_activations):
        return None
    return Activations(
        num_layers=count,
        double_buffering=options.cpu_offloading_double_buffering,
        retain_pinned_buffers=options.cpu_offloading_retain_pinned_cpu_buffers,
    )
