"""Draw charts as inline SVG.

The drawing stretches with the page; labels are HTML next to it and keep their size.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hostward.errors import ConfigError
from hostward.report.formatting import ACTIVATIONS, GRADIENTS, OTHER, SLOTS, STATE, WEIGHTS, Stack, duration
from hostward.runtime.step_trace import Span, SpanKind, Trace, union_s
from hostward.schedule.ops import Lane

SIDE = 1000
"""Side length of a drawing, in its own units."""
FILLS = {
    WEIGHTS: "weights",
    STATE: "state",
    GRADIENTS: "gradients",
    SLOTS: "slots",
    ACTIVATIONS: "activations",
    OTHER: "other",
}
"""Names of colours by role."""
_EDGE = 0.06
_DOT_WIDTH, _DOT_HEIGHT = 0.1, 0.13
"""Room that a numbered dot needs on the narrowest screen, as shares of a plot."""


def escape(words: str) -> str:
    """Escape text for HTML; control characters, which it cannot hold, become a replacement character."""
    return html.escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", words))


@dataclass(frozen=True, slots=True)
class Axis:
    """Scales values from `low` to `high`, with marks at values and their labels."""

    low: float
    high: float
    marks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def figure(value: float, step: float) -> str:
    """Format a mark's label, with the decimals that marks `step` apart need; millions are abbreviated."""
    if abs(value) >= 10**6:
        return f"{figure(value / 10**6, step / 10**6)} M"
    decimals = 0 if step >= 1 else min(6, len(f"{step:.6f}".rstrip("0").partition(".")[2]))
    return f"{value:,.{decimals}f}"


def axis_from_zero(most: float, *, scale: float = 1.0, about: int = 4) -> Axis:
    """Make an axis from 0 to a little more than `most`; labels are values divided by `scale`."""
    found = ticks(max(most, 1e-12) / scale, about)
    step = found[1] if len(found) > 1 else max(most, 1e-12) / scale
    values = found if most / scale <= found[-1] * 1.02 else [*found, found[-1] + step]
    high = max(values[-1], step) * scale
    return Axis(0.0, high, tuple((v * scale, figure(v, step)) for v in values))


def axis_around(values: Sequence[float], *, about: int = 4) -> Axis:
    """Make an axis from a little less than the least value to a little more than the largest, at round marks."""
    low, high = min(values), max(values)
    span = high - low or abs(high) * 0.1 or 1.0
    step = ticks(span, about)[1] if len(ticks(span, about)) > 1 else span
    first, last = low // step, -(-high // step)
    if first == last:
        last += 1
    marks = [(first + n) * step for n in range(int(last - first) + 1)]
    return Axis(first * step, last * step, tuple((m, figure(m, step)) for m in marks))


def axis_of_iterations(first: float, last: float) -> Axis:
    """Make an axis of iterations, counted from 1 as the progress line counts them, at whole marks."""
    last = max(last, first + 1e-9)
    step = max(1.0, ticks(last - first, 6)[1] if len(ticks(last - first, 6)) > 1 else 1.0)
    start = -(-first // step) * step
    marks = [start + n * step for n in range(int((last - start) / step + 1e-9) + 1)] if last >= start else []
    return Axis(first, last, tuple((m, figure(m, step)) for m in marks))


def area_chart(stack: Stack, *, title: str, text: str, scale: float, peak: int | None = None) -> str:
    """Draw layers on top of each other over iterations; `peak` is a dashed line."""
    x = axis_of_iterations(stack.at[0], stack.at[-1])
    y = axis_from_zero(max(stack.most, peak or 0), scale=scale)
    shapes, below = [], [0] * len(stack.at)
    for role, layer in stack.layers.items():
        above = [b + n for b, n in zip(below, layer, strict=True)]
        corners = [*zip(stack.at, above, strict=True), *reversed(list(zip(stack.at, below, strict=True)))]
        shapes.append(f'<path class="layer fill-{FILLS[role]}" d="M{_points(corners, x, y)}Z"/>')
        below = above
    if peak is not None:
        at = _y(peak, y)
        shapes.append(f'<line class="peak" x1="0" x2="{SIDE}" y1="{at}" y2="{at}"/>')
    return plot(shapes, x, y, title=title, text=text)


def line_chart(points: Sequence[tuple[float, float]], y: Axis, *, title: str, text: str) -> str:
    """Draw one curve over iterations."""
    x = axis_of_iterations(points[0][0], points[-1][0])
    if len(points) == 1:
        points = [(x.low, points[0][1]), (x.high, points[0][1])]
    return plot([f'<path class="curve" d="M{_points(points, x, y)}"/>'], x, y, title=title, text=text, low=True)


def scatter(points: Sequence[tuple[float, float, bool]], x: Axis, y: Axis, *, title: str, text: str) -> str:
    """Draw numbered dots; the filled one is this run's.

    A dot too close to another one for its number is small, and says it to a pointer.
    """
    places = [(x.share(across), y.share(up), own) for across, up, own in points]
    numbered: list[tuple[float, float]] = []
    small, large = [], []
    for number, (left, bottom, own) in sorted(enumerate(places, 1), key=lambda each: not each[1][2]):  # own first
        where = f'aria-hidden="true" style="left:{100 * left:.2f}%;bottom:{100 * bottom:.2f}%"'
        if any(abs(left - a) < _DOT_WIDTH and abs(bottom - b) < _DOT_HEIGHT for a, b in numbered):
            small.append(f'<span class="dot small" {where} title="{number}"></span>')
            continue
        numbered.append((left, bottom))
        large.append((number, f'<span class="dot{" own" if own else ""}" {where}>{number}</span>'))
    return plot([], x, y, title=title, text=text, besides=[*small, *(dot for _, dot in sorted(large))])


def plot(
    shapes: Iterable[str],
    x: Axis,
    y: Axis,
    *,
    title: str,
    text: str,
    low: bool = False,
    besides: Iterable[str] = (),
) -> str:
    """Draw a plot with its grid, the labels of both axes, and title and text for screen readers."""
    parts = [f'<div class="plot{" low" if low else ""}">']
    parts += [
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img">',
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>",
        *(f'<line class="grid" x1="0" x2="{SIDE}" y1="{_y(v, y)}" y2="{_y(v, y)}"/>' for v, _ in y.marks),
        *shapes,
        "</svg>",
    ]
    parts += [f'<span class="y" style="bottom:{100 * y.share(v):.2f}%">{escape(label)}</span>' for v, label in y.marks]
    for value, label in x.marks:
        share = x.share(value)
        edge = " start" if share < _EDGE else " end" if share > 1 - _EDGE else ""
        parts.append(f'<span class="x{edge}" style="left:{100 * share:.2f}%">{escape(label)}</span>')
    return "\n".join([*parts, *besides, "</div>"])


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Render swatches, each by name of a colour, or "dash" or "pale", with words."""
    items = [
        f'<li><i class="{colour}"></i>{escape(words)}</li>'
        if colour in ("dash", "pale")
        else f'<li><i style="background:var(--{colour})"></i>{escape(words)}</li>'
        for colour, words in entries
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _points(points: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    return "L".join(f"{x.share(a) * SIDE:.1f},{_y(b, y)}" for a, b in points)


def _y(value: float, y: Axis) -> str:
    return f"{(1 - y.share(value)) * SIDE:.1f}"


# One step's streams as a timeline, in HTML and inline SVG.


_HEIGHT = 10
_NARROW = 0.7
"""Minimum width of a rectangle, in units of SIDE."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (0.0, "µs"))
"""Units of a ruler, each from this length in seconds on: marks of few digits do not meet on a narrow screen."""


def chosen_step(trace: Trace) -> int | None:
    """Return the step to show: the last one that another one follows, because the last of all overlaps with nothing."""
    steps = trace.steps()
    return steps[-2] if len(steps) > 1 else steps[0] if steps else None


def timeline(trace: Trace, step: int, *, simulated: bool = False) -> str:
    """Render a row per stream with a ruler below and a legend above; a simulated device is not called a GPU."""
    window = window_of(trace, step)
    shown = spans_in(trace, window)
    parts = [_legend(shown, step)]
    told = list(_phase_words([s for s in shown if s.lane is Lane.COMPUTE], window))
    if told:
        parts.append(_bare(f'<div class="ruler phases">{"".join(told)}</div>'))
    for lane in lanes_of(shown):
        words = LANES.get(lane.value, "")
        if simulated:
            words = words.replace("GPU", "device")
        parts.append(_row(lane, words, [s for s in shown if s.lane is lane], window, step))
    return "\n".join([*parts, _bare(f'<div class="ruler">{"".join(_ruler(window))}</div>')])


def _row(lane: Lane, words: str, spans: Sequence[Span], window: Window, step: int) -> str:
    seconds, nbytes = sums(lane, spans, step)
    what = "idle" if lane is Lane.COMPUTE else "busy"
    rate = f"<br> <span>{nbytes / seconds / 1e9:.1f} GB/s</span>" if nbytes and seconds else ""
    title = f"{lane.value}: {what} {duration(seconds)} of {duration(window.length_s)}"
    boxes = boxes_of(spans, window, step, narrow_s=_NARROW / SIDE * window.length_s)
    drawn = [_rectangle(window, b, low=_is_low(lane, b.style)) for b in boxes]
    return (
        f'<div class="lane"><div class="name"><b>{lane.value}</b> <span>{words}</span></div>'
        f'<div class="bar"><svg viewBox="0 0 {SIDE} {_HEIGHT}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(title)}</title>{''.join(drawn)}</svg></div>"
        f'<div class="sum"><span>{what}</span> <b>{duration(seconds)}</b>{rate}</div></div>'
    )


def _is_low(lane: Lane, style: str) -> bool:
    """Return whether a span is drawn lower: hostward's kernels in backward are, as part of it."""
    return lane is Lane.COMPUTE and style == SpanKind.KERNEL.value


def _rectangle(window: Window, box: Box, *, low: bool) -> str:
    left = window.share(box.start_s) * SIDE
    width = max(window.share(box.end_s) * SIDE - left, _NARROW)
    top, height = (2, _HEIGHT - 4) if low else (0, _HEIGHT)
    return (
        f'<rect class="fill-{_colour(box.style)}{" pale" if box.pale else ""}" x="{min(left, SIDE - width):.2f}" '
        f'y="{top}" width="{width:.2f}" height="{height}"><title>{escape(box.label)}</title></rect>'
    )


def _colour(style: str) -> str:
    return "copystate" if style == STATE_COPY else style


def _legend(shown: Sequence[Span], step: int) -> str:
    styles = {style_of(span) for span in shown}
    entries = [(_colour(style), words) for style, words in WORDS.items() if style in styles]
    if any(span.step != step for span in shown):
        entries.append(("pale", "paler: another step"))
    return legend(entries)


def _phase_words(spans: Sequence[Span], window: Window) -> Iterator[str]:
    """Yield the stretches of forward and backward; the style sheet hides a word that is wider than its stretch."""
    for phase in phases(spans):
        left, right = window.share(phase.start_s), window.share(phase.end_s)
        word = style_of(phase)
        place = f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%"
        yield f'<span class="{word}" style="{place}">{word}</span>'


def _ruler(window: Window) -> Iterator[str]:
    unit_s, unit = next((least or 1e-6, name) for least, name in _UNITS if window.length_s >= least)
    marks = ticks(window.length_s / unit_s, 5)
    step = marks[1] if len(marks) > 1 else 1.0
    for mark in marks:
        share = mark * unit_s / window.length_s
        edge = ' class="end"' if share > 0.9 else ""
        last = f" {unit}" if mark == marks[-1] else ""
        yield f'<span{edge} style="left:{100 * share:.2f}%">{figure(mark, step)}{last}</span>'


def _bare(content: str) -> str:
    """Render a row without a name."""
    return f'<div class="lane bare"><div class="name"></div>{content}<div class="sum"></div></div>'


# A trace as rectangles over time, one row per stream, independent of the drawing library.


LANES = {
    "compute": "the GPU's own work",
    "d2h": "GPU to host",
    "host": "AdamW on the CPU",
    "h2d": "host to GPU",
    "update": "AdamW on the GPU",
}
"""Stream explanations; rows come in this order, other streams after them."""

FORWARD, BACKWARD, STATE_COPY = "forward", "backward", "state"
WORDS = {
    FORWARD: "forward of a layer",
    BACKWARD: "backward of a layer",
    SpanKind.COPY.value: "copy",
    STATE_COPY: "copy of state",
    SpanKind.HOST.value: "AdamW, host",
    SpanKind.KERNEL.value: "kernel",
    SpanKind.WAIT.value: "wait",
}
"""Rectangle styles with their explanations, in drawing order: later ones cover earlier ones."""


@dataclass(frozen=True, slots=True)
class Window:
    """Holds the time interval on the axis, in seconds of the trace."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return max(self.end_s - self.start_s, 1e-9)

    def share(self, time_s: float) -> float:
        """Return the position of a time on the axis, from 0 to 1; times outside are at the edge."""
        return min(max((time_s - self.start_s) / self.length_s, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Box:
    """Draws one rectangle: a span, or neighbours too narrow to be distinguished, with times in seconds of the trace."""

    start_s: float
    end_s: float
    style: str
    pale: bool
    label: str


def style_of(span: Span) -> str:
    """Return the style of a span, a key of WORDS."""
    parts = span.name.split("/")
    if span.kind is SpanKind.MARK:
        return BACKWARD if BACKWARD in parts else FORWARD
    return STATE_COPY if span.kind is SpanKind.COPY and STATE_COPY in parts else span.kind.value


def window_of(trace: Trace, step: int | None) -> Window:
    """Return the window from the first to the last span of the step, or of all steps.

    Raises ConfigError for an empty trace.
    """
    spans = trace.of_steps(None if step is None else [step]).spans
    if not spans:
        raise ConfigError("the trace holds no span", fix="trace a run with at least one step")
    return Window(min(span.start_s for span in spans), max(span.end_s for span in spans))


def spans_in(trace: Trace, window: Window) -> list[Span]:
    """Return the spans within the window, of all steps."""
    return [s for s in trace.spans if s.end_s >= window.start_s and s.start_s <= window.end_s]


def lanes_of(spans: Iterable[Span]) -> list[Lane]:
    """Return the lanes that have spans, in the order of the rows."""
    known = list(LANES)
    return sorted(
        {span.lane for span in spans},
        key=lambda lane: (known.index(lane.value) if lane.value in known else len(known), list(Lane).index(lane)),
    )


def boxes_of(spans: Iterable[Span], window: Window, step: int | None, *, narrow_s: float) -> list[Box]:
    """Return the rectangles of one lane in drawing order; an enclosing one comes before those that it encloses.

    Args:
        step: spans of other steps are pale; None: none are.
        narrow_s: neighbours of one style that are shorter, and not farther apart, become one rectangle.
    """

    def seen_s(span: Span) -> float:
        return (window.share(span.end_s) - window.share(span.start_s)) * window.length_s

    groups: list[list[Span]] = []
    last: dict[tuple[str, bool], list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        key = (style_of(span), step is not None and span.step != step)
        group = last.get(key)
        if (
            group is not None
            and seen_s(span) < narrow_s
            and seen_s(group[-1]) < narrow_s
            and (window.share(span.start_s) - window.share(group[-1].end_s)) * window.length_s < narrow_s
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
    order = {style: 0 if style in (FORWARD, BACKWARD) else n for n, style in enumerate(WORDS)}
    return sorted(boxes, key=lambda box: order[box.style])


def describe(span: Span) -> str:
    """Return the tooltip of a span."""
    text = f"{span.name}: {span.duration_s * 1e3:.3f} ms"
    if span.nbytes and span.duration_s:
        text += f", {span.nbytes / 1e6:.1f} MB, {span.nbytes / span.duration_s / 1e9:.1f} GB/s"
    return f"{text}, step {span.step}"


def phases(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield stretches of forward and backward: neighbouring marks of one kind and step; marks inside a mark do not
    count.
    """
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


def sums(lane: Lane, spans: Sequence[Span], step: int | None) -> tuple[float, int]:
    """Return the seconds that the lane worked for the step, and its copied bytes; for compute, its idle seconds."""
    own = [span for span in spans if step is None or span.step == step]
    if lane is Lane.COMPUTE:
        return union_s(span for span in own if span.kind is SpanKind.WAIT), 0
    return union_s(own), sum(span.nbytes for span in own if span.kind is SpanKind.COPY)


def ticks(length: float, about: int) -> list[float]:
    """Return values from 0 to at most `length`, at multiples of 1, 2 or 5 of a power of ten, at most `about` steps."""
    if not (math.isfinite(length) and length > 0):
        return [0.0]
    raw = length / about
    power = 10.0 ** math.floor(math.log10(raw))
    tick = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [n * tick for n in range(math.floor(length / tick + 1e-9) + 1)]
