"""Translate names of wrapped parameters to those of the plain module, which state and checkpoints use.

Wrappers change names: `torch.compile` inserts `_orig_mod.`, a checkpoint wrapper `_checkpoint_wrapped_module.`, data
parallelism `module.`. The first two have no other meaning and are removed everywhere. `module.` may be the name of a
user's attribute, so it is removed only where it is known to come from a wrapper (`hostward.model.parameters`), or where
a saved name cannot be found otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from hostward.errors import CheckpointError

DATA_PARALLEL = "module."
_TRACE = re.compile(r"(?<![^./])(?:_orig_mod|_checkpoint_wrapped_module)(?:\.|$)")


def plain_name(name: str) -> str:
    """Return a dotted name, or a path of dotted names, without the parts that wrappers inserted.

    >>> plain_name("_orig_mod.layers.3._orig_mod.weight"), plain_name("model/_orig_mod.head.weight")
    ('layers.3.weight', 'model/head.weight')
    """
    return _TRACE.sub("", name).removesuffix(".")


def by_plain_name(names: Iterable[str]) -> dict[str, str]:
    """Return {plain name: name}. Raises CheckpointError if two names become equal."""
    found: dict[str, str] = {}
    for name in names:
        plain = plain_name(name)
        if found.setdefault(plain, name) != name:
            raise CheckpointError(
                f"{found[plain]!r} and {name!r} both name {plain!r}",
                why="the parts that torch.compile and checkpoint wrappers insert do not distinguish parameters",
                fix="save the model either plain or compiled, not both together",
            )
    return found


def matched(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return {wanted name: saved name} for names of the same parameter; names without a counterpart are left out.

    If names do not agree, `module.` is added to all of them or removed from all of them, provided that all then have a
    counterpart. Names with different prefixes before the first "/" are matched separately.

    Raises:
        CheckpointError: two names of one side become equal.
    """
    theirs = by_plain_name(saved)
    groups: dict[str, dict[str, str]] = {}
    for plain, name in by_plain_name(wanted).items():
        groups.setdefault(plain[: _start(plain)], {})[plain] = name
    found: dict[str, str] = {}
    for names in groups.values():
        spelled = next((s for s in _SPELLINGS if all(s(plain) in theirs for plain in names)), str)
        pairs = ((name, spelled(plain)) for plain, name in names.items())
        found |= {name: theirs[other] for name, other in pairs if other in theirs}
    return found


def _start(plain: str) -> int:
    """Return the index at which the dotted name begins, after the prefix that ends with the first "/"."""
    return plain.find("/") + 1


def _wrapped(plain: str) -> str:
    return plain[: _start(plain)] + DATA_PARALLEL + plain[_start(plain) :]


def _unwrapped(plain: str) -> str | None:
    rest = plain[_start(plain) :]
    return plain[: _start(plain)] + rest.removeprefix(DATA_PARALLEL) if rest.startswith(DATA_PARALLEL) else None


_SPELLINGS: Sequence[Callable[[str], str | None]] = (str, _wrapped, _unwrapped)
