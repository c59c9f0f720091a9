"""One step's lanes as a timeline, in HTML and inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostward.engine.trace import Span, SpanKind, Trace
from hostward.schedule import Lane

from .charts import SIDE, escape, figure, legend
from .lanes import (
    BACKWARD,
    LANES,
    STATE,
    WORDS,
    Box,
    Window,
    boxes_of,
    lanes_of,
    phases,
    spans_in,
    style_of,
    sums,
    ticks,
    window_of,
)
from .words import duration

_HEIGHT = 10
_NARROW = 0.7
"""Of SIDE: what is narrower is drawn this wide."""
_ROOM = 0.17
"""Share of the width that a word needs on the narrowest screen."""
_MS = 1e-3


def chosen_step(trace: Trace) -> int | None:
    """The step to show: the last one that another one follows, for the last of all has nothing to hide behind."""
    steps = trace.steps()
    return steps[-2] if len(steps) > 1 else steps[0] if steps else None


def timeline(trace: Trace, step: int) -> str:
    """Rows of lanes with a ruler below, a legend above."""
    window = window_of(trace, step)
    shown = spans_in(trace, window)
    parts = [_legend(shown, step)]
    words = list(_phase_words([s for s in shown if s.lane is Lane.COMPUTE], window))
    if words:
        parts.append(_bare(f'<div class="ruler phases">{"".join(words)}</div>'))
    parts += [_row(lane, [s for s in shown if s.lane is lane], window, step) for lane in lanes_of(shown)]
    return "\n".join([*parts, _bare(f'<div class="ruler">{"".join(_ruler(window))}</div>')])


def _row(lane: Lane, spans: Sequence[Span], window: Window, step: int) -> str:
    seconds, nbytes = sums(lane, spans, step)
    what = "stands still" if lane is Lane.COMPUTE else "busy"
    rate = f"<br> <span>{nbytes / seconds / 1e9:.1f} GB/s</span>" if nbytes and seconds else ""
    title = f"{lane.value}: {what} {duration(seconds)} of {duration(window.length_s)}"
    boxes = boxes_of(spans, window, step, narrow_s=_NARROW / SIDE * window.length_s)
    drawn = [_rectangle(window, b, low=_is_low(lane, b.style)) for b in boxes]
    return (
        f'<div class="lane"><div class="name"><b>{lane.value}</b> <span>{LANES.get(lane.value, "")}</span></div>'
        f'<div class="bar"><svg viewBox="0 0 {SIDE} {_HEIGHT}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(title)}</title>{''.join(drawn)}</svg></div>"
        f'<div class="sum"><span>{what}</span> <b>{duration(seconds)}</b>{rate}</div></div>'
    )


def _is_low(lane: Lane, style: str) -> bool:
    """Kernels of ours within backward are drawn lower than the backward that they are part of."""
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
    return "copystate" if style == STATE else style


def _legend(shown: Sequence[Span], step: int) -> str:
    styles = {style_of(span) for span in shown}
    entries = [(_colour(style), words) for style, words in WORDS.items() if style in styles]
    if any(span.step != step for span in shown):
        entries.append((_colour(BACKWARD), "paler: another step"))
    return legend(entries)


def _phase_words(spans: Sequence[Span], window: Window) -> Iterator[str]:
    for phase in phases(spans):
        left, right = window.share(phase.start_s), window.share(phase.end_s)
        word = style_of(phase)
        shown = word if right - left >= _ROOM else "&nbsp;"
        place = f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%"
        yield f'<span class="{word}" style="{place}">{shown}</span>'


def _ruler(window: Window) -> Iterator[str]:
    marks = ticks(window.length_s / _MS, 5)
    step = marks[1] if len(marks) > 1 else 1.0
    for mark in marks:
        share = mark * _MS / window.length_s
        edge = ' class="end"' if share > 0.9 else ""
        unit = " ms" if mark == marks[-1] else ""
        yield f'<span{edge} style="left:{100 * share:.2f}%">{figure(mark, step)}{unit}</span>'


def _bare(content: str) -> str:
    """A row without a name."""
    return f'<div class="lane bare"><div class="name"></div>{content}<div class="sum"></div></div>'
