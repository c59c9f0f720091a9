"""Render the page about one run: self-contained HTML, without scripts and without external files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hostward.core.units import size, unit_of
from hostward.plan.decisions import FrontierPoint
from hostward.report.better_plans import better_plans, sentences
from hostward.report.formatting import (
    ACTIVATIONS,
    REST,
    Stack,
    answer,
    device_stack,
    duration,
    error_percent,
    host_stack,
    line,
    number,
    per_second,
    percent,
    placed_runs,
    points_each,
    status,
    weights_of,
)
from hostward.report.schema import Estimate, RunReport, iterations
from hostward.report.svg import (
    FILLS,
    area_chart,
    axis_around,
    axis_from_zero,
    chosen_step,
    escape,
    legend,
    line_chart,
    scatter,
    timeline,
)
from hostward.runtime.step_trace import SpanKind, Trace

_STYLE = Path(__file__).with_name("style.css")


def render(report: RunReport, trace: Trace | None = None) -> str:
    """Render the whole page.

    Args:
        trace: the run's trace; None: the page says how to get one.

    Raises:
        ConfigError: never for a report that `read_report` has read.
    """
    title = f"{report.recipe}: iterations {report.first_iteration + 1} to {report.last_iteration}"
    sections = [
        *_head(report, title),
        *_memory(report),
        *_lanes(report, trace),
        *_ranks(report),
        *_frontier(report),
        *_predictions(report),
        *_progress(report),
        *_placements(report),
        *_circumstances(report),
    ]
    body, css = "\n".join(sections), _STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(report: RunReport, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title).replace('_', '_<wbr>')}</h1>"
    yield f'<p class="faint">{escape(_where(report))}</p>'
    told = status(report)
    if told is not None:
        yield f'<p class="notice" role="status">{escape(told)}</p>'
    yield f'<p class="answer">{escape(answer(report))}</p>'
    yield from (f"<p>{escape(sentence)}</p>" for sentence in better_plans(report)[:1])
    losses = [loss for loss in report.losses if loss is not None]
    figures = {
        "tokens per second, median step": per_second(report),
        "a step, median": duration(report.measured.step_s),
        "loss, first → last": f"{number(losses[0], 3)} → {number(losses[-1], 3)}" if losses else "–",
        "device memory, peak": size(report.measured.device_peak_bytes),
        "pinned host memory": size(report.measured.pinned_bytes),
    }
    if report.simulated:
        del figures["device memory, peak"]
        figures["host memory, resident"] = size(report.memory.resident_bytes)
        del figures["pinned host memory"]  # nothing is pinned
        figures["optimizer state on the host"] = percent(report.placed_fraction)
    elif report.offload is not None:
        figures["GPU idle, per step"] = duration(report.offload.exposed_s)
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures.items())
    yield f'<dl class="figures">{rows}</dl>'
    if report.offload is not None and not report.simulated:
        span = iterations(report.offload.first_iteration, report.offload.last_iteration)
        words = f"Idle and overlapped seconds are those of {span}, per step; step times are medians of the run."
        yield f'<p class="faint">{words}</p>'


def _where(report: RunReport) -> str:
    device = "a simulated device" if report.simulated else str(report.machine.get("device", "?"))
    return f"{report.date.replace('T', ' ')[:16]} UTC, on {device}, {report.parameters:,} trained parameters"


def _memory(report: RunReport) -> Iterator[str]:
    yield "<h2>Memory over time, by owner</h2>"
    device, host = device_stack(report.memory_over_time), host_stack(report.memory_over_time)
    if not device.at:
        yield "<p>No iteration was sampled.</p>"
        return
    yield from _of_first(report)
    peak = report.memory.device_peak_bytes
    name = "Simulated device" if report.simulated else "Device"
    note = (
        "Without a GPU the bytes that layers save for backward are unknown; the device's are host memory here."
        if report.simulated
        else "The dashed line is the most at any moment of the run."
    )
    note += (
        " The legend has the most that is drawn. Between those moments the device may hold more, of gradients above "
        "all: the table below has it."
    )
    over = report.memory_over_time.overcounted_bytes
    if over:
        note += (
            f" The owners' counts exceed what torch's allocator held at the same moment by up to "
            f"{size(over)}: some bytes are counted twice, which is an error of hostward."
        )
    yield from _stacked(name, device, note, peak)
    if host.layers:
        yield from _stacked("Host", host, "Host memory that hostward holds for this run.", None)
    else:
        yield "<h3>Host</h3><p>No training state was on the host.</p>"
    yield _owner_table(report)


def _stacked(name: str, stack: Stack, note: str, peak: int | None) -> Iterator[str]:
    scale, unit = unit_of(max(stack.most, peak or 0))
    text = "at the most, " + ", ".join(f"{role} {size(max(layer))}" for role, layer in stack.layers.items())
    entries = [
        (FILLS[role], f"{REST if role == ACTIVATIONS and name == 'Device' else role}, {size(max(layer))}")
        for role, layer in stack.layers.items()
    ]
    entries += [] if peak is None else [("dash", f"peak, {size(peak)}")]
    yield f"<h3>{name}</h3>"
    yield f'<figure>{legend(entries)}<p class="unit" aria-hidden="true">{unit}, over iterations</p>'
    title = f"{name} memory over iterations, by owner"
    yield area_chart(stack, title=title, text=text, scale=scale, peak=peak)
    yield f"<figcaption>{escape(note)}</figcaption></figure>"


def _owner_table(report: RunReport) -> str:
    device, host = report.memory.device_by_owner_bytes, report.memory.host_by_owner_bytes
    rows = [
        (owner, size(device[owner]) if owner in device else "", size(host[owner]) if owner in host else "")
        for owner in dict.fromkeys([*device, *host])
    ]
    return _details(
        "The same as a table, every owner by name",
        _table(("owner", "device, most at any time", "host, most at any time"), rows),
    )


def _lanes(report: RunReport, trace: Trace | None) -> Iterator[str]:
    yield "<h2>One step, stream by stream</h2>"
    if trace is not None and report.simulated:
        # There the compute stream is the caller's own thread, with forward and backward undistinguished.
        trace = Trace(span for span in trace.spans if span.kind is not SpanKind.MARK)
    step = None if trace is None else chosen_step(trace)
    if trace is None or step is None:
        why = "Nothing was timed." if trace is None else "The trace holds no operation of hostward."
        yield f"<p>{why} A run that offloads leaves a trace in its folder; <code>--trace FILE</code> names another.</p>"
        return
    lines = trace.summary([step]).explain().splitlines()
    note = " Copies within host memory: times and rates are not those of a GPU." if report.simulated else ""
    drawn = timeline(trace, step, simulated=report.simulated)
    yield from _of_first(report)
    yield f'<figure aria-label="step {step}, stream by stream">{drawn}'
    yield f"<figcaption>Of step {step} alone:<br>{'<br>'.join(map(escape, lines))}{note}</figcaption></figure>"


def _of_first(report: RunReport) -> Iterator[str]:
    if report.ranks is not None:
        yield f'<p class="faint">Of the first of {len(report.ranks.ranks)} ranks; “Ranks” compares all of them.</p>'


def _ranks(report: RunReport) -> Iterator[str]:
    if report.ranks is None:
        return
    yield "<h2>Ranks</h2>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in report.ranks.stragglers)
    # Without a GPU nothing is pinned, and the device's bytes are those of the host.
    shown = slice(None, -1 if report.simulated else None)
    nodes = [(n.node, str(n.ranks), size(n.host_bytes), size(n.pinned_bytes))[shown] for n in report.ranks.nodes]
    yield _table(("node", "ranks", "host memory", "of it pinned")[shown], nodes)
    head = "rank", "node", "reading samples", "CPU step", "copies", "host memory", "of it pinned", "device peak"
    shown = slice(None, -2 if report.simulated else None)
    rows = [
        (
            str(r.rank), r.node, duration(r.data_s), duration(r.host_step_s), duration(r.transfer_s),
            size(r.host_bytes), size(r.pinned_bytes), size(r.device_peak_bytes),
        )[shown]
        for r in report.ranks.ranks
    ]  # fmt: skip
    yield _details(f"All {len(rows)} ranks, seconds per iteration", _table(head[shown], rows, left=2))


def _frontier(report: RunReport) -> Iterator[str]:
    if not report.frontier:
        return
    points = sorted(report.frontier, key=lambda point: point.device_bytes)
    own = own_point(report)
    everything = [*points, own] if own is not None else points
    scale, unit = unit_of(max(p.device_bytes for p in everything))
    x = axis_from_zero(max(p.device_bytes for p in everything), scale=scale)
    y = axis_from_zero(max(p.step_s for p in everything))
    dots = [(float(p.device_bytes), p.step_s, p is own) for p in everything]
    yield "<h2>Step time against device memory</h2>"
    yield f'<figure><p class="unit" aria-hidden="true">seconds per step, over {unit} on the device</p>'
    text = "; ".join(
        f"{n}: {p.label}, {size(p.device_bytes)}, {duration(p.step_s)}" for n, p in enumerate(everything, 1)
    )
    yield scatter(dots, x, y, title="Step time against device memory", text=text)
    if own is None and report.simulated:
        yield "<figcaption>This run is not among them: on a simulated device its memory is not counted.</figcaption>"
    yield "</figure>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in sentences(report))
    rows = [(str(n), p.label, size(p.device_bytes), duration(p.step_s)) for n, p in enumerate(everything, 1)]
    yield _table(("", "plan", "device memory", "step"), rows, left=2)


def own_point(report: RunReport) -> FrontierPoint | None:
    """Return the point of this run among plans; None if its device memory is not known."""
    peak, step_s = report.measured.device_peak_bytes, report.measured.step_s
    return None if peak is None or step_s is None else FrontierPoint("this run, measured", peak, step_s)


def _predictions(report: RunReport) -> Iterator[str]:
    yield "<h2>Predicted against measured</h2>"
    predicted, measured = report.predicted, report.measured
    if predicted is None:
        yield "<p>There is no prediction: only runs on a GPU are predicted, before they start.</p>"
    guess = predicted or Estimate(None, None, None, None, None)
    offload = report.offload
    span = "" if offload is None else f", mean of {iterations(offload.first_iteration, offload.last_iteration)}"
    pairs = {
        "device memory, peak": (guess.device_peak_bytes, measured.device_peak_bytes, size),
        "host memory of the run": (guess.host_bytes, measured.host_bytes, size),
        "pinned": (guess.pinned_bytes, measured.pinned_bytes, size),
        "step, median": (guess.step_s, measured.step_s, duration),
        f"of it, {'exposed' if report.simulated else 'GPU idle'}{span}": (
            guess.exposed_s,
            measured.exposed_s,
            duration,
        ),
    }
    if report.simulated:
        del pairs["pinned"]
    rows = [
        (name, "no prediction" if predicted is None else shown(p), shown(m), error_percent(p, m))
        for name, (p, m, shown) in pairs.items()
    ]
    yield _table(("", "predicted", "measured", "error"), rows)
    if not report.frontier:
        here = "; without a GPU the rates of another machine are needed" if report.simulated else ""
        yield (
            "<p>No other plans are shown: the run's memory was not estimated on a GPU that a shipped profile "
            "describes, or SciPy was not installed, and it was not started with a plan that holds them "
            f"(<code>hostward plan --json FILE</code>, then <code>hostward train --plan FILE</code>){here}.</p>"
        )


def _progress(report: RunReport) -> Iterator[str]:
    yield "<h2>Loss and speed</h2>"
    speed = [row.tokens_per_s for row in report.steps()]
    for name, values in (("Loss", report.losses), ("Gradient norm, before clipping", report.grad_norms)):
        points = line(values, report.first_iteration)
        if points:
            text = f"from {number(points[0][1])} to {number(points[-1][1])}"
            axis = axis_around([value for _, value in points])
            chart = line_chart(points, axis, title=f"{name} over iterations", text=text)
            yield f"<h3>{name}</h3><figure>{chart}</figure>"
    points = line(speed, report.first_iteration)
    if not points:
        yield "<p>No iteration was completed.</p>"
        return
    text = f"between {number(min(speed))} and {number(max(speed))}"
    axis = axis_from_zero(max(value for _, value in points))
    chart = line_chart(points, axis, title="Tokens per second over iterations", text=text)
    yield f"<h3>Tokens per second</h3><figure>{chart}"
    missing = sum(loss is None for loss in report.losses)
    skipped, each = len(report.skipped_iterations), points_each(speed)
    notes = [f"Losses that were not finite and are not drawn: {missing}."] if missing else []
    notes += [f"A point of these curves is the mean of {each} iterations."] if each > 1 else []
    notes += [f"Steps that were skipped: {skipped}."] if skipped else []
    yield f"<figcaption>{escape(' '.join(notes))}</figcaption></figure>"


def _placements(report: RunReport) -> Iterator[str]:
    yield "<h2>Placements</h2>"
    yield f"<p>{escape(report.placements)}</p>"
    if report.division is not None:
        yield f"<p>{escape(f'Each rank has: {report.division}.')}</p>"
    for told in (weights_of(report).get("words"), (report.activations or {}).get("words")):
        if isinstance(told, str) and told:
            yield f"<p>{'<br>'.join(map(escape, told.splitlines()))}</p>"
    rows = [
        (p.first if p.buckets == 1 else f"{p.first} to {p.last}", p.placement, str(p.buckets), size(p.state_bytes))
        for p in placed_runs(report)
    ]
    table = _table(("buckets, in order of use", "placement", "number", "state"), rows, left=2)
    yield _details(f"All {len(report.plan)} buckets", table)


def _circumstances(report: RunReport) -> Iterator[str]:
    yield "<h2>What ran, and where</h2>"
    yield f"<p><code>{escape(report.command)}</code></p>"
    facts = {
        "data": report.data,
        **_facts(report.machine),
        **_facts(report.host),
        "moved to the host": size(report.moved_d2h_bytes),
        "moved to the device": size(report.moved_h2d_bytes),
        "checkpoint": report.checkpoint or "none",
        "versions": ", ".join(f"{k} {v}" for k, v in report.versions.items()),
    }
    yield _table((), [(k, str(v)) for k, v in facts.items()], left=2)
    rows = [(name, value) for name, value in report.options.items()]
    yield _details(f"{len(rows)} options that differ from their defaults", _table(("option", "value"), rows, left=2))


def _facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return facts by their names on the page."""
    names = {
        "memory_bytes": "host memory",
        "device_memory_bytes": "device memory",
        "limited_by": "host memory limited by",
    }
    return {
        names.get(k, k.replace("_", " ")): size(v) if k.endswith("_bytes") and type(v) is int else str(v)
        for k, v in facts.items()
    }


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Render a table; cells beyond the first `left` columns are figures, and the first cell of a row names it."""
    parts = ['<div class="scroll"><table>']
    if head:
        cells = "".join(f'<th scope="col"{_figure(i, left)}>{escape(word)}</th>' for i, word in enumerate(head))
        parts.append(f"<thead><tr>{cells}</tr></thead>")
    parts.append("<tbody>")
    for first, *others in rows:
        cells = "".join(f"<td{_figure(i, left)}>{escape(cell)}</td>" for i, cell in enumerate(others, 1))
        parts.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return "\n".join([*parts, "</tbody></table></div>"])


def _figure(column: int, left: int) -> str:
    return "" if column < left else ' class="n"'
