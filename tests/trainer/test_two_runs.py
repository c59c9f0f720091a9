"""Two runs in one folder at a time: the second is refused before it trains, until the first is over or gone."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from cli_runs import SMALL, iterations_saved, saved, start_process, wait_for
from run_fixtures import Cli
from test_interrupts import loitering

from hostward.cli import run_files
from hostward.config.overrides import apply_overrides
from hostward.errors import ConfigError
from hostward.files import folder_lock
from hostward.recipes import load
from hostward.report.schema import RunReport
from hostward.trainer import loop, setup


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_ENDING_S", 0.0)


TINY = "qwen3_moe_tiny_pretrain_config"


def test_a_second_run_waits_for_the_end_of_the_first_even_of_a_killed_one(
    train: Cli, refused: Cli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: both trained and saved, and `latest` went from 4 back to 3."""
    folder = tmp_path / "run"
    going_on = (f"checkpoint.save={folder}", f"checkpoint.load={folder}", "checkpoint.save_interval=1")
    words = ["train", *SMALL, f"dataset.path={text}", "train.train_iters=4", *going_on]
    with start_process("-c", loitering("trainer.loop", "backward", 3), *words) as process:
        wait_for(process, "LOITERING")
        assert iterations_saved(folder) == ["iter_0000001", "iter_0000002"]
        for second in (going_on, going_on[:1], ("--run-dir", folder)):
            told = refused(*second).err
            assert "is the folder of a run that goes on\n" in told
            assert f"process {process.pid} on {os.uname().nodename}, since " in told
        process.send_signal(signal.SIGKILL)
        process.end(60)
    monkeypatch.undo()  # weights may be allocated
    train("train.train_iters=4", *going_on)
    assert saved(folder)[1]["iteration"] == 4


def test_a_run_that_is_over_lets_go_of_its_folders(train: Cli, tmp_path: Path) -> None:
    """In the process that made it too, as in a notebook."""
    words = ("train.train_iters=1", f"checkpoint.save={tmp_path / 'saved'}", "--run-dir", tmp_path / "run")
    train(*words)
    for name in ("saved", "run"):
        folder_lock.FolderLock(name, tmp_path / name).release()


def test_one_run_dir_takes_one_run(refused: Cli, tmp_path: Path) -> None:
    with folder_lock.FolderLock("theirs", tmp_path):
        assert f"--run-dir {tmp_path} is the folder of a run that goes on" in refused("--run-dir", tmp_path).err


def test_the_folder_of_checkpoints_may_be_that_of_the_run(train: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "other").symlink_to(folder)
    train("train.train_iters=1", f"checkpoint.save={folder}", "--run-dir", tmp_path / "other")
    assert (folder / "report.json").exists()


@pytest.mark.parametrize("also", [(), ("--run-dir", "{folder}/run")])
def test_a_run_that_is_refused_leaves_no_folder(refused: Cli, tmp_path: Path, also: tuple[str, ...]) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    words = (f"checkpoint.save={folder}/saved/deep", *(word.format(folder=folder) for word in also))
    refused(*words, "dataset.path=/no/such/file")
    assert list(folder.iterdir()) == []


def test_the_folders_are_the_runs_own_until_its_last_file_is_written(
    train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: others could have them when training was over, and the report was not written yet."""
    write, refused = run_files.RunFiles._write, []

    def asked(files: run_files.RunFiles, made: RunReport) -> None:
        for name in ("saved", "run"):
            with pytest.raises(ConfigError):
                folder_lock.FolderLock(name, tmp_path / name)
            refused.append(name)
        write(files, made)

    monkeypatch.setattr(run_files.RunFiles, "_write", asked)
    train("train.train_iters=1", f"checkpoint.save={tmp_path / 'saved'}", "--run-dir", tmp_path / "run")
    assert refused == ["saved", "run"]


def test_a_full_disk_is_told_as_one(refused: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a traceback for --run-dir, and "name a writable folder" for checkpoint.save."""
    opened = os.open

    def full(path: str | Path, *arguments: int) -> int:
        if str(path).endswith(folder_lock.FILE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(folder_lock.os, "open", full)
    for word in (("--run-dir", tmp_path), (f"checkpoint.save={tmp_path}",)):
        told = refused(*word).err
        assert "cannot be written\n  why: No space left on device" in told
        assert "fix: free space on that disk, or" in told


def test_a_run_that_has_trained_and_is_kept_has_let_go(text: Path, tmp_path: Path) -> None:
    words = [*SMALL, f"dataset.path={text}", "train.train_iters=1", f"checkpoint.save={tmp_path}"]
    run = setup.prepare(TINY, apply_overrides(load(TINY), words))
    with pytest.raises(ConfigError, match=f"checkpoint.save={tmp_path} is the folder of a run"):
        setup.prepare(TINY, apply_overrides(load(TINY), [*words, f"checkpoint.load={tmp_path}"]))
    loop.train(run)
    folder_lock.FolderLock("mine", tmp_path).release()
    assert run.saved is not None
