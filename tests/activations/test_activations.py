"""Offloaded activations: gradients keep their bits, in every order of lanes; bytes leave; each wait is needed.

Seen red: copies that wait for nothing, memory released before its copy, reloads that are not waited for; weights,
buffers and shared inputs that travel along; a handle that forgets strides or offset; a reload at every unpack; visits
that prefetch in the wrong order.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from activation_cases import (
    FEW,
    LANES,
    NETWORKS,
    ORDERS,
    left_over,
    loss_of,
    offloading,
    same,
    trained,
    trained_alone,
    transformer,
)
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.activations import module_hooks, transfers
from hostward.errors import ConfigError, ModelError, OrderingError
from hostward.model.layers import find_layers
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.activations import LAYER_CALL_OPS
from hostward.schedule.ops import Lane

every_network = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What only a garbage collection would free shows as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@every_network
def test_gradients_keep_their_bits_in_every_order_of_lanes(name: str) -> None:
    """Of three layers in every order, of one and of two in a few."""
    expected = trained_alone(name)
    for i, (num_layers, order) in enumerate([*((3, order) for order in ORDERS), (1, FEW[0]), (2, FEW[1])]):
        model = NETWORKS[name]()
        with offloading(model, order, num_layers=num_layers, double_buffering=i % 2 == 1) as run:
            assert same(trained(model), expected), order
            report = run.report()
            assert left_over(run) == 0
        assert report.offloaded_bytes > 0
        assert report.on_demand_bytes == 0, "something had to be reloaded that nobody had foreseen"
        assert report.reloaded_bytes == report.offloaded_bytes
        assert run.backend.ledger.by_owner(Tier.HOST) == {}, "pinned memory is left"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(("name", "reentrant"), [("Llama", True), ("Qwen3Moe", False)])
def test_inputs_of_checkpointed_layers_leave(name: str, reentrant: bool) -> None:
    """Two bytes per token and hidden element: what the checkpoint itself keeps."""

    def made() -> torch.nn.Module:
        model = NETWORKS[name]()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        return model

    expected = trained(made())
    for order in ORDERS:
        model = made()
        with offloading(model, order) as run:
            assert same(trained(model), expected), order
            assert left_over(run) == 0
            report = run.report()
        inputs = 3 * 3 * 2 * 24 * 64 * 2  # steps, layers, batch, sequence, hidden, bytes
        assert report.offloaded_bytes == report.reloaded_bytes == inputs
        # The model's forward holds the first layer's input until it returns.
        assert report.held_bytes == inputs // 3
        assert report.freed_bytes == inputs - inputs // 3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_in_between_that_are_not_named_stay_as_they_are(reentrant: bool) -> None:
    """Every third layer is checkpointed; of the others all but the last two leave, what their MLPs save apart."""

    def made() -> tuple[Any, list[torch.nn.Module]]:
        model: Any = transformer("Llama", num_hidden_layers=6)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        others = [layer for i, layer in enumerate(model.model.layers) if i % 3 != 2]
        for layer in others:
            layer.gradient_checkpointing = False
        return model, others

    expected = trained(made()[0])
    for order in FEW:
        model, others = made()
        run = hostward.attach(
            model,
            activations=hostward.Activations(num_layers=2, min_bytes=64),
            recompute=("layernorm", "mlp"),
            layers=others,
            backend=SimulatedBackend(threads=1, order=order),
        )
        assert run.layers == ["model.layers.0", "model.layers.1"]
        assert same(trained(model), expected), order
        assert left_over(run) == 0
        report = run.report()
        assert 0 < report.offloaded_bytes == report.reloaded_bytes
        assert report.on_demand_bytes == 0
        assert {name.split(".")[2] for name in run.recomputed} == {"0", "1", "3", "4"}
        run.detach()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(("most", "early"), [(None, True), (1, False)])
def test_the_input_of_a_checkpointed_layer_leaves_while_the_layer_runs(
    most: int | None, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next layer waits for the copy. Under a bound on copies it would wait for that of the layer before instead."""
    monkeypatch.setattr(module_hooks, "FIRST_GROUP_BYTES", 4096)
    model = NETWORKS["Llama"]()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    copied: list[int] = []
    with offloading(model, max_in_flight=most) as run:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.mlp.register_forward_pre_hook(  # type: ignore[union-attr]
                lambda *_: copied.append(run.backend.ledger.copied_bytes[Lane.D2H])
            )
        loss_of(model, 0).backward()
    input_bytes = 2 * 24 * 64 * 2
    assert copied[:4] == [(i + early) * input_bytes for i in range(3)] + [3 * input_bytes]


class OldStyle(torch.nn.Module):
    """Layers whose `__call__` puts the checkpoint around module and hooks, as transformers did before 5.20."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(16, 32)
            self.down = torch.nn.Linear(32, 16)
            self._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint

        def __call__(self, *args: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self._gradient_checkpointing_func(super().__call__, *args, use_reentrant=False)
            return made

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


def test_checkpoints_around_module_and_hooks() -> None:
    def run(model: OldStyle) -> list[torch.Tensor]:
        found = []
        for seed in range(3):
            model.zero_grad()
            x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            model(x).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    expected = run(OldStyle())
    for order in FEW:
        model = OldStyle()
        functions = [layer._gradient_checkpointing_func for layer in model.layers]
        with offloading(model, order) as attached:
            assert same(run(model), expected)
            report = attached.report()
        assert report.offloaded_bytes == report.reloaded_bytes == 3 * 3 * 5 * 16 * 4
        assert [layer._gradient_checkpointing_func for layer in model.layers] == functions


@pytest.mark.parametrize(("num_layers", "double_buffering"), [(3, False), (3, True), (2, False)])
def test_h35_what_a_layer_saved_is_on_its_way_before_backward_reaches_it(
    num_layers: int, double_buffering: bool
) -> None:
    """As many layers ahead as are not offloaded, and one more with double buffering."""
    model, log = NETWORKS["Llama"](), []
    layers: list[torch.nn.Module] = list(model.model.layers)  # type: ignore[arg-type, union-attr]
    with offloading(model, num_layers=num_layers, double_buffering=double_buffering) as run:
        copy = run.backend.copy

        def logged(lane: Lane, *arguments: object, **options: object) -> object:
            if lane is Lane.H2D:
                log.append(f"reload {str(options['name']).rpartition('.')[2]}")
            return copy(lane, *arguments, **options)  # type: ignore[arg-type]

        run.backend.copy = logged  # type: ignore[assignment, method-assign]
        for i, layer in enumerate(layers):
            weight = layer.mlp.down_proj.weight  # type: ignore[union-attr]
            weight.register_hook(lambda _, i=i: log.append(f"backward {i}"))
        loss_of(model, 0).backward()
    ahead = 4 - num_layers + double_buffering
    for i in range(num_layers):
        begun = log.index(f"backward {min(3, i + ahead)}")
        assert log.index(f"reload {i}") < begun, log
        if i + ahead < 3:
            assert log.index(f"reload {i}") > log.index(f"backward {i + ahead + 1}"), log


@pytest.mark.parametrize("op", ["made", "offload", "release", "room", "reload", "arrive"])
def test_h5_h12_h14_each_wait_left_out_is_reported(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`made` and `room` are marks that others wait for: those waits are left out."""
    victims = {"made": "offload", "room": "reload"}
    victim = victims.get(op, op)
    waits = tuple(w for w in LAYER_CALL_OPS[victim].waits if op not in victims or w != op)
    broken = replace(LAYER_CALL_OPS[victim], waits=waits if op in victims else ())
    monkeypatch.setitem(transfers.LAYER_CALL_OPS, victim, broken)  # type: ignore[arg-type]
    expected = trained_alone("Llama")
    seen = False
    for order in (Order(late=frozenset(LANES[:2])), Order(late=frozenset({LANES[0]})), Order()):
        model = NETWORKS["Llama"]()
        try:
            with offloading(model, order):
                seen |= not same(trained(model), expected)
        except OrderingError:
            seen = True
    assert seen


def test_h19_device_memory_that_leaves_is_on_the_host() -> None:
    """Conservation: what was offloaded is either free or named as held, and the host has as much."""
    model = NETWORKS["Qwen3"]()
    with offloading(model) as run:
        loss = loss_of(model, 0)
        report = run.report()
        assert report.freed_bytes + report.held_bytes == report.offloaded_bytes > 0
        assert report.held_bytes == 0
        assert report.offloaded_bytes <= report.host_bytes <= report.offloaded_bytes + 512 * 200
        loss.backward()


def test_weights_buffers_and_what_is_given_to_all_layers_stay() -> None:
    """Cos and sin, masks; frozen weights are saved as plain views (H30)."""
    model = NETWORKS["Qwen3"]()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    with offloading(model) as run:
        loss_of(model, 0).backward()
        kept = run.report().kept_bytes
        assert run.report().held_bytes == 0
    assert kept["it is a weight"] > 0
    assert kept["it was given to the layer and needs no gradient"] > 0
    images = NETWORKS["convolutions"]()
    with offloading(images) as run:
        loss_of(images, 0).backward()
        assert run.report().kept_bytes["it is a buffer"] > 0


def test_weights_cast_by_autocast_stay() -> None:
    model = NETWORKS["Llama"]().float()
    expected, found = [], []
    for attached in (False, True):
        model.zero_grad()
        context = offloading(model) if attached else None
        run = None if context is None else context.__enter__()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, 0)
        loss.backward()
        (found if attached else expected).extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        if run is not None and context is not None:
            weights = sum(p.numel() for name, p in model.named_parameters() if "layers" in name)
            assert run.report().kept_bytes["it is a weight"] >= weights // 2
            context.__exit__(None, None, None)
    assert same(found, expected)


def test_generation_is_as_before_and_leaves_nothing() -> None:
    model, ids = transformer("Llama").eval(), torch.arange(6).view(1, 6)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    with offloading(model) as run:
        assert torch.equal(model.generate(ids, **settings), expected)
        assert (run.report().offloaded_bytes, left_over(run)) == (0, 0)
        loss_of(model.train(), 0).backward()
        assert torch.equal(model.eval().generate(ids, **settings), expected)
        assert run.report().offloaded_bytes > 0
        assert left_over(run) == 0


def test_small_tensors_stay() -> None:
    model = NETWORKS["Llama"]()
    backend = SimulatedBackend(threads=1, order=Order(eager=True))
    with hostward.attach(model, activations=hostward.Activations(min_bytes=1 << 30), backend=backend) as run:
        loss_of(model, 0).backward()
        assert run.report().offloaded_bytes == 0
        assert run.report().kept_bytes["it is small"] > 0


def test_host_memory_is_locked_in_the_first_step_alone() -> None:
    model = NETWORKS["Llama"]()
    with offloading(model) as run:
        trained(model, steps=1)
        made, locked = run._arena.slabs_made, run.report().host_bytes
        assert made == 3, "one for each layer's copies"
        trained(model)
        assert (run._arena.slabs_made, run.report().host_bytes) == (made, locked)


def test_more_host_memory_than_allowed_is_an_error_and_the_model_goes_on() -> None:
    model = NETWORKS["Llama"]()
    expected = trained_alone("Llama")
    with (
        offloading(model, host_bytes=4096),
        pytest.raises(hostward.errors.MemoryLimitError, match="4,096 were allowed"),
    ):
        trained(model)
    assert same(trained(NETWORKS["Llama"]()), expected)
    model = NETWORKS["Llama"]()
    assert same(trained(model), expected)


@pytest.mark.parametrize("mix", [(0.0, 0.0), (1.0, 0.0), (1.0, 0.5)])
def test_together_with_an_offloaded_optimizer(mix: tuple[float, float]) -> None:
    def run(order: Order | None, *, attached: bool) -> list[torch.Tensor]:
        model = NETWORKS["Qwen3"]()
        backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
        optimizer = hostward.AdamW(
            model, lr=1e-2, max_grad_norm=0.5, offload_fraction=mix[0], streamed_fraction=mix[1], backend=backend
        )
        if attached:
            hostward.attach(model, optimizer, activations=hostward.Activations(min_bytes=64))
        for step in range(3):
            for i in range(2):
                with optimizer.accumulate(last=i == 1):
                    loss_of(model, 2 * step + i).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        return [*(p.detach().clone() for p in model.parameters()), torch.tensor(optimizer.grad_norm)]

    expected = run(None, attached=False)
    for order in (None, *FEW):
        assert same(run(order, attached=True), expected)


# ---------------------------------------------------------------- what can be asked


@every_network
def test_layers_are_found(name: str) -> None:
    model = NETWORKS[name]()
    found = find_layers(model)
    assert len(found) == 4
    assert all(model.get_submodule(path) is layer for path, layer in found)


def test_layers_that_cannot_be_found_are_named_by_the_user() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.second = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    two = Two()
    with pytest.raises(ModelError, match=r"2 lists of layers: first, second(.|\n)*\[\*model\.first, \*model\.second\]"):
        hostward.attach(two, activations=1)
    with pytest.raises(ModelError, match="no lists of layers"):
        hostward.attach(torch.nn.Linear(2, 2), activations=1)
    with pytest.raises(ModelError, match="no module of the model"):
        hostward.attach(two, activations=1, layers=[torch.nn.Linear(8, 8)])
    with pytest.raises(ModelError, match="given twice"):
        hostward.attach(two, activations=1, layers=[two.first[0], two.first[0]])
    run = hostward.attach(two, activations=1, layers=[*two.first, *two.second])
    assert run.layers == ["first.0"]
    run.detach()


@pytest.mark.parametrize("count", [-1, 0, 4, 7])
def test_as_many_layers_as_there_are_cannot_leave(count: int) -> None:
    with pytest.raises(ConfigError, match=r"of a model of 4 at most 3 can be offloaded(.|\n)*first layers from 1 to 3"):
        hostward.attach(transformer("Llama"), activations=count)


def test_an_optimizer_of_torch_is_left_out() -> None:
    model = transformer("Llama")
    with pytest.raises(ConfigError, match=r"attach\(\) with SGD[\s\S]*leave the optimizer out"):
        hostward.attach(model, torch.optim.SGD(model.parameters()), activations=1)  # type: ignore[arg-type]


def test_nothing_to_offload_is_refused() -> None:
    with pytest.raises(ConfigError, match="without anything to offload"):
        hostward.attach(transformer("Llama"))
    with pytest.raises(ConfigError, match="min_bytes must not be negative"):
        hostward.attach(transformer("Llama"), activations=hostward.Activations(min_bytes=-1))


def test_h28_attached_within_inference_mode() -> None:
    model = NETWORKS["Llama"]()
    expected = trained_alone("Llama")
    with torch.inference_mode():
        run = hostward.attach(
            model,
            activations=hostward.Activations(min_bytes=64),
            backend=SimulatedBackend(threads=1, order=Order(eager=True)),
        )
    assert same(trained(model), expected)
    run.detach()


def test_the_report_reads_well() -> None:
    model = NETWORKS["Llama"]()
    with offloading(model) as run:
        trained(model, steps=1)
        text = run.report().explain()
    assert "bytes to the host" in text
    assert "stays, because it is a weight" in text
    assert "reload/0" in run.schedule.to_text()


def test_a_block_of_ones_own_loop() -> None:
    model = NETWORKS["Llama"]()
    expected = trained_alone("Llama")
    backend = SimulatedBackend(threads=1, order=Order(eager=True))
    with hostward.offload_activations(model, num_layers=2, min_bytes=64, backend=backend) as run:
        assert same(trained(model), expected)
        assert run.layers == ["model.layers.0", "model.layers.1"]
        assert run.report().offloaded_bytes > 0
    with pytest.raises(ConfigError, match=r"no option 'layer_count'[\s\S]*options are num_layers"):
        hostward.offload_activations(model, layer_count=2)
    with pytest.raises(ConfigError, match=r"no option 'num_layer'[\s\S]*did you mean num_layers"):
        hostward.offload_activations(model, num_layer=2)


def test_h26_lengths_that_vary_do_not_lock_more_and_more() -> None:
    model = NETWORKS["Llama"]()
    with offloading(model, retain_pinned_buffers=True) as run:
        most = 0
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, 64, (1, 8 + 5 * step % 23), generator=generator)
            before = run.report().offloaded_bytes
            model(input_ids=ids, labels=ids).loss.backward()
            most = max(most, run.report().offloaded_bytes - before)
            assert run.report().host_bytes <= 2.5 * most  # what is there, and what is new, until the step is over


def test_an_attachment_that_nobody_holds_stays_on() -> None:
    model = NETWORKS["Llama"]()
    backend = SimulatedBackend(threads=1, order=Order(eager=True))
    hostward.attach(model, activations=hostward.Activations(min_bytes=64), backend=backend)
    gc.collect()
    loss_of(model, 0).backward()
    assert backend.ledger.by_owner(Tier.HOST)["saved activations"] > 0


def test_layers_inside_checkpoints_of_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """What such a checkpoint saves is saved outside of the layer, where no hook is on."""
    model = NETWORKS["Llama"]()
    layers = list(model.model.layers)  # type: ignore[arg-type, union-attr]
    for reentrant in (True, False):
        caplog.clear()
        with caplog.at_level("WARNING", logger="hostward"), offloading(model) as run:
            for _ in range(3):
                x = torch.randn(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
                rotary = model.model.rotary_emb(x, torch.arange(8)[None])  # type: ignore[union-attr, operator]
                for layer in layers:
                    call = functools.partial(layer, position_embeddings=rotary)
                    x = checkpoint(call, x, use_reentrant=reentrant)
                x.float().square().mean().backward()
            assert run.report().offloaded_bytes == 0
        told = [r.getMessage() for r in caplog.records if "run inside checkpoints" in r.getMessage()]
        assert len(told) == (0 if reentrant else 1)


class Pair(torch.nn.Module):
    """Layers that return a dataclass, use one output only, or change what they returned in place."""

    @dataclass
    class Out:
        unused: torch.Tensor
        used: torch.Tensor

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Pair.Out:
            y = torch.tanh(self.linear(x))
            return Pair.Out(y * 2.0, (x + y * y).view(-1, 16))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).used
            x += 1.0
        return x


def test_outputs_of_any_kind_tell_where_backward_is() -> None:
    def run(model: Pair) -> list[torch.Tensor]:
        found = []
        for seed in range(3):
            model.zero_grad()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    expected = run(Pair())
    for order in FEW:
        model = Pair()
        with offloading(model, order) as attached:
            assert same(run(model), expected)
            assert attached.report().on_demand_bytes == 0


def test_a_model_that_was_moved_is_an_error() -> None:
    model = Pair()
    with offloading(model), pytest.raises(ModelError, match="is on meta, but its saved tensors are offloaded from cpu"):
        model.to("meta")(torch.zeros(2, 16, device="meta"))


class SideStreams(SimulatedBackend):
    """The caller's stream is what the test says."""

    stream = 0

    def compute_key(self) -> int:
        return self.stream


def test_h2_tensors_of_other_streams_stay_and_every_stream_waits() -> None:
    model, backend = Pair(), SideStreams(threads=1, order=Order(eager=True))
    with hostward.offload_activations(model, min_bytes=64, backend=backend) as run:
        hidden = model.layers[1].linear
        hidden.register_forward_pre_hook(lambda *_: setattr(backend, "stream", 1))
        hidden.register_forward_hook(lambda *_: setattr(backend, "stream", 0))
        model(torch.ones(2, 16)).sum().backward()
        assert run.report().kept_bytes["it was made on another stream"] > 0


@pytest.mark.parametrize("given", [True, 2.5, "offload"])
def test_what_is_not_activations_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="does not say what to offload"):
        hostward.attach(Pair(), activations=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a string"):
        hostward.offload_activations(Pair(), modules="linear")
