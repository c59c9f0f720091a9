"""Where the values of a weight are that has no bytes on the device yet (`hostward.weights.deferred_init`)."""

from __future__ import annotations

import torch

from hostward.errors import ModelError

WAITING = "_hostward_waiting"
"""Attribute of such a parameter: its values on the CPU, or None once the optimizer's host copies have them; and whom to
tell that it waits no more.
"""


def is_away(parameter: torch.Tensor) -> bool:
    """Whether the weight waits for `attach`."""
    return WAITING in parameter.__dict__


def value_of(parameter: torch.Tensor) -> torch.Tensor:
    """The values: on the CPU of a weight that waits, else the parameter itself."""
    waiting = parameter.__dict__.get(WAITING)
    return parameter if waiting is None or waiting[0] is None else waiting[0]


def drop_value(parameter: torch.Tensor) -> None:
    """Somebody else's copy on the host has the values now."""
    waiting = parameter.__dict__.get(WAITING)
    if waiting is not None:
        parameter.__dict__[WAITING] = None, waiting[1]


def taken(parameter: torch.Tensor) -> None:
    """The weight waits no more."""
    waiting = parameter.__dict__.pop(WAITING, None)
    if waiting is not None:
        waiting[1]()


def waits(name: str) -> ModelError:
    """The error of who reads such a weight."""
    return ModelError(
        f"weight {name!r} waits on the CPU",
        why="hostward.move() left it there for hostward.attach(), which has not been called yet",
        fix="hostward.attach(model, optimizer, weights=...) before the model is used",
    )
