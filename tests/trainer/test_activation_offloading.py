"""Activations offloaded and recomputed by the options of recipes: the same training, bit for bit.

Seen red: options that are read and not carried out; recomputation that leaves the inputs on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import different, offloaded, saved
from run_fixtures import Cli

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.validate import check
from hostward.errors import ConfigError

OFFLOADING = ["model.cpu_offloading=True", "model.cpu_offloading_num_layers=2"]
RECOMPUTING = ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"]
SELECTIVE = ["model.recompute_granularity=selective"]
WAYS = {
    "offloaded": OFFLOADING,
    "one layer, two buffers, retained": [
        "model.cpu_offloading=True",
        "model.cpu_offloading_num_layers=1",
        "model.cpu_offloading_double_buffering=True",
        "model.cpu_offloading_retain_pinned_cpu_buffers=True",
    ],
    "recomputed": RECOMPUTING,
    "inputs of recomputed layers": [*OFFLOADING, *RECOMPUTING],
    "some recomputed, some not": [
        *OFFLOADING,
        "model.recompute_granularity=full",
        "model.recompute_method=block",
        "model.recompute_num_layers=1",
    ],
    "attention alone": [
        "model.fine_grained_activation_offloading=True",
        "model.offload_modules=[core_attn,attn_proj]",
        "model.min_offloaded_tensor_size=2048",
    ],
    "a share of modules, few at a time": [
        "model.fine_grained_activation_offloading=True",
        "model.offload_modules=[core_attn,mlp_norm]",
        "model.min_offloaded_tensor_size=2048",
        "model.activation_offload_fraction=0.5",
        "model.fine_grained_offloading_max_inflight_offloads=1",
    ],
    "norms and experts recomputed": [*SELECTIVE, "model.recompute_modules=[layernorm,moe]"],
    "norms recomputed, the rest offloaded": [*OFFLOADING, *SELECTIVE, "model.recompute_modules=[layernorm]"],
    "with the optimizer": [*OFFLOADING, *offloaded(1), "optimizer.offload_mix=0.5"],
    "weights alone": [
        *OFFLOADING,
        "model.cpu_offloading_weights=True",
        "model.cpu_offloading_activations=False",
        *offloaded(1),
    ],
    "weights and activations": [*OFFLOADING, "model.cpu_offloading_weights=True", *offloaded(1)],
    "with gradients on the host": [*OFFLOADING, *offloaded(1), "optimizer.gradients=host"],
}
SEQUENCES, LENGTH, HIDDEN = 4, 64, 64
COMMON = [
    f"train.global_batch_size={SEQUENCES}",
    f"train.micro_batch_size={SEQUENCES}",
    f"model.seq_length={LENGTH}",
    f"model.hidden_size={HIDDEN}",
    "model.kv_channels=16",
    "model.num_layers=4",
    "model.experts_implementation=eager",
    "train.train_iters=2",
]
IN_BF16 = ("with the optimizer", "weights and activations", "with gradients on the host")
"""These alone, and on fewer layers: CPUs that do not compute with it take a hundred times as long."""


def told_by_ways(train: Cli, folder: Path, ways: Iterable[str], *common: str) -> dict[str, dict[str, Any]]:
    """What runs tell of their activations. Each trains the bits of one that leaves them where they are."""
    base = train(*COMMON, *common, f"checkpoint.save={folder / 'base'}").report
    tensors, _ = saved(folder / "base")
    seen = {}
    for name in ways:
        save = folder / name.replace(" ", "-")
        other = train(*COMMON, *common, *WAYS[name], f"checkpoint.save={save}").report
        for key in ("losses", "grad_norms"):
            assert other[key] == base[key], name
        assert different(saved(save)[0], tensors) == [], name
        seen[name] = other["activations"]
    assert base["activations"] is None
    return seen


@pytest.mark.usefixtures("small_ones_leave")
def test_t28_ways_train_the_same_bits_in_bf16(train: Cli, tmp_path: Path) -> None:
    seen = told_by_ways(train, tmp_path, IN_BF16, "model.params_dtype=bf16", "model.num_layers=3")
    for name, told in seen.items():
        assert told["offloaded_bytes"] == told["reloaded_bytes"] > 0, name
        assert told["on_demand_bytes"] == 0, name


@pytest.mark.usefixtures("small_ones_leave")
def test_t28_every_way_trains_the_same_bits(train: Cli, tmp_path: Path) -> None:
    ways = [way for way in WAYS if way not in IN_BF16 or way == "weights and activations"]
    seen = told_by_ways(train, tmp_path, ways, "model.params_dtype=fp32")
    assert seen["recomputed"] is None
    alone = seen["norms and experts recomputed"]
    assert (alone["offloaded_bytes"], alone["recomputed_modules"]) == (0, 4 * 5)
    for name in ("weights alone", "weights and activations"):
        assert seen[name]["weights"]["offloaded_bytes"] > 0
        assert seen[name]["weights"]["here_bytes"] < seen[name]["weights"]["offloaded_bytes"]
    assert seen["weights alone"]["offloaded_bytes"] == 0
    for name in seen.keys() - {"recomputed", "norms and experts recomputed", "weights alone"}:
        assert seen[name]["offloaded_bytes"] == seen[name]["reloaded_bytes"] > 0, name
        assert seen[name]["on_demand_bytes"] == 0, name
    inputs = seen["inputs of recomputed layers"]["offloaded_bytes"]
    assert inputs == 2 * 2 * SEQUENCES * LENGTH * HIDDEN * 4  # steps, layers, ..., bytes
    less = seen["norms recomputed, the rest offloaded"]
    assert less["recomputed_modules"] == 4 * 4
    assert less["offloaded_bytes"] < seen["offloaded"]["offloaded_bytes"]
    assert inputs < seen["some recomputed, some not"]["offloaded_bytes"] < seen["offloaded"]["offloaded_bytes"]


def test_the_report_tells_what_left(train: Cli) -> None:
    enough = ["train.global_batch_size=128", "train.micro_batch_size=128"]
    outcome = train(*COMMON, *enough, *OFFLOADING, *offloaded(1))
    said = " ".join(outcome.out.split())  # cells of a table wrap
    assert "saved activations (simulated device)" in said
    assert "bytes to the host" in said
    assert "host memory for them" in said
    assert "The device is simulated" in said
    assert "pinned" not in said, "nothing is, without a GPU"
    assert "times and rates are not those of a GPU" in said
    # What the first forward moves is no step of its own.
    assert "measured in iteration 1" in said


def test_no_layer_is_off_and_the_missing_option_is_named(train: Cli, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron accepts it in silence."""
    report = train("train.train_iters=1", "model.cpu_offloading=True").report
    assert report["activations"] is None
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert told == (
        "model.cpu_offloading=true does nothing while model.cpu_offloading_num_layers=0: add "
        "model.cpu_offloading_num_layers=1, for example, or leave model.cpu_offloading at false"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model.cpu_offloading=True", "model.cpu_offloading_num_layers=4"], "only for layers less than 4"),
        (
            ["model.cpu_offloading_double_buffering=True"],
            "set model.cpu_offloading=true model.cpu_offloading_num_layers=1 too",
        ),
        (["model.cpu_offloading_num_layers=1"], "set model.cpu_offloading=true too, or leave"),
        (["model.fine_grained_activation_offloading=True"], r"set model.offload_modules=\[core_attn\], for example"),
        (["model.offload_modules=[core_attn]"], "set model.fine_grained_activation_offloading=true too"),
        (["model.recompute_granularity=full"], "without model.recompute_method"),
        (["model.recompute_granularity=selective"], "names no module"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check(apply_overrides(recipes.load("qwen3_moe_tiny_pretrain_config"), words))
