"""Bad input to `hostward train`: exit 2, one text that says what, why and what to do, nothing allocated before."""

from __future__ import annotations

import errno
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_runs import ROOT, SMALL, offloaded, read_json, run_process, start_process
from hypothesis import HealthCheck, given, settings, strategies as st
from run_fixtures import Cli

from hostward.errors import ExitCode
from hostward.trainer import memory_check

FRACTION = "optimizer.optimizer_offload_fraction"
HUGE = "model.moe_ffn_hidden_size=76800"
"""A hundred times the parameters of a recipe of experts, in as many modules."""


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("1.5", ["1.5"]),
        ("-0.1", ["-0.1"]),
        ("NaN", ["NaN", "finite decimal number"]),
        ("nan", ["nan", "finite decimal number"]),
        ("inf", ["inf"]),
        ("50%", ["50%", "finite decimal number", f"{FRACTION}=0.5"]),
        ("half", ["half"]),
        ("", ["finite decimal number"]),
        ("true", ["true"]),
        ("null", ["it always has a value"]),
    ],
)
def test_t15_bad_fractions(refused: Cli, value: str, texts: list[str]) -> None:
    outcome = refused("optimizer.optimizer_cpu_offload=True", f"{FRACTION}={value}")
    assert "optimizer_offload_fraction" in outcome.err
    for text in texts:
        assert text in outcome.err


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["optimizer.optimizer_ofload_fraction=0.5"], ["did you mean optimizer.optimizer_offload_fraction?"]),
        (["optimiser.lr=1e-3"], ["there is no namespace 'optimiser'", "did you mean optimizer.lr?"]),
        (["train.lr=1e-3"], ["did you mean optimizer.lr?"]),
        (["zzz.qqq=1"], ["there is no namespace 'zzz'", "the namespaces are"]),
        (["--recipe", "qwen3_moe_tiny_config"], ["did you mean qwen3_moe_tiny_pretrain_config?"]),
        (["--recipe", "qwen3_8b"], ["did you mean qwen3_8b_pretrain_config"]),
        (["--recipe", "xyz"], ["there is no recipe 'xyz'", "the recipes are"]),
        (["train.train_iters"], ["Expected override in KEY=VALUE form", "write train.train_iters=VALUE"]),
        (["train.train_iters=1.5"], ["whole number"]),
        (["train.train_iters=0"], ["train.train_iters", "at least 1"]),
        (["train.global_batch_size=3"], ["not divisible by micro batch size"]),
        (["optimizer.optimizer_cpu_offload=2"], ["only true and false are booleans"]),
        (["model.context_parallel_size=2"], ["is known, but not built yet\n  why: attention takes whole sequences"]),
        ([f"{FRACTION}=0.5"], ["has no effect while optimizer.optimizer_cpu_offload=false"]),
        (["checkpoint.save_interval=2"], ["has no effect while checkpoint.save=null"]),
    ],
)
def test_t17_unknown_and_impossible_options(refused: Cli, words: list[str], texts: list[str]) -> None:
    outcome = refused(*words)
    for text in texts:
        assert text in outcome.err


def test_a_name_of_a_hub_is_no_pretrained_folder(cli: Cli) -> None:
    """Seen red: after seconds, an error about tokenizer.tokenizer_model, which nobody had set."""
    outcome = cli("train", "--recipe", "qwen3_600m_sft_config", "model.hf_model_path=Qwen/Qwen3-0.6B")
    assert outcome.code == ExitCode.ERROR
    assert "error: model.hf_model_path=Qwen/Qwen3-0.6B is not a pretrained folder\n  why: there is no" in outcome.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["train", "verify"])
def test_what_options_alone_tell_is_refused_before_torch_is_imported(command: str) -> None:
    """That takes seconds."""
    words = [command, "optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.5"]
    code = f"import sys; sys.modules['torch'] = None; from hostward.cli import main; sys.exit(main({words}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "must be in [0.0, 1.0], not 1.5" in done.stderr


def test_t17_a_device_that_is_not_there(refused: Cli) -> None:
    outcome = refused("train.device=cuda")
    assert "train.device=cuda, but no CUDA device is available" in outcome.err
    assert "train.device=cpu or auto" in outcome.err


def test_all_violations_are_listed_at_once(refused: Cli) -> None:
    outcome = refused("optimizer.optimizer_cpu_offload=True", f"{FRACTION}=1.5", "train.micro_batch_size=3")
    assert "2 settings cannot be carried out:" in outcome.err
    assert "1.5" in outcome.err
    assert "not divisible by micro batch size (3)" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "--recipy", "x"],
            "train has no option --recipy\n  fix: --recipe; `hostward train --help` lists what",
        ),
        (["train", "--optimizer.lr", "3"], "fix: options of training are written optimizer.lr=VALUE"),
        (
            ["train", "--optimizer-cpu-offload"],
            "  fix: options of training are written optimizer.optimizer_cpu_offload=",
        ),
        (["train", "--cpu-offloading-num-layers", "2"], "are written model.cpu_offloading_num_layers=VALUE"),
        (["train", "--deepspeed", "ds.json"], "  fix: leave it out, and write what its file says as namespace.option="),
        (["verify", "--dry-run"], "  fix: only hostward train has it; hostward plan reports what a run would need"),
        (["train", "--recipe"], "error: hostward train --recipe requires an argument\n  fix: --recipe VALUE: A recipe"),
        (["plan", "--no-pin=3"], "plan --no-pin does not take a value\n  fix: --no-pin: With a CPU"),
        (["plan", "--seq", "many"], "hostward plan does not take --seq many\n  why: "),
        (["plan", "--batch=0"], "plan does not take --batch 0\n  why: "),
        (["plan", "--zzz"], "plan has no option --zzz\n  fix: `hostward plan --help` lists what it takes"),
        (["checkpoint", "inspect"], "error: hostward checkpoint inspect needs FOLDER\n  fix: FOLDER: DIR/iter"),
        (["recipes", "all"], "error: hostward recipes: got unexpected extra argument"),
        (["bench", "machines"], "bench has no command 'machines'\n  fix: hostward bench machine"),
        (["trian"], "error: hostward has no command 'trian'\n  fix: hostward train"),
        ([], "Usage:"),
    ],
)
def test_usage_errors(cli: Cli, arguments: list[str], said: str) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert said in outcome.err + outcome.out
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "does not exist"),
        ("empty", "empty"),
        ("empty folder", "holds no"),
        ("short", "one sample needs"),
        ("damaged jsonl", "line"),
        ("damaged parquet", "parquet"),
        ("no text key", "text"),
    ],
)
def test_bad_data(refused: Cli, tmp_path: Path, kind: str, said: str) -> None:
    path = tmp_path / "data"
    if kind == "empty":
        path = tmp_path / "data.txt"
        path.touch()
    elif kind == "empty folder":
        path.mkdir()
    elif kind == "short":
        path = tmp_path / "data.txt"
        path.write_text("a few bytes")
    elif kind == "damaged jsonl":
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "fine"}\n{"text": \n')
    elif kind == "damaged parquet":
        path = tmp_path / "data.parquet"
        path.write_bytes(b"PAR1 and then nothing of the kind" * 10)
    elif kind == "no text key":
        path = tmp_path / "data.jsonl"
        path.write_text('{"body": "words"}\n' * 100)
    outcome = refused(f"dataset.path={path}")
    assert said in outcome.err
    if kind != "short":
        assert str(path) in outcome.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_data(refused: Cli, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("words " * 1000)
    path.chmod(0)
    assert str(path) in refused(f"dataset.path={path}").err


def test_t01_a_model_that_cannot_fit_is_refused(refused: Cli) -> None:
    """A recipe made for several GPUs, started on a small machine: refused by its sizes, not killed by the system."""
    parameters = 2**28 * 4096 * 2  # input and output embedding; the layers do not count beside them
    outcome = refused(f"model.vocab_size={2**28}", "model.hidden_size=4096", "model.params_dtype=bf16", *offloaded(0.5))
    assert re.search(r"the run needs at least [\d,]+ GiB of host memory, and [\d.,]+ GiB are available", outcome.err)
    (count,) = re.findall(r"why: ([\d,]+) parameters", outcome.err)
    assert int(count.replace(",", "")) == pytest.approx(parameters, rel=1e-3)
    assert "model.num_layers=2" in outcome.err
    assert "without a GPU all of it is there\n  fix: train.device=auto uses GPUs, and hostward plan" in outcome.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_recipe_for_gpus_says_that_none_was_found(cli: Cli) -> None:
    """Seen red: bytes, and nothing of a GPU."""
    outcome = cli("train", "--recipe", "qwen3_30b_a3b_pretrain_config", HUGE)
    assert outcome.code == 2
    assert re.search(r"why: [\d,]+ parameters: weights [\d,]+ GiB, gradients [\d,]+ GiB, ", outcome.err)
    assert "fix: no GPU was found: hostward doctor reports why, and hostward plan with the same options" in outcome.err


@pytest.mark.parametrize(("flags", "slow"), [({"fpu", "avx2"}, True), ({"fpu", "avx512f"}, False), ({"asimd"}, False)])
def test_a_16_bit_model_on_a_cpu_that_is_slow_with_it_is_told_of_before_it_trains(
    cli: Cli, text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: set[str], slow: bool
) -> None:
    """A new user waited ten minutes for the first iterations. Seen red: not told; no dtype in what to shrink."""
    monkeypatch.setattr(memory_check, "processor_flags", lambda: frozenset(flags))
    small = ("train", *SMALL, f"dataset.path={text}", "train.train_iters=1")
    assert cli(*small, "model.params_dtype=bf16").code == 0
    assert ("model.params_dtype=bf16 is slow on this CPU" in caplog.text) is slow
    refused = cli("train", "--recipe", "qwen3_30b_a3b_pretrain_config", "train.device=cpu", HUGE)
    assert ("model.num_layers=2 model.params_dtype=fp32" in refused.err) is slow
    caplog.clear()
    assert cli(*small, "model.params_dtype=fp32").code == 0
    assert "slow on this CPU" not in caplog.text


def test_a_save_folder_below_a_file_is_refused(refused: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = refused(f"checkpoint.save={tmp_path / 'file' / 'checkpoints'}")
    assert f"checkpoint.save={tmp_path}/file/checkpoints cannot be" in outcome.err
    assert "why: " in outcome.err


def test_a_save_folder_that_takes_no_files_is_refused(refused: Cli) -> None:
    """It is there, so making it succeeds; only writing fails, and not after hours of training."""
    outcome = refused("checkpoint.save=/proc/self")
    assert "checkpoint.save=/proc/self cannot be written" in outcome.err


@pytest.mark.parametrize("option", ["--run-dir", "checkpoint.save", "logger.tensorboard_dir"])
def test_a_checkpoint_is_no_folder_to_write_into(refused: Cli, tmp_path: Path, option: str) -> None:
    """A later save may remove it. Seen red: the report of a run was written beside the manifest."""
    names = {".metadata", "manifest.json"}
    (tmp_path / "iter_0000001").mkdir()
    for name in names:
        (tmp_path / "iter_0000001" / name).touch()
    joined = " " if option.startswith("--") else "="
    word = f"{option}{joined}{tmp_path / 'iter_0000001'}"
    outcome = refused(*word.split(" "))
    assert f"{word} is a checkpoint\n" in outcome.err
    assert {path.name for path in (tmp_path / "iter_0000001").iterdir()} == names


def test_a_save_folder_that_cannot_be_written_is_told_without_numbers(
    refused: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: `[Errno 30] Read-only file system: ...`."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr("hostward.trainer.checkpointing.tempfile.TemporaryFile", read_only)
    told = refused(f"checkpoint.save={tmp_path / 'x'}").err
    assert f"cannot be written\n  why: Read-only file system ({tmp_path})\n" in told
    assert "fix: use a folder on a file system that is mounted for writing\n" in told


def test_a_disk_without_room_for_a_checkpoint_is_refused(
    refused: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: found at the first save, after all of the training."""
    monkeypatch.setattr("hostward.trainer.memory_check.room_bytes", lambda folder: 100_000)
    outcome = refused(f"checkpoint.save={tmp_path / 'new'}")
    assert f"checkpoint.save={tmp_path}/new has room for 97.7 KiB; a checkpoint takes at least " in outcome.err
    assert not (tmp_path / "new").exists()


def test_such_a_run_can_be_forced(train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostward.trainer.memory_check.room_bytes", lambda folder: 100_000)
    assert train("train.train_iters=1", f"checkpoint.save={tmp_path / 'new'}", "--force").report["checkpoint"]


def test_refused_data_leaves_no_save_folder(refused: Cli, tmp_path: Path) -> None:
    refused(f"checkpoint.save={tmp_path / 'new'}", f"dataset.path={tmp_path / 'missing'}")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_report_that_cannot_be_written_is_refused_before_training(refused: Cli, tmp_path: Path, command: str) -> None:
    missing = refused("--json", tmp_path / "no" / "report.json", command=command)
    assert f"--json {tmp_path}/no/report.json: its folder does not exist" in missing.err
    assert "mkdir -p" in missing.err
    folder = refused("--json", tmp_path, command=command)
    assert f"--json {tmp_path} is a folder" in folder.err
    unwritable = refused("--json", "/proc/self/report.json", command=command)
    assert "--json /proc/self/report.json cannot be written" in unwritable.err


@pytest.mark.parametrize("command", ["train", "verify"])
def test_ranks_look_at_no_file_that_the_first_writes(
    cli: Cli, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that lacks its folder they come as far as to meet."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for words in (["--json", tmp_path / "no" / "report.json"], ["--json", tmp_path]):
        outcome = cli(command, *SMALL, *words)
        assert outcome.code == 2
        assert "MASTER_ADDR and MASTER_PORT not set" in outcome.err


def test_a_report_that_fails_at_the_end_is_an_error_after_the_table(cli: Cli, text: Path) -> None:
    """The disk is full: the numbers are on the terminal, the exit code is not 0."""
    outcome = cli("train", *SMALL, f"dataset.path={text}", "train.train_iters=1", "--json", "/dev/full")
    assert outcome.code == 2
    assert "--json /dev/full cannot be written" in outcome.err
    assert "No space left" in outcome.err
    assert "tokens/s" in outcome.out


def test_the_report_is_written_although_nobody_reads_the_table(tmp_path: Path, text: Path) -> None:
    """As in `hostward train --json FILE | head -1`."""
    report = tmp_path / "report.json"
    command = ["-m", "hostward", "train", *SMALL, f"dataset.path={text}", "train.train_iters=1", "--json", str(report)]
    with start_process(*command) as process:
        process.stdout.close()
        _, err = process.end(60)
    assert "Traceback" not in err
    assert len(read_json(report)["losses"]) == 1


def test_json_is_json_when_numbers_are_not_finite(train: Cli) -> None:
    """The learning rate is absurd, so gradients leave the finite numbers, and every later step is skipped."""
    words = ["optimizer.lr=1e30", "optimizer.clip_grad=0", "scheduler.lr_warmup_iters=0", "train.train_iters=5"]
    report = train(*words).report
    assert None in report["grad_norms"]
    assert len(report["skipped_iterations"]) == report["grad_norms"].count(None)


def test_debug_shows_the_traceback(text: Path) -> None:
    words = [*SMALL, f"dataset.path={text}", "train.train_iters=0"]
    plain = run_process(["-m", "hostward", "train", *words])
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    debug = run_process(["-m", "hostward", "train", "--debug", *words])
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr
    assert "train.train_iters" in debug.stderr.splitlines()[-1] + debug.stderr.splitlines()[-2]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
    | st.text("0123456789.eE+-", max_size=6)
)
def test_any_text_is_a_fraction_in_range_or_is_refused(refused: Cli, value: str) -> None:
    decimal = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value, re.ASCII)
    good = decimal is not None and 0 <= float(value) <= 1
    # The batch is wrong too, so that good fractions come back as well, without a complaint about them.
    outcome = refused("optimizer.optimizer_cpu_offload=True", f"{FRACTION}={value}", "train.micro_batch_size=3")
    assert ("optimizer_offload_fraction" in outcome.err) == (not good)


# -------------------------------------------------------------------- launchers


def test_the_script_trains_with_what_torchrun_sets_for_one_process(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    words = [*SMALL, f"dataset.path={text}", "train.train_iters=2", *offloaded(0.5), "--json", str(report)]
    script = ROOT / "scripts" / "training" / "run_recipe.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--recipe", "qwen3_moe_tiny_pretrain_config", *words])
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29501}
    for name, value in {"MASTER_ADDR": "127.0.0.1", **told}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert len(read_json(report)["losses"]) == 2


def test_torchrun_tells_a_bad_command_line_once() -> None:
    """And torchrun once more, at its end. Seen red: once for each process; there, how to enable a traceback. Options
    that cannot be carried out are in tests/distributed/test_verify_ranks.py.
    """
    word, said = "--no-such-flag", "has no option --no-such-flag"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hostward", "train", "train.device=cpu"]
    done = run_process([*command, word])
    assert done.returncode != 0
    told, _, repeated = done.stderr.partition("ChildFailedError")
    assert (told.count(said), repeated.count(said)) == (1, 1), done.stderr


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("0", "WORLD_SIZE='0' is not a positive number"),
        ("two", "WORLD_SIZE='two' is not a positive number"),
    ],
)
def test_a_launcher_that_counts_wrong_is_refused(
    refused: Cli, monkeypatch: pytest.MonkeyPatch, size: str, said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", "0")
    assert said in refused().err


def test_processes_without_a_meeting_place_are_refused(refused: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in ("train", "verify"):
        assert "2 processes, and MASTER_ADDR and MASTER_PORT not set" in refused(command=command).err
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=1" in refused().err


def test_all_words_that_cannot_be_taken_are_told_at_once(cli: Cli) -> None:
    outcome = cli("train", "optimizer.lr=abc", "model.num_layers=x", "optimizr.lr=1")
    assert outcome.code == 2
    assert "3 words are invalid" in outcome.err
    for part in ("optimizer.lr", "model.num_layers", "did you mean optimizer.lr"):
        assert part in outcome.err


def test_null_is_a_tokenizer_type(cli: Cli) -> None:
    outcome = cli("train", "dataset.format=mock", "tokenizer.tokenizer_type=null", "train.train_iters=0")
    assert "not a value" not in outcome.err


def test_a_run_that_is_refused_leaves_no_folder_that_was_not_there(cli: Cli, tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for folder in (new, old):
        found = cli("train", *SMALL, f"dataset.path={tmp_path / 'nothing'}", "--run-dir", folder)
        assert found.code == 2
        assert "nothing" in found.err
    assert (new.exists(), old.exists()) == (False, True)
