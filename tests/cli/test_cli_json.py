"""`--json -` is standard output in every command, and nothing else is on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import SMALL, offloaded
from run_fixtures import Cli

from hostward.machine import measure
from hostward.plan.hardware_profile import profile


@pytest.fixture
def saved(train: Cli, tmp_path: Path) -> Path:
    train("train.train_iters=1", f"checkpoint.save={tmp_path / 'saved'}")
    return tmp_path / "saved"


def test_json_to_standard_output_is_alone_on_it(
    cli: Cli, text: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "measure_machine", lambda **_: profile("h200"))
    run = [*SMALL, f"dataset.path={text}", "train.train_iters=3", *offloaded(0.5)]
    Path("run.log").write_text("all is well\n")
    said: list[tuple[list[object], str, str]] = [
        (["train", *run, "--run-dir", "run"], "losses", "report in run;"),
        (["verify", *run], "passed", "PASS"),
        (["plan", *SMALL], "buckets", "predicted step"),
        (["doctor"], "facts", "this machine"),
        (["doctor", "--log", "run.log"], "recognised", "nothing in this log"),
        (["bench", "machine"], "dram_bytes_per_s", "h200"),
        (["checkpoint", "inspect", saved], "tensors", "iteration: 1"),
    ]
    for words, key, told in said:
        found = cli(*words, "--json", "-")
        assert key in json.loads(found.out), words
        assert told in found.err, words
    assert not Path("-").exists()
    assert not Path("hardware.json").exists()


def test_only_json_is_written_to_standard_output(cli: Cli) -> None:
    """Seen red: a trace in a file of the name `-`."""
    for words in (["train", *SMALL, "--trace", "-"], ["plan", *SMALL, "--plot", "-"]):
        refused = cli(*words)
        assert refused.code == 2
        assert "only --json writes to standard output" in refused.err
