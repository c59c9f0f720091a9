"""What else happens to offloaded weights: graphs used twice or never, errors, evaluation, copies, saving, loading.

Seen red: a state dict of weights without bytes (written as 0 bytes, without an error), copies of them, a view that a
graph holds while its memory goes, a weight written on the device and fetched again as it was; records of fences that
keep a dropped model; an evaluation in another thread that reads weights which training frees; two backwards at once,
with a crash of torch; another where shared memory is allocated again; a fence left down after a load, a part of a layer
called alone, a backward that failed or began within a layer (a crash, or a write through `.data` that was lost); a
layer that counts as there, half of its weights freed when Ctrl-C came; backward hooks that write through `.data`;
copies that a selective checkpoint counts.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from activation_cases import FEW, Encoder, loss_of, same
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from weight_cases import (
    ALL,
    ON_HOST,
    away,
    bytes_here,
    expected,
    frozen,
    gradients,
    layers_here,
    nbytes_here,
    network,
    train,
)

import hostward
from hostward.errors import ConfigError, HostwardError, ModelError, OrderingError
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

LATE = Order(late=frozenset({Lane.H2D, Lane.D2H}))


def layer(model: torch.nn.Module, number: int) -> Any:
    layers: Any = model.model.layers  # type: ignore[union-attr]
    return layers[number]


def embedding_gradient(model: torch.nn.Module) -> torch.Tensor:
    grad = model.get_input_embeddings().weight.grad  # type: ignore[operator]
    assert isinstance(grad, torch.Tensor)
    return grad.clone()


def test_retained_graphs_and_two_losses() -> None:
    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        first, second = loss_of(model, 0), loss_of(model, 1)
        first.backward(retain_graph=True)
        (first * 2.0).backward(retain_graph=True)
        found = [embedding_gradient(model)]
        (first + second).backward()
        return [*found, embedding_gradient(model)]

    whole = run(frozen())
    for order in FEW:
        model = frozen()
        with away(model, order):
            assert same(run(model), whole)


def test_forward_without_backward_leaves_nothing_behind() -> None:
    model = frozen()
    with away(model) as run:
        here = bytes_here(model)
        for seed in range(3):
            loss = loss_of(model, seed)
            del loss
        with torch.no_grad():
            loss_of(model, 0)
        with torch.inference_mode():
            loss_of(model, 0)
        report = run.report().weights
        assert report is not None
        assert bytes_here(model) == here + report.offloaded_bytes // 3
        assert report.held_bytes == 0


def test_evaluation_and_generation() -> None:
    def run(model: Any) -> list[torch.Tensor]:
        model.eval()
        ids = torch.arange(8).view(1, 8)
        made = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)
        with torch.no_grad():
            return [made, loss_of(model, 1)]

    whole = run(frozen())
    for order in FEW:
        model = frozen()
        with away(model, order) as attached:
            assert same(run(model), whole)
            report = attached.report().weights
            assert report is not None
            assert report.on_demand_bytes == report.offloaded_bytes // 3


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_errors_in_forward(number: int, error: type[BaseException]) -> None:
    whole = gradients(frozen())
    model = frozen()

    def fail(*_: object) -> None:
        raise error("on purpose")

    with away(model, LATE):
        for _ in range(3):
            hook = layer(model, number).mlp.register_forward_hook(fail)
            with pytest.raises(error):
                loss_of(model, 0)
            hook.remove()
        assert same(gradients(model), whole)
        assert layers_here(model) == [0, 3]


def test_errors_in_backward() -> None:
    whole = gradients(frozen())
    model = frozen()
    with away(model, LATE):

        def fail(_: object) -> None:
            raise KeyError("on purpose")

        def spoil(_: object, __: object, out: torch.Tensor) -> None:
            out.register_hook(fail)

        hook = layer(model, 1).mlp.register_forward_hook(spoil)
        loss = loss_of(model, 0)
        hook.remove()
        with pytest.raises(KeyError):
            loss.backward()
        assert same(gradients(model), whole)
        assert layers_here(model) == [0, 3]


class Scaled(torch.nn.Linear):
    """Saves a view of one parameter, and another one itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x)) * self.bias


class Twice(torch.nn.Module):
    """Each layer is used twice, the last of them has a weight of the first."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Scaled(16, 16) for _ in range(4))
        self.scale = torch.nn.Parameter(torch.ones(16))
        if tied:
            self.layers[3].weight = self.layers[0].weight
        self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for linear in [*self.layers, *self.layers]:
            x = linear(x)
        return x


def test_layers_used_twice_and_tied_weights() -> None:
    def run(model: torch.nn.Module) -> torch.Tensor:
        model.zero_grad()
        model(torch.arange(32.0).view(2, 16) / 32).square().sum().backward()
        scale = model.scale.grad
        assert isinstance(scale, torch.Tensor)
        return scale

    whole = run(Twice())
    for order in FEW:
        model = Twice()
        with away(model, order) as attached:
            assert torch.equal(run(model), whole)
            assert nbytes_here(model.layers[0].weight), "tied weights stay"
            report = attached.report().weights
            assert report is not None
            assert report.kept_bytes == {"it shares its memory with another one": 16 * 16 * 4}


def test_a_module_that_two_layers_have_stays() -> None:
    def made() -> torch.nn.Module:
        model = frozen()
        layer(model, 1).mlp = layer(model, 0).mlp
        return model

    whole = gradients(made())
    model = made()
    with away(model) as attached:
        assert same(gradients(model), whole)
        report = attached.report().weights
        assert report is not None
        assert report.kept_bytes == {"it shares its memory with another one": 2 * 3 * 64 * 96 * 2}


def test_parts_of_one_buffer_are_refused() -> None:
    """As with Megatron's distributed optimizer, whose buffer all weights are views of."""
    model = frozen()
    weights = list(model.parameters())
    buffer = torch.cat([weight.detach().reshape(-1) for weight in weights])
    for weight, part in zip(weights, buffer.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view(weight.shape)
    with pytest.raises(
        ConfigError, match=r"(?s)part of a larger buffer.*leave weights= out, and offload optimizer state"
    ):
        hostward.attach(model, weights=hostward.Weights(num_layers=1, min_elements=0))


def selected(_: object, operation: object, *__: object, **___: object) -> CheckpointPolicy:
    """Save the outputs of matrix products alone."""
    return (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE)[operation is torch.ops.aten.mm.default]


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(selected)},
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoints_around_two_layers(how: str) -> None:
    """Recomputation saves weights without our hooks: they stay until backward has used them. A selective checkpoint
    counts the operations of forward and of recomputation, which reload other layers: ours are none of them.
    """

    class Pairs(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            for i in (0, 2):
                pair = torch.nn.Sequential(self.layers[i], self.layers[i + 1])
                out: Any = checkpoint(pair, x, **CHECKPOINTS[how])
                x = out
            return x

    def run(model: torch.nn.Module) -> torch.Tensor:
        model.zero_grad()
        model(torch.arange(32.0).view(2, 16) / 32).square().sum().backward()
        scale = model.scale.grad
        assert isinstance(scale, torch.Tensor)
        return scale

    whole = run(Pairs(tied=False))
    for order in FEW:
        model = Pairs(tied=False)
        with away(model, order):
            assert torch.equal(run(model), whole)
            assert torch.equal(run(model), whole)


def test_a_weight_that_somebody_holds_stays() -> None:
    whole = gradients(frozen())
    model = frozen()
    view = layer(model, 1).mlp.up_proj.weight.detach()[3:5]
    value = view.clone()
    with away(model) as run:
        assert layers_here(model) == [1, 3]
        assert same(gradients(model), whole)
        assert torch.equal(view, value)
        report = run.report().weights
        assert report is not None
        assert report.held_bytes > 0
        assert "other code held them" in run.report().explain()
        del view
        gradients(model)
        assert layers_here(model) == [0, 3]


def test_a_weight_that_a_graph_saved_by_itself_stays() -> None:
    """Outside of layers' calls, and in recomputation, autograd holds the parameter, not a view of it."""
    model = Twice(tied=False)
    bias = model.layers[1].bias
    with away(model) as run:
        assert run._weights is not None
        residency = run._weights.residency
        residency.ensure(1)
        x = torch.ones(16, requires_grad=True)
        saved = (bias * x).sum()
        residency.empty(1)
        assert nbytes_here(bias)
        saved.backward()
        assert torch.equal(x.grad, bias)  # type: ignore[arg-type]
        del saved
        residency.empty(1)
        assert not nbytes_here(bias)


def test_a_weight_that_somebody_holds_is_stepped() -> None:
    model = network("encoder")
    view = model.encoder.layers[1].linear1.weight.detach()[:2]  # type: ignore[union-attr, index]
    found, _ = train(model, LATE, attached={"weights": ALL})
    assert same(found, expected("encoder"))
    assert torch.equal(view, model.encoder.layers[1].linear1.weight[:2])  # type: ignore[union-attr, index]


@pytest.mark.parametrize("how", ["model", "layer", "weights", "data", "sent"])
def test_a_weight_that_another_process_shares_stays(how: str) -> None:
    model = network("encoder")
    shared = model.encoder.layers[1].linear1.weight  # type: ignore[union-attr, index]
    twins = []

    def share(_: object) -> None:
        if twins:
            return
        if how == "model":
            model.share_memory()
        elif how == "layer":
            model.encoder.layers[1].share_memory()  # type: ignore[union-attr, index, operator]
        elif how == "weights":
            shared.share_memory_()  # type: ignore[operator]
        elif how == "data":
            shared.data.share_memory_()  # type: ignore[operator]
        twins.append(pickle.loads(bytes(ForkingPickler.dumps(shared))))

    found, run = train(model, LATE, attached={"weights": ALL}, each=share, steps=3)
    whole, _ = train(network("encoder"), steps=3)
    assert same(found, whole)
    assert torch.equal(twins[0], shared)  # type: ignore[arg-type]
    assert run is not None
    assert "other code held them" in run.report().explain()


def test_weights_shared_before_are_not_offloaded() -> None:
    model = frozen()
    layer(model, 1).share_memory()
    whole = gradients(frozen())
    with away(model) as run:
        assert layers_here(model) == [1, 3]
        assert same(gradients(model), whole)
        assert "of another process" in run.report().explain()


def test_modified_weights_raise_in_backward() -> None:
    model = frozen()
    weight = layer(model, 1).mlp.up_proj.weight
    with away(model) as run:
        loss = loss_of(model, 0)
        assert run._weights is not None
        with run._weights.all_present([1]), torch.no_grad():
            weight.mul_(1.0)
        with pytest.raises(ModelError, match="modified by an in-place operation"):
            loss.backward()


# ---------------------------------------------------------------- saving, loading, copies


def test_n4_saved_weights_have_their_bytes() -> None:
    model = frozen()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with away(model, LATE):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        found = torch.load(file)
        assert list(found) == list(whole)
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        assert layers_here(model) == [3], "nothing had to be fetched"
        assert torch.equal(
            layer(model, 1).state_dict()["mlp.up_proj.weight"], whole["model.layers.1.mlp.up_proj.weight"]
        )
        with pytest.raises(ModelError, match="keep_vars"):
            model.state_dict(keep_vars=True)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_whole_and_their_own(how: str) -> None:
    model = frozen()
    with away(model, LATE):
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        if how == "deepcopy":
            assert layers_here(model) == [2, 3], "what was read last stays until something else is"
        assert layers_here(twin) == [0, 1, 2, 3]
        whole = gradients(frozen())
        assert same(gradients(twin), whole)
        assert layers_here(twin) == [0, 1, 2, 3]
        twin.to(torch.float32)
        assert layer(twin, 0).mlp.up_proj.weight.dtype is torch.float32
        assert same(gradients(model), whole)
    assert layer(model, 0).mlp.up_proj.weight.__dict__ == {}


def test_loading() -> None:
    other = {name: value.clone() + 1 for name, value in frozen().state_dict().items()}
    fresh = frozen()
    fresh.load_state_dict(other)
    whole = gradients(fresh)
    model = frozen()
    run = hostward.attach(model, weights=ALL, backend=SimulatedBackend(threads=1, order=LATE))
    gradients(model)
    model.load_state_dict(other)
    assert layers_here(model) == [3]
    assert same(gradients(model), whole)
    run.detach()
    assert same(gradients(model), whole)


def test_loading_what_the_host_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Equal values change nothing; others are taken over, as they are without offloading."""
    caplog.set_level("INFO", logger="hostward")
    found = []
    for attached in (None, {"weights": ALL}):
        for changed in (0.0, 1.0):
            model = Encoder().eval()
            optimizer = hostward.AdamW(model, lr=1e-2, backend=SimulatedBackend(threads=1), **ON_HOST)
            run = None if attached is None else hostward.attach(model, optimizer, **attached)
            for step in range(2):
                loss_of(model, step).backward()
                optimizer.step()
                if step == 0:
                    caplog.clear()
                    model.load_state_dict({n: v.clone() + changed for n, v in model.state_dict().items()})
            assert ("taken anew" in caplog.text) is (changed > 0)
            state = optimizer.state_dict()
            assert run is None or sum(bool(nbytes_here(p)) for p in model.encoder.layers[2].parameters()) == 0
            optimizer.load_state_dict(state)
            loss_of(model, 3).backward()
            optimizer.step()
            if run is not None:
                run.detach()
            optimizer.wait()
            found.append([p.detach().clone() for p in model.parameters()])
    assert same(found[0], found[2])
    assert same(found[1], found[3])


def test_what_would_move_the_model_is_refused() -> None:
    model = frozen()
    with away(model):
        with pytest.raises(ModelError, match="while its weights are offloaded"):
            model.to(torch.float32)
        with pytest.raises(ModelError, match="while its weights are offloaded"):
            layer(model, 2).double()
        model.to("cpu", torch.bfloat16)
        gradients(model)
    model.to(torch.float32)
    assert layer(model, 0).mlp.up_proj.weight.dtype is torch.float32


def test_a_replaced_weight_is_refused() -> None:
    """Seen red: a KeyError where it was read."""
    model = frozen()
    run = hostward.attach(model, weights=ALL, backend=SimulatedBackend(threads=1))
    weight = layer(model, 2).mlp.up_proj.weight
    weight.data = torch.ones(96, 64, dtype=torch.bfloat16)
    for use in (lambda: loss_of(model, 0), weight.clone, lambda: weight.data):
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight' of an offloaded layer was replaced"):
            use()
    assert run is not None


def test_a_load_that_would_replace_weights_is_refused_before_it_replaces_any() -> None:
    """Seen red: raised when weights and embedding had been replaced; the same state refused without assign as well."""
    model = frozen()
    before = dict(model.named_parameters())
    run = hostward.attach(model, weights=ALL, backend=SimulatedBackend(threads=1))
    for module in (model, model.model, layer(model, 0), layer(model, 0).mlp):
        state = module.state_dict()
        with pytest.raises(ModelError, match=r"assign=True\) of a model with offloaded weights(.|\n)*leave assign out"):
            module.load_state_dict({name: value + 1 for name, value in state.items()}, assign=True)
        assert all(p is before[name] for name, p in model.named_parameters())
        assert same([*model.state_dict().values()], [*frozen().state_dict().values()])
        with pytest.raises(ModelError, match="assign=True"):
            module.load_state_dict(state, assign=True)
        module.load_state_dict(state)
    model.lm_head.load_state_dict(model.lm_head.state_dict(), assign=True)  # stays on the device
    module.up_proj.weight = torch.nn.Parameter(torch.ones(96, 64, dtype=torch.bfloat16))
    for use in (model.state_dict, lambda: module.load_state_dict(state)):
        with pytest.raises(ModelError, match="of an offloaded layer was replaced"):
            use()
    run.detach()


@pytest.mark.parametrize("attached", [False, True])
def test_frozen_weights_loaded_beside_trained_ones(attached: bool) -> None:
    """Seen red: fetched over, after the next step, with what they had been."""

    def run(attached: bool) -> list[torch.Tensor]:
        model = network("Qwen3")
        for number in range(len(model.model.layers)):  # type: ignore[union-attr, arg-type]
            layer(model, number).mlp.up_proj.requires_grad_(False)
        optimizer = hostward.AdamW(model, lr=1e-2, backend=SimulatedBackend(threads=1, order=LATE), **ON_HOST)
        run = hostward.attach(model, optimizer, weights=ALL) if attached else None
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                state = model.state_dict()
                model.load_state_dict({n: 2 * v if "up_proj" in n else v for n, v in state.items()})
        if run is not None:
            run.detach()
        optimizer.wait()
        return [p.detach().clone() for p in model.parameters()]

    assert same(run(attached), run(False))


def test_a_fetch_without_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: what had been allocated for the layer's first weights, which nobody counted."""
    model = frozen()
    with away(model) as run:
        assert run._weights is not None
        held = run._weights.residency.layers[0]
        assert held is not None
        room_bytes, held.weights[-1].room_bytes = held.weights[-1].room_bytes, -1
        with pytest.raises(RuntimeError):
            loss_of(model, 0)
        assert not any(w.storage.nbytes() for w in held.weights)
        held.weights[-1].room_bytes = room_bytes
        whole = gradients(frozen())
        assert same(gradients(model), whole)


def halve(module: Any, *_: object) -> None:
    module.linear.weight.data.mul_(0.5)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_that_write_weights(kind: str) -> None:
    def run(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(WithLoss() for _ in range(3))).requires_grad_(False)
        getattr(model[1], kind)(halve)
        if attached:
            hostward.attach(model, weights=hostward.Weights(2, min_elements=0), backend=SimulatedBackend(threads=1))
        x = torch.ones(2, 8, requires_grad=True)
        for _ in range(2):
            model(x).sum().backward()
        return [model(x).detach(), model[1].linear.weight.clone()]

    assert same(run(True), run(False))


class Interrupted:
    """A storage during whose freeing somebody presses Ctrl-C."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def resize_(self, nbytes: int) -> None:
        if not nbytes:
            raise KeyboardInterrupt
        self._storage.resize_(nbytes)


def test_weights_half_freed_at_ctrl_c_are_fetched_again() -> None:
    whole = gradients(frozen())
    model = frozen()
    with away(model) as attached:
        offloaded = attached._weights
        assert offloaded is not None
        held = offloaded.residency.layers[0]
        assert held is not None
        last = held.weights[-1]
        storage, last.storage = last.storage, Interrupted(last.storage)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0)
        last.storage = storage
        for weight in held.weights:
            assert weight.parameter.isfinite().all()
        assert same(gradients(model), whole)


def test_a_module_within_a_layer_called_on_its_own() -> None:
    model = frozen()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    whole = layer(model, 1).mlp(x)
    with away(model, LATE):
        assert torch.equal(layer(model, 1).mlp(x), whole)
        gradients(model)
        assert layers_here(model) == [0, 3]


class WithLoss(torch.nn.Module):
    """A layer that keeps a loss of its own, which is no output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss = self.linear(x).square().sum()
        return torch.tanh(self.linear(x))


def part_alone(model: Any, x: torch.Tensor) -> None:
    model[0].linear(x)
    model[1](x)


def part_and_backward(model: Any, x: torch.Tensor) -> None:
    model[0].linear(x).sum().backward()


def backward_from_within(model: Any, x: torch.Tensor) -> None:
    model(x)
    model[0].loss.backward()


def backward_that_fails(model: Any, x: torch.Tensor) -> None:
    y = model[0](x)
    y.register_hook(lambda _: int("on purpose"))
    with pytest.raises(ValueError, match="on purpose"):
        model[2](model[1](y)).sum().backward()


def scaled(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: 0.9 * value for name, value in module.state_dict().items()}


def load(model: Any, x: torch.Tensor) -> None:
    model.load_state_dict(scaled(model))


def load_of_a_part(model: Any, x: torch.Tensor) -> None:
    model[1].linear.load_state_dict(scaled(model[1].linear))


def load_that_fails(model: Any, x: torch.Tensor) -> None:
    hook = model[1].linear.register_load_state_dict_post_hook(lambda *_: int("on purpose"))
    with pytest.raises(ValueError, match="on purpose"):
        model.load_state_dict(scaled(model))
    hook.remove()


@pytest.mark.parametrize(
    "before",
    [part_alone, part_and_backward, backward_from_within, backward_that_fails, load, load_of_a_part, load_that_fails],
)
def test_weights_are_fenced_again_when_layers_do_not_run(before: Callable[[Any, torch.Tensor], None]) -> None:
    """They can be read, and what is written through `.data` counts."""

    def run(attached: bool, written: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(WithLoss() for _ in range(3))).requires_grad_(False)
        backend = SimulatedBackend(threads=1)
        if attached:
            hostward.attach(model, weights=hostward.Weights(num_layers=2, min_elements=0), backend=backend)
        x = torch.ones(2, 8, requires_grad=True)
        before(model, x)
        for one in model:
            one.__dict__.pop("loss", None)
        if written:
            for weight in model.parameters():
                weight.data.mul_(0.5)
            model(x)  # frees them
        return [model(x).detach(), *(weight.sum() for weight in model.parameters())]

    for written in (False, True):
        assert same(run(True, written), run(False, written))


def test_adapters_beside_frozen_weights() -> None:
    """They are trained, and stay."""

    class Adapted(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = torch.nn.Parameter(torch.randn(4, base.in_features, dtype=base.weight.dtype) / 8)
            self.up = torch.nn.Parameter(torch.randn(base.out_features, 4, dtype=base.weight.dtype) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
            return out

    def made() -> torch.nn.Module:
        model = frozen()
        torch.manual_seed(3)
        for number in range(4):
            mlp = layer(model, number).mlp
            mlp.up_proj = Adapted(mlp.up_proj)
        return model

    whole = gradients(made(), 3)
    for order in FEW:
        model = made()
        with away(model, order) as run:
            assert same(gradients(model, 3), whole)
            report = run.report().weights
            assert report is not None
            assert report.kept_bytes == {"it is trained, and the host does not step it": 3 * 4 * (64 + 96) * 2}


def test_many_microbatches_and_an_evaluation_in_between() -> None:
    def look(run: hostward.Attachment) -> None:
        report = run.report().weights
        assert report is not None
        assert report.here_bytes <= report.offloaded_bytes // 3

    found, run = train(network("encoder"), attached={"weights": ALL}, each=look)
    assert same(found, expected("encoder"))
    assert run is not None


@pytest.mark.parametrize("number", [0, 1])
def test_frozen_weights_that_are_to_be_trained_now(number: int) -> None:
    """A forward without gradients trains nothing: a reference adapter is switched on for it, and requires gradients.

    Seen red: that forward refused; layer 0, which it prefetches, trained.
    """
    model = frozen()
    run = hostward.attach(model, weights=ALL, backend=SimulatedBackend(threads=1))
    layer(model, number).requires_grad_(True)
    with torch.no_grad():
        loss_of(model, 0)
    refused = rf"frozen weight 'model\.layers\.{number}\..*' of an offloaded layer is to be trained"
    with pytest.raises(ModelError, match=refused):
        loss_of(model, 0)
    layer(model, number).requires_grad_(False)
    run.detach()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers(backend: str) -> None:
    whole = gradients(frozen())
    model = frozen()
    with away(model, LATE):
        for number in range(4):
            layer(model, number).compile(backend=backend)
        assert same(gradients(model), whole)
    torch.compiler.reset()


def test_reads_that_are_not_fenced_are_still_found() -> None:
    model = Encoder().eval()
    optimizer = hostward.AdamW(model, backend=SimulatedBackend(threads=1, order=Order(eager=True)), **ON_HOST)
    with hostward.attach(model, optimizer, weights=ALL), optimizer.find_unfenced_reads():
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()


def test_stepped_by_torch_on_the_host() -> None:
    weights = []
    for attached in (None, {"weights": ALL}):
        found, _ = train(Encoder().eval(), attached=attached, use_torch_optimizer=True)
        weights.append(found)
    assert same(*weights)


def test_a_model_that_is_dropped_while_attached_goes() -> None:
    """As when the cell of a notebook that makes model, optimizer and attachment runs again."""
    model = network("Llama")
    optimizer = hostward.AdamW(model, backend=SimulatedBackend(threads=1), **ON_HOST)
    hostward.attach(model, optimizer, weights=ALL)
    loss_of(model, 0).backward()
    optimizer.step()
    alive = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._states[0].exp_avg.data)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def raised_in_a_thread(work: Callable[[], object]) -> list[HostwardError]:
    found = []

    def run() -> None:
        try:
            with torch.no_grad():
                work()
        except HostwardError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def test_an_evaluation_in_another_thread_takes_turns_with_training() -> None:
    """Within a layer and within backward it would free what training reads, and the other way round."""
    expected = gradients(frozen())
    model = frozen()
    refused: list[HostwardError] = []
    trainer = threading.current_thread()

    def evaluate(*_: object) -> None:
        if threading.current_thread() is trainer:
            refused.extend(raised_in_a_thread(lambda: loss_of(model, 5)))

    with away(model):
        handles = [
            layer(model, 1).mlp.register_forward_hook(evaluate),
            model.get_input_embeddings().weight.register_hook(evaluate),  # type: ignore[operator]
        ]
        assert same(gradients(model), expected)
        assert [type(error) for error in refused] == [OrderingError] * 4
        assert ["during a backward" in str(error) for error in refused] == [False, True] * 2
        for handle in handles:
            handle.remove()
        assert raised_in_a_thread(lambda: loss_of(model, 5)) == []


def test_a_read_in_another_thread_takes_turns_with_training() -> None:
    model = frozen()
    weight = layer(model, 1).mlp.up_proj.weight
    expected = weight.detach().clone()
    refused: list[HostwardError] = []

    def read(*_: object) -> None:
        refused.extend(raised_in_a_thread(lambda: torch.equal(weight, expected)))

    with away(model) as run:
        layer(model, 2).mlp.register_forward_hook(read)
        model.get_input_embeddings().weight.register_hook(read)  # type: ignore[operator]
        loss_of(model, 0).backward()
        assert [type(error) for error in refused] == [OrderingError] * 2
        with run.weights_here():
            loss_of(model, 0).backward()
        read()
        assert len(refused) == 2


def test_two_backwards_at_once_are_refused() -> None:
    """One in the middle of another: each frees the weights that the other is about to read."""
    whole = gradients(frozen(), steps=1)
    model, errors = frozen(), []

    def backward(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except OrderingError as error:
            errors.append(str(error))

    def meanwhile(_: torch.Tensor) -> None:
        thread = threading.Thread(target=backward, args=[other])
        thread.start()
        thread.join()

    with away(model, LATE):
        other = loss_of(model, 1)
        hook = layer(model, 1).register_forward_hook(lambda *given: given[2].register_hook(meanwhile) and None)
        loss = loss_of(model, 0)
        hook.remove()
        loss.backward()
        assert len(errors) == 1
        assert "during another backward of the same model" in errors[0]
        assert torch.equal(embedding_gradient(model), whole[1])
        model.zero_grad()
        assert same(gradients(model, steps=1), whole)


def test_after_a_failed_backward_another_thread_may_evaluate() -> None:
    model = frozen()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("backward fails")

    with away(model):
        model.get_input_embeddings().weight.register_hook(fail)  # type: ignore[operator]
        with pytest.raises(ValueError, match="backward fails"):
            loss_of(model, 0).backward()
        assert raised_in_a_thread(lambda: loss_of(model, 5)) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "trace",
    [
        lambda model, x: torch.jit.trace(model, x),
        lambda model, x: torch.export.export(model, (x,), strict=False),
    ],
    ids=["jit.trace", "export"],
)
def test_a_trace_is_refused(trace: Callable[[torch.nn.Module, torch.Tensor], object]) -> None:
    model = Encoder()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(2, 10, 32)
    with away(model):
        with pytest.raises(ModelError, match=r"is called inside torch\."):
            trace(model, x)
        assert model(x).shape == x.shape
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
