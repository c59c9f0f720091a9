"""This module checks parameter groups, makes them plain for a state dict, and compares them with saved ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch

from hostward.config.schema import alike
from hostward.core.inventory import FP8_BLOCK, MAIN_PARAM, MOMENTS, Dtype, StateFormat
from hostward.core.placement import checked_fraction
from hostward.distributed.flat_shards import FlatShards
from hostward.errors import ConfigError, ModelError, UnknownNameError
from hostward.model.parameters import ParamRecord
from hostward.optim.placement import AUTO, ShareOf
from hostward.runtime.backend import DTYPES, STATE_DTYPES, Backend

log = logging.getLogger("hostward")

NAMES = ("params", "param_names")
"""Keys of a group that say whose it is."""
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
_STATE_OF_TORCH = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_NOT_SUPPORTED: Mapping[str, str] = {
    "amsgrad": "no maximum of the second moment is kept",
    "maximize": "the step minimises",
    "foreach": "each bucket is one kernel already, on the device and on the host",
    "fused": "each bucket is one kernel already, on the device and on the host",
    "capturable": "a step waits for the step before, which no CUDA graph can hold",
    "differentiable": "the step is made outside of autograd",
}
"""AdamW options of torch.optim that are accepted at their defaults only, and why other values are not supported."""


def described(optimizer: Any) -> str:
    """Return the text of `print(optimizer)`: sizes and settings of its groups, without parameter names, and plan."""
    lines = [f"{type(optimizer).__name__} ("]
    for number, group in enumerate(optimizer.param_groups):
        numel = sum(parameter.numel() for parameter in group["params"])
        settings = ", ".join(f"{key} {group[key]}" for key in sorted(group) if key not in NAMES)
        lines.append(f"  group {number}: {len(group['params'])} tensors, {numel:,} parameters; {settings}")
    if optimizer.max_grad_norm:
        lines.append(f"  max_grad_norm {optimizer.max_grad_norm}")
    form = optimizer.state_format
    if not form.is_fp32:
        of_vectors = " (fp8 of matrices, in its place bf16 of vectors)" if form.fp8_moments else ""
        lines.append("  " + ", ".join(f"{name} in {dtype.value}" for name, dtype in form.dtypes.items()) + of_vectors)
    return "\n".join([*lines, ")", optimizer.plan.explain()])


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for hyper-parameters of another kind, or outside their range."""
    missing = [key for key in HYPERPARAMETERS if key not in group]
    if missing:
        raise ConfigError(f"a parameter group has no {missing[0]!r}", fix="change values of a group, not the group")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas must be two numbers in [0.0, 1.0), got {betas!r}")
    if isinstance(betas[0], torch.Tensor) is not isinstance(betas[1], torch.Tensor):
        raise ConfigError("betas must be two numbers or two tensors, not one of each", why="as in torch.optim.AdamW")
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
    check_variants(group)


def is_valid(group: Mapping[str, Any]) -> bool:
    """Return whether a step can be made with the hyper-parameters of a group, as they are now."""
    try:
        check_group(group)
    except ConfigError:
        return False
    return True


def check_variants(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option of torch.optim.AdamW that asks for another step than this one."""
    for key, why in _NOT_SUPPORTED.items():
        value = options.get(key)
        if value is not None and value is not False:
            raise ConfigError(f"{key}={value!r} is not supported", why=why, fix=f"leave {key} out")
    if not options.get("decoupled_weight_decay", True):
        raise ConfigError(
            "decoupled_weight_decay=False is not supported",
            why="weight decay through the gradient is another optimizer, torch.optim.Adam",
            fix="leave decoupled_weight_decay out",
        )


def check_keys(group: Mapping[str, Any], options: Collection[str]) -> None:
    """Raise ConfigError for a key of a new group that looks like an option and has no effect there.

    Other keys are the user's own, or a scheduler's; they are kept and saved.

    Args:
        options: names of what the optimizer as a whole takes.
    """
    known = (*HYPERPARAMETERS, *_NOT_SUPPORTED, "decoupled_weight_decay")
    for key in group:
        if key in NAMES or key in known:
            continue
        if key in options:
            raise ConfigError(
                f"a parameter group has {key!r}",
                why="it holds for all groups together",
                fix=f"hostward.AdamW(groups, {key}=...)",
            )
        closest = alike(key, known, 0.8)
        if closest and abs(len(closest) - len(key)) <= 1:
            raise UnknownNameError(
                f"a parameter group has {key!r}", why="it has no effect", fix=f"did you mean {closest}?"
            )


def check_members(groups: Sequence[Mapping[str, Any]], tracked: Sequence[ParamRecord]) -> None:
    """Raise ModelError unless `param_groups` hold what was added to them.

    By hand nothing may be put in, taken out, moved or renamed, because state and hyper-parameters are found by group
    and by name.
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


class StoredElsewhere(dict[str, Any]):
    """What `optimizer.state` has of a parameter: nothing, but for what other code puts in under keys of its own."""

    def __missing__(self, key: str) -> NoReturn:
        """Raise ModelError for what torch.optim.AdamW has there, and KeyError for anything else."""
        if key not in _STATE_OF_TORCH:
            raise KeyError(key)
        raise ModelError(
            f"optimizer.state has no {key!r}",
            why="the state is stored elsewhere, partly on the host",
            fix="state_of(name) returns a copy, set_state_of(name, values) replaces it",
        )


def check_state(state: Mapping[Any, Any], parameters: int) -> None:
    """Raise ModelError where `optimizer.state` was cleared, or written with what torch.optim.AdamW has there."""
    entries = [entry for entry in state.values() if type(entry) is StoredElsewhere]
    written = sorted({key for entry in entries if entry for key in entry if key in _STATE_OF_TORCH})
    if len(entries) == parameters and not written:
        return
    raise ModelError(
        f"optimizer.state was written: {written[0]!r}" if written else "optimizer.state was cleared or replaced",
        why="the state is stored elsewhere, partly on the host, and would stay as it is",
        fix="load_state_dict(), which makes it whole, or a new optimizer, to begin anew; write state by "
        "set_state_of(name, {'step': 0, 'exp_avg': zeros, 'exp_avg_sq': zeros}), and read it by state_of(name)",
    )


def renew_state(state: MutableMapping[Any, Any], tracked: Sequence[ParamRecord]) -> None:
    """Let `optimizer.state` again say of each parameter that its state is stored elsewhere; other keys stay."""
    for t in tracked:
        entry = state.get(t.parameter)
        kept = entry.items() if isinstance(entry, Mapping) else ()
        state[t.parameter] = StoredElsewhere((key, value) for key, value in kept if key not in _STATE_OF_TORCH)


def warn_of_unsaved(state: Mapping[Any, Any]) -> None:
    """Log the keys that other code has put into `optimizer.state`: what is saved does not have them."""
    ours = [entry for entry in state.values() if type(entry) is StoredElsewhere]
    others = [key for key, entry in state.items() if type(entry) is not StoredElsewhere]
    keys = sorted({str(key) for key in (*others, *chain.from_iterable(ours))})
    if keys:
        log.warning(
            "optimizer.state has %s, which other code put there: state_dict() and checkpoints do not have it, so save "
            "it beside them",
            shown([repr(key) for key in keys]),
        )


def _hold(groups: Sequence[Mapping[str, Any]], tracked: Sequence[ParamRecord]) -> bool:
    """Return whether the groups hold exactly these parameters, in this order.

    Every step calls it, so all of them are compared at once.
    """
    params = [list(group.get("params", ())) for group in groups]
    names = [name for group in groups for name in group.get("param_names", ())]
    return (
        [i for i, held in enumerate(params) for _ in held] == [t.group for t in tracked]
        and names == [t.name for t in tracked]
        and all(map(is_, chain.from_iterable(params), [t.parameter for t in tracked]))
    )


def checked_norm(value: float | None) -> float:
    """Return `max_grad_norm` as a float, 0 for no clipping. Raises ConfigError."""
    if value is None:
        return 0.0
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"max_grad_norm must be a finite number >= 0, got {value!r}", fix="0 or None: no clipping")
    return float(value)


def checked_backend(value: object) -> Backend | None:
    """Return the backend. Raises ConfigError for anything else, such as the name of a device."""
    if value is None or isinstance(value, Backend):
        return value
    raise ConfigError(
        f"backend={value!r} is no backend",
        why="operations run where the parameters lie",
        fix='leave it out, and move the model: model.to("cuda")',
    )


def checked_streamed(value: float | str | ShareOf, use_torch_optimizer: bool) -> float | str | ShareOf:
    """Return `streamed_fraction` as a float, "auto" or a function. Raises ConfigError."""
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


def checked_form(state_dtypes: Mapping[str, torch.dtype] | None, use_torch_optimizer: bool) -> StateFormat:
    """Return how state is stored, from the dtypes that are asked for. Raises ConfigError."""
    asked = dict(state_dtypes or {})
    fix = 'state_dtypes={"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}, or one of them'
    unknown = [name for name in asked if name not in (*MOMENTS, MAIN_PARAM)]
    if unknown:
        why = "it is of exp_avg, exp_avg_sq and main_param"
        raise ConfigError(f"state_dtypes has {unknown[0]!r}", why=why, fix=fix)
    for name, dtype in asked.items():
        if dtype not in (torch.float32, torch.bfloat16) and (dtype is not torch.uint8 or name == MAIN_PARAM):
            why = "state is stored in torch.float32 or torch.bfloat16, and moments in torch.uint8 (FP8), too"
            raise ConfigError(f"state_dtypes[{name!r}]={dtype}", why=why, fix=fix)
    dtypes = {value: key for key, value in STATE_DTYPES.items()}
    form = StateFormat(**{name: dtypes[dtype] for name, dtype in asked.items()}, split_master=not use_torch_optimizer)
    if use_torch_optimizer and not form.is_fp32:
        raise ConfigError(
            "state_dtypes with use_torch_optimizer",
            why="torch's step takes no FP8, and rounds to nearest what is in bf16, where moments and weights stall",
            fix="leave one of them out",
        )
    return form


def check_blocks(form: StateFormat, tracked: Sequence[ParamRecord], shards: Sequence[FlatShards]) -> None:
    """Raise ConfigError, on all ranks, where one has a part of a block of an FP8 moment, whose scale is one for all."""
    if form.fp8_moments and shards:
        raise ConfigError(
            "moments in FP8 with shards=...",
            why="matrices alone have them, and flat parts do not say whether they are parts of a matrix",
            fix="moments in torch.bfloat16",
        )
    for t in (t for t in tracked if t.sharded and form.of(t.parameter.dim()).fp8_moments):
        from hostward.distributed import fsdp2

        if not fsdp2.layout_of(t.name, t.parameter).cuts_at_multiples_of(FP8_BLOCK):
            raise ConfigError(
                f"moments of {t.name!r} in FP8, and a rank has a part of it that does not begin with a block",
                why=f"a block is {FP8_BLOCK} elements, counted from the parameter's first, and they share a scale",
                fix="moments in torch.bfloat16, or ranks that divide the parameter so",
            )


def check_main_params(form: StateFormat, weights: Sequence[torch.dtype]) -> None:
    """Raise ConfigError for main weights in bf16 of weights in other dtypes; fp32 ones may be among bf16 ones."""
    if form.main_param is Dtype.BF16 and weights and torch.bfloat16 not in weights:
        raise ConfigError(
            f"main_param in bf16, and weights in {', '.join(sorted({str(dtype) for dtype in weights}))}",
            why="it is the bf16 weight that can be its own main weight",
            fix="make the model bf16, or leave main_param out of state_dtypes",
        )


def sums_on_host(value: object, *, overlap: bool, grad_dtype: object) -> bool:
    """Return whether `gradients` asks for accumulation on the host. Raises ConfigError."""
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


def checked_early(value: object, *, overlap: bool, sums_on_host: bool, planned: bool = False) -> float:
    """Return `step_early` as a share. Raises ConfigError for no share, and where nothing is stepped in backward.

    `overlap`: False with `use_torch_optimizer`, too. `sums_on_host`: gradients are accumulated on the host. `planned`:
    a plan says so.
    """
    share = float(value) if isinstance(value, bool) else checked_fraction(value, "step_early")
    if share and not overlap:
        leave = (
            "the other option out, or plan without --step-early" if planned else "step_early out, or the other option"
        )
        raise ConfigError(
            "step_early with overlap=False or use_torch_optimizer=True",
            why="it makes CPU optimizer steps during backward, by hostward's own kernel",
            fix=f"leave {leave}",
        )
    if share and sums_on_host:
        raise ConfigError(
            'step_early with gradients="host"',
            why="gradients that are accumulated on the host are final only after the last addition",
            fix='leave step_early out, or use gradients="device"',
        )
    return share


def check_grad_dtype(dtype: object, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError for a dtype in which no step is defined, or one that `.grad` already differs from."""
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


def check_counts(**options: object) -> None:
    """Raise ConfigError unless each option is None or a positive whole number."""
    for name, value in options.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}", fix="None: by this machine's means")


def checked_waits(value: object) -> bool:
    """Return whether forward waits for weights by hooks. Raises ConfigError."""
    if value not in ("hooks", "manual"):
        fix = '"hooks" lets forward wait by itself, "manual" leaves it to wait_for_weights(names)'
        raise ConfigError(f'waits must be "hooks" or "manual", got {value!r}', fix=fix)
    return value == "hooks"


def checked_uncounted(names: Collection[str], stages: object) -> frozenset[str]:
    """Return the names that another process counts. Raises ConfigError where there is no other process."""
    if isinstance(names, str):
        raise ConfigError(f"uncounted={names!r} is one text", fix=f"uncounted=[{names!r}]")
    if names and stages is None:
        raise ConfigError(
            "uncounted=... without stages=...",
            why="no other process would count these gradients",
            fix="say stages= too, or leave uncounted= out",
        )
    return frozenset(names)


def require_names(option: str, names: Collection[str], tracked: Sequence[ParamRecord]) -> None:
    """Raise ModelError for a name that no parameter has."""
    unknown = sorted(set(names) - {t.name for t in tracked})
    if unknown:
        raise ModelError(
            f"{option}={unknown[0]!r} is no parameter of this optimizer",
            fix="give the names that the parameters were given with",
        )


def checked_scale(scale: object, device: torch.device) -> torch.Tensor | None:
    """Return a factor of all gradients as float32 [1] on the device. Raises ConfigError for anything else."""
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        raise ConfigError(f"gradient_scale={scale!r} is no tensor", fix=f"torch.tensor({scale!r}, device={device})")
    if scale.numel() != 1 or scale.dtype is not torch.float32 or scale.device != device:
        raise ConfigError(
            f"gradient_scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}",
            fix=f"float32, one element, on {device}",
        )
    return scale.detach().reshape(1)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(names: Sequence[str]) -> str:
    """Return the first names as text for a log."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
