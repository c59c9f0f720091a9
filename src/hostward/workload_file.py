"""A workload as text, for whoever keeps what tracing found. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from .workload import Curve, Workload


def to_text(workload: Workload) -> str:
    """JSON without the names of fields, which `from_text` of the same source reads back as an equal workload."""
    return json.dumps(dataclasses.astuple(workload), allow_nan=False, separators=(",", ":"))


def from_text(text: str) -> Workload:
    """Raises ValueError where `text` is not of `to_text`."""
    try:
        found = _reader(Workload)(json.loads(text))
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, Workload):
        raise ValueError("it is no workload")
    # Layers of a kind share their curves, as after tracing: what the memory model finds of one holds for all.
    shared: dict[Curve, Curve] = {}
    return dataclasses.replace(
        found,
        layers=tuple(
            dataclasses.replace(la, curves={way: shared.setdefault(c, c) for way, c in la.curves.items()})
            for la in found.layers
        ),
    )


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """From what JSON makes of a value of this type back to the value."""
    arguments, origin = get_args(hint), get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        readers = [_reader(field) for field in get_type_hints(hint).values()]
        return lambda values: hint(*(read(value) for read, value in zip(readers, values, strict=True)))
    if origin is tuple:
        inner = _reader(arguments[0])
        return lambda values: tuple(inner(value) for value in values)
    if origin is not None and issubclass(origin, Mapping):
        key, inner = _reader(arguments[0]), _reader(arguments[1])
        return lambda values: {key(name): inner(value) for name, value in values.items()}
    if issubclass(hint, StrEnum):
        return lambda value: hint(value)
    return lambda value: value
