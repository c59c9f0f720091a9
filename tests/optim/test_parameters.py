"""Kinds of parameters: unused, frozen, tied, empty, strided; and where the optimizer is built.

Seen red with: a range stepped although its parameter has no gradient, `scatter` left out for strided weights,
strided gradients flattened without a copy, flags of the step before kept, state built as inference tensors, version
counters left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from optimizer_cases import (
    DTYPES,
    NEVER,
    Model,
    NumpyOptimizer,
    adamw,
    assert_equal,
    backend,
    differing,
    mlp,
    mlp_loss,
    set_gradients,
    snapshot,
)

from hostward.errors import ModelError

PLACES = (0.0, 0.5, 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", PLACES)
@pytest.mark.parametrize("unused", [NEVER, "embed.weight", "layers.0.weight", "head.weight"])
def test_hdo_h1_a_parameter_without_a_gradient_keeps_everything(
    unused: str, fraction: float, dtype: torch.dtype
) -> None:
    """At both placements, first, last and in the middle of a bucket, after a step in which it had one."""
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    set_gradients(model, 0)
    optimizer.step()
    before = snapshot(model, optimizer)
    set_gradients(model, 1, skip=[unused])
    optimizer.step()
    changed = differing(before, snapshot(model, optimizer))
    assert not [name for name in changed if name.endswith(f" {unused}")]
    assert {f"step {name}" for name in dict(model.named_parameters())} - changed == {
        f"step {unused}",
        "step layers.1.empty",  # no elements, no step
    }


@pytest.mark.parametrize("fraction", PLACES)
def test_a_step_without_any_gradient_changes_nothing(fraction: float) -> None:
    model = Model()
    optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=1.0)
    set_gradients(model, 0)
    model.head.weight.grad[0, 0] = float("nan")
    optimizer.step()
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(before, snapshot(model, optimizer))
    assert not optimizer.last_step_skipped
    assert optimizer.grad_norm == 0.0


@pytest.mark.parametrize("fraction", PLACES)
def test_zero_grad_both_ways(fraction: float) -> None:
    """A zero gradient is a gradient: the moments decay, the count advances."""
    results = []
    for set_to_none in (True, False):
        model = mlp()
        optimizer = adamw(model, offload_fraction=fraction)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            mlp_loss(model, step).backward()
            optimizer.step()
        results.append((model, optimizer))
        assert_equal(snapshot(*results[0]), snapshot(model, optimizer))
    (_, none), (_, zeros) = results
    none.zero_grad(set_to_none=True)
    none.step()
    assert {int(e["step"]) for e in none.state_dict()["state"].values()} == {3}
    zeros.zero_grad(set_to_none=False)
    with pytest.raises(ModelError, match="without a new gradient"):  # the last one was taken: there is none to zero
        zeros.step()
    assert_equal(snapshot(*results[0]), snapshot(*results[1]))


@pytest.mark.parametrize("fraction", PLACES)
def test_gradients_of_a_serial_step_stay_where_they_are(fraction: float) -> None:
    """With overlap=False a step takes nothing out of `.grad`: it may be read, zeroed and stepped with again."""
    model = mlp()
    optimizer = adamw(model, offload_fraction=fraction, overlap=False, backend=None)
    mlp_loss(model, 0).backward()
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert_equal({name: p.grad for name, p in model.named_parameters()}, kept)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = snapshot(model, optimizer)
    optimizer.step()
    after = snapshot(model, optimizer)
    assert {int(after[name]) for name in after if name.startswith("step ")} == {3}
    assert not differing(before, after).isdisjoint({name for name in after if name.startswith("exp_avg ")})


def test_a_zero_gradient_is_a_gradient() -> None:
    """Moments decay and counts advance, as in torch.optim.AdamW."""
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=0.5)
    expected = NumpyOptimizer.over(model.named_parameters())
    for step in range(2):
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, 1.0 - step)
            assert name in expected.count
        expected.step({n: p.grad for n, p in model.named_parameters()})
        optimizer.step()
    assert_equal(snapshot(model, optimizer), expected.snapshot())


@pytest.mark.parametrize("fraction", PLACES)
def test_t24_frozen_parameters_have_no_state_and_do_not_move(fraction: float) -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    frozen = model[2].weight.detach().clone()
    optimizer = adamw(model, offload_fraction=fraction)
    for step in range(2):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()
    assert torch.equal(model[2].weight, frozen)
    assert "2.weight" not in optimizer.state_dict()["state"]
    assert optimizer.inventory.numel == sum(p.numel() for p in model.parameters()) - frozen.numel()


class Tied(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 40, dtype=dtype)
        self.head = torch.nn.Linear(40, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", PLACES)
def test_t22_tied_weights_have_one_state_and_one_update(fraction: float, dtype: torch.dtype) -> None:
    model = Tied(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    expected = NumpyOptimizer.over(model.named_parameters())
    tokens = torch.arange(20)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).float(), tokens).backward()
        expected.step({"embed.weight": model.embed.weight.grad})
        optimizer.step()
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    assert model.head.weight is model.embed.weight
    assert optimizer.inventory.numel == 2000


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t.reshape(-1)[7:],
    "channels_last": lambda t: t.reshape(5, 4, 10, 6).contiguous(memory_format=torch.channels_last),
    "column": lambda t: t[:, 3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_h54_parameters_of_any_layout_equal_contiguous_ones(fraction: float, dtype: torch.dtype, layout: str) -> None:
    storage = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    around = storage.clone()
    data = LAYOUTS[layout](storage)
    strides = data.stride()
    strided, plain = (
        torch.nn.Parameter(data),
        torch.nn.Parameter(data.detach().clone(memory_format=torch.contiguous_format)),
    )
    assert strided.data_ptr() == data.data_ptr()
    results = []
    for parameter in (strided, plain):
        optimizer = adamw([("w", parameter), ("b", torch.nn.Parameter(torch.ones(3, dtype=dtype)))])
        optimizer = adamw([("w", parameter)], offload_fraction=fraction, max_grad_norm=0.5)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            optimizer.step()
        results.append({"weight": parameter.detach(), **optimizer.state_dict()["state"]["w"]})
    assert_equal(*results)
    assert strided.stride() == strides
    if layout != "channels_last":  # a copy: its storage is its own
        storage_now = storage.clone()
        LAYOUTS[layout](storage_now).copy_(LAYOUTS[layout](around))
        assert torch.equal(storage_now, around), "written beside the parameter"


GRADIENT_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "strided": lambda g: torch.stack([g, g + 1], dim=-1)[..., 0],
    "expanded": lambda g: g[:1].expand(g.shape),
    "offset": lambda g: torch.cat([torch.zeros(3, dtype=g.dtype), g.reshape(-1)])[3:].view(g.shape),
}


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_gradients_of_any_layout_equal_contiguous_ones(fraction: float, layout: str) -> None:
    results = []
    for contiguous in (True, False):
        parameter = torch.nn.Parameter(torch.ones(70, 90, dtype=torch.bfloat16))
        optimizer = adamw([("w", parameter)], offload_fraction=fraction, max_grad_norm=0.5)
        for step in range(2):
            grad = torch.randn(70, 90, generator=torch.Generator().manual_seed(step)).bfloat16()
            grad = GRADIENT_LAYOUTS[layout](grad)
            parameter.grad = grad.contiguous() if contiguous else grad
            optimizer.step()
        results.append({"weight": parameter.detach(), **optimizer.state_dict()["state"]["w"]})
    assert_equal(*results)


def test_only_zero_size_parameters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer = adamw([("w", parameter)], offload_fraction=1.0)
    parameter.grad = torch.zeros(0, 3)
    optimizer.step()
    assert optimizer.state_dict()["state"]["w"]["exp_avg"].shape == (0, 3)
    optimizer.load_state_dict(optimizer.state_dict())


def test_h28_built_inside_inference_mode_then_trained() -> None:
    model, other = Model(torch.bfloat16), Model(torch.bfloat16)
    with torch.inference_mode():
        inside = adamw(model, offload_fraction=0.5)
    outside = adamw(other, offload_fraction=0.5)
    for m, o in ((model, inside), (other, outside)):
        set_gradients(m, 0)
        o.step()
    assert_equal(snapshot(model, inside), snapshot(other, outside))


def test_a_default_device_does_not_matter() -> None:
    model, other = Model(torch.bfloat16), Model(torch.bfloat16)
    set_gradients(model, 0)
    set_gradients(other, 0)
    with torch.device("meta"):
        optimizer = adamw(model, offload_fraction=0.5, max_grad_norm=1.0)
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
    plain = adamw(other, offload_fraction=0.5, max_grad_norm=1.0)
    plain.step()
    assert_equal(snapshot(model, optimizer), snapshot(other, plain))
    assert {str(v.device) for entry in state["state"].values() for v in entry.values()} == {"cpu"}


def test_a_model_with_an_optimizer_can_be_copied() -> None:
    model = Model()
    adamw(model)
    assert torch.equal(copy.deepcopy(model).head.weight, model.head.weight)


def test_weights_know_that_they_were_updated() -> None:
    """Autograd refuses to use a weight that it saved before the step."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = adamw([("w", parameter)], backend=backend(seed=1))
    loss = parameter.square().sum()
    parameter.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
