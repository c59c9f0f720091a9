"""Find known failures of training with offloading in a log or traceback.

`known_failures.toml` lists them.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostward.core.full_device import IN_PIECES, OF_TORCH, SIZE, bytes_of
from hostward.core.units import GIB, size
from hostward.doctor import Severity

if TYPE_CHECKING:
    from rich.table import Table

_TABLE = Path(__file__).with_name("known_failures.toml")
_BEFORE, _AFTER = 40, 20
"""Lines around a match that count as near: tracebacks come before their message."""
_PIECE_CHARACTERS, _OVERLAP_CHARACTERS = 4000, 400
_SHOWN_CHARACTERS = 700
"""Enough for torch's message of a full GPU, whose numbers come last."""
_GRAVEST = tuple(Severity)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")


class Breadth(IntEnum):
    """Grades how much a pattern says about the cause."""

    EXACT = 0
    """The text has one cause."""
    CONTEXT = 1
    """The text has many causes, and lines near it identify this one."""
    GENERAL = 2
    """The text has many causes."""
    CONSEQUENCE = 3
    """Something else came first, in this log or in that of another rank."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Holds one known failure; patterns are regular expressions, in lower case, over single lines in lower case."""

    name: str
    pattern: str
    what: str
    why: str
    fix: str
    source: str
    """Public threads that report it, or the guide that lists it."""
    breadth: Breadth = Breadth.EXACT
    near: str = ""
    """Pattern for CONTEXT, which matches one of the lines around."""
    severity: Severity = Severity.ERROR


@functools.cache
def known_failures() -> tuple[Failure, ...]:
    """Return all known failures in the order of the table, narrow patterns before wide ones."""
    entries = tomllib.loads(_TABLE.read_text(encoding="utf-8"))["failure"]
    return tuple(_failure(**entry) for entry in entries)


def _failure(breadth: str = "exact", severity: str = "error", **texts: str) -> Failure:
    return Failure(breadth=Breadth[breadth.upper()], severity=Severity(severity), **texts)


@dataclass(frozen=True, slots=True)
class Recognised:
    """Holds a known failure, and the first line that shows it and nothing narrower."""

    failure: Failure
    line_number: int
    line: str

    @property
    def numbers(self) -> str:
        """Return the explanation of that line's numbers; empty if it has none that are known."""
        return numbers(self.line)


def recognise(lines: Iterable[str]) -> list[Recognised]:
    """Return the known failures that `lines` show, the narrowest first, then the gravest, then in the order of the log.

    A line that shows a narrow failure does not count for a wider one.
    """
    failures = known_failures()
    numbered = list(_pieces(lines))
    lowered = [text.lower() for _, text in numbered]
    hits = {pattern: _hits(pattern, lowered) for pattern in {failure.pattern for failure in failures}}
    matches = {failure.name: _near(failure, hits[failure.pattern], lowered) for failure in failures}
    found: list[tuple[Breadth, int, int, Recognised]] = []
    taken: set[int] = set()
    for breadth in Breadth:
        here: set[int] = set()
        for failure in failures:
            if failure.breadth is not breadth:
                continue
            left = [i for i in matches[failure.name] if i not in taken]
            here.update(left)
            if left:
                number, text = numbered[left[0]]
                shown = Recognised(failure, number, text.strip()[:_SHOWN_CHARACTERS])
                found.append((breadth, _GRAVEST.index(failure.severity), number, shown))
        taken |= here
    return [recognised for *_, recognised in sorted(found, key=lambda row: row[:3])]


def _pieces(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of lines without colours.

    Text that a progress bar overwrote is a line of its own; a line without end comes in pieces, each with the start of
    the next.
    """
    for number, line in enumerate(lines, start=1):
        for text in _ESCAPES.sub("", line).rstrip("\r\n").split("\r"):
            for start in range(0, max(1, len(text)), _PIECE_CHARACTERS):
                yield number, text[start : start + _PIECE_CHARACTERS + _OVERLAP_CHARACTERS]


def _hits(pattern: str, texts: Sequence[str]) -> list[int]:
    search = re.compile(pattern).search
    return [i for i, text in enumerate(texts) if search(text)]


def _near(failure: Failure, hits: Sequence[int], texts: Sequence[str]) -> Sequence[int]:
    """Return those hits that have the failure's context around them."""
    if not failure.near:
        return hits
    search = re.compile(failure.near).search
    return [i for i in hits if any(search(text) for text in texts[max(0, i - _BEFORE) : i + _AFTER + 1])]


def is_bad(found: Sequence[Recognised]) -> bool:
    """Return whether one of the failures is worse than a note."""
    return any(recognised.failure.severity is Severity.ERROR for recognised in found)


def to_dict(found: Sequence[Recognised]) -> dict[str, Any]:
    """Return plain values, for JSON."""
    return {"recognised": [_plain(recognised) for recognised in found]}


def _plain(recognised: Recognised) -> dict[str, Any]:
    fields = asdict(recognised)
    more = {"breadth": recognised.failure.breadth.name.lower(), "numbers": recognised.numbers}
    return {**fields.pop("failure"), **fields, **more}


NOTHING = "nothing in this log is a failure that hostward knows"


def render(found: Sequence[Recognised]) -> list[Table]:
    """Return tables for the terminal, one for each failure."""
    from rich.table import Table
    from rich.text import Text

    tables = []
    for recognised in found:
        failure = recognised.failure
        table = Table(title=failure.name, show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        rows = {
            f"line {recognised.line_number}": recognised.line,
            **({"numbers": recognised.numbers} if recognised.numbers else {}),
            "what": failure.what,
            "why": failure.why,
            "fix": failure.fix,
            "known from": failure.source,
        }
        for name, value in rows.items():
            table.add_row(Text(name), Text(value))
        tables.append(table)
    return tables


# Explaining the numbers in a message on memory.


_OF_OLDER_TORCH = re.compile(
    rf"tried to allocate {SIZE} \(gpu \d+; {SIZE} total capacity; {SIZE} already allocated; {SIZE} free; "
    rf"{SIZE} (?:reserved in total by pytorch|cached)\)"
)
_OF_OTHERS = re.compile(rf"process \d+ has {SIZE} memory in use")
_ALLOCATED = re.compile(rf"{SIZE} is allocated by pytorch")
_OF_HOSTWARD = re.compile(
    r"([\d,.]+) (bytes|b|[kmg]ib) of (host|device) memory(?: asked)?, "
    r"(?:and )?([\d,.]+)(?: (bytes|b|[kmg]ib))? (?:are )?available"
)
_CONTEXT_BYTES = GIB
"""Bytes of a process on the GPU besides torch's allocations, at most."""


def numbers(line: str) -> str:
    """Explain what was requested, what was free, and who has the rest; empty for a line without such numbers."""
    lowered = line.lower()
    if (found := OF_TORCH.search(lowered)) is not None:
        asked, capacity, free = (bytes_of(*found.group(i, i + 1)) for i in (1, 3, 5))
        told = [f"asked {size(asked)} where {size(free)} of {size(capacity)} were free"]
        told += _told(_ALLOCATED, lowered, "torch's tensors take {}")
        told += _told(IN_PIECES, lowered, "torch keeps {} besides, in pieces")
        # In a container torch does not know its own number, and names itself as if it were another.
        if sum(_sum(pattern, lowered) for pattern in (_ALLOCATED, IN_PIECES, _OF_OTHERS)) <= capacity:
            told += _told(_OF_OTHERS, lowered, "other processes have {}")
        return "; ".join(told)
    if (found := _OF_OLDER_TORCH.search(lowered)) is not None:
        asked, capacity, taken, free, reserved = (bytes_of(*found.group(i, i + 1)) for i in range(1, 10, 2))
        told = [f"asked {size(asked)} where {size(free)} of {size(capacity)} were free"]
        told.append(f"torch's tensors take {size(taken)}")
        if reserved > taken:
            told.append(f"torch keeps {size(reserved - taken)} besides, in pieces")
        if (others := capacity - free - reserved) > _CONTEXT_BYTES:
            told.append(f"other processes, and what torch does not count, have {size(others)}")
        return "; ".join(told)
    if (found := _OF_HOSTWARD.search(lowered)) is not None:
        asked, there = bytes_of(*found.group(1, 2)), bytes_of(found.group(4), found.group(5) or "bytes")
        return f"{size(asked)} of {found.group(3)} memory asked, {size(there)} there: {size(asked - there)} too few"
    return ""


def _told(pattern: re.Pattern[str], line: str, text: str) -> list[str]:
    total = _sum(pattern, line)
    return [text.format(size(total))] if total else []


def _sum(pattern: re.Pattern[str], line: str) -> int:
    return sum(bytes_of(number, unit) for number, unit in pattern.findall(line))
