"""`CombinedOptimizer`: several optimizers as one have the bits of each by itself, wherever their state is."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_optimizer_cases import MuonLike, all_parameters, assert_same, cut_small, parameters, set_gradients, simulated

import hostward
from hostward.errors import HostwardError
from hostward.optim.bucket_state import same_bits
from hostward.schedule.ops import Lane

STEPS = 5


class Counts(MuonLike):
    """Its rate depends on how often it was called."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["sum"] = state.get("sum", torch.zeros_like(p)).add_(p.grad)
            p.sub_(state["sum"], alpha=1e-3 / self.calls)


def separate(others: type = torch.optim.AdamW) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, another for the rest."""
    params = parameters()
    matrices = [p for p in params if p.ndim == 2]
    return [torch.optim.Muon(matrices, lr=2e-2), others([p for p in params if p.ndim != 2], lr=1e-2)]


def combined(fraction: float | None = None, others: type = torch.optim.AdamW) -> tuple[Any, Any]:
    """The same as one, and its offloading."""
    optimizer = hostward.CombinedOptimizer(*separate(others))
    if fraction is None:
        return optimizer, None
    backend = simulated(late=frozenset({Lane.H2D, Lane.D2H}))
    states = hostward.offload_optimizer_states(optimizer, fraction=fraction, chunk_size_mb=1, backend=backend)
    cut_small(states, 270_000)
    return optimizer, states


def gradients(step: int, *optimizers: torch.optim.Optimizer) -> None:
    set_gradients([p for optimizer in optimizers for p in all_parameters(optimizer)], step)


def train(optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        gradients(step, optimizer)
        optimizer.param_groups[1]["lr"] = 1e-2 / (step + 1)
        optimizer.step()


def assert_same_weights(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for p, q in zip(one, other, strict=True):
        assert same_bits(p.detach(), q.detach()), tuple(p.shape)


@pytest.mark.parametrize("others", [torch.optim.AdamW, torch.optim.SGD, Counts])
def test_one_has_the_bits_of_several_at_every_fraction(others: type) -> None:
    apart = separate(others)
    for step in range(STEPS):
        gradients(step, *apart)
        apart[1].param_groups[0]["lr"] = 1e-2 / (step + 1)
        for optimizer in apart:
            optimizer.step()
    whole, _ = combined(others=others)
    train(whole)
    assert_same_weights(all_parameters(whole), [p for optimizer in apart for p in all_parameters(optimizer)])
    for fraction in (0.0, 0.5, 1.0):
        optimizer, states = combined(fraction, others)
        train(optimizer)
        assert bool(states.offloaded_bytes) is (fraction > 0)
        if others is not Counts:  # whose state is made first
            assert_same(optimizer, whole)
        states.detach()
        assert_same_weights(all_parameters(optimizer), all_parameters(whole))


def test_a_state_goes_on_at_another_fraction() -> None:
    whole, _ = combined()
    train(whole)
    first, _ = combined(1.0)
    train(first, range(3))
    optimizer, states = combined(0.5)
    for p, q in zip(all_parameters(optimizer), all_parameters(first), strict=True):
        p.data.copy_(q.data)
    optimizer.load_state_dict(first.state_dict())
    assert states.offloaded_bytes > 0
    train(optimizer, range(3, STEPS))
    assert_same(optimizer, whole)


def test_schedulers_of_all_and_of_one_set_the_rates() -> None:
    optimizer, _ = combined(1.0)
    muon, adamw = optimizer.optimizers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_all = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0])
        of_one = torch.optim.lr_scheduler.LambdaLR(adamw, lambda n: 0.1**n)
        for step in range(2):
            gradients(step, optimizer)
            optimizer.step()
            of_all.step()
            of_one.step()
    assert muon.param_groups[0]["lr"] == pytest.approx(2e-2 / 4)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(1e-2 / 100)


def test_a_closure_is_called_once_and_a_scaler_skips() -> None:
    optimizer, _ = combined(1.0)
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append(1)
        gradients(len(calls), optimizer)
        return 3.0

    assert [optimizer.step(closure), optimizer.step(closure)] == [3.0, 3.0]
    assert len(calls) == 2
    before = [p.detach().clone() for p in all_parameters(optimizer)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    all_parameters(optimizer)[0].grad[0, 0] = float("inf")  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_same_weights(all_parameters(optimizer), before)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_is_one_optimizer_too(how: Callable[[Any], Any]) -> None:
    optimizer, _ = combined()
    train(optimizer, range(2))
    copied = how(optimizer)
    train(optimizer, range(2, STEPS))
    train(copied, range(2, STEPS))
    assert_same(copied, optimizer)


def _weights() -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))]


def _add_a_group() -> None:
    combined()[0].add_param_group({"params": _weights()})


def _add_a_group_to_one() -> None:
    optimizer, _ = combined()
    optimizer.optimizers[1].add_param_group({"params": _weights()})
    train(optimizer, range(1))


def _saved_alone() -> None:
    combined()[0].optimizers[1].state_dict()


def _loaded_alone() -> None:
    combined()[0].optimizers[0].load_state_dict(separate()[0].state_dict())


def _hook_of_one() -> None:
    optimizer, _ = combined()
    optimizer.optimizers[0].register_step_post_hook(lambda *_: None)
    train(optimizer, range(1))


def _wrapped() -> None:
    muon, adamw = separate()
    muon.step = lambda *_: None  # type: ignore[method-assign]
    hostward.CombinedOptimizer(muon, adamw)


def _no_matrix() -> None:
    matrix, vector = _weights()
    muon = torch.optim.Muon([matrix])
    muon.add_param_group({"params": [vector]})
    hostward.CombinedOptimizer(muon)


def _in_two() -> None:
    hostward.CombinedOptimizer(torch.optim.SGD(params := _weights()), torch.optim.AdamW(params))


def _names_of_some() -> None:
    named = [("matrix", _weights()[0])]
    hostward.CombinedOptimizer(torch.optim.Muon(named), torch.optim.AdamW(_weights()))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: hostward.CombinedOptimizer(), "of nothing"),
    "no optimizer": (lambda: hostward.CombinedOptimizer(torch.nn.Linear(2, 2)), "Linear is not a torch.optim.Opt"),  # type: ignore[arg-type]
    "lbfgs": (lambda: hostward.CombinedOptimizer(torch.optim.LBFGS(_weights())), "LBFGS cannot be one of several"),
    "one of one": (lambda: hostward.CombinedOptimizer(combined()[0]), "CombinedOptimizer cannot be one of several"),
    "one parameter in two": (_in_two, r"a parameter \(3, 2\) of this AdamW belongs to another"),
    "names of some": (_names_of_some, "some optimizers were made with names"),
    "a vector for Muon": (_no_matrix, r"Muon has a parameter of shape \(3,\)"),
    "a replaced step": (_wrapped, "the step of this Muon has been replaced"),
    "a new group": (_add_a_group, r"add_param_group\(\) of a CombinedOptimizer"),
    "a new group of one": (_add_a_group_to_one, "groups or the state of this (Muon|AdamW) are no longer those"),
    "saved alone": (_saved_alone, "the state of this AdamW is saved or loaded on its own"),
    "loaded alone": (_loaded_alone, "the state of this Muon is saved or loaded on its own"),
    "a hook of one": (_hook_of_one, "this Muon of a CombinedOptimizer has step hooks"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_combined_raises_with_the_fix(what: str) -> None:
    make, text = REFUSED[what]
    with pytest.raises(HostwardError, match=text) as raised:
        make()
    assert raised.value.fix
