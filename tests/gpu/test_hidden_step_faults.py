"""The hidden step on a GPU, cut short: exceptions in backward, errors of host functions, optimizers that go, modules
that move, and reads that nobody fenced.
"""

from __future__ import annotations

import gc

import pytest
import torch
from hidden_step_cases import (
    DEVICE,
    SIDE_LANES,
    assert_equal,
    deterministic,
    every_mix,
    everything,
    loss_of,
    make,
    slow,
)

from hostward.errors import ModelError, NativeError, OrderingError
from hostward.kernels.cpu.adamw import bias_tables
from hostward.optim import op_binding
from hostward.optim.bucket_state import same_bits

__all__ = ["deterministic"]
pytestmark = pytest.mark.gpu


class BrokenDataError(Exception):
    pass


def break_off(*_: object) -> None:
    raise BrokenDataError


@pytest.mark.parametrize("layer", [0, 2])
@every_mix
def test_t42_h41_after_an_exception_in_backward_zero_grad_makes_everything_whole(
    mix: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(SIDE_LANES, monkeypatch)
    model, optimizer = make(mix)
    other_model, other = make(None)
    for step in range(4):
        for m, o in ((model, optimizer), (other_model, other)):
            with o.accumulate(last=True):
                loss_of(m, step).backward()
            o.step()
            o.zero_grad()
        handle = model.layers[layer].weight.register_hook(break_off)
        with pytest.raises(BrokenDataError), optimizer.accumulate(last=True):
            loss_of(model, 50 + step).backward()
        handle.remove()
        with pytest.raises(ModelError, match="is incomplete"):
            optimizer.step()
        optimizer.zero_grad()
    assert_equal(everything(model, optimizer), everything(other_model, other))


def test_an_error_of_a_host_function_is_told_and_torch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make("host")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(op_binding, "bias_tables", lambda beta1, beta2, steps: bias_tables(beta1, beta2, 2))
        for seed in range(2):
            with optimizer.accumulate(last=True):
                loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(NativeError):
            optimizer.wait()
    assert torch.empty(8, device=DEVICE).fill_(1.0).sum().item() == 8.0
    with pytest.raises(ModelError, match="interrupted half way"):
        optimizer.step()
    optimizer._executor._bindings._tables.clear()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    other_model, other = make(None)
    for m, o in ((model, optimizer), (other_model, other)):
        with o.accumulate(last=True):
            loss_of(m, 5).backward()
        o.step()
    assert_equal(everything(model, optimizer), everything(other_model, other))


@every_mix
def test_weights_have_arrived_when_the_optimizer_is_gone(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(SIDE_LANES, monkeypatch)
    model, optimizer = make(mix)
    other_model, other = make(None)
    for m, o in ((model, optimizer), (other_model, other)):
        with o.accumulate(last=True):
            loss_of(m, 0).backward()
        o.step()
    del optimizer, o
    gc.collect()
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())


@every_mix
def test_a_module_moves_to_the_host_after_a_step_with_placeholders_in_grad(mix: str) -> None:
    model, optimizer = make(mix)
    with optimizer.accumulate(last=True):
        loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()
    model.cpu()
    assert model.head.weight.grad.device.type == "cpu"
    with pytest.raises(ModelError, match="when the optimizer was made"):
        optimizer.step()


@every_mix
def test_unfenced_reads_are_found(mix: str) -> None:
    model, optimizer = make(mix, fence=False)
    with optimizer.accumulate(last=True):
        loss_of(model, 0).backward()
    optimizer.step()
    with optimizer.find_unfenced_reads():
        with pytest.raises(OrderingError, match="before it has arrived"):
            torch.linalg.vector_norm(model.layers[3].weight)
        loss_of(model, 1)
        torch.linalg.vector_norm(model.layers[3].weight)
