"""Find the values of a weight that has no bytes on the device yet (`hostward.weights.deferred_init`)."""

from __future__ import annotations

import torch

from hostward.errors import ModelError

WAITING = "_hostward_waiting"
"""Parameter attribute: the values on the CPU (None once the optimizer's host copies have them), and a callback for when
the weight has been attached.
"""


def is_away(parameter: torch.Tensor) -> bool:
    """Return whether the weight waits on the CPU for `attach`."""
    return WAITING in parameter.__dict__


def value_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the CPU values of a weight that waits for `attach`, else the parameter itself."""
    waiting = parameter.__dict__.get(WAITING)
    return parameter if waiting is None or waiting[0] is None else waiting[0]


def drop_value(parameter: torch.Tensor) -> None:
    """Drop the CPU values, because another copy on the host holds them now."""
    waiting = parameter.__dict__.get(WAITING)
    if waiting is not None:
        parameter.__dict__[WAITING] = None, waiting[1]


def taken(parameter: torch.Tensor) -> None:
    """Note that the weight has been attached."""
    waiting = parameter.__dict__.pop(WAITING, None)
    if waiting is not None:
        waiting[1]()


def waits(name: str) -> ModelError:
    """Return the error for code that reads such a weight."""

    return ModelError(
        f"weight {name!r} waits on the CPU",
        why="hostward.move() left it there for hostward.attach(), which has not been called yet",
        fix="hostward.attach(model, optimizer, weights=...) before the model is used",
    )
