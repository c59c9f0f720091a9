"""Define the schedule of a step as data: operations with a trigger, a lane, operands and waits. No torch.

A schedule says what is issued, when and in which order; it holds no tensor and no address. The step executor binds the
operands to buffers when it runs. Operands are names of the form `role/number` (`gradient/3`, `slot/0`) or `role` alone
(`scalars.device`). A schedule is issued once per training step, trigger by trigger as training reaches them.

A schedule prints and parses back, one operation per line; the key `point` holds the trigger:

    op read/3 point=step kind=copy lane=h2d bucket=3 reads=state/3 writes=slot/1 waits=drain/1 prior=drain/3
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hostward.errors import ConfigError


class Lane(StrEnum):
    """Name an in-order queue of operations: on a GPU a stream, on the host the queue of host functions.

    Lanes run concurrently unless an event orders them.
    """

    __hash__ = str.__hash__  # that of enumerations runs in Python, at every look into a table by lane

    COMPUTE = "compute"
    """Kernels of forward, backward and the device step."""
    D2H = "d2h"
    """Copies from the device to the host: gradients, scalars, offloaded state of streamed buckets."""
    H2D = "h2d"
    """Copies from the host to the device: weights, reloaded state of streamed buckets."""
    HOST = "host"
    """Host functions: AdamW of host buckets. One lane, because the CUDA driver runs host functions one at a time."""
    UPDATE = "update"
    """GPU steps of streamed buckets, which wait for their state and must not delay the next forward."""


class Kind(StrEnum):
    """Name what an operation does; the lane says where."""

    MODEL = "model"
    """The caller's own forward and backward: issued by the caller, listed for the operands that they use."""
    PARTIALS = "partials"
    """Partial sums of the norm over one bucket's gradients."""
    ADD = "add"
    """Gradients of one bucket are accumulated on the host."""
    NORM = "norm"
    """Norm, clip factor and skip flag from all partial sums, into the device scalars."""
    COPY = "copy"
    """A transfer between host and device."""
    ADAMW = "adamw"
    """The step of one bucket: on the GPU (compute or update lane), or on the CPU (host lane)."""
    GUESS = "guess"
    """The step of one bucket on the CPU before the norm is known, into a second set of its state."""
    ACQUIRE = "acquire"
    """Memory for the operands that it writes is allocated; earlier users of that memory ran on the compute lane."""
    RETIRE = "retire"
    """The contents of the operands that it writes are dead from here on; a free counts as a write."""
    JOIN = "join"
    """Later operations of its lane come after what it waits for."""


@dataclass(frozen=True, slots=True)
class Op:
    """Describe one operation, which is issued when training reaches `trigger`.

    An operation waits for all earlier ones of its lane, for `waits` of the same step, and for `prior` of the step
    before.
    """

    name: str
    kind: Kind
    lane: Lane
    trigger: str = "step"
    bucket: int | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    prior: tuple[str, ...] = ()

    def to_text(self) -> str:
        fields = [f"op {self.name}", f"point={self.trigger}", f"kind={self.kind.value}", f"lane={self.lane.value}"]
        if self.bucket is not None:
            fields.append(f"bucket={self.bucket}")
        lists = (("reads", self.reads), ("writes", self.writes), ("waits", self.waits), ("prior", self.prior))
        for key, names in lists:
            if names:
                fields.append(f"{key}={','.join(names)}")
        return " ".join(fields)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hold operations in the order in which they are issued.

    Raises:
        ConfigError: names are not unique, `waits` names an operation that is not issued earlier, or `prior` one that
            does not exist.
    """

    ops: tuple[Op, ...]
    triggers: Mapping[str, tuple[Op, ...]] = field(init=False, repr=False, compare=False)
    """The operations of each trigger, in order of issue; triggers in order of their first operation."""

    def __post_init__(self) -> None:
        everything = {op.name for op in self.ops}
        seen: set[str] = set()
        names: set[str] = set()
        for op in self.ops:
            for name in (op.name, op.trigger, *op.reads, *op.writes):
                if name not in names:
                    if not _NAME.fullmatch(name):
                        raise ConfigError(
                            f"schedule: {name!r} is not a valid name", why="names are letters, digits and ._/-"
                        )
                    names.add(name)
            if op.name in seen:
                raise ConfigError(f"schedule: two operations are named {op.name!r}")
            missing = [*(w for w in op.waits if w not in seen), *(w for w in op.prior if w not in everything)]
            if missing:
                raise ConfigError(f"schedule: {op.name!r} waits for {missing[0]!r}, which is not issued before it")
            seen.add(op.name)
        triggers: dict[str, list[Op]] = {}
        for op in self.ops:
            triggers.setdefault(op.trigger, []).append(op)
        object.__setattr__(self, "triggers", {trigger: tuple(ops) for trigger, ops in triggers.items()})

    @property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    def without_wait(self, name: str, wait: str) -> Schedule:
        """Return the schedule with one wait deleted, for tests of the ordering rule.

        A name `~x` means the wait for `x` of the step before.
        """
        return Schedule(tuple(_without(op, wait) if op.name == name else op for op in self.ops))

    def to_text(self) -> str:
        return "".join(f"{op.to_text()}\n" for op in self.ops)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse the text form of a schedule.

        Raises:
            ConfigError: a line cannot be parsed; the text names the line.
        """
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
    """Return every operand that the operations name."""
    return {name for op in ops for name in (*op.reads, *op.writes)}
