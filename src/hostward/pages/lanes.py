"""A trace as rectangles over time, one row per lane: what is drawn of it, before anybody decides with what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hostward.engine.trace import Span, SpanKind, Trace, union_s
from hostward.errors import ConfigError
from hostward.schedule import Lane

LANES = {
    "compute": "the GPU's own work",
    "d2h": "GPU to host",
    "host": "AdamW on the CPU",
    "h2d": "host to GPU",
    "update": "AdamW on the GPU",
}
"""What a lane is for; the rows come in this order, other lanes after them."""

FORWARD, BACKWARD, STATE = "forward", "backward", "state"
WORDS = {
    FORWARD: "forward of a layer",
    BACKWARD: "backward of a layer",
    SpanKind.COPY.value: "copy",
    STATE: "copy of state",
    SpanKind.HOST.value: "AdamW, host",
    SpanKind.KERNEL.value: "kernel",
    SpanKind.WAIT.value: "wait",
}
"""The styles of rectangles, and what they stand for. Drawn in this order, later over earlier."""


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of time on the axis, in seconds of the trace."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return max(self.end_s - self.start_s, 1e-9)

    def share(self, time_s: float) -> float:
        """Where a time lies on the axis, from 0 to 1; what is outside lies at the edge."""
        return min(max((time_s - self.start_s) / self.length_s, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle: a span, or neighbours too narrow to be told apart. Times in seconds of the trace."""

    start_s: float
    end_s: float
    style: str
    pale: bool
    label: str


def style_of(span: Span) -> str:
    """A key of WORDS."""
    parts = span.name.split("/")
    if span.kind is SpanKind.MARK:
        return BACKWARD if BACKWARD in parts else FORWARD
    return STATE if span.kind is SpanKind.COPY and STATE in parts else span.kind.value


def window_of(trace: Trace, step: int | None) -> Window:
    """From the first to the last span of the step, or of all steps. Raises ConfigError for a trace of nothing."""
    spans = trace.of_steps(None if step is None else [step]).spans
    if not spans:
        raise ConfigError("the trace holds no span", fix="trace a run with at least one step")
    return Window(min(span.start_s for span in spans), max(span.end_s for span in spans))


def spans_in(trace: Trace, window: Window) -> list[Span]:
    """What happens within the window, of whatever step."""
    return [s for s in trace.spans if s.end_s >= window.start_s and s.start_s <= window.end_s]


def lanes_of(spans: Iterable[Span]) -> list[Lane]:
    """The lanes that have spans, in the order of the rows."""
    known = list(LANES)
    return sorted(
        {span.lane for span in spans},
        key=lambda lane: (known.index(lane.value) if lane.value in known else len(known), list(Lane).index(lane)),
    )


def boxes_of(spans: Iterable[Span], window: Window, step: int | None, *, narrow_s: float) -> list[Box]:
    """Rectangles of one lane in the order in which they are drawn; what encloses comes before what it encloses.

    Args:
        step: spans of other steps are pale; None: none is.
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


def sums(lane: Lane, spans: Sequence[Span], step: int | None) -> tuple[float, int]:
    """Seconds that the lane worked for the step, and bytes that it copied; of compute, seconds that it stood still."""
    own = [span for span in spans if step is None or span.step == step]
    if lane is Lane.COMPUTE:
        return union_s(span for span in own if span.kind is SpanKind.WAIT), 0
    return union_s(own), sum(span.nbytes for span in own if span.kind is SpanKind.COPY)


def ticks(length: float, about: int) -> list[float]:
    """Values from 0 to at most `length`, at multiples of 1, 2 or 5 of a power of ten, at most `about` steps."""
    if not (math.isfinite(length) and length > 0):
        return [0.0]
    raw = length / about
    power = 10.0 ** math.floor(math.log10(raw))
    tick = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [n * tick for n in range(math.floor(length / tick + 1e-9) + 1)]
