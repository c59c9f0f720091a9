"""What `attach` refuses, and what an attachment tells about itself.

Seen red: threads that are not noted, that stay noted after a failure, or that count while backward recomputes; an
optimizer whose parameters nobody compares; hooks that nobody looks for; a report without its sentence; an error of
torch's own about modules of torch.jit.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_cases import NETWORKS, loss_of, offloading, same
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.errors import ConfigError, ModelError, OrderingError, UnknownNameError


class Net(torch.nn.Module):
    """Four layers of two matrices."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(8, 24)
            self.down = torch.nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
            return out

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Threads:
    """A model, and calls of it in threads. `halt` is called within its second layer."""

    def __init__(self) -> None:
        self.model = Net()
        self.halt: Callable[[], None] = lambda: None
        self.model.layers[1].up.register_forward_hook(lambda *_: self.halt())  # type: ignore[union-attr]

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(4, 8)).square().sum()

    @staticmethod
    def call(function: Callable[[], object]) -> Exception | None:
        """Calls it in a thread of its own; returns what it raised."""
        raised: list[Exception] = []

        def run() -> None:
            try:
                function()
            except (OrderingError, ValueError) as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="another")
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return raised[0] if raised else None


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_two_threads_at_once_are_noticed_and_the_first_goes_on() -> None:
    plain, threads, raised = Threads(), Threads(), []
    plain.loss().backward()
    with offloading(threads.model):

        def halt() -> None:
            threads.halt = lambda: None
            raised.append(threads.call(threads.loss))

        threads.halt = halt
        threads.loss().backward()
        assert isinstance(raised[0], OrderingError)
        expected = (
            r"layer layers\.0 is called in thread another while MainThread runs[\s\S]*why: [\s\S]*fix: run forwards"
        )
        assert re.match(expected, str(raised[0]))
        assert same(gradients(threads.model), gradients(plain.model))
        threads.loss().backward()


def test_threads_one_after_the_other_and_those_of_backward_are_fine() -> None:
    """Evaluation within a forward; a forward that failed, in this thread and another; a backward that recomputes."""
    for reentrant in (True, False):
        plain, threads = Threads(), Threads()
        with offloading(threads.model):

            def fail() -> None:
                raise ValueError("forward fails")

            threads.halt = fail
            with pytest.raises(ValueError, match="forward fails"):
                threads.loss()
            assert isinstance(threads.call(threads.loss), ValueError)
            threads.halt = lambda: None
            assert threads.call(lambda: threads.loss().backward()) is None  # noqa: B023

            def recomputed(model: Net) -> torch.Tensor:
                x = torch.ones(4, 8, requires_grad=True) * 1.0
                for layer in model.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)  # noqa: B023
                return x.square().sum()

            waiting = recomputed(threads.model)

            def evaluated() -> None:
                with torch.no_grad():
                    threads.loss()  # noqa: B023

            def within() -> None:
                threads.halt = lambda: None  # noqa: B023
                assert threads.call(evaluated) is None  # noqa: B023
                assert threads.call(waiting.backward) is None  # noqa: B023

            threads.halt = within
            threads.loss().backward()
        for found in (plain.loss(), recomputed(plain.model), plain.loss()):
            found.backward()
        assert same(gradients(threads.model), gradients(plain.model))


def test_an_attachment_says_what_it_does() -> None:
    model = NETWORKS["Llama"]()
    with offloading(model, num_layers=2, modules=("mlp", "core_attn")) as run:
        assert repr(run) == (
            "Attachment(model.layers.0 to model.layers.1, 2 layers of 4: activations are offloaded in mlp, core_attn; "
            "so far 0 bytes to the host, 0 reloaded)"
        )
        loss_of(model, 0).backward()
        copied = run.report().offloaded_bytes
        assert f"so far {copied:,} bytes to the host, {copied:,} reloaded)" in repr(run)
    assert repr(run).endswith("reloaded; detached)")
    with offloading(model, num_layers=1) as run:
        assert repr(run).startswith("Attachment(model.layers.0 of 4: activations")


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = Net(), Net()
    optimizer = hostward.AdamW(other)
    with pytest.raises(ConfigError, match=r"none of its 16 parameters belongs[\s\S]*fix: pass the optimizer"):
        hostward.attach(model, optimizer, activations=1)
    hostward.attach(other, optimizer, activations=1).detach()
    some = hostward.AdamW([("last.weight", model.layers[3].up.weight)])
    hostward.attach(model, some, activations=1).detach()


@pytest.mark.parametrize("second", [lambda m: m, lambda m: torch.nn.Sequential(m, m.layers[0]), lambda m: m.layers])
def test_attached_twice_is_refused(second: Callable[[Net], torch.nn.Module]) -> None:
    """The model itself, a module around it, and a part of it; a copy is another model."""
    model = Net()
    run = hostward.attach(model, activations=1)
    with pytest.raises(ConfigError, match=r"attached already: [\s\S]*offloaded twice[\s\S]*detach\(\)"):
        hostward.attach(second(model), activations=1, layers=list(model.layers))
    hostward.attach(copy.deepcopy(model), activations=1).detach()
    run.detach()
    hostward.attach(second(model), activations=1, layers=list(model.layers)).detach()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"recompute": 5}, "recompute=5 names no modules"), ({"recompute": (1,)}, "names no modules")],
)
def test_values_of_other_types_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hostward.attach(Net(), **options)


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (hostward.Activations, {"num_layers": "2"}, "num_layers must be a whole number"),
        (hostward.Activations, {"num_layers": 1.5}, "num_layers must be a whole number"),
        (hostward.Activations, {"num_layers": -2}, "num_layers must be at least 1, got -2"),
        (hostward.Activations, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (hostward.Activations, {"min_bytes": True}, "min_bytes must be a whole number"),
        (hostward.Activations, {"min_bytes": None}, "min_bytes must be a whole number, got None"),
        (hostward.Activations, {"min_elements": -1}, "min_elements must not be negative"),
        (hostward.Activations, {"host_bytes": -1}, "host_bytes must not be negative"),
        (hostward.Activations, {"modules": "mlp"}, "modules='mlp' is a string"),
        (hostward.Activations, {"modules": ("mlp",), "fraction": "half"}, "fraction='half'"),
        (hostward.Weights, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (hostward.Weights, {"min_elements": 0.5}, "min_elements must be a whole number"),
    ],
)
def test_values_out_of_range_are_refused_before_there_is_a_model(
    kind: Callable[..., object], fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        kind(**fields)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hostward.Activations(num_layer=2), r"Activations\(\) has no option 'num_layer'\n.*mean num_layers\?"),
        (lambda: hostward.Weights(layers=2), r"Weights\(\) has no option 'layers'\n.*mean num_layers\?"),
        (lambda: hostward.attach(Net(), activation=2), r"attach\(\) has no option 'activation'\n.*mean activations\?"),
        (lambda: hostward.offload_activations(Net(), num_layer=2), "has no option 'num_layer'"),
        (
            lambda: hostward.AdamW(Net(), offload_fractoin=1),
            r"no option 'offload_fractoin'\n.*mean offload_fraction\?",
        ),
        (lambda: hostward.AdamW(Net(), zzz=1), r"has no option 'zzz'\n  fix: options are params, lr, betas, "),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(call: Callable[[], object], text: str) -> None:
    with pytest.raises(UnknownNameError, match=text):
        call()


def with_a_script(what: str) -> Net:
    """A model one of whose layers, or a module in it, is of torch.jit."""
    model = Net()
    layer: Any = model.layers[1]
    if what == "layer":
        model.layers[1] = torch.jit.script(layer)
    else:
        layer.up = torch.jit.script(layer.up)
    return model


SCRIPTED: dict[str, tuple[str, Callable[[Net], object]]] = {
    "layer": ("layer", lambda model: hostward.attach(model, activations=3)),
    "weights": (
        "module",
        lambda model: hostward.attach(model.requires_grad_(False), weights=hostward.Weights(min_elements=0)),
    ),
    "recomputed": ("module", lambda model: hostward.attach(model, recompute=("up",))),
    "optimizer": ("module", lambda model: hostward.AdamW(model, lr=1e-2)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTED)
def test_modules_of_torch_jit_are_refused(name: str) -> None:
    what, call = SCRIPTED[name]
    with pytest.raises(ModelError, match=r"a module of torch\.jit"):
        call(with_a_script(what))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_activations_around_a_module_of_torch_jit_are_offloaded() -> None:
    model, plain = with_a_script("module"), gradients_of(Net())
    with offloading(model) as run:
        assert all(torch.allclose(a, b) for a, b in zip(gradients_of(model), plain, strict=True))
        assert run.report().offloaded_bytes > 0


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(4, 8)).square().sum().backward()
    return gradients(model)
