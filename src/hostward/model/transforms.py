"""Run our own operations outside of what the program has around its own: transforms, modes, a tracer.

A weight may be waited for within `torch.func.grad`, `FakeTensorMode`, a selective checkpoint or `torch.jit.trace`.
There our copies would be recorded, replaced or skipped, and what we allocate would be no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch._C import _functorch, _get_tracing_state, _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def untransformed(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorate a function of ours so that its operations are run as they are, on tensors of memory."""

    @functools.wraps(function)
    def plainly(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if not _inside_transform():
            return function(*args, **kwargs)
        with _outside_transforms():
            return function(*args, **kwargs)

    return plainly


def _inside_transform() -> bool:
    """Return whether operations of the calling thread are transformed, seen by a mode or traced."""
    return (
        _functorch.peek_interpreter_stack() is not None
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
    )


@contextmanager
def _outside_transforms() -> Iterator[None]:
    set_tracing_state = torch._C._set_tracing_state  # type: ignore[attr-defined]
    traced, transforms = _get_tracing_state(), []
    set_tracing_state(None)
    try:
        while _functorch.peek_interpreter_stack() is not None:
            transforms.append(_functorch.pop_dynamic_layer_stack())
        with _disable_current_modes():
            yield
    finally:
        while transforms:
            _functorch.push_dynamic_layer_stack(transforms.pop())
        set_tracing_state(traced)
