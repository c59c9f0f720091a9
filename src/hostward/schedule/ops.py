"""The schedule of a step as data: operations with a point, a lane, operands and waits. It prints, and parses back.
No torch.

A schedule says what is issued, when and in which order; it holds no tensor and no address. The engine binds its
operands to buffers when it runs. Operands are names of the form `role/number` (`gradient/3`, `slot/0`) or `role` alone
(`scalars.device`). A turn is one training step: a schedule is issued once per turn, point by point as training reaches
them.

The text form, one operation per line:

    op read/3 point=step kind=copy lane=h2d bucket=3 reads=state/3 writes=slot/1 waits=drain/1 prior=drain/3
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hostward.errors import ConfigError


class Lane(StrEnum):
    """An in-order queue of operations. Lanes run side by side unless an event joins them."""

    __hash__ = str.__hash__  # that of enumerations runs in Python, at every look into a table by lane

    COMPUTE = "compute"
    """Kernels of forward, backward and the device step."""
    D2H = "d2h"
    """Copies from the device to the host: gradients, scalars, state of streamed buckets on its way back."""
    H2D = "h2d"
    """Copies from the host to the device: weights, state of streamed buckets."""
    HOST = "host"
    """Host functions: AdamW of host buckets. One lane, because the CUDA driver runs host functions one at a time."""
    UPDATE = "update"
    """Device steps of streamed buckets, which wait for their state and must not hold up the next forward."""


class Kind(StrEnum):
    """What an operation does; the lane says where."""

    MODEL = "model"
    """The caller's own forward and backward: it is issued by the caller, and stands here for what it touches."""
    PARTIALS = "partials"
    """Partial sums of the norm over one bucket's gradients."""
    ADD = "add"
    """Gradients of one bucket are added to their totals on the host."""
    NORM = "norm"
    """Norm, clip factor and skip flag from all partial sums, into the device scalars."""
    COPY = "copy"
    """A transfer between the tiers."""
    ADAMW = "adamw"
    """The step of one bucket: on the compute or the update lane by the device, on the host lane by the host."""
    ACQUIRE = "acquire"
    """Memory for what it writes is taken; whoever used that memory before did so on the compute lane."""
    RETIRE = "retire"
    """The contents of what it writes are dead from here on; a free is a write."""
    JOIN = "join"
    """Whatever the compute lane holds later comes after what this waits for."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, issued when training reaches `point`. Besides all earlier operations of its lane it waits for
    `waits`, of the same turn, and for `prior`, of the turn before.
    """

    name: str
    kind: Kind
    lane: Lane
    point: str = "step"
    bucket: int | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    prior: tuple[str, ...] = ()

    def to_text(self) -> str:
        fields = [f"op {self.name}", f"point={self.point}", f"kind={self.kind.value}", f"lane={self.lane.value}"]
        if self.bucket is not None:
            fields.append(f"bucket={self.bucket}")
        lists = (("reads", self.reads), ("writes", self.writes), ("waits", self.waits), ("prior", self.prior))
        for key, names in lists:
            if names:
                fields.append(f"{key}={','.join(names)}")
        return " ".join(fields)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations in the order in which they are issued. Raises ConfigError unless names are unique, waits point back
    and what is waited for from the turn before exists.
    """

    ops: tuple[Op, ...]
    points: Mapping[str, tuple[Op, ...]] = field(init=False, repr=False, compare=False)
    """The operations of each point, in order of issue; points in order of their first operation."""

    def __post_init__(self) -> None:
        everything = {op.name for op in self.ops}
        seen: set[str] = set()
        names: set[str] = set()
        for op in self.ops:
            for name in (op.name, op.point, *op.reads, *op.writes):
                if name not in names:
                    if not _NAME.fullmatch(name):
                        raise ConfigError(f"schedule: {name!r} is no name", why="names are letters, digits and ._/-")
                    names.add(name)
            if op.name in seen:
                raise ConfigError(f"schedule: two operations are named {op.name!r}")
            missing = [*(w for w in op.waits if w not in seen), *(w for w in op.prior if w not in everything)]
            if missing:
                raise ConfigError(f"schedule: {op.name!r} waits for {missing[0]!r}, which is not issued before it")
            seen.add(op.name)
        points: dict[str, list[Op]] = {}
        for op in self.ops:
            points.setdefault(op.point, []).append(op)
        object.__setattr__(self, "points", {point: tuple(ops) for point, ops in points.items()})

    @property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    def without_wait(self, name: str, wait: str) -> Schedule:
        """The same with one wait deleted: what tests of the ordering rule do. `~x` names a wait of the turn before."""
        return Schedule(tuple(_without(op, wait) if op.name == name else op for op in self.ops))

    def to_text(self) -> str:
        return "".join(f"{op.to_text()}\n" for op in self.ops)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse `to_text`. Raises ConfigError that names the line."""
        lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
        return cls(tuple(_parse(n, line) for n, line in lines if line and not line.startswith("#")))


_NAME = re.compile(r"[\w./-]+")
_FIELDS = {"point", "kind", "lane", "bucket", "reads", "writes", "waits", "prior"}


def _without(op: Op, wait: str) -> Op:
    if wait.startswith("~"):
        return replace(op, prior=tuple(w for w in op.prior if w != wait[1:]))
    return replace(op, waits=tuple(w for w in op.waits if w != wait))


def _parse(number: int, line: str) -> Op:
    words = line.split()
    if len(words) < 2 or words[0] != "op":
        raise ConfigError(f"schedule, line {number}: expected 'op NAME ...', got {line!r}")
    fields: dict[str, str] = {}
    for word in words[2:]:
        key, separator, value = word.partition("=")
        if not separator or not value or key not in _FIELDS or key in fields:
            raise ConfigError(
                f"schedule, line {number}: cannot read {word!r}",
                fix=f"each of {', '.join(sorted(_FIELDS))} at most once",
            )
        fields[key] = value
    try:
        kind, lane = Kind(fields["kind"]), Lane(fields["lane"])
        bucket = int(fields["bucket"]) if "bucket" in fields else None
    except (KeyError, ValueError) as error:
        raise ConfigError(f"schedule, line {number}: {error}", fix="kind=... lane=... [bucket=NUMBER]") from error
    lists = (_names(fields.get(key)) for key in ("reads", "writes", "waits", "prior"))
    return Op(words[1], kind, lane, fields.get("point", "step"), bucket, *lists)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def operands(ops: Iterable[Op]) -> set[str]:
    """Every operand that the operations name."""
    return {name for op in ops for name in (*op.reads, *op.writes)}
