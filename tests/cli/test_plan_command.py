"""`hostward plan` as a command: what it prints and writes, its exit codes, bad input. Nothing is allocated.

Needs SciPy, as planning does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from cli_runs import ROOT, SMALL
from run_fixtures import Cli

from hostward.core.units import MIB
from hostward.errors import MemoryLimitError
from hostward.plan import plan_file
from hostward.plan.hardware_profile import PROFILES, profile

pytest.importorskip("scipy", reason="planning needs SciPy")

TINY = [*(word for word in SMALL if not word.startswith("train.device")), "model.params_dtype=bf16"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_recipe_is_planned_and_written(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = cli("plan", *TINY, "--json", path)
    assert found.code == 0, found.err
    for text in ("steady step", "limit", "saved activations", "predicted step", "device memory against time:"):
        assert text in found.out
    assert "It fits on the device" in found.out
    assert "on 1 x NVIDIA H200 (hardware h200)" in found.out
    plan = plan_file.load(path)
    assert plan.workload.name == "qwen3_moe_tiny_pretrain_config"
    assert {row.placement for row in plan.buckets} == {"device"}
    assumed = (
        "no --hardware is given: the shipped profile h200 is assumed; --hardware takes h100, a100-80gb, rtx-4090, or"
    )
    assert found.out.startswith(assumed)
    assert "is assumed" not in cli("plan", *TINY, "--hardware", "h200").out
    assert set(PROFILES) <= set(re.findall(r"[\w-]+", cli("plan", "--help").out))


def test_other_flags_are_planned_beside_the_plan(cli: Cli) -> None:
    """Each line is what `hostward plan` says with these flags. Seen red: flags of the plan left out of the others."""
    flags = ("plan", *TINY, "--hardware", "h200", "--place", "*=host")
    others = ["--keep '*=recompute'", "--device-memory 1MiB", "train.global_batch_size=8 --gpus 2"]
    words = [word for other in others for word in ("--why-not", other)]
    found = cli(*flags, *words)
    assert found.code == 0, found.err
    plan, _, table = found.out.partition("what other flags would change")
    assert plan.rstrip() == cli(*flags).out.rstrip()
    heading, this, *lines = table.splitlines()[1:]
    assert re.split(" {2,}", heading.strip()) == ["step ms", "time per token", "device MiB", "host MiB, node", "fits"]
    assert re.search(r"^this plan +[\d.]+ +[\d.]+ +[\d.]+  yes; nearest to its limit: device memory, ", this)
    steps = [re.findall(r"predicted step (\S+) ms", cli(*flags, *shlex.split(other)).out)[0] for other in others]
    assert [line.partition(other)[2].split()[0] for line, other in zip(lines, others, strict=True)] == steps
    assert re.search(r"  no; short of [\d.]+ MiB of device memory \(first step\)$", lines[1])
    assert "%" not in lines[1]  # what does not fit is compared with nothing
    first_s, both_s = float(this.split()[2]), float(steps[2])
    more = float(lines[2].partition(others[2])[2].split()[1].rstrip("%"))
    assert more == pytest.approx(100 * (both_s / (2 * first_s) - 1), abs=0.1)  # as long a step has twice the tokens


def test_what_was_measured_of_a_machine_is_planned_with(cli: Cli) -> None:
    """A file of `hostward bench machine` knows nothing that the vendor alone says."""
    measured = ROOT / "benchmarks/results/2026-11-22-hardware-h200.json"
    assert json.loads(measured.read_text())["gpu"]["memory_peak_bytes_per_s"] is None
    found = cli("plan", *TINY, "--hardware", measured)
    assert found.code == 0, found.err
    assert "assumed: GPU memory 4800 GB/s" in found.out
    assert "predicted step" in found.out


def test_the_first_screen_of_the_readme_is_what_the_command_prints(cli: Cli) -> None:
    blocks = (ROOT / "README.md").read_text().split("```text\n$ hostward ")[1:]
    assert len(blocks) == 1
    for block in blocks:
        command, *lines = block.partition("```")[0].splitlines()
        found = cli(*command.split())
        assert found.code == ("It does not fit." in lines), found.err
        printed, at = found.out.splitlines(), 0
        for before, line in pairwise(["", *lines]):
            if line.strip() != "…":
                at = printed.index(line, at) + 1
                # What is left out is marked.
                assert before.strip() == "…" or printed[at - 2 : at - 1] in ([before], []), line
        assert lines[-1] == "…" or at == len(printed)


def test_several_numbers_of_gpus_are_a_line_each(cli: Cli, tmp_path: Path) -> None:
    found = cli("plan", *TINY, "--hardware", "h200", "--gpus", "2,1")
    assert found.code == 0, found.err
    title, _, header, *rows = found.out.splitlines()
    assert title.startswith("qwen3_moe_tiny_pretrain_config on NVIDIA H200 (hardware h200)")
    assert header.split() == ["GPUs", "device", "MiB", "host", "MiB,", "node", "step", "ms", "tokens/s", "choice"]
    assert [row.split()[0] for row in rows] == ["2", "1"]
    alone = cli("plan", *TINY, "--hardware", "h200", "--gpus", "2").out
    step_ms = rows[0].split()[3]
    assert f"predicted step {step_ms} ms" in alone
    assert int(rows[0].split()[4].replace(",", "")) == pytest.approx(4 * 64 / float(step_ms) * 1e3, rel=1e-3)
    short = cli("plan", *TINY, "--hardware", "h200", "--gpus", "1,2", "--device-memory", "1MiB")
    assert short.code == 1
    assert short.out.count("  does not fit: short of ") == 2
    for count in ("1 GPU", "2 GPUs"):
        _, _, fixes = short.out.partition(f"\n\n{count}: it does not fit.\n")
        assert "    hostward plan " in fixes.partition("\n\n")[0]
    refused = cli("plan", *TINY, "--gpus", "1,2", "--json", tmp_path / "plan.json")
    assert (refused.code, refused.out) == (2, "")
    assert "--json, --plot or --why-not, which are about one plan" in refused.err


def test_a_number_of_gpus_among_which_the_step_cannot_be_divided_leaves_the_other_lines(cli: Cli) -> None:
    both = cli("plan", *TINY, "--hardware", "h200", "--gpus", "2,1").out
    found = cli("plan", *TINY, "--hardware", "h200", "--gpus", "3,2,2,1,5")
    assert found.code == 1
    assert found.out.startswith(both.rstrip())
    three, five = found.out.splitlines()[-2:]
    assert three.startswith("3 GPUs: a step of 4 sequences in microbatches of 2 cannot be divided among 3 GPUs; train.")
    assert five.startswith("5 GPUs: ")
    none = cli("plan", *TINY, "--gpus", "3,5")
    assert (none.code, none.out) == (2, "")
    assert "cannot be divided among" in none.err


def test_what_fits_if_nothing_is_chosen_for_the_planner_says_so(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert cli("plan", *TINY, "--place", "*=device", "--json", path).code == 0
    less = ["--device-memory", f"{plan_file.load(path).predicted.device_peak_bytes - 1}B"]
    words = "the planner's own choice of what is offloaded"
    assert cli("plan", *TINY, *less).code == 0
    found = cli("plan", *TINY, "--place", "*=device", "--keep", "*=keep", *less)
    assert (found.code, words in found.out) == (1, True)
    nothing = cli("plan", *TINY, "--place", "*=device", "--device-memory", "1MiB")
    assert (nothing.code, words in nothing.out) == (1, False)


def test_a_plan_by_hand_that_training_refuses_says_so(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = cli("plan", *TINY, "--keep", "*=offload", "--json", path)
    assert (found.code, path.exists()) == (0, True)
    refusal = "hostward train --plan does not support this plan: the plan offloads everything of the last layer"
    assert refusal in found.err
    assert refusal in cli("plan", *TINY, "--keep", "*=offload").err
    for file in ([], ["--json", path]):
        assert cli("plan", *TINY, "--keep", "*=recompute", *file).err == ""


@pytest.mark.parametrize(("limit", "above"), [("149GiB", True), ("139GiB", False)])
def test_a_limit_above_the_memory_of_the_gpu_is_said(cli: Cli, limit: str, above: bool) -> None:
    """Seen red: "It fits" on a GPU of half the size, with nothing said about it."""
    found = cli("plan", *TINY, "--hardware", "h200", "--device-memory", limit)
    assert found.code == 0
    assert ("the limit of device memory, 149.0 GiB, is above that GPU's: 139.8 GiB" in found.out) == above


def test_a_small_model_is_told_in_small_units(cli: Cli) -> None:
    found = cli("plan", *TINY)
    assert "MiB per GPU" in found.out
    assert "device MiB  host MiB  step ms  exposed ms" in found.out
    assert "GiB at the peak" not in found.out
    assert " 0.00 B trained" not in found.out
    step = re.search(r"predicted step (\S+) ms", found.out)
    assert step is not None
    assert float(step[1]) > 0


def test_what_was_asked_to_be_offloaded_is_not_said_to_be_on_the_device(cli: Cli) -> None:
    found = cli("plan", *TINY, "--place", "*=host")
    assert "It fits with what was asked for" in found.out
    assert "It fits on the device" not in found.out


@pytest.mark.parametrize("words", [["--weights", "2"], ["--keep", "*=drop"], ["--place", "host"]])
def test_options_by_hand_are_judged_before_the_model_is_traced(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def traced(*_: object, **__: object) -> None:
        raise AssertionError("the model was traced first")

    monkeypatch.setattr("hostward.trainer.workload.recipe_workload", traced)
    found = cli("plan", *TINY, *words)
    assert found.code == 2
    assert f"error: {words[0]}" in found.err
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    found = cli("plan", *TINY)
    assert found.code == 2
    assert "error: planning needs the package scipy" in found.err


def test_a_model_too_large_for_this_machine_to_trace_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's MemoryError has no text. Seen red: an IndexError over the first line of none."""

    def traced(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hostward.trainer.workload.recipe_workload", traced)
    found = cli("plan", *TINY)
    assert found.code == MemoryLimitError.exit_code
    assert "error: out of memory\n  why: the process was given no more" in found.err


def test_less_than_a_billion_parameters_are_counted_one_by_one(cli: Cli, config_file: Path) -> None:
    config_file.write_text(json.dumps(LLAMA | {"vocab_size": 30_000}))
    found = cli("plan", "--config", config_file, "--seq", "16", "--batch", "1", "--hardware", "h200")
    assert re.search(r"^\w+: 1\d,\d{3},\d{3} trained parameters", found.out)


def test_options_of_a_recipe_are_not_the_planners_to_choose(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
    found = cli("plan", *TINY, *asked, "model.recompute_granularity=full", "model.recompute_method=uniform",
                "model.recompute_num_layers=1", "--json", path)  # fmt: skip
    assert found.code == 0, found.err
    plan = plan_file.load(path)
    assert {row.placement for row in plan.buckets} == {"host"}
    assert {row.activations for row in plan.layers} == {"recompute"}


@pytest.mark.parametrize("where", ["device", "host"])
def test_where_gradients_are_added_up_is_the_recipes_to_say(cli: Cli, tmp_path: Path, where: str) -> None:
    path = tmp_path / "plan.json"
    asked = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
    found = cli("plan", *TINY, *asked, f"optimizer.gradients={where}", "--json", path)
    assert found.code == 0, found.err
    assert plan_file.load(path).gradients_on_host == (where == "host")
    assert ("gradients accumulated on the host" in found.out) == (where == "host")


def test_how_much_state_is_staged_is_the_recipes_to_say(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ["optimizer.offload_optimizer_states=True", "optimizer.optimizer_state_offload_chunk_size_mb=3"]
    assert cli("plan", *TINY, *asked, "--json", path).code == 0
    assert plan_file.load(path).staging_bytes == 3 * 1024 * 1024


def test_a_model_of_a_file_must_fit_while_it_is_saved(cli: Cli, config_file: Path) -> None:
    """Seen red: with the phases of training alone it fits within what the steps take."""
    asked = ("plan", "--config", config_file, "--seq", 512, "--place", "*=host", "--hardware", "h200")
    whole = cli(*asked, "--host-memory", "64GiB")
    assert whole.code == 0, whole.err
    host_mib = {
        row.split("  ")[0]: float(row.split()[-2]) for row in whole.out.splitlines() if row[:5] in ("stead", "save ")
    }
    assert host_mib["save"] > host_mib["steady step"]
    limit = f"{int(host_mib['steady step']) + 1}MiB"
    assert cli(*asked, "--host-memory", limit).code == 1


def test_a_run_that_saves_must_fit_while_it_saves(cli: Cli, tmp_path: Path) -> None:
    asked = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
    path = tmp_path / "plan.json"
    assert cli("plan", *TINY, *asked, "--json", path).code == 0
    limit = ["--host-memory", f"{plan_file.load(path).predicted.host_bytes}B"]
    without = cli("plan", *TINY, *asked, *limit)
    assert without.code == 0, without.out
    assert "which is not counted: a run without checkpoint.save does not do it" in without.out
    with_save = cli("plan", *TINY, *asked, *limit, f"checkpoint.save={tmp_path / 'saved'}")
    assert with_save.code == 1
    assert "It does not fit." in with_save.out
    assert "not counted" not in with_save.out
    assert "--host-memory" in with_save.out


IN_BF16 = "the plan is for training all weights in bf16\n"


def test_a_configuration_file_is_planned(cli: Cli, config_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["--config", config_file, "--seq", 512, "--batch", 4, "--micro-batch", 2]
    found = cli(
        "plan", *words, "--place", "*layers.0=streamed", "--keep", "*=recompute", "--weights", 0, "--json", path
    )
    assert found.code == 0, found.err
    assert "2,048 tokens per step and GPU (2 x 2 sequences of 512)" in found.out
    plan = plan_file.load(path)
    assert all(row.placement == "streamed" for row in plan.buckets if row.bucket.endswith("layers.0"))
    assert {row.activations for row in plan.layers} == {"recompute"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"torch_dtype": "float32"}, f"the file says float32 weights: {IN_BF16}"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            f"the file says quantized weights (gptq): {IN_BF16}",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "the file says LlamaForSequenceClassification: "),
        ({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}, "llama: "),
    ],
)
def test_what_a_file_describes_and_is_not_planned_is_named(
    cli: Cli, config_file: Path, more: dict[str, object], said: str
) -> None:
    """Seen red: a plan for bf16 weights of a file of fp32 or quantized ones, and for a causal language model of one of
    a classifier, with nothing said about it.
    """
    config_file.write_text(json.dumps(LLAMA | more))
    found = cli("plan", "--config", config_file, "--seq", 64, "--hardware", "h200")
    assert found.code == 0, found.err
    assert found.out.startswith(said)


def test_layers_that_may_be_resharded_are_said_to_be_worth_a_plan(cli: Cli, config_file: Path) -> None:
    """Seen red: the hint beside a plan that offloads nothing, and one whose layers are resharded."""
    asked = ("plan", "--config", config_file, "--seq", 64, "--hardware", "h200", "--gpus", 2)
    hint = "Plan it with layers resharded after forward as well"
    assert hint in cli(*asked, "--place", "*=host").out
    assert hint not in cli(*asked, "--place", "*=host", "--reshard").out
    assert hint not in cli(*asked).out


def test_parameters_are_counted_once_whatever_the_number_of_gpus(cli: Cli, config_file: Path) -> None:
    """Seen red: the largest part of each, times the number of GPUs."""
    alone, several = (cli("plan", "--config", config_file, "--seq", "8", "--gpus", n).out for n in ("1", "1000"))
    counted = re.compile(r": ([\d,.]+(?: B)?) trained parameters")
    assert counted.findall(alone) == counted.findall(several) != []


def test_several_gpus_have_a_column_for_the_node(cli: Cli, config_file: Path) -> None:
    found = cli("plan", "--config", config_file, "--seq", 128, "--gpus", 4, "--host-memory", "64GiB")
    assert found.code == 0, found.err
    assert "host, node" in found.out
    assert "on 4 x NVIDIA H200" in found.out
    assert "NVLink between GPUs is assumed" in found.out


def test_what_does_not_fit_ends_with_1_and_the_smallest_change(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = cli("plan", *TINY, "--device-memory", "1MiB", "--json", path)
    assert found.code == 1
    assert "It does not fit." in found.out
    assert not path.exists()
    (enough,) = re.findall(r"--device-memory (\d+)MiB", found.out)
    assert cli("plan", *TINY, "--device-memory", f"{int(enough) - 1}MiB").code == 1
    assert cli("plan", *TINY, "--device-memory", f"{enough}MiB").code == 0


def test_what_is_no_plain_file_is_refused_before_planning(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found = cli("plan", *TINY, "--json", tmp_path / "pipe")
    assert found.code == 2
    assert "pipe is no plain file" in found.err
    assert found.out == ""


def test_a_plan_keeps_to_the_device_memory_that_was_given(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert cli("plan", *TINY, "--json", path).code == 0
    everything = plan_file.load(path).predicted.device_peak_bytes
    limit = int(0.985 * everything)
    assert cli("plan", *TINY, "--device-memory", f"{limit}B", "--json", path).code == 0
    found = plan_file.load(path)
    assert found.limits.device_bytes == limit
    assert found.predicted.device_peak_bytes <= limit < everything


def test_the_memory_of_a_machine_or_its_container_is_a_limit(cli: Cli, tmp_path: Path) -> None:
    h200 = profile("h200")
    small = replace(h200, name="small", limits=replace(h200.limits, memory_bytes=3 << 20))
    (tmp_path / "small.json").write_text(small.to_json())
    words = [*TINY, "--hardware", tmp_path / "small.json"]
    assert cli("plan", *words).code == 0
    found = cli("plan", *words, "--place", "*=host")
    assert found.code == 1
    assert "It does not fit." in found.out
    assert re.search(r"--host-memory \dMiB", found.out)


def test_a_cap_on_locked_pages_is_kept_by_locking_less(cli: Cli, tmp_path: Path) -> None:
    """Tables of kernels take 2 MiB, whatever the model."""
    path, words = tmp_path / "plan.json", [*TINY, "--place", "*=host", "--pinned-memory", "2.1MiB"]
    found = cli("plan", *words)
    assert found.code == 1
    assert re.search(r"^    hostward plan .*--pinned-memory \d+MiB", found.out, re.MULTILINE)
    assert re.search("^    hostward plan .*--no-pin", found.out, re.MULTILINE)
    found = cli("plan", *words, "--no-pin", "--json", path)
    assert found.code == 0
    assert "gradients and weights of CPU-stepped buckets are not pinned" in found.out
    plan = json.loads(path.read_text())
    assert (plan["pin_gradients"], plan["pin_weights"]) == (False, False)
    assert plan["predicted"]["pinned_bytes"] < 2.1 * (1 << 20) < plan["predicted"]["host_bytes"]


def test_steps_during_backward_are_planned_and_taken_back(cli: Cli, tmp_path: Path) -> None:
    """Seen red: the fix left the flag in the command."""
    path, words = tmp_path / "plan.json", [*TINY, "--place", "*=host"]
    found = cli("plan", *words, "--step-early", "0.5", "--json", path)
    assert found.code == 0
    assert "50% of CPU-stepped state is stepped during backward, into a second set on the host" in found.out
    plan = json.loads(path.read_text())
    assert plan["step_early"] == 0.5
    needed = plan["predicted"]["host_bytes"] // MIB
    short = [*words, "--step-early", "0.5", "--host-memory", f"{needed - 1}MiB"]
    found = cli("plan", *short)
    assert found.code == 1
    fix = next(line for line in found.out.splitlines() if line.startswith("    hostward plan") and "early" not in line)
    assert "no CPU optimizer steps during backward" in found.out
    assert cli(*shlex.split(fix)[1:]).code == 0
    option = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
    found = cli("plan", *TINY, *option, "optimizer.step_early=1", "--host-memory", f"{needed - 1}MiB")
    assert found.code == 1
    fix = next(line for line in found.out.splitlines() if line.startswith("    hostward plan") and "early" not in line)
    assert "optimizer_offload_fraction" in fix
    nothing = cli("plan", *TINY, "--place", "*=streamed", "--step-early", "1").out
    assert "the CPU steps none of the state" in nothing
    assert cli("plan", *words, "--step-early", "1.5").code == 2
    scaled = [word for word in words if "params_dtype" not in word]
    refused = cli("plan", *scaled, "model.params_dtype=fp16", "--step-early", "0.5")
    assert refused.code == 2
    assert "steps are guessed for gradients that are not scaled" in refused.err


def test_two_plans_are_compared(cli: Cli, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    cli("plan", *TINY, "--json", one)
    cli("plan", *TINY, "--place", "*=host", "--json", two)
    same = cli("plan", "diff", one, one)
    assert (same.code, same.out) == (0, "the plans are equal\n")
    other = cli("plan", "diff", one, two)
    assert other.code == 1
    assert "device -> host" in other.out
    assert other.out.startswith("predicted of the second plan: ")


def test_a_picture_of_the_frontier(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib")
    path = tmp_path / "plan.png"
    assert cli("plan", *TINY, "--plot", path).code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    refused = cli("plan", *TINY, "--plot", tmp_path / "plan.xyz")
    assert refused.code == 2
    assert "--plot" in refused.err


def test_a_configuration_may_come_from_a_pipe(cli: Cli) -> None:
    """As in `--config <(jq ... config.json)`. Seen red: the file read again for what is not planned."""
    reads, writes = os.pipe()
    with open(writes, "w", encoding="utf-8") as pipe:
        json.dump({**LLAMA, "dtype": "float32"}, pipe)
    words = ["--seq", "16", "--hardware", "h200", "--why-not", "--batch 2"]
    found = cli("plan", "--config", f"/dev/fd/{reads}", *words)
    os.close(reads)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("the file says float32 weights")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--device-memory", "40gib"], ["--device-memory 40gib is no size", "--device-memory 40GiB"]),
        (["--host-memory", "100"], ["a number alone does not say its unit", "--host-memory 100GiB"]),
        (["--pinned-memory", "many"], ["--pinned-memory many is no size"]),
        (["--host-memory", f"{'9' * 400}GiB"], ["--host-memory 999", "no machine has 1,073,741,824TiB"]),
        (["--hardware", "h2000"], ["neither a file nor a shipped profile", "h200"]),
        (["--hardware", "none.json"], ["none.json cannot be read"]),
        (["--config", "none"], ["none"]),
        (["--config", "misspelt"], ["knows no model type 'qwen3_mo'", "did you mean 'qwen3_moe'?"]),
        (["--config", "misspelt", "--seq", "99999999"], ["does not take --seq 99999999", "fix: --seq VALUE"]),
        (["--config", "none", "--seq", "65536", "--micro-batch", "65536"], ["tokens is more than can be planned"]),
        (["--config", "none", "--reshard"], ["--reshard has no effect with one GPU"]),
        (["--config", "none", "optimizer.exp_avg_dtype=fp9"], ["must be one of fp32, bf16, fp8, not 'fp9'"]),
        (["--gpus", "99999999999999999999"], ["are more than can be planned\n  fix: at most 65,536"]),
        (["--gpus", "9" * 5000], ["are more than can be planned\n  fix: at most 65,536"]),
        (["model.num_layers=1000000000"], ["model.num_layers must be in [0, 4096], not 1000000000"]),
        (["model.vocab_size=1000000000000000"], ["model.vocab_size must be in [1, 268435456], not 1000000000000000"]),
        (
            ["train.micro_batch_size=99999999", "train.global_batch_size=99999999"],
            ["tokens is more than can be planned"],
        ),
        (["--config", "none", "--recipe", "x"], ["--config does not go with --recipe"]),
        (["--config", "none", "optimizer.lr=1"], ["optimizer.lr does not go with --config", "exp_avg_dtype"]),
        (["--seq", "8"], ["--seq goes with --config", "model.seq_length"]),
        (["--place", "nothing*=host"], ["no name matches nothing*", "names are like model.embed_tokens\n"]),
        (["--place", "*=gpu"], ["--place *=gpu: 'gpu' is not a known word after =", "device, streamed, host"]),
        (["--place", "layers.*=hosts"], ["'hosts' is not a known word after =", "fix: did you mean host?"]),
        (["--keep", "*"], ["is not of the form PATTERN=WHAT", "recompute"]),
        (["--weights", "2"], ["--weights 2: the model has 2 layers", "at most --weights 1"]),
        (["--weights", "1", "--place", "*=device"], ["layers.0 are to be on the host", "layers.0=host"]),
        (
            ["--weights", "1", "--place", "*=streamed"],
            ["layers.0 are to be on the host", "on the host, to be streamed"],
        ),
        (["--gpus", "0"], ["--gpus 0 is not a number of GPUs"]),
        (["--gpus", "1,,4"], ["--gpus 1,,4 is not a number of GPUs"]),
        (["--gpus", "3"], ["cannot be divided among 3 GPUs", "train.global_batch_size=6"]),
        (["--recipe", "qwen3_moe_tiny"], ["there is no recipe"]),
        (["--hardware", "rtx4090"], ["neither a file nor a shipped profile", "did you mean --hardware rtx-4090?"]),
        (["--config", "no/such"], ["there is no no/such", "nothing is downloaded"]),
        (["--json", "no/such/plan.json"], ["its folder does not exist"]),
        (["diff", "one.json"], ["plan diff takes two files"]),
        (["diff", "one.json", "two.json", "--json", "-"], ["--json has no effect with plan diff"]),
        (["--why-not", "--weigths 1"], ["--why-not '--weigths 1' is not what hostward plan takes", "--weights"]),
        (["--why-not", "--weights x"], ["--why-not '--weights x' is not what", "--weights"]),
        (["--why-not", "--weights 2"], ["--why-not '--weights 2': --weights 2: the model has 2 layers"]),
        (["--why-not", "--json x.json"], ["--why-not '--json x.json': --json is about what is written"]),
        (["--why-not", "--keep '"], ["is not what hostward plan takes", "No closing quotation"]),
        (["--why-not", " "], ["--why-not ' ': it varies no flag"]),
        (["--hardware", ""], ["there is an empty word after --hardware", "a variable of the shell"]),
        (["--hardware="], ["there is an empty word after --hardware"]),
        (["--recipe", ""], ["there is an empty word after --recipe"]),
        (["--hardware", "."], ["--hardware . is neither a file nor a shipped profile"]),
        (["--hardware", "x" * 300], ["is neither a file nor a shipped profile"]),
        (["--config", "x" * 300], [f"there is no {'x' * 300}"]),
        (["--json", "x" * 300], ["cannot be written", "File name too long"]),
        (["--json", "loop"], ["--json loop cannot be written", "Too many levels of symbolic links"]),
        (["--plot", "misspelt/x.png"], ["--plot misspelt/x.png cannot be written", "Not a directory"]),
        (["--plot", "picture"], ["names no kind of picture that can be written", "fix: --plot picture.png"]),
        (["--json", "x.png", "--plot", "./x.png"], ["--json and --plot both name x.png"]),
        (["--config", "misspelt", "--json", "misspelt"], ["--config and --json both name misspelt"]),
        (["--device-memory", "٣GiB"], ["--device-memory ٣GiB is no size"]),
        (["--place", "="], ["fix: --place '*=device'"]),
        (["diff", "one.json", "two.json", "--gpus", "2"], ["--gpus has no effect with plan diff"]),
        (["model.num_layers=1"], ["fix: choose other options of the model: a plan takes two layers or more"]),
        (["--why-not", "--gpus 1,2"], ["asks for several plans"]),
        (["--why-not", "--no-pin", "--gpus", "1,2"], ["--why-not, which are about one plan"]),
        (["dif", "one.json", "two.json"], ["no command 'dif'", "hostward plan diff A.json B.json"]),
        (["optimizer.optimizer_offload_fraction=2"], ["optimizer_offload_fraction"]),
    ],
)
def test_bad_input_ends_with_2(
    cli: Cli, words: list[str], texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [] if words[0] in ("--config", "--recipe", "diff", "dif") else TINY
    Path("misspelt").write_text('{"model_type": "qwen3_mo"}')
    Path("loop").symlink_to("loop")
    found = cli("plan", *words) if words[0].startswith("dif") else cli("plan", *small, *words)
    assert found.code == 2, found.out
    assert "Traceback" not in found.err
    for text in texts:
        assert text in found.err


def test_a_model_of_other_flags_that_is_none_is_theirs(cli: Cli, config_file: Path) -> None:
    """Seen red: `error: there is no none`, of which flags, nobody said."""
    found = cli("plan", "--config", config_file, "--seq", "16", "--hardware", "h200", "--why-not", "--config none")
    assert found.code == 2
    assert "error: --why-not '--config none': there is no none" in found.err


def test_plans_that_are_none_and_hardware_without_a_gpu(cli: Cli, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    found = cli("plan", "diff", broken, broken)
    assert found.code == 2
    assert "cannot be used as a plan" in found.err
    bare = replace(profile("h200"), name="bare", gpu=None, gpu_count=0, links=())
    hardware = tmp_path / "bare.json"
    hardware.write_text(bare.to_json())
    found = cli("plan", *TINY, "--hardware", hardware)
    assert found.code == 2
    assert "has no GPU" in found.err


def test_of_several_gpus_each_has_its_rows_and_weights_leave_if_asked(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = cli("plan", *TINY, "--gpus", "2", "--place", "*=host", "--json", path)
    assert found.code == 0, found.err
    assert "weights of" not in found.out
    plan = plan_file.load(path)
    assert (plan.workload.ranks, plan.machine.gpus) == (2, 2)
    assert {row.weights for row in plan.layers} == {"device"}
    found = cli("plan", *TINY, "--gpus", "2", "--place", "*=host", "--weights", "1", "--json", path)
    assert found.code == 0, found.err
    assert "hostward.move" not in found.out
    assert [row.weights for row in plan_file.load(path).layers].count("host") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.expert_model_parallel_size=2"], "hostward plan with model.expert_model_parallel_size=2 is known"),
        (["model.pipeline_model_parallel_size=2"], "hostward plan with model.pipeline_model_parallel_size=2 is known"),
        (["ddp.use_distributed_optimizer=false"], "for 2 GPUs with ddp.use_distributed_optimizer=false is known"),
    ],
)
def test_other_divisions_among_gpus_are_refused(cli: Cli, words: list[str], told: str) -> None:
    found = cli("plan", *TINY, "--gpus", "2", *words)
    assert found.code == 2
    assert told in found.err


SELECTIVE = "model.recompute_granularity=selective"
OFFLOADED = ["model.cpu_offloading=true", "model.cpu_offloading_num_layers=1"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (
            ["model.fine_grained_activation_offloading=true", "model.offload_modules=[core_attn]"],
            "model.fine_grained_activation_offloading=true",
        ),
        (
            [*OFFLOADED, "model.cpu_offloading_double_buffering=true"],
            "model.cpu_offloading_double_buffering=true",
        ),
        ([SELECTIVE, "model.recompute_modules=[layernorm]"], "model.recompute_modules=[layernorm]"),
        ([SELECTIVE, "model.recompute_modules=[layernorm,moe]"], "model.recompute_modules=[layernorm,moe]"),
    ],
)
def test_what_no_plan_carries_out_is_refused(cli: Cli, tmp_path: Path, words: list[str], option: str) -> None:
    """By the planner, which would choose something else, and with a plan that was made without it."""
    found = cli("plan", *TINY, *words)
    assert (found.code, found.out) == (2, "")
    assert f"hostward plan with {option} is known, but not built yet" in found.err
    assert "layernorm and moe_act within them" in found.err
    path = tmp_path / "plan.json"
    assert cli("plan", *TINY, "--json", path).code == 0
    refused = cli("train", *TINY, *words, "--plan", path)
    assert refused.code == 2
    assert f"--plan with {option} is known, but not built yet" in refused.err


def test_recomputation_that_plans_know_is_planned(cli: Cli) -> None:
    found = cli("plan", *TINY, SELECTIVE, "model.recompute_modules=[layernorm,moe_act]")
    assert found.code == 0
    assert "recompute layer norms and activations" in found.out


def test_the_line_of_the_picture_goes_on_behind_what_the_device_has(cli: Cli, tmp_path: Path) -> None:
    """Seen red: choices that take more than the device has met, but not looked for: a line above them."""
    pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib")
    words = [
        "--recipe",
        "qwen3_30b_a3b_pretrain_config",
        "--hardware",
        "h200",
        "--gpus",
        "4",
        "--host-memory",
        "512GiB",
    ]

    def too_large(*more: str) -> int:
        out = cli("plan", *words, *more).out
        rows = out.partition("device memory against time:")[2].splitlines()[2:]
        found = [float(row.split()[0]) for row in rows if row.split() and row.split()[0].replace(".", "").isdigit()]
        return sum(gib > 139.8 for gib in found)

    assert too_large() == 1
    assert too_large("--plot", str(tmp_path / "frontier.png")) > 5
