"""Models: exact sizes, reproducible weights, losses, local folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import masking_utils

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.errors import ConfigError, ModelError
from hostward.trainer.models import MASKLESS, build_model, meta_model, named_shapes, parameter_count, training_loss

SMALL = (
    "model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=96 model.num_attention_heads=4 "
    "model.num_query_groups=2 model.kv_channels=16 model.vocab_size=320 model.seq_length=32 model.params_dtype=fp32"
)
EXPERTS = "model.num_moe_experts=4 model.moe_router_topk=2 model.moe_ffn_hidden_size=32"
RECIPES = {
    "qwen3_moe": ("qwen3_30b_a3b_pretrain_config", f"{SMALL} {EXPERTS}"),
    "qwen3": ("qwen3_8b_pretrain_config", SMALL),
    "llama": ("llama32_1b_pretrain_config", SMALL),
}


def small(architecture: str, words: str = "") -> Config:
    recipe, sizes = RECIPES[architecture]
    return apply_overrides(recipes.load(recipe), [*sizes.split(), *words.split()])


def build(config: Config, *, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.nn.Module:
    return build_model(config, vocab_size=None, device="cpu", dtype=dtype, seed=seed)


def tokens(count: int = 2, length: int = 33) -> torch.Tensor:
    return torch.randint(0, 320, (count, length), generator=torch.Generator().manual_seed(0))


def bits_equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize(
    ("recipe", "count"),
    [
        ("qwen3_30b_a3b_pretrain_config", 30_532_122_624),
        ("qwen3_8b_pretrain_config", 8_190_735_360),
        ("llama32_1b_pretrain_config", 1_235_814_400),
    ],
)
def test_parameter_counts_are_the_published_ones(recipe: str, count: int) -> None:
    config = recipes.load(recipe)
    assert parameter_count(config, vocab_size=None) == count


def test_qwen3_30b_count_by_arithmetic() -> None:
    attention = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048 + 2 * 128
    experts = 128 * 3 * 2048 * 768 + 128 * 2048
    layer = attention + experts + 2 * 2048
    assert 48 * layer + 2 * 151936 * 2048 + 2048 == 30_532_122_624


@pytest.mark.parametrize("architecture", RECIPES)
def test_shrunk_recipe_builds_and_learns(architecture: str) -> None:
    config = small(architecture)
    model = build(config)
    assert parameter_count(config, vocab_size=None) == sum(p.numel() for p in model.parameters())
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == named_shapes(config, vocab_size=None)
    assert model.training
    assert model.config.use_cache is False
    batch = tokens()
    losses = []
    for _ in range(3):
        loss = training_loss(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    assert losses[2] < losses[1] < losses[0]


def test_published_30b_shape_runs_on_a_cpu_when_shrunk() -> None:
    words = "model.num_layers=1 model.hidden_size=32 model.seq_length=16 model.vocab_size=320 model.params_dtype=fp32"
    config = apply_overrides(recipes.load("qwen3_30b_a3b_pretrain_config"), words.split())
    model = build(config)
    batch = tokens(1, 17)
    training_loss(model, batch[:, :-1], batch[:, 1:]).backward()
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.shape == (128, 2 * 768, 32)


def test_weights_depend_on_the_seed_alone() -> None:
    config = small("qwen3_moe")
    first = build(config)
    torch.manual_seed(99)
    offloaded = small("qwen3_moe", "optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=0.5")
    assert bits_equal(first, build(offloaded))
    assert not bits_equal(first, build(config, seed=2))


def test_building_leaves_the_callers_generators_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    build(small("qwen3"))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_dtype_and_the_rotary_table_stays_fp32(dtype: torch.dtype) -> None:
    model = build(small("qwen3_moe"), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32


def test_initial_weights_have_the_declared_deviation() -> None:
    model = build(small("qwen3", "model.init_method_std=0.01"))
    weight = model.model.embed_tokens.weight
    assert weight.std().item() == pytest.approx(0.01, rel=0.03)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Without deterministic algorithms the weight gradients of batched_mm differ between two runs on a CPU.
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_implementations_agree_and_repeat_their_bits(implementation: str) -> None:
    batch = tokens()
    reference = training_loss(build(small("qwen3_moe")), batch[:, :-1], batch[:, 1:])
    config = small("qwen3_moe", f"model.experts_implementation={implementation}")
    gradients = []
    for _ in range(2):
        model = build(config)
        assert model.config._experts_implementation == implementation
        loss = training_loss(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(("attention", "name"), [("sdpa", MASKLESS), ("eager", "eager")])
def test_attention_implementation_is_the_one_asked_for(attention: str, name: str) -> None:
    model = build(small("qwen3", f"model.attn_implementation={attention}"))
    assert model.config._attn_implementation == name


def test_loss_is_the_cross_entropy_of_the_next_token() -> None:
    model = build(small("qwen3"))
    batch = tokens()
    logits = model(input_ids=batch[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.float().reshape(-1, 320), batch[:, 1:].reshape(-1))
    assert training_loss(model, batch[:, :-1], batch[:, 1:]).item() == pytest.approx(expected.item(), rel=1e-6)


def test_auxiliary_loss_follows_its_coefficient() -> None:
    batch = tokens()
    losses = [
        training_loss(build(small("qwen3_moe", f"model.moe_aux_loss_coeff={c}")), batch[:, :-1], batch[:, 1:]).item()
        for c in (0, 0.5, 1.0)
    ]
    # Balanced routing gives an auxiliary loss of top-k = 2, and nothing gives less.
    assert losses[1] - losses[0] >= 0.99
    assert losses[2] - losses[0] == pytest.approx(2 * (losses[1] - losses[0]), rel=1e-5)


def test_router_weights_of_a_token_sum_to_one() -> None:
    model = build(small("qwen3_moe"))
    _, weights, chosen = model.model.layers[0].mlp.gate(torch.randn(8, 64))
    assert chosen.shape == (8, 2)
    assert torch.allclose(weights.sum(-1), torch.ones(8))


def test_tied_embeddings_are_one_parameter() -> None:
    model = build(small("llama"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = build(small("llama", "model.share_embeddings_and_output_weights=false"))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_llama_frequency_scaling_is_the_published_one() -> None:
    model = build(small("llama", "model.kv_channels=64"))
    plain = build(small("llama", "model.kv_channels=64 model.rope_scaling=false model.rope_scaling_factor=8"))
    scaled, base = model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq
    assert model.config.rope_parameters["factor"] == 32.0
    assert torch.equal(scaled[0], base[0])
    assert torch.equal(scaled[-1], base[-1] / 32)


def test_vocabulary_comes_from_the_caller_or_is_an_error() -> None:
    config = small("qwen3", "model.vocab_size=null")
    model = build_model(config, vocab_size=257, device="cpu", dtype=torch.float32, seed=1)
    assert model.model.embed_tokens.weight.shape == (257, 64)
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert caught.value.what == "the vocabulary size is unknown"
    assert caught.value.fix == "set model.vocab_size"


def pretrained(folder: Path, words: str = "") -> Config:
    words = f"model.hf_model_path={folder} model.architecture=llama {words}"
    return apply_overrides(recipes.load("qwen3_600m_sft_config"), words.split())


def test_pretrained_folder_gives_its_weights_and_sizes(tmp_path: Path) -> None:
    original = build(small("llama"))
    original.save_pretrained(tmp_path)
    config = pretrained(tmp_path)
    assert bits_equal(build(config, seed=7), original)
    assert parameter_count(config, vocab_size=None) == sum(p.numel() for p in original.parameters())
    half = build(config, dtype=torch.bfloat16)
    assert torch.equal(half.model.norm.weight, original.model.norm.weight.bfloat16())
    assert half.training


def test_pretrained_experts_take_the_implementation(tmp_path: Path) -> None:
    original = build(small("qwen3_moe"))
    original.save_pretrained(tmp_path)
    words = "model.architecture=qwen3_moe model.experts_implementation=eager model.moe_aux_loss_coeff=0.01"
    model = build(pretrained(tmp_path, words))
    assert bits_equal(model, original)
    assert model.config._experts_implementation == "eager"
    assert model.config.output_router_logits is True


def test_layers_that_attend_within_windows_keep_their_mask(tmp_path: Path) -> None:
    build(small("qwen3")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    kinds = ["full_attention", "sliding_attention"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": kinds, "sliding_window": 8}))
    config = pretrained(tmp_path, "model.architecture=qwen3")
    assert build(config).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("architecture", RECIPES)
def test_a_forward_asks_the_device_for_no_mask(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the bits of one that asks."""

    def trained(model: torch.nn.Module) -> list[torch.Tensor]:
        ids = tokens()
        loss = training_loss(model, ids[:, :-1], ids[:, 1:])
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    asking: Any = build(small(architecture))
    asking.set_attn_implementation("sdpa")
    asked, find = [], masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda x: asked.append(1) or find(x))
    expected = trained(asking)
    assert asked
    asked.clear()
    found = trained(build(small(architecture)))
    assert not asked
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_pretrained_folder_of_another_architecture(tmp_path: Path) -> None:
    build(small("llama")).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        build(pretrained(tmp_path, "model.architecture=qwen3"))
    assert caught.value.what == f"model.hf_model_path={tmp_path} holds a model of type 'llama', not 'qwen3'"
    assert caught.value.fix == "set model.architecture=llama, or name another folder"


def test_pretrained_folder_that_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing is not a pretrained folder\n  why: there is no such folder here"):
        build(pretrained(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="is not a pretrained folder"):
        build(pretrained(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": "64"}, "expected int, got str"),
        ({"head_dim": -4}, "head_dim is -4"),
    ],
)
def test_pretrained_folder_with_sizes_that_no_model_has(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    """Seen red: errors of transformers and torch, with their tracebacks."""
    build(small("llama")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    with pytest.raises(ModelError, match=told):
        meta_model(pretrained(tmp_path), None, torch.float32)


def drop_one_weight(file: Path) -> None:
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (Path.unlink, "model.safetensors"),
        (lambda file: file.write_bytes(file.read_bytes()[:1000]), "header"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1000]), ""),
        (drop_one_weight, "1 weights are missing, model.norm.weight among them"),
    ],
    ids=["missing", "no-header", "truncated", "one-weight-short"],
)
def test_pretrained_weights_that_cannot_be_read(tmp_path: Path, damage: Callable[[Path], object], why: str) -> None:
    build(small("llama")).save_pretrained(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    damage(weights)
    with pytest.raises(ModelError) as caught:
        build(pretrained(tmp_path))
    assert caught.value.what == f"the weights in model.hf_model_path={tmp_path} cannot be loaded"
    assert why in caught.value.why
    assert "save_pretrained" in caught.value.fix
