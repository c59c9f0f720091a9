"""Counts what a reader of the README has to take in: size, words, numbers and the longest sentence.

    python scripts/readme_figures.py [README.md]

Ends with exit code 1 where a figure is above its limit. The limits are there so that ten minutes are enough for the
page; whatever does not fit belongs into `docs/`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
KIB = 1024


@dataclass(frozen=True)
class Figures:
    """What is counted of one page."""

    kib: float
    """Size of the file in KiB."""
    words: int
    """Words in the whole file, code and tables included; marks without a letter or digit are none."""
    numbers: int
    """Words of prose and tables that begin with a digit, such as 1.42 or 8K. H100 and `1.0` in code are none."""
    longest_sentence: int
    """Words of the longest sentence of the prose, a cell of a table counting as one."""


LIMITS = Figures(kib=8, words=900, numbers=25, longest_sentence=30)


def figures_of(text: str) -> Figures:
    """Count one page of Markdown."""
    prose = prose_of(text)
    return Figures(
        kib=len(text.encode()) / KIB,
        words=len(words_of(text)),
        numbers=sum(word[0].isdigit() for word in words_of(prose)),
        longest_sentence=max((len(words_of(sentence)) for sentence in sentences_of(prose)), default=0),
    )


def prose_of(text: str) -> str:
    """Return the page without blocks of code, code within a line, and targets of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def words_of(text: str) -> list[str]:
    """Return the words, without the marks around them."""
    words = (re.sub(r"^[^\w]+|[^\w]+$", "", word) for word in text.split())
    return [word for word in words if word]


def sentences_of(prose: str) -> list[str]:
    """Return the sentences; headings, items of lists, cells and paragraphs end one."""
    lines = re.sub(r"\n(?=[-#|>*])|\n\s*\n", "\n\n", prose)
    parts = [part for block in re.split(r"\n\s*\n", lines) for part in re.split(r"[|·]", block)]
    return [sentence for part in parts for sentence in re.split(r"(?<=[.!?])\s", part)]


def main() -> int:
    """Print each figure beside its limit."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else README
    found = figures_of(path.read_text(encoding="utf-8"))
    above = 0
    for name, limit in vars(LIMITS).items():
        value = getattr(found, name)
        above += value > limit
        print(f"{name.replace('_', ' '):16} {value:6.4g} of {limit}{'  TOO MUCH' if value > limit else ''}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
