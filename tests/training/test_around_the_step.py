"""Closures, casts, thawed parameters, other optimizers and gradients set by hand, around gradients that were taken.

Seen red: a closure's gradients looked for before it ran; a placeholder that cannot be cast; no hooks for parameters that
were frozen when the optimizer was made; placeholders that a second optimizer takes for gradients.
"""

from __future__ import annotations

import pytest
import torch
from networks import MIXES, OFFLOADED, Net, loss_of, make
from optimizer_cases import adamw, assert_equal, set_gradients, snapshot

import hostward
from hostward.errors import ModelError
from hostward.training.gradients import MovedGradient

every_mix = pytest.mark.parametrize("mix", MIXES)


@every_mix
def test_h68_a_closure_with_the_context_equals_a_plain_loop(mix: str) -> None:
    results = []
    for closed in (True, False):
        model, optimizer = make(mix)

        def closure(model: Net = model, optimizer: hostward.AdamW = optimizer, seed: int = 0) -> torch.Tensor:
            optimizer.zero_grad()
            for i in range(2):
                with optimizer.accumulate(last=i == 1):
                    loss = loss_of(model, 10 * seed + i)
                    loss.backward()
            return loss

        for step in range(3):
            if closed:
                assert optimizer.step(lambda step=step: closure(seed=step)) > 0  # type: ignore[misc]
            else:
                closure(seed=step)
                optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


@pytest.mark.parametrize("mix", OFFLOADED)
def test_a_module_may_be_cast_after_a_step(mix: str) -> None:
    """`module.to` casts gradients along with weights; one that is used up is no obstacle, one still needed is."""
    with pytest.raises(ModelError, match="_to_copy"):
        taken(mix)[0].double()
    model, optimizer = taken(mix)
    optimizer.step()
    optimizer.wait()
    model.to(torch.float64)
    assert model.head.weight.grad.dtype is torch.float64
    with pytest.raises(ModelError, match="when the optimizer was made"):
        optimizer.step()
    assert model.to("meta").head.weight.grad.device.type == "meta"


@pytest.mark.parametrize("mix", OFFLOADED)
def test_a_parameter_that_is_thawed_later_takes_part_like_the_others(mix: str) -> None:
    """Frozen when the optimizer was made, it could have no hooks then."""
    results = []
    for each in (mix, "device"):
        model = Net()
        model.head.requires_grad_(False)
        optimizer = adamw(list(model.named_parameters()), module=model, **MIXES[each], max_grad_norm=0.5)
        for step in range(4):
            if step == 1:
                model.head.requires_grad_(True)
            with optimizer.accumulate(last=True):
                loss_of(model, step).backward()
            optimizer.step()
        assert isinstance(model.head.weight.grad, MovedGradient)
        results.append(snapshot(model, optimizer))
    assert_equal(*results)
    assert int(results[0]["step head.weight"]) == 3


def test_another_optimizer_may_take_over_a_model_with_placeholders() -> None:
    model, first = taken()
    first.step()
    first.wait()
    del first
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    fresh.zero_grad()
    loss_of(model, 1).backward()
    fresh.step()
    ours = hostward.AdamW(model)
    assert not isinstance(model.head.weight.grad, MovedGradient)
    ours.step()
    loss_of(model, 2).backward()
    ours.step()
    assert {int(e["step"]) for e in ours.state_dict()["state"].values()} == {2}


def test_gradients_set_by_hand_after_others_were_given_up() -> None:
    model, optimizer = taken("mixed")
    optimizer.zero_grad()
    set_gradients(model, 0)
    optimizer.step()
    other_model, other = make("device")
    set_gradients(other_model, 0)
    other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))
