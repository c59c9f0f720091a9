"""Gradients and weights that are views of somebody's flat buffers, as Megatron's distributed data parallel keeps them.

The owner hands gradients over by name, waits for weights by name, and clears its buffer when it may. Bits equal those
of the same step with everything on the device, in every late order; a wait that is left out is seen.

Seen red: each wait of the owner, and of the executor behind it, left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from optimizer_cases import adamw, assert_equal, backend, snapshot

from hostward.errors import CheckpointError, ConfigError, ModelError, OrderingError
from hostward.optim.step_executor import StepExecutor
from hostward.runtime.backend import Lane

LAYERS, WIDTH = 4, 160
LATE = [frozenset(), *({lane} for lane in Lane if lane is not Lane.COMPUTE), set(Lane) - {Lane.COMPUTE}]
MIXES = {
    "device": {"offload_fraction": 0.0},
    "half": {"offload_fraction": 0.5},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 1.0, "streamed_fraction": 0.5},
}


class Owner:
    """A model whose weights lie in one flat buffer and whose gradients add up in another, in fp32."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.names = [f"layers.{i}.weight" for i in range(LAYERS)]
        numel = WIDTH * WIDTH
        self.weights = (torch.randn(LAYERS * numel) * 0.1).to(torch.bfloat16)
        self.gradients = torch.zeros(LAYERS * numel)
        self.views = dict(zip(self.names, self.weights.split(numel), strict=True))
        self.main = dict(zip(self.names, self.gradients.split(numel), strict=True))
        named = [(name, torch.nn.Parameter(view)) for name, view in self.views.items()]
        common = {"max_grad_norm": 0.5, "grad_dtype": torch.float32, "waits": "manual"}
        self.optimizer = adamw(named, **{**common, **options})
        self.norms: list[float] = []

    def train(self, steps: int, *, wait: bool = True, fence: bool = True, first: int = 0) -> None:
        for step in range(first, first + steps):
            if fence:
                self.optimizer.wait_for_gradients()
            self.gradients.zero_()
            for microbatch in range(2):
                self.microbatch(step, last=microbatch == 1, wait=wait)
            self.optimizer.step()
            self.norms.append(self.optimizer.grad_norm)

    def microbatch(self, step: int, *, last: bool, wait: bool) -> None:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2 * step + last))
        inputs = []
        for name in self.names:
            if wait:
                self.optimizer.wait_for_weights([name])
            inputs.append(x)
            x = torch.tanh(x @ self.views[name].view(WIDTH, WIDTH).float())
        for name, before in zip(reversed(self.names), reversed(inputs), strict=True):
            self.main[name].add_((before.T @ x).view(-1))
            if last:
                self.optimizer.take_gradient(name, self.main[name], borrowed=True)
            x = before


def trained(late: Iterable[Lane] = (), steps: int = 4, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    owner = Owner(backend=backend(late=late), **options)
    owner.train(steps)
    owner.optimizer.wait()
    module = torch.nn.Module()
    found = snapshot(module, owner.optimizer)
    return {**found, "weights": owner.weights.clone()}, owner.norms


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, torch.Tensor], list[float]]:
    return trained(offload_fraction=0.0)


@pytest.mark.parametrize("mix", MIXES)
def test_bits_are_equal_in_every_late_order(mix: str, expected: Any) -> None:
    for late in LATE:
        found, norms = trained(late, **MIXES[mix])
        assert_equal(found, expected[0])
        assert norms == expected[1]


def test_bits_are_those_of_gradients_in_grad(expected: Any) -> None:
    """The owner's way and the usual one make the same step."""

    class Usual(Owner):
        def microbatch(self, step: int, *, last: bool, wait: bool) -> None:
            taken: dict[str, torch.Tensor] = {}
            keep, self.optimizer.take_gradient = self.optimizer.take_gradient, lambda n, g, **_: taken.update({n: g})
            super().microbatch(step, last=last, wait=wait)
            self.optimizer.take_gradient = keep
            for name, parameter in zip(self.names, self.optimizer.param_groups[0]["params"], strict=True):
                if name in taken:
                    parameter.grad = taken[name].clone()

    owner = Usual(offload_fraction=1.0, backend=backend(late=LATE[-1]))
    owner.train(4)
    owner.optimizer.wait()
    assert torch.equal(owner.weights, expected[0]["weights"])
    assert owner.norms == expected[1]


@pytest.mark.parametrize(("mix", "broken"), [("streamed", "wait_for_gradients"), ("host", "before_read")])
def test_without_a_wait_the_bits_differ(mix: str, broken: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepExecutor, broken, lambda *_: None)
    monkeypatch.setattr(StepExecutor, "require_used", lambda *_: None)
    found = trained(LATE[-1], **MIXES[mix])[0]
    assert not torch.equal(found["weights"], expected[0]["weights"])


def test_a_wait_that_is_forgotten_is_an_error() -> None:
    owner = Owner(offload_fraction=1.0)
    owner.train(1)
    with pytest.raises(OrderingError, match="before its new value had arrived"):
        owner.train(1, wait=False)
    owner = Owner(offload_fraction=1.0)
    owner.train(1)
    with pytest.raises(OrderingError, match="wait_for_gradients"):
        owner.train(1, fence=False)
    with pytest.raises(ModelError, match="no parameter 'other'"):
        owner.optimizer.wait_for_weights(["other"])


def test_a_second_step_asks_for_gradients_of_the_owner() -> None:
    """Seen red: told to make the optimizer with overlap=False, which takes no gradients."""
    owner = Owner(offload_fraction=1.0)
    owner.train(1)
    with pytest.raises(ModelError, match="without a new gradient") as caught:
        owner.optimizer.step()
    assert caught.value.fix == "take_gradient() between two steps"


def test_gradients_that_are_taken_can_be_given_up() -> None:
    owner = Owner(offload_fraction=0.5)
    owner.microbatch(0, last=True, wait=True)
    with pytest.raises(OrderingError, match="before the step"):
        owner.optimizer.wait_for_gradients()
    owner.optimizer.discard_gradients()
    owner.optimizer.wait_for_gradients()
    owner.norms.clear()
    owner.train(4)
    owner.optimizer.wait()
    assert torch.equal(owner.weights, trained(offload_fraction=0.0)[0]["weights"])


def test_what_cannot_be_taken_is_refused() -> None:
    owner = Owner(offload_fraction=0.5)
    optimizer, name = owner.optimizer, owner.names[0]
    for gradient, why in (
        (torch.zeros(3), "shape"),
        (owner.main[name].view(WIDTH, WIDTH).T, "strides"),
        (owner.main[name].double(), "float64"),
    ):
        with pytest.raises(ModelError, match=why):
            optimizer.take_gradient(name, gradient)
    with pytest.raises(ModelError, match="no parameter"):
        optimizer.take_gradient("other", owner.main[name])
    optimizer.take_gradient(name, owner.main[name])
    with pytest.raises(ModelError, match="second gradient"):
        optimizer.take_gradient(name, owner.main[name])
    with pytest.raises(ModelError, match="overlap=False"):
        Owner(overlap=False).optimizer.take_gradient(name, owner.main[name])
    with pytest.raises(ConfigError, match="waits must be"):
        Owner(waits="never")
    with pytest.raises(ConfigError, match="without stages"):
        Owner(uncounted=[name])


def test_an_external_coefficient_scales_every_gradient() -> None:
    """As a loop clips that computes norm and coefficient over more than this optimizer."""
    found = []
    for fraction in (0.0, 1.0):
        owner = Owner(offload_fraction=fraction, max_grad_norm=None, backend=backend(late=LATE[-1]))
        owner.microbatch(0, last=True, wait=True)
        coefficient = torch.tensor(0.25)
        owner.optimizer.step(gradient_scale=coefficient)
        owner.optimizer.wait()
        found.append((owner.optimizer.grad_norm, owner.weights.clone()))
    owner = Owner(max_grad_norm=None)
    take = owner.optimizer.take_gradient
    owner.optimizer.take_gradient = lambda name, gradient, **_: take(name, gradient * 0.25)
    owner.microbatch(0, last=True, wait=True)
    owner.optimizer.step()
    owner.optimizer.wait()
    assert found[0][0] == found[1][0] == owner.optimizer.grad_norm
    assert torch.equal(found[1][1], owner.weights)
    for wrong in (0.25, torch.tensor(0.25, dtype=torch.float64), torch.ones(2)):
        with pytest.raises(ConfigError, match="gradient_scale"):
            owner.optimizer.step(gradient_scale=wrong)


def test_state_is_read_and_replaced_key_by_key() -> None:
    ours, theirs = (Owner(offload_fraction=f, backend=backend(late=LATE[-1])) for f in (1.0, 0.0))
    ours.train(2)
    for name in ours.names:
        for key, value in ours.optimizer.state_of(name).items():
            theirs.optimizer.set_state_of(name, {key: value})
        assert ours.optimizer.state_of(name).keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
    for owner in (ours, theirs):
        owner.train(2, first=2)
        owner.optimizer.wait()
    assert torch.equal(ours.weights, theirs.weights)
    name, optimizer = ours.names[0], ours.optimizer
    before = optimizer.state_of(name)
    steps = [{"step": -1}, {"step": 2**63}]  # one more than int64 holds
    for values in (*steps, {"other": 1}, {"exp_avg": torch.zeros(3)}, {"step": 1, "master": None}):
        with pytest.raises(CheckpointError):
            optimizer.set_state_of(name, values)
    assert_equal(optimizer.state_of(name), before)
