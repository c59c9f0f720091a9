"""Compute the learning rate as a pure function of the iteration."""

from __future__ import annotations

import math

from hostward.config.schema import OptimizerConfig, SchedulerConfig
from hostward.errors import ConfigError


def learning_rate(iteration: int, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> float:
    """Return the learning rate of the step that follows `iteration` finished steps (0 for the first step).

    Linear from `lr_warmup_init` to `lr` over `lr_warmup_iters`, then by `lr_decay_style` to `min_lr` at
    `lr_decay_iters`, then `min_lr`. As in Megatron, the first warm-up step runs at `lr_warmup_init` and the step at
    `lr_warmup_iters` at `lr`.

    Raises:
        ConfigError: the style is unknown, or it decays and `lr_decay_iters` is not set.
    """
    warmup = scheduler.lr_warmup_iters
    if warmup > 0 and iteration <= warmup:
        return scheduler.lr_warmup_init + (optimizer.lr - scheduler.lr_warmup_init) * iteration / warmup
    if scheduler.lr_decay_style == "constant":
        return optimizer.lr
    decay = scheduler.lr_decay_iters
    if decay is None:
        raise ConfigError(
            f"scheduler.lr_decay_style={scheduler.lr_decay_style} needs scheduler.lr_decay_iters",
            fix="set scheduler.lr_decay_iters, or scheduler.lr_decay_style=constant",
        )
    if iteration > decay or decay <= warmup:
        return optimizer.min_lr
    ratio = (iteration - warmup) / (decay - warmup)
    if scheduler.lr_decay_style == "linear":
        share = 1.0 - ratio
    elif scheduler.lr_decay_style == "cosine":
        share = 0.5 * (math.cos(math.pi * ratio) + 1.0)
    else:
        raise ConfigError(
            f"scheduler.lr_decay_style={scheduler.lr_decay_style!r} is unknown",
            fix="use cosine, linear or constant",
        )
    return optimizer.min_lr + share * (optimizer.lr - optimizer.min_lr)
