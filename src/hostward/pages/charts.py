"""Charts as inline SVG. The drawing stretches with the page; labels are HTML beside it and keep their size."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .lanes import ticks
from .series import Stack
from .words import ACTIVATIONS, GRADIENTS, OTHER, SLOTS, STATE, WEIGHTS

SIDE = 1000
"""Both sides of a drawing, in its own units."""
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


def escape(words: str) -> str:
    """Text for HTML; control characters, which it cannot hold, become a replacement character."""
    return html.escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", words))


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high`, with marks at values and their labels."""

    low: float
    high: float
    marks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def figure(value: float, step: float) -> str:
    """A mark's label, with the decimals that marks `step` apart need; millions are abbreviated."""
    if abs(value) >= 10**6:
        return f"{figure(value / 10**6, step / 10**6)} M"
    decimals = 0 if step >= 1 else min(6, len(f"{step:.6f}".rstrip("0").partition(".")[2]))
    return f"{value:,.{decimals}f}"


def axis_from_zero(most: float, *, scale: float = 1.0, about: int = 4) -> Axis:
    """From 0 to a little more than `most`; labels are values divided by `scale`."""
    found = ticks(max(most, 1e-12) / scale, about)
    step = found[1] if len(found) > 1 else max(most, 1e-12) / scale
    values = found if most / scale <= found[-1] * 1.02 else [*found, found[-1] + step]
    high = max(values[-1], step) * scale
    return Axis(0.0, high, tuple((v * scale, figure(v, step)) for v in values))


def axis_around(values: Sequence[float], *, about: int = 4) -> Axis:
    """From a little less than the least value to a little more than the largest, at round marks."""
    low, high = min(values), max(values)
    span = high - low or abs(high) * 0.1 or 1.0
    step = ticks(span, about)[1] if len(ticks(span, about)) > 1 else span
    first, last = low // step, -(-high // step)
    if first == last:
        last += 1
    marks = [(first + n) * step for n in range(int(last - first) + 1)]
    return Axis(first * step, last * step, tuple((m, figure(m, step)) for m in marks))


def axis_of_iterations(first: float, last: float) -> Axis:
    """Iterations, counted from 1 as the progress line counts them, at whole marks."""
    last = max(last, first + 1e-9)
    step = max(1.0, ticks(last - first, 6)[1] if len(ticks(last - first, 6)) > 1 else 1.0)
    start = -(-first // step) * step
    marks = [start + n * step for n in range(int((last - start) / step + 1e-9) + 1)] if last >= start else []
    return Axis(first, last, tuple((m, figure(m, step)) for m in marks))


def area_chart(stack: Stack, *, title: str, text: str, scale: float, peak: int | None = None) -> str:
    """Layers on top of each other over iterations; `peak` is a dashed line."""
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
    """One curve over iterations."""
    x = axis_of_iterations(points[0][0], points[-1][0])
    if len(points) == 1:
        points = [(x.low, points[0][1]), (x.high, points[0][1])]
    return plot([f'<path class="curve" d="M{_points(points, x, y)}"/>'], x, y, title=title, text=text, low=True)


def scatter(points: Sequence[tuple[float, float, bool]], x: Axis, y: Axis, *, title: str, text: str) -> str:
    """Numbered dots; the filled one is this run's."""
    dots = [
        f'<span class="dot{" own" if own else ""}" aria-hidden="true" style="left:{100 * x.share(across):.2f}%;'
        f'bottom:{100 * y.share(up):.2f}%">{number}</span>'
        for number, (across, up, own) in enumerate(points, 1)
    ]
    return plot([], x, y, title=title, text=text, besides=dots)


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
    """A drawing with its grid, the labels of both axes, and what a reader of it by ear is told: title and text."""
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
    """Swatches by name of a colour, or "dash", with words."""
    items = [
        f'<li><i class="dash"></i>{escape(words)}</li>'
        if colour == "dash"
        else f'<li><i style="background:var(--{colour})"></i>{escape(words)}</li>'
        for colour, words in entries
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _points(points: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    return "L".join(f"{x.share(a) * SIDE:.1f},{_y(b, y)}" for a, b in points)


def _y(value: float, y: Axis) -> str:
    return f"{(1 - y.share(value)) * SIDE:.1f}"
