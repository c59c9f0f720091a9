"""A trace as a picture: one row per lane over a time axis, as one self-contained SVG.

    python benchmarks/trace_picture.py TRACE.json OUT.svg --step 3 --title "1.7 B parameters, all state offloaded"

On the compute row, forward and backward of each layer are grey, and red is where the lane stood still for an arrival.
With `--step N` the time axis is cut to the spans of step N; what other steps did meanwhile is drawn paler. The last
lines sum up the steps shown.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hostward.engine.trace import Span, SpanKind, Trace, from_chrome, union_s
from hostward.errors import ConfigError, HostwardError
from hostward.schedule import Lane

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

# What a lane is for; the rows come in this order, other lanes after them.
LANES = {
    "compute": "the GPU's own work",
    "d2h": "GPU to host",
    "host": "AdamW on the CPU",
    "h2d": "host to GPU",
    "update": "AdamW on the GPU",
}

FORWARD, BACKWARD, STATE = "forward", "backward", "state"
# Fill by style; drawn in this order, later over earlier.
STYLES = {
    FORWARD: ("#c9ced6", "forward of a layer"),
    BACKWARD: ("#98a1ae", "backward of a layer"),
    SpanKind.COPY.value: ("#3b7dc4", "copy"),
    STATE: ("#274b7a", "copy of state"),
    SpanKind.HOST.value: ("#e39a2d", "AdamW, host"),
    SpanKind.KERNEL.value: ("#3f9b63", "kernel"),
    SpanKind.WAIT.value: ("#d7263d", "wait"),
}
INK, FAINT, LINE, BAND, PAPER = "#1f2933", "#5f6b7a", "#e3e7ec", "#f6f8fa", "#ffffff"
PALE = 0.4


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle: a span, or neighbours too narrow to be told apart. Times in seconds of the trace."""

    start_s: float
    end_s: float
    style: str
    pale: bool
    label: str


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of time on the axis."""

    start_s: float
    end_s: float

    def x(self, time_s: float) -> float:
        share = (time_s - self.start_s) / max(self.end_s - self.start_s, 1e-9)
        return LEFT + min(max(share, 0.0), 1.0) * (RIGHT - LEFT)

    def width(self, box: Box | Span) -> float:
        return self.x(box.end_s) - self.x(box.start_s)


def style_of(span: Span) -> str:
    parts = span.name.split("/")
    if span.kind is SpanKind.MARK:
        return BACKWARD if BACKWARD in parts else FORWARD
    return STATE if span.kind is SpanKind.COPY and STATE in parts else span.kind.value


def boxes_of(spans: Iterable[Span], window: Window, step: int | None) -> list[Box]:
    """Rectangles of one lane in the order in which they are drawn; what encloses comes before what it encloses."""
    groups: list[list[Span]] = []
    last: dict[tuple[str, bool], list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        key = (style_of(span), step is not None and span.step != step)
        group = last.get(key)
        if (
            group is not None
            and is_narrow(span, window)
            and is_narrow(group[-1], window)
            and (window.x(span.start_s) - window.x(group[-1].end_s) < NARROWEST)
        ):
            group.append(span)
        else:
            last[key] = [span]
            groups.append(last[key])
    boxes = []
    for group in groups:
        label = describe(group[0])
        if len(group) > 1:
            label = f"{len(group)} spans, from {group[0].name} to {group[-1].name}, {union_s(group) * 1e3:.3f} ms"
        pale = step is not None and group[0].step != step
        boxes.append(Box(group[0].start_s, max(s.end_s for s in group), style_of(group[0]), pale, label))
    order = {style: 0 if style in (FORWARD, BACKWARD) else n for n, style in enumerate(STYLES)}
    return sorted(boxes, key=lambda box: order[box.style])


def is_narrow(span: Span, window: Window) -> bool:
    return window.width(span) < NARROWEST


def describe(span: Span) -> str:
    """The tooltip of a span."""
    text = f"{span.name}: {span.duration_s * 1e3:.3f} ms"
    if span.nbytes and span.duration_s:
        text += f", {span.nbytes / 1e6:.1f} MB, {span.nbytes / span.duration_s / 1e9:.1f} GB/s"
    return f"{text}, step {span.step}"


def phases(spans: Iterable[Span]) -> Iterator[Span]:
    """Stretches of forward and backward: neighbouring marks of one kind and step; marks inside a mark do not count."""
    current: Span | None = None
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        if span.kind is not SpanKind.MARK or (current is not None and span.end_s <= current.end_s):
            continue
        if current is not None and (style_of(current), current.step) == (style_of(span), span.step):
            current = replace(current, end_s=span.end_s)
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


def window_of(trace: Trace, step: int | None) -> Window:
    """The axis: from the first to the last span of the step, or of all steps."""
    spans = trace.of_steps(None if step is None else [step]).spans
    if not spans:
        raise ConfigError("the trace holds no span", fix="trace a run with at least one step")
    return Window(min(span.start_s for span in spans), max(span.end_s for span in spans))


def draw(trace: Trace, step: int | None, title: str) -> str:
    """The whole SVG. Raises ConfigError for a trace without spans, or without that step."""
    window = window_of(trace, step)
    shown = [s for s in trace.spans if s.end_s >= window.start_s and s.start_s <= window.end_s]
    known = list(LANES)
    used = sorted(
        {span.lane for span in shown},
        key=lambda lane: (known.index(lane.value) if lane.value in known else len(known), list(Lane).index(lane)),
    )
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
    for box in boxes_of(spans, window, step):
        width = max(window.width(box), NARROWEST)
        x = min(window.x(box.start_s), RIGHT - width)
        inset = 4 if box.style == SpanKind.KERNEL.value and lane is Lane.COMPUTE else 0
        yield rectangle(x, y + inset, width, ROW - 2 * inset, STYLES[box.style][0], label=box.label, pale=box.pale)
    if lane is Lane.COMPUTE:
        yield from phase_labels(spans, window, y)
    yield from sums(lane, spans, step, y)


def phase_labels(spans: Sequence[Span], window: Window, y: float) -> Iterator[str]:
    """The words forward and backward above their stretches, where they fit."""
    for phase in phases(spans):
        word = style_of(phase)
        yield rectangle(window.x(phase.start_s), y - 6, max(window.width(phase) - 1, NARROWEST), 3, STYLES[word][0])
        if window.width(phase) >= len(word) * TEXT * LETTER:
            yield text((window.x(phase.start_s) + window.x(phase.end_s)) / 2, y - 10, word, anchor="middle")


def sums(lane: Lane, spans: Sequence[Span], step: int | None, y: float) -> Iterator[str]:
    """Right of a row: how long the lane worked for the step, and its rate; for compute, how long it stood still."""
    own = [span for span in spans if step is None or span.step == step]
    if lane is Lane.COMPUTE:
        waits = [span for span in own if span.kind is SpanKind.WAIT]
        yield text(RIGHT + 10, y + 14, "stands still")
        yield text(RIGHT + 10, y + 28, f"{union_s(waits) * 1e3:.1f} ms", fill=STYLES["wait"][0] if waits else INK)
        return
    busy_s, nbytes = union_s(own), sum(span.nbytes for span in own if span.kind is SpanKind.COPY)
    yield text(RIGHT + 10, y + 14, f"busy {busy_s * 1e3:.1f} ms")
    if nbytes and busy_s:
        yield text(RIGHT + 10, y + 28, f"{nbytes / busy_s / 1e9:.1f} GB/s", fill=FAINT)


def legend(shown: Sequence[Span], step: int | None) -> Iterator[str]:
    """One line of swatches, for what is in the picture."""
    styles = {style_of(span) for span in shown}
    entries = [(fill, word, False) for style, (fill, word) in STYLES.items() if style in styles]
    if step is not None and any(span.step != step for span in shown):
        entries.append((STYLES[BACKWARD][0], "paler: another step", True))
    x: float = MARGIN
    for fill, word, pale in entries:
        yield rectangle(x, 44, 12, 12, fill, pale=pale)
        yield text(x + 18, 54, word)
        x += 18 + len(word) * TEXT * LETTER + 14


def axis(window: Window, bottom: float) -> Iterator[str]:
    """Grid and labels in milliseconds from the left edge, at multiples of 1, 2 or 5 of a power of ten."""
    length_ms = max((window.end_s - window.start_s) * 1e3, 1e-6)
    raw = length_ms / 10
    power = 10.0 ** math.floor(math.log10(raw))
    tick = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(tick) + 1e-9))
    for n in range(math.floor(length_ms / tick + 1e-9) + 1):
        x = LEFT + n * tick / length_ms * (RIGHT - LEFT)
        yield f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 8}" y2="{bottom + 2}" stroke="{LINE}"/>'
        yield text(x, bottom + 16, f"{n * tick:.{decimals}f}", anchor="middle", fill=FAINT)
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
