"""What a step allocates, found on the meta device, against what really runs on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tape_cases import EXPERTS, built, loss_of, parts, tokens
from torch.utils.checkpoint import checkpoint

from hostward.errors import ModelError
from hostward.model.layers import find_layers
from hostward.profiler.layer_profiler import run
from hostward.profiler.meta_tape import MetaTape

pytest.importorskip("transformers")


@pytest.mark.parametrize("way", ["keep", "recompute", "elementwise"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_meta_device_allocates_what_a_real_run_does_moment_by_moment(
    kind: str, dtype: torch.dtype, way: str
) -> None:
    found = parts(built(kind, "meta", dtype), tokens("meta"), way)
    real = parts(built(kind, "cpu", dtype), tokens("cpu"), way)
    for here, there in zip(found, real, strict=True):
        assert (here.forward, here.backward, here.made) == (there.forward, there.backward, there.made)
        assert (here.kept_bytes, here.input_bytes, here.saved) == (there.kept_bytes, there.input_bytes, there.saved)
        assert here.gradients == there.gradients


@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_a_run_on_the_tape_computes_what_a_run_without_does(way: str) -> None:
    model, ids = built("Llama", "cpu"), tokens("cpu")
    loss_of(model, ids).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    kept: list[torch.Tensor] = []
    model.model.norm.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))
    parts(model, ids, way)
    index = [name for name, _ in model.named_parameters()].index("model.norm.weight")
    assert torch.equal(kept[0], wanted[index])
    assert all(p.grad is None for p in model.parameters())


def real_saved(model: Any, ids: torch.Tensor) -> list[int]:
    """By layer, bytes of the storages that autograd saves in it, each once, weights and what it was given left out."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: list[dict[int, torch.UntypedStorage]] = []
    given: set[int] = set()

    def enter(_: object, args: Any, kwargs: Any) -> None:
        found.append({})
        pair = kwargs["position_embeddings"]
        given.update(t.untyped_storage().data_ptr() for t in pair)

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if found and storage.data_ptr() not in weights | given and inside[-1]:
            found[-1].setdefault(storage.data_ptr(), storage)
        return t

    inside = [False]
    for _, layer in find_layers(model):
        layer.register_forward_pre_hook(lambda *_: inside.append(True))
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(lambda *_: inside.append(False))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model, ids)
    assert loss.isfinite()
    return [sum(s.nbytes() for s in held.values()) for held in found]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_saved_bytes_are_those_of_hooks_on_a_real_run(attention: str, dtype: torch.dtype) -> None:
    found = parts(built("Llama", "meta", dtype, attention), tokens("meta"))
    wanted = real_saved(built("Llama", "cpu", dtype, attention), tokens("cpu"))
    assert [sum(part.saved.values()) for part in found[1:-1]] == wanted


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_save_as_much_however_tokens_are_spread(experts: str) -> None:
    def model(device: str) -> Any:
        made = built("Qwen3Moe", device, torch.bfloat16, **EXPERTS)
        made.config._experts_implementation = experts
        return made

    found = parts(model("meta"), tokens("meta", 2, 32))
    ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    wanted = real_saved(model("cpu"), ids)
    for part, nbytes in zip(found[1:-1], wanted, strict=True):
        assert sum(part.saved.values()) == pytest.approx(nbytes, rel=0.01)
        assert {"expert_fc1", "moe_act"} <= set(part.saved)


def test_what_parts_are_called() -> None:
    layer = parts(built("Llama", "meta", attention="sdpa"), tokens("meta"))[1]
    # The input of the output projection is the output of attention, which attention has saved before.
    assert list(layer.saved) == ["attn_norm", "qkv_linear", "core_attn", "mlp_norm", "mlp.gate_proj", "mlp_act"]
    assert layer.work["qkv_linear"].flops == 2 * 48 * 64 * (64 + 32 + 32)
    assert layer.work["mlp.down_proj"].flops == 2 * 48 * 160 * 64
    assert layer.work["attn_norm"].flops == 0 < layer.work["attn_norm"].traffic_bytes


def test_attention_counts_half_of_a_causal_mask() -> None:
    layer = parts(built("Llama", "meta", attention="sdpa"), tokens("meta"))[1]
    assert layer.work["core_attn"].flops == 2 * (2 * 4 * 24 * 24 * 16) * 2 / 2


def test_a_model_that_branches_on_values_is_refused() -> None:
    class Choosy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = ids[..., None].expand(*ids.shape, 4).float()
            for layer in self.layers:
                x = layer(x) * int(x.sum().long())
            return x.sum()

    with torch.device("meta"):
        model = Choosy()
    with pytest.raises(ModelError, match="cannot be predicted without running it"):
        run(model, find_layers(model), tokens("meta"), lambda m, ids: m(ids))


def test_layers_that_are_called_twice_are_refused() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = ids[..., None].expand(*ids.shape, 4).float()
            for layer in (*self.layers, *self.layers):
                x = checkpoint(layer, x, use_reentrant=False)
            return x.sum()

    with torch.device("meta"):
        model = Twice()
    with pytest.raises(ModelError, match="not called once each"):
        run(model, find_layers(model), tokens("meta"), lambda m, ids: m(ids))


def sum_of_branches(x: torch.Tensor, shared: bool) -> torch.Tensor:
    """A tensor that two operations read; `shared`: autograd hands the same gradient to both, as to a residual."""
    y = x * 1.0
    return (y + y * 3.0 if shared else y * 2.0 + y * 3.0).sum()


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_added_up_in_place_where_autograd_does(shared: bool) -> None:
    x = torch.ones(1024, requires_grad=True)
    loss = sum_of_branches(x, shared)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    names = [event.name for event in profile.events()]
    assert ("aten::add_" in names, "aten::add" in names) == (not shared, shared)

    x = torch.ones(1024, requires_grad=True, device="meta")
    tape = MetaTape(x.device, [x], lambda: None)
    with tape:
        loss = sum_of_branches(x, shared)
        before = len(tape.blocks)
        loss.backward()
    made = [block.nbytes for block in tape.blocks[before:] if block.nbytes > 4]
    # The gradient of each product, of the first one's input, and the sum where it is a tensor of its own.
    assert len(made) == 3
    assert x.grad is not None


def test_counts_of_experts_have_as_many_elements_as_there_are_experts() -> None:
    """Not every torch can count on the meta device."""
    chosen = torch.zeros(12, dtype=torch.int64, device="meta")
    with MetaTape(torch.device("meta"), [chosen], lambda: None):
        found = torch.bincount(chosen, minlength=5)
    assert found.shape == (5,)
