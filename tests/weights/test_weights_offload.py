"""Offloaded weights: every loss, gradient and weight keeps its bits, in every order of lanes; bytes leave and come
back; each wait is needed.

Seen red: fetches that do not wait for the host step, weights that are read before they arrive or go before they are
done with, a refilled weight that counts as changed, uploads that stand before fetches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from activation_cases import FEW, ORDERS, loss_of, same
from weight_cases import (
    ALL,
    ON_HOST,
    SAVED,
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
from hostward.errors import ConfigError, ModelError, OrderingError
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane
from hostward.schedule.weights import WEIGHT_OPS
from hostward.weights import residency as weight_residency

WAYS: dict[str, dict[str, Any]] = {
    "weights": {"weights": ALL},
    "both": {"weights": 2, "activations": SAVED},
}
NAMES = ["Llama", "Qwen3", "Qwen3Moe", "encoder"]
slow = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_training_keeps_its_bits(name: str, way: str) -> None:
    for order in (FEW[1], FEW[3]):
        found, run = train(network(name), order, attached=WAYS[way])
        assert same(found, expected(name)), order
        assert run is not None
        assert run.report().on_demand_bytes == 0


@slow
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe"])
def test_with_checkpointed_layers(name: str, reentrant: bool) -> None:
    for way in WAYS.values():
        found, _ = train(network(name, reentrant), FEW[1], attached=way)
        assert same(found, expected(name))


def test_in_every_order_of_lanes() -> None:
    orders = [*ORDERS, Order(late=frozenset({Lane.HOST})), Order(late=frozenset({Lane.HOST, Lane.H2D}))]
    for order in orders:
        assert same(train(network("encoder"), order, attached=WAYS["weights"])[0], expected("encoder")), order


@pytest.mark.parametrize("options", [{"overlap": False}, {"gradients": "host"}], ids=str)
def test_with_other_ways_of_stepping(options: dict[str, Any]) -> None:
    for order in (FEW[0], FEW[1]):
        found, _ = train(network("encoder"), order, attached=WAYS["weights"], **options)
        assert same(found, expected("encoder", **options)), order


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_frozen_weights(name: str) -> None:
    whole = gradients(frozen(name))
    for order in FEW:
        for options in ({}, {"activations": SAVED}):
            model = frozen(name)
            with away(model, order, **options):
                assert same(gradients(model), whole), order
            assert same(gradients(model), whole), "after detach()"


def test_all_are_foreseen_but_the_first() -> None:
    model = frozen()
    with away(model) as run:
        gradients(model, 3)
        report = run.report().weights
        assert report is not None
        layer = report.offloaded_bytes // 3
        assert report.on_demand_bytes == layer
        # Forward and backward of three layers; between two backwards the first one stays.
        assert report.fetched_bytes == 3 * 6 * layer - 2 * layer
        assert report.held_bytes == 0


def test_two_layers_are_here_at_a_time() -> None:
    model = frozen()
    most: list[list[int]] = []

    def look(*given: Any) -> None:
        most.append([i for i in layers_here(model) if i < 3])
        if len(given) == 3 and isinstance(given[2], torch.Tensor) and given[2].requires_grad:
            given[2].register_hook(look)

    for module in model.modules():
        module.register_forward_hook(look)
    with away(model):
        assert layers_here(model) == [3]
        gradients(model)
        assert max(map(len, most)) == 2
        assert layers_here(model) == [0, 3]
        with torch.no_grad():
            loss_of(model, 0)
        assert layers_here(model) == [0, 3]
    assert layers_here(model) == [0, 1, 2, 3]


def test_conservation_of_bytes() -> None:
    model = frozen()
    whole = bytes_here(model)
    with away(model) as run:
        report = run.report().weights
        assert report is not None
        assert report.here_bytes == 0
        host_bytes = run.backend.ledger.total_bytes(Tier.HOST)
        assert bytes_here(model) + host_bytes == whole
        assert report.offloaded_bytes == report.host_bytes == report.freed_bytes == host_bytes
        assert f"weights: {host_bytes:,} bytes on the host" in run.report().explain()


def test_weights_alone_tell_nothing_of_saved_tensors() -> None:
    """Seen red: what all layers save, under the weights, as what stays."""
    model = frozen()
    with away(model) as run:
        loss_of(model, 0).backward()
        assert run.report().kept_bytes
        assert "its layer stays" not in run.report().explain()


def test_there_is_one_host_copy_of_a_weight_that_the_host_steps() -> None:
    model = network("Llama")
    backend = SimulatedBackend(threads=1)
    optimizer = hostward.AdamW(model, backend=backend, **ON_HOST)
    before = backend.ledger.total_bytes(Tier.HOST)
    with hostward.attach(model, optimizer, weights=3) as run:
        assert backend.ledger.total_bytes(Tier.HOST) == before
        report = run.report().weights
        assert report is not None
        assert report.host_bytes == 0
        assert report.freed_bytes == report.offloaded_bytes > 0
        assert backend.ledger.by_owner(Tier.DEVICE)["weights"] == bytes_here(model)
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        assert bytes_here(model) == whole - report.freed_bytes


def test_refilled_weights_do_not_count_as_changed(caplog: pytest.LogCaptureFixture) -> None:
    train(network("encoder"), attached=WAYS["weights"])
    assert "changed outside" not in caplog.text


@pytest.mark.parametrize("op", ["fetch", "arrive", "empty"])
def test_each_wait_is_needed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {**WEIGHT_OPS, op: replace(WEIGHT_OPS[op], waits=())}
    monkeypatch.setattr(weight_residency, "WEIGHT_OPS", broken)
    model = frozen()
    backend = SimulatedBackend(threads=1, order=Order(late=frozenset({Lane.H2D})))
    run = hostward.attach(model, weights=ALL, backend=backend)
    assert run._weights is not None
    residency = run._weights.residency

    def fetched_and_never_used() -> None:
        residency.prefetch(1)
        residency.sweep()

    with pytest.raises(OrderingError, match="nothing orders"):
        fetched_and_never_used() if op == "empty" else gradients(model)


def test_fetches_wait_for_the_host_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = weight_residency.bind_layer
    monkeypatch.setattr(
        "hostward.weights.policy.bind_layer",
        lambda backend, name, weights, steps: bind(backend, name, weights, []),
    )
    with pytest.raises(OrderingError, match="nothing orders"):
        train(network("encoder"), Order(late=frozenset({Lane.HOST})), attached=WAYS["weights"])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"offload_fraction": 1.0, "streamed_fraction": 1.0}, "'streamed'"),
        ({"offload_fraction": 0.0, "streamed_fraction": 0.0}, "'device'"),
    ],
)
def test_weights_that_the_device_steps(options: dict[str, float], why: str) -> None:
    model = network("encoder")
    optimizer = hostward.AdamW(model, backend=SimulatedBackend(threads=1), **options)
    with pytest.raises(ConfigError, match="is trained, and cannot be offloaded") as raised:
        hostward.attach(model, optimizer, weights=ALL)
    assert why in str(raised.value)
    assert "streamed_fraction=0.0" in str(raised.value)


def test_trained_weights_without_an_optimizer() -> None:
    with pytest.raises(ConfigError, match="is trained, and cannot be offloaded"):
        hostward.attach(network("encoder"), weights=ALL)


@pytest.mark.parametrize("given", [0, 4, -1])
def test_so_many_layers(given: int) -> None:
    with pytest.raises(ConfigError, match="layers were asked for, and of a model of 4 at most 3 can be offloaded"):
        hostward.attach(frozen(), weights=given)


def test_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match="without anything to offload"):
        hostward.attach(frozen())
    with pytest.raises(ConfigError, match="no weight can be offloaded"):
        hostward.attach(frozen(), weights=hostward.Weights(min_elements=10**9))
    with pytest.raises(ConfigError, match="does not say what to offload"):
        hostward.attach(frozen(), weights=True)
    with pytest.raises(ConfigError, match="min_elements must not be negative"):
        hostward.attach(frozen(), weights=hostward.Weights(min_elements=-1))


def test_subclasses_of_tensors() -> None:
    class Quantised(torch.Tensor):
        pass

    model = frozen()
    layer: Any = model.model.layers[1]  # type: ignore[union-attr, index]
    layer.mlp.up_proj.weight = torch.nn.Parameter(
        layer.mlp.up_proj.weight.data.as_subclass(Quantised), requires_grad=False
    )
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight' is a Quantised"):
        hostward.attach(model, weights=ALL)


def test_memory_of_others_is_refused_and_a_copy_of_it_is_not() -> None:
    """As in a model that is loaded from safetensors on a CPU. Seen red: told to be of another layout."""
    model = network("encoder")
    for p in model.parameters():
        p.requires_grad_(False).data.numpy()  # its memory is as one that is mapped from a file
    with pytest.raises(ConfigError, match=r"memory is that of a file, of NumPy(.|\n)*p\.data = p\.data\.clone\(\)"):
        hostward.attach(model, weights=ALL)
    for p in model.parameters():
        p.data = p.data.clone()
    hostward.attach(model, weights=ALL).detach()


def test_the_optimizer_is_as_it_was_after_detach() -> None:
    """And may be attached to again."""
    weights = []
    for attached in ([], [0, 2]):
        model = network("encoder").eval()
        optimizer = hostward.AdamW(model, lr=1e-2, backend=SimulatedBackend(threads=1), **ON_HOST)
        for step in range(4):
            run = hostward.attach(model, optimizer, weights=ALL) if step in attached else None
            if run is not None:
                with pytest.raises(ModelError, match="a parameter group added while weights are offloaded"):
                    optimizer.add_param_group({"params": [("x", torch.nn.Parameter(torch.ones(3)))]})
                assert not [op for op in optimizer.schedule.ops if op.name == "upload/0"]
            loss_of(model, step).backward()
            optimizer.step()
            if run is not None:
                run.detach()
            assert [op for op in optimizer.schedule.ops if op.name == "upload/0"]
        optimizer.wait()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert same(*weights)


def test_not_between_backward_and_step() -> None:
    model = network("encoder")
    optimizer = hostward.AdamW(model, backend=SimulatedBackend(threads=1), **ON_HOST)
    with optimizer.accumulate(last=True):
        loss_of(model, 0).backward()
    with pytest.raises(ModelError, match="between backward and step"):
        hostward.attach(model, optimizer, weights=ALL)
    optimizer.step()
    assert all(nbytes_here(p) for p in model.parameters())


@pytest.mark.parametrize("fix", ["step", "zero_grad"])
def test_a_refused_detach_undoes_nothing_and_its_fix_works(fix: str) -> None:
    """Seen red: hooks removed before the refusal, so that forward met weights without memory."""
    found = []
    for early in (False, True):
        model = network("encoder").eval()
        optimizer = hostward.AdamW(model, lr=1e-2, backend=SimulatedBackend(threads=1), **ON_HOST)
        run = hostward.attach(model, optimizer, weights=ALL)
        for step in range(4):
            with optimizer.accumulate(last=True):
                loss_of(model, step).backward()
            if early and step == 1:
                with pytest.raises(ModelError, match="between backward and step"):
                    run.detach()
            if step != 1 or fix == "step":
                optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                run.detach()
        optimizer.wait()
        found.append([p.detach().clone() for p in model.parameters()])
    assert same(*found)


def test_an_error_between_backward_and_step_leaves_the_block_as_it_is() -> None:
    """Seen red: ModelError of the detaching in its place."""
    model = network("encoder")
    optimizer = hostward.AdamW(model, backend=SimulatedBackend(threads=1), **ON_HOST)

    def fails() -> None:
        with hostward.attach(model, optimizer, weights=ALL):
            with optimizer.accumulate(last=True):
                loss_of(model, 0).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert all(nbytes_here(p) for p in model.parameters())
    optimizer.zero_grad()
    with hostward.attach(model, optimizer, weights=ALL):
        loss_of(model, 0).backward()
        optimizer.step()
