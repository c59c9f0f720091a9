"""Weights that wait on the CPU for `attach`, because the device has no room for all of them.

Seen red: host copies made of what lies on the device, a layer that counts as fetched, values kept after the optimizer
has them, readers that are not refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from activation_cases import FEW, loss_of, same
from weight_cases import ALL, ON_HOST, SAVED, expected, frozen, nbytes_here, network, train

import hostward
from hostward.errors import ConfigError, DeviceError, HostwardError, ModelError
from hostward.model.deferred_weights import is_away, value_of
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend

NAMES = ["Llama", "Qwen3", "Qwen3Moe", "encoder"]


def moved(name: str, **options: Any) -> torch.nn.Module:
    model = network(name)
    hostward.move(model, "cpu", **{"weights": ALL, **options})
    return model


def made(model: torch.nn.Module, **options: Any) -> hostward.AdamW:
    return hostward.AdamW(
        model, backend=SimulatedBackend(threads=1, order=Order(eager=True)), host_threads=1, **{**ON_HOST, **options}
    )


@pytest.mark.parametrize("name", NAMES)
def test_training_keeps_its_bits(name: str) -> None:
    for order in (FEW[1], FEW[3]):
        found, run = train(moved(name), order, attached={"weights": ALL, "activations": SAVED})
        assert same(found, expected(name)), order
        assert run is not None


def test_weights_have_no_bytes_until_a_layer_runs() -> None:
    model = moved("Llama")
    waiting = [p for p in model.parameters() if is_away(p)]
    assert len(waiting) > 8
    assert all(nbytes_here(p) == 0 for p in waiting)
    values = {p: value_of(p) for p in waiting}
    optimizer = made(model)
    assert not [p for p in waiting if value_of(p) is values[p]], "the host's copies have them now"
    run = hostward.attach(model, optimizer, weights=ALL)
    assert not any(is_away(p) for p in waiting)
    assert all(nbytes_here(p) == 0 for p in waiting)
    here = optimizer.backend.ledger.held_bytes[Tier.DEVICE, "weights"]
    assert here == sum(p.nbytes for p in model.parameters() if p not in set(waiting))
    loss_of(model, 0).backward()
    run.detach()
    assert all(torch.equal(p, values[p]) for p in waiting)
    assert optimizer.backend.ledger.held_bytes[Tier.DEVICE, "weights"] == sum(p.nbytes for p in model.parameters())


def test_frozen_weights_need_no_optimizer() -> None:
    plain = frozen("Llama")
    model = frozen("Llama")
    hostward.move(model, "cpu", weights=ALL)
    run = hostward.attach(model, weights=ALL, backend=SimulatedBackend(threads=1, order=Order(eager=True)))
    assert torch.equal(loss_of(model, 0), loss_of(plain, 0))
    run.detach()
    assert same(list(model.parameters()), list(plain.parameters()))


def test_a_state_on_the_device_is_made_of_the_values_and_attach_says_what_is_missing() -> None:
    model = moved("Llama")
    optimizer = made(model, offload_fraction=0.0)
    with pytest.raises(ConfigError, match="is trained, and cannot be offloaded"):
        hostward.attach(model, optimizer, weights=ALL)


def test_what_reads_a_weight_that_waits_is_refused() -> None:
    model = moved("Llama")
    optimizer = made(model)
    readers = (
        lambda: loss_of(model, 0),
        model.state_dict,
        lambda: model.load_state_dict({}),
        lambda: copy.deepcopy(model),
        lambda: model.to(torch.float32),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(made(network("Llama")).state_dict()),
        optimizer.step,
    )
    for reader in readers:
        with pytest.raises(ModelError, match=r"waits on the CPU"):
            reader()
    run = hostward.attach(model, optimizer, weights=ALL)
    loss_of(model, 0).backward()
    optimizer.step()
    assert len(model.state_dict()) > 8
    run.detach()


def test_a_load_that_is_refused_writes_nothing() -> None:
    """Seen red: it raised at the first layer that waits, when the embedding before it had been written."""
    model, other = moved("Llama"), network("Llama")
    here = {name: p.detach().clone() for name, p in model.named_parameters() if not is_away(p)}
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    with pytest.raises(ModelError, match=r"waits on the CPU"):
        model.load_state_dict(other.state_dict())
    assert here
    assert all(torch.equal(model.get_parameter(name), value) for name, value in here.items())


def test_the_same_layers_for_both() -> None:
    model = moved("Llama")
    with pytest.raises(ConfigError, match="give the same weights="):
        hostward.attach(model, made(model), weights=hostward.Weights(num_layers=1, min_elements=0))


@pytest.mark.parametrize("problem", ["twice", "a gradient"])
def test_a_model_that_is_not_new(problem: str) -> None:
    model = network("Llama")
    if problem == "twice":
        hostward.move(model, "cpu", weights=ALL)
    else:
        loss_of(model, 0).backward()
    with pytest.raises(ModelError, match="is not on the CPU" if problem == "twice" else "has a gradient"):
        hostward.move(model, "cpu", weights=ALL)


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [("cudda", ConfigError, "is no device"), ("cuda:0", DeviceError, "there is no CUDA device")],
)
def test_a_device_that_is_not_there(device: str, error: type[HostwardError], said: str) -> None:
    if error is DeviceError and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(error, match=said):
        hostward.move(network("Llama"), device)


def test_too_many_layers() -> None:
    with pytest.raises(ConfigError, match="layers were asked for, and of a model of"):
        moved("Llama", weights=99)
