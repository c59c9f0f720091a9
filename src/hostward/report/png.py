"""Draw the page's charts as PNGs, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hostward.core.units import unit_of
from hostward.errors import ConfigError, needed_for
from hostward.report.formatting import (
    ACTIVATIONS,
    GRADIENTS,
    OTHER,
    SLOTS,
    STATE,
    WEIGHTS,
    Stack,
    device_stack,
    duration,
    host_stack,
    line,
)
from hostward.report.page import own_point
from hostward.report.schema import RunReport
from hostward.report.svg import WORDS, boxes_of, chosen_step, lanes_of, spans_in, style_of, sums, window_of
from hostward.runtime.step_trace import Trace
from hostward.schedule.ops import Lane

_ROLE_COLOURS = {
    WEIGHTS: "#3a6db0",
    STATE: "#c97510",
    GRADIENTS: "#2f8a5b",
    SLOTS: "#8557b8",
    ACTIVATIONS: "#0d8f9c",
    OTHER: "#8a94a1",
}
_STYLE_COLOURS = {
    "forward": "#8996a6",
    "backward": "#5a6675",
    "copy": "#3a78c0",
    "state": "#244a7c",
    "host": "#c27d12",
    "kernel": "#398f5e",
    "wait": "#cf2239",
}
_WIDTH_IN, _DPI = 9.0, 150
_NARROW = 1 / 1300
"""Relative length, in the window, that is about a pixel."""


def draw_all(report: RunReport, trace: Trace | None, folder: Path) -> list[Path]:
    """Write memory.png, step.png, frontier.png and loss.png, each if it has data, and return the files written.

    Raises:
        MissingPackageError: matplotlib is not installed. ConfigError: a file cannot be written.
    """
    figures: dict[str, tuple[Callable[[Any], None], int, float]] = {}
    stacks = {
        "simulated device" if report.simulated else "device": device_stack(report.memory_over_time),
        "host": host_stack(report.memory_over_time),
    }
    stacks = {name: stack for name, stack in stacks.items() if stack.layers}
    if stacks:
        figures["memory.png"] = (lambda axes: _memory(axes, stacks)), len(stacks), 2.6
    step = None if trace is None else chosen_step(trace)
    if trace is not None and step is not None:
        figures["step.png"] = (lambda axes: _step(axes[0], trace, step)), 1, 2.8
    if report.frontier:
        figures["frontier.png"] = (lambda axes: _frontier(axes[0], report)), 1, 4.5
    if report.iteration_s:
        figures["loss.png"] = (lambda axes: _loss(axes, report)), 2, 2.2
    return [_save(folder / name, *figure) for name, figure in figures.items()]


def _save(file: Path, draw: Callable[[Any], None], rows: int, row_height_in: float) -> Path:
    with needed_for("--png", "report", otherwise="leave --png out: the page draws its charts without it"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(_WIDTH_IN, row_height_in * rows), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, squeeze=False)[:, 0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#d9dee5", linewidth=0.8)
        each.set_axisbelow(True)
    draw(axes)
    try:
        figure.savefig(file)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{file} cannot be written", why=why, fix="name another folder") from error
    return file


def _memory(axes: Any, stacks: Mapping[str, Stack]) -> None:
    for ax, (name, stack) in zip(axes, stacks.items(), strict=True):
        scale, unit = unit_of(stack.most)
        layers = [[n / scale for n in layer] for layer in stack.layers.values()]
        colours = [_ROLE_COLOURS[role] for role in stack.layers]
        ax.stackplot(stack.at, *layers, labels=list(stack.layers), colors=colours, edgecolor="white", linewidth=0.6)
        ax.set(title=f"{name} memory", ylabel=unit, ylim=(0, None))
        ax.margins(x=0)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
    axes[-1].set_xlabel("iteration")


def _step(ax: Any, trace: Trace, step: int) -> None:
    from matplotlib.patches import Patch

    window = window_of(trace, step)
    shown = spans_in(trace, window)
    lanes = lanes_of(shown)
    for row, lane in enumerate(lanes):
        spans = [s for s in shown if s.lane is lane]
        for box in boxes_of(spans, window, step, narrow_s=window.length_s * _NARROW):
            start_s, end_s = max(box.start_s, window.start_s), min(box.end_s, window.end_s)
            place = (start_s - window.start_s) * 1e3, max((end_s - start_s), window.length_s * _NARROW) * 1e3
            colour = _STYLE_COLOURS[box.style]
            ax.broken_barh([place], (row - 0.36, 0.72), facecolors=colour, alpha=0.4 if box.pale else 1, linewidth=0)
        seconds, _ = sums(lane, spans, step)
        what = "idle" if lane is Lane.COMPUTE else "busy"
        ax.annotate(f"{what} {duration(seconds)}", (1.01, row), xycoords=("axes fraction", "data"), va="center")
    ax.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    ax.invert_yaxis()
    ax.grid(visible=False)
    styles = {style_of(span) for span in shown}
    patches = [Patch(color=colour, label=WORDS[style]) for style, colour in _STYLE_COLOURS.items() if style in styles]
    ax.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(patches), frameon=False)
    ax.set(xlabel="ms", title=f"step {step}, stream by stream", xlim=(0, window.length_s * 1e3))


def _frontier(ax: Any, report: RunReport) -> None:
    own = own_point(report)
    points = [*report.frontier, *([] if own is None else [own])]
    scale, unit = unit_of(max(p.device_bytes for p in points))
    for p in points:
        colour = "#1f5fae" if p is own else "#929cab"
        ax.scatter([p.device_bytes / scale], [p.step_s], color=colour, zorder=3)
        ax.annotate(p.label, (p.device_bytes / scale, p.step_s), xytext=(6, 5), textcoords="offset points", fontsize=8)
    ax.set(title="step time against device memory", xlabel=unit, ylabel="s per step")
    ax.set_xlim(0, 1.15 * max(p.device_bytes for p in points) / scale)  # room for the labels
    ax.set_ylim(0, 1.1 * max(p.step_s for p in points))


def _loss(axes: Any, report: RunReport) -> None:
    speeds = [row.tokens_per_s for row in report.steps()]
    for ax, name, values in zip(axes, ("loss", "tokens per second"), (report.losses, speeds), strict=True):
        points = line(values, report.first_iteration)
        ax.plot([x for x, _ in points], [y for _, y in points], color="#1f5fae")
        ax.set_title(name)
    axes[1].set(xlabel="iteration", ylim=(0, 1.08 * max(speeds)))
