"""Convert hostward's optimizer state dict to and from that of `torch.optim.AdamW`.

hostward keys state by parameter name, counts steps as int64 and stores the fp32 main weight of a 16-bit weight, as
`master`, with the moments:

    {"format": 1,
     "state": {name: {"step": int64 [], "exp_avg": fp32 [shape], "exp_avg_sq": fp32 [shape], "master": fp32 [shape]}},
     "param_groups": [{"params": [name, ...], "lr": ..., "betas": [b1, b2], "eps": ..., "weight_decay": ..., ...}]}

torch numbers parameters in the order of its groups, counts steps as fp32 and has no fp32 main weights besides fp32
weights. So a 16-bit model is converted to an fp32 model in torch with the main weights as its weights. Nothing is
rounded; steps that torch cannot count (2**24 and more) and options that hostward does not support (amsgrad, maximize,
L2 decay) are errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hostward.core.inventory import MOMENTS
from hostward.errors import CheckpointError
from hostward.optim.state_dict import SAID_BY_GROUPS, STATE_FORMAT

_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
# How torch executes a step, with its defaults. Another value than the default is kept: it may change torch's bits.
_EXECUTION: Mapping[str, bool | None] = {
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}
_LARGEST_FP32_COUNT = 2**24 - 1


def to_torch_adamw(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the state dict for `torch.optim.AdamW`, and the fp32 weights of 16-bit parameters.

    The optimizer to load it into is built over the same groups with the parameters in the same order; for a 16-bit
    model, over the model cast to fp32 (torch casts moments to the dtype of the parameter) with the masters copied into
    its weights. Moments and masters share memory with the input; torch goes on to update them in place.

    Args:
        state_dict: hostward's optimizer state dict, as in the head of this module.

    Returns:
        torch's state dict: ids from 0 in the order of the groups, `step` as fp32 0-dim tensor on the CPU, `param_names`
        kept; and {name: fp32 [param shape]} for each parameter with a master.

    Raises:
        CheckpointError: the state dict is malformed or of another format, or a step count exceeds what fp32 holds.
    """
    state, groups = _parts(state_dict)
    if state_dict.get("format") != STATE_FORMAT:
        raise CheckpointError(
            f"the optimizer state has format {state_dict.get('format')!r}",
            why=f"this version of hostward reads format {STATE_FORMAT}",
            fix="pass optimizer.state_dict() of hostward.AdamW, or upgrade hostward",
        )
    torch_groups: list[dict[str, Any]] = []
    ids: dict[str, int] = {}
    for group in groups:
        names = [str(name) for name in group["params"]]
        for name in names:
            if name in ids:
                raise CheckpointError(f"parameter {name!r} stands twice in the groups of the optimizer state")
            ids[name] = len(ids)
        kept = {key: value for key, value in group.items() if key not in ("params", *SAID_BY_GROUPS)}
        torch_groups.append(
            {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True, **_EXECUTION, **kept}
            | {"betas": tuple(group["betas"]), "params": [ids[name] for name in names], "param_names": names}
        )
    unknown = [name for name in state if name not in ids]
    if unknown:
        raise CheckpointError(f"the optimizer state holds {unknown[0]!r}, which is in no parameter group")
    torch_state: dict[int, dict[str, torch.Tensor]] = {}
    masters: dict[str, torch.Tensor] = {}
    for name, entry in state.items():
        moments = _check_moments(name, entry)
        torch_state[ids[name]] = {"step": _fp32_count(name, entry["step"]), **moments}
        if "master" in entry:
            masters[name] = _check_master(name, entry["master"], moments["exp_avg"].shape)
    return {"state": dict(sorted(torch_state.items())), "param_groups": torch_groups}, masters


def from_torch_adamw(
    state_dict: Mapping[str, Any],
    names: Sequence[str] | None = None,
    masters: Mapping[str, torch.Tensor] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return hostward's optimizer state dict for the state dict of a `torch.optim.AdamW`.

    fp32 moments share memory with the input; 16-bit ones (torch keeps them so for 16-bit parameters) are widened,
    which is exact.

    Args:
        state_dict: of `torch.optim.AdamW`.
        names: of the parameters in the order of the groups; needed unless the state dict holds `param_names`.
        masters: {name: fp32 [param shape]}: the fp32 weights of those parameters that are 16-bit in hostward's model.
        shapes: {name: param shape}: needed for a parameter that torch has never stepped, which gets step 0 and zeros.

    Raises:
        CheckpointError: names are missing or do not fit, amsgrad, maximize or L2 decay is on, a moment is of another
            shape or dtype, a step count is not a whole number, or a shape is needed and not given.
    """
    state, groups = _parts(state_dict)
    names_by_id = _names_by_id(groups, names)
    unknown = next((name for name in masters or {} if name not in names_by_id.values()), None)
    if unknown is not None:
        raise CheckpointError(f"a master is given for {unknown!r}, which the optimizer state does not know")
    new_state: dict[str, dict[str, torch.Tensor]] = {}
    for key, name in names_by_id.items():
        new_state[name] = _entry_from_torch(name, state.get(key), (shapes or {}).get(name))
        if masters is not None and name in masters:
            new_state[name]["master"] = _check_master(name, masters[name], new_state[name]["exp_avg"].shape)
    return {
        "format": STATE_FORMAT,
        "state": new_state,
        "param_groups": [_group_from_torch(index, group, names_by_id) for index, group in enumerate(groups)],
    }


def _parts(state_dict: Mapping[str, Any]) -> tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]:
    try:
        state, groups = state_dict["state"], state_dict["param_groups"]
        missing = [key for group in groups for key in ("params", *_HYPERPARAMETERS) if key not in group]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "this is not an optimizer state dict", why="it has no 'state' and 'param_groups'"
        ) from error
    if missing:
        raise CheckpointError(
            f"a parameter group of the optimizer state has no {missing[0]!r}", why="it is not the state of an AdamW"
        )
    return state, groups


def _check_moments(name: str, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    missing = [key for key in ("step", *MOMENTS) if key not in entry]
    if missing:
        raise CheckpointError(f"the state of {name!r} has no {missing[0]!r}", why="it is not the state of an AdamW")
    # From bf16 exactly: torch's own step has fp32 moments.
    first, second = (
        moment.float() if isinstance(moment, torch.Tensor) and moment.dtype is torch.bfloat16 else moment
        for moment in (entry[key] for key in MOMENTS)
    )
    for key, moment in zip(MOMENTS, (first, second), strict=True):
        if not isinstance(moment, torch.Tensor) or moment.dtype != torch.float32:
            kind = moment.dtype if isinstance(moment, torch.Tensor) else type(moment).__name__
            raise CheckpointError(f"{key} of {name!r} is {kind}", why="it must be a float32 tensor")
    if first.shape != second.shape:
        raise CheckpointError(
            f"the moments of {name!r} have shapes {list(first.shape)} and {list(second.shape)}", why="they must agree"
        )
    return {"exp_avg": first, "exp_avg_sq": second}


def _check_master(name: str, master: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if master.dtype != torch.float32 or master.shape != shape:
        raise CheckpointError(
            f"the master of {name!r} is {master.dtype} {list(master.shape)}",
            why=f"it must be float32 {list(shape)}, the shape of its moments",
        )
    return master.detach()


def _fp32_count(name: str, step: torch.Tensor | int) -> torch.Tensor:
    count = int(step)
    if count > _LARGEST_FP32_COUNT:
        raise CheckpointError(
            f"{name!r} has made {count} steps",
            why=f"torch counts in float32, which does not increase after {_LARGEST_FP32_COUNT + 1}",
            fix="continue with hostward, or set the count yourself",
        )
    return torch.tensor(float(count), dtype=torch.float32)


def _names_by_id(groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> dict[Any, str]:
    ids = [key for group in groups for key in group["params"]]
    if all("param_names" in group for group in groups):
        found = [str(name) for group in groups for name in group["param_names"]]
        if names is not None and list(names) != found:
            raise CheckpointError(
                "the parameter names given are not those of the optimizer state",
                why=f"it holds {len(found)} names, first {found[:2]}; given are {len(names)}, first {list(names[:2])}",
                fix="leave `names` out, or load the state of this model",
            )
    elif names is None:
        raise CheckpointError(
            "the optimizer state has no parameter names",
            why="torch.optim.AdamW was built from parameters without names",
            fix="pass `names`, in the order in which the parameters were given to the optimizer",
        )
    else:
        found = list(names)
    if len(found) != len(ids) or len(set(found)) != len(found) or len(set(ids)) != len(ids):
        raise CheckpointError(
            f"{len(found)} names ({len(set(found))} different) for {len(ids)} parameters",
            why="each parameter needs one name of its own",
        )
    return dict(zip(ids, found, strict=True))


def _entry_from_torch(
    name: str, entry: Mapping[str, Any] | None, shape: Sequence[int] | None
) -> dict[str, torch.Tensor]:
    if not entry:
        if shape is None:
            raise CheckpointError(
                f"torch holds no state for {name!r}",
                why="it was never stepped, so its shape is not known here",
                fix="pass `shapes` with the shape of each parameter",
            )
        zeros = {key: torch.zeros(tuple(shape), dtype=torch.float32) for key in MOMENTS}
        return {"step": torch.tensor(0, dtype=torch.int64), **zeros}
    wide = {
        key: value.float()
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        else value
        for key, value in entry.items()
    }
    moments = _check_moments(name, wide)
    if shape is not None and tuple(moments["exp_avg"].shape) != tuple(shape):
        raise CheckpointError(
            f"the moments of {name!r} have shape {list(moments['exp_avg'].shape)}",
            why=f"the parameter has shape {list(shape)}",
            fix="load the state of this model",
        )
    count = float(entry["step"])
    if not math.isfinite(count) or count < 0 or count != int(count):
        raise CheckpointError(f"the step count of {name!r} is {count}", why="it must be a whole number, at least 0")
    return {"step": torch.tensor(int(count), dtype=torch.int64), **moments}


def _group_from_torch(index: int, group: Mapping[str, Any], names_by_id: Mapping[Any, str]) -> dict[str, Any]:
    for key, why in (("amsgrad", "hostward keeps no maximum of the second moment"), ("maximize", "hostward minimizes")):
        if group.get(key):
            raise CheckpointError(
                f"parameter group {index} has {key}=True", why=why, fix=f"train with {key}=False, or go on with torch"
            )
    if not group.get("decoupled_weight_decay", True) and float(group["weight_decay"]) != 0.0:
        raise CheckpointError(
            f"parameter group {index} has decoupled_weight_decay=False",
            why="its weight decay goes through the gradient (Adam), which hostward's AdamW does not do",
            fix="convert the state of a torch.optim.AdamW",
        )
    dropped = {"params", "param_names", "amsgrad", "maximize", "decoupled_weight_decay", *_HYPERPARAMETERS}
    kept = {
        key: value
        for key, value in group.items()
        if key not in dropped and not (key in _EXECUTION and value == _EXECUTION[key])
    }
    return {
        "params": [names_by_id[key] for key in group["params"]],
        "lr": float(group["lr"]),
        "betas": [float(beta) for beta in group["betas"]],
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        **kept,
    }
