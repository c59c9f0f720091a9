"""Run `hostward options`, and complete words of the command line."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated

import typer

Word = Annotated[
    str | None, typer.Argument(metavar="[WORD]", help="Only options that have this in their name or meaning.")
]


def options(word: Word = None) -> None:
    """List the options of `hostward train`: name, type, default and meaning."""
    from hostward.config.reference import matching
    from hostward.config.schema import options as declared

    width = shutil.get_terminal_size().columns
    found = declared().values() if word is None else matching(word)
    typer.echo("\n".join(entry(info.dotted, width) for info in found))


def entry(name: str, width: int) -> str:
    """Return one option as text of at most `width` columns: a line of name, type and default, then the meaning."""
    from hostward.config.reference import WORKS, meaning, status
    from hostward.config.schema import options as declared
    from hostward.config.validate import shown

    info = declared()[name]
    works = status(name)
    text = meaning(info) if works == WORKS else f"{meaning(info)} Status: {works}."
    said = textwrap.fill(text.replace("`", ""), width, initial_indent="    ", subsequent_indent="    ")
    return f"{name}  {info.type_text}, default {shown(info.default)}\n{said}"


def complete_override(incomplete: str) -> list[str]:
    """Return words that `incomplete` may become: `namespace.option=`, and with its default or each other value.

    A shell adds a space after the only candidate, hence two of each option: the value is still to be typed.
    """
    from hostward.config.schema import options as declared
    from hostward.config.validate import shown

    words = []
    for info in declared().values():
        values = info.choices or (("true", "false") if info.kind is bool else ("", shown(info.default)))
        words += [f"{info.dotted}={value}" for value in values]
    return [word for word in words if word.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes whose name begins with `incomplete`."""
    from hostward import recipes

    return [name for name in recipes.names() if name.startswith(incomplete)]
