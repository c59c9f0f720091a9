"""How an option is declared: a field of a dataclass with one default and its description."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hostward.errors import UnknownNameError

T = TypeVar("T")


def describe(
    help_text: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    words: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What documentation and parser know of an option. `aliases`: other spellings; `words`: values beside numbers."""
    return {"help": help_text, "unit": unit, "choices": choices, "aliases": dict(aliases or {}), "words": words}


def option(
    default: T,
    help_text: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    words: tuple[str, ...] = (),
) -> T:
    """A dataclass field with its one default and its description."""
    # A type checker takes the right-hand side of a field for its default, hence the type of `default`.
    metadata = describe(help_text, unit=unit, choices=choices, aliases=aliases, words=words)
    field: Any = dataclasses.field(default=default, metadata=metadata)
    return field  # type: ignore[no-any-return]


def alike(name: str, known: Iterable[str], share: float = 0.6) -> str | None:
    """The known name that is most like `name`, or None where none has this share in common with it."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=share)
    return found[0] if found else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant for, or None: one that is much alike, else one that `name` begins
    with, as `save_dir` begins with `save`, else one that is somewhat alike.
    """
    names = list(known)
    begun = [other for other in names if name.startswith(f"{other}_")]
    return alike(name, names, 0.8) or max(begun, key=len, default=None) or alike(name, names)


class Options:
    """Base of the namespaces: assigning to an unknown name raises `UnknownNameError` with the nearest one."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if name not in fields:
            closest = nearest(name, fields)
            raise UnknownNameError(
                f"{type(self).__name__} has no option {name!r}",
                fix=f"did you mean {closest}?" if closest else "docs/options.md lists every option",
            )
        if isinstance(value, str):
            value = fields[name].metadata.get("aliases", {}).get(value, value)
        object.__setattr__(self, name, value)
