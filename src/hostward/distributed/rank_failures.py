"""What ranks tell each other of an error on one of them, and the one error that all of them then raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostward import errors
from hostward.errors import HostwardError


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank could not go on, in plain strings."""

    kind: str
    """Name of the class of `hostward.errors`."""
    what: str
    why: str
    fix: str
    named: bool = False
    """It is what several ranks have agreed on, and says of which one."""

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
    """The error of the first rank that failed, for every rank to raise.

    Args:
        failures: what each rank is called, in order of ranks, and its failure; at least one has failed.
        what: what cannot be done because of it; "": what the failure itself says.
        fix: what to do where the failure names nothing.
        kind: the class to use where the failure's is not a subclass of it, other than a MemoryLimitError.
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
