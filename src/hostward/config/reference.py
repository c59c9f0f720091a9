"""Describe options in words, from their declarations and rules: docs/options.md and `hostward options` say the same."""

from __future__ import annotations

import difflib

from hostward.config.overrides import DEEPSPEED, DROPPED, MOVED, unknown_option
from hostward.config.rules.table import DEPENDENT, NOT_BUILT, NOT_BUILT_FOR_RANKS, RANGES
from hostward.config.schema import OptionInfo, options
from hostward.config.validate import shown
from hostward.errors import UnknownNameError

WORKS = "works"


def meaning(info: OptionInfo) -> str:
    """Return what an option means, with its choices, other spellings, bounds and unit; words are quoted as code."""
    text = info.help
    if info.choices:
        text += f" One of {', '.join(f'`{choice}`' for choice in info.choices)}."
    if info.aliases:
        text += f" Also written {', '.join(f'`{other}`' for other in info.aliases)}."
    bounds = RANGES.get(info.dotted)
    if bounds is not None and " in [" not in text:
        text += f" Must be {bounds.text}."
    if info.unit:
        text += f" Unit: {info.unit}."
    return text


def status(name: str) -> str:
    """Return in words how far the option works in this version; WORKS without reservation."""
    if name in NOT_BUILT:
        return f"only `{shown(NOT_BUILT[name][0])}`"
    for switch, dependents in DEPENDENT.items():
        if name in dependents and switch in NOT_BUILT:
            return f"with `{switch.partition('.')[2]}`"
    return "works with one process" if name in NOT_BUILT_FOR_RANKS else WORKS


def matching(word: str) -> list[OptionInfo]:
    """Return the options whose name or meaning contains `word`, in the order of declaration.

    Case does not count, and a name may be spelt as a flag, as in `--micro-batch-size`.

    Raises:
        UnknownNameError: there is none; the text proposes near names, or says what replaces a name of another tool.
    """
    text = word.lower()
    name = text.removeprefix("--").replace("-", "_")
    found = [info for info in options().values() if name in info.dotted or text in meaning(info).lower()]
    if found:
        return found
    if name in DROPPED or name in MOVED or name.split(".")[0] in DEEPSPEED:
        raise unknown_option(name)
    bare = {info.name: info.dotted for info in options().values()}
    near = [bare.get(close, close) for close in difflib.get_close_matches(name, [*bare, *options()], cutoff=0.5)]
    raise UnknownNameError(
        f"no option has {word!r} in its name or meaning",
        fix=f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "`hostward options` lists all of them",
    )
