"""Each operation runs over a selection of ranges of its bucket.

This module makes that selection. It also binds the operations of a trigger to one such choice, and maps parameters to
ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto

from hostward.optim.bucket_state import BucketState, pieces
from hostward.runtime.backend import Batch, Work
from hostward.schedule.ops import Kind, Lane, Op
from hostward.schedule.optimizer import grads_to_copy_out


class Which(Enum):
    """Members name selections of ranges, which are evaluated anew at every issue."""

    ALL = auto()
    """Ranges with a gradient in this step; in the step before, if the bucket has none yet."""
    UNSENT = auto()
    """Ranges whose gradient has not been offloaded yet."""
    ADDED = auto()
    """Ranges whose gradient is being accumulated on the host: an `Addition`."""
    STEPPED = auto()
    """Ranges of ALL and, where the bucket has two sets of its state, a `Stepping`."""
    GUESSED = auto()
    """All ranges, as a `Stepping`, if the step of the bucket can be guessed; else none."""
    WITHOUT_SUMS = auto()
    """Ranges whose sum has changed since its partial sums of the norm were made."""


def which(op: Op) -> Which:
    """Return the selection of ranges that an operation of a bucket is over."""
    if op.kind is Kind.ADD:
        return Which.ADDED
    if op.kind is Kind.PARTIALS:
        return Which.WITHOUT_SUMS if op.lane is Lane.HOST else Which.UNSENT
    if op.kind is Kind.GUESS:
        return Which.GUESSED
    if op.kind is Kind.ADAMW or op.name.startswith("upload/"):
        return Which.STEPPED
    return Which.UNSENT if op.name.startswith("download/") else Which.ALL


@dataclass(frozen=True, slots=True)
class Addition:
    """Addition holds the ranges to accumulate: those that begin a sum, and those that continue one.

    With `last`, partial sums of the norm are made as well.
    """

    begin: Set[int]
    go_on: Set[int]
    last: bool


@dataclass(frozen=True, slots=True)
class Stepping:
    """Stepping holds the ranges to step, and where their new state is.

    `turn` tells apart which of the bucket's two sets holds the state. With `guessed` the new state goes to the other.
    """

    ranges: Set[int]
    turn: bool
    guessed: bool


Choice = Set[int] | Addition | Stepping


@dataclass(frozen=True, slots=True)
class PointWorks:
    """PointWorks holds a trigger's operations for one choice of ranges: those before the first AdamW, then the rest."""

    schedule: Mapping[str, tuple[Op, ...]]
    asked: Sequence[tuple[int, Which]]
    """Selections that the operations depend on, by bucket."""
    chosen: list[Choice]
    """Ranges selected, one entry for each of `asked`."""
    before: Work | Batch
    stepping: Work | Batch | None


# Where parameters are stored.


Part = tuple[int, int, slice | None]
"""Bucket, range, and which elements of the parameter that range is; None: all."""


@dataclass(frozen=True, slots=True)
class BucketMap:
    """BucketMap says which parameters are stored in which ranges of which buckets."""

    parts: Mapping[str, Sequence[Part]]
    """Parts by name of the parameter."""
    names: Sequence[tuple[str, ...]]
    """Parameters in each bucket."""
    sources: Sequence[Sequence[tuple[str, slice | None]]]
    """Parameter name and which elements of it, by bucket and range; None: all."""
    copied_out: frozenset[int]
    """Buckets whose gradients are copied out of the memory in which a backward has made them."""


def bucket_map(
    states: Sequence[BucketState],
    names: Iterable[str],
    together: Iterable[Sequence[str]],
    *,
    overlap: bool,
) -> BucketMap:
    """Return the map of these buckets and parameters; this process may have no part of a sharded parameter.

    Args:
        together: names of parameters whose gradients are made in one memory, for each such memory.
        overlap: gradients are offloaded during backward.
    """
    index = {state: b for b, state in enumerate(states)}
    parts: dict[str, list[Part]] = {
        name: [(index[s], i, slice(r.start, r.stop) if len(held) > 1 else None) for s, i, r in held]
        for name, held in (dict.fromkeys(names, ()) | pieces(states)).items()
    }
    sources: list[list[tuple[str, slice | None]]] = [[("", None)] * len(s.bucket.ranges) for s in states]
    for name, held in parts.items():
        for b, i, span in held:
            sources[b][i] = name, span
    memories = [{b for name in made for b, *_ in parts[name]} for made in together]
    copied_out = grads_to_copy_out([s.placement for s in states], memories) if overlap else frozenset[int]()
    in_bucket = [tuple(dict.fromkeys(r.name for r in s.bucket.ranges)) for s in states]
    return BucketMap(parts, in_bucket, sources, copied_out)
