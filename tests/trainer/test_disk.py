"""Room on the disk for the checkpoints of a run, weighed before it starts."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hostward import recipes
from hostward.checkpoint import api, files
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.errors import CheckpointError
from hostward.trainer import memory_check
from hostward.trainer.memory_check import checkpoint_bytes, require_room, saves_to_come

VOCABULARY = 257


def configured(*words: str) -> Config:
    return apply_overrides(recipes.load("qwen3_moe_tiny_pretrain_config"), ["train.train_iters=10", *words])


def saved(directory: Path, iteration: int, numel: int = 0) -> Path:
    """A checkpoint of an iteration, with a tensor of so many bytes."""
    tensors = {"filling": torch.zeros(numel, dtype=torch.uint8)}
    return api.save(directory, iteration, tensors=tensors, plain={"iteration": iteration})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk with `bytes` free, so many checkpoints of the recipe and some more."""
    told = SimpleNamespace(bytes=0)
    monkeypatch.setattr(memory_check, "room_bytes", lambda folder: told.bytes)
    return told


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((), 1),
        (("checkpoint.save_interval=10",), 1),
        (("checkpoint.save_interval=5",), 2),
        (("checkpoint.save_interval=3",), 4),
        (("checkpoint.save_interval=1",), 10),
        (("checkpoint.save_interval=20",), 1),
    ],
)
def test_saves_of_a_run_are_counted(words: tuple[str, ...], count: int) -> None:
    assert saves_to_come(configured("checkpoint.save=x", *words), None) == count


def test_saves_of_a_run_that_goes_on_are_counted(tmp_path: Path) -> None:
    at = {iteration: saved(tmp_path, iteration) for iteration in (4, 6, 10, 12)}
    config = configured("checkpoint.save=x", "checkpoint.load=x", "checkpoint.save_interval=3")
    assert [saves_to_come(config, at[iteration]) for iteration in at] == [3, 2, 0, 0]
    elsewhere = configured("checkpoint.save=x", "checkpoint.load=y", "checkpoint.save_interval=3")
    assert [saves_to_come(elsewhere, at[iteration]) for iteration in at] == [3, 2, 1, 1]
    anew = configured("checkpoint.save=x", "checkpoint.load=y", "checkpoint.finetune=true")
    assert saves_to_come(anew, at[12]) == 1


def test_a_checkpoint_without_room_is_refused_and_one_with_room_is_not(tmp_path: Path, free: SimpleNamespace) -> None:
    config = configured(f"checkpoint.save={tmp_path / 'new'}")
    free.bytes = checkpoint_bytes(config, VOCABULARY)
    require_room(config, VOCABULARY, None)
    free.bytes -= 1
    with pytest.raises(
        CheckpointError, match=r"new has room for [0-9,]+ bytes; a .* takes at least [0-9,]+ bytes"
    ) as caught:
        require_room(config, VOCABULARY, None)
    assert "--force" in caught.value.fix
    require_room(configured(), VOCABULARY, None)  # saves nothing
    assert not (tmp_path / "new").exists()


def test_older_checkpoints_make_no_room_for_the_next_and_leftovers_do(tmp_path: Path, free: SimpleNamespace) -> None:
    words = [f"checkpoint.{option}={tmp_path}" for option in ("save", "load")]
    config = configured(*words, "checkpoint.most_recent_k=1")
    needed_bytes = checkpoint_bytes(config, VOCABULARY)
    older = saved(tmp_path, 5, numel=100_000)
    free.bytes = needed_bytes - 50_000
    with pytest.raises(CheckpointError, match="has room for"):
        require_room(config, VOCABULARY, older)
    (tmp_path / ".iter_0000006.partial-0123abcd").mkdir()
    (tmp_path / ".iter_0000006.partial-0123abcd" / "__0_0.distcp").write_bytes(bytes(50_000))
    require_room(config, VOCABULARY, older)


def test_a_run_that_is_over_needs_no_room(tmp_path: Path, free: SimpleNamespace) -> None:
    over = saved(tmp_path, 10)
    require_room(configured(f"checkpoint.save={tmp_path}", f"checkpoint.load={tmp_path}"), VOCABULARY, over)


@pytest.mark.parametrize(
    ("words", "together"),
    [
        (["checkpoint.save_interval=1"], 10),
        (["checkpoint.save_interval=5", "checkpoint.most_recent_k=4"], 2),
        (["checkpoint.save_interval=1", "checkpoint.most_recent_k=4"], 5),
        (["checkpoint.save_interval=1", "checkpoint.most_recent_k=1"], 2),
    ],
)
def test_checkpoints_that_find_no_room_together_are_told(
    tmp_path: Path, free: SimpleNamespace, caplog: pytest.LogCaptureFixture, words: list[str], together: int
) -> None:
    """With retention the newest lie there, and one more while it is made."""
    caplog.set_level(logging.WARNING, logger="hostward")
    config = configured(f"checkpoint.save={tmp_path}", *words)
    free.bytes = together * checkpoint_bytes(config, VOCABULARY)
    require_room(config, VOCABULARY, None)
    assert caplog.text == ""
    free.bytes -= 1
    require_room(config, VOCABULARY, None)
    assert f"would hold {together} checkpoints of this run at once" in caplog.text
    assert f"has room for {together - 1};" in caplog.text
    caplog.clear()
    require_room(config, VOCABULARY, None, first=False)
    assert caplog.text == ""
    free.bytes = 0
    with pytest.raises(CheckpointError, match="has room for 0 B"):
        require_room(config, VOCABULARY, None, first=False)


def test_older_checkpoints_that_retention_removes_are_room_for_later_ones(
    tmp_path: Path, free: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    words = [f"checkpoint.save={tmp_path}", f"checkpoint.load={tmp_path}", "checkpoint.save_interval=1"]
    config = configured(*words, "checkpoint.most_recent_k=1")
    older = saved(tmp_path, 5, numel=100_000)
    free.bytes = 2 * checkpoint_bytes(config, VOCABULARY) - 100_000
    require_room(config, VOCABULARY, older)
    assert caplog.text == ""
    require_room(configured(*words[:2], "checkpoint.save_interval=4"), VOCABULARY, older)
    assert "would hold 2 checkpoints" in caplog.text


def test_checkpoints_that_retention_leaves_give_no_room(
    tmp_path: Path, free: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of later iterations, of which the run is finetuned."""
    words = [f"checkpoint.save={tmp_path}", "checkpoint.save_interval=5", "checkpoint.most_recent_k=1"]
    config = configured(*words, "checkpoint.finetune=true")
    later = saved(tmp_path, 1000, numel=100_000)
    free.bytes = 2 * checkpoint_bytes(config, VOCABULARY) - 1
    require_room(config, VOCABULARY, later)
    assert "would hold 2 checkpoints" in caplog.text


def test_what_is_removed_while_it_is_weighed_weighs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".iter_0000006.partial-0123abcd"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_bytes(bytes(10))
    is_file = Path.is_file

    def gone(path: Path) -> bool:
        found = is_file(path)
        if path.name == "a":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", gone)
    assert files.leftover_bytes(tmp_path) == 10


def test_room_is_that_of_the_nearest_folder_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def free(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_blocks=9, f_bfree=3, f_bavail=3, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", free)
    assert memory_check.room_bytes(tmp_path) == memory_check.room_bytes(tmp_path / "not" / "yet") == 3 * 4096
    assert asked == [tmp_path, tmp_path]


def test_a_file_system_that_does_not_tell_is_not_weighed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0, f_bfree=0, f_bavail=0, f_frsize=4096))
    require_room(configured(f"checkpoint.save={tmp_path}"), VOCABULARY, None)
