"""Which ranges of its bucket an operation is over, and the works of a point bound to one such choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto

from hostward.runtime.backend import Batch
from hostward.schedule.ops import Kind, Lane, Op


class Which(Enum):
    """A question that is asked anew at every issue."""

    ALL = auto()
    """Ranges with a gradient in this turn; in the turn before, if no gradient of the bucket is there yet."""
    FRESH = auto()
    """Those whose gradient has not left yet."""
    ADDED = auto()
    """Those, on their way to totals on the host: an `Addition`."""
    WITHOUT_SUMS = auto()
    """Those whose total has changed since its partial sums were made."""


def which(op: Op) -> Which:
    """What the operation of a bucket is over."""
    if op.kind is Kind.ADD:
        return Which.ADDED
    if op.kind is Kind.PARTIALS:
        return Which.WITHOUT_SUMS if op.lane is Lane.HOST else Which.FRESH
    return Which.FRESH if op.name.startswith("download/") else Which.ALL


@dataclass(frozen=True, slots=True)
class Addition:
    """Ranges to be added to totals: those that begin one, and those that go on with one. `last`: partial sums of the
    norm are made as well.
    """

    begin: Set[int]
    go_on: Set[int]
    last: bool


Choice = Set[int] | Addition


@dataclass(frozen=True, slots=True)
class PointWorks:
    """The operations of a point, bound to one choice of ranges: those before the first AdamW, then the rest."""

    schedule: Mapping[str, tuple[Op, ...]]
    asked: Sequence[tuple[int, Which]]
    """What they depend on, by bucket."""
    chosen: list[Choice]
    """The answers."""
    before: Batch
    stepping: Batch | None
