"""Traces: sums, files that parse back and are never half written, and the picture.

Seen red: one end of an event rounded instead of both; lengths added up instead of united; waits left out; the temporary
file left behind; the file written in place; each check of `from_chrome` taken out; narrow spans not merged; names not
escaped; labels on one line.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st

from hostward.errors import ConfigError
from hostward.runtime.step_trace import Span, SpanKind, Summary, Trace, from_chrome, union_s
from hostward.schedule.ops import Lane

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "trace_picture.py"
SVG = "{http://www.w3.org/2000/svg}"
COPY, HOST, KERNEL, WAIT, MARK = SpanKind


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start_s = draw(st.floats(0, 1e5))
    return Span(
        draw(st.text(max_size=20)),
        draw(st.sampled_from(Lane)),
        start_s,
        start_s + draw(st.floats(0, 10)),
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 99)),
        kind=draw(st.sampled_from(SpanKind)),
    )


def copy(lane: str, start_s: float, end_s: float, nbytes: int = 0, step: int = 0) -> Span:
    return Span(f"offload/{lane}/x", Lane(lane), start_s, end_s, nbytes, step, kind=COPY)


# --- a made-up run ---


class Clock:
    """Lanes as in-order queues: what is put on a lane starts when the lane is free and what it waits for is there."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.free_s = dict.fromkeys(Lane, 0.0)
        self.step = 0

    def put(
        self, name: str, lane: str, kind: SpanKind, length_s: float, after_s: float = 0.0, nbytes: int = 0
    ) -> float:
        start_s = max(self.free_s[Lane(lane)], after_s)
        end_s = self.free_s[Lane(lane)] = start_s + length_s
        self.trace.add(Span(name, Lane(lane), start_s, end_s, nbytes, self.step, kind=kind))
        return end_s

    def put_state(self, streamed: list[int], nbytes: int, after_s: float) -> list[float]:
        """Bring the next streamed layer's state, once `after_s` has freed a slot; when it is there, if any was left."""
        if not streamed:
            return []
        name = f"offload/h2d/state/{streamed[0]:04}.model.layers.{streamed.pop(0)}"
        return [self.put(name, "h2d", COPY, nbytes / 46e9, after_s, nbytes)]


def placement_of(layer: int) -> str:
    return "device" if layer < 3 else "streamed" if layer % 3 == 0 else "host"


def realistic_trace(layers: int = 24, steps: int = 3, parameters: int = 72_600_000) -> Trace:
    """A model of 24 layers and 1.74 G parameters at 8 K tokens per step; rates of one GPU on PCIe 5."""
    clock = Clock()
    state = 10 * parameters
    arrival_s = dict.fromkeys(range(layers), 0.0)
    for step in range(steps):
        gradient_s = {}
        for i in range(layers):
            stood_s = arrival_s[i] - clock.free_s[Lane.COMPUTE]
            if stood_s > 0:
                clock.step = step - 1  # whose weights it waits for
                clock.put(f"offload/wait/model.layers.{i}", "compute", WAIT, stood_s)
            clock.step = step
            clock.put(f"forward/model.layers.{i}", "compute", MARK, 3.2e-3)
        for i in reversed(range(layers)):
            done_s = clock.put(f"backward/model.layers.{i}", "compute", MARK, 8.6e-3)
            if placement_of(i) == "host":
                name, nbytes = f"offload/d2h/grad/{i:04}.model.layers.{i}", 2 * parameters
                gradient_s[i] = clock.put(name, "d2h", COPY, nbytes / 54e9, done_s, nbytes)
        norm_s = clock.put("offload/norm", "compute", KERNEL, 1.5e-3)
        streamed = [i for i in range(layers) if placement_of(i) == "streamed"]
        staged_s = [*clock.put_state(streamed, state, norm_s), *clock.put_state(streamed, state, norm_s)]  # two slots
        for i in range(layers):
            bucket = f"{i:04}.model.layers.{i}"
            if placement_of(i) == "device":
                clock.put(f"offload/update/{bucket}", "compute", KERNEL, 0.5e-3)
            elif placement_of(i) == "host":
                stepped_s = clock.put(
                    f"offload/host/adamw/{bucket}", "host", HOST, parameters / 4.8e9, max(norm_s, gradient_s[i])
                )
                nbytes = 2 * parameters
                arrival_s[i] = clock.put(f"offload/h2d/weight/{bucket}", "h2d", COPY, nbytes / 54e9, stepped_s, nbytes)
            else:
                arrival_s[i] = clock.put(f"offload/update/{bucket}", "update", KERNEL, 0.5e-3, staged_s.pop(0))
                written_s = clock.put(f"offload/d2h/state/{bucket}", "d2h", COPY, state / 46e9, arrival_s[i], state)
                staged_s += clock.put_state(streamed, state, written_s)
    return clock.trace


# --- sums ---


def test_sums_of_a_step() -> None:
    trace = Trace(
        [
            Span("forward/0", Lane.COMPUTE, 0.0, 8.0, kind=MARK),
            Span("offload/norm", Lane.COMPUTE, 8.0, 8.5, kind=KERNEL),
            Span("offload/wait/0", Lane.COMPUTE, 9.0, 9.25, kind=WAIT),
            Span("offload/wait/1", Lane.COMPUTE, 9.5, 9.75, kind=WAIT),
            copy("d2h", 1.0, 3.0, 4_000_000_000),
            copy("d2h", 3.0, 4.0, 2_000_000_000),
            Span("offload/host/adamw/0", Lane.HOST, 3.5, 6.0, kind=HOST),
            copy("h2d", 7.0, 7.5, 1_000_000_000),
        ]
    )
    assert trace.summary() == Summary(
        steps=1,
        transfer_s={"d2h": 3.0, "h2d": 0.5},
        transfer_bytes={"d2h": 6_000_000_000, "h2d": 1_000_000_000},
        host_step_s=2.5,
        offload_s=5.5,
        exposed_s=0.5,
        hidden_s=5.0,
    )


def test_copies_of_one_direction_that_overlap_count_their_time_once_and_their_bytes_twice() -> None:
    summary = Trace([copy("d2h", 0.0, 2.0, 10), copy("d2h", 1.0, 3.0, 20), copy("h2d", 8, 9, 5)]).summary()
    assert summary.transfer_s == {"d2h": 3.0, "h2d": 1.0}
    assert summary.transfer_bytes == {"d2h": 30, "h2d": 5}
    assert summary.offload_s == 4.0


def test_a_kernel_on_a_lane_of_the_link_is_work_and_no_transfer() -> None:
    summary = Trace([copy("d2h", 0, 1, 10), Span("offload/pack/0", Lane.D2H, 1, 3, 20, kind=KERNEL)]).summary()
    assert (summary.transfer_s["d2h"], summary.transfer_bytes["d2h"], summary.offload_s) == (1.0, 10, 3.0)


def test_all_exposed_is_nothing_hidden() -> None:
    trace = Trace([copy("h2d", 0, 1), Span("offload/wait/0", Lane.COMPUTE, 0, 1.5, kind=WAIT)])
    assert (trace.summary().exposed_s, trace.summary().hidden_s) == (1.5, 0.0)


def test_only_the_steps_that_are_asked_for_count() -> None:
    trace = Trace([copy("d2h", step, step + 0.5, 8, step) for step in (1, 2, 3, 7)])
    assert trace.steps() == (1, 2, 3, 7)
    assert trace.summary().steps == 4
    summary = trace.summary([2, 7])
    assert (summary.steps, summary.transfer_s["d2h"], summary.transfer_bytes["d2h"]) == (2, 1.0, 16)
    with pytest.raises(ConfigError) as caught:
        trace.summary([2, 5])
    assert str(caught.value) == "step 5 is not in the trace\n  fix: it holds 1-3, 7"
    with pytest.raises(ConfigError, match="it holds no step"):
        Trace().summary([0])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12))
def test_the_length_of_a_union_is_the_number_of_seconds_covered(pairs: list[tuple[int, int]]) -> None:
    covered = {second for start, length in pairs for second in range(start, start + length)}
    assert union_s([copy("d2h", start, start + length) for start, length in pairs]) == len(covered)


@settings(deadline=None)
@given(st.lists(spans(), max_size=8))
def test_sums_never_contradict_each_other(some: list[Span]) -> None:
    summary = Trace(some).summary()
    assert 0 <= summary.hidden_s <= summary.offload_s
    assert max(*summary.transfer_s.values(), 0.0) <= sum(s.duration_s for s in some) + 1e-9
    assert len(summary.explain().splitlines()) == 2


def test_weights_of_layers_and_saved_activations_are_told_apart_from_what_the_step_moves() -> None:
    def span(name: str, lane: Lane, start_s: float, end_s: float, nbytes: int = 0) -> Span:
        kind = WAIT if "wait/" in name else COPY
        return Span(f"offload/{name}", lane, start_s, end_s, nbytes, kind=kind)

    spans = [
        span("h2d/layer/layers.0", Lane.H2D, 0.0, 1.0, 3_000_000_000),
        span("wait/weights/arrive", Lane.COMPUTE, 0.5, 1.0),
        span("h2d/weight/0003.layers.2", Lane.H2D, 1.0, 2.0, 7_000_000_000),
        span("wait/layers.2", Lane.COMPUTE, 1.75, 2.0),
        span("wait/weights", Lane.COMPUTE, 2.0, 2.25),  # a module of that name
        span("d2h/activation/0", Lane.D2H, 3.0, 4.0, 2_000_000_000),
        span("h2d/activation/0", Lane.H2D, 5.0, 5.5, 2_000_000_000),
        span("wait/activation/arrive", Lane.COMPUTE, 5.5, 5.5),
    ]
    summary = Trace(spans).summary()
    weights, activations = summary.parts["weights of layers"], summary.parts["saved activations"]
    assert (weights.transfer_bytes, weights.exposed_s) == ({"d2h": 0, "h2d": 3_000_000_000}, 0.5)
    assert (activations.transfer_s, activations.exposed_s) == ({"d2h": 1.0, "h2d": 0.5}, 0.0)
    assert (summary.transfer_bytes["h2d"], summary.exposed_s) == (12_000_000_000, 1.0)
    assert summary.explain().endswith(
        "\nof it, weights of layers: d2h 0.000 GB in 0.000 s, h2d 3.000 GB in 1.000 s (3.0 GB/s), 0.500 s exposed"
        "\nof it, saved activations: d2h 2.000 GB in 1.000 s (2.0 GB/s), h2d 2.000 GB in 0.500 s (4.0 GB/s), 0.000 s "
        "exposed"
    )
    gathered = Trace([spans[0], span("wait/weights/gathered", Lane.COMPUTE, 1.5, 1.75), *spans[2:]]).summary()
    assert (gathered.parts["weights of layers"].exposed_s, gathered.exposed_s) == (0.25, 0.75)
    unmetered = Trace([spans[0], *spans[2:]]).summary()
    assert unmetered.parts["weights of layers"].exposed_s is None
    unknown = Trace([*spans[:1], span("wait/h2d", Lane.COMPUTE, 0.0, 1.0)]).summary()
    assert unknown.parts["weights of layers"].exposed_s is None
    assert unknown.explain().endswith("(3.0 GB/s)")


def test_the_text_says_averages_per_step_and_rates() -> None:
    summary = Summary(
        steps=2,
        transfer_s={"d2h": 0.142, "h2d": 0.14},
        transfer_bytes={"d2h": 7_000_000_000, "h2d": 6_000_000_000},
        host_step_s=0.78,
        offload_s=0.824,
        exposed_s=0.042,
        hidden_s=0.782,
    )
    assert summary.explain() == (
        "offload work 0.412 s per step: 0.391 s hidden, 0.021 s exposed\n"
        "per step: d2h 3.500 GB in 0.071 s (49.3 GB/s), h2d 3.000 GB in 0.070 s (42.9 GB/s), host step 0.390 s"
    )


def test_the_text_of_short_steps_is_in_milliseconds_and_of_none_says_so() -> None:
    assert Trace([copy("h2d", 0.0, 0.0021, 4_200_000)]).summary().explain() == (
        "offload work 2.100 ms per step: 2.100 ms hidden, 0.000 ms exposed\n"
        "per step: d2h 0.000 GB in 0.000 ms, h2d 0.004 GB in 2.100 ms (2.0 GB/s), host step 0.000 ms"
    )
    assert Trace().summary().explain().startswith("offload work: no step was traced\n")


def test_a_wait_that_is_longer_than_the_work_is_no_part_of_it() -> None:
    """Seen red: 2.000 ms of work, of which 2.500 ms were exposed."""
    waited = [
        copy("h2d", 0.0005, 0.0025, 4_000_000),
        Span("offload/wait/h2d", Lane.COMPUTE, 0.0, 0.0025, kind=SpanKind.WAIT),
    ]
    first, *_ = Trace(waited).summary().explain().splitlines()
    assert first == (
        "offload work 2.000 ms per step: 0.000 ms hidden, all of it exposed: compute waited 2.500 ms, from before some "
        "of it began"
    )


@pytest.mark.parametrize(
    ("start_s", "end_s", "nbytes", "says"),
    [
        (2.0, 1.0, 0, "span 'a' goes from 2.0 s to 1.0 s"),
        (math.nan, 1.0, 0, "finite times"),
        (0.0, math.inf, 0, "finite times"),
        (0.0, 1.0, -1, "span 'a' has -1 bytes"),
    ],
)
def test_a_span_that_cannot_be_is_refused(start_s: float, end_s: float, nbytes: int, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        Span("a", Lane.D2H, start_s, end_s, nbytes, kind=COPY)


# --- the file ---


def in_file_order(some: list[Span]) -> list[Span]:
    return sorted(some, key=lambda span: (span.start_s, -span.end_s))


@settings(deadline=None)
@given(st.lists(spans(), max_size=8))
def test_the_file_parses_back(tmp_path_factory: pytest.TempPathFactory, some: list[Span]) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    Trace(some).write(path)
    for was, read in zip(in_file_order(some), from_chrome(path).spans, strict=True):
        assert (was.name, was.lane, was.nbytes, was.step, was.kind) == (
            read.name,
            read.lane,
            read.nbytes,
            read.step,
            read.kind,
        )
        assert abs(was.start_s - read.start_s) < 1e-7
        assert abs(was.end_s - read.end_s) < 1e-7


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e5), min_size=2, max_size=12, unique=True))
def test_spans_that_touch_do_not_overlap_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, times_s: list[float]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    Trace(copy("d2h", a, b) for a, b in pairwise(sorted(times_s))).write(path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(times_s) - 1
    for a, b in pairwise(events):
        assert round(a["ts"] * 1e3) + round(a["dur"] * 1e3) <= round(b["ts"] * 1e3)


def test_a_trace_that_was_read_writes_the_same_file(tmp_path: Path) -> None:
    realistic_trace().write(tmp_path / "a.json")
    from_chrome(tmp_path / "a.json").write(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_what_a_viewer_sees(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Trace([copy("d2h", 0.5, 1.5, 3_000_000_000, 4), Span("forward/0", Lane.COMPUTE, 0.25, 2, kind=MARK)]).write(path)
    events = json.loads(path.read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(threads.values()) == [lane.value for lane in Lane]
    assert [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"] == list(threads)
    mark, moved = [e for e in events if e["ph"] == "X"]
    assert (mark["name"], mark["cat"], threads[mark["tid"]]) == ("forward/0", "mark", "compute")
    assert (moved["name"], moved["cat"], threads[moved["tid"]]) == ("offload/d2h/x", "copy", "d2h")
    assert (moved["ts"], moved["dur"]) == (500_000.0, 1_000_000.0)
    assert moved["args"] == {"step": 4, "bytes": 3_000_000_000, "gb_per_s": 3.0}
    assert mark["args"] == {"step": 0, "bytes": 0}


def test_the_rate_of_a_link_is_the_sum_of_its_copies(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    gb = 1_000_000_000
    some = [copy("d2h", 0, 2, 4 * gb), copy("d2h", 1, 3, 2 * gb), copy("d2h", 2, 3, gb), copy("h2d", 0, 1, gb)]
    Trace([*some, copy("h2d", 1, 1, gb)]).write(path)  # the last takes no time, and has no rate
    rates: dict[str, list[tuple[float, float]]] = {"link d2h": [], "link h2d": []}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "C":
            rates[event["name"]].append((event["ts"] / 1e6, event["args"]["GB/s"]))
    assert rates == {"link d2h": [(0, 2), (1, 3), (2, 2), (3, 0)], "link h2d": [(0, 1), (1, 0)]}


@contextmanager
def largest_file_bytes(limit_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Trace().write(path)
    before = path.read_bytes()
    with largest_file_bytes(2000), pytest.raises(ConfigError) as caught:
        realistic_trace().write(path)
    assert str(caught.value).startswith(f"trace {path} cannot be written\n  why: File too large\n  fix: name a file")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "missing/trace.json",
            "cannot be written\n  why: No such file or directory\n  fix: name a file in a folder that",
        ),
        (".", "is no plain file\n  why: it would be replaced\n  fix: name another file"),
    ],
)
def test_a_place_that_takes_no_file_is_named(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Trace().write(tmp_path / name)
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no plain file"):
        Trace().write(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "latest.json"
    link.symlink_to("trace.json")
    Trace([copy("d2h", 0, 1)]).write(link)
    assert link.is_symlink()
    assert len(from_chrome(tmp_path / "trace.json").spans) == 1


HEADER = '"otherData": {"format": "hostward-trace", "version": 1}'
LANE = '{"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "d2h"}}'
EVENT = '{"name": "a", "cat": "copy", "ph": "X", "tid": 2, "ts": 1, "dur": 2, "args": {"step": 0, "bytes": 5}}'


def document(*events: str) -> str:
    return f'{{{HEADER}, "traceEvents": [{", ".join(events)}]}}'


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is not JSON"),
        ("\ud800", "it is not JSON"),
        (document(LANE)[:-2], "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "list indices must be"),
        ("{}", "'otherData' is missing"),
        (document(LANE).replace("1}", "2}"), "otherData is {'format': 'hostward-trace', 'version': 2}"),
        (f"{{{HEADER}}}", "'traceEvents' is missing"),
        (f'{{{HEADER}, "traceEvents": 3}}', "'int' object is not iterable"),
        (document("3"), "event 0: 'int' object is not subscriptable"),
        (document(EVENT), "event 0: thread 2 is no lane"),
        (document(LANE.replace("d2h", "moon")), "event 0: 'moon' is not a valid Lane"),
        (document(LANE, EVENT.replace("copy", "walk")), "event 1: 'walk' is not a valid SpanKind"),
        (document(LANE, EVENT.replace('"dur": 2, ', "")), "event 1: 'dur' is missing"),
        (document(LANE, EVENT.replace('"dur": 2', '"dur": -2')), "event 1: span 'a' goes from"),
        (document(LANE, EVENT.replace('"dur": 2', '"dur": NaN')), "event 1: span 'a' goes from"),
        (document(LANE, EVENT.replace('"dur": 2', f'"dur": 1{"0" * 400}')), "event 1: int too large"),
        (document(LANE, EVENT.replace('"dur": 2', '"dur": null')), "event 1: float() argument must be"),
        (document(LANE, EVENT.replace('"bytes": 5', '"bytes": 5.5')), "event 1: the name is text, step and bytes are"),
        (document(LANE, EVENT.replace('"step": 0', '"step": true')), "event 1: the name is text, step and bytes are"),
        (document(LANE, EVENT.replace('"bytes": 5', '"bytes": -5')), "event 1: span 'a' has -5 bytes"),
        (document(LANE, EVENT.replace('"a"', "7")), "event 1: the name is text, step and bytes are"),
        (document(LANE, EVENT.replace('"X"', '"B"')), "event 1: phase 'B' is none of M, X and C"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_event(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        from_chrome(path)
    assert str(caught.value).startswith(f"{path} is no trace of hostward\n  why: {why}")
    assert caught.value.fix == "give a file that --trace or Trace.write wrote"


def test_the_cases_above_fail_for_their_own_reason_only(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(document(LANE, EVENT))
    assert from_chrome(tmp_path / "trace.json").spans == (Span("a", Lane.D2H, 1e-6, 3e-6, 5, 0, kind=COPY),)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none\.json cannot be read\n  why: No such file or directory\n  fix: name a"
    ):
        from_chrome(tmp_path / "none.json")


# --- the picture ---


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_picture", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


def drawn(picture: ModuleType, trace: Trace, step: int | None = None, title: str = "title") -> ElementTree.Element:
    return ElementTree.fromstring(picture.draw(trace, step, title))


def rectangles(svg: ElementTree.Element, fill: str | None = None) -> list[ElementTree.Element]:
    """The rectangles that stand for spans: those with a tooltip."""
    found = [r for r in svg.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    return [r for r in found if fill is None or r.get("fill") == fill]


def tooltips(svg: ElementTree.Element) -> list[str]:
    return [str(r.findtext(f"{SVG}title")) for r in rectangles(svg)]


def texts(svg: ElementTree.Element) -> list[str]:
    return [str(t.text) for t in svg.iter(f"{SVG}text")]


def extent(words: ElementTree.Element) -> tuple[float, float, float, float]:
    size = float(words.get("font-size", "0"))
    width = len(words.text or "") * size * 0.5
    x, y = float(words.get("x", "0")), float(words.get("y", "0"))
    left = x - width / 2 if words.get("text-anchor") == "middle" else x
    return left, y - size * 0.75, left + width, y + size * 0.2


@pytest.mark.parametrize("step", [None, 1])
def test_the_picture_is_readable(picture: ModuleType, step: int | None) -> None:
    svg = drawn(picture, realistic_trace(), step, "24 layers")
    width, height = float(svg.get("width", "0")), float(svg.get("height", "0"))
    assert width == 1000
    boxes = [extent(t) for t in svg.iter(f"{SVG}text")]
    assert min(float(t.get("font-size", "0")) for t in svg.iter(f"{SVG}text")) >= 11
    assert all(left >= 0 and top >= 0 and right <= width and bottom <= height for left, top, right, bottom in boxes)
    for n, a in enumerate(boxes):
        for b in boxes[:n]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    for r in rectangles(svg):
        x, wide = float(r.get("x", "0")), float(r.get("width", "0"))
        assert wide >= 0.5
        assert x >= picture.LEFT
        assert x + wide <= picture.RIGHT + 0.01


def test_the_picture_shows_every_lane_and_kind(picture: ModuleType) -> None:
    svg = drawn(picture, realistic_trace(), 1, "24 layers")
    rows = [word for word in texts(svg) if word in set(Lane)]
    assert rows == ["compute", "d2h", "host", "h2d", "update"]
    assert {"24 layers", "forward", "backward", "paler: another step", "ms", "0"} <= set(texts(svg))
    assert set(picture.STYLES.values()) == {r.get("fill") for r in rectangles(svg)}
    assert [line for line in texts(svg) if line.startswith("offload work")] == [
        realistic_trace().summary([1]).explain().splitlines()[0]
    ]
    names = tooltips(svg)
    assert any(name.startswith("offload/d2h/grad/0004.model.layers.4: 2.689 ms, 145.2 MB, 54.0 GB/s") for name in names)


def test_waits_are_red_on_the_row_of_compute(picture: ModuleType) -> None:
    svg = drawn(picture, realistic_trace(), 1)
    waits = rectangles(svg, picture.STYLES["wait"])
    assert waits
    assert all(str(w.findtext(f"{SVG}title")).startswith("offload/wait/") for w in waits)
    marks = rectangles(svg, picture.STYLES["forward"])
    assert {w.get("y") for w in waits} == {m.get("y") for m in marks}


def test_a_wait_inside_a_mark_is_drawn_over_it(picture: ModuleType) -> None:
    inside = [Span("offload/wait/0", Lane.COMPUTE, 1, 2, kind=WAIT), Span("forward/0", Lane.COMPUTE, 0, 9, kind=MARK)]
    assert [name.partition(":")[0] for name in tooltips(drawn(picture, Trace(inside)))] == [
        "forward/0",
        "offload/wait/0",
    ]


def test_spans_too_narrow_to_see_become_one(picture: ModuleType) -> None:
    many = [copy("d2h", n * 1e-6, n * 1e-6 + 5e-7) for n in range(10_000)]
    (tooltip,) = tooltips(drawn(picture, Trace(many)))
    assert tooltip == "10000 spans, from offload/d2h/x to offload/d2h/x, 5.000 ms"
    apart = [copy("d2h", n * 1.0, n + 1e-6) for n in range(10)]
    assert len(tooltips(drawn(picture, Trace(apart)))) == 10


def test_words_that_do_not_fit_are_left_out_or_cut(picture: ModuleType) -> None:
    passes = [
        Span("forward/0", Lane.COMPUTE, 0.0, 0.02, kind=MARK),
        Span("backward/0", Lane.COMPUTE, 0.02, 1.0, kind=MARK),
    ]
    svg = drawn(picture, Trace(passes), title="word " * 60)
    assert "forward" not in texts(svg)
    assert "backward" in texts(svg)
    (title,) = [words for words in texts(svg) if words.startswith("word")]
    assert title.endswith("…")
    assert len(title) * 16 * picture.LETTER <= picture.WIDTH


def test_what_another_step_did_meanwhile_is_paler(picture: ModuleType) -> None:
    trace = Trace([copy("d2h", 0, 2, step=1), copy("h2d", 1, 3, step=2), copy("h2d", 5, 6, step=2)])
    svg = drawn(picture, trace, 1)
    assert [(name[-1], r.get("opacity")) for name, r in zip(tooltips(svg), rectangles(svg), strict=True)] == [
        ("1", None),
        ("2", "0.4"),
    ]


@settings(deadline=None)
@given(some=st.lists(spans(), min_size=1, max_size=8), title=st.text())
def test_any_trace_gives_a_picture(picture: ModuleType, some: list[Span], title: str) -> None:
    svg = drawn(picture, Trace(some), None, title)
    assert 1 <= len(rectangles(svg)) <= len(some)
    ticks = list(svg.iter(f"{SVG}line"))
    assert 1 <= len(ticks) <= 11


def test_the_program_writes_the_picture(
    picture: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "run.json", tmp_path / "run.svg"
    realistic_trace().write(trace)
    assert picture.main([str(trace), str(out), "--step", "1"]) == 0
    assert "run, step 1" in texts(ElementTree.fromstring(out.read_text()))
    assert out.stat().st_size < 100_000
    assert picture.main([str(trace), str(out), "--title", "a < b & c"]) == 0
    assert "a < b & c" in texts(ElementTree.fromstring(out.read_text()))
    assert capsys.readouterr().err == ""


def test_the_program_says_what_is_wrong(
    picture: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "run.json", tmp_path / "run.svg"
    assert picture.main([str(trace), str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    realistic_trace().write(trace)
    assert picture.main([str(trace), str(out), "--step", "9"]) == 2
    assert capsys.readouterr().err == "step 9 is not in the trace\n  fix: it holds 0-2\n"
    assert picture.main([str(trace), str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written\n  why: Is a directory" in capsys.readouterr().err
    Trace().write(trace)
    assert picture.main([str(trace), str(out)]) == 2
    assert capsys.readouterr().err.startswith("the trace holds no span\n  fix: ")
    assert not out.exists()
