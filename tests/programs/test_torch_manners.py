"""What code written for torch.optim.AdamW and torch's transforms does: parameters without names, torch's options,
keys of groups, compiled modules inside layers, functional transforms, broadcasts after a load.

Seen red with: the search for a module left out, one of several taken, the module found not used for hooks, wrappers
counted as other modules, groups without parameters refused, options of torch let through, keys not looked at, hooks
compiled, each refusal of a transform taken out, sums after a load left out, layer hooks that ask for `kwargs`.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.ao.quantization
import torch.autograd.forward_ad as forward_ad
from activation_cases import offloading
from optimizer_cases import Model, adamw, assert_equal, mlp, mlp_loss, set_gradients, snapshot
from torch.fx.experimental.proxy_tensor import make_fx

import hostward
from hostward.errors import ConfigError, HostwardError, ModelError, UnknownNameError

PLACES = (0.0, 0.5, 1.0)


def train(model: torch.nn.Module, optimizer: hostward.AdamW) -> dict[str, torch.Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()
    return snapshot(model, optimizer)


# ---------------------------------------------------------------- parameters without names

WAYS: dict[str, Callable[[torch.nn.Module], tuple[object, dict[str, Any]]]] = {
    "generator": lambda m: (m.parameters(), {}),
    "list": lambda m: (list(m.parameters()), {}),
    "with module": lambda m: (m.parameters(), {"module": m}),
    "group": lambda m: ([{"params": m.parameters()}], {}),
    "empty group": lambda m: ([{"params": list(m.parameters())}, {"params": [], "weight_decay": 0.0}], {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fraction", PLACES)
def test_parameters_are_named_by_the_module_that_holds_them(fraction: float, way: str) -> None:
    expected = train(*(lambda m: (m, adamw(m, offload_fraction=fraction)))(mlp(torch.bfloat16)))
    model = mlp(torch.bfloat16)
    params, options = WAYS[way](model)
    optimizer = adamw(params, offload_fraction=fraction, **options)
    assert_equal(train(model, optimizer), expected)


def test_groups_of_parameters_keep_their_settings() -> None:
    model = mlp()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = adamw([{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0}])
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["0.weight", "2.weight", "4.weight"],
        ["0.bias", "2.bias", "4.bias"],
    ]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0]
    optimizer = adamw({"params": p} for p in model.parameters())
    assert len(optimizer.param_groups) == 6


def test_the_module_that_is_found_is_used_as_one_that_is_given() -> None:
    """Its layers wait for their own weights, and a load of equal bits is known for one."""
    model = mlp(torch.bfloat16)
    optimizer = adamw(model.parameters(), offload_fraction=1.0)
    assert optimizer._forward_hooks is not None
    before = train(model, optimizer)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    assert_equal(before, snapshot(model, optimizer))


def test_names_are_those_of_the_outermost_module() -> None:
    whole = torch.nn.ModuleDict({"generator": mlp(), "critic": mlp(seed=1)})
    optimizer = adamw(whole["generator"].parameters())
    assert optimizer.param_groups[0]["param_names"][0] == "generator.0.weight"
    compiled = torch.compile(whole, backend="eager")
    again = torch.compile(whole, backend="eager")  # wrappers of one module are that module
    optimizer = adamw(whole["critic"].parameters())
    assert optimizer.param_groups[0]["param_names"][0] == "critic.0.weight"
    del compiled, again


def test_two_modules_that_hold_all_of_them_are_refused() -> None:
    model = mlp()
    others = [torch.nn.ModuleDict({"student": model}), torch.nn.ModuleList([model])]
    with pytest.raises(ModelError, match="parameters without names") as caught:
        adamw(model.parameters())
    assert "ModuleDict, ModuleList" in caught.value.why
    assert "module=model" in caught.value.fix
    optimizer = adamw(model.parameters(), module=model)
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    del others


def test_a_module_that_is_garbage_does_not_count() -> None:
    model = mlp()
    gone = torch.nn.ModuleDict({"model": model})
    gone.__dict__["me"] = gone
    kept = torch.nn.ModuleDict({"kept": model})
    gc.disable()
    try:
        del gone
        assert adamw(model.parameters()).param_groups[0]["param_names"][0] == "kept.0.weight"
    finally:
        gc.enable()
    del kept


NAMELESS: dict[str, tuple[Callable[[], Any], str]] = {
    "of no module": (lambda: adamw([torch.nn.Parameter(torch.zeros(3))]), "parameters without names"),
    "of another module": (lambda: adamw(mlp().parameters(), module=Model()), r"given Model\n.*those of another model"),
    "of two modules": (
        lambda: adamw([p for m in (mlp(), Model()) for p in m.parameters()]),
        "parameters without names",
    ),
    "a set": (lambda: adamw(set(mlp().parameters())), "parameters in a set"),
    "a set in a group": (lambda: adamw([{"params": set(mlp().parameters())}]), "parameters in a set"),
    "none": (lambda: adamw([]), "no parameters to optimize"),
    "no group has any": (lambda: adamw([{"params": []}, {"params": []}]), "no parameters to optimize"),
    "text": (lambda: adamw("model"), "cannot take parameters from str"),
    "numbers": (lambda: adamw([1, 2]), "parameters without names"),
}


@pytest.mark.parametrize("case", NAMELESS)
def test_parameters_that_no_module_names_are_refused(case: str) -> None:
    make, text = NAMELESS[case]
    with pytest.raises(ModelError, match=text):
        make()


def test_a_group_of_parameters_added_later() -> None:
    model = mlp()
    first, *rest = model.parameters()
    optimizer = adamw([first], module=model)
    optimizer.add_param_group({"params": rest, "lr": 0.5})
    assert optimizer.param_groups[1]["param_names"] == [n for n, _ in model.named_parameters()][1:]
    optimizer = adamw([("0.weight", first)])
    with pytest.raises(ModelError, match="parameters without names"):
        optimizer.add_param_group({"params": rest})
    assert len(optimizer.param_groups) == 1


# ---------------------------------------------------------------- options of torch.optim.AdamW

DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


@pytest.mark.parametrize("key", DEFAULTS)
def test_torchs_options_are_taken_at_their_defaults_only(key: str) -> None:
    for value in (DEFAULTS[key], False):
        adamw(Model(), **{key: value})
        adamw([{"params": list(Model().named_parameters()), key: value}])
    for value in (True, "yes", 1):
        for make in (
            lambda value=value: adamw(Model(), **{key: value}),
            lambda value=value: adamw([{"params": list(Model().named_parameters()), key: value}]),
        ):
            with pytest.raises(ConfigError, match=f"{key}={value!r} is not supported") as caught:
                make()
            assert caught.value.why
            assert caught.value.fix == f"leave {key} out"


def test_the_positional_arguments_are_torchs() -> None:
    model = mlp()
    settings = (3e-3, (0.8, 0.9), 1e-6, 0.2, False)
    mine = hostward.AdamW(model.parameters(), *settings, module=model).param_groups[0]
    theirs = torch.optim.AdamW(model.parameters(), *settings).param_groups[0]
    for key in ("lr", "betas", "eps", "weight_decay"):
        assert mine[key] == theirs[key]


def test_a_group_made_by_torch_is_taken() -> None:
    model = mlp()
    (group,) = torch.optim.AdamW(model.named_parameters(), lr=2e-3).param_groups
    named = list(zip(group.pop("param_names"), group.pop("params"), strict=True))
    assert adamw([{**group, "params": named}]).param_groups[0]["lr"] == 2e-3
    with pytest.raises(ConfigError, match="decoupled_weight_decay=False is not supported"):
        adamw([{**group, "params": named, "decoupled_weight_decay": False}])


def test_betas_are_two_numbers_or_two_tensors() -> None:
    """As in torch, which raises ValueError for one of each."""
    results = []
    for betas in ((0.5, 0.75), (torch.tensor(0.5), torch.tensor([0.75]))):
        model = Model()
        optimizer = adamw(model, betas=betas, offload_fraction=0.5)
        for step in range(2):
            set_gradients(model, step)
            optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["betas"] == [0.5, 0.75]
        results.append(snapshot(model, optimizer))
    assert_equal(*results)
    mixed = (0.5, torch.tensor(0.75))
    for make in (
        lambda: adamw(Model(), betas=mixed),
        lambda: adamw([{"params": list(Model().named_parameters()), "betas": mixed}]),
        lambda: torch.optim.AdamW(Model().parameters(), betas=mixed),
    ):
        with pytest.raises(ValueError, match="betas must be"):
            make()
    optimizer.param_groups[0]["betas"] = mixed
    with pytest.raises(ConfigError, match="betas must be two numbers or two tensors"):
        optimizer.step()


@pytest.mark.parametrize(
    ("key", "kind", "text"),
    [
        ("weight_deacy", UnknownNameError, "did you mean weight_decay"),
        ("beta", UnknownNameError, "did you mean betas"),
        ("max_grad_norm", ConfigError, "holds for all groups together"),
        ("offload_fraction", ConfigError, r"hostward\.AdamW\(groups, offload_fraction="),
    ],
)
def test_keys_of_groups_without_an_effect_are_refused(key: str, kind: type[HostwardError], text: str) -> None:
    model = mlp()
    optimizer = adamw(list(model.named_parameters())[:2])
    for make in (
        lambda: adamw([{"params": list(model.named_parameters()), key: 0.5}]),
        lambda: optimizer.add_param_group({"params": list(model.named_parameters())[2:], key: 0.5}),
    ):
        with pytest.raises(kind, match=text):
            make()


def test_keys_of_users_and_schedulers_are_kept() -> None:
    keys = {"label": "decay", "lr_scale": 0.5, "initial_lr": 1.0, "max_lr": 2.0, "base_momentum": 0.8, "swa_lr": 0.1}
    optimizer = adamw([{"params": list(Model().named_parameters()), **keys}])
    assert optimizer.state_dict()["param_groups"][0].items() >= keys.items()


def test_a_share_that_places_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The state is one bucket, or the share less than half of one."""
    levels = []
    for fraction in (0.0, 0.01, 1.0):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="hostward"):
            adamw(mlp(), offload_fraction=fraction)
        (record,) = (r for r in caplog.records if "optimizer state on the host" in r.getMessage())
        levels.append((record.levelname, "no state is offloaded" in record.getMessage()))
    assert levels == [("INFO", True), ("WARNING", True), ("INFO", False)]


@pytest.mark.parametrize("fraction", PLACES)
def test_a_broadcast_of_equal_bits_after_a_load_changes_nothing(
    fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    """DDP's constructor writes all weights. The low halves of the masters must not be lost by it."""

    def run(broadcast: bool) -> dict[str, torch.Tensor]:
        source = Model(torch.bfloat16)
        optimizer = adamw(source)
        set_gradients(source, 0)
        optimizer.step()
        model = Model(torch.bfloat16, seed=1)
        loaded = adamw(model, offload_fraction=fraction)
        model.load_state_dict(source.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
        if broadcast:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.clone())
        set_gradients(model, 1)
        loaded.step()
        return snapshot(model, loaded)

    with caplog.at_level(logging.INFO, logger="hostward"):
        assert_equal(run(True), run(False))
    assert [r for r in caplog.records if "taken anew" in r.getMessage()] == []


# ---------------------------------------------------------------- the compiler and functional transforms


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def backward(net: Net) -> dict[str, torch.Tensor]:
    net.zero_grad()
    net(batch()).square().sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def test_hooks_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """A compiled module of torch's own within a layer runs with the compiler looking at whatever Python it calls."""
    torch._dynamo.reset()
    net = Net()
    expected = backward(net)
    for layer in net.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.compile(backend="eager")
    torch._dynamo.utils.counters.clear()
    with offloading(net) as run, warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        for _ in range(2):
            assert_equal(backward(net), expected)
        assert run.report().offloaded_bytes > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert [r for r in caplog.records if r.name.startswith("torch")] == []


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], object]] = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.vmap(f)(x.unsqueeze(0)),
    "make_fx": lambda f, x: make_fx(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms_are_refused_and_leave_nothing_behind(name: str) -> None:
    net = Net()
    expected = backward(net)
    with offloading(net) as run:
        with pytest.raises(ModelError, match=r"layers\.0 cannot be offloaded here") as caught:
            TRANSFORMS[name](net, batch())
        assert "detach()" in caught.value.fix
        assert_equal(backward(net), expected)
        assert run.report().offloaded_bytes > 0


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_copy_is_that_of_the_plain_model() -> None:
    """torch's quantization puts other modules in place of layers, and registers the layers' hooks on these."""
    plain = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model = copy.deepcopy(plain)
    with hostward.attach(model, activations=hostward.Activations(num_layers=2, min_bytes=1), layers=list(model)):
        copied = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        expected = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)
        assert torch.equal(copied(batch()), expected(batch()))


def test_forward_mode_is_that_of_the_plain_model() -> None:
    """Tangents of what has left come back with it."""
    results = []
    plain = Net()
    net = copy.deepcopy(plain)
    with offloading(net) as run:
        for model in (plain, net):
            with forward_ad.dual_level():
                out = model(forward_ad.make_dual(batch(), torch.ones_like(batch())))
                grads = torch.autograd.grad((out**2).sum(), list(model.parameters()))
                results.append([part for t in (out, *grads) for part in forward_ad.unpack_dual(t)])
        assert run.report().offloaded_bytes > 0
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_parameters_that_no_step_can_change_are_refused() -> None:
    with torch.inference_mode():
        model = mlp()
    with pytest.raises(ModelError, match=r"'0\.weight' was made in torch\.inference_mode"):
        adamw(model)

    def inside(w: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ModelError, match="'w' is a tensor of a functional transform"):
            adamw([("w", w)])
        return w.sum()

    torch.func.grad(inside)(torch.zeros(3))
    torch.vmap(inside)(torch.zeros(2, 3))
    torch.func.jvp(inside, (torch.zeros(3),), (torch.ones(3),))
