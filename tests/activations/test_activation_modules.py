"""Activations of single modules: what leaves is what they save, and gradients keep their bits.

Seen red: children of a module that is meant alone, a mark that a failed call leaves behind, a name that is none.
"""

from __future__ import annotations

import pytest
import torch
from activation_cases import FEW, NETWORKS, left_over, loss_of, offloading, same, trained, trained_alone, transformer

from hostward.activations.module_filter import MEGATRON_MODULES, marks_of
from hostward.errors import ConfigError

TOKENS = 2 * 24
HIDDEN, FFN = 64, 96


def leaving(model: torch.nn.Module, *modules: str, **options: int) -> int:
    """Bytes per token that leave of one layer in one forward."""
    with offloading(model, num_layers=1, modules=modules, **options) as run:
        loss_of(model, 0).backward()
        found = run.report()
    assert found.reloaded_bytes == found.offloaded_bytes
    assert found.offloaded_bytes % TOKENS == 0
    return found.offloaded_bytes // TOKENS


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("Qwen3", ("core_attn",)),
        ("Qwen3", ("mlp",)),
        ("Qwen3", ("attn_norm", "mlp_norm", "qkv_linear")),
        ("Qwen3Moe", ("expert_fc1", "moe_act")),
        ("Llama", ("self_attn.*_proj", "mlp.down_proj")),
        ("encoder", ("self_attn", "linear1")),
        ("convolutions", ("1",)),
    ],
)
def test_gradients_keep_their_bits(name: str, modules: tuple[str, ...]) -> None:
    expected = trained_alone(name)
    for order in FEW:
        model = NETWORKS[name]()
        with offloading(model, order, modules=modules) as run:
            assert same(trained(model), expected), order
            assert left_over(run) == 0
            report = run.report()
        assert report.offloaded_bytes == report.reloaded_bytes
        assert report.kept_bytes["its module stays"] > 0


def test_what_leaves_is_what_the_module_saves() -> None:
    """Bytes per token of a Llama layer in bf16; of what several modules save there is one copy."""
    assert leaving(transformer("Llama"), "mlp.down_proj") == 2 * FFN
    assert leaving(transformer("Llama"), "mlp.gate_proj", "mlp.up_proj") == 2 * HIDDEN
    assert leaving(transformer("Llama"), "mlp.act_fn") == 2 * FFN
    whole = leaving(transformer("Llama"), "mlp")
    assert whole == 2 * HIDDEN + 4 * 2 * FFN  # the input; gate, activation, up, and their product
    assert leaving(transformer("Llama"), "attn_proj", "core_attn") == leaving(transformer("Llama"), "core_attn")
    parts = [leaving(transformer("Llama"), name) for name in ("attn_norm", "qkv_linear", "core_attn")]
    together = leaving(transformer("Llama"), "attn_norm", "qkv_linear", "core_attn")
    assert 0 < together <= sum(parts)


def test_a_module_alone_is_without_its_children() -> None:
    model = transformer("Llama")
    alone, whole = leaving(model, "core_attn"), leaving(model, "self_attn")
    assert 0 < alone < whole


def test_tensors_of_few_elements_stay() -> None:
    assert leaving(transformer("Llama"), "mlp", min_elements=TOKENS * FFN) == 4 * 2 * FFN
    assert leaving(transformer("Llama"), "mlp", min_elements=TOKENS * FFN + 1) == 0


def test_a_fraction_of_modules_leaves_and_the_first_stay() -> None:
    """Of 3 offloaded layers with 2 modules, as many as Megatron: the first floor(6 x (1 - fraction)) stay."""
    layers = list(transformer("Llama").model.layers)  # type: ignore[union-attr, arg-type]

    def leaving_modules(fraction: float) -> list[list[str]]:
        marks = marks_of(layers, ("mlp", "input_layernorm"), 3, fraction)
        names = [{module: path for path, module in layer.named_modules()} for layer in layers]
        return [[names[i][m] for m, leaves in held.items() if leaves] for i, held in enumerate(marks)]

    both = ["mlp", "input_layernorm"]
    assert leaving_modules(1.0) == [both] * 4
    assert leaving_modules(0.5) == [[], ["input_layernorm"], both, both]
    assert leaving_modules(0.6) == [[], both, both, both]
    assert leaving_modules(0.0)[:3] == [[], [], []]
    # Megatron's names count in order of use, however they are given.
    marks = marks_of(layers, ("mlp_norm", "attn_norm"), 3, 0.8)
    assert list(marks[0]) == [layers[0].post_attention_layernorm]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7])
def test_gradients_keep_their_bits_at_every_fraction(fraction: float) -> None:
    expected = trained_alone("Qwen3")
    model = transformer("Qwen3")
    with offloading(model, FEW[1], modules=("core_attn", "mlp"), fraction=fraction) as run:
        assert same(trained(model), expected)
        assert (run.report().offloaded_bytes > 0) is (fraction > 0)


@pytest.mark.parametrize(("fraction", "modules"), [(-0.1, ("mlp",)), (1.1, ("mlp",)), (0.5, ())])
def test_fractions_that_are_none_are_refused(fraction: float, modules: tuple[str, ...]) -> None:
    with (
        pytest.raises(ConfigError, match=f"fraction={fraction}"),
        offloading(transformer("Llama"), modules=modules, fraction=fraction),
    ):
        pass


def test_a_module_that_fails_leaves_no_mark() -> None:
    model = transformer("Llama")
    expected = trained_alone("Llama")

    def fail(*_: object) -> None:
        raise ValueError("fails")

    with offloading(model, modules=("mlp.gate_proj",)) as run:
        handle = model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="fails"):
            loss_of(model, 0)
        handle.remove()
        assert run._layer_calls._stack.marks == []
        assert same(trained(model), expected)
        # The failed forward has saved nothing in that module.
        assert run.report().offloaded_bytes == 3 * 3 * TOKENS * 2 * HIDDEN


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (("mlp.gate",), r"no layer has a module 'mlp.gate'[\s\S]*did you mean mlp.gate_proj"),
        (("core_attention",), r"no layer has a module 'core_attention'[\s\S]*core_attn"),
        (("expert_fc1",), "no layer has a module 'expert_fc1'"),
    ],
)
def test_unknown_modules_are_refused_with_a_suggestion(modules: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text), offloading(transformer("Llama"), modules=modules):
        pass


def test_every_megatron_name_has_a_module_in_some_model() -> None:
    for name in MEGATRON_MODULES:
        model = transformer("Qwen3Moe")
        with offloading(model, modules=(name,)) as run:
            loss_of(model, 0).backward()
        assert run.report().offloaded_bytes > 0 or name == "moe_act", name


def test_a_forward_that_offloads_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = transformer("Llama")
    with caplog.at_level("WARNING", logger="hostward"), offloading(model, num_layers=1, min_bytes=1 << 30):
        for _ in range(3):
            loss_of(model, 0).backward()
    told = [record.getMessage() for record in caplog.records if "has offloaded nothing" in record.getMessage()]
    assert len(told) == 1
    assert "it is small" in told[0]
    assert "small: below 1,073,741,824 bytes" in told[0]
