"""`hostward train`: what it reports, and that every fraction trains the same bits."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SMALL, different, offloaded, saved
from run_fixtures import Cli

from hostward import recipes
from hostward.core.units import size

S10_WORDS = """--recipe qwen3_30b_a3b_pretrain_config
    optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=0.5
    train.train_iters=20 train.global_batch_size=8 train.micro_batch_size=1"""
SHRUNK = [
    *("model.num_layers=2", "model.hidden_size=64", "model.num_moe_experts=4", "model.moe_ffn_hidden_size=32"),
    *("model.moe_router_topk=2", "model.num_attention_heads=4", "model.num_query_groups=2", "model.kv_channels=16"),
    *("model.seq_length=32", "model.vocab_size=257", "train.num_threads=1", "train.device=cpu"),
]


def test_report_lists_all_losses_and_its_numbers_agree(train: Cli) -> None:
    report = train("train.train_iters=6", *offloaded(0.5)).report
    assert len(report["losses"]) == len(report["grad_norms"]) == len(report["iteration_s"]) == 6
    assert (report["first_iteration"], report["last_iteration"]) == (0, 6)
    assert all(math.isfinite(loss) for loss in report["losses"])
    assert report["asked_fraction"] == 0.5
    assert report["placed_fraction"] == report["offloaded_bytes"] / report["state_bytes"]
    # fp32: two moments of 4 bytes leave the device per parameter; a gradient goes down and a weight comes up per step.
    elements = report["offloaded_bytes"] // 8
    scalars_bytes = 12
    assert report["state_bytes"] == 8 * report["parameters"]
    assert report["moved_h2d_bytes"] == 6 * 4 * elements
    assert report["moved_d2h_bytes"] == 6 * (4 * elements + scalars_bytes)
    assert report["tokens_per_s"] == pytest.approx(5 * 4 * 64 / sum(report["iteration_s"][1:]))
    assert report["checkpoint"] is None


def test_report_counts_memory_by_owner(train: Cli) -> None:
    none, half = (train("train.train_iters=2", *offloaded(f)).report for f in (0, 0.5))
    device, host = half["memory"]["device_by_owner_bytes"], half["memory"]["host_by_owner_bytes"]
    moments = sum(side[role] for side in (device, host) for role in ("exp_avg", "exp_avg_sq"))
    assert moments == pytest.approx(half["state_bytes"], rel=0.01)
    assert device["weights"] == device["gradients"] == 4 * half["parameters"]
    assert {"gradients", "weights for upload"} <= host.keys()
    stepped_here = {"exp_avg", "exp_avg_sq", "remainder", "master", "step counts"}  # no copy reaches it
    assert half["memory"]["pinned_bytes"] == sum(n for owner, n in host.items() if owner not in stepped_here)
    fell = sum(none["memory"]["device_by_owner_bytes"].values()) - sum(device.values())
    assert fell == pytest.approx(half["offloaded_bytes"], rel=0.02)
    assert half["memory"]["resident_bytes"] > sum(device.values()) + sum(host.values())


def test_table_shows_the_numbers_of_the_json_in_80_columns(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = train("train.train_iters=3", *offloaded(0.5))
    rows = table_rows(outcome.out)
    assert max(len(line.rstrip()) for line in outcome.out.splitlines()) <= 80
    report: dict[str, Any] = outcome.report
    memory = report["memory"]
    assert rows["loss, first and last"] == [f"{report['losses'][0]:.6f} → {report['losses'][-1]:.6f}"]
    median_s = report["measured"]["step_s"]
    assert rows["tokens/s, median step"] == [f"{report['tokens_per_iteration'] / median_s:,.0f}"]
    state = f"{size(report['offloaded_bytes'])} of {size(report['state_bytes'])}"
    assert rows["optimizer state"] == [f"{state}: {report['placed_fraction']:.2%} offloaded, 50.00% asked for"]
    moved = (size(report[f"moved_{way}_bytes"]) for way in ("d2h", "h2d"))
    assert rows["moved in all"] == ["{} to the host, {} to the device".format(*moved)]
    assert "most memory at any time, MiB" in outcome.out
    for owner in memory["device_by_owner_bytes"].keys() | memory["host_by_owner_bytes"].keys():
        columns = [memory[f"{tier}_by_owner_bytes"].get(owner, 0) for tier in ("device", "host")]
        assert rows[owner] == [f"{b / 2**20:.1f}" for b in columns if b]
    assert not [name for name in rows if "pinned" in name], "nothing is, without a GPU"


def table_rows(text: str) -> dict[str, list[str]]:
    """The cells of the printed tables by their first cell."""
    cells = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize(
    ("dtype", "iterations", "fractions"),
    [("fp32", 5, (0.25, 0.5, 0.75, 1)), ("bf16", 3, (0.5, 1)), ("fp16", 4, (0.5, 1))],
)
def test_t28_losses_weights_and_moments_equal_at_every_fraction(
    train: Cli, tmp_path: Path, dtype: str, iterations: int, fractions: tuple[float, ...]
) -> None:
    """Two microbatches per step, so 16-bit models accumulate in fp32; fp16 goes through a GradScaler."""
    experts = "grouped_mm" if dtype == "fp32" else "eager"  # grouped_mm is slow on a CPU in 16 bits
    common = [
        f"model.params_dtype={dtype}",
        f"train.train_iters={iterations}",
        f"model.experts_implementation={experts}",
    ]
    base = train(*common, f"checkpoint.save={tmp_path / 'base'}").report
    tensors, plain = saved(tmp_path / "base")
    assert base["placed_fraction"] == 0
    assert len(base["skipped_iterations"]) < iterations
    assert (plain["scaler"] is not None) == (dtype == "fp16")
    for fraction in fractions:
        folder = tmp_path / str(fraction)
        other = train(*common, *offloaded(fraction), f"checkpoint.save={folder}").report
        assert other["host_buckets"] > 0
        for key in ("losses", "grad_norms", "skipped_iterations"):
            assert other[key] == base[key]
        assert different(saved(folder)[0], tensors) == []
        assert saved(folder)[1]["scaler"] == plain["scaler"]


def test_the_loss_of_real_text_falls(cli: Cli) -> None:
    """The default data: Python's own sources."""
    outcome = cli("train", *SMALL, "train.train_iters=30", *offloaded(1), json=True)
    assert outcome.code == 0, outcome.err
    assert "Python files" in outcome.report["data"]
    assert outcome.report["losses"][-1] < 0.8 * outcome.report["losses"][0]


def test_s10_the_words_of_another_documentation_train(cli: Cli, caplog: pytest.LogCaptureFixture) -> None:
    """Those of Megatron Bridge's as they stand; only sizes are overridden after them."""
    caplog.set_level(logging.INFO, "hostward")
    outcome = cli("train", *S10_WORDS.split(), *SHRUNK, json=True)
    assert outcome.code == 0, outcome.err
    content = outcome.report
    assert len(content["losses"]) == 20
    assert content["losses"][-1] < content["losses"][0]
    assert content["asked_fraction"] == 0.5
    assert 0.25 < content["placed_fraction"] < 0.75
    assert "asked 0.5000" in caplog.text


def test_the_switch_with_fraction_zero_runs_and_says_that_nothing_is_offloaded(
    train: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hostward")
    report = train("train.train_iters=2", "optimizer.optimizer_cpu_offload=True").report
    assert "no state is offloaded" in caplog.text
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert told == (
        "optimizer.optimizer_cpu_offload=true does nothing while optimizer.optimizer_offload_fraction=0.0: add "
        "optimizer.optimizer_offload_fraction=1.0, for example, or leave optimizer.optimizer_cpu_offload at false"
    )
    assert report["asked_fraction"] == report["placed_fraction"] == report["offloaded_bytes"] == 0
    assert report["moved_d2h_bytes"] == report["moved_h2d_bytes"] == 0


def test_s6_torch_optimizer_trains_nearly_the_same(train: Cli, tmp_path: Path) -> None:
    """Torch's fused CPU kernels round differently, so bits differ; the losses of 10 steps by less than 1e-4."""
    common = ["train.train_iters=10", *offloaded(1)]
    ours = train(*common, f"checkpoint.save={tmp_path / 'ours'}").report
    words = [*common, "optimizer.use_torch_optimizer_for_cpu_offload=True", f"checkpoint.save={tmp_path / 'torch'}"]
    theirs = train(*words).report
    assert theirs["losses"][0] == ours["losses"][0]
    assert max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)) < 1e-4
    mine, other = saved(tmp_path / "ours")[0], saved(tmp_path / "torch")[0]
    assert any(name.startswith("model/") for name in different(mine, other)), "the option changed nothing"
    steps = {n: int(t) for n, t in other.items() if n.endswith("/step")}
    assert set(steps.values()) == {10}


def test_progress_lines_follow_log_interval(train: Cli, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hostward")
    report = train("train.train_iters=5", "logger.log_interval=2").report
    lines = [m for m in caplog.messages if m.startswith("iteration ")]
    assert [line.split()[1] for line in lines] == ["1/5", "2/5", "4/5"]
    assert f"loss {report['losses'][1]:.4f}" in lines[1]


def test_recipes_are_listed(cli: Cli) -> None:
    outcome = cli("recipes")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()] == recipes.names()
    tiny, folder, *_ = (re.split("  +", line)[1:] for line in outcome.out.splitlines())
    assert tiny == ["4 layers of 256, 8 experts", "sequences of 256", "fp32"]
    assert folder == ["sizes of the folder", "sequences of 2048", "bf16", "needs model.hf_model_path=FOLDER"]


def test_recipes_are_listed_without_torch() -> None:
    """It takes seconds to import."""
    code = "import sys; sys.modules['torch'] = None; from hostward.cli import main; sys.exit(main(['recipes']))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
