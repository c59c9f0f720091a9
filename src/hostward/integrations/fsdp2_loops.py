"""Stand in for the optimizer builder of loops that shard with `fully_shard`, as torchtitan's.

    optimizers = build_optimizers(model_parts, lr=3e-4, max_grad_norm=1.0, offload_fraction=1.0)

The result is used as torchtitan's `OptimizersContainer` is: it steps, is saved by `torch.distributed.checkpoint` under
the same keys, and yields its optimizers to the builder of learning rate schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hostward.errors import CheckpointError, ConfigError, ModelError
from hostward.model.parameter_names import plain_name
from hostward.optim.adamw import Accumulation, AdamW
from hostward.optim.state_dict import STATE_FORMAT


def build_optimizers(
    model_parts: Sequence[torch.nn.Module],
    *,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Optimizers:
    """Return one `hostward.AdamW` over all parts of a model on this rank, in a container.

    Call it after `fully_shard`. The norm that gradients are clipped by is that of all parts; pipelines give the
    processes of the other stages as `stages`.

    Args:
        model_parts: the modules that this rank trains; several in an interleaved pipeline. Their parameters keep their
            names.
        groups: options of parameter groups (lr, betas, eps, weight_decay), by a regular expression that is searched for
            in the parameters' names. The first that is found counts; other parameters have the options below.
        options: of `hostward.AdamW`.

    Raises:
        ConfigError: no list of parts; a group that is no regular expression, or that no parameter's name matches.
            ModelError: one name in two parts; what `hostward.AdamW` raises.
    """
    given: object = model_parts
    if isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ModuleList):
        raise ConfigError("build_optimizers() of a model", fix="pass the list of its parts on this rank: [model]")
    parts = list(model_parts)
    if not parts:
        raise ConfigError("build_optimizers() without a part of a model", fix="pass a list of modules, such as [model]")
    named = _named(parts)
    made, claimed = [], set()
    for pattern, settings in (groups or {}).items():
        mine = [name for name in named if name not in claimed and _compiled(pattern).search(name)]
        if not mine:
            raise ConfigError(
                f"no parameter is left for the group {pattern!r}",
                why="it matches no name, or an expression before it matches the same names",
                fix=f"names are like {next(iter(named))!r}; put special expressions before general ones",
            )
        claimed |= set(mine)
        made.append({"params": [(name, named[name]) for name in mine], **settings})
    others = [(name, p) for name, p in named.items() if name not in claimed]
    made += [{"params": others}] if others else []
    # A module over all parts, which is never called: so the layers of each part wait for their own weights.
    whole = parts[0] if len(parts) == 1 else torch.nn.ModuleList(parts)
    return Optimizers(AdamW(made, module=whole, **options))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"the group {pattern!r} is no regular expression", why=str(error), fix="re.escape() takes a name literally"
        ) from error


def _named(parts: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    named: dict[str, torch.nn.Parameter] = {}
    for part in parts:
        for given, parameter in part.named_parameters():
            name = plain_name(given)
            if not parameter.requires_grad:
                continue
            if named.setdefault(name, parameter) is not parameter:
                raise ModelError(
                    f"two parts of the model have a parameter {name!r}",
                    why="state is stored and saved by parameter name",
                    fix="keep the names of the whole model in its parts, as cutting a deep copy of it does",
                )
    return named


class Optimizers:
    """Holds the optimizer of a rank where a loop expects several; a `Stateful` of `torch.distributed.checkpoint`.

    `optimizer` is the `hostward.AdamW`.
    """

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[AdamW]:
        return iter([self.optimizer])

    def __len__(self) -> int:
        return 1

    def accumulate(self, *, last: bool) -> Accumulation:
        """Return a context for forward and backward of one microbatch, as `hostward.AdamW.accumulate`."""
        return self.optimizer.accumulate(last=last)

    @property
    def grad_norm(self) -> float:
        """Return the norm of the last step's gradients before clipping, in place of what `clip_grad_norm_` returned."""
        return self.optimizer.grad_norm

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self.optimizer.register_step_pre_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `torch.distributed.checkpoint`, one entry for each tensor and each option of a group.

        Returns:
            {"state.NAME.step": int64 [], "state.NAME.exp_avg" and ".exp_avg_sq": float32 [shape], DTensors on the CPU
            where the parameter is sharded, ".master" for 16-bit weights; "param_groups.NAME.lr": a number, and so on
            for each option of the parameter's group}.

        Raises what `hostward.AdamW.state_dict` raises.
        """
        saved = self.optimizer.state_dict()
        flat = {f"state.{name}.{role}": v for name, entry in saved["state"].items() for role, v in entry.items()}
        for group in saved["param_groups"]:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            flat |= {f"param_groups.{name}.{key}": v for name in group["params"] for key, v in settings.items()}
        return flat

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, at any fraction, or what torchtitan saved of torch's AdamW.

        Raises:
            CheckpointError: parameters of one group were saved with different options; what
                `hostward.AdamW.load_state_dict` raises.
        """
        found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
        for key, value in state_dict.items():
            kind, _, path = key.partition(".")
            name, _, last = path.rpartition(".")
            found.setdefault(kind, {}).setdefault(name, {})[last] = value
        groups = [_group(group["param_names"], found["param_groups"]) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({"format": STATE_FORMAT, "state": found["state"], "param_groups": groups})


def _group(names: Sequence[str], saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a group as `hostward.AdamW` loads it. Raises CheckpointError for options that differ within it."""
    settings = saved.get(names[0], {}) if names else {}
    for name in names:
        if saved.get(name, {}) != settings:
            raise CheckpointError(
                f"the saved options of {name!r} are not those of {names[0]!r}, which is in the same group now",
                why=f"{saved.get(name, {})} and {settings}",
                fix="build the optimizer with the groups with which the checkpoint was made",
            )
    return {**settings, "params": list(names)}
