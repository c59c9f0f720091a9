"""Known failures in a log or traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .failures import Breadth, Failure
from .failures_at_run import FAILURES
from .finding import Severity
from .numbers import numbers

if TYPE_CHECKING:
    from rich.table import Table

_BEFORE, _AFTER = 40, 20
"""Lines around a match that count as near: tracebacks come before their message."""
_PIECE_CHARACTERS, _OVERLAP_CHARACTERS = 4000, 400
_SHOWN_CHARACTERS = 700
"""Enough for torch's message of a full GPU, whose numbers come last."""
_GRAVEST = tuple(Severity)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Recognised:
    """A known failure, and the first line that shows it and nothing narrower."""

    failure: Failure
    line_number: int
    line: str

    @property
    def numbers(self) -> str:
        """What the numbers of that line come to; empty where it has none that are known."""
        return numbers(self.line)


def recognise(lines: Iterable[str], failures: Sequence[Failure] = FAILURES) -> list[Recognised]:
    """The known failures that `lines` show, the narrowest first, then the gravest, then in the order of the log.

    A line that shows a narrow failure does not count for a wider one.
    """
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
    """(number, text) of lines without colours. What a progress bar overwrote stands alone; a line without end comes
    in pieces, each with the start of the next.
    """
    for number, line in enumerate(lines, start=1):
        for text in _ESCAPES.sub("", line).rstrip("\r\n").split("\r"):
            for start in range(0, max(1, len(text)), _PIECE_CHARACTERS):
                yield number, text[start : start + _PIECE_CHARACTERS + _OVERLAP_CHARACTERS]


def _hits(pattern: str, texts: Sequence[str]) -> list[int]:
    search = re.compile(pattern).search
    return [i for i, text in enumerate(texts) if search(text)]


def _near(failure: Failure, hits: Sequence[int], texts: Sequence[str]) -> Sequence[int]:
    """Those hits that have the failure's context around them."""
    if not failure.near:
        return hits
    search = re.compile(failure.near).search
    return [i for i in hits if any(search(text) for text in texts[max(0, i - _BEFORE) : i + _AFTER + 1])]


def is_bad(found: Sequence[Recognised]) -> bool:
    """Whether one of them is more than a remark."""
    return any(recognised.failure.severity is Severity.ERROR for recognised in found)


def to_dict(found: Sequence[Recognised]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {"recognised": [_plain(recognised) for recognised in found]}


def _plain(recognised: Recognised) -> dict[str, Any]:
    fields = asdict(recognised)
    more = {"breadth": recognised.failure.breadth.name.lower(), "numbers": recognised.numbers}
    return {**fields.pop("failure"), **fields, **more}


NOTHING = "nothing in this log is a failure that hostward knows"


def render(found: Sequence[Recognised]) -> list[Table]:
    """Tables for a terminal, one for each failure."""
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
