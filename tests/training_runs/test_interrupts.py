"""Ctrl-C in a process of its own: exit 130, one line, no traceback, the last checkpoint whole."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cli_runs import SMALL, iterations_saved, offloaded, saved, start_process, wait_for
from conftest import Cli

LOITER = """
import sys, time
import hostward.{module} as module

def loiter(*arguments, **options):
    calls.append(None)
    if len(calls) == {call}:
        print("LOITERING", file=sys.stderr, flush=True)
        time.sleep(60)
    return original(*arguments, **options)

calls, original = [], module.{name}
module.{name} = loiter
from hostward.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The command line with one function that takes long at one call, so that a signal surely meets it."""


def interrupted(program: str, words: list[str]) -> tuple[int, str]:
    """Start, send SIGINT once the process loiters, and return exit code and stderr from there on."""
    process = start_process(["-c", program, *words])
    try:
        wait_for(process, "LOITERING")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return process.returncode, err


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        # Two saves (iterations 1 and 2) are done; 7 buckets at fraction 1 make 7 host steps per iteration.
        ("engine.simulated", "adamw_step", 17),
        ("checkpoint_files", "publish", 3),
    ],
    ids=["in a step", "in a save"],
)
def test_ctrl_c_leaves_the_last_checkpoint_whole(
    train: Cli, tmp_path: Path, text: Path, module: str, name: str, call: int
) -> None:
    folder = tmp_path / "run"
    words = ["train", *SMALL, f"dataset.path={text}", *offloaded(1), "train.train_iters=50"]
    words += [f"checkpoint.save={folder}", "checkpoint.save_interval=1"]
    code, err = interrupted(LOITER.format(module=module, name=name, call=call), words)
    assert code == 130
    assert err.splitlines() == ["interrupted; checkpoints that were complete are intact"]
    assert iterations_saved(folder) == ["iter_0000001", "iter_0000002"]
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == [".save.lock"]
    assert saved(folder)[1]["iteration"] == 2
    resumed = train(*offloaded(1), "train.train_iters=3", f"checkpoint.load={folder}").report
    whole = train("train.train_iters=3").report
    assert resumed["losses"] == whole["losses"][2:]


def test_ctrl_c_with_debug_shows_where(tmp_path: Path, text: Path) -> None:
    words = ["train", "--debug", *SMALL, f"dataset.path={text}", *offloaded(1), "train.train_iters=50"]
    code, err = interrupted(LOITER.format(module="engine.simulated", name="adamw_step", call=2), words)
    assert code in (130, -signal.SIGINT)  # Python ends itself with the signal, which a shell shows as 130
    assert "Traceback" in err
    assert "KeyboardInterrupt" in err
