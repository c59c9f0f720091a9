"""From options to the optimizer: which share of its state is stepped where, and what that leaves on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hostward.config import Config
from hostward.inventory import Inventory
from hostward.lowering.optimizer import GRADIENTS_IN_FLIGHT
from hostward.plan import Placement, Plan
from hostward.training.optimizer import AdamW

from . import resume

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Shares:
    """What `hostward.AdamW` is asked for: the share of state off the device, and how much of that is streamed."""

    offload_fraction: float
    streamed_fraction: float | str

    @property
    def host_share(self) -> tuple[float, float]:
        """Share of all state that is stepped on the host: at least and at most, since measured rates may decide."""
        if isinstance(self.streamed_fraction, str):
            return 0.0, self.offload_fraction
        share = self.offload_fraction * (1 - self.streamed_fraction)
        return share, share


def shares(config: Config) -> Shares:
    """The host steps optimizer_offload_fraction of all state; of the rest, optimizer_state_offload_fraction is
    streamed. `offload_mix` streams a part of the first instead.
    """
    options = config.optimizer
    on_host = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    if options.offload_mix is not None:
        return Shares(
            on_host, options.offload_mix if isinstance(options.offload_mix, str) else float(options.offload_mix)
        )
    streamed = (1 - on_host) * options.optimizer_state_offload_fraction if options.offload_optimizer_states else 0.0
    total = min(1.0, on_host + streamed)
    return Shares(total, min(1.0, streamed / total) if total else 0.0)


def accumulates(config: Config) -> bool:
    """Whether several microbatches add to the gradients of one step."""
    return config.train.global_batch_size > config.train.micro_batch_size


def gradients_leave(config: Config) -> bool:
    """Whether gradients of the host share leave the device while backward makes others."""
    options = config.optimizer
    hidden = options.overlap_cpu_optimizer_d2h_h2d and not options.use_torch_optimizer_for_cpu_offload
    return hidden and not accumulates(config)


def make_optimizer(model: torch.nn.Module, config: Config) -> AdamW:
    """The optimizer that the options describe."""
    options, asked = config.optimizer, shares(config)
    return AdamW(
        model,
        lr=options.lr,
        **resume.group_settings(config),
        max_grad_norm=options.clip_grad,
        offload_fraction=asked.offload_fraction,
        streamed_fraction=asked.streamed_fraction,
        overlap=options.overlap_cpu_optimizer_d2h_h2d,
        pin_gradients=options.pin_cpu_grads,
        pin_weights=options.pin_cpu_params,
        use_torch_optimizer=options.use_torch_optimizer_for_cpu_offload,
        grad_dtype=torch.float32 if accumulates(config) and config.model.params_dtype != "fp32" else None,
        staging_bytes=options.optimizer_state_offload_chunk_size_mb * _MIB or None,
        host_threads=options.host_threads,
    )


def gradient_bytes(config: Config, inventory: Inventory, plan: Plan) -> int:
    """Most bytes that gradients take on the device at once, if every parameter has one.

    With several microbatches that is all of them, before the last. With one, those of the host share leave: at any
    time there are those of the other buckets, and of a run of host buckets that are filled or on their way out.
    """
    accumulated = accumulates(config)
    sizes = {p.name: p.numel * (4 if accumulated else p.dtype.itemsize_bytes) for p in inventory.parameters}
    if not gradients_leave(config):
        return sum(sizes.values())
    pairs = list(zip(plan.buckets, inventory.buckets, strict=True))
    stay = {r.name for placed, bucket in pairs if placed.placement is not Placement.HOST for r in bucket.ranges}
    on_host = [{r.name for r in bucket.ranges} for placed, bucket in pairs if placed.placement is Placement.HOST]
    runs = [set().union(*on_host[i : i + GRADIENTS_IN_FLIGHT + 1]) - stay for i in range(len(on_host))]
    in_flight = max((sum(sizes[name] for name in run) for run in runs), default=0)
    return sum(sizes[name] for name in stay) + in_flight
