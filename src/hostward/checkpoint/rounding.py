"""Round optimizer state to fewer bytes on purpose: what loading never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hostward.core.inventory import MOMENTS, Dtype, StateFormat
from hostward.errors import CheckpointError
from hostward.model.parameters import local_of
from hostward.optim.bucket_state import fp8_stored, fp8_values
from hostward.optim.param_groups import checked_form
from hostward.optim.state_dict import SAID_BY_GROUPS, STATE_FORMAT, saved_dtypes, saved_form


def rounded(state_dict: Mapping[str, Any], state_dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Return hostward's optimizer state dict as `AdamW(state_dtypes=state_dtypes)` loads it.

    Moments are rounded to nearest, where they are stored in more bytes; fp32 main weights are dropped if `main_param`
    is bfloat16, and the bf16 weights of the model are all that is left of them. What needs no rounding shares memory
    with the input. Training does not go on with the bits that it would have had.

    Args:
        state_dict: what `AdamW.state_dict()` returned.
        state_dtypes: as AdamW takes them: torch.float32, torch.bfloat16, or, of moments, torch.uint8 for FP8.

    Raises:
        CheckpointError: the state dict is of another kind or format, or has parts of sharded moments, which FP8 takes
            whole.
        ConfigError: `state_dtypes` has other names or dtypes.
    """
    wanted = checked_form(state_dtypes, False)
    if state_dict.get("format") != STATE_FORMAT or not isinstance(state_dict.get("state"), Mapping):
        raise CheckpointError(
            "this is no optimizer state dict of hostward",
            why=f"its format is {state_dict.get('format')!r}, not {STATE_FORMAT}",
            fix="pass what AdamW.state_dict() returned; hostward.convert.from_torch_adamw makes one of torch's",
        )
    form = saved_form(state_dict).at_most(wanted)
    state = {name: _rounded_entry(name, entry, form) for name, entry in state_dict["state"].items()}
    groups = [_said(group, form) for group in state_dict.get("param_groups", ())]
    return {**_said(state_dict, form), "state": state, "param_groups": groups}


def _said(saved: Mapping[str, Any], form: StateFormat) -> dict[str, Any]:
    return {key: value for key, value in saved.items() if key not in SAID_BY_GROUPS} | saved_dtypes(form)


def _rounded_entry(name: str, entry: Mapping[str, Any], form: StateFormat) -> dict[str, Any]:
    found = dict(entry)
    if form.main_param is Dtype.BF16:
        found.pop("master", None)
    for role in MOMENTS:
        moment = entry[role]
        if form.of(moment.dim()).moments[role] is Dtype.FP8 and local_of(moment) is not moment:
            raise CheckpointError(
                f"{role} of {name!r} is sharded",
                why="elements of an FP8 moment share a scale, counted from the first of the whole parameter",
                fix="round it to torch.bfloat16, or pass a state with whole tensors (full_tensor())",
            )
        found[role] = rounded_moment(moment, role, form)
    return found


def rounded_moment(moment: torch.Tensor, role: str, form: StateFormat) -> torch.Tensor:
    """Return a moment as a state in this format is saved: fp32, or rounded to nearest and in bfloat16.

    Args:
        moment: fp32 or bfloat16, of the parameter's shape.
        role: "exp_avg" or "exp_avg_sq".
    """
    dtype = form.of(moment.dim()).moments[role]
    if dtype is Dtype.FP32:
        return moment
    if dtype is Dtype.BF16:
        return moment.to(torch.bfloat16)
    stored = fp8_stored(moment.reshape(-1), role, nearest=True)
    if stored is None:
        raise ValueError("what is rounded is always stored")
    return fp8_values(*stored, role).view(moment.shape)
