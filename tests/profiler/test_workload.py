"""Workloads of models: exact at any size, complete, and the optimizer's own buckets."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tape_cases import EXPERTS, LATENT, WINDOWS, built, loss_of, parts, tokens
from transformers import CONFIG_MAPPING

import hostward
from hostward.core.inventory import Dtype
from hostward.errors import ConfigError, ModelError
from hostward.plan.workload import Way, Workload
from hostward.profiler.workload import inventory_of, workload_of
from hostward.recipes import load
from hostward.trainer.models import require_sizes
from hostward.trainer.workload import config_workload, read_model_file, recipe_workload

pytest.importorskip("transformers")


def work_of(model: Any, length: int = 24, sequences: int = 2, **more: Any) -> Workload:
    return workload_of(model, sequence_tokens=length, microbatch_sequences=sequences, loss=loss_of, **more)


@cache
def of_attention(attention: str) -> Workload:
    return work_of(built("Llama", "meta", torch.bfloat16, attention))


@pytest.mark.parametrize(
    ("attention", "sequences", "length"),
    [("sdpa", 2, 24), ("eager", 1, 24), ("sdpa", 6, 24), ("eager", 2, 96), ("sdpa", 2, 96), ("eager", 5, 17)],
)
def test_functions_of_tokens_meet_runs_at_other_sizes(attention: str, sequences: int, length: int) -> None:
    work = of_attention(attention)
    for way in Way:
        found = parts(built("Llama", "meta", torch.bfloat16, attention), tokens("meta", sequences, length), way.value)
        for layer, real in zip(work.repeated, found[1:-1], strict=True):
            curve, at = layer.curves[way], (sequences * length, length)
            assert curve.kept.of(*at) == pytest.approx(real.kept_bytes)
            assert layer.input_bytes.of(*at) == pytest.approx(real.input_bytes)
            # The first layer's input is held by the caller as well: behind it, that counts besides.
            held = layer.input_bytes.of(*at) if layer is work.repeated[0] and way is Way.KEEP else 0
            assert max(m.of(*at) for m in curve.forward) - held == pytest.approx(max(real.forward), abs=4096)
            assert max(m.of(*at) for m in curve.backward) == pytest.approx(max(real.backward), abs=4096)


@pytest.mark.parametrize(
    ("kind", "more", "kinds"),
    [
        ("Llama", {}, 1),
        ("Qwen3Moe", {**EXPERTS, "num_experts": 64, "output_router_logits": True, "mlp_only_layers": [0, 1, 2]}, 2),
        ("Gemma3Text", WINDOWS, 2),
        ("DeepseekV3", LATENT, 2),
    ],
    ids=["llama", "dense and experts", "windows", "latent attention"],
)
def test_a_model_of_many_layers_is_what_a_run_of_all_of_them_holds(kind: str, more: dict[str, Any], kinds: int) -> None:
    model = built(kind, "meta", torch.bfloat16, "sdpa", num_hidden_layers=7, **more)
    work, whole = work_of(model), parts(model, tokens("meta"))
    curves = [layer.curves[Way.KEEP] for layer in work.layers if layer.curves]
    assert len(curves) == len(whole) == 9
    assert len({id(curve) for curve in curves[1:-1]}) == kinds
    for i, (curve, real) in enumerate(zip(curves, whole, strict=True)):
        assert curve.kept.of(48, 24) == pytest.approx(real.kept_bytes)
        held = real.input_bytes if i == 1 else 0  # by the caller as well
        assert max(m.of(48, 24) for m in curve.forward) - held == pytest.approx(max(real.forward))
        assert max(m.of(48, 24) for m in curve.backward) == pytest.approx(max(real.backward))
    assert [name for layer in work.layers for name in layer.gradients] == [n for p in whole for n in p.gradients]


def test_saved_parts_add_up_with_and_without_recomputation() -> None:
    for kind, more in (("Llama", {}), ("Qwen3", {}), ("Qwen3Moe", EXPERTS)):
        for layer in work_of(built(kind, "meta", torch.bfloat16, "sdpa", **more)).repeated:
            kept, rest = layer.curves[Way.KEEP].kept, layer.curves[Way.ELEMENTWISE].kept
            left = sum(part.bytes.of(48, 24) for part in layer.saved if not part.elementwise)
            assert layer.saved_bytes.of(48, 24) == pytest.approx(kept.of(48, 24), rel=0.01)
            assert left == pytest.approx(rest.of(48, 24), rel=0.01)
            assert all(part.bytes.of(48, 24) >= 0 for part in layer.saved)
            assert all(part.recompute_flops.of(48, 24) == 0 for part in layer.saved if part.elementwise)


def test_weights_are_complete_and_in_order() -> None:
    model = built("Llama", "meta", torch.bfloat16)
    for p in model.model.layers[1].parameters():
        p.requires_grad_(False)
    work = work_of(model)
    names = [layer.name for layer in work.layers]
    assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"]
    assert work.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert [layer.trained_weight_bytes == 0 for layer in work.layers] == [False, False, True, False, False, False]
    assert not work.layers[2].gradients
    made = [name for layer in work.layers for name in layer.gradients]
    assert sorted(made) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert [layer.repeated for layer in work.layers] == [False, True, True, True, False, False]


def test_buckets_are_those_of_the_optimizer() -> None:
    model = built("Llama", "cpu")
    assert inventory_of(model) == hostward.AdamW(model).inventory
    assert work_of(model).inventory == inventory_of(model)


def test_the_model_is_left_as_it_was() -> None:
    model = built("Llama", "cpu")
    before = {name: (p.data_ptr(), p.grad) for name, p in model.named_parameters()}
    modules = list(model.modules())
    work_of(model)
    assert {name: (p.data_ptr(), p.grad) for name, p in model.named_parameters()} == before
    assert list(model.modules()) == modules
    assert model.config.num_hidden_layers == 3
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in modules)


def test_a_tied_weight_has_one_gradient_and_what_waits_for_the_other_half_of_it_counts() -> None:
    tied, plain = (work_of(built("Llama", "meta", tie_word_embeddings=tie)) for tie in (True, False))
    assert tied.layers[0].gradients == ("model.embed_tokens.weight",)
    assert tied.layers[-1].gradients == ("model.norm.weight",)
    for a, b in zip(tied.repeated, plain.repeated, strict=True):
        most = [max(m.of(48, 24) for m in layer.curves[Way.KEEP].backward) for layer in (a, b)]
        assert most[0] - most[1] == pytest.approx(tied.layers[0].weight_bytes)


def test_a_recipe_is_a_workload_without_a_weight() -> None:
    config = load("qwen3_moe_tiny_pretrain_config")
    work = recipe_workload(config)
    assert (work.sequence_tokens, work.microbatch_sequences, work.microbatches) == (256, 4, 1)
    assert len(work.repeated) == config.model.num_layers
    assert work.weight_bytes == 4 * work.inventory.numel
    assert work.weight_dtype is Dtype.FP32
    # The whole model of 30 G parameters, for the price of its shapes.
    big = recipe_workload(load("qwen3_30b_a3b_pretrain_config"))
    assert big.inventory.numel == 30_532_122_624
    assert big.microbatches == 8


def test_a_configuration_file_is_a_workload(tmp_path: Path) -> None:
    built("Llama", "meta").config.save_pretrained(tmp_path)
    work = config_workload(read_model_file(tmp_path), sequence_tokens=24, microbatch_sequences=2)
    assert work.name == "llama"
    assert work.weight_dtype is Dtype.BF16
    assert work.layers == work_of(built("Llama", "meta", torch.bfloat16, "sdpa")).layers
    assert config_workload(read_model_file(tmp_path / "config.json"), sequence_tokens=8).sequence_tokens == 8


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"model_type": "none such"}),
        '{"model_type": "llama", "model_type": "llama"}',
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match="does not describe a"):
        config_workload(read_model_file(file), sequence_tokens=8)


@pytest.mark.parametrize("text", ["[]", "{}", "null"])
def test_a_configuration_without_a_model_type_is_told_in_words(tmp_path: Path, text: str) -> None:
    """Seen red: "'NoneType' object is not subscriptable"."""
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match="why: it is not a JSON object with a model_type"):
        config_workload(read_model_file(file), sequence_tokens=8)


LLAMA = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"hidden_size": "8"}, "expected int, got str"),
        ({"hidden_size": 7}, "not a multiple of the number of attention heads"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"vocab_size": 10**30}, "vocab_size is a number of 31 digits"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"head_dim": -4}, "head_dim is -4"),
        ({"num_key_value_heads": 3}, "num_attention_heads is .*, and num_key_value_heads is 3"),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok is -1"),
        ({"pad_token_id": 10**6}, "Padding_idx must be within num_embeddings"),
        ({"rope_theta": "x"}, "TypeError"),
        ({"rope_theta": math.nan}, "NaN is no number"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        (
            {"model_type": "qwen3_moe", "num_key_value_heads": 2, "moe_intermediate_size": 0},
            "moe_intermediate_size is 0",
        ),
        ({"attention_dropout": 5}, "attention_dropout is 5"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok is 3, and num_local_experts is 2",
        ),
        ({"num_hidden_layers": 1}, "fix: correct .*config.json: a plan takes two layers or more"),
        ({"attention_dropout": None}, "fix: correct .*config.json: a plan takes"),
    ],
)
def test_sizes_that_no_model_has_are_told_by_name(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    """Seen red: errors of transformers and torch with their tracebacks, hours for a million layers or a billion
    experts, a plan for heads that cannot be divided into groups, for weights without elements and for a dropout of
    5, and fixes that are arguments in Python.
    """
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **LLAMA, **wrong}))
    with pytest.raises(ModelError, match=told) as caught:
        config_workload(read_model_file(file), sequence_tokens=8)
    assert caught.value.fix


@pytest.mark.parametrize(
    "content",
    [{"model_type": "gpt2", "n_layer": 10**6}, {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 10**6}}],
)
def test_sizes_by_other_names_are_bounded(tmp_path: Path, content: dict[str, Any]) -> None:
    """Seen red: a million layers were built, for hours."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000"):
        config_workload(read_model_file(file), sequence_tokens=8)


@pytest.mark.parametrize(
    "others",
    [
        {"num_experts": 1, "num_experts_per_tok": 2},
        {"num_experts": 4, "moe_intermediate_size": 0},
        {"dropout_seed": 42, "num_dropped": 3},
    ],
)
def test_names_that_a_model_does_not_have_say_nothing_of_it(tmp_path: Path, others: dict[str, int]) -> None:
    """Seen red: a dense model refused for what it would do with experts, and a seed for being no probability."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **LLAMA, **others}))
    assert config_workload(read_model_file(file), sequence_tokens=8).inventory.numel


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_experts_that_no_token_shares_may_be_none(tmp_path: Path) -> None:
    """Their weights have no elements, and a plan is made all the same."""
    content = (
        CONFIG_MAPPING["deepseek_v3"]().to_dict()
        | LLAMA
        | {"num_key_value_heads": 2, "n_shared_experts": 0, "first_k_dense_replace": 0}
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    work = config_workload(read_model_file(file), sequence_tokens=8)
    assert any(p.numel == 0 and "shared_experts" in p.name for p in work.inventory.parameters)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_a_call_returns_does_not_change_the_workload(tmp_path: Path, kind: str) -> None:
    """Seen red: an error over a tuple without last_hidden_state, and hidden states that no training keeps."""

    def workload(**returned: bool) -> Workload:
        given: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2, **returned}
        file = tmp_path / "config.json"
        if kind == "gemma3":
            given = {"text_config": given, "vision_config": {"num_hidden_layers": 1}}
        file.write_text(json.dumps({"model_type": kind, **given}))
        return config_workload(read_model_file(file), sequence_tokens=8)

    returned = {"return_dict": False, "output_hidden_states": True, "output_attentions": True}
    assert workload(**returned) == workload()


def test_a_misspelt_size_is_not_replaced_by_the_usual_one(tmp_path: Path) -> None:
    """Seen red: a plan of 32 layers, which transformers takes where nothing says how many."""
    given = {("num_hidden_layer" if name == "num_hidden_layers" else name): size for name, size in LLAMA.items()}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **given}))
    with pytest.raises(ModelError, match="a model of type llama has no num_hidden_layer\n") as caught:
        config_workload(read_model_file(file), sequence_tokens=8)
    assert caught.value.fix == "did you mean num_hidden_layers?"


@pytest.mark.parametrize("kind", ["xglm", "qwen3_5_moe_text", "qwen3_5_moe", "glm5_next"])
def test_names_like_those_of_other_models_are_no_misspelt_sizes(kind: str) -> None:
    """Seen red: moe_intermediate_size of a model without dense layers, attention_heads, and head_dim 0, refused."""
    content = CONFIG_MAPPING[kind]().to_dict()
    require_sizes(Path("config.json"), content)
    misspelt = content.get("text_config", content)
    misspelt.pop("model_type")
    require_sizes(Path("config.json"), {"model_type": kind, **content})
    misspelt["num_hidden_layer"] = misspelt.pop("num_hidden_layers", 2)
    with pytest.raises(ModelError, match=f"a model of type {kind} has no num_hidden_layer\n"):
        require_sizes(Path("config.json"), {"model_type": kind, **content})


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_tokens"):
        work_of(built("Llama", "meta"), length=0)
