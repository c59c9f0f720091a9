"""What the command line writes to stderr, and how it ends where nobody reads its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.table import Table

from hostward.cli import main, ranks
from hostward.cli.output import print_tables, wrapped


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

    def waited_for(signals: set[signal.Signals], seconds: float) -> None:
        assert (signals, seconds) == ({signal.SIGTERM}, ranks.PATIENCE_S)
        waits.append(capsys.readouterr().err)

    waits: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks.signal, "sigtimedwait", waited_for)
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    for name, value in {"RANK": rank, "WORLD_SIZE": "10", "LOCAL_RANK": str(int(rank) % 5)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert main([*words, "train.device=cpu", "train.global_batch_size=20"]) == 2
    assert waits == ([""] if waited else [])
    told = capsys.readouterr().err
    assert "rror" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_the_launcher_ends_has_its_own_exit_code(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher is told what the first says. Seen red: SIGTERM ended it; torchrun told how to enable a traceback."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    error_file = tmp_path / "error.json"
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    real = ranks.signal.sigtimedwait

    def ended(signals: set[signal.Signals], seconds: float) -> object:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return real(signals, seconds)

    monkeypatch.setattr(ranks.signal, "sigtimedwait", ended)
    assert main(["verify", "--fraction", "0"]) == 2
    told, said = capsys.readouterr().err, "--fraction 0 is the run that the others are compared with"
    left = json.loads(error_file.read_text())["message"]
    assert set(left) == {"message", "extraInfo"}
    assert int(left["extraInfo"]["timestamp"]) > 0
    assert (said in told, said in left["message"]) == (rank == "0", rank == "0")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_ranks_that_have_met_all_have_is_told_by_the_first(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "met", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    assert ranks.reports_error(everywhere=True) is (rank == "0")
    assert ranks.reports_error(everywhere=False)


LONG = [
    (
        "  9.9   10.567  state 100% host; 2 layers recompute",
        "  9.9   10.567  state 100% host; 2",
        " " * 16 + "layers recompute",
    ),
    ("  no columns, and what is told is --on-names", "  no columns, and what is told is", "      --on-names"),
    ("  nothing fits below a column on the  far right", "  nothing fits below a column on the", "      far right"),
    ("see /a/path/of/more/than/forty/columns/in/all.json", "see", "    /a/path/of/more/than/forty/columns/in/all.json"),
]
"""In 40 columns."""


@pytest.mark.parametrize(("line", "first", "second"), LONG)
def test_long_lines_go_on_below_their_last_column(
    line: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a terminal breaks them at its edge, below the first column; an indented line that lost its indent."""
    monkeypatch.setenv("COLUMNS", "40")
    short = "  GiB   step s  choice\n\n    told\n"
    assert wrapped(f"{short}{line}\n{short}") == f"{short}{first}\n{second}\n{short}"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train", "qwen3_moe_tiny_pretrain_config, 50 iterations"),
        ("verify", "comparing runs of qwen3_moe_tiny_pretrain_config"),
    ],
)
def test_the_first_line_comes_before_torch_is_imported(command: str, says: str) -> None:
    """Importing torch takes longer than a second. Seen red: torch imported above the line; no line."""
    code = f"import sys; sys.modules['torch'] = None; from hostward.cli import main; main(['{command}'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert says in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[0].endswith("; loading PyTorch")
    assert done.stdout == ""


def test_a_reader_that_is_gone_is_told_from_a_failure() -> None:
    """Seen red: rich ends the program with 1, which of `verify` says that bits differ."""
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    with pytest.raises(BrokenPipeError):
        print_tables([Table("a")], stream)
    with contextlib.suppress(BrokenPipeError):
        stream.close()
