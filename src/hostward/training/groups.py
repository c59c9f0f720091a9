"""Parameter groups: their hyper-parameters checked, made plain for a state dict, and compared with saved ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from hostward.engine.backend import DTYPES, Backend
from hostward.errors import CheckpointError, ConfigError, ModelError
from hostward.inspect import Tracked
from hostward.planner import checked_fraction

from .mix import AUTO, ShareOf

_NOT_SUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")


def described(optimizer: Any) -> str:
    """What `print(optimizer)` says: sizes and settings of its groups, without names of parameters, and its plan."""
    lines = [f"{type(optimizer).__name__} ("]
    for number, group in enumerate(optimizer.param_groups):
        numel = sum(parameter.numel() for parameter in group["params"])
        settings = ", ".join(f"{key} {group[key]}" for key in sorted(group) if key not in ("params", "param_names"))
        lines.append(f"  group {number}: {len(group['params'])} tensors, {numel:,} parameters; {settings}")
    if optimizer.max_grad_norm:
        lines.append(f"  max_grad_norm {optimizer.max_grad_norm}")
    return "\n".join([*lines, ")", optimizer.plan.explain()])


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ConfigError for hyper-parameters of another kind, or outside their range."""
    missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
    if missing:
        raise ConfigError(f"a parameter group has no {missing[0]!r}", fix="change values of a group, not the group")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas must be two numbers in [0.0, 1.0), got {betas!r}")
    checks = (
        ("lr", group["lr"], math.inf),
        ("eps", group["eps"], math.inf),
        ("weight_decay", group["weight_decay"], math.inf),
        ("betas[0]", betas[0], 1.0),
        ("betas[1]", betas[1], 1.0),
    )
    for name, value, high in checks:
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not is_number(number) or not 0.0 <= number < high:
            raise ConfigError(f"{name} must be a number in [0.0, {high}), got {value!r}")
    for key in _NOT_SUPPORTED:
        if group.get(key):
            raise ConfigError(f"{key}=True is not supported", fix=f"leave {key} out")


def check_members(groups: Sequence[Mapping[str, Any]], tracked: Sequence[Tracked]) -> None:
    """Raises ModelError unless `param_groups` hold what was added to them: by hand nothing may be put in, taken out,
    moved or renamed, because state and hyper-parameters are found by group and by name.
    """
    if _hold(groups, tracked):
        return
    names = {id(t.parameter): t.name for t in tracked}
    held = [id(p) for group in groups for p in group.get("params", ())]
    gone = [name for key, name in names.items() if key not in held]
    twice = [names[key] for key in held if key in names and held.count(key) > 1]
    what = "the param_groups are not as they were made: their order, their parameters' order or param_names differ"
    if gone:
        what = f"parameter {gone[0]!r} is in no param_group any more"
    elif any(key not in names for key in held):
        what = "param_groups hold a new parameter"
    elif twice:
        what = f"parameter {twice[0]!r} is in param_groups twice"
    raise ModelError(
        what,
        why="state is placed when a parameter is added, and stays until the optimizer goes",
        fix="use add_param_group to add; to freeze a parameter, leave its gradient None; else make a new optimizer",
    )


def _hold(groups: Sequence[Mapping[str, Any]], tracked: Sequence[Tracked]) -> bool:
    """Whether the groups hold these, one behind the other. Asked at every step, so all of them are compared at once."""
    params = [list(group.get("params", ())) for group in groups]
    names = [name for group in groups for name in group.get("param_names", ())]
    return (
        all(params)
        and [i for i, held in enumerate(params) for _ in held] == [t.group for t in tracked]
        and names == [t.name for t in tracked]
        and all(map(is_, chain.from_iterable(params), [t.parameter for t in tracked]))
    )


def checked_norm(value: float | None) -> float:
    """`max_grad_norm` as a float, 0 for no clipping. Raises ConfigError."""
    if value is None:
        return 0.0
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"max_grad_norm must be a finite number >= 0, got {value!r}", fix="0 or None: no clipping")
    return float(value)


def checked_backend(value: object) -> Backend | None:
    """Raises ConfigError for what is none, as the name of a device."""
    if value is None or isinstance(value, Backend):
        return value
    raise ConfigError(
        f"backend={value!r} is no backend",
        why="operations run where the parameters lie",
        fix='leave it out, and move the model: model.to("cuda")',
    )


def checked_streamed(value: float | str | ShareOf, use_torch_optimizer: bool) -> float | str | ShareOf:
    """`streamed_fraction` as a float, "auto" or a function. Raises ConfigError."""
    if value == AUTO or callable(value):
        return 0.0 if use_torch_optimizer else value
    if isinstance(value, str):
        raise ConfigError(f'streamed_fraction must be a number in [0.0, 1.0] or "auto", got {value!r}')
    share = checked_fraction(value, "streamed_fraction")
    if share and use_torch_optimizer:
        raise ConfigError(
            f"streamed_fraction={share} with use_torch_optimizer",
            why="streamed buckets are stepped on the device, by hostward's kernel",
            fix="leave one of them out",
        )
    return share


def sums_on_host(value: object, *, overlap: bool, grad_dtype: object) -> bool:
    """Whether `gradients` asks for sums on the host. Raises ConfigError."""
    if value not in ("device", "host"):
        fix = '"host" adds those of several microbatches up there, "device" leaves them where they are made'
        raise ConfigError(f'gradients must be "device" or "host", got {value!r}', fix=fix)
    if value == "device":
        return False
    if not overlap:
        raise ConfigError(
            'gradients="host" with overlap=False or use_torch_optimizer=True',
            why="gradients that are added up on the host leave during backward",
            fix='leave overlap on, or use gradients="device"',
        )
    if grad_dtype not in (None, torch.float32):
        raise ConfigError(
            f'gradients="host" with grad_dtype={grad_dtype}',
            why="gradients are added up in float32 then, those that stay on the device as well",
            fix="leave grad_dtype out",
        )
    return True


def check_grad_dtype(dtype: object, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError for a dtype in which no step is defined, or one that `.grad` already differs from."""
    if dtype is None:
        return
    if dtype not in DTYPES:
        raise ConfigError(
            f"grad_dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}",
            fix="grad_dtype=torch.float32 for 16-bit models that accumulate, None else",
        )
    for name, parameter in parameters.items():
        if parameter.grad is not None and parameter.grad.dtype is not dtype:
            raise ConfigError(
                f"parameter {name!r} has a gradient of dtype {parameter.grad.dtype} already",
                why=f"grad_dtype={dtype} holds for gradients that do not exist yet",
                fix="clear the gradients (model.zero_grad()) before making the optimizer",
            )


def check_count(name: str, value: object) -> None:
    """Raises ConfigError unless the option is None or a positive whole number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}", fix="None: by this machine's means")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain(key: str, value: object) -> object:
    """A value of a group as a state dict may hold it. Raises ModelError."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, (bool, int, float, str, list)):
        return value
    raise ModelError(f"parameter group key {key!r} holds a {type(value).__name__}", fix="keep plain values in groups")


def saved_parts(
    state_dict: Mapping[str, Any], state_format: int
) -> tuple[Mapping[str, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(state, groups) of a saved state. Raises CheckpointError for anything that is not one."""
    if state_dict.get("format") != state_format:
        raise CheckpointError(
            "not an optimizer state of hostward",
            why=f"its format is {state_dict.get('format')!r}, expected {state_format}",
            fix="convert a torch.optim.AdamW state with hostward.convert.from_torch_adamw",
        )
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not _is_whole(state, groups):
        raise CheckpointError(
            "the optimizer state is incomplete",
            why="it needs 'state' by parameter name and 'param_groups' with their 'params'",
            fix="load what AdamW.state_dict() returned",
        )
    return state or {}, list(groups or ())


def _is_whole(state: object, groups: object) -> bool:
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return False
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups):
        return False
    return all(isinstance(name, str) for name in (*state, *(name for group in groups for name in group["params"])))


def checked_settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved group sets in `mine`. Raises CheckpointError for hyper-parameters that no step can be made with."""
    settings = {key: tuple(value) if key == "betas" else value for key, value in saved.items() if key != "params"}
    try:
        check_group({**mine, **settings})
    except ConfigError as error:
        raise CheckpointError("a parameter group of the saved state is unusable", why=error.what) from error
    return settings


def check_same_names(what: str, theirs: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> None:
    """Raises CheckpointError unless both have the same names in the same groups and order."""
    if [list(x) for x in theirs] == [list(x) for x in mine]:
        return
    missing = sorted({n for g in mine for n in g} - {n for g in theirs for n in g})[:5]
    extra = sorted({n for g in theirs for n in g} - {n for g in mine for n in g})[:5]
    raise CheckpointError(
        f"the {what}s of the saved state are not those of this optimizer",
        why=f"missing: {missing or 'none'}; not expected: {extra or 'none'}; order and grouping count as well",
        fix="make the optimizer over the same parameters, in the same groups",
    )
