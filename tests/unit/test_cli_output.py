"""What the command line writes to stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostward.cli import main, ranks


@pytest.mark.parametrize(
    ("rank", "lines"),
    [("0", ["it is so", "warning: mind it"]), ("1", ["rank 1: warning: mind it"])],
)
def test_lines_of_the_log_say_their_kind(rank: str, lines: list[str]) -> None:
    """Seen red: a warning that reads like any other line."""
    code = (
        "import logging; from hostward.cli import main; main(['recipes']); log = logging.getLogger('hostward'); "
        "log.info('%s is so', 'it'); log.warning('mind it')"
    )
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines() == lines


BAD = (
    ["train", "optimizer.lrr=1"],
    ["train", "--recipe", "none"],
    ["train", "train.train_iters=0"],
    ["train", "--no-such-flag"],
    ["train", "--json", "a", "--trace", "a"],
    ["verify", "--fraction", "half"],
    ["verify", "--placement", "nowhere"],
    ["verify", "--microbatches", "3"],
    ["verify", "--fraction", "1", "train.train_iters=0"],
    ["verify", "checkpoint.save=x"],
)


@pytest.mark.parametrize("words", BAD, ids=" ".join)
@pytest.mark.parametrize(("rank", "waited"), [("0", False), ("5", False), ("1", True)])
def test_what_is_wrong_with_the_command_line_is_told_by_the_first_rank_of_a_machine(
    words: list[str],
    rank: str,
    waited: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Of two with five ranks each; another rank waits to be ended, and is not. Seen red: all told it at once."""

    def slept(seconds: float) -> None:
        assert seconds == ranks.PATIENCE_S
        waits.append(capsys.readouterr().err)

    waits: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks.time, "sleep", slept)
    for name, value in {"RANK": rank, "WORLD_SIZE": "10", "LOCAL_RANK": str(int(rank) % 5)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert main([*words, "train.device=cpu", "train.global_batch_size=20"]) == 2
    assert waits == ([""] if waited else [])
    told = capsys.readouterr().err
    assert "rror" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_ranks_that_have_met_all_have_is_told_by_the_first(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "met", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    assert ranks.tells(everywhere=True) is (rank == "0")
    assert ranks.tells(everywhere=False)
