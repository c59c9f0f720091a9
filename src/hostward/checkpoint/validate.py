"""Check the values to save before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from hostward.checkpoint.save_plan import Value
from hostward.errors import CheckpointError
from hostward.model.fence import plain_type
from hostward.model.parameter_names import by_plain_name
from hostward.model.parameters import local_of
from hostward.optim.state_reader import Source

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


def values_of(iteration: int, tensors: Mapping[str, Value], *, ranks: int) -> dict[str, Value]:
    """Return the values to save, by plain name.

    Raises:
        CheckpointError: a value cannot be saved, or the iteration is negative.
    """
    if iteration < 0:
        raise CheckpointError(f"cannot save iteration {iteration}", why="iterations count from 0")
    for name, value in tensors.items():
        _check_value(name, value, ranks)
    return {plain: tensors[name] for plain, name in by_plain_name(tensors).items()}


def _check_value(name: str, value: object, ranks: int) -> None:
    if not isinstance(value, torch.Tensor | Source):
        raise CheckpointError(
            f"cannot save {name!r} as a tensor",
            why=f"it is a {type(value).__name__}",
            fix="put numbers, strings, lists and mappings into `plain`",
        )
    tensor: Any = value.whole if isinstance(value, Source) else value
    local = local_of(tensor)
    if local is not tensor and ranks == 1 and tensor.device_mesh.size() > 1:
        raise CheckpointError(
            f"cannot save {name!r}",
            why="it is sharded, and this checkpoint is written by one process",
            fix="pass `group`, the process group of the ranks that share it, on all of them",
        )
    if isinstance(value, Source):
        return
    if local.is_meta or local.layout != torch.strided:
        raise CheckpointError(f"cannot save {name!r}", why="only dense tensors that hold data can be saved")
    # Offloaded weights keep their tensor while the storage is empty; reading it would crash the process.
    plain_kind = plain_type(local) in (torch.Tensor, torch.nn.Parameter)
    if plain_kind and local.numel() and not local.untyped_storage().nbytes():
        raise CheckpointError(
            f"cannot save {name!r}", why="its storage is empty: the weight is offloaded", fix="save its host copy"
        )


def plain_bytes(plain: Mapping[str, JSON]) -> bytes:
    """Return plain values as JSON text.

    Raises:
        CheckpointError: JSON would change a value.
    """
    check_plain(plain, "plain")
    return json.dumps(plain, separators=(",", ":")).encode()


def check_plain(value: object, where: str) -> None:
    """Raise CheckpointError for values that JSON would change or does not support.

    These are other types than JSON's, and mappings with keys that are not strings.
    """
    if value is None or type(value) in (bool, int, float, str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]")
        return
    if isinstance(value, dict) and all(type(key) is str for key in value):
        for key, item in value.items():
            check_plain(item, f"{where}[{key!r}]")
        return
    kind = "a mapping with keys that are no strings" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"cannot save {where}",
        why=f"it is {kind}",
        fix="use None, bool, int, float, str, lists and mappings with string keys; tensors go into `tensors`",
    )
