"""`hostward checkpoint`: what one holds, its weights in transformers, its state in torch.optim.AdamW; and saves beside
training by options.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import SMALL, different, iterations_saved, offloaded, saved
from run_fixtures import Cli

from hostward.cli.recipe import DEFAULT_RECIPE, configured
from hostward.trainer import export
from hostward.trainer.memory_check import checkpoint_bytes

BF16 = "model.params_dtype=bf16"


@pytest.fixture
def folder(train: Cli, tmp_path: Path) -> Path:
    train("train.train_iters=2", BF16, *offloaded(0.5), f"checkpoint.save={tmp_path / 'run'}")
    return tmp_path / "run"


@pytest.mark.parametrize("mode", ["stream", "snapshot"])
def test_saves_beside_training_are_those_that_are_waited_for(train: Cli, tmp_path: Path, mode: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    common = ["train.train_iters=5", "checkpoint.save_interval=2", BF16, *offloaded(0.5)]
    waited = train(*common, f"checkpoint.save={one}").report
    beside = train(
        *common, f"checkpoint.save={other}", "checkpoint.async_save=true", f"checkpoint.async_save_mode={mode}"
    ).report
    assert beside["losses"] == waited["losses"]
    assert beside["checkpoint"] == str(other / "iter_0000005")
    assert iterations_saved(other) == iterations_saved(one) == [f"iter_000000{n}" for n in (2, 4, 5)]
    for name in iterations_saved(one):
        (one / "latest").write_text(name)
        (other / "latest").write_text(name)
        (mine, my_plain), (theirs, their_plain) = saved(one), saved(other)
        assert different(mine, theirs) == []
        assert {**my_plain, "config": None} == {**their_plain, "config": None}


def test_inspect_tells_what_there_is_and_whether_it_is_sound(cli: Cli, folder: Path) -> None:
    told = cli("checkpoint", "inspect", folder)
    assert told.code == 0, told.err
    assert "iteration: 2" in told.out
    assert "bfloat16" in told.out
    assert "not checked" in told.out
    facts = json.loads(cli("checkpoint", "inspect", folder / "iter_0000002", "--verify", "--json", "-").out)
    assert (facts["checked"], facts["ranks"], facts["iteration"], facts["consumed_samples"]) == (True, 1, 2, 8)
    assert facts["tensors"]["exp_avg"] == facts["tensors"]["master"] == facts["tensors"]["model"]
    file = folder / "iter_0000002" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert "\n  why: it is a file of one, and a checkpoint is a folder\n" in cli("checkpoint", "inspect", file).err
    damaged = cli("checkpoint", "inspect", folder, "--verify")
    assert damaged.code == 2
    assert "is damaged in chunk 1" in damaged.err


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_checkpoint_is_as_large_as_was_weighed(train: Cli, tmp_path: Path, dtype: str) -> None:
    """Tables of contents and headers come on top: less than a byte per parameter, though the model is small."""
    words = [*SMALL, f"model.params_dtype={dtype}", "model.hidden_size=256"]
    train("train.train_iters=1", *words, f"checkpoint.save={tmp_path / 'run'}")
    contents = export.inspect(tmp_path / "run")
    weighed = checkpoint_bytes(configured(DEFAULT_RECIPE, words), 257)
    assert weighed < contents.size_bytes < weighed + contents.parameters


@pytest.mark.parametrize("shard_bytes", [export.SHARD_BYTES, 50_000])
def test_transformers_loads_the_weights(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    out = tmp_path / "exported"
    told = cli("checkpoint", "convert", folder, out)
    assert told.code == 0, told.err
    assert (len(list(out.glob("*.safetensors"))) > 1) == (shard_bytes == 50_000)
    loaded: Any = AutoModelForCausalLM
    model = loaded.from_pretrained(out)
    weights = {name.removeprefix("model/"): t for name, t in saved(folder)[0].items() if name.startswith("model/")}
    found = {name: t for name, t in model.state_dict().items() if name in weights}
    assert different(found, weights) == []
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}


def test_torch_adamw_takes_the_state_over(cli: Cli, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "torch"
    assert cli("checkpoint", "convert", folder, out, "--to", "torch").code == 0
    weights = torch.load(out / "model.pt", weights_only=True)
    state = torch.load(out / "optimizer.pt", weights_only=True)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    parameters = [torch.nn.Parameter(weights[name]) for name in names]
    optimizer = torch.optim.AdamW(parameters, lr=1.0)
    optimizer.load_state_dict(state)
    tensors, _ = saved(folder)
    for name, parameter in zip(names, parameters, strict=True):
        assert torch.equal(parameter.data, tensors[f"optimizer/{name}/master"])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], tensors[f"optimizer/{name}/exp_avg"])
        assert float(optimizer.state[parameter]["step"]) == 2.0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{folder}", "{folder}"], "error: target folder {folder} exists\n"),
        (["{folder}", "{folder}-out", "--to", "onnx"], "form 'onnx' is unknown"),
        (["{folder}-none", "{folder}-out"], "the folder does not exist\n  fix: name a run's folder (checkpoint.save)"),
        (["{folder}/iter_0000002/__0_0.distcp", "{folder}-out"], "fix: name {folder}/iter_0000002\n"),
        (["{folder}/..", "{folder}-out"], "there is neither latest nor manifest.json in it"),
    ],
)
def test_what_cannot_be_converted_is_refused(cli: Cli, folder: Path, words: list[str], reason: str) -> None:
    told = cli("checkpoint", "convert", *(word.format(folder=folder) for word in words))
    assert told.code == 2
    assert reason.format(folder=folder) in told.err
    assert not list(folder.parent.glob("*-out"))


def test_a_runs_folder_without_a_checkpoint_is_told_from_a_damaged_one(
    train: Cli, cli: Cli, folder: Path, tmp_path: Path
) -> None:
    """Seen red: "restore the checkpoint from a copy"."""
    bare, elsewhere = tmp_path / "bare", tmp_path / "elsewhere"
    train("train.train_iters=1", "--run-dir", bare)
    train("train.train_iters=1", "--run-dir", elsewhere, f"checkpoint.save={tmp_path / 'saved'}")
    told = [cli("checkpoint", "inspect", place) for place in (bare, elsewhere)]
    for place, outcome in zip((bare, elsewhere), told, strict=True):
        assert outcome.code == 2
        assert f"error: {place} holds no checkpoint\n  why: it is a run's folder (report.json)" in outcome.err
    assert "fix: name a folder that checkpoint.save named" in told[0].err
    assert f"fix: name {tmp_path}/saved/iter_0000001, which this run saved" in told[1].err
    (bare / "report.json").write_text("{")
    assert "fix: name a folder that checkpoint.save named" in cli("checkpoint", "inspect", bare).err
    (folder / "iter_0000002" / "manifest.json").unlink()
    assert "restore the checkpoint from a copy" in cli("checkpoint", "inspect", folder / "iter_0000002").err


@pytest.mark.parametrize("named", ["latest", "iter_0000002"])
def test_a_checkpoint_is_no_report(cli: Cli, folder: Path, named: str) -> None:
    """Seen red: "train again with --run-dir"."""
    outcome = cli("report", folder / named)
    assert outcome.code == 2
    assert f"fix: hostward report {folder}\n" in outcome.err
    (folder / "report.json").unlink()
    assert "fix: name that folder\n" in cli("report", folder / named).err


def test_a_run_may_lie_in_a_folder_named_latest(cli: Cli, folder: Path) -> None:
    run = folder.parent / "latest"
    folder.rename(run)
    (run / "manifest.json").write_text("{}")  # anybody's
    assert cli("report", run).code == 0


@contextmanager
def largest_file(limit_bytes: int) -> Iterator[None]:
    """A disk that takes no more bytes of one file: as a full one, the write itself fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", export.FORMATS)
@pytest.mark.parametrize("limit_bytes", [0, 500, 100_000])
def test_a_write_that_fails_is_told_and_leaves_nothing(cli: Cli, folder: Path, form: str, limit_bytes: int) -> None:
    """Seen red: SafetensorError, and RuntimeError `unexpected pos`, with a traceback."""
    out = folder.parent / "out"
    with largest_file(limit_bytes):
        told = cli("checkpoint", "convert", folder, out, "--to", form)
    assert told.code == 2
    assert told.err == (
        f"error: cannot write {out}\n  why: File too large\n"
        "  fix: raise the file size limit (ulimit -f), or name a folder on another file system\n"
    )
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run"]


MOMENTS = ["optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"]


def test_moments_in_bf16_are_saved_resumed_and_widened_and_fp32_ones_rounded_on_request_alone(
    train: Cli, cli: Cli, text: Path, folder: Path, tmp_path: Path
) -> None:
    refused = cli("train", *SMALL, f"dataset.path={text}", BF16, *MOMENTS, f"checkpoint.load={folder}")
    assert refused.code == 2
    assert "16 of its 32 bits would be lost" in refused.err
    assert "hostward checkpoint convert FOLDER OUT --to bf16-moments" in refused.err

    rounded, whole = tmp_path / "rounded", saved(folder)[0]
    assert cli("checkpoint", "convert", folder, rounded, "--to", "bf16-moments").code == 0
    tensors, plain = saved(rounded)
    assert plain["config"]["optimizer"]["exp_avg_sq_dtype"] == "bf16"
    moments = [name for name in whole if name.endswith(("/exp_avg", "/exp_avg_sq"))]
    assert different(tensors, whole) == sorted(moments)
    assert all(torch.equal(tensors[name], whole[name].to(torch.bfloat16)) for name in moments)

    words = ["train.train_iters=4", BF16, *MOMENTS, f"checkpoint.load={rounded}"]
    found = []
    for fraction in (0.0, 1.0):
        to = tmp_path / f"to-{fraction}"
        train(*words, *offloaded(fraction), f"checkpoint.save={to}")
        found.append(saved(to)[0])
    assert different(*found) == []
    assert {found[0][name].dtype for name in moments} == {torch.bfloat16}
    train("train.train_iters=4", BF16, f"checkpoint.load={tmp_path / 'to-0.0'}", f"checkpoint.save={tmp_path / 'wide'}")
    wide = saved(tmp_path / "wide")[0]
    assert all(torch.equal(wide[name], found[0][name].float()) for name in moments)
    assert cli("checkpoint", "convert", tmp_path / "to-0.0", tmp_path / "for-torch", "--to", "torch").code == 0


def test_main_weights_in_bf16_are_dropped_on_request_alone_and_come_back_exactly(
    train: Cli, cli: Cli, text: Path, folder: Path, tmp_path: Path
) -> None:
    option, dropped, whole = "optimizer.main_params_dtype=bf16", tmp_path / "dropped", saved(folder)[0]
    refused = cli("train", *SMALL, f"dataset.path={text}", BF16, option, f"checkpoint.load={folder}")
    assert refused.code == 2
    assert "the low 16 of its 32 bits would be lost" in refused.err

    assert cli("checkpoint", "convert", folder, dropped, "--to", "bf16-main-params").code == 0
    tensors, plain = saved(dropped)
    assert plain["config"]["optimizer"]["main_params_dtype"] == plain["optimizer"]["main_param"] == "bf16"
    assert whole.keys() - tensors.keys() == {name for name in whole if name.endswith("/master")}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())

    found = []
    for fraction in (0.0, 1.0):
        to = tmp_path / f"to-{fraction}"
        words = ["train.train_iters=4", BF16, option, f"checkpoint.load={dropped}"]
        train(*words, *offloaded(fraction), f"checkpoint.save={to}")
        found.append(saved(to)[0])
    assert different(*found) == []
    words = ["train.train_iters=4", BF16, f"checkpoint.load={tmp_path / 'to-0.0'}"]
    train(*words, f"checkpoint.save={tmp_path / 'wide'}")
    wide = saved(tmp_path / "wide")[0]
    masters = [name for name in wide if name.endswith("/master")]
    assert len(masters) > 0
    for name in masters:
        weight = found[0][name.replace("optimizer/", "model/").removesuffix("/master")]
        assert torch.equal(wide[name], weight.float())


def test_moments_in_fp8_are_saved_in_bf16_resumed_at_any_placement_and_widened(
    train: Cli, cli: Cli, text: Path, folder: Path, tmp_path: Path
) -> None:
    options = [option.replace("bf16", "fp8") for option in MOMENTS]
    for form in ("bf16-moments", "fp8-moments"):
        assert cli("checkpoint", "convert", folder, tmp_path / form, "--to", form).code == 0
    for source in (folder, tmp_path / "bf16-moments"):
        refused = cli("train", *SMALL, f"dataset.path={text}", BF16, *options, f"checkpoint.load={source}")
        assert refused.code == 2
        assert "FP8 does not hold" in refused.err
        assert "hostward checkpoint convert FOLDER OUT --to fp8-moments" in refused.err

    rounded = tmp_path / "fp8-moments"
    tensors, plain = saved(rounded)
    assert plain["optimizer"]["moments"] == {"exp_avg": "fp8", "exp_avg_sq": "fp8"}
    moments = [name for name in tensors if name.endswith(("/exp_avg", "/exp_avg_sq"))]
    assert {tensors[name].dtype for name in moments} == {torch.bfloat16}
    whole = saved(folder)[0]
    for name in moments:
        to_bf16 = whole[name].to(torch.bfloat16)
        assert torch.equal(tensors[name], to_bf16) is (to_bf16.dim() == 1)  # FP8 is the format of matrices
    assert {tensors[name].dim() for name in moments} >= {1, 2}
    found = []
    for fraction, mode in ((0.0, "stream"), (0.5, "snapshot")):
        to = tmp_path / f"to-{fraction}"
        words = ["train.train_iters=4", BF16, *options, f"checkpoint.load={rounded}", f"checkpoint.save={to}"]
        train(*words, *offloaded(fraction), "checkpoint.async_save=true", f"checkpoint.async_save_mode={mode}")
        found.append(saved(to)[0])
    assert different(*found) == []
    assert different(found[0], tensors) != []
    wide = [
        "train.train_iters=4",
        BF16,
        f"checkpoint.load={tmp_path / 'to-0.5'}",
        f"checkpoint.save={tmp_path / 'wide'}",
    ]
    train(*wide)
    whole = saved(tmp_path / "wide")[0]
    assert all(torch.equal(whole[name], found[0][name].float()) for name in moments)
