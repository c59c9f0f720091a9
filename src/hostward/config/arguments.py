"""Check the options of public calls: raise for unknown names and values out of range before anything is done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hostward.config.schema import nearest
from hostward.errors import ConfigError, UnknownNameError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


def named_options(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap a call so that an unknown keyword raises UnknownNameError with the nearest name."""
    names = list(inspect.signature(call).parameters)
    called = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in names:
                closest = nearest(name, names)
                known = ", ".join(n for n in names if n != "self")
                raise UnknownNameError(
                    f"{called}() has no option {name!r}",
                    fix=f"did you mean {closest}?" if closest else f"options are {known}",
                )
        return call(*args, **options)

    return checked


def named_fields(kind: type[C]) -> type[C]:
    """Wrap a dataclass so that an unknown keyword raises UnknownNameError with the nearest name."""
    kind.__init__ = named_options(kind.__init__)  # type: ignore[method-assign]
    return kind


def require_whole(option: str, value: object, *, least: int, optional: bool = False) -> None:
    """Raise ConfigError unless the value of an option is a whole number of at least `least`, 0 or 1; or None."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{option} must be a whole number, got {value!r}", fix=f"{option.rpartition('.')[2]}=1")
    if value < least:
        raise ConfigError(f"{option} must {'not be negative' if least == 0 else 'be at least 1'}, got {value}")


def require_fewer(count: int | None, layers: int) -> None:
    """Raise ConfigError unless `count` first layers leave out the last one of `layers`. None: all but the last."""
    if count is not None and not 0 < count < layers:
        raise ConfigError(
            f"{count} layers were asked for, and of a model of {layers} at most {max(0, layers - 1)} can be offloaded",
            why="the last layer stays, because its backward begins as soon as its forward ends",
            fix=f"give a number of first layers from 1 to {layers - 1}" if layers > 1 else "a model with more layers",
        )
