"""What `hostward plan` proposes where nothing fits: each printed command, pasted into a shell, ends with a plan.

Needs SciPy, as planning does. Seen red: the step left as it was with more GPUs, host memory of one machine for several,
a microbatch without the sequences of its step, no shorter sequences where only as many in a microbatch fit, the limit
rounded down, and no word of a larger GPU.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import SMALL
from published_models import PUBLISHED
from run_fixtures import Cli

from hostward.plan.hardware_profile import profile

pytest.importorskip("scipy", reason="planning needs SciPy")

FP8 = "optimizer.exp_avg_dtype=fp8 optimizer.exp_avg_sq_dtype=fp8 optimizer.main_params_dtype=bf16"
TINY = [*(word for word in SMALL if not word.startswith("train.device")), "model.params_dtype=bf16"]


def proposed(printed: str) -> list[tuple[str, list[str]]]:
    """Return each fix: its words, and those of its command, as a shell reads them."""
    lines = printed.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("    hostward plan ")]
    return [(lines[i - 1].strip().removesuffix(":"), shlex.split(lines[i])[1:]) for i in at]


def assert_each_fits(cli: Cli, printed: str) -> list[tuple[str, list[str]]]:
    fixes = proposed(printed)
    assert fixes
    for what, words in fixes:
        found = cli(*words)
        assert found.code == 0, (what, words, found.out, found.err)
        assert any(line.startswith("It fits") for line in found.out.splitlines()), words
    return fixes


@pytest.mark.parametrize(
    ("name", "words", "kinds"),
    [
        (
            "llama 3.1 8b",
            "--hardware rtx-4090 --host-memory 64GiB --batch 1",
            [
                "optimizer.exp_avg_dtype=bf16 optimizer.exp_avg_sq_dtype=bf16",
                "--host-memory 93.1GiB",
                "--device-memory 42.6GiB",
                "--batch 2 --reshard",
                "--gpus 2 --host-memory 128GiB",
            ],
        ),
        ("gemma 3 27b, text", "--hardware h100 --host-memory 64GiB --gpus 8", ["--reshard", "--host-memory 128GiB"]),
        ("gpt-oss 20b", "--hardware rtx-4090 --host-memory 300GiB --seq 8192", ["--seq 4096"]),
        ("qwen3 32b", "--hardware h100 --host-memory 64GiB --gpus 4 --batch 8", ["--batch 8 --reshard", "--gpus 8"]),
        (
            "mistral 7b v0.3",
            "--hardware rtx-4090 --host-memory 128GiB --pinned-memory 20GiB",
            ["--no-pin", "--pinned-memory 22.7GiB", "--gpus 2 --host-memory 256GiB --pinned-memory 40GiB"],
        ),
        (
            "qwen3 32b",
            "--hardware h100 --host-memory 500GiB --gpus 8 --seq 65536 --micro-batch 4",
            ["--seq 16384 --batch 32 --micro-batch 1 --reshard"],
        ),
        (
            "qwen3 32b",
            f"--hardware rtx-4090 --gpus 8 --seq 8192 --batch 16 --micro-batch 2 --reshard --step-early 1 {FP8}",
            ["--seq 4096 --batch 16 --micro-batch 2"],
        ),
        ("deepseek-v3", "--hardware h200 --host-memory 500GiB --gpus 8", ["--gpus 128 --host-memory 8000GiB"]),
        (
            "qwen2.5 32b",
            "--hardware rtx-4090 --host-memory 256GiB --gpus 4 --batch 8",
            [
                "--reshard --hardware rtx-4090 --gpus 4 --host-memory 256GiB optimizer.exp_avg_dtype=fp8",
                "--reshard --hardware rtx-4090 --gpus 4 --host-memory 467.8GiB",
                "--reshard --hardware rtx-4090 --gpus 4 --device-memory 72.7GiB",
            ],
        ),
    ],
)
def test_each_command_that_is_printed_fits(cli: Cli, tmp_path: Path, name: str, words: str, kinds: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].config))
    found = cli("plan", "--config", tmp_path / "config.json", *words.split())
    assert found.code == 1
    fixes = assert_each_fits(cli, found.out)
    for kind in kinds:
        assert any(kind in " ".join(command) for _, command in fixes), (kind, found.out)
    assert "no GPU of a shipped profile has it" not in found.out  # there are better proposals


@pytest.mark.parametrize(
    ("words", "before_gib", "share"),
    [
        ("--hardware h100 --host-memory 399GiB --seq 16384 --micro-batch 2", {"device": 77.2}, 0.9),
        (
            "--hardware h200 --gpus 2 --host-memory 552GiB --pinned-memory 65.4GiB --step-early 0.5",
            {"pinned": 65.4, "device": 130.6},
            0.25,
        ),
    ],
)
def test_a_limit_is_raised_no_further_than_it_must_be(
    cli: Cli, tmp_path: Path, words: str, before_gib: dict[str, float], share: float
) -> None:
    """With so much of a raise nothing fits. Seen red: 0.70, and a third, of those that were proposed were enough."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen2.5 32b"].config))
    found = cli("plan", "--config", tmp_path / "config.json", *words.split())
    assert found.code == 1
    fixes = assert_each_fits(cli, found.out)
    for kind, gib in before_gib.items():
        (command,) = (command for what, command in fixes if re.search(f"of {kind} memory.* instead of", what))
        at = command.index(f"--{kind}-memory") + 1
        less_gib = gib + share * (float(command[at].removesuffix("GiB")) - gib)
        assert cli(*command[:at], f"{less_gib:.3f}GiB", *command[at + 1 :]).code == 1, command


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        ((), ["--hardware rtx-4090 --host-memory 111.3GiB", "--device-memory"]),
        (
            ("--gpus", "2", "--host-memory", "32GiB"),
            ["--hardware rtx-4090 --gpus 2", "--reshard --hardware rtx-4090 --gpus 4"],
        ),
    ],
)
def test_a_larger_gpu_is_proposed_where_this_one_is_too_small(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], proposed: list[str]
) -> None:
    card = profile("rtx-4090")
    assert card.gpu is not None
    tiny = replace(card, name="tiny", gpu=replace(card.gpu, name="tiny GPU", memory_bytes=3 << 30))
    (tmp_path / "tiny.json").write_text(tiny.to_json())
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama 3.1 8b"].config))
    found = cli("plan", "--config", tmp_path / "config.json", "--hardware", tmp_path / "tiny.json", *words)
    assert found.code == 1, found.out
    commands = [" ".join(command) for _, command in assert_each_fits(cli, found.out)]
    for part, command in zip(proposed, commands, strict=False):
        assert part in command
    assert "(more than this GPU has)" in found.out


OFFLOADED = ("optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=0.5")
LONGER = "model.seq_length=2048"
LONG = ("model.seq_length=512", "train.micro_batch_size=4")


@pytest.mark.parametrize(
    ("words", "what", "there", "gone"),
    [
        (("--device-memory", "1MiB"), "MiB of device memory instead of 1.0 MiB", "--device-memory", "1MiB"),
        (("--host-memory", "3MiB", "--place", "*=host"), "of host memory instead of 3.0 MiB", "--place", "3MiB"),
        (("--device-memory", "66.2MiB", *OFFLOADED), "the planner's own choice", "66.2MiB", OFFLOADED[1]),
        (("--device-memory", "66.2MiB", "--place", "*=device"), "the planner's own choice", "66.2MiB", "--place"),
        (("--device-memory", "76MiB", *LONG), "microbatches of 2 sequences", "train.micro_batch_size=2", LONG[1]),
        (("--device-memory", "70MiB", LONGER), "sequences of 512 tokens, one in", "model.seq_length=512", LONGER),
    ],
)
def test_fixes_of_a_recipe_are_its_options(cli: Cli, words: tuple[str, ...], what: str, there: str, gone: str) -> None:
    found = cli("plan", *TINY, "--hardware", "h200", *words)
    assert found.code == 1, found.out
    fixes = assert_each_fits(cli, found.out)
    (command,) = (command for text, command in fixes if what in text)
    assert there in command
    assert gone not in command
    assert "train.global_batch_size=4" in command


def test_fixes_of_a_recipe_for_more_gpus_change_its_step(cli: Cli) -> None:
    words = ["model.seq_length=2048", "train.global_batch_size=1"]
    command = ["--recipe", "qwen3_8b_pretrain_config", "--hardware", "rtx-4090", "--host-memory", "64GiB"]
    found = cli("plan", *command, *words)
    fixes = assert_each_fits(cli, found.out)
    resharded = "ddp.data_parallel_sharding_strategy=optim_grads_params"
    more = [*command[:4], "--gpus", "2", "--host-memory", "128GiB", words[0], "train.global_batch_size=2", resharded]
    assert ["plan", *more] in [words for _, words in fixes]


def test_a_smaller_microbatch_of_a_file_leaves_the_step_as_it_is(cli: Cli, tmp_path: Path) -> None:
    """Without `--batch` the step is one microbatch of each GPU."""
    llama = PUBLISHED["llama 3.1 8b"]
    (tmp_path / "config.json").write_text(json.dumps(llama.config | llama.less))
    words = ("--config", tmp_path / "config.json", "--seq", "512", "--micro-batch", "4", "--hardware", "h200")
    whole = cli("plan", *words)
    least = min(float(size) for size in re.findall(r"^>? +([\d.]+) .* 2 layers recompute", whole.out, re.MULTILINE))
    found = cli("plan", *words, "--device-memory", f"{int(least * 0.9)}MiB")
    assert found.code == 1, found.out
    (command,) = (command for text, command in assert_each_fits(cli, found.out) if "microbatches" in text)
    assert "--batch 4 --micro-batch" in " ".join(command)


def test_files_that_were_asked_for_are_written_by_the_fix(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a plan.json"
    found = cli("plan", *TINY, "--hardware", "h200", "--device-memory", "1MiB", "--json", path)
    assert (found.code, path.exists()) == (1, False)
    assert_each_fits(cli, found.out)
    assert path.exists()


def test_what_is_short_is_said_before_what_would_fit(cli: Cli) -> None:
    """Seen red: what is missing of the nearest plan, after a list of which one is enough, as if all of it were."""
    flags = ("--hardware", "h200", "--device-memory", "1MiB", "--host-memory", "1MiB")
    found = cli("plan", *TINY, *flags)
    lines = found.out.splitlines()
    at = lines.index("It does not fit.")
    size = r"[\d.]+ MiB of"
    short = rf"The nearest plan is short of {size} device memory \(first step\) and {size} host memory \(load\)\."
    assert re.fullmatch(short, lines[at + 1])
    assert lines[at + 3] == "This makes it fit:"  # neither limit alone
    ((what, command),) = assert_each_fits(cli, found.out)
    assert re.fullmatch(rf"{size} device memory instead of 1.0 MiB and {size} host memory instead of 1.0 MiB", what)
    assert {"--device-memory", "--host-memory"} <= set(command)
    assert "missing" not in found.out


def test_a_command_is_one_line_on_a_narrow_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    found = cli("plan", *TINY, "--hardware", "h200", "--device-memory", "1MiB")
    assert max(map(len, found.out.splitlines())) > 60
    assert_each_fits(cli, found.out)


def test_moments_in_fp8_that_cannot_be_divided_leave_the_other_fixes(cli: Cli) -> None:
    """Seen red: an error about 2 GPUs, which nobody had asked for."""
    fp8 = ("optimizer.exp_avg_dtype=fp8", "optimizer.exp_avg_sq_dtype=fp8", "model.hidden_size=96")
    found = cli("plan", *TINY, *fp8, "--hardware", "h200", "--device-memory", "1MiB")
    assert (found.code, found.err) == (1, "")
    assert_each_fits(cli, found.out)
    both = cli("plan", *TINY, *fp8, "--hardware", "h200", "--gpus", "1,2")
    assert both.code == 1
    assert re.search("^2 GPUs: moments in FP8", both.out, re.MULTILINE)


@pytest.mark.parametrize("gpus", ["3", "3,1"])
def test_a_step_of_a_file_that_cannot_be_divided_names_its_flag(cli: Cli, tmp_path: Path, gpus: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama 3.1 8b"].config))
    found = cli("plan", "--config", tmp_path / "config.json", "--batch", "4", "--gpus", gpus)
    assert found.code == (1 if "," in gpus else 2)
    assert "--batch 3, or another multiple of it" in found.out + found.err
