"""The page about a run: what it says, that it needs nothing from elsewhere, and that its charts hold the numbers."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from html_reader import Element, read_html
from report_cases import GIB, MIB, crowded_report, cut_short, gpu_report, gpu_trace, ranks_report, ranks_trace
from rich.console import Console

from hostward.errors import ConfigError
from hostward.report import formatting, png
from hostward.report.better_plans import better_plans, sentences as said_of
from hostward.report.formatting import SEEN, device_stack, host_stack, line
from hostward.report.page import render, unit_of
from hostward.report.schema import Ended, OffloadReport, OwnerSamples, RunReport, StepMemory
from hostward.report.svg import (
    Window,
    axis_around,
    axis_from_zero,
    axis_of_iterations,
    boxes_of,
    chosen_step,
    escape,
    ticks,
    timeline,
)
from hostward.runtime.step_trace import Span, SpanKind, Trace
from hostward.schedule.ops import Lane
from hostward.trainer.report import render as tables

NOTHING = OwnerSamples((), (), {}, None, {}, ())


def simulated(report: RunReport) -> RunReport:
    """The same run on a machine without a GPU."""
    memory = replace(report.memory, device_allocated_bytes=None, device_peak_bytes=None)
    samples = replace(report.memory_over_time, rest_of_device_bytes=None)
    measured = replace(report.measured, device_peak_bytes=None)
    machine = {**report.machine, "backend": "simulated", "device": "cpu"}
    return replace(report, memory=memory, memory_over_time=samples, measured=measured, machine=machine)


def empty() -> RunReport:
    """A run that was stopped in its first iteration, with nothing known about it."""
    return replace(
        cut_short(Ended.TERMINATED, "SIGTERM"),
        last_iteration=0,
        losses=(),
        grad_norms=(),
        iteration_s=(),
        learning_rates=(),
        tokens_per_s=0.0,
        memory_over_time=NOTHING,
        plan=(),
        options={},
        host={},
        machine={},
        activations=None,
        skipped_iterations=(),
    )


def one_iteration() -> RunReport:
    """The shortest run that has come to its end."""
    report, memory = gpu_report(), StepMemory(None, None, (GIB,), (GIB,))
    columns = {"losses": (3.0,), "grad_norms": (1.0,), "iteration_s": (0.5,), "learning_rates": (1e-3,)}
    samples = OwnerSamples((1.0,), ("step",), {"weights": (GIB,)}, (GIB,), {}, (0,))
    return replace(report, last_iteration=1, step_memory=memory, memory_over_time=samples, **columns)  # type: ignore[arg-type]


CASES = {
    "whole": (gpu_report(), gpu_trace()),
    "simulated": (simulated(gpu_report()), gpu_trace()),
    "without a trace": (gpu_report(), None),
    "with a trace of nothing": (gpu_report(), Trace()),
    "failed": (cut_short(Ended.FAILED, "MemoryLimitError"), None),
    "nothing": (empty(), None),
    "one iteration": (one_iteration(), gpu_trace().of_steps([5])),
}


def sections(page: Element) -> dict[str, str]:
    """The text below each second heading."""
    (main,) = page.all("main")
    found: dict[str, str] = {}
    name = ""
    for child in main.children:
        if child.tag == "h2":
            name = child.text
        found[name] = f"{found.get(name, '')} {child.text}".strip()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_page_is_whole_and_needs_nothing_else(case: str) -> None:
    text = render(*CASES[case])
    page = read_html(text)
    assert text.startswith("<!doctype html>")
    assert page.all("html", lang="en")
    assert page.all("meta", name="viewport", content="width=device-width, initial-scale=1")
    assert len(page.all("h1")) == 1
    tags = {element.tag for element in page.below()}
    assert not tags & {"script", "link", "img", "iframe", "object", "use", "a"}
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert not [n for e in page.below() for n in e.attributes if n.startswith("on") or n in ("src", "href")]
    assert "nan" not in re.findall(r"[a-z]+", text.partition("</style>")[2].lower())


@pytest.mark.parametrize("case", CASES)
def test_every_drawing_has_a_title(case: str) -> None:
    page = read_html(render(*CASES[case]))
    for svg in page.all("svg"):
        assert svg.has("role", "img")
        assert svg.children[0].tag == "title"
        assert svg.children[0].text
    for plot in page.all("div", class_="plot"):
        assert plot.all("desc")[0].text
    for row in (row for table in page.all("table") for row in table.all("tr")):
        assert row.children[0].tag == "th"


def test_sections_in_order() -> None:
    assert list(sections(read_html(render(gpu_report(), gpu_trace()))))[1:] == [
        "Memory over time, by owner",
        "One step, stream by stream",
        "Step time against device memory",
        "Predicted against measured",
        "Loss and speed",
        "Placements",
        "What ran, and where",
    ]


def test_text_of_a_run_cannot_become_markup() -> None:
    evil = '<script>alert("1")</script>\x00&'
    report = gpu_report()
    report = replace(
        report,
        recipe=evil,
        ended=Ended.FAILED.value,
        reason=evil,
        command=evil,
        data=evil,
        placements=evil,
        options={evil: evil},
        machine={**report.machine, "device": evil, evil: evil},
        activations={"words": evil},
        plan=(replace(report.plan[0], name=evil, placement=evil),),
        frontier=(replace(report.frontier[0], label=evil),),
        memory=replace(report.memory, device_by_owner_bytes={evil: 1}),
        memory_over_time=replace(report.memory_over_time, device_by_owner_bytes={evil: (GIB,) * 24}),
    )
    trace = Trace([Span(evil, Lane.D2H, 0, 1, 5, 1, kind=SpanKind.COPY)])
    text = render(report, trace)
    page = read_html(text)
    assert not page.all("script")
    assert "\x00" not in text
    assert page.all("h1")[0].text.startswith('<script>alert("1")</script>\ufffd&:')


def test_what_was_decided_says_what_each_rank_has_and_tells_weights_from_activations() -> None:
    division = "weights, gradients and state sharded over 2 ranks"
    activations = {"words": "saved activations: 2 GiB", "weights": {"words": "weights: 5 GiB on the host"}}
    text = render(replace(gpu_report(), activations=activations, division=division))
    assert f"<p>Each rank has: {division}.</p>" in text
    assert "<p>weights: 5 GiB on the host</p>\n<p>saved activations: 2 GiB</p>" in text


def test_a_page_of_ranks_says_whose_memory_and_streams_it_shows_and_compares_the_ranks() -> None:
    run = ranks_report()
    text = sections(read_html(render(run, ranks_trace())))
    for title in ("Memory over time, by owner", "One step, stream by stream"):
        assert "Of the first of 4 ranks" in text[title]
    assert run.ranks is not None
    assert run.ranks.stragglers[0] in text["Ranks"]
    assert "gpu-node-1.cluster 2 31.0 GiB 22.0 GiB" in text["Ranks"]
    assert "3 gpu-node-1.cluster 10.0 ms 200 ms 220 ms 16.0 GiB 11.0 GiB 17.0 GiB" in text["Ranks"]
    there = sections(read_html(render(simulated(run), ranks_trace())))["Ranks"]
    assert "3 gpu-node-1.cluster 10.0 ms 200 ms 220 ms 16.0 GiB" in there
    assert "pinned" not in there
    alone = render(gpu_report(), gpu_trace())
    assert "Ranks" not in alone
    assert "Of the first of" not in alone


# --- words ---


def test_the_answer_says_how_much_left_and_at_what_cost() -> None:
    assert formatting.answer(gpu_report()) == (
        "9.0 GiB of optimizer state (60 % of it) and 2.0 GiB of saved activations per step left the device, at the "
        "cost of 24.0 ms in each step, of 430 ms in the median (5.6 %), in which the GPU was idle for it; 310 ms of "
        "copies and CPU optimizer steps were overlapped."
    )
    says = "left the simulated device; without a GPU there is no cost in time to report."
    assert formatting.answer(simulated(gpu_report())).endswith(says)
    assert formatting.answer(cut_short(Ended.FAILED, "x")).endswith("; what that cost in time was not measured.")
    nothing = replace(gpu_report(), offloaded_bytes=0, activations=None)
    assert formatting.answer(nothing) == "Nothing was offloaded: all 15.0 GiB of optimizer state stayed on the device."
    only = replace(gpu_report(), offloaded_bytes=0)
    assert formatting.answer(only).startswith("2.0 GiB of saved activations per step left the device, at")
    weights = {"offloaded_bytes": 5 * GIB, "words": "weights: 5 GiB on the host"}
    both = replace(gpu_report(), activations={**(gpu_report().activations or {}), "weights": weights})
    assert formatting.answer(both).startswith(
        "9.0 GiB of optimizer state (60 % of it), 5.0 GiB of weights of layers and 2.0 GiB of saved activations "
    )
    alone = replace(gpu_report(), offloaded_bytes=0, activations={"weights": weights, "words": ""})
    assert formatting.answer(alone).startswith("5.0 GiB of weights of layers left the device, at")


def test_a_cost_is_never_more_than_the_step() -> None:
    offload = gpu_report().offload
    assert isinstance(offload, OffloadReport)
    assert "(100 %)" in formatting.answer(replace(gpu_report(), offload=replace(offload, exposed_s=0.6)))


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (Ended.FAILED, "The run failed after 12 of 40 iterations: full."),
        (Ended.INTERRUPTED, "The run was interrupted after 12 of 40 iterations: full."),
        (Ended.TERMINATED, "The run was terminated after 12 of 40 iterations: full."),
        (Ended.RUNNING, "When this was written the run was still running, after 12 of 40 iterations. If it is over"),
    ],
)
def test_a_run_that_did_not_finish_is_told_first(ended: Ended, says: str) -> None:
    (notice,) = read_html(render(cut_short(ended, "full"))).all("p", class_="notice")
    assert notice.text.startswith(says)
    assert formatting.status(gpu_report()) is None
    assert not read_html(render(gpu_report())).all("p", class_="notice")


def test_sizes_times_and_errors() -> None:
    sizes = {0: "0 B", 1023: "1,023 B", 1024: "1.0 KiB", 1536 * 1024: "1.5 MiB", 1023.99 * GIB: "1,024 GiB"}
    assert [formatting.size(n) for n in sizes] == list(sizes.values())
    assert formatting.size(2**50) == "1,048,576 GiB"
    assert formatting.size(1024 * MIB - 1) == "1.0 GiB"
    times = {0: "0.00 s", 2e-6: "2.0 µs", 0.0123: "12.3 ms", 0.43: "430 ms", 0.9996: "1.00 s", 1234.5: "1,234.50 s"}
    assert [formatting.duration(s) for s in times] == list(times.values())
    assert [formatting.number(v) for v in (0, 0.01234, 3.14159, 123456.7, None)] == [
        "0",
        "0.01234",
        "3.142",
        "123,457",
        "–",
    ]
    assert formatting.error_percent(110, 100) == "+10.0 %"
    assert formatting.error_percent(90, 100) == "-10.0 %"
    assert formatting.error_percent(0, 0) == "0.0 %"
    assert [formatting.error_percent(p, m) for p, m in ((None, 1), (1, None), (1, 0))] == ["–"] * 3


def test_predictions_stand_beside_what_was_measured() -> None:
    (table,) = [t for t in read_html(render(gpu_report())).all("table") if "predicted" in t.text]
    rows = {row.children[0].text: [c.text for c in row.children[1:]] for row in table.all("tr")}
    assert rows["device memory, peak"] == ["16.6 GiB", "17.0 GiB", "-2.4 %"]
    assert rows["step, median"] == ["410 ms", "430 ms", "-4.7 %"]
    page = read_html(render(replace(gpu_report(), predicted=None)))
    assert "There is no prediction" in sections(page)["Predicted against measured"]
    (table,) = [t for t in page.all("table") if "predicted" in t.text]
    assert [c.text for c in table.all("tr")[1].children[1:]] == ["no prediction", "17.0 GiB", "–"]


def test_placements_are_told_in_runs() -> None:
    runs = formatting.placed_runs(gpu_report())
    assert [(r.placement, r.buckets) for r in runs] == [("device", 4), ("host", 5), ("streamed", 3)]
    assert sum(r.state_bytes for r in runs) == sum(b.state_bytes for b in gpu_report().plan)
    assert (runs[1].first, runs[1].last) == ("0004.model.layers.4", "0008.model.layers.8")


# --- charts ---


def test_stacks_hold_every_byte_but_what_is_too_thin() -> None:
    samples = gpu_report().memory_over_time
    stack = device_stack(samples)
    assert list(stack.layers) == ["weights", "optimizer state", "gradients", "staging slots", "activations"]
    assert stack.totals[:3] == (16 * GIB, 12 * GIB + 700 * MIB, 10 * GIB + 700 * MIB)
    assert host_stack(samples).layers["weights"] == (GIB,) * 24
    assert device_stack(NOTHING).totals == ()


def test_owners_beyond_what_was_allocated_are_told_and_not_drawn() -> None:
    """Seen red: a chart of them, 163 GiB high on a GPU of 140, without a word."""
    report = gpu_report()
    assert "counted twice" not in render(report, None)
    samples = replace(report.memory_over_time, rest_of_device_bytes=(7 * GIB, GIB, -3 * GIB) * 8)
    page = render(replace(report, memory_over_time=samples), None)
    assert "The owners&#x27; counts exceed what torch&#x27;s allocator held at the same moment by up to 3.0 GiB" in page
    assert min(map(min, device_stack(samples).layers.values())) == 0


def test_of_many_samples_the_fullest_moment_of_each_iteration_is_drawn() -> None:
    many = 400
    at = tuple(i + (k + 1) / 3 for i in range(many) for k in range(3))
    column = (5, 7, 6) * many
    stack = device_stack(OwnerSamples(at, ("m",) * len(at), {"weights": column}, None, {}, (0,) * len(at)))
    assert stack.layers["weights"] == (7,) * many
    assert stack.at == tuple(range(1, many + 1))


def test_areas_reach_from_layer_to_layer() -> None:
    page = read_html(render(gpu_report()))
    paths = [p for p in page.all("path") if p.has("class", "layer fill-weights")]
    heights = [float(y) for y in re.findall(r",([\d.]+)", paths[0].attributes["d"])]
    assert (min(heights), max(heights)) == (850.0, 1000.0)  # 3 of 20 GiB, from the bottom
    (peak,) = page.all("line", class_="peak")
    assert peak.attributes["y1"] == "150.0"  # 17 of 20 GiB


def test_lines_are_thinned_to_what_can_be_seen() -> None:
    assert line([1.0, None, 3.0], 4) == [(5.0, 1.0), (7.0, 3.0)]
    points = line([float(i) for i in range(10 * SEEN)], 0)
    assert len(points) == SEEN
    assert points[0] == (5.5, 4.5)
    assert line([], 0) == []


@pytest.mark.parametrize("most", [1e-9, 0.02, 1, 7, 20, 999, 1e12])
def test_axes_from_zero_hold_the_most(most: float) -> None:
    axis = axis_from_zero(most)
    assert axis.low == 0
    assert most <= axis.high * 1.021
    assert 2 <= len(axis.marks) <= 7
    assert len({label for _, label in axis.marks}) == len(axis.marks) or most == 1e-9


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0], [2.1, 9.7], [-5.0, 3.0], [1e-7, 2e-7], [1e9, 1e9 + 1]])
def test_axes_around_hold_all_values(values: list[float]) -> None:
    axis = axis_around(values)
    slack = (axis.high - axis.low) * 1e-6
    assert axis.low - slack <= min(values) <= max(values) <= axis.high + slack
    assert axis.low < axis.high
    assert 2 <= len(axis.marks) <= 8


def test_marks_of_iterations_are_whole_numbers() -> None:
    assert [label for _, label in axis_of_iterations(0.33, 8).marks] == ["2", "4", "6", "8"]
    assert [label for _, label in axis_of_iterations(5, 5).marks] == ["5"]
    assert ticks(0, 5) == [0.0]
    assert ticks(float("inf"), 5) == [0.0]
    assert [unit_of(n)[1] for n in (5, 5000, 5 * MIB, 5 * GIB)] == ["B", "KiB", "MiB", "GiB"]


# --- the timeline ---


def test_the_step_that_another_one_follows_is_shown() -> None:
    assert chosen_step(gpu_trace()) == 6
    assert chosen_step(gpu_trace().of_steps([5])) == 5
    assert chosen_step(Trace()) is None


def test_lanes_have_rows_with_their_sums() -> None:
    page = read_html(render(gpu_report(), gpu_trace()))
    rows = [row for row in page.all("div", class_="lane") if row.all("svg")]
    assert [row.all("b")[0].text for row in rows] == ["compute", "d2h", "host", "h2d"]
    assert [row.all("div", class_="sum")[0].text for row in rows] == [
        "idle 24.5 ms",
        "busy 90.0 ms 46.7 GB/s",
        "busy 180 ms",
        "busy 72.0 ms 50.0 GB/s",
    ]
    d2h = rows[1].all("rect")
    assert len(d2h) == 6
    assert d2h[0].text == "offload/d2h/grad/model.layers.5: 15.000 ms, 700.0 MB, 46.7 GB/s, step 6"
    for rectangle in page.all("rect"):
        x, width = float(rectangle.attributes["x"]), float(rectangle.attributes["width"])
        assert x >= 0
        assert width > 0
        assert x + width <= 1000.01


def test_forward_and_backward_are_told_where_they_are_known() -> None:
    phases = read_html(render(gpu_report(), gpu_trace())).all("div", class_="phases")[0]
    assert phases.text.split() == ["backward", "forward"]
    page = read_html(render(simulated(gpu_report()), gpu_trace()))
    assert not page.all("div", class_="phases")
    assert not page.all("rect", class_="fill-forward")


@pytest.mark.parametrize(("report", "name"), [(gpu_report(), "GPU idle"), (simulated(gpu_report()), "exposed")])
def test_the_page_says_what_its_seconds_and_bytes_are_of(report: RunReport, name: str) -> None:
    text = sections(read_html(render(report, gpu_trace())))
    lanes, measured, memory = (
        text[title]
        for title in ("One step, stream by stream", "Predicted against measured", "Memory over time, by owner")
    )
    assert "Of step 6 alone:" in lanes
    assert f"of it, {name}, mean of iterations 38 to 39" in measured
    assert "device, most at any time" in memory
    assert "The legend has the most that is drawn." in memory
    assert "at most" not in memory
    assert ("the GPU's own work" in lanes) != report.simulated
    assert ("the device's own work" in lanes) == report.simulated


def test_nothing_is_page_locked_without_a_gpu() -> None:
    assert "pinned host memory" not in render(simulated(gpu_report()), gpu_trace())
    assert "pinned host memory" in render(gpu_report(), gpu_trace())


def test_without_a_trace_the_page_says_how_to_get_one() -> None:
    assert "Nothing was timed." in sections(read_html(render(gpu_report())))["One step, stream by stream"]
    text = sections(read_html(render(gpu_report(), Trace())))["One step, stream by stream"]
    assert "The trace holds no operation of hostward." in text


@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_a_step_of_four_ranks_and_48_layers_stays_small_and_legible(microbatches: int) -> None:
    """Files are bounded by what can be told apart, not by how many spans there are."""
    trace = ranks_trace(48, microbatches)
    text = render(ranks_report(), trace)
    page = read_html(text)
    rows = [row for row in page.all("div", class_="lane") if row.all("svg")]
    assert [row.all("b")[0].text for row in rows] == ["compute", "d2h", "host", "h2d", "update"]
    assert all(len(row.all("rect")) <= 900 for row in rows)
    assert len(text.encode()) < 500_000
    words = page.all("div", class_="phases")[0].text.split()
    assert words.count("forward") == microbatches + 1  # and the next step's first
    heights = re.findall(r"\.bar \{[^}]*height: ([\d.]+)rem", text)
    assert [float(height) for height in heights] == [2.25]


def test_marks_of_a_ruler_do_not_meet_on_a_telephone() -> None:
    """Of steps from 1 µs to 100 s; the bar has 328 pixels there, and a figure of 12.8 pixels takes 8 at most.

    Seen red: "8,000" and "10,000 ms" one over the other.
    """
    for n in range(1000):
        length_s = 1e-6 * 10 ** (8 * n / 999)
        trace = Trace([Span("offload/d2h/grad/a", Lane.D2H, 0, length_s, 1, 1, kind=SpanKind.COPY)])
        marks = read_html(timeline(trace, 1)).all("div", class_="ruler")[-1].all("span")
        right = -4.0
        for mark in marks:
            at, width = float(mark.attributes["style"].strip("left:%")) * 3.28, 8.0 * len(mark.text)
            left = at if mark is marks[0] else at - width if mark.has("class", "end") else at - width / 2
            assert left > right + 3, (length_s, [m.text for m in marks])
            right = left + width


def test_narrow_neighbours_are_one_rectangle() -> None:
    window = Window(0, 1000)
    spans = [Span("a", Lane.D2H, i, i + 0.4, 1, 1, kind=SpanKind.COPY) for i in range(5)]
    assert len(boxes_of(spans, window, 1, narrow_s=1.0)) == 1
    assert len(boxes_of(spans, window, 1, narrow_s=0.1)) == 5


def test_the_frontier_holds_this_run() -> None:
    page = read_html(render(gpu_report()))
    dots = page.all("span", class_="dot")
    assert [dot.text for dot in dots] == ["1", "2", "3", "4", "5", "6"]
    assert [dot.has("class_", "own") for dot in dots] == [False] * 5 + [True]
    assert "this run, measured 17.0 GiB 430 ms" in sections(page)["Step time against device memory"]
    assert "Step time against device memory" not in sections(read_html(render(replace(gpu_report(), frontier=()))))
    without = sections(read_html(render(replace(gpu_report(), frontier=()))))["Predicted against measured"]
    assert "No other plans are shown" in without
    assert "No other plans" not in sections(page)["Predicted against measured"]
    only_planned = replace(gpu_report(), measured=replace(gpu_report().measured, device_peak_bytes=None))
    assert not read_html(render(only_planned)).all("span", class_="own")


def test_the_report_names_the_plans_that_are_predicted_to_beat_the_runs_own() -> None:
    """On the page, at its head too, and on the terminal. Seen red: a terminal that said nothing."""
    own, run = replace(gpu_report().predicted, device_peak_bytes=16 * GIB, step_s=0.41), gpu_report()
    said = [" ".join(said_of(replace(run, predicted=own, machine=machine))) for machine in _MACHINES]
    same = (
        "In no more device memory than the run's own plan (16.0 GiB), “50 % offloaded”, 16.0 GiB, is predicted to take "
        "350 ms per step instead of 410 ms (15 % less); the run took 430 ms."
    )
    change = (
        " To train by such a plan: hostward plan with the run's options and --device-memory 16384MiB --json plan.json, "
        "then --plan plan.json. Leave out optimizer.optimizer_cpu_offload=true, "
        "optimizer.optimizer_offload_fraction=0.6."
    )
    assert said[0] == f"{same}{change}"
    assert said[1] == (
        f"{same} With the rest of the GPU's 24.0 GiB as well, “25 % offloaded”, 20.0 GiB, is predicted to take 312 ms "
        f"per step instead of 410 ms (24 % less); the run took 430 ms.{change}"
    )
    page = render(replace(run, predicted=own))
    head, _, rest = page.partition("<h2>Step time against device memory</h2>")
    assert escape(same) in head
    assert escape(same) in rest
    assert same.split()[-7:] == table_of(replace(run, predicted=own)).partition(" To train")[0].split()[-7:]


def test_a_run_that_no_plan_beats_or_that_beat_its_prediction_is_told_so() -> None:
    run = gpu_report()
    own = replace(run.predicted, device_peak_bytes=16 * GIB, step_s=0.41)
    alone = replace(run, predicted=replace(own, step_s=0.353))
    assert said_of(alone) == [
        "In no more device memory than the run's own plan (16.0 GiB) no plan is predicted to be faster."
    ]
    assert better_plans(alone) == []
    assert "faster plan" not in table_of(alone)
    unknown = replace(run, predicted=replace(own, step_s=None))
    assert said_of(unknown) == [
        "Whether one of these plans beats the run's own is not known: the report holds no prediction of its step."
    ]
    assert better_plans(unknown) == []
    quick = replace(run, predicted=own, measured=replace(run.measured, step_s=0.34))
    assert said_of(quick)[0].endswith(
        "(15 % less); the run took 340 ms, so predictions are too slow here to tell which is faster."
    )


def table_of(report: RunReport) -> str:
    """What the terminal prints at the end of a run, of as many columns as it takes."""
    console = Console(width=2000, record=True, file=io.StringIO())
    for table in tables(report):
        console.print(table)
    return console.export_text()


_MACHINES = ({"backend": "cuda"}, {"backend": "cuda", "device_memory_bytes": 24 * GIB})


def test_numbers_of_a_crowd_of_plans_do_not_overlap() -> None:
    """36 plans along a line. Places are shares of the plot, which is at least 240 by 180 pixels; a dot takes 24."""
    dots = read_html(render(crowded_report())).all("span", class_="dot")
    assert len(dots) == 37
    assert all(dot.has("class_", "small") == (dot.text == "") for dot in dots)
    at = [re.findall(r"[\d.]+(?=%)", dot.attributes["style"]) for dot in dots if dot.text]
    places = [(float(left) * 2.4, float(bottom) * 1.8) for left, bottom in at]
    assert len(places) > 3
    assert all(abs(a - c) >= 23 or abs(b - d) >= 23 for i, (a, b) in enumerate(places) for c, d in places[:i])


def test_medians_are_told_from_other_times() -> None:
    text = sections(read_html(render(crowded_report())))
    assert "A point of these curves is the mean of 4 iterations." in text["Loss and speed"]
    page = render(gpu_report())
    assert "<dt>tokens per second, median step</dt><dd>19,051</dd>" in page
    assert "<dt>a step, median</dt><dd>430 ms</dd>" in page
    assert "Idle and overlapped seconds are those of iterations 38 to 39, per step" in page


# --- pictures ---


def test_pictures_need_matplotlib_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(
        ConfigError, match=r"--png needs the package matplotlib.*\n  why: .*\n  fix: .*'hostward\[report\]'"
    ):
        png.draw_all(gpu_report(), None, tmp_path)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = png.draw_all(gpu_report(), gpu_trace(), tmp_path)
    assert [file.name for file in files] == ["memory.png", "step.png", "frontier.png", "loss.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert png.draw_all(empty(), Trace(), tmp_path) == []
    with pytest.raises(ConfigError, match=r"memory\.png cannot be written"):
        png.draw_all(gpu_report(), None, tmp_path / "missing")
