"""Time against peak memory of the rows of activations.py, as one self-contained SVG.

    python benchmarks/activation_picture.py OUT.svg benchmarks/results/DATE-activations-8k.json ... --title "8 K tokens"

Files of one job may be given together; a row that is in several is drawn once. A line joins the rows that no other row
beats in both time and memory; those of other libraries are not on it.
"""

from __future__ import annotations

import argparse
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

GIB = 1 << 30
# Pixels.
WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 660, 56, 360
GLYPH = 5.4
OTHERS = {"trl": "TRL", "torchtune": "torchtune", "save_on_cpu": "torch save_on_cpu"}
"""Rows of other libraries, and what they are called."""
INK, FAINT, LINE, PAPER, BEST, OTHER = "#1f2933", "#5f6b7a", "#e3e7ec", "#ffffff", "#3b7dc4", "#98a1ae"


@dataclass(frozen=True)
class Point:
    """A row: its name, GiB at the device's peak, milliseconds."""

    name: str
    gib: float
    ms: float


def points_of(files: Sequence[Path]) -> list[Point]:
    """Rows that were measured, each name once."""
    found: dict[str, Point] = {}
    for path in files:
        for row in json.loads(path.read_text())["rows"]:
            if row["status"] == "ok" and row["row"] not in found:
                found[row["row"]] = Point(row["row"], row["device_peak_bytes"] / GIB, row["step_s"] * 1e3)
    return list(found.values())


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """Those that need less memory or less time than any other, by memory."""
    best = [p for p in points if not any(q.gib <= p.gib and q.ms <= p.ms and q != p for q in points)]
    return sorted(best, key=lambda p: p.gib)


def ticks(least: float, most: float) -> list[float]:
    """Round numbers around the values, at least two."""
    step = 10.0 ** math.floor(math.log10(max(most - least, 1e-9)))
    step = next(step * f for f in (0.2, 0.5, 1.0) if (most - least) / (step * f) <= 8 or f == 1.0)
    first, last = math.floor(least / step), math.ceil(most / step)
    return [i * step for i in range(first, last + 1)]


def svg(points: Sequence[Point], title: str) -> str:
    across, up = ticks(0.0, max(p.gib for p in points)), ticks(min(p.ms for p in points), max(p.ms for p in points))

    def x(gib: float) -> float:
        return LEFT + (RIGHT - LEFT) * (gib - across[0]) / (across[-1] - across[0])

    def y(ms: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (ms - up[0]) / (up[-1] - up[0])

    def text(at_x: float, at_y: float, words: str, *, anchor: str = "start", size: int = 12, fill: str = INK) -> str:
        style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" {style}>{html.escape(words)}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float) -> str:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        return f'<line {ends} stroke="{stroke}" stroke-width="{width}"/>'

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>', text(LEFT, 28, title, size=15)]
    for gib in across:
        parts.append(line(x(gib), TOP, x(gib), BOTTOM, LINE, 1))
        parts.append(text(x(gib), BOTTOM + 18, f"{gib:g}", anchor="middle", fill=FAINT))
    for ms in up:
        parts.append(line(LEFT, y(ms), RIGHT, y(ms), LINE, 1))
        parts.append(text(LEFT - 8, y(ms) + 4, f"{ms:g}", anchor="end", fill=FAINT))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, "GiB at the device's peak", anchor="middle", fill=FAINT))
    parts.append(text(LEFT, TOP - 10, "ms for forward and backward", fill=FAINT))
    best = unbeaten([p for p in points if p.name not in OTHERS])
    parts += [line(x(p.gib), y(p.ms), x(q.gib), y(q.ms), BEST, 2) for p, q in pairwise(best)]
    for p in points:
        parts.append(f'<circle cx="{x(p.gib):.1f}" cy="{y(p.ms):.1f}" r="5" fill="{BEST if p in best else OTHER}"/>')
    # Those on the line first; a label that finds no room nearby is left out.
    taken: list[tuple[float, float, float]] = [(x(p.gib) - 5, x(p.gib) + 5, y(p.ms) + 4) for p in points]
    for p in [*reversed(best), *(p for p in points if p not in best)]:
        words = f"{OTHERS.get(p.name, p.name)}: {p.ms:.0f} ms, {p.gib:.1f} GiB"
        start, end = x(p.gib) + 9, x(p.gib) + 9 + GLYPH * len(words)
        for at_y in (y(p.ms) + shift for shift in (4, -6, -14, 14, 24, -24)):
            if all(start > right or end < left or abs(at_y - other) > 11 for left, right, other in taken):
                taken.append((start, end, at_y))
                parts.append(text(start, at_y, words, size=11))
                break
    head = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
    return f"<svg {head}>\n" + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--title", default="Time against memory")
    arguments = parser.parse_args()
    points = points_of(arguments.files)
    if not points:
        parser.error("no row of these files was measured")
    arguments.out.write_text(svg(points, arguments.title))


if __name__ == "__main__":
    main()
