"""The schedule of a step as data: operations with a lane, operands and waits. It prints, and parses back. No torch.
 A schedule says what is issued and in which order; it holds no tensor and no address. The engine binds its operands
to buffers when it runs. Operands are names of the form `role/bucket` (`gradient/3`, `landing/3`) or `role` alone
(`scalars.device`).

The text form, one operation per line:

    op step/3 kind=adamw lane=host bucket=3 reads=landing/3,scalars.host writes=state/3,upload/3 waits=fetch,gradient/3
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from .errors import ConfigError


class Lane(StrEnum):
    """An in-order queue of operations. Lanes run side by side unless an event joins them."""

    COMPUTE = "compute"
    """Kernels of forward, backward and the device step."""
    D2H = "d2h"
    """Copies from the device to the host: gradients and scalars."""
    H2D = "h2d"
    """Copies from the host to the device: weights."""
    HOST = "host"
    """Host functions: AdamW of host buckets. One lane, because the CUDA driver runs host functions one at a time."""


class Kind(StrEnum):
    """What an operation does; the lane says where."""

    MODEL = "model"
    """The caller's own forward and backward: it is issued by the caller, and stands here for what it touches."""
    NORM = "norm"
    """Norm, clip factor and skip flag of all gradients, into the device scalars."""
    COPY = "copy"
    """A transfer between the tiers."""
    ADAMW = "adamw"
    """The step of one bucket, on the compute lane or on the host lane."""
    RETIRE = "retire"
    """The contents of what it writes are dead from here on; a free is a write."""
    JOIN = "join"
    """Whatever the compute lane holds later comes after what this waits for."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `waits` names operations whose completion it waits for, besides all earlier ones of its lane."""

    name: str
    kind: Kind
    lane: Lane
    bucket: int | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()

    def to_text(self) -> str:
        fields = [f"op {self.name}", f"kind={self.kind.value}", f"lane={self.lane.value}"]
        if self.bucket is not None:
            fields.append(f"bucket={self.bucket}")
        for key, names in (("reads", self.reads), ("writes", self.writes), ("waits", self.waits)):
            if names:
                fields.append(f"{key}={','.join(names)}")
        return " ".join(fields)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations in the order in which they are issued. Raises ConfigError unless names are unique and waits point
    back.
    """

    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for op in self.ops:
            for name in (op.name, *op.reads, *op.writes):
                if not _NAME.fullmatch(name):
                    raise ConfigError(f"schedule: {name!r} is no name", why="names are letters, digits and ._/-")
            if op.name in seen:
                raise ConfigError(f"schedule: two operations are named {op.name!r}")
            missing = [w for w in op.waits if w not in seen]
            if missing:
                raise ConfigError(f"schedule: {op.name!r} waits for {missing[0]!r}, which is not issued before it")
            seen.add(op.name)

    @property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    def without_wait(self, name: str, wait: str) -> Schedule:
        """The same with one wait deleted: what tests of the ordering rule do."""
        return Schedule(
            tuple(
                Op(o.name, o.kind, o.lane, o.bucket, o.reads, o.writes, tuple(w for w in o.waits if w != wait))
                if o.name == name
                else o
                for o in self.ops
            )
        )

    def to_text(self) -> str:
        return "".join(f"{op.to_text()}\n" for op in self.ops)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse `to_text`. Raises ConfigError that names the line."""
        lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
        return cls(tuple(_parse(n, line) for n, line in lines if line and not line.startswith("#")))


_NAME = re.compile(r"[\w./-]+")
_FIELDS = {"kind", "lane", "bucket", "reads", "writes", "waits"}


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
    return Op(words[1], kind, lane, bucket, *(_names(fields.get(key)) for key in ("reads", "writes", "waits")))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def operands(ops: Iterable[Op]) -> set[str]:
    """Every operand that the operations name."""
    return {name for op in ops for name in (*op.reads, *op.writes)}
