"""Regions where something else happens: no gradients, failures, copies, compilers, names that are none.

Seen red: a checkpoint without gradients, a copy that shares its owner's region, weights that change or are replaced
between forward and backward unnoticed, a stand-in that is not compared.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
from activation_cases import NETWORKS, Encoder, loss_of, same, trained, trained_alone, transformer
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.activations.recompute import Region, require_gated
from hostward.errors import ConfigError, ModelError

ELEMENTWISE = ("layernorm", "mlp_act")


def attach(model: torch.nn.Module, *modules: str, **options: Any) -> hostward.Attachment:
    return hostward.attach(model, recompute=modules or ELEMENTWISE, **options)


def regions(model: torch.nn.Module) -> list[Region]:
    return [v for m in model.modules() for v in m.__dict__.values() if isinstance(v, Region)]


def test_without_gradients_there_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer("Llama").eval()
    with torch.no_grad():
        expected = loss_of(model, 0)
    with attach(model):
        monkeypatch.setattr("hostward.activations.recompute.checkpoint", None)
        with torch.no_grad():
            assert torch.equal(loss_of(model, 0), expected)
        with torch.inference_mode():
            assert torch.equal(loss_of(model, 0), expected)
        with pytest.raises(TypeError):
            loss_of(model, 0)


def test_evaluation_between_forward_and_backward() -> None:
    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        loss = loss_of(model, 0)
        model.eval()
        with torch.no_grad():
            loss_of(model, 1)
        model.train()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(transformer("Qwen3"))
    model = transformer("Qwen3")
    with attach(model):
        assert same(gradients(model), expected)


@pytest.mark.parametrize("inner", ["mlp.act_fn", "mlp.down_proj", "input_layernorm", "self_attn.o_proj"])
def test_a_forward_that_fails(inner: str) -> None:
    model = transformer("Llama")
    expected = trained_alone("Llama")

    def fail(*_: object) -> None:
        raise ValueError("fails")

    with attach(model, activations=hostward.Activations(min_bytes=64)) as run:
        handle = model.get_submodule(f"model.layers.1.{inner}").register_forward_hook(fail)
        with pytest.raises(ValueError, match="fails"):
            loss_of(model, 0)
        handle.remove()
        assert same(trained(model), expected)
        assert run._arena.blocks_in_use == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_recomputation_that_fails_leaves_nothing_behind() -> None:
    model = transformer("Llama")
    expected = trained_alone("Llama")
    with attach(model):
        loss = loss_of(model, 0)

        def fail(*_: object) -> None:
            raise ValueError("fails")

        handle = model.get_submodule("model.layers.1.mlp.act_fn").register_forward_hook(fail)
        with pytest.raises(ValueError, match="fails"):
            loss.backward()
        handle.remove()
        assert same(trained(model), expected)


def test_a_graph_that_outlives_the_attachment() -> None:
    expected = transformer("Llama")
    loss_of(expected, 0).backward()
    model = transformer("Llama")
    with attach(model):
        loss = loss_of(model, 0)
    loss.backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("inner", ["mlp.down_proj", "input_layernorm", "self_attn.q_proj"])
def test_a_weight_that_changes_before_backward_is_noticed(inner: str) -> None:
    model = transformer("Llama")
    with attach(model, *ELEMENTWISE, "self_attn"):
        loss = loss_of(model, 0)
        with torch.no_grad():
            model.get_submodule(f"model.layers.2.{inner}").weight.add_(1)  # type: ignore[operator, union-attr]
        with pytest.raises(ModelError, match="a weight was modified"):
            loss.backward()


@pytest.mark.parametrize("inner", ["mlp_act", "layernorm", "self_attn"])
@pytest.mark.parametrize("way", ["functional_call", "data"])
def test_a_weight_that_is_replaced_before_backward_is_noticed(inner: str, way: str) -> None:
    """Others of as many writes: forward ran with weights that are gone, or backward finds others."""
    model = transformer("Llama")
    others = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    with attach(model, inner):
        if way == "functional_call":
            assert all(p._version == 0 for p in model.parameters())
            others["lm_head.weight"].requires_grad_()
            others["model.embed_tokens.weight"].requires_grad_()
            ids = torch.arange(8).view(1, 8)
            loss = torch.func.functional_call(model, others, (), {"input_ids": ids, "labels": ids}).loss
        else:
            loss = loss_of(model, 0)
            for name, p in model.named_parameters():
                p.data = others[name]
        with pytest.raises(ModelError, match="was replaced between forward and backward"):
            loss.backward()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_plain_models(way: str) -> None:
    model = transformer("Qwen3")
    expected = trained_alone("Qwen3")
    with attach(model):
        count = len(regions(model))
        if way == "deepcopy":
            other: Any = copy.deepcopy(model)
        elif way == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        assert regions(other) == []
        assert len(regions(model)) == count > 0
        for module in other.modules():
            bound = module.__dict__.get("forward")
            assert bound is None or bound.__self__ is module
        assert list(other.state_dict()) == list(model.state_dict())
        with attach(other):  # and it can be attached itself
            assert same(trained(other), expected)
        assert same(trained(model), expected)


def test_a_wrapper_that_came_later_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = transformer("Llama")
    run = attach(model, "mlp_act")
    mlp: Any = model.get_submodule("model.layers.0.mlp")
    inner = mlp.forward
    mlp.forward = lambda x: inner(x)
    run.detach()
    assert "has been wrapped since attach()" in caplog.text
    assert mlp.forward is not inner
    assert same(trained(model), trained(transformer("Llama")))


def test_a_replaced_forward_is_refused_and_all_is_undone() -> None:
    model = transformer("Llama")
    mlp: Any = model.get_submodule("model.layers.2.mlp")
    mlp.forward = lambda x: x
    with pytest.raises(ModelError, match=r"the forward of a LlamaMLP has been replaced on the instance"):
        attach(model)
    assert regions(model) == []


def test_recomputing_twice_is_refused() -> None:
    model = transformer("Llama")
    with attach(model):
        count = len(regions(model))
        with pytest.raises(ModelError, match="a LlamaMLP is recomputed already"):
            attach(model, "mlp_act")
        assert len(regions(model)) == count


def test_a_failing_attach_takes_regions_off_again() -> None:
    model = transformer("Llama")
    with pytest.raises(ConfigError, match="no layer has a module 'zebra'"):
        attach(model, activations=hostward.Activations(modules=("zebra",)))
    assert regions(model) == []


def test_compiled_layers_are_refused() -> None:
    model = transformer("Llama")
    model.get_submodule("model.layers.1").compile(backend="eager")
    with pytest.raises(ModelError, match=r"layer model.layers.1 is compiled"):
        attach(model)
    assert regions(model) == []


@functools.cache
def compiled_alone(what: str) -> list[torch.Tensor]:
    """Gradients of a compiled model, or of compiled layers, of which nothing is recomputed."""
    torch.compiler.reset()
    plain: Any = transformer("Llama")
    for module in [plain] if what == "model" else plain.model.layers:
        module.compile(backend="eager")
    return trained(plain, steps=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["layers", "model", "model, before"])
def test_what_is_compiled_later_breaks_its_graph_at_regions(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compiled_alone(what.partition(",")[0])
    torch.compiler.reset()
    model: Any = transformer("Llama")
    if what == "model, before":
        model.compile(backend="eager")
        loss_of(model, 0).backward()
    seen = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr("hostward.activations.recompute.checkpoint", counted)
    with attach(model) as run:
        if what == "model":
            model.compile(backend="eager")
        elif what == "layers":
            for layer in model.model.layers:
                layer.compile(backend="eager")
        assert same(trained(model, steps=2), expected)
        assert len(seen) == 2 * len(run.recomputed)
    torch.compiler.reset()


def test_a_cache_within_a_recomputed_module_is_refused() -> None:
    model: Any = transformer("Llama")
    ids = torch.randint(0, 64, (1, 8))
    with attach(model, "self_attn"), pytest.raises(ModelError, match="a cache of keys and values"):
        model(input_ids=ids, use_cache=True)
    with attach(model):
        model(input_ids=ids, use_cache=True).logits.float().sum().backward()


class Swapped(torch.nn.Module):
    """The parts of a gated MLP, put together in another way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(8, 8) for _ in range(3))
        self.act_fn = torch.nn.SiLU()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "swapped":
            out: Any = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        elif self.kind == "rounded":
            out = self.down_proj(self.act_fn(self.gate_proj(x).double()).float() * self.up_proj(x))
        elif self.kind == "two inputs":
            out = x, self.down_proj(x)
        else:
            out = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


def test_gated_mlps_are_tried() -> None:
    plain, *others = (Swapped(kind) for kind in ("plain", "swapped", "rounded", "two inputs"))
    state = torch.get_rng_state()
    require_gated(plain)
    for other in others:
        with pytest.raises(ModelError, match="mlp_act cannot be recomputed in a Swapped"):
            require_gated(other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "modules", "error", "text"),
    [
        ("Llama", (), ConfigError, "recompute names no modules"),
        ("Llama", "mlp", ConfigError, "recompute='mlp' is a string"),
        ("Llama", ("core_attn",), ConfigError, "recompute of core_attn"),
        ("Llama", ("layernorms",), ConfigError, r"no layer has a module 'layernorms'[\s\S]*did you mean .*layernorm"),
        ("Llama", ("moe",), ConfigError, "no layer has a module 'moe'"),
        ("Llama", ("moe_act",), ConfigError, "no layer has a module 'moe_act'"),
        ("Llama", ("mlp", "mlp_act"), ConfigError, "mlp_act is inside of what is recomputed as a whole"),
        ("Llama", ("mlp_act", "mlp"), ConfigError, "mlp_act is inside of what is recomputed as a whole"),
        ("Qwen3Moe", ("moe", "moe_act"), ConfigError, "moe_act is inside of what is recomputed as a whole"),
        ("Qwen3Moe", ("mlp_act",), ModelError, "mlp_act cannot be recomputed in a Qwen3MoeSparseMoeBlock"),
        ("Qwen3Moe", ("mlp",), ConfigError, r"no layer has a module 'mlp'[\s\S]*moe"),
        ("encoder", ("layernorm",), ConfigError, "no layer has a module 'layernorm'"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(name: str, modules: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hostward.attach(NETWORKS[name](), recompute=modules)


def test_experts_one_by_one_have_no_activation_to_recompute() -> None:
    model = transformer("Qwen3Moe", experts_implementation="eager")
    with pytest.raises(ConfigError, match="moe_act in recompute_modules is only supported with moe_grouped_gemm"):
        attach(model, "moe_act")


def test_numbers_of_layers() -> None:
    for count in (0, 5):
        with pytest.raises(ConfigError, match=f"recompute of layernorm in {count} of 4 layers"):
            hostward.attach(transformer("Llama"), recompute=dict.fromkeys(ELEMENTWISE, count))


def test_offloading_of_what_is_inside_of_recomputed_modules_is_refused() -> None:
    def both(recompute: Any, *modules: str) -> None:
        hostward.attach(
            transformer("Llama"), recompute=recompute, activations=hostward.Activations(modules=modules)
        ).detach()

    with pytest.raises(ConfigError, match=r"Cannot offload mlp\.act_fn while recomputing the entire module"):
        both(("mlp",), "core_attn", "mlp.act_fn")
    with pytest.raises(ConfigError, match="Cannot offload qkv_linear while recomputing"):
        both(("self_attn",), "qkv_linear")
    both(("mlp",), "mlp", "core_attn")
    both({"mlp": 2}, "mlp.act_fn")


def test_paths_of_other_networks() -> None:
    """torch's own encoder layer, with dropout, recomputed by module."""
    expected = trained(Encoder())
    model = Encoder()
    with attach(model, "self_attn", "norm[12]", "linear1"):
        assert same(trained(model), expected)


def test_t44_in_a_capture_what_may_draw_random_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generators cannot be asked for their state there. Norms and gated activations draw nothing."""
    model = transformer("Llama")
    monkeypatch.setattr("hostward.activations.recompute._capturing", lambda _: True)
    with attach(model):
        loss_of(model, 0)
    with (
        attach(model, "mlp"),
        pytest.raises(ModelError, match="LlamaMLP that is recomputed inside the capture of a CUDA"),
    ):
        loss_of(model, 0)
