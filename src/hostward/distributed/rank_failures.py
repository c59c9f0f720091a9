"""Describe errors to other ranks, and build the one error that all ranks raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostward import errors
from hostward.errors import HostwardError


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes a rank's error in plain strings."""

    kind: str
    """Class name in `hostward.errors`."""
    what: str
    why: str
    fix: str
    named: bool = False
    """True if several ranks raise this error already, so that it names its rank."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, HostwardError):
            return cls(type(error).__name__, error.what, error.why, error.fix, error.everywhere)
        return cls("", f"{type(error).__name__}: {error}".strip(": "), "", "")


def raised_by_all(
    failures: Sequence[tuple[str, Failure | None]],
    *,
    what: str = "",
    fix: str = "",
    kind: type[HostwardError] = HostwardError,
) -> HostwardError:
    """Return the error of the first rank that failed, for every rank to raise.

    Args:
        failures: name and failure of each rank, in order of ranks; at least one has failed.
        what: the operation that failed because of it; "": the text of the failure itself.
        fix: the fix if the failure names none.
        kind: the class to use if the failure's class is neither a subclass of it nor MemoryLimitError.
    """
    failed = [(name, failure) for name, failure in failures if failure is not None]
    name, first = failed[0]
    if len(failed) > 1:
        name += f" and {len(failed) - 1} more"
    own = getattr(errors, first.kind, kind)
    if not issubclass(own, (kind, errors.MemoryLimitError)):
        own = kind
    if what:
        causes = filter(None, ("" if first.what == what else first.what, first.why))
        made: HostwardError = own(what, why=f"{name}: {'; '.join(causes)}", fix=first.fix or fix)
    else:
        made = own(first.what if first.named else f"{name}: {first.what}", why=first.why, fix=first.fix or fix)
    made.everywhere = True
    return made
