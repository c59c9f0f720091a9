"""Ctrl-C: exit 130, one line, no traceback, the last checkpoint whole. SIGTERM that is to save: exit 143, saved."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SMALL, different, iterations_saved, offloaded, saved, start_process, wait_for
from run_fixtures import Cli

from hostward.cli import run_files
from hostward.trainer import loop, setup
from hostward.trainer.run import Run

LOITER = """
import sys, time
import hostward.{module} as module

def loiter(*arguments, **options):
    calls.append(None)
    if len(calls) == {call}:
        print("LOITERING", file=sys.stderr, flush=True)
        time.sleep({seconds})
    return original(*arguments, **options)

calls, original = [], module.{name}
module.{name} = loiter
from hostward.cli import main
sys.exit(main(sys.argv[1:]))
"""


def loitering(module: str, name: str, call: int, seconds: int = 60) -> str:
    """The command line with one function that takes long at one call, so that a signal surely meets it."""
    return LOITER.format(module=module, name=name, call=call, seconds=seconds)


def interrupted(program: str, words: list[str]) -> tuple[int, str]:
    """Start, send SIGINT once the process loiters, and return exit code and stderr from there on."""
    with start_process("-c", program, *words) as process:
        wait_for(process, "LOITERING")
        process.send_signal(signal.SIGINT)
        return process.end(240)


@pytest.mark.parametrize(
    ("module", "name", "call", "seconds"),
    [
        # Two saves (iterations 1 and 2) are done; 7 buckets at fraction 1 make 7 host steps per iteration.
        ("runtime.simulated.backend", "adamw_step", 17, 60),
        # On a thread of its own, which no signal wakes: what is not yet there is given up when the file is written.
        ("checkpoint.files", "seal", 3, 5),
    ],
    ids=["in a step", "in a save"],
)
def test_ctrl_c_leaves_the_last_checkpoint_whole(
    train: Cli, tmp_path: Path, text: Path, module: str, name: str, call: int, seconds: int
) -> None:
    folder = tmp_path / "run"
    words = ["train", *SMALL, f"dataset.path={text}", *offloaded(1), "train.train_iters=50"]
    words += [f"checkpoint.save={folder}", "checkpoint.save_interval=1"]
    code, err = interrupted(loitering(module, name, call, seconds), words)
    assert code == 130
    newest = f"the newest complete checkpoint is {folder}/iter_0000002; resume with checkpoint.load={folder}"
    assert err.splitlines() == [f"interrupted; {newest}"]
    assert iterations_saved(folder) == ["iter_0000001", "iter_0000002"]
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == [".run.lock", ".save.lock"]
    assert saved(folder)[1]["iteration"] == 2
    resumed = train(*offloaded(1), "train.train_iters=3", f"checkpoint.load={folder}").report
    whole = train("train.train_iters=3").report
    assert resumed["losses"] == whole["losses"][2:]


ASKED = ("train.train_iters=5", "train.exit_signal_handler=true")


def signal_in_iteration(monkeypatch: pytest.MonkeyPatch, count: int, times: int) -> None:
    """SIGTERM comes so many times in the backward of an iteration."""
    backward, calls = loop.backward, []

    def signalled(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == count:
            for _ in range(times):
                signal.raise_signal(signal.SIGTERM)
        return backward(*arguments, **options)

    monkeypatch.setattr(loop, "backward", signalled)


def test_t62_sigterm_ends_the_iteration_and_saves(
    train: Cli,
    cli: Cli,
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "run"
    words = [f"dataset.path={text}", *offloaded(1), f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
    straight = train("train.train_iters=5", *offloaded(1), f"checkpoint.save={tmp_path / 'straight'}").report
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
        signal_in_iteration(patched, 3, times=1)
        outcome = cli("train", *SMALL, *words, *ASKED, "checkpoint.save_interval=3", json=True)
    assert outcome.code == 143
    assert f"no checkpoint in {folder} yet: the run starts at iteration 0" in caplog.text
    *_, said = outcome.err.splitlines()
    assert said.startswith("terminated after 3 of 5 iterations; saved ")
    assert said.endswith(f"; resume with checkpoint.load={folder}")
    assert iterations_saved(folder) == ["iter_0000003"]
    assert (outcome.report["ended"], outcome.report["reason"]) == ("terminated", "SIGTERM")
    resumed = train(*words, *ASKED).report
    assert outcome.report["losses"] + resumed["losses"] == straight["losses"]
    assert resumed["ended"] == "finished"
    assert different(saved(folder)[0], saved(tmp_path / "straight")[0]) == []


def test_a_launchers_own_sigterm_behind_the_schedulers_is_the_same(
    cli: Cli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in_iteration(monkeypatch, 2, times=2)
    folder = tmp_path / "run"
    outcome = cli("train", *SMALL, f"dataset.path={text}", *ASKED, f"checkpoint.save={folder}")
    assert outcome.code == 143
    assert len(iterations_saved(folder)) == 1


def test_a_later_sigterm_does_not_wait(cli: Cli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "PATIENCE_S", 0.0)
    signal_in_iteration(monkeypatch, 2, times=2)
    folder = tmp_path / "run"
    outcome = cli("train", *SMALL, f"dataset.path={text}", *ASKED, f"checkpoint.save={folder}")
    assert outcome.code == 143
    assert outcome.err.splitlines()[-1] == "terminated"
    assert iterations_saved(folder) == []


def test_a_sigterm_that_does_not_wait_is_told_with_how_to_go_on(
    cli: Cli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: "checkpoints that were complete are intact", in every run."""
    signal_in_iteration(monkeypatch, 3, times=1)
    folder = tmp_path / "run"
    words = [f"dataset.path={text}", "train.train_iters=5", f"checkpoint.save={folder}", "checkpoint.save_interval=2"]
    outcome = cli("train", *SMALL, *words)
    assert outcome.code == 143
    newest = f"the newest complete checkpoint is {folder}/iter_0000002; resume with checkpoint.load={folder}"
    assert outcome.err.splitlines()[-1] == f"terminated; {newest}"


def test_ctrl_c_while_a_run_is_prepared_is_told_in_a_word(
    cli: Cli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "prepare", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    outcome = cli("train", *SMALL, f"dataset.path={text}", f"checkpoint.save={tmp_path / 'run'}")
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


@pytest.mark.parametrize("how", ["first rank", "another rank", "damaged pointer"])
def test_the_first_rank_names_a_checkpoint_that_is_there(
    train: Cli, cli: Cli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def interrupted(run: Run) -> None:
        if how == "another rank":
            monkeypatch.setenv("RANK", "1")
        elif how == "damaged pointer":
            (folder / "latest").write_text("iter_x")
        signal.raise_signal(signal.SIGINT)

    folder = tmp_path / "run"
    words = [f"dataset.path={text}", f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
    train(*words, "train.train_iters=1")
    monkeypatch.setattr(loop, "train_iteration", interrupted)
    outcome = cli("train", *SMALL, *words, "train.train_iters=2")
    assert outcome.code == 130
    named = (
        f"interrupted; the newest complete checkpoint is {folder}/iter_0000001; resume with checkpoint.load={folder}"
    )
    assert outcome.err.splitlines()[-1] == (named if how == "first rank" else "interrupted")


def test_sigterm_in_the_last_iteration_ends_a_run_that_is_finished(
    cli: Cli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in_iteration(monkeypatch, 5, times=1)
    outcome = cli("train", *SMALL, f"dataset.path={text}", *ASKED, f"checkpoint.save={tmp_path / 'run'}", json=True)
    assert (outcome.code, outcome.report["ended"]) == (0, "finished")


def test_ctrl_c_with_debug_shows_where(tmp_path: Path, text: Path) -> None:
    words = ["train", "--debug", *SMALL, f"dataset.path={text}", *offloaded(1), "train.train_iters=50"]
    code, err = interrupted(loitering("runtime.simulated.backend", "adamw_step", call=2), words)
    assert code in (130, -signal.SIGINT)  # Python ends itself with the signal, which a shell shows as 130
    assert "Traceback" in err
    assert "KeyboardInterrupt" in err
