"""What hooks on layers ask of autograd: the tensors in a call, and what was saved for backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint

from hostward.errors import ModelError


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors within arguments or outputs of a module: in mappings, lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def raise_modified(sizes: Sequence[int]) -> NoReturn:
    """Raise ModelError: a saved tensor of these sizes was written after it was saved."""
    raise ModelError(
        f"a tensor of size {tuple(sizes)} that backward needs was modified by an in-place operation",
        why="it was saved for backward, and what is there now, or has left for the host, is of another moment",
        fix="make the operation out of place, as torch asks without offloading, too",
    )


def inside_checkpoint() -> bool:
    """Return whether what is saved now goes to a checkpoint, which will recompute it."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(top) and getattr(top[0], "__module__", "") == torch.utils.checkpoint.__name__
