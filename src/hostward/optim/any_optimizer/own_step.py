"""This module finds an optimizer's own step below the wrappers of torch and of schedulers, and limits what it steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hostward.errors import ModelError


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the class's step without the step hooks that torch wraps around it; it takes the optimizer first."""
    function: Callable[..., Any] = kind.step
    return inspect.unwrap(function, stop=lambda f: "hooked" not in vars(f)) if "hooked" in vars(function) else function


def watched_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Return what a scheduler has put in place of `optimizer.step`, to see that it is called."""
    step = vars(optimizer).get("step")
    return step if getattr(step, "_wrapped_by_lr_sched", False) else None


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise ModelError where the step was replaced by a wrapper other than a scheduler's, which would be bypassed."""
    step = vars(optimizer).get("step")
    own = step is None or getattr(step, "__func__", None) is type(optimizer).step
    if not own and watched_step(optimizer) is None:
        raise ModelError(
            f"the step of this {type(optimizer).__name__} has been replaced by {getattr(step, '__qualname__', step)!s}",
            why="hostward calls the class's own step for some parameters at a time, and would pass that one over",
            fix="combine or offload the optimizer itself, then let others wrap the step of what results",
        )


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks of this optimizer that torch calls before and after a step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


@contextmanager
def narrowed(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Limit the optimizer to these parameters inside the block; groups keep their place."""
    members, everything = set(parameters), [(group, group["params"]) for group in optimizer.param_groups]
    for group, params in everything:
        group["params"] = [p for p in params if p in members]
    try:
        yield
    finally:
        for group, params in everything:
            group["params"] = params
