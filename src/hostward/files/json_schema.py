"""Read frozen dataclasses from JSON that a person may have edited: every key known, every value of its type."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse(cls: type[T], text: str) -> T:
    """Parse `text` as a `cls`: a dataclass of plain values, collections and other dataclasses.

    Fields may be str, int, float, StrEnums, tuples, mappings of str, or dataclasses, each `| None`; Any is taken as it
    is. Numbers are finite, and none is negative. A field with a default may be missing.

    Raises:
        ValueError: no JSON, a key that is unknown, missing or there twice, or a value that is not of its type; the
            text
            names the place.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        return cls(**_fields(cls, content, ""))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def require_version(text: str, version: int, format_name: str | None = None) -> None:
    """Check the version before the keys of a file, which another version may have otherwise.

    Raises ValueError where `text` is an object of another version or, where `format_name` is given, of another format.
    """
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        return
    if format_name is not None and content.get("format", format_name) != format_name:
        raise ValueError(f"its format is {_short(content['format'])}, not {format_name!r}")
    found = content.get("version")
    if type(found) is int and found != version:
        raise ValueError(f"it has version {_short(found)}, this hostward reads version {version}")


def to_text(value: Any) -> str:
    """Write a dataclass instance as JSON that `parse` reads back as an equal one."""
    return json.dumps(dataclasses.asdict(value), indent=1, allow_nan=False) + "\n"


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return found


def _fields(cls: type, content: Any, place: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{place or 'the whole'} is {_short(content)}, not an object")
    hints = get_type_hints(cls)
    for key in content:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            raise ValueError(f"key {place}{key[:80]!r} is unknown" + (f"; did you mean {near[0]!r}?" if near else ""))
    optional = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    missing = [key for key in hints if key not in content and key not in optional]
    if missing:
        raise ValueError(f"key {place}{missing[0]!r} is missing")
    return {key: _value(hint, content[key], f"{place}{key}") for key, hint in hints.items() if key in content}


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, Union):
        inner = next(a for a in arguments if a is not types.NoneType)
        return None if value is None else _value(inner, value, place)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint(**_fields(hint, value, f"{place}."))
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{place} is {_short(value)}, not a list")
        return tuple(_value(arguments[0], entry, f"{place}[{i}]") for i, entry in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{place} is {_short(value)}, not an object")
        return {key: _value(arguments[1], entry, f"{place}.{key}") for key, entry in value.items()}
    if hint is float:
        return _number(value, place)
    if issubclass(hint, StrEnum):
        return _word(hint, value, place)
    if type(value) is not hint:
        raise ValueError(f"{place} is {_short(value)}, not {_NAMES[hint]}")
    if hint is int and value < 0:
        raise ValueError(f"{place} is {_short(value)}, which is negative")
    return value


_NAMES = {int: "a whole number", str: "a text", bool: "true or false"}


def _word(words: type[StrEnum], value: Any, place: str) -> StrEnum:
    try:
        return words(value)
    except ValueError as error:
        raise ValueError(f"{place} is {_short(value)}, not one of {', '.join(words)}") from error


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{place} is {_short(value)}, not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{place} is {_short(value)}, which is too large") from error
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{place} is {_short(value)}, not a finite number of at least 0")
    return number


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
