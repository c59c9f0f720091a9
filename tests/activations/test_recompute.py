"""Parts of layers that run again in backward: the same gradients, bit for bit, with fewer bytes saved.

Seen red: a recomputation that reads the wrong input, a region that saves its output as well, random numbers that are
not kept, modules that stay wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from activation_cases import FEW, left_over, loss_of, same, trained, trained_alone, transformer

import hostward
from hostward.runtime.simulated.backend import Order, SimulatedBackend

ELEMENTWISE = ("layernorm", "mlp_act")
CASES = [
    ("Llama", ELEMENTWISE),
    ("Qwen3", ELEMENTWISE),
    ("Qwen3", ("layernorm", "mlp")),
    ("Qwen3", ("self_attn", "mlp_act")),
    ("Llama", ("mlp.*_proj", "self_attn.o_proj")),
    ("Qwen3Moe", ("layernorm", "moe_act")),
    ("Qwen3Moe", ("layernorm", "moe")),
    ("Qwen3Moe", ("mlp.experts",)),
]


def attached(model: torch.nn.Module, modules: Sequence[str], order: Order | None = None, **how: Any) -> Any:
    """Recomputation and offloading of what it leaves, on a simulated device."""
    backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
    activations = hostward.Activations(**{"min_bytes": 64, **how})
    return hostward.attach(model, activations=activations, recompute=modules, backend=backend)


def saved_bytes(forward: Callable[[], object], weights: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages that autograd holds for backward, without those of weights."""
    held: dict[int, torch.UntypedStorage] = {}
    known = {w.untyped_storage()._cdata for w in weights}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            held[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize(("name", "modules"), CASES, ids=str)
def test_gradients_keep_their_bits(name: str, modules: tuple[str, ...]) -> None:
    expected = trained_alone(name)
    model = transformer(name)
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    with hostward.attach(model, recompute=modules) as run:
        assert len(run.recomputed) >= 4
        assert same(trained(model), expected)
        assert run.report().recomputed_modules == len(run.recomputed)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == before[path].keys(), path
        assert not any(value is not before[path][key] for key, value in module.__dict__.items()), path
    assert same(trained(transformer(name)), expected)


@pytest.mark.parametrize(("name", "modules"), CASES, ids=str)
def test_what_remains_is_offloaded(name: str, modules: tuple[str, ...]) -> None:
    expected = trained_alone(name)
    for order in FEW:
        model = transformer(name)
        with attached(model, modules, order) as run:
            assert same(trained(model), expected), order
            report = run.report()
            assert left_over(run) == 0
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        assert report.on_demand_bytes == 0
        # What is recomputed is made in backward, natively: no visit sees it.
        assert "it is made in a recomputation" not in report.kept_bytes


def test_inputs_of_regions_leave_instead_of_what_they_would_save() -> None:
    found = []
    for modules in (None, ELEMENTWISE, ("self_attn", "mlp", "layernorm")):
        model = transformer("Llama")
        backend = SimulatedBackend(threads=1, order=Order(eager=True))
        with hostward.attach(
            model, activations=hostward.Activations(min_bytes=64), recompute=modules, backend=backend
        ) as run:
            loss_of(model, 0).backward()
            found.append(run.report().offloaded_bytes)
    assert found[0] > 1.5 * found[1] > 1.5 * found[2]
    # The inputs of both norms, of attention, which gets its own by keyword, and of the MLP; in three layers.
    assert found[2] == 3 * 4 * 2 * 64 * 2 * 24


@pytest.mark.parametrize(("ffn", "keeps", "elementwise"), [(704, 46, 28), (1024, 56, 33)])
def test_a_layer_saves_at_most_33_times_its_width(ffn: int, keeps: int, elementwise: int) -> None:
    """Bytes per token, of a Llama layer in bf16, in multiples of its width; as many key and value heads as queries."""
    hidden, tokens = 256, 64
    model = transformer(
        "Llama", hidden_size=hidden, intermediate_size=ffn, num_attention_heads=4, num_key_value_heads=4
    )
    layer: Any = model.model.layers[1]  # type: ignore[union-attr, index]
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(tokens)[None])  # type: ignore[union-attr, operator]

    def saved() -> float:
        given = [*model.parameters(), *rotary]
        return saved_bytes(lambda: layer(x, position_embeddings=rotary), given) / tokens / hidden

    kept = saved()
    found = {}
    for modules in (("layernorm",), ELEMENTWISE, ("layernorm", "mlp"), ("self_attn", "mlp", "layernorm")):
        with hostward.attach(model, recompute=modules):
            found[modules] = saved()
    assert keeps <= kept <= keeps + 1
    assert found["layernorm",] <= keeps - 7
    assert found[ELEMENTWISE] <= elementwise
    assert found["layernorm", "mlp"] < 17
    assert found["self_attn", "mlp", "layernorm"] <= 8
    assert saved() == kept


def test_the_first_layers_alone() -> None:
    model = transformer("Llama")
    with hostward.attach(model, recompute={"mlp_act": 3}) as run:
        assert run.recomputed == [f"model.layers.{i}.mlp" for i in range(3)]
        assert same(trained(model), trained(transformer("Llama")))
    with hostward.attach(model, recompute={"layernorm": 1, "mlp_act": None}) as run:
        norms = [f"model.layers.0.{name}_layernorm" for name in ("input", "post_attention")]
        assert sorted(run.recomputed) == sorted([*norms, *(f"model.layers.{i}.mlp" for i in range(4))])


def test_several_microbatches() -> None:
    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        losses = [loss_of(model, seed) for seed in range(3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(transformer("Qwen3"))
    for order in FEW:
        model = transformer("Qwen3")
        with attached(model, ELEMENTWISE, order):
            assert same(gradients(model), expected)


@pytest.mark.parametrize("offloaded", [False, True])
def test_retain_graph_and_double_backward(offloaded: bool) -> None:
    def found(model: torch.nn.Module) -> list[torch.Tensor]:
        weights = list(model.parameters())
        loss = loss_of(model, 0)
        grads: list[torch.Tensor] = []
        for _ in range(2):
            grads += torch.autograd.grad(loss, weights, retain_graph=True)
        first = torch.autograd.grad(loss_of(model, 1), weights, create_graph=True)
        norm = torch.stack([g.float().square().sum() for g in first]).sum()
        return [*grads, *first, *torch.autograd.grad(norm, weights, allow_unused=False)]

    def eager() -> torch.nn.Module:
        return transformer("Llama", attn_implementation="eager")  # sdpa has no second derivative on a CPU

    expected = found(eager())
    model = eager()
    with attached(model, ELEMENTWISE) if offloaded else hostward.attach(model, recompute=ELEMENTWISE):
        assert same(found(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_checkpointed_layers_it_does_nothing_and_says_so(
    reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def checkpointing() -> Any:
        model: Any = transformer("Llama")
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        model.model.layers[3].gradient_checkpointing = False
        return model

    expected = trained(checkpointing())
    model = checkpointing()
    calls = []
    with caplog.at_level("WARNING", logger="hostward"), attached(model, ELEMENTWISE):
        for layer in model.model.layers[:3]:
            layer.mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
        assert same(trained(model), expected)
    assert len(calls) == 3 * 2 * 3, "forward and one recomputation, in each layer and step"
    assert "has no effect in 3 of 4 layers" in caplog.text


def test_random_numbers_are_the_same_again() -> None:
    """Dropout in a module that is recomputed as a whole, and in the last projection of a gated MLP."""

    class Dropping(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.dropout(x, 0.5, training=self.training))

    def dropping() -> Any:
        model: Any = transformer("Llama", attention_dropout=0.3)
        for layer in model.model.layers:
            made = Dropping(96, 64, bias=False, dtype=torch.bfloat16)
            made.weight = layer.mlp.down_proj.weight
            layer.mlp.down_proj = made
        return model

    expected = trained(dropping())
    assert not same(expected, trained(transformer("Llama")))
    for modules in (("mlp_act", "self_attn"), ("mlp",), ELEMENTWISE):
        model = dropping()
        with attached(model, modules):
            assert same(trained(model), expected), modules


def test_autocast() -> None:
    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        model.float()
        found = []
        for seed in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                losses = [loss_of(model, seed), loss_of(model, seed + 5)]
            for loss in losses:
                loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    expected = gradients(transformer("Qwen3"))
    for modules in (ELEMENTWISE, ("self_attn", "mlp")):
        model = transformer("Qwen3")
        with hostward.attach(model, recompute=modules):
            assert same(gradients(model), expected), modules


def test_together_with_the_optimizer() -> None:
    def weights(modules: tuple[str, ...] | None) -> list[torch.Tensor]:
        model = transformer("Llama")
        optimizer = hostward.AdamW(
            model, lr=1e-2, max_grad_norm=1.0, offload_fraction=1.0, backend=SimulatedBackend(threads=1)
        )
        if modules is not None:
            hostward.attach(model, optimizer, recompute=modules, activations=hostward.Activations(min_bytes=64))
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        return [p.detach().clone() for p in model.parameters()]

    expected = weights(None)
    assert same(weights(ELEMENTWISE), expected)
    assert same(weights(("mlp", "self_attn")), expected)
