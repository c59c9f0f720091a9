"""Recipes: names, published sizes, and the learning rates they ask for."""

from __future__ import annotations

import math

import pytest

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config, OptimizerConfig, SchedulerConfig
from hostward.core.inventory import Dtype, Parameter, cut_buckets, layer_of
from hostward.errors import ConfigError, UnknownNameError
from hostward.trainer.lr_schedule import learning_rate
from hostward.trainer.models import named_shapes


def test_names() -> None:
    assert recipes.names() == [
        "qwen3_moe_tiny_pretrain_config",
        "qwen3_600m_sft_config",
        "llama32_1b_pretrain_config",
        "qwen3_8b_pretrain_config",
        "qwen3_30b_a3b_pretrain_config",
    ]


def test_each_load_is_fresh() -> None:
    first = recipes.load("qwen3_8b_pretrain_config")
    first.model.num_layers = 1
    assert recipes.load("qwen3_8b_pretrain_config").model.num_layers == 36


def test_t17_misspelt_recipe_proposes_the_right_one() -> None:
    with pytest.raises(UnknownNameError) as caught:
        recipes.load("qwen3_30b_a3b_pretrain")
    assert caught.value.what == "there is no recipe 'qwen3_30b_a3b_pretrain'"
    assert caught.value.fix == "did you mean qwen3_30b_a3b_pretrain_config?"
    with pytest.raises(UnknownNameError, match="the recipes are qwen3_moe_tiny_pretrain_config, "):
        recipes.load("zzz")


def test_qwen3_30b_a3b_has_the_published_values() -> None:
    config = recipes.load("qwen3_30b_a3b_pretrain_config")
    model, optimizer, scheduler = config.model, config.optimizer, config.scheduler
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (48, 2048, 6144, 151936)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (32, 4, 128)
    assert (model.num_moe_experts, model.moe_router_topk, model.moe_ffn_hidden_size) == (128, 8, 768)
    assert (model.rotary_base, model.layernorm_epsilon, model.seq_length, model.params_dtype) == (
        1e6,
        1e-6,
        4096,
        "bf16",
    )
    assert model.share_embeddings_and_output_weights is False
    assert (model.tensor_model_parallel_size, model.expert_model_parallel_size, model.cuda_graph_impl) == (1, 1, "none")
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay, optimizer.clip_grad) == (3e-4, 3e-5, 0.033, 1.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-8)
    assert optimizer.optimizer_cpu_offload is False
    assert (scheduler.lr_decay_style, scheduler.lr_warmup_iters, scheduler.lr_decay_iters) == ("cosine", 40, 100)
    assert config.rng.seed == 1234


def test_lr_decay_is_fixed_and_never_derived_from_train_iters() -> None:
    for name in recipes.names():
        config = recipes.load(name)
        shorter = apply_overrides(config, ["train.train_iters=20"])
        assert config.scheduler.lr_decay_iters is not None
        assert shorter.scheduler == config.scheduler


def test_tiny_recipe_gives_at_least_32_buckets() -> None:
    shapes = named_shapes(recipes.load("qwen3_moe_tiny_pretrain_config"), vocab_size=320)
    parameters = [Parameter(name, math.prod(shape), Dtype.FP32, layer_of(name)) for name, shape in shapes.items()]
    numel = sum(math.prod(shape) for shape in shapes.values())
    assert numel == 13_544_192
    assert len(cut_buckets(parameters)) >= 32


def schedule(
    style: str = "cosine", *, warmup: int = 10, decay: int | None = 110
) -> tuple[OptimizerConfig, SchedulerConfig]:
    config = Config()
    config.optimizer.lr, config.optimizer.min_lr = 1.0, 0.25
    config.scheduler.lr_decay_style = style
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = warmup, decay
    config.scheduler.lr_warmup_init = 0.5
    return config.optimizer, config.scheduler


@pytest.mark.parametrize(
    ("style", "iteration", "expected"),
    [
        ("cosine", 0, 0.5),
        ("cosine", 5, 0.75),
        ("cosine", 9, 0.95),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.625),
        ("cosine", 110, 0.25),
        ("cosine", 111, 0.25),
        ("cosine", 10_000, 0.25),
        ("linear", 35, 0.8125),
        ("linear", 85, 0.4375),
        ("constant", 10_000, 1.0),
        ("constant", 5, 0.75),
    ],
)
def test_learning_rate(style: str, iteration: int, expected: float) -> None:
    assert learning_rate(iteration, *schedule(style)) == pytest.approx(expected, rel=1e-15)


def test_learning_rate_without_warmup_starts_at_the_top() -> None:
    assert learning_rate(0, *schedule(warmup=0)) == 1.0


def test_learning_rate_never_rises_after_the_warmup() -> None:
    rates = [learning_rate(iteration, *schedule()) for iteration in range(10, 130)]
    assert rates == sorted(rates, reverse=True)


def test_decay_without_an_end_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.lr_decay_style=cosine needs scheduler.lr_decay_iters"):
        learning_rate(20, *schedule(decay=None))
    with pytest.raises(
        ConfigError, match=r"scheduler\.lr_decay_style='wsd' is unknown\n  fix: use cosine, linear or constant"
    ):
        learning_rate(20, *schedule("wsd"))
