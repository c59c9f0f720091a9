"""The report of a run as a file: it reads back as it was, and what is no such file is refused with the place."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import ITERATIONS, cut_short, gpu_report

from hostward.errors import ConfigError
from hostward.files.atomic_file import replace_text
from hostward.report.schema import REPORT_FILE, Ended, StepMemory, finite, read_report


def test_a_report_reads_back_as_it_was(tmp_path: Path) -> None:
    report = gpu_report()
    report.write(tmp_path / REPORT_FILE)
    assert read_report(tmp_path) == read_report(tmp_path / REPORT_FILE)
    assert read_report(tmp_path).to_dict() == report.to_dict()
    assert [p.name for p in tmp_path.iterdir()] == [REPORT_FILE]


@pytest.mark.parametrize("ended", list(Ended))
def test_so_does_that_of_a_run_that_was_cut_short(tmp_path: Path, ended: Ended) -> None:
    report = cut_short(ended, "why")
    report.write(tmp_path / REPORT_FILE)
    assert read_report(tmp_path).to_dict() == report.to_dict()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    report = replace(gpu_report(), losses=(math.nan, -math.inf, *(1.0,) * (ITERATIONS - 2)))
    report.write(tmp_path / REPORT_FILE)
    assert read_report(tmp_path).losses[:3] == (None, None, 1.0)
    assert finite({"a": [math.inf, {"b": (math.nan, 1)}]}) == {"a": [None, {"b": [None, 1]}]}


def test_steps_are_rows_of_all_columns() -> None:
    report = gpu_report()
    rows = report.steps()
    assert [row.iteration for row in rows] == list(range(ITERATIONS))
    assert [row.loss for row in rows] == list(report.losses)
    assert [row.iteration for row in rows if row.skipped] == [17]
    assert rows[3].tokens_per_s == 8192 / 0.43
    assert rows[3].device_peak_bytes == report.step_memory.device_peak_bytes[3]  # type: ignore[index]
    assert len(cut_short(Ended.FAILED, "x").steps()) == 11
    assert cut_short(Ended.FAILED, "x").steps()[-1].device_allocated_bytes is None


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = gpu_report().to_dict()
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, ""),
        ("[]", "the whole is [], not an object"),
        (changed(lambda c: c.update(format="trace")), "its format is \"trace\", not 'hostward-run'"),
        (changed(lambda c: c.pop("format")), "key 'format' is missing"),
        (changed(lambda c: c.update(version=2)), "it has version 2, this hostward reads version 1"),
        (changed(lambda c: c.update(loses=[])), "key 'loses' is unknown; did you mean 'losses'?"),
        (changed(lambda c: c.pop("memory")), "key 'memory' is missing"),
        (changed(lambda c: c["memory"].update(pinned_bytes=-1)), "memory.pinned_bytes is -1, which is negative"),
        (changed(lambda c: c["measured"].update(step_s="fast")), 'measured.step_s is "fast", not a number'),
        (changed(lambda c: c["plan"][2].pop("numel")), "key plan[2].'numel' is missing"),
        (changed(lambda c: c.update(ended="over")), 'ended is "over", not one of running, finished'),
        (changed(lambda c: c["losses"].pop()), "losses has 39 entries where there are 40"),
        (changed(lambda c: c["grad_norms"].append(1)), "grad_norms has 41 entries where there are 40"),
        (changed(lambda c: c["learning_rates"].pop()), "learning_rates has 39 entries"),
        (changed(lambda c: c["step_memory"]["pinned_bytes"].pop()), "step_memory.pinned_bytes has 39 entries"),
        (
            changed(lambda c: c["memory_over_time"]["device_by_owner_bytes"]["weights"].pop()),
            "memory_over_time.device_by_owner_bytes.weights has 23 entries where there are 24",
        ),
        (
            changed(lambda c: c["memory_over_time"]["rest_of_device_bytes"].append(1)),
            "memory_over_time.rest_of_device_bytes has 25 entries where there are 24",
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / REPORT_FILE).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_report(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / REPORT_FILE} is not a report of a run\n  why: {why}")
    assert "--run-dir" in caught.value.fix


def test_a_report_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A folder as it was given. Seen red: `report report.json cannot be read` for `.`."""
    where = r"folder \. holds no report of a run\n  why: it has no report.json.*\n  fix: name a run's folder"
    with contextlib.chdir(tmp_path), pytest.raises(ConfigError, match=where):
        read_report(Path("."))
    with pytest.raises(ConfigError, match=r"none\.json cannot be read\n  why: No such file or directory\n  fix: name"):
        read_report(tmp_path / "none.json")
    (tmp_path / "other.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"other\.json cannot be read\n  why: 'utf-8' codec"):
        read_report(tmp_path / "other.json")


def test_an_unwritable_place_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report .*missing/report\.json cannot be written"):
        gpu_report().write(tmp_path / "missing" / REPORT_FILE)
    with pytest.raises(ConfigError, match=r"page .* is no plain file"):
        replace_text(tmp_path, "text", what="page")
    kept = tmp_path / "kept"
    kept.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(kept, "new \ud800", what="page")
    assert kept.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_columns_of_a_device_that_nobody_counted_are_null() -> None:
    report = replace(gpu_report(), step_memory=StepMemory(None, None, (1,) * ITERATIONS, (2,) * ITERATIONS))
    assert report.steps()[0].device_allocated_bytes is None
    assert report.steps()[0].pinned_bytes == 2
