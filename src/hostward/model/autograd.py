"""Find the tensors in a module's call, and ask autograd how they are saved for backward."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        why="it was saved for backward, and its value, on the device or offloaded, is not the saved one any more",
        fix="make the operation out of place, which torch requires without offloading, too",
    )


def inside_checkpoint() -> bool:
    """Return whether tensors saved now go to a checkpoint, which will recompute them."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(top) and getattr(top[0], "__module__", "") == torch.utils.checkpoint.__name__


def is_saved(parameter: torch.nn.Parameter) -> bool:
    """Return whether a graph has saved a parameter itself, or C++ code holds it."""
    # The node that accumulates its gradient holds it as well.
    return parameter._use_count() > _alone() + parameter.requires_grad  # type: ignore[attr-defined, no-any-return]


@functools.cache
def _alone() -> int:
    return torch.nn.Parameter(torch.empty(0, device="cpu"))._use_count()  # type: ignore[attr-defined, no-any-return]


def at_end_of_backward(function: Callable[[bool], None]) -> weakref.finalize[[bool], _Ending]:
    """Call `function(failed)` once when the backward that runs now is over: with True if an error has ended it.

    The result is `alive` until then.
    """
    ending = _Ending()
    ending.end = weakref.finalize(ending, function, True)
    ending.end.atexit = False
    torch.autograd.Variable._execution_engine.queue_callback(ending)
    return ending.end


class _Ending:
    """Be called at the end of a backward; the engine drops it with the backward, also if that raises."""

    end: weakref.finalize[[bool], _Ending]

    def __call__(self) -> None:
        found = self.end.detach()
        if found is not None:
            found[1](False)
