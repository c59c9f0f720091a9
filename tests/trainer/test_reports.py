"""What a run leaves behind: report.json and trace.json in its folder, whatever ends it, and the page made of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SMALL, offloaded, read_json, start_process, wait_for
from run_fixtures import Cli
from test_interrupts import loitering

from hostward.cli import run_files
from hostward.cli.output import require_writable
from hostward.config.overrides import apply_overrides
from hostward.errors import DataError, DeviceError
from hostward.files import folder_lock
from hostward.recipes import load
from hostward.report.schema import PAGE_FILE, REPORT_FILE, TRACE_FILE, Ended, RunReport, read_report
from hostward.runtime.step_trace import from_chrome
from hostward.trainer import loop, setup
from hostward.trainer.memory_sampler import FIRST_ITERATIONS, MOST_SAMPLED, MemorySampler

TINY = "qwen3_moe_tiny_pretrain_config"


def test_a_run_leaves_a_report_that_holds_what_json_says(train: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = train("train.train_iters=6", *offloaded(0.5), "--run-dir", folder)
    assert sorted(p.name for p in folder.iterdir()) == [folder_lock.FILE, REPORT_FILE, TRACE_FILE]
    content = read_json(folder / REPORT_FILE)
    assert {k: v for k, v in content.items() if k != "date"} == {k: v for k, v in outcome.report.items() if k != "date"}
    report = read_report(folder)
    assert (report.ended, report.reason) == ("finished", None)
    assert (report.first_iteration, report.last_iteration, report.planned_iterations) == (0, 6, 6)
    assert report.command.startswith("hostward train model.num_layers=2")
    assert report.versions.keys() >= {"hostward", "python", "torch"}
    assert report.options["optimizer.optimizer_offload_fraction"] == "0.5"
    assert "checkpoint.save" not in report.options
    assert report.machine["backend"] == "simulated"
    assert report.host["cpus"] > 0
    assert report.predicted is None
    assert report.frontier == ()
    assert list(report.start_s) == ["import", "checks", "weights", "state", "attach"]
    assert f"hostward report {folder}" in outcome.out
    assert from_chrome(folder / TRACE_FILE).steps()


def test_its_rows_are_the_iterations(train: Cli, tmp_path: Path) -> None:
    train("train.train_iters=4", *offloaded(0.5), "scheduler.lr_warmup_iters=2", "--run-dir", tmp_path / "run")
    report = read_report(tmp_path / "run")
    rows = report.steps()
    assert [row.iteration for row in rows] == [0, 1, 2, 3]
    assert [row.loss for row in rows] == list(report.losses)
    assert rows[0].learning_rate < rows[1].learning_rate < rows[2].learning_rate > rows[3].learning_rate
    assert report.tokens_per_iteration == 4 * 64
    assert rows[2].tokens_per_s == 4 * 64 / report.iteration_s[2]
    assert rows[2].host_resident_bytes > rows[2].pinned_bytes == report.memory.pinned_bytes
    assert rows[2].device_peak_bytes is None
    assert report.measured.pinned_bytes == report.memory.pinned_bytes
    assert report.measured.host_bytes == sum(report.memory.host_by_owner_bytes.values())
    assert report.measured.step_s == sorted(report.iteration_s[1:])[1]
    assert report.offload is not None
    assert report.measured.exposed_s == report.offload.exposed_s


def test_samples_are_what_the_ledger_and_the_gradients_say(train: Cli, tmp_path: Path) -> None:
    train("train.train_iters=3", *offloaded(0.5), "--run-dir", tmp_path / "run")
    report = read_report(tmp_path / "run")
    samples, memory = report.memory_over_time, report.memory
    assert samples.moments == ("forward", "backward", "step") * 3
    assert samples.at_iteration[:3] == pytest.approx((1 / 3, 2 / 3, 1))
    for owner in ("weights", "exp_avg", "exp_avg_sq"):
        assert set(samples.device_by_owner_bytes[owner]) == {memory.device_by_owner_bytes[owner]}
    for owner, held in memory.host_by_owner_bytes.items():
        assert samples.host_by_owner_bytes[owner][-1] == held
    # Two microbatches: all gradients are on the device before the last backward, half of the parameters' leave in it.
    device = 4 * sum(b.numel for b in report.plan if b.placement == "device")
    gradients = samples.device_by_owner_bytes["gradients"]
    assert gradients[0] == 4 * report.parameters
    assert device <= gradients[1] < 4 * report.parameters
    assert gradients[2] == 0
    assert max(gradients) <= memory.device_by_owner_bytes["gradients"]


def test_what_saving_has_kept_is_in_the_report(train: Cli, tmp_path: Path) -> None:
    """Its memory is given back when the run is over, before the report is made."""
    saves = [f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=2", "checkpoint.async_save=true"]
    words = ["train.train_iters=5", "model.params_dtype=bf16", *offloaded(0.5), *saves]
    train(*words, "checkpoint.async_save_mode=snapshot", "--run-dir", tmp_path / "run")
    report = read_report(tmp_path / "run")
    for owner in ("snapshot of a save", "buffers of a save"):
        held = report.memory.host_by_owner_bytes[owner]
        assert held == report.memory_over_time.host_by_owner_bytes[owner][-1] > 0
    assert report.measured.host_bytes == sum(report.memory.host_by_owner_bytes.values())


def test_of_a_long_run_few_iterations_are_sampled(text: Path) -> None:
    config = apply_overrides(load(TINY), [*SMALL, f"dataset.path={text}", "train.train_iters=100000"])
    run = setup.prepare(TINY, config)
    until = config.train.train_iters
    sampler = MemorySampler(run.device, run.optimizer.backend.ledger, [], staying=set(), first=0, until=until)
    for iteration in range(0, until, 2):
        sampler.sample(iteration, "step")
    assert FIRST_ITERATIONS // 2 < len(sampler.owners().at_iteration) <= MOST_SAMPLED + FIRST_ITERATIONS


def test_checkpoints_and_the_report_share_a_folder(train: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train("train.train_iters=2", f"checkpoint.save={folder}", *offloaded(1))
    assert read_report(folder).checkpoint == str(folder / "iter_0000002")
    resumed = train("train.train_iters=4", f"checkpoint.save={folder}", f"checkpoint.load={folder}").report
    report = read_report(folder)
    assert (report.first_iteration, report.last_iteration) == (2, 4)
    assert list(report.losses) == resumed["losses"]
    assert [row.iteration for row in report.steps()] == [2, 3]
    # The second run moved nothing, so it timed nothing: the trace of the first is not its own.
    assert not (folder / TRACE_FILE).exists()


def test_without_a_folder_nothing_is_left(train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train("train.train_iters=1", *offloaded(1))
    assert [p.name for p in tmp_path.iterdir()] == [REPORT_FILE]  # that of --json


def test_an_error_leaves_a_report_with_its_reason(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = loop.train_iteration, []

    def failing(run: Any) -> None:
        calls.append(None)
        if len(calls) == 4:
            raise DataError("the text is gone", why="a test")
        real(run)

    monkeypatch.setattr(loop, "train_iteration", failing)
    folder = tmp_path / "run"
    outcome = cli("train", *SMALL, f"dataset.path={text}", "train.train_iters=9", *offloaded(0.5), "--run-dir", folder)
    assert outcome.code == 2
    report = read_report(folder)
    assert (report.ended, report.reason) == ("failed", "the text is gone")
    assert report.last_iteration == len(report.losses) == 3
    assert cli("report", folder).code == 0
    assert "The run failed after 3 of 9 iterations: the text is gone." in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("number", "code", "ended", "says"),
    [
        (signal.SIGTERM, 143, Ended.TERMINATED, "terminated"),
        (signal.SIGINT, 130, Ended.INTERRUPTED, "interrupted"),
    ],
)
def test_a_signal_leaves_a_report(
    tmp_path: Path, text: Path, number: signal.Signals, code: int, ended: Ended, says: str
) -> None:
    words = ["train", *SMALL, f"dataset.path={text}", *offloaded(1), "train.train_iters=50", "--run-dir", str(tmp_path)]
    # 7 buckets make 7 host steps per iteration: this is in the fourth.
    with start_process("-c", loitering("runtime.simulated.backend", "adamw_step", call=24), *words) as process:
        wait_for(process, "LOITERING")
        process.send_signal(number)
        found, err = process.end(60)
    assert found == code
    assert err.splitlines()[-1] == says
    assert "Traceback" not in err
    report = read_report(tmp_path)
    assert report.ended == ended.value
    assert number.name in str(report.reason)
    assert len(report.losses) == 3


def test_signal_9_leaves_the_report_of_a_moment_before(tmp_path: Path, text: Path) -> None:
    program = "import hostward.cli.run_files as files; files.INTERVAL_S, files._SHARE = 0.0, 1e9\n"
    words = ["train", *SMALL, f"dataset.path={text}", *offloaded(1), "train.train_iters=50", "--run-dir", str(tmp_path)]
    program += loitering("runtime.simulated.backend", "adamw_step", call=24)
    (tmp_path / TRACE_FILE).write_text("of an earlier run")
    (tmp_path / PAGE_FILE).write_text("of an earlier run")
    with start_process("-c", program, *words) as process:
        wait_for(process, "LOITERING")
        process.send_signal(signal.SIGKILL)
        process.end(60)
    report = read_report(tmp_path)
    assert (report.ended, report.reason) == ("running", None)
    assert len(report.losses) >= 2
    assert not (tmp_path / TRACE_FILE).exists()
    assert not (tmp_path / PAGE_FILE).exists()


def test_a_page_of_the_run_so_far_stays(train: Cli, tmp_path: Path) -> None:
    (tmp_path / PAGE_FILE).write_text("of this run")
    later_s = time.time() + 3600
    os.utime(tmp_path / PAGE_FILE, (later_s, later_s))
    train("train.train_iters=1", "--run-dir", tmp_path)
    assert (tmp_path / PAGE_FILE).exists()


def test_reports_on_the_way_are_rare(train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    real = run_files.RunReport.write
    monkeypatch.setattr(run_files.RunReport, "write", lambda self, path: (written.append(self.ended), real(self, path)))
    train("train.train_iters=5", "--run-dir", tmp_path)
    assert written == ["finished"]
    written.clear()
    monkeypatch.setattr(run_files, "INTERVAL_S", 0.0)
    monkeypatch.setattr(run_files, "_SHARE", 1e9)
    train("train.train_iters=5", "--run-dir", tmp_path)
    assert written == ["running"] * 5 + ["finished"]


def test_training_goes_on_where_a_report_on_the_way_fails(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = run_files.RunReport.write

    def full(report: RunReport, path: Path) -> None:
        if report.ended == "running":
            raise DeviceError("no space", why="the disk is full")
        real(report, path)

    monkeypatch.setattr(run_files.RunReport, "write", full)
    monkeypatch.setattr(run_files, "INTERVAL_S", 0.0)
    monkeypatch.setattr(run_files, "_SHARE", 1e9)
    folder = tmp_path / "run"
    assert cli("train", *SMALL, f"dataset.path={text}", "train.train_iters=2", "--run-dir", folder).code == 0
    assert caplog.text.count("the report so far could not be written: the disk is full") == 2
    assert read_report(folder).ended == "finished"


def test_bad_folders_are_refused_before_anything_is_allocated(refused: Cli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "--run-dir" in refused("--run-dir", file).err
    assert "cannot be written" in refused("--run-dir", file / "below").err


def test_the_first_error_is_shown_when_the_report_fails_too(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"

    def failing(run: Any) -> None:
        (folder / REPORT_FILE).mkdir()
        raise DataError("the text is gone")

    monkeypatch.setattr(loop, "train_iteration", failing)
    outcome = cli("train", *SMALL, f"dataset.path={text}", "train.train_iters=1", "--run-dir", folder)
    assert outcome.code == 2
    assert "error: the text is gone" in outcome.err
    assert "the report of this run could not be written" in caplog.text


def test_a_trace_that_cannot_be_removed_does_not_hide_the_first_error(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(run: Any) -> None:
        raise DataError("the text is gone")

    monkeypatch.setattr(loop, "train_iteration", failing)
    (tmp_path / "run" / TRACE_FILE).mkdir(parents=True)
    words = ["train", *SMALL, f"dataset.path={text}", "train.train_iters=1", "--run-dir", tmp_path / "run"]
    outcome = cli(*words)
    assert outcome.code == 2
    assert "error: the text is gone" in outcome.err
    assert read_report(tmp_path / "run").ended == "failed"


# --- hostward report ---


def test_report_writes_a_page_beside_the_report_or_elsewhere(train: Cli, cli: Cli, tmp_path: Path) -> None:
    train("train.train_iters=3", *offloaded(0.5), "--run-dir", tmp_path / "run")
    outcome = cli("report", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    page = tmp_path / "run" / "report.html"
    assert outcome.out == f"written to {page}\n"
    assert "AdamW on the CPU" in page.read_text()  # the lanes of the trace in the folder
    elsewhere = tmp_path / "page.html"
    assert cli("report", tmp_path / "run" / REPORT_FILE, "--html", elsewhere).code == 0
    assert "Nothing was timed." in elsewhere.read_text()
    assert cli("report", tmp_path / "run" / REPORT_FILE, "--trace", tmp_path / "run" / TRACE_FILE).code == 0


def test_report_reads_what_json_wrote(train: Cli, cli: Cli, tmp_path: Path) -> None:
    train("train.train_iters=1")
    (tmp_path / "run.json").write_text((tmp_path / "report.json").read_text())
    assert cli("report", tmp_path / "run.json").code == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere",), "report nowhere cannot be read\n  why: No such file"),
        (("{folder}",), "folder holds no report of a run\n  why: it has no report.json"),
        (("{folder}/text",), "is not a report of a run"),
        (("{run}", "--trace", "nowhere"), "trace nowhere cannot be read"),
        (("{run}", "--trace", "{run}/report.json"), "is no trace of hostward"),
        (("{run}", "--html", "{folder}/missing/page.html"), "page.html cannot be written"),
    ],
)
def test_bad_input_of_report_is_refused(
    train: Cli, cli: Cli, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    train("train.train_iters=1", "--run-dir", tmp_path / "run")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "text").write_text("{}")
    outcome = cli("report", *(word.format(folder=folder, run=tmp_path / "run") for word in words))
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert says in outcome.err
    assert "Traceback" not in outcome.err


def test_png_without_matplotlib_is_refused(
    train: Cli, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("train.train_iters=1", "--run-dir", tmp_path / "run")
    for name in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    outcome = cli("report", tmp_path / "run", "--png", tmp_path / "png")
    assert outcome.code == 2
    assert "'hostward[report]'" in outcome.err


def test_png_draws_the_charts(train: Cli, cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    train("train.train_iters=3", *offloaded(0.5), "--run-dir", tmp_path / "run")
    assert cli("report", tmp_path / "run", "--png", tmp_path / "png").code == 0
    assert sorted(p.name for p in (tmp_path / "png").iterdir()) == ["loss.png", "memory.png", "step.png"]


def test_runs_that_ask_at_the_same_time_whether_a_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run has found the file that this one made to see whether it can, and removed it."""
    file, opened = tmp_path / "report.json", Path.open

    def removed(path: Path, *arguments: Any, **options: Any) -> Any:
        found = opened(path, *arguments, **options)
        path.unlink()
        return found

    monkeypatch.setattr(Path, "open", removed)
    require_writable("--json", file)
    assert not file.exists()
