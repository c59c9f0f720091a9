"""Record spans of a step with lane, times and bytes, write them as a Chrome/Perfetto file and sum them up. No torch.

The file is the JSON object form of the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open:
one thread per lane, one complete event ("X") per span with its bytes, rate and step, and one counter ("C") per copy
direction. Times are microseconds with three decimals.

Names are paths: `offload/d2h/grad/0003.model.layers.1`, `offload/h2d/state/...`, `offload/host/adamw/...`,
`offload/host/guess/...` (steps made in backward), `offload/update/...`, `offload/wait/model.layers.1`,
`forward/model.layers.1`; of offloaded weights `offload/h2d/layer/...` and `offload/wait/weights/...` (`gathered`: for a
gather that had waited for them), of saved activations `offload/h2d/activation/...` and `offload/wait/activation/...`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any

from hostward.errors import ConfigError
from hostward.files.atomic_file import replace_text
from hostward.schedule.ops import Lane

DIRECTIONS = ("d2h", "h2d")
"""Copy directions between the device and the host."""

_PARTS = {"layer": "weights of layers", "weights": "weights of layers", "activation": "saved activations"}
"""Offloaded parts of a model besides optimizer state, by the word in the names of their copies and waits."""

SHORT_STEP_S = 0.01
"""Offload work per step below which the text is in milliseconds, since three decimals of a second show too little."""

_FORMAT = "hostward-trace"
_VERSION = 1
# Perfetto takes thread and process 0 for the idle task.
_PROCESS_ID = 1
_FIRST_THREAD_ID = 1


class SpanKind(StrEnum):
    """Names the kind of work in a span."""

    COPY = "copy"
    """Transfer between the tiers."""
    HOST = "host"
    """AdamW or the accumulation of gradients on the CPU."""
    KERNEL = "kernel"
    """Device kernels that hostward launches."""
    WAIT = "wait"
    """GPU idle: the compute lane waits for a copy or a CPU step."""
    MARK = "mark"
    """Forward or backward of a layer, as the hooks saw it."""


_OFFLOAD_KINDS = (SpanKind.COPY, SpanKind.HOST, SpanKind.KERNEL)


@dataclass(frozen=True, slots=True)
class Span:
    """Records one stretch of time on one lane, in seconds since an instant that is the same for the whole trace.

    Raises:
        ConfigError: a time is not finite, the end is before the start, or `nbytes` is negative.
    """

    name: str
    lane: Lane
    start_s: float
    end_s: float
    nbytes: int = 0
    step: int = 0
    kind: SpanKind = field(kw_only=True)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s)) or self.end_s < self.start_s:
            raise ConfigError(
                f"span {self.name!r} goes from {self.start_s} s to {self.end_s} s",
                why="a span has finite times and ends no earlier than it starts",
                fix="take both times from one clock",
            )
        if self.nbytes < 0:
            raise ConfigError(f"span {self.name!r} has {self.nbytes} bytes", fix="count bytes from zero")

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def direction(self) -> str | None:
        """Return the direction of a copy, "d2h" or "h2d", by its lane; None for all other spans."""
        lane = self.lane.value
        return lane if self.kind is SpanKind.COPY and lane in DIRECTIONS else None


@dataclass(frozen=True, slots=True)
class PartSummary:
    """Sums up one part of the offload work, as `Summary` does; its copies may overlap with those of other parts."""

    transfer_s: dict[str, float]
    transfer_bytes: dict[str, int]
    exposed_s: float | None
    """Seconds in which the GPU was idle because of it. If a gather waits for weights, and the compute lane for the
    gather, at most the last part of that wait that is as long as the gather waited (docs/reports.md). None on a
    simulated device, where it is not known.
    """


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums up `steps` steps. Times of overlapping spans count once: they are lengths of unions."""

    steps: int
    transfer_s: dict[str, float]
    """Seconds in which at least one copy was running, by direction."""
    transfer_bytes: dict[str, int]
    host_step_s: float
    offload_s: float
    """Seconds in which at least one lane other than compute worked."""
    exposed_s: float
    """Seconds in which the GPU was idle because of offload work, from before it began where the GPU was earlier: it
    may be more than `offload_s`.
    """
    hidden_s: float
    """Offload work that overlapped with compute, in seconds."""
    parts: dict[str, PartSummary] = field(default_factory=dict)
    """Sums for offloaded "weights of layers" and "saved activations", if there are any."""

    def explain(self) -> str:
        """Return two lines of averages per step, with copy rates, and one for each part."""
        if not self.steps:
            return "offload work: no step was traced\nlink and host: nothing to report"
        unit, per_unit = ("s", 1.0) if self.offload_s >= SHORT_STEP_S * self.steps else ("ms", 1e3)

        def mean(seconds: float) -> str:
            return f"{seconds * per_unit / self.steps:.3f} {unit}"

        work, waited = mean(self.offload_s), mean(self.exposed_s)
        exposed = f"{waited} exposed"
        if self.exposed_s > self.offload_s and waited != work:
            exposed = f"all of it exposed: compute waited {waited}, from before some of it began"

        def copies(of: Summary | PartSummary) -> str:
            told = []
            for direction in DIRECTIONS:
                moved, seconds = of.transfer_bytes[direction], of.transfer_s[direction]
                rate = f" ({moved / seconds / 1e9:.1f} GB/s)" if moved and seconds else ""
                told.append(f"{direction} {moved / self.steps / 1e9:.3f} GB in {mean(seconds)}{rate}")
            return ", ".join(told)

        overlap = f"offload work {work} per step: {mean(self.hidden_s)} hidden, {exposed}"
        lines = [overlap, f"per step: {copies(self)}, host step {mean(self.host_step_s)}"]
        for name, part in self.parts.items():
            waited = "" if part.exposed_s is None else f", {mean(part.exposed_s)} exposed"
            lines.append(f"of it, {name}: {copies(part)}{waited}")
        return "\n".join(lines)


class Trace:
    """Keeps spans in the order in which they were added."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = list(spans)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the steps that have spans, ascending."""
        return tuple(sorted({span.step for span in self._spans}))

    def of_steps(self, steps: Collection[int] | None = None) -> Trace:
        """Return a trace of these steps only; None means all.

        Raises:
            ConfigError: a step has no span.
        """
        if steps is None:
            return Trace(self._spans)
        wanted = set(steps)
        missing = sorted(wanted.difference(self.steps()))
        if missing:
            raise ConfigError(f"step {missing[0]} is not in the trace", fix=f"it holds {_ranges(self.steps())}")
        return Trace(span for span in self._spans if span.step in wanted)

    def summary(self, steps: Collection[int] | None = None) -> Summary:
        """Sum up these steps; None means all.

        Raises:
            ConfigError: a step has no span.
        """
        chosen = self.of_steps(steps)
        spans = chosen.spans
        copies = {d: [span for span in spans if span.direction == d] for d in DIRECTIONS}
        work = [span for span in spans if span.lane is not Lane.COMPUTE and span.kind in _OFFLOAD_KINDS]
        offload_s = union_s(work)
        exposed_s = math.fsum(span.duration_s for span in spans if span.kind is SpanKind.WAIT)
        return Summary(
            steps=len(chosen.steps()),
            transfer_s={d: union_s(copies[d]) for d in DIRECTIONS},
            transfer_bytes={d: sum(span.nbytes for span in copies[d]) for d in DIRECTIONS},
            host_step_s=union_s([span for span in spans if span.kind is SpanKind.HOST]),
            offload_s=offload_s,
            exposed_s=exposed_s,
            hidden_s=max(0.0, offload_s - exposed_s),
            parts=_parts(spans),
        )

    def write(self, path: Path) -> None:
        """Write the Chrome trace, atomically.

        Raises:
            ConfigError: `path` is no plain file, or cannot be written.
        """
        spans = sorted(self._spans, key=lambda span: (span.start_s, -span.end_s))  # enclosing spans come first
        events = [*_metadata(), *map(_event, spans), *_link_rates(spans)]
        header = json.dumps({"displayTimeUnit": "ms", "otherData": {"format": _FORMAT, "version": _VERSION}})
        lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
        replace_text(path, f'{header[:-1]}, "traceEvents": [\n{lines}\n]}}\n', what="trace")


def _parts(spans: Collection[Span]) -> dict[str, PartSummary]:
    copies: dict[str, list[Span]] = {}
    waits: dict[str, float] = {}
    lanes = {f"offload/wait/{lane.value}" for lane in Lane}
    known = not any(span.name in lanes for span in spans)
    for span in spans:
        words = span.name.split("/", 3)
        part = _PARTS.get(words[2]) if len(words) == 4 else None
        if part is not None and span.direction is not None:
            copies.setdefault(part, []).append(span)
        elif part is not None and span.kind is SpanKind.WAIT:
            waits[part] = waits.get(part, 0.0) + span.duration_s
    found = {}
    for part in dict.fromkeys(_PARTS.values()):
        if part in copies:
            ways = {d: [span for span in copies[part] if span.direction == d] for d in DIRECTIONS}
            found[part] = PartSummary(
                transfer_s={d: union_s(ways[d]) for d in DIRECTIONS},
                transfer_bytes={d: sum(span.nbytes for span in ways[d]) for d in DIRECTIONS},
                exposed_s=waits.get(part) if known else None,
            )
    return found


def union_s(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    pieces = []
    end_s = -math.inf
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.end_s > end_s:
            pieces.append(span.end_s - max(span.start_s, end_s))
            end_s = span.end_s
    return math.fsum(pieces)


def from_chrome(path: Path) -> Trace:
    """Read a file that `Trace.write` wrote; spans come in order of their start.

    Raises:
        ConfigError: the file cannot be read, or is no trace of hostward; names the event.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"trace {path} cannot be read", why=error.strerror or str(error), fix="name a file that --trace wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _foreign(path, f"it is not JSON: {error}") from error
    try:
        if document["otherData"] != {"format": _FORMAT, "version": _VERSION}:
            raise ValueError(f"otherData is {document['otherData']!r}")
        events = list(document["traceEvents"])
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(path, _reason(error)) from error
    lanes: dict[int, Lane] = {}
    trace = Trace()
    for number, event in enumerate(events):
        try:
            _read_event(event, lanes, trace)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _foreign(path, f"event {number}: {_reason(error)}") from error
    return trace


def _metadata() -> Iterator[dict[str, Any]]:
    yield _named("process_name", _FIRST_THREAD_ID, name="hostward")
    for thread_id, lane in enumerate(Lane, _FIRST_THREAD_ID):
        yield _named("thread_name", thread_id, name=lane.value)
        yield _named("thread_sort_index", thread_id, sort_index=thread_id)


def _named(name: str, thread_id: int, /, **args: str | int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS_ID, "tid": thread_id, "args": args}


def _nanoseconds(seconds: float) -> int:
    # Both ends are rounded, not the length: spans that touch must not overlap in the file, or viewers drop one.
    return round(seconds * 1e9)


def _event(span: Span) -> dict[str, Any]:
    start_ns, end_ns = _nanoseconds(span.start_s), _nanoseconds(span.end_s)
    args: dict[str, float] = {"step": span.step, "bytes": span.nbytes}
    if span.nbytes and end_ns > start_ns:
        args["gb_per_s"] = round(span.nbytes / (end_ns - start_ns), 3)  # bytes per nanosecond are GB/s
    return {
        "name": span.name,
        "cat": span.kind.value,
        "ph": "X",
        "pid": _PROCESS_ID,
        "tid": list(Lane).index(span.lane) + _FIRST_THREAD_ID,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": args,
    }


def _link_rates(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield counter events with the sum of the rates of all running copies of a direction, wherever it changes."""
    for direction in DIRECTIONS:
        changes: list[tuple[int, float]] = []
        for span in spans:
            start_ns, end_ns = _nanoseconds(span.start_s), _nanoseconds(span.end_s)
            if span.direction == direction and span.nbytes and end_ns > start_ns:
                rate = span.nbytes / (end_ns - start_ns)
                changes += [(start_ns, rate), (end_ns, -rate)]
        under_way: list[float] = []
        for at_ns, group in groupby(sorted(changes), key=lambda change: change[0]):
            for _, rate in group:  # ascending: copies that end here are removed before those that start are added
                if rate < 0:
                    under_way.remove(-rate)
                else:
                    under_way.append(rate)
            yield {
                "name": f"link {direction}",
                "ph": "C",
                "pid": _PROCESS_ID,
                "ts": at_ns / 1e3,
                "args": {"GB/s": round(math.fsum(under_way), 3)},
            }


def _read_event(event: dict[str, Any], lanes: dict[int, Lane], trace: Trace) -> None:
    """Read one event; raises KeyError, TypeError, ValueError or OverflowError if `write` never writes such."""
    phase = event["ph"]
    if phase == "M" and event["name"] == "thread_name":
        lanes[event["tid"]] = Lane(event["args"]["name"])
    elif phase == "X":
        lane = lanes.get(event["tid"])
        if lane is None:
            raise ValueError(f"thread {event['tid']!r} is no lane")
        name, step, nbytes = event["name"], event["args"]["step"], event["args"]["bytes"]
        if not isinstance(name, str) or type(step) is not int or type(nbytes) is not int:
            raise TypeError("the name is text, step and bytes are whole numbers")
        start_s = float(event["ts"]) / 1e6
        end_s = (float(event["ts"]) + float(event["dur"])) / 1e6
        trace.add(Span(name, lane, start_s, end_s, nbytes, step, kind=SpanKind(event["cat"])))
    elif phase not in ("M", "C"):
        raise ValueError(f"phase {phase!r} is none of M, X and C")


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is no trace of hostward", why=why, fix="give a file that --trace or Trace.write wrote")


def _ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as text: 1-4, 7."""

    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found) or "no step"
