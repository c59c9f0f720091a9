"""The progress line and TensorBoard scalars: what they say, and that no step waits for them."""

from __future__ import annotations

import gc
import io
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SMALL, offloaded
from run_fixtures import Cli

from hostward.cli import run_files
from hostward.cli.output import RECENT, Progress, duration, fitted, parts
from hostward.cli.run_files import Scalars
from hostward.config.overrides import apply_overrides
from hostward.core import startup
from hostward.recipes import load
from hostward.trainer import loop, setup
from hostward.trainer.memory_sampler import MemorySampler
from hostward.trainer.report import newest_row
from hostward.trainer.run import Run

TINY = "qwen3_moe_tiny_pretrain_config"


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal, and keeps what is written."""

    def isatty(self) -> bool:
        return True


class FakeWriter:
    """Takes TensorBoard's scalars and keeps them."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.setdefault(tag, {})[global_step] = scalar_value

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def prepared(text: Path) -> Callable[..., Run]:
    def call(*words: str) -> Run:
        return setup.prepare(TINY, apply_overrides(load(TINY), [*SMALL, f"dataset.path={text}", *words]))

    return call


def test_on_a_terminal_one_line_is_rewritten(prepared: Callable[..., Run]) -> None:
    run, terminal = prepared("train.train_iters=4", *offloaded(0.5)), FakeTerminal()
    ticks = iter(range(100))
    with Progress(terminal, clock_s=lambda: float(next(ticks)), columns=lambda: 400) as progress:
        loop.train(run, progress=progress.show, metered=2)
    assert terminal.getvalue().count("\n") == 1
    lines = terminal.getvalue().removesuffix("\n").split("\r\x1b[K")[1:]
    assert [line.split()[0] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert re.fullmatch(
        r"4/4  simulated [\d.]+( [KM]iB)?, host [\d.,]+ [MG]iB  \d+ s left  loss \d\.\d{4}  \d+\.\d{3} s"
        r"(  grad norm \d+\.\d{4})?",
        lines[3],
    )
    assert f"loss {run.losses[-1]:.4f}" in lines[3]
    assert max(map(len, lines)) <= 80


def test_times_to_go_are_told_in_one_unit() -> None:
    assert [duration(s) for s in (0.4, 119.0, 120.0, 7199.0, 7200.0)] == ["0 s", "119 s", "2 min", "120 min", "2.0 h"]


def test_the_time_left_is_that_of_the_iterations_to_come_at_the_recent_rate(prepared: Callable[..., Run]) -> None:
    """Seen red: all iterations instead of those to come; the first and older ones in the mean; their sum."""
    run = prepared("train.train_iters=2")
    loop.train(run)
    run.config.train.train_iters = 32
    run.iteration_s[:] = [1e5, 1e4, *[2.0, 4.0] * (RECENT // 2)]
    newest = newest_row(run)
    assert "90 s left" in parts(run, newest)
    del run.iteration_s[1:]
    assert "left" not in " ".join(parts(run, newest))


def test_a_terminal_is_not_drawn_too_often_but_for_the_last(prepared: Callable[..., Run]) -> None:
    run, terminal = prepared("train.train_iters=5"), FakeTerminal()
    with Progress(terminal, clock_s=lambda: 7.0, columns=lambda: 80) as progress:
        loop.train(run, progress=progress.show)
    lines = terminal.getvalue().removesuffix("\n").split("\r\x1b[K")[1:]
    assert [line.split()[0] for line in lines] == ["1/5", "5/5"]
    assert all(len(line) < 80 for line in lines)


def test_lines_of_the_log_take_the_place_of_the_progress_line(prepared: Callable[..., Run]) -> None:
    run, terminal = prepared("train.train_iters=2"), FakeTerminal()
    handler = logging.StreamHandler(terminal)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with Progress(terminal, clock_s=lambda: 0.0, columns=lambda: 400) as progress:
            loop.train(run, progress=progress.show)
            logging.getLogger("hostward").warning("mind the gap")
            progress.show(run)
        logging.getLogger("hostward").warning("after the run")
    finally:
        root.removeHandler(handler)
    end = terminal.getvalue().partition("mind the gap")
    assert end[0].endswith("\r\x1b[K")
    assert end[2].startswith("\n\r\x1b[K2/2  ")
    assert end[2].endswith("\nafter the run\n")


def test_a_narrow_terminal_shows_whole_parts() -> None:
    parts = ["iteration 1/2", "loss 1.5", "grad norm 3"]
    assert fitted(parts, 100) == "iteration 1/2  loss 1.5  grad norm 3"
    assert fitted(parts, 25) == "iteration 1/2  loss 1.5"
    assert fitted(parts, 5) == "itera"
    assert fitted(parts, -1) == ""


def test_hidden_and_exposed_seconds_come_early_in_a_long_run_and_once(
    prepared: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = prepared("train.train_iters=14", "logger.log_interval=1", *offloaded(1))
    seen: list[tuple[int, bool]] = []
    caplog.set_level(logging.INFO, "hostward")
    with Progress(io.StringIO()) as progress:

        def look(r: Run) -> None:
            seen.append((len(r.losses), r.offload is not None))
            progress.show(r)

        loop.train(run, progress=look, metered=3)
    lines = [line for line in caplog.messages if line.startswith(("iteration ", "in iterations "))]
    (known_from,) = (i for i, line in enumerate(lines) if "hidden" in line)
    assert re.fullmatch(r"in iterations 6 to 7, per step: hidden \d+\.\d{3} s, exposed \d+\.\d{3} s", lines[known_from])
    assert known_from >= loop.SETTLED_ITERATIONS + 2
    known = loop.SETTLED_ITERATIONS + 3
    assert [told for n, told in seen if n < known] == [False] * (known - 1)
    assert all(told for n, told in seen if n > known)
    assert run.offload is not None
    assert (run.offload.first_iteration, run.offload.last_iteration) == (11, 13)
    named = ["s in 6-7  " if "s in 6-7  " in line else line for line in lines[known_from + 1 : -1]]
    assert named == ["s in 6-7  "] * (len(lines) - known_from - 2)
    assert re.search(r"  exposed \d+\.\d{3} s in (6-7|12-13)  ", lines[-1])
    plain = prepared("train.train_iters=14", *offloaded(1))
    loop.train(plain)
    assert plain.losses == run.losses


def test_a_slow_start_says_what_it_is_doing(
    prepared: Callable[..., Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: all iterations are watched; phases are not."""
    monkeypatch.setattr(startup, "SLOW_S", 0.0)
    caplog.set_level(logging.INFO, "hostward")
    run = prepared("train.train_iters=3")
    loop.train(run)
    told = " ".join(re.sub(r"[\d,.]+ ", "", line.partition(":")[0]) for line in caplog.messages)
    # What is logged while a phase lasts may miss a short one.
    assert re.search("drew weights in s .*placed the state of parameters in s .*running iteration 1", told)
    assert "running iteration 3" not in told


def test_in_a_short_run_only_the_end_is_metered(prepared: Callable[..., Run]) -> None:
    run = prepared("train.train_iters=10", *offloaded(1))
    seen: list[bool] = []
    loop.train(run, progress=lambda r: seen.append(r.offload is not None), metered=3)
    assert seen == [False] * 10
    assert run.offload is not None


def test_no_step_waits_for_reports(
    prepared: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line, scalars, samples and a report in every iteration the backend is waited for as often as without."""

    def waits(told: bool) -> int:
        run = prepared("train.train_iters=6", *offloaded(1))
        gc.collect()  # optimizers of other runs drain their lanes when they go
        count, backend = [], type(run.optimizer.backend)
        for name in ("wait", "synchronise", "drain"):
            real = getattr(backend, name)

            def counted(*arguments: Any, real: Any = real) -> Any:
                count.append(None)
                return real(*arguments)

            monkeypatch.setattr(backend, name, counted)
        if not told:
            monkeypatch.setattr(MemorySampler, "sample", lambda *_: None)
        monkeypatch.setattr(run_files, "INTERVAL_S", 0.0)
        monkeypatch.setattr(run_files, "_SHARE", 1e9)
        circumstances = {"date": "", "command": "", "versions": {}}
        with Progress(FakeTerminal()) as progress, run_files.RunFiles(run, tmp_path, lambda: circumstances) as files:
            scalars = Scalars(FakeWriter())

            def tell(run: Run) -> None:
                for each in (progress.show, scalars.write, files.going_on):
                    each(run)

            loop.train(run, progress=tell if told else None)
        monkeypatch.undo()
        return len(count)

    assert waits(told=True) == waits(told=False) > 0


# --- TensorBoard ---


def test_scalars_are_those_of_the_run_under_megatrons_names(prepared: Callable[..., Run]) -> None:
    run, writer = prepared("train.train_iters=4", *offloaded(0.5)), FakeWriter()
    with Scalars(writer) as scalars:
        loop.train(run, progress=scalars.write, metered=1)
    assert writer.closed
    steps = [1, 2, 3, 4]
    assert writer.scalars["lm loss"] == dict(zip(steps, run.losses, strict=True))
    assert writer.scalars["grad-norm"] == dict(zip(steps, run.grad_norms, strict=True))
    assert writer.scalars["learning-rate"] == dict(zip(steps, run.learning_rates, strict=True))
    assert writer.scalars["iteration-time"] == dict(zip(steps, run.iteration_s, strict=True))
    assert set(writer.scalars["skipped"].values()) == {0.0}
    assert writer.scalars["host-resident-bytes"][4] > writer.scalars["pinned-bytes"][4] > 0
    assert "mem-allocated-bytes" not in writer.scalars


def test_tensorboard_that_is_not_installed_is_refused_first(
    refused: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    outcome = refused(f"logger.tensorboard_dir={tmp_path / 'board'}")
    assert "needs the package tensorboard, which is not installed" in outcome.err
    assert "'hostward[report]'" in outcome.err
    assert not (tmp_path / "board").exists()


def test_tensorboard_reads_what_was_written(train: Cli, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "board"
    report = train("train.train_iters=3", *offloaded(0.5), f"logger.tensorboard_dir={folder}").report
    events = accumulators.EventAccumulator(str(folder)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("lm loss")]
    assert losses == [(step, loss) for step, loss in enumerate(report["losses"], 1)]


def test_a_folder_for_scalars_that_cannot_be_made_is_refused_first(refused: Cli, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(f"logger.tensorboard_dir={tmp_path / 'file'}").err
