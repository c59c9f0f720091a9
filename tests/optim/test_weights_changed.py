"""Weights changed behind the optimizer (docs/how-it-works.md), the same at every placement.

Seen red with: the load hook removed, the hook left active on copies of the module, `remember` left out after a step,
state_dict() without a look at the weights, a reseed that keeps the remainder, second homes of tied weights dropped, a
reseed that checks names as it goes, replaced Parameters not looked for.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator

import pytest
import torch
from optimizer_cases import (
    DTYPES,
    Model,
    NumpyOptimizer,
    adamw,
    assert_equal,
    mlp,
    mlp_loss,
    set_gradients,
    snapshot,
)

import hostward
from hostward.errors import ModelError
from hostward.kernels import reference

PLACES = (0.0, 0.5, 1.0)
both = pytest.mark.parametrize("fraction", PLACES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, logger="hostward"):
        yield


def trained(dtype: torch.dtype, fraction: float, steps: int = 3) -> tuple[Model, hostward.AdamW, NumpyOptimizer]:
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    expected = NumpyOptimizer.over(model.named_parameters())
    for step in range(steps):
        one_step(model, optimizer, expected, step)
    return model, optimizer, expected


def one_step(model: Model, optimizer: hostward.AdamW, expected: NumpyOptimizer, step: int) -> None:
    set_gradients(model, step)
    expected.step({n: p.grad for n, p in model.named_parameters()})
    optimizer.step()


def seed_reference(expected: NumpyOptimizer, name: str, weight: torch.Tensor) -> None:
    expected.master[name] = weight.detach().float().reshape(-1).numpy().copy()


@every_dtype
@both
def test_load_of_equal_bits_changes_nothing(
    fraction: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, expected = trained(dtype, fraction)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        model.load_state_dict(weights)
    one_step(model, optimizer, expected, 3)
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    assert not caplog.records


@every_dtype
@both
def test_t49_hdo_h4_load_of_other_weights_seeds_the_masters_anew(
    fraction: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the parameters that differ; the others keep master and remainder."""
    model, optimizer, expected = trained(dtype, fraction)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    for name in ("embed.weight", "head.weight"):
        weights[name] = torch.randn(weights[name].shape).to(dtype)
        seed_reference(expected, name, weights[name])
    model.load_state_dict(weights)
    one_step(model, optimizer, expected, 3)
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    assert not caplog.records


@both
def test_what_is_told_of_writes_and_loads(fraction: float, caplog: pytest.LogCaptureFixture) -> None:
    """A load, and whatever is written before the first step, is in order; another write is warned of once."""
    caplog.set_level(logging.INFO, logger="hostward")
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=fraction)
    caplog.clear()

    def write() -> None:
        with torch.no_grad():
            model.head.weight.mul_(0.5)

    def load() -> None:
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})

    seen = []
    for change in (write, load, write, load, write):
        change()
        set_gradients(model, 0)
        optimizer.step()
        seen += [(r.levelname, r.getMessage().partition(";")[0]) for r in caplog.records]
        caplog.clear()
    loaded = ("INFO", f"{len(list(model.parameters())) - 1} weights were loaded or initialised")
    assert seen == [
        ("INFO", "1 weights were loaded or initialised"),
        loaded,
        ("WARNING", "1 weights were changed outside the optimizer"),
        loaded,
        ("INFO", "1 weights were changed outside the optimizer"),
    ]


@every_dtype
@both
def test_in_place_writes_are_seen(fraction: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, expected = trained(dtype, fraction)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
        model.embed.weight[7] = 1.0
    for name in ("head.weight", "embed.weight"):
        seed_reference(expected, name, model.get_parameter(name))
    one_step(model, optimizer, expected, 3)
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    assert len(caplog.records) == 1


@every_dtype
@both
def test_a_state_dict_taken_after_an_in_place_write_holds_the_new_weight(fraction: float, dtype: torch.dtype) -> None:
    model, optimizer, expected = trained(dtype, fraction)
    with torch.no_grad():
        model.head.weight.mul_(1.7)
    seed_reference(expected, "head.weight", model.head.weight)
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    other = Model(dtype, seed=5)
    resumed = adamw(other, offload_fraction=1 - fraction)
    resumed.load_state_dict(optimizer.state_dict())
    if dtype is torch.float32:
        other.load_state_dict(model.state_dict())
    one_step(other, resumed, expected, 3)
    assert_equal(snapshot(other, resumed), expected.snapshot())


@every_dtype
@both
def test_data_writes_need_reseed(fraction: float, dtype: torch.dtype) -> None:
    model, optimizer, expected = trained(dtype, fraction)
    model.head.weight.data.fill_(0.25)
    model.embed.weight.data[0] = 3.0
    optimizer.reseed(["head.weight", "embed.weight"])
    for name in ("head.weight", "embed.weight"):
        seed_reference(expected, name, model.get_parameter(name))
    one_step(model, optimizer, expected, 3)
    assert_equal(snapshot(model, optimizer), expected.snapshot())


@both
def test_reseed_of_everything_keeps_moments_and_counts(fraction: float) -> None:
    model, optimizer, expected = trained(torch.bfloat16, fraction)
    optimizer.reseed()
    for name, p in model.named_parameters():
        seed_reference(expected, name, p)
    assert_equal(snapshot(model, optimizer), expected.snapshot())


def test_reseed_of_an_unknown_name_is_refused() -> None:
    model, optimizer, expected = trained(torch.bfloat16, 0.5)
    with pytest.raises(ModelError, match="no parameter 'head'"):
        optimizer.reseed(["head.weight", "head"])
    assert_equal(snapshot(model, optimizer), expected.snapshot())


@both
def test_t25_a_replaced_parameter_is_a_typed_error(fraction: float) -> None:
    model, optimizer, _ = trained(torch.bfloat16, fraction)
    before = snapshot(model, optimizer)
    old = model.head.weight
    model.head.weight = torch.nn.Parameter(old.detach().clone())
    set_gradients(model, 3)
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ModelError, match=r"'head\.weight' was replaced") as caught:
            call()
        assert "new optimizer" in caught.value.fix
    model.head.weight = old
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(before, snapshot(model, optimizer))


def test_load_with_assign_replaces_and_is_refused() -> None:
    model, optimizer, _ = trained(torch.bfloat16, 0.5)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ModelError, match="replaced"):
        optimizer.step()


@both
def test_a_tied_weight_loaded_through_both_names(fraction: float, caplog: pytest.LogCaptureFixture) -> None:
    def tied() -> torch.nn.Module:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8, bias=False), "b": torch.nn.Linear(8, 8, bias=False)})
        torch.nn.init.normal_(model["a"].weight, generator=torch.Generator().manual_seed(0))
        model["b"].weight = model["a"].weight
        return model.to(torch.bfloat16)

    model = tied()
    optimizer = adamw(model, offload_fraction=fraction)
    set_gradients(model, 0)
    optimizer.step()
    before = snapshot(model, optimizer)
    caplog.clear()  # one bucket: a share of a half places nothing
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(before, snapshot(model, optimizer))
    assert not caplog.records
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    weights["b.weight"] += 1  # the second name wins
    model.load_state_dict(weights)
    optimizer.step()
    master = optimizer.state_dict()["state"]["a.weight"]["master"]
    assert torch.equal(master, weights["b.weight"].float())


@both
def test_a_copy_of_the_model_is_not_the_model(fraction: float, caplog: pytest.LogCaptureFixture) -> None:
    """An averaged copy that takes our weights must not make us blind to the next write."""
    model, optimizer, expected = trained(torch.bfloat16, fraction)
    average = copy.deepcopy(model)
    average.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    seed_reference(expected, "head.weight", model.head.weight)
    one_step(model, optimizer, expected, 3)
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    assert len(caplog.records) == 1


def test_the_model_can_be_saved_whole() -> None:
    model = mlp(torch.bfloat16)
    adamw(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_hooks_go_with_the_optimizer() -> None:
    model = Model()
    first = adamw(model)
    del first
    optimizer = adamw(model, offload_fraction=0.5)
    model.load_state_dict(model.state_dict())
    set_gradients(model, 0)
    optimizer.step()


def test_named_parameters_have_no_module_to_watch(caplog: pytest.LogCaptureFixture) -> None:
    """Without a module a load cannot be told from any other write: weights are kept, remainders are not; said so."""
    model = Model(torch.bfloat16)
    optimizer = adamw(model.named_parameters(), offload_fraction=0.5)
    set_gradients(model, 0)
    optimizer.step()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    optimizer.zero_grad()
    optimizer.step()
    assert len(caplog.records) == 1
    entry = optimizer.state_dict()["state"]["head.weight"]
    assert torch.equal(entry["master"], model.head.weight.detach().float())


@pytest.mark.parametrize("fraction", PLACES)
def test_a_loaded_weight_is_rounded_as_torch_rounds(fraction: float) -> None:
    """An fp32 checkpoint into a bf16 model: the weight that torch made of it is the new master."""
    model, optimizer, expected = trained(torch.bfloat16, fraction)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = {k: v.float() + 1e-3 for k, v in model.state_dict().items()}
    model.load_state_dict(weights)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), weights[name].bfloat16())
        if not torch.equal(p.detach(), before[name]):  # small ones may round to what they were
            seed_reference(expected, name, p)
    one_step(model, optimizer, expected, 3)
    assert_equal(snapshot(model, optimizer), expected.snapshot())


@both
def test_nan_and_negative_zero_weights_survive_a_load(fraction: float, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(torch.bfloat16)
    with torch.no_grad():
        model.head.weight[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    optimizer = adamw(model, offload_fraction=fraction)
    before = snapshot(model, optimizer)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    optimizer.step()
    assert not caplog.records
    assert_equal(before, snapshot(model, optimizer))


@both
def test_t42_forwards_without_a_step_leave_no_trace(fraction: float) -> None:
    """No-grad, eval, an exception in forward, a backward that is thrown away."""
    results = []
    for disturbed in (False, True):
        model = mlp(torch.bfloat16)
        optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=0.1)
        for step in range(3):
            if disturbed:
                with torch.no_grad():
                    mlp_loss(model, 77)
                mlp_loss(model.eval(), 78).backward()
                model.train()
                with pytest.raises(RuntimeError):
                    model(torch.zeros(3, 5, dtype=torch.bfloat16))
            optimizer.zero_grad()
            mlp_loss(model, step).backward()
            optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


def test_reference_and_torch_agree_on_what_a_reseed_means() -> None:
    """Guards `seed_reference`: the master of a weight alone is the weight, its remainder zero."""
    weight = torch.randn(50).bfloat16()
    bits, remainder = reference.split_master(weight.float().numpy())
    assert not remainder.any()
    assert (bits.view("int16") == weight.view(torch.int16).numpy()).all()
