"""`hostward train --dry-run` prepares a run, tells what it would do, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import SMALL, offloaded
from run_fixtures import Cli

from hostward.trainer import loop


def no_training(*_: object, **__: object) -> None:
    raise AssertionError("it trained")


def test_a_dry_run_tells_what_would_be_done_and_leaves_nothing(
    train: Cli, cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    train("train.train_iters=1", f"checkpoint.save={folder / 'before'}")
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(loop, "train", no_training)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(folder)
    words = ["train", "--dry-run", *SMALL, f"dataset.path={text}", "train.train_iters=5", *offloaded(0.5)]
    new = ["--run-dir", "a/run", "checkpoint.save=saved", "checkpoint.save_interval=2", "logger.tensorboard_dir=b/tb"]
    told = cli(*words, *new)
    assert told.code == 0, told.err
    assert "starts           at iteration 0 of 5\n" in told.out
    assert "report.json in a/run; checkpoints in saved every 2 iterations" in told.out
    assert max(map(len, told.out.splitlines())) <= 80
    resumed = cli(*words, "checkpoint.load=before", "checkpoint.save=before", "--json", "-")
    assert "starts           at iteration 1 of 5, from before\n" in resumed.err
    found = json.loads(resumed.out)
    assert (found["first_iteration"], found["train_iters"], found["predicted"]) == (1, 5, None)
    assert 0 < found["offloaded_bytes"] < found["state_bytes"]
    assert list(found["start_s"]) == ["import", "checks", "weights", "state", "resume", "attach"]
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_refuses_what_the_run_would(cli: Cli, text: Path, tmp_path: Path) -> None:
    small = [*SMALL, f"dataset.path={text}"]
    refused = cli("train", "--dry-run", *small, f"checkpoint.load={tmp_path / 'none'}")
    assert refused.code == 2
    assert "checkpoint" in refused.err
    assert "--trace has no effect" in cli("train", "--dry-run", *small, "--trace", tmp_path / "trace.json").err
