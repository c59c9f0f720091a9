"""Parameter names as the plain module has them, whatever it is wrapped in. State and checkpoints go by them.

Wrappers leave their traces in the names of what they wrap: `torch.compile` writes `_orig_mod.`, a checkpoint wrapper
`_checkpoint_wrapped_module.`, data parallelism `module.`. The first two are nobody else's and are left out wherever
they stand. `module.` may be a module's own word, so it is left out only where it is known to come from a wrapper
(`hostward.model.parameters`), or where a saved name cannot be found otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from hostward.errors import CheckpointError

DATA_PARALLEL = "module."
_TRACE = re.compile(r"(?<![^./])(?:_orig_mod|_checkpoint_wrapped_module)(?:\.|$)")


def plain_name(name: str) -> str:
    """A dotted name, or a path of dotted names, without the traces of wrappers.

    >>> plain_name("_orig_mod.layers.3._orig_mod.weight"), plain_name("model/_orig_mod.head.weight")
    ('layers.3.weight', 'model/head.weight')
    """
    return _TRACE.sub("", name).removesuffix(".")


def by_plain_name(names: Iterable[str]) -> dict[str, str]:
    """{plain name: name}. Raises CheckpointError if two names become equal."""
    found: dict[str, str] = {}
    for name in names:
        plain = plain_name(name)
        if found.setdefault(plain, name) != name:
            raise CheckpointError(
                f"{found[plain]!r} and {name!r} both name {plain!r}",
                why="what torch.compile and checkpoint wrappers put into names does not tell parameters apart",
                fix="save the model either as it is or compiled, not both together",
            )
    return found


def matched(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """{wanted name: saved name} for all names that mean the same parameter; names without a counterpart are left out.

    Where names do not agree as they are, `module.` is added to all of them or taken from all of them, if then all have
    a counterpart. Names that differ in what stands before the first "/" are looked at apart.

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
    """Where the dotted name begins, behind what stands before the first "/"."""
    return plain.find("/") + 1


def _wrapped(plain: str) -> str:
    return plain[: _start(plain)] + DATA_PARALLEL + plain[_start(plain) :]


def _unwrapped(plain: str) -> str | None:
    rest = plain[_start(plain) :]
    return plain[: _start(plain)] + rest.removeprefix(DATA_PARALLEL) if rest.startswith(DATA_PARALLEL) else None


_SPELLINGS: Sequence[Callable[[str], str | None]] = (str, _wrapped, _unwrapped)
