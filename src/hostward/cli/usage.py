"""Turn words that the command line does not understand into an error with its fix.

typer brings its own copy of click or imports it, depending on its version, so its errors are known by their attributes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import typer

from hostward.errors import ConfigError, UnknownNameError

_NEAR = 0.8
"""Likeness of names from which on a flag is meant, rather than an option of training that is written otherwise."""
_NO_COMMAND = re.compile(r"No such command '([^']*)'")
_OF_OPTION = re.compile(r"^Option '[^']*' ")


def usage_errors() -> type[Any]:
    """Return the class of errors for words that the command line does not understand."""
    # typer's public subclass knows whose it is.
    return next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def asks_for_help(error: Any) -> bool:
    """Return whether the error is the help of a command that was given no words."""
    return type(error).__name__ == "NoArgsIsHelpError"


def require_values(words: Sequence[str]) -> None:
    """Raise ConfigError for an empty word, or a flag with an empty value: as a path it would be this folder."""
    for before, word in zip(["hostward", *words], words, strict=False):
        flag, _, value = word.partition("=")
        if not word or (flag.startswith("--") and " " not in flag and "=" in word and not value):
            empty = ConfigError(
                f"there is an empty word after {flag or before}",
                why="a variable of the shell that is not set leaves one",
                fix="write its value, or leave it out",
            )
            empty.everywhere = True
            raise empty


def usage_error(error: Any, app: typer.Typer, words: Sequence[str]) -> ConfigError:
    """Return what, why and fix of a usage error; every rank has the same words."""
    found = _of(error, *_place(error, app, words), words)
    found.everywhere = True
    return found


def _place(error: Any, app: typer.Typer, words: Sequence[str]) -> tuple[str, Any]:
    """Return the command that the words are for, as text and as typer has it."""
    if error.ctx is not None:
        return error.ctx.command_path, error.ctx.command
    path, command = ["hostward"], typer.main.get_command(app)
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is not None:
            path.append(word)
            command = inner
    return " ".join(path), command


def _of(error: Any, path: str, command: Any, words: Sequence[str]) -> ConfigError:
    flag, param = getattr(error, "option_name", None), getattr(error, "param", None)
    message, see = str(error.message), f"`{path} --help` lists what it takes"
    if flag is not None and type(error).__name__ == "NoSuchOption":
        flags = [name for each in command.params for name in each.opts]
        fix = "; ".join(filter(None, [_flag_fix(flag, flags), see]))
        return UnknownNameError(f"{path} has no option {flag}", fix=fix)
    if (unknown := _NO_COMMAND.match(message)) is not None:
        nearest = difflib.get_close_matches(unknown[1], command.commands, n=1)
        fix = f"{path} {nearest[0]}; {see}" if nearest else see
        return UnknownNameError(f"{path} has no command {unknown[1]!r}", fix=fix)
    if flag is not None:
        param = next((each for each in command.params if flag in each.opts), None)
    if param is None:
        return ConfigError(f"{path}: {_plain(message)}", fix=f"leave out what is too much; {see}")
    name = param.opts[0] if param.opts[0].startswith("-") else param.metavar or param.name
    meaning = ": ".join(filter(None, [_written(param), getattr(param, "help", None)]))
    if not message:
        return ConfigError(f"{path} needs {name}", fix=meaning)
    if flag is not None:
        return ConfigError(f"{path} {name} {_plain(_OF_OPTION.sub('', message))}", fix=meaning)
    return ConfigError(f"{path} does not take {name} {_given(param, words)}", why=_plain(message), fix=meaning)


def _flag_fix(flag: str, flags: Sequence[str]) -> str | None:
    from hostward.config.overrides import unknown_flag

    near, likely = (difflib.get_close_matches(flag, flags, n=1, cutoff=cutoff) for cutoff in (_NEAR, 0.6))
    return near[0] if near else unknown_flag(flag) or next(iter(likely), None)


def _written(param: Any) -> str:
    """Return how a parameter is written, with a word for its value."""
    if not param.opts[0].startswith("-"):
        return str(param.metavar or param.name)
    return param.opts[0] if getattr(param, "is_flag", False) else f"{param.opts[0]} {param.metavar or 'VALUE'}"


def _given(param: Any, words: Sequence[str]) -> str:
    """Return the last value that the words have for an option, or "" where they do not show it."""
    given = ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in param.opts:
            given = value if value else following
    return given


def _plain(message: str) -> str:
    """Return a sentence of typer as the part of a line."""
    return message[:1].lower() + message[1:].rstrip(".")
