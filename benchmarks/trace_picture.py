"""A trace as a picture: one row per lane over a time axis, as one self-contained SVG.

    python benchmarks/trace_picture.py TRACE.json OUT.svg --step 3 --title "1.7 B parameters, all state offloaded"

On the compute row, forward and backward of each layer are grey, and red is where the GPU was idle.
With `--step N` the time axis is cut to the spans of step N; what other steps did meanwhile is drawn paler. The last
lines sum up the steps shown.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hostward.errors import HostwardError
from hostward.report import svg
from hostward.report.svg import BACKWARD, FORWARD, LANES, STATE_COPY, Window, boxes_of, phases, style_of, window_of
from hostward.runtime.step_trace import Span, SpanKind, Trace, from_chrome
from hostward.schedule.ops import Lane

# Pixels.
WIDTH = 1000
LEFT, RIGHT = 152, 888
ROW, GAP = 34, 12
TOP = 96
MARGIN = 16
NARROWEST = 0.5
TEXT = 11
LETTER = 0.56
"""Width of a letter, as a share of the size of the text: an upper bound of the mean of usual fonts."""

# Fill by style.
STYLES = {
    FORWARD: "#c9ced6",
    BACKWARD: "#98a1ae",
    SpanKind.COPY.value: "#3b7dc4",
    STATE_COPY: "#274b7a",
    SpanKind.HOST.value: "#e39a2d",
    SpanKind.KERNEL.value: "#3f9b63",
    SpanKind.WAIT.value: "#d7263d",
}
INK, FAINT, LINE, BAND, PAPER = "#1f2933", "#5f6b7a", "#e3e7ec", "#f6f8fa", "#ffffff"
PALE = 0.4


def x_of(time_s: float, window: Window) -> float:
    return LEFT + window.share(time_s) * (RIGHT - LEFT)


def draw(trace: Trace, step: int | None, title: str) -> str:
    """The whole SVG. Raises ConfigError for a trace without spans, or without that step."""
    window = window_of(trace, step)
    shown = svg.spans_in(trace, window)
    used = svg.lanes_of(shown)
    bottom = TOP + len(used) * (ROW + GAP)
    lines = trace.summary(None if step is None else [step]).explain().splitlines()
    height = bottom + 44 + 17 * len(lines) + MARGIN // 2
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        rectangle(0, 0, WIDTH, height, PAPER),
        text(MARGIN, 28, shortened(title, WIDTH - 2 * MARGIN, 16), size=16, weight="bold"),
        *legend(shown, step),
        *axis(window, bottom),
    ]
    for row, lane in enumerate(used):
        spans = [span for span in shown if span.lane is lane]
        parts += row_of(lane, spans, window, step, TOP + row * (ROW + GAP))
    parts += [text(MARGIN, bottom + 48 + 17 * n, line, size=12, fill=FAINT) for n, line in enumerate(lines)]
    return "\n".join([*parts, "</svg>\n"])


def row_of(lane: Lane, spans: Sequence[Span], window: Window, step: int | None, y: float) -> Iterator[str]:
    """Label, band, rectangles and sums of one lane."""
    yield text(MARGIN, y + 14, lane.value, size=12, weight="bold")
    yield text(MARGIN, y + 28, LANES.get(lane.value, ""), fill=FAINT)
    yield rectangle(LEFT, y, RIGHT - LEFT, ROW, BAND)
    for box in boxes_of(spans, window, step, narrow_s=NARROWEST / (RIGHT - LEFT) * window.length_s):
        left = x_of(box.start_s, window)
        width = max(x_of(box.end_s, window) - left, NARROWEST)
        x = min(left, RIGHT - width)
        inset = 4 if box.style == SpanKind.KERNEL.value and lane is Lane.COMPUTE else 0
        yield rectangle(x, y + inset, width, ROW - 2 * inset, STYLES[box.style], label=box.label, pale=box.pale)
    if lane is Lane.COMPUTE:
        yield from phase_labels(spans, window, y)
    yield from sums(lane, spans, step, y)


def phase_labels(spans: Sequence[Span], window: Window, y: float) -> Iterator[str]:
    """The words forward and backward above their stretches, where they fit."""
    for phase in phases(spans):
        word, left, right = style_of(phase), x_of(phase.start_s, window), x_of(phase.end_s, window)
        yield rectangle(left, y - 6, max(right - left - 1, NARROWEST), 3, STYLES[word])
        if right - left >= len(word) * TEXT * LETTER:
            yield text((left + right) / 2, y - 10, word, anchor="middle")


def sums(lane: Lane, spans: Sequence[Span], step: int | None, y: float) -> Iterator[str]:
    """Right of a row: how long the lane worked for the step, and its rate; for compute, how long it was idle."""
    seconds, nbytes = svg.sums(lane, spans, step)
    if lane is Lane.COMPUTE:
        yield text(RIGHT + 10, y + 14, "GPU idle")
        yield text(RIGHT + 10, y + 28, f"{seconds * 1e3:.1f} ms", fill=STYLES["wait"] if seconds else INK)
        return
    yield text(RIGHT + 10, y + 14, f"busy {seconds * 1e3:.1f} ms")
    if nbytes and seconds:
        yield text(RIGHT + 10, y + 28, f"{nbytes / seconds / 1e9:.1f} GB/s", fill=FAINT)


def legend(shown: Sequence[Span], step: int | None) -> Iterator[str]:
    """One line of swatches, for what is in the picture."""
    styles = {style_of(span) for span in shown}
    entries = [(fill, svg.WORDS[style], False) for style, fill in STYLES.items() if style in styles]
    if step is not None and any(span.step != step for span in shown):
        entries.append((STYLES[BACKWARD], "paler: another step", True))
    x: float = MARGIN
    for fill, word, pale in entries:
        yield rectangle(x, 44, 12, 12, fill, pale=pale)
        yield text(x + 18, 54, word)
        x += 18 + len(word) * TEXT * LETTER + 14


def axis(window: Window, bottom: float) -> Iterator[str]:
    """Grid and labels in milliseconds from the left edge, at multiples of 1, 2 or 5 of a power of ten."""
    length_ms = max((window.end_s - window.start_s) * 1e3, 1e-6)
    marks = svg.ticks(length_ms, 10)
    decimals = max(0, -math.floor(math.log10(marks[1]) + 1e-9)) if len(marks) > 1 else 0
    for mark in marks:
        x = LEFT + mark / length_ms * (RIGHT - LEFT)
        yield f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 8}" y2="{bottom + 2}" stroke="{LINE}"/>'
        yield text(x, bottom + 16, f"{mark:.{decimals}f}", anchor="middle", fill=FAINT)
    yield text(RIGHT + 32, bottom + 16, "ms", fill=FAINT)


def rectangle(
    x: float, y: float, width: float, height: float, fill: str, *, label: str = "", pale: bool = False
) -> str:
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"'
    if label and width >= 3:
        shape += f' stroke="{PAPER}" stroke-width="0.6"'
    if pale:
        shape += f' opacity="{PALE}"'
    return f"{shape}><title>{escape(label)}</title></rect>" if label else f"{shape}/>"


def text(
    x: float, y: float, words: str, *, size: int = TEXT, fill: str = INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(words)}</text>'
    )


def shortened(words: str, width: float, size: int) -> str:
    letters = int(width / (size * LETTER))
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


def escape(words: str) -> str:
    """Text for XML, which has no way to write most control characters."""
    return html.escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", words))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE.json")
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.add_argument("--step", type=int, help="show this step alone; default: all steps of the trace")
    parser.add_argument("--title", help="default: the name of the trace and the step")
    given = parser.parse_args(arguments)
    title = given.title or given.trace.stem + ("" if given.step is None else f", step {given.step}")
    try:
        picture = draw(from_chrome(given.trace), given.step, title)
    except HostwardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    try:
        given.out.write_text(picture, encoding="utf-8")
    except OSError as error:
        print(f"{given.out} cannot be written\n  why: {error.strerror}\n  fix: name another file", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
