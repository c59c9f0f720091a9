"""Checkpoints of `hostward train`: a resumed run goes on bit for bit, and what does not belong to it is refused."""

from __future__ import annotations

import json
import logging
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import SMALL, Outcome, different, iterations_saved, offloaded, saved, start_process, wait_for
from run_fixtures import Cli

from hostward import recipes
from hostward.checkpoint import api
from hostward.config.overrides import apply_overrides
from hostward.files.folder_lock import FILE as LOCK_FILE
from hostward.trainer import checkpointing, setup
from hostward.trainer.run import Run


def run_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All that a run consists of: tensors, and plain values besides its own options."""
    tensors, plain = saved(folder)
    return tensors, {key: value for key, value in plain.items() if key != "config"}


def assert_same_state(folder: Path, other: Path) -> None:
    """Weights, moments, masters, counts, generators, position and group settings are equal in every bit."""
    (mine, mine_plain), (theirs, theirs_plain) = run_state(folder), run_state(other)
    assert different(mine, theirs) == []
    assert mine_plain == theirs_plain


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [("fp32", 0.5, 0.5), ("fp32", 0.5, 0), ("fp32", 0, 1), ("bf16", 1, 0.25), ("fp16", 0.5, 1)],
)
def test_t48_t51_resume_equals_an_unbroken_run(
    train: Cli, tmp_path: Path, dtype: str, before: float, after: float
) -> None:
    common = [f"model.params_dtype={dtype}", "model.experts_implementation=eager"]
    whole, half, resumed = (tmp_path / n for n in ("whole", "half", "resumed"))
    unbroken = train(*common, *offloaded(before), "train.train_iters=4", f"checkpoint.save={whole}").report
    first = train(*common, *offloaded(before), "train.train_iters=2", f"checkpoint.save={half}").report
    second = train(
        *common, *offloaded(after), "train.train_iters=4", f"checkpoint.load={half}", f"checkpoint.save={resumed}"
    ).report
    assert (second["first_iteration"], second["last_iteration"]) == (2, 4)
    for key in ("losses", "grad_norms"):
        assert first[key] + second[key] == unbroken[key]
    assert first["skipped_iterations"] + second["skipped_iterations"] == unbroken["skipped_iterations"]
    assert_same_state(whole, resumed)


def test_saving_follows_save_interval_and_keeps_most_recent_k(train: Cli, tmp_path: Path) -> None:
    every, kept = tmp_path / "every", tmp_path / "kept"
    words = ["train.train_iters=5", "checkpoint.save_interval=2"]
    report = train(*words, f"checkpoint.save={every}").report
    assert iterations_saved(every) == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert report["checkpoint"] == str(every / "iter_0000005")
    train(*words, f"checkpoint.save={kept}", "checkpoint.most_recent_k=2")
    assert iterations_saved(kept) == ["iter_0000004", "iter_0000005"]
    assert_same_state(every, kept)


def test_a_run_that_is_over_is_left_as_it_is(
    cli: Cli, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a scheduler starts it again that does not know."""
    folder = tmp_path / "run"
    words = ["train", *SMALL, f"dataset.path={text}", "train.train_iters=2", f"checkpoint.save={folder}"]
    assert cli(*words).code == 0
    before = files_of(folder)
    assert folder / "report.json" in before
    again = cli(*words, f"checkpoint.load={folder}")
    assert again.code == 0
    assert "nothing to do; raise the latter to go on" in caplog.text
    assert before == files_of(folder)


def files_of(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """What each file of a run holds, and since when; but for the lock, which every run writes."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != LOCK_FILE]
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def test_a_run_goes_on_in_its_own_folder(train: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    here = [f"checkpoint.save={folder}", "checkpoint.save_interval=1", "checkpoint.most_recent_k=2", *offloaded(0.5)]
    train("train.train_iters=2", *here)
    second = train("train.train_iters=4", *here, f"checkpoint.load={folder}").report
    assert second["first_iteration"] == 2
    assert iterations_saved(folder) == ["iter_0000003", "iter_0000004"]
    whole = train("train.train_iters=4", *offloaded(0.5), f"checkpoint.save={tmp_path / 'whole'}").report
    assert whole["losses"][2:] == second["losses"]
    assert_same_state(tmp_path / "whole", folder)


def test_a_finished_run_has_nothing_to_do(train: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And no table: seen red."""
    train("train.train_iters=2", f"checkpoint.save={tmp_path}/a")
    outcome = train("train.train_iters=2", f"checkpoint.load={tmp_path}/a")
    assert outcome.report["losses"] == []
    assert "nothing to do; raise the latter to go on" in caplog.text
    assert outcome.out == ""


def test_t54_killed_in_mid_run_resumes_as_if_nothing_had_happened(train: Cli, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "killed"
    words = [*SMALL, f"dataset.path={text}", *offloaded(0.5), "logger.log_interval=1"]
    command = ["-m", "hostward", "train", *words, "train.train_iters=100000", f"checkpoint.save={folder}"]
    with start_process(*command, "checkpoint.save_interval=2", "checkpoint.most_recent_k=2") as process:
        wait_for(process, "saved ")
        wait_for(process, "saved ")
        process.send_signal(signal.SIGKILL)
        process.end(60)
    done = saved(folder)[1]["iteration"]
    assert done >= 4
    last = f"train.train_iters={done + 1}"
    resumed = train(last, *offloaded(0.5), f"checkpoint.load={folder}", f"checkpoint.save={folder}").report
    whole = train(last, *offloaded(0.5), f"checkpoint.save={tmp_path / 'whole'}").report
    assert resumed["losses"] == whole["losses"][done:]
    assert_same_state(folder, tmp_path / "whole")


@pytest.fixture
def start(text: Path) -> Callable[..., Run]:
    """A prepared run of the small model."""

    def prepare(*words: str) -> Run:
        name = "qwen3_moe_tiny_pretrain_config"
        config = apply_overrides(recipes.load(name), [*SMALL, f"dataset.path={text}", *words])
        return setup.prepare(name, config)

    return prepare


def draws() -> tuple[Any, ...]:
    """One number of each generator that a model or a user's code may draw from."""
    return torch.rand(3).tolist(), random.random(), np.random.standard_normal(3).tolist()


def test_t48_random_number_generators_go_on(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(f"checkpoint.save={tmp_path}")
    fresh = draws()
    checkpointing.save(run)
    following = draws()
    start(f"checkpoint.load={tmp_path}")
    assert draws() == following
    start(f"checkpoint.load={tmp_path}", "checkpoint.load_rng=False")
    assert draws() == fresh


def test_finetune_takes_the_weights_only_and_says_so(
    train: Cli, start: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = train("train.train_iters=3", f"checkpoint.save={tmp_path}").report
    tensors, _ = saved(tmp_path)
    # Other data order and batch size: they do not matter, since nothing is gone on with.
    run = start(
        f"checkpoint.load={tmp_path}",
        "checkpoint.finetune=True",
        "rng.seed=5",
        "train.global_batch_size=2",
        *offloaded(1),
    )
    assert run.iteration == 0
    assert f"loaded the weights of {tmp_path / 'iter_0000003'}: the run starts at iteration 0" in caplog.text
    weights = {f"model/{n}": p.detach() for n, p in run.model.named_parameters()}
    assert different(weights, {n: t for n, t in tensors.items() if n.startswith("model/")}) == []
    for entry in run.optimizer.state_dict()["state"].values():
        assert int(entry["step"]) == 0
        assert not entry["exp_avg"].any()
        assert not entry["exp_avg_sq"].any()
    report = train("train.train_iters=2", f"checkpoint.load={tmp_path}", "checkpoint.finetune=True").report
    assert (report["first_iteration"], report["last_iteration"]) == (0, 2)
    assert report["losses"][0] < first["losses"][0]


def test_t50_load_optim_false_goes_on_with_fresh_moments_and_says_so(
    start: Callable[..., Run], train: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train("train.train_iters=3", f"checkpoint.save={tmp_path}")
    run = start(f"checkpoint.load={tmp_path}", "checkpoint.load_optim=False")
    assert run.iteration == 3
    assert all(int(e["step"]) == 0 and not e["exp_avg"].any() for e in run.optimizer.state_dict()["state"].values())
    assert "step counts start at 0 with zero moments" in caplog.text


def test_options_of_the_resumed_run_hold_not_those_of_the_checkpoint(
    train: Cli, start: Callable[..., Run], tmp_path: Path
) -> None:
    """An option that was given and then overwritten by the checkpoint would be ignored in silence."""
    train("train.train_iters=2", f"checkpoint.save={tmp_path}")
    words = ["optimizer.weight_decay=0.5", "optimizer.adam_beta1=0.8", "optimizer.adam_eps=1e-6"]
    run = start(f"checkpoint.load={tmp_path}", *words)
    (group,) = run.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.5, (0.8, 0.95), 1e-6)


# -------------------------------------------------------------------- refused


@pytest.fixture
def checkpointed(train: Cli, tmp_path: Path) -> Path:
    """A folder with a checkpoint of iteration 2."""
    folder = tmp_path / "checkpoint"
    train("train.train_iters=2", *offloaded(0.5), f"checkpoint.save={folder}")
    return folder


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["rng.seed=99"], ["was trained on other data, or in another order", "the seed", "checkpoint.finetune=True"]),
        (["model.seq_length=32"], ["other data", "model.seq_length"]),
        (["dataset.format=mock", "dataset.path=null"], ["other data"]),
        (["train.global_batch_size=2"], ["had consumed 8 samples at iteration 2", "train.global_batch_size is 2 now"]),
    ],
)
def test_a_checkpoint_of_other_data_or_batch_size_is_refused(
    checkpointed: Path, refused: Cli, words: list[str], texts: list[str]
) -> None:
    outcome = refused(*words, f"checkpoint.load={checkpointed}")
    for text in texts:
        assert text in outcome.err


def refuse_after_building(cli: Cli, text: Path, *words: str) -> Outcome:
    """As the fixture `refused`, for what only shows against the model itself."""
    outcome = cli("train", *SMALL, f"dataset.path={text}", "train.train_iters=3", *words)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert "fix: " in outcome.err
    assert "Traceback" not in outcome.err
    return outcome


@pytest.mark.parametrize("word", ["model.hidden_size=128", "model.num_layers=3", "model.params_dtype=bf16"])
def test_a_checkpoint_of_another_model_is_refused(checkpointed: Path, cli: Cli, text: Path, word: str) -> None:
    outcome = refuse_after_building(cli, text, word, f"checkpoint.load={checkpointed}")
    assert "is of another model" in outcome.err
    assert "model/model." in outcome.err


def rewritten(folder: Path, leave_out: str = "", **plain_changes: object) -> None:
    """Save the latest checkpoint anew, sound in itself, without one tensor or with other plain values."""
    tensors, plain = saved(folder)
    kept = {n: t for n, t in tensors.items() if n != leave_out}
    plain = {k: v for k, v in {**plain, **plain_changes}.items() if v != "missing"}
    assert len(kept) == len(tensors) - bool(leave_out)
    api.save(folder, plain.get("iteration", 2), tensors=kept, plain=plain)


@pytest.mark.parametrize(
    "name",
    [
        "model/model.layers.0.self_attn.q_proj.weight",
        "optimizer/model.layers.0.self_attn.q_proj.weight/exp_avg",
        "optimizer/model.layers.0.self_attn.q_proj.weight/step",
        "rng/torch",
    ],
)
def test_a_checkpoint_without_one_tensor_is_refused(checkpointed: Path, cli: Cli, text: Path, name: str) -> None:
    rewritten(checkpointed, leave_out=name)
    outcome = refuse_after_building(cli, text, f"checkpoint.load={checkpointed}")
    assert name.split("/")[1] in outcome.err


@pytest.mark.parametrize("key", ["data", "iteration", "optimizer", "python_rng"])
def test_a_checkpoint_without_one_plain_value_is_refused(checkpointed: Path, refused: Cli, key: str) -> None:
    """Not saved by `hostward train`, for instance."""
    rewritten(checkpointed, **{key: "missing"})
    outcome = refused(f"checkpoint.load={checkpointed}")
    assert "was not saved by `hostward train`" in outcome.err
    assert key in outcome.err


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed", "pointer"])
def test_a_damaged_checkpoint_is_refused_and_another_one_named(
    train: Cli, cli: Cli, text: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    train("train.train_iters=2", f"checkpoint.save={folder}", "checkpoint.save_interval=1")
    tensors = folder / "iter_0000002" / "__0_0.distcp"
    content = tensors.read_bytes()
    if damage == "truncated":
        tensors.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        middle = len(content) // 2
        tensors.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "removed":
        tensors.unlink()
    else:
        (folder / "latest").write_text("iter_x")
    outcome = refuse_after_building(cli, text, f"checkpoint.load={folder}")
    complete = "iter_0000002" if damage == "pointer" else "iter_0000001"
    assert f"write {complete} into {folder / 'latest'}" in outcome.err
    (folder / "latest").write_text(complete)
    assert cli("train", *SMALL, f"dataset.path={text}", "train.train_iters=3", f"checkpoint.load={folder}").code == 0


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_folder_without_a_checkpoint_is_refused(refused: Cli, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "load"
    if kind == "empty":
        folder.mkdir()
    elif kind == "file":
        folder.write_text("no folder")
    outcome = refused(f"checkpoint.load={folder}")
    assert str(folder) in outcome.err
    words = {
        "missing": "the folder does not exist",
        "empty": "no save into it was ever finished",
        "file": "cannot read checkpoints",
    }
    assert words[kind] in outcome.err


@pytest.fixture
def two(train: Cli, tmp_path: Path) -> Path:
    """A folder with checkpoints of iterations 1 and 2."""
    folder = tmp_path / "two runs"
    train("train.train_iters=2", f"checkpoint.save={folder}", "checkpoint.save_interval=1")
    return folder


def test_the_newest_checkpoint_itself_is_told_as_its_folder(cli: Cli, text: Path, two: Path) -> None:
    outcome = refuse_after_building(cli, text, f"checkpoint.load={two / 'iter_0000002'}")
    assert f"checkpoint.load={two}/iter_0000002 is a checkpoint, not a folder of them\n" in outcome.err
    assert (
        f"from the checkpoint that {two}/latest names: iter_0000002\n  fix: name checkpoint.load={two}, or leave"
        in outcome.err
    )


@pytest.mark.parametrize("pointer", ["iter_0000002", "iter_0000009", None])
def test_an_older_checkpoint_itself_is_told_with_what_to_write(
    cli: Cli, text: Path, two: Path, pointer: str | None
) -> None:
    """Seen red: the fix was the folder alone, from which a run goes on with the newest."""
    (two / "latest").unlink()
    if pointer is not None:
        (two / "latest").write_text(pointer)
    outcome = refuse_after_building(cli, text, f"checkpoint.load={two / 'iter_0000001'}")
    told = {"iter_0000002": "iter_0000002", "iter_0000009": "none that is complete", None: "it is missing"}
    assert f"why: a run resumes from the checkpoint that {two}/latest names: {told[pointer]}\n" in outcome.err
    assert f"fix: printf iter_0000001 > '{two}/latest', then checkpoint.load={two}\n" in outcome.err


@pytest.mark.parametrize(
    ("place", "word", "folder"),
    [("iter_0000001", ".", "{two}"), ("other", "best", "{two}"), (".", "iter_0000001", ".")],
    ids=["from within", "by a link", "relative"],
)
def test_a_checkpoint_itself_is_known_however_it_is_named(
    cli: Cli, text: Path, two: Path, monkeypatch: pytest.MonkeyPatch, place: str, word: str, folder: str
) -> None:
    (two / "other").mkdir()
    (two / "other" / "best").symlink_to("../iter_0000001")
    monkeypatch.chdir(two / place)
    outcome = refuse_after_building(cli, text, f"checkpoint.load={word}")
    assert f"checkpoint.load={word} is a checkpoint, not a folder of them\n" in outcome.err
    assert outcome.err.endswith(f", then checkpoint.load={folder.format(two=two)}\n")


def test_a_damaged_checkpoint_itself_is_told_as_its_folder(cli: Cli, text: Path, two: Path) -> None:
    (two / "iter_0000001" / "__0_0.distcp").unlink()
    outcome = refuse_after_building(cli, text, f"checkpoint.load={two / 'iter_0000001'}")
    assert "holds no complete checkpoint\n  why: it is within a folder of checkpoints\n" in outcome.err
    assert f"fix: name checkpoint.load={two}, or" in outcome.err


@pytest.mark.parametrize("saves_there", [False, True])
def test_checkpoints_without_latest_are_told_with_what_to_write(
    train: Cli, cli: Cli, text: Path, two: Path, saves_there: bool
) -> None:
    """Seen red: "no save into it was ever finished"; and where the run saves there, it began anew over them."""
    (two / "latest").unlink()
    words = [f"checkpoint.load={two}", *([f"checkpoint.save={two}"] if saves_there else [])]
    outcome = refuse_after_building(cli, text, *words)
    assert f"checkpoint.load={two} holds checkpoints, but no file latest\n" in outcome.err
    assert f"fix: write the name of one into it, as in printf iter_0000002 > '{two}/latest'\n" in outcome.err
    (two / "latest").write_text("iter_0000002")
    assert train("train.train_iters=3", *words).report["first_iteration"] == 2


def test_a_first_save_that_ended_before_its_name_is_gone_on_from(
    train: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher starts the run again, and nobody is there to write the name."""
    words = [f"checkpoint.load={tmp_path / 'run'}", f"checkpoint.save={tmp_path / 'run'}"]
    train("train.train_iters=2", *words)
    (tmp_path / "run/latest").unlink()
    with caplog.at_level(logging.INFO):
        assert train("train.train_iters=3", *words).report["first_iteration"] == 2
    told = "iter_0000002 is complete, but its save ended before `latest` named it: the run resumes from it"
    assert told in caplog.messages


def test_plain_values_are_json(checkpointed: Path) -> None:
    """Nothing in a checkpoint needs more than JSON and tensors to be read."""
    plain = saved(checkpointed)[1]
    assert json.loads(json.dumps(plain)) == plain
    assert plain["config"]["model"]["hidden_size"] == 64


def test_a_run_that_goes_back_says_what_lies_behind_and_which_options_differ(
    train: Cli, two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: with the checkpoint that the run goes on from among them; with every option told."""
    caplog.set_level(logging.INFO)
    here = (f"checkpoint.save={two}", f"checkpoint.load={two}", "train.train_iters=3")
    (two / "latest").write_text("iter_0000001")
    train(*here, "optimizer.lr=0.01", "scheduler.lr_warmup_iters=1")
    told = [record.message for record in caplog.records if record.name == "hostward"]
    assert sum("as this run's options say" in text for text in told) == 2
    assert "optimizer.lr is 0.01, as this run's options say; the run that saved had 0.001" in told
    assert "scheduler.lr_warmup_iters is 1, as this run's options say; the run that saved had 5" in told
    assert any(text.startswith(f"{two} also has iter_0000002, later than the checkpoint") for text in told)
    assert iterations_saved(two) == ["iter_0000001", "iter_0000002", "iter_0000003"]

    caplog.clear()
    train(*here[:2], "train.train_iters=4", "optimizer.lr=0.01", "scheduler.lr_warmup_iters=1")
    assert f"resumed {two / 'iter_0000003'} at iteration 3" in caplog.text
    assert "as this run's options say" not in caplog.text
    assert "also has" not in caplog.text
