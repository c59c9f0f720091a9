"""Parameter groups: hyper-parameters of their own, schedulers, groups added later, closures and step hooks.

Seen red with: the hyper-parameters of group 0 for all groups, tables that pile up, a refused group left in, weights not
looked at before a group is added, the order of groups and parameters, names and lost keys not looked at, groups not
looked at before saving, a group added within a microbatch, a learning rate that a load makes a number,
a group without memory that stays half added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from optimizer_cases import (
    FRACTIONS,
    LR,
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
from hostward.errors import ConfigError, MemoryLimitError, ModelError
from hostward.runtime.backend import Buffer, Tier
from hostward.runtime.simulated.backend import SimulatedBackend

PLACES = (0.0, 0.5, 1.0)


def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.3, "lr": 3e-2},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6},
    ]


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_h56_each_group_has_its_own_hyper_parameters(fraction: float) -> None:
    model = Model(torch.bfloat16)
    optimizer = adamw(grouped(model), offload_fraction=fraction)
    groups = [dict(model.named_parameters()) for _ in range(2)]
    expected = [
        NumpyOptimizer.over((n, p) for n, p in named.items() if (p.ndim > 1) is (i == 0))
        for i, named in enumerate(groups)
    ]
    for step in range(3):
        set_gradients(model, step)
        for i, settings in enumerate(
            ({"weight_decay": 0.3, "lr": 3e-2}, {"weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6})
        ):
            gradients = {n: p.grad for n, p in model.named_parameters() if n in expected[i].master}
            expected[i].step(gradients, **settings)  # type: ignore[arg-type]
        optimizer.step()
    assert_equal(snapshot(model, optimizer), expected[0].snapshot() | expected[1].snapshot())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.3),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=7),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 2e-2], total_steps=12),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda i: i / 5, lambda i: 1.0 / (i + 1)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_h56_schedulers_reach_every_placement(name: str) -> None:
    def trained(fraction: float) -> tuple[dict[str, torch.Tensor], list[Any]]:
        model = Model(torch.bfloat16)
        optimizer = adamw(grouped(model), offload_fraction=fraction)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for step in range(8):
            set_gradients(model, step)
            optimizer.step()
            scheduler.step()
            rates.append([(g["lr"], g["betas"]) for g in optimizer.param_groups])
        return snapshot(model, optimizer), rates

    base, rates = trained(0.0)
    plain_model = Model(torch.bfloat16)
    plain = torch.optim.AdamW(grouped(plain_model), lr=LR, betas=(0.9, 0.95))
    scheduler, theirs = SCHEDULERS[name](plain), []
    for _ in range(8):
        plain.step()
        scheduler.step()
        theirs.append([(g["lr"], g["betas"]) for g in plain.param_groups])
    assert rates == theirs
    assert len({str(r) for r in rates}) > 3
    for fraction in (0.5, 1.0):
        assert_equal(base, trained(fraction)[0])


def test_a_schedule_of_betas_keeps_one_table_per_group() -> None:
    """OneCycleLR changes betas at every step: tables must not pile up."""
    model = Model()
    optimizer = adamw(grouped(model))
    scheduler = SCHEDULERS["one_cycle"](optimizer)
    for step in range(10):
        set_gradients(model, step)
        optimizer.step()
        scheduler.step()
    assert len(optimizer._executor._bindings._tables) <= len(optimizer.param_groups)


def test_a_learning_rate_that_is_a_tensor() -> None:
    results = []
    for lr in (3e-3, torch.tensor(3e-3, dtype=torch.float64)):
        model = Model()
        optimizer = adamw(model, lr=lr, offload_fraction=0.5)
        set_gradients(model, 0)
        optimizer.step()
        results.append(snapshot(model, optimizer))
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 3e-3
    assert_equal(*results)


@pytest.mark.parametrize("schedule", [torch.optim.lr_scheduler.ExponentialLR, torch.optim.lr_scheduler.OneCycleLR])
def test_a_run_with_a_learning_rate_that_is_a_tensor_goes_on_to_the_same_bits(schedule: type) -> None:
    """A scheduler rounds to float32 what it computes for such a rate, and would not for a number."""
    options: dict[str, Any] = {"gamma": 0.9}
    if schedule is torch.optim.lr_scheduler.OneCycleLR:
        options = {"max_lr": 0.02, "total_steps": 30, "cycle_momentum": False}

    def make(fraction: float) -> tuple[Model, hostward.AdamW, Any]:
        model = Model()
        betas = torch.tensor(0.9), torch.tensor(0.95)
        optimizer = adamw(model, lr=torch.tensor(3e-3), betas=betas, offload_fraction=fraction)
        return model, optimizer, schedule(optimizer, **options)

    def train(model: Model, optimizer: hostward.AdamW, scheduler: Any, steps: range) -> dict[str, torch.Tensor]:
        for step in steps:
            set_gradients(model, step)
            optimizer.step()
            scheduler.step()
        return snapshot(model, optimizer)

    model, optimizer, scheduler = whole = make(0.0)
    expected = train(*whole, range(6))
    model, optimizer, scheduler = first = make(0.5)
    train(*first, range(3))
    saved = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    model, optimizer, scheduler = second = make(1.0)
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert_equal(train(*second, range(3, 6)), expected)
    (group,) = optimizer.param_groups
    assert [type(value) for value in (group["lr"], *group["betas"])] == [torch.Tensor] * 3
    assert optimizer.state_dict()["param_groups"] == whole[1].state_dict()["param_groups"]


@pytest.mark.parametrize("fraction", PLACES)
def test_hdo_h9_a_group_added_after_steps(fraction: float) -> None:
    """Old state stays, new state starts at 0, and both go on as they would have apart."""
    model = Model(torch.bfloat16)
    named = list(model.named_parameters())
    first, second = named[:4], named[4:]
    optimizer = adamw([{"params": first}], offload_fraction=fraction)
    expected = NumpyOptimizer.over(named)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": second, "lr": LR})
        set_gradients(model, step, skip=[] if step >= 2 else [n for n, _ in second])
        expected.step({n: p.grad for n, p in named})
        optimizer.step()
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    share = optimizer.plan.placed_fraction
    assert abs(share - fraction) <= 0.5 or fraction in (0.0, 1.0)
    assert sum(b.numel for b in optimizer.plan.buckets) == sum(p.numel() for _, p in named)


def test_weights_written_just_before_a_group_is_added_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(torch.float16)
    named = list(model.named_parameters())
    optimizer = adamw([{"params": named[:4]}], offload_fraction=1.0)
    with torch.no_grad():
        model.embed.weight.fill_(3.0)
    caplog.set_level(logging.INFO, logger="hostward")
    optimizer.add_param_group({"params": named[4:]})
    assert "embed.weight" in caplog.text
    assert (optimizer.state_dict()["state"]["embed.weight"]["master"] == 3.0).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"params": [("new", torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))]},
        {"params": [("head.weight", torch.nn.Parameter(torch.zeros(3)))]},
        {"params": [("new", torch.nn.Parameter(torch.zeros(3)))], "lr": -1.0},
        {"params": [torch.nn.Parameter(torch.zeros(3))]},
        {"params": [("new", torch.nn.Parameter(torch.zeros(3)))], "amsgrad": True},
    ],
    ids=["dtype", "duplicate name", "lr", "unnamed", "amsgrad"],
)
def test_a_group_that_is_refused_leaves_the_optimizer_whole(bad: dict[str, Any]) -> None:
    model = Model()
    optimizer = adamw(model, offload_fraction=0.5)
    with pytest.raises((ModelError, ValueError)):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    expected = NumpyOptimizer.over(model.named_parameters())
    set_gradients(model, 0)
    expected.step({n: p.grad for n, p in model.named_parameters()})
    optimizer.step()
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    optimizer.load_state_dict(optimizer.state_dict())


class FullAtAllocation(SimulatedBackend):
    """There is no memory for allocation number `at` from now on."""

    at = 0

    def allocate(self, *arguments: Any, **options: Any) -> list[Buffer]:
        self.at -= 1
        if self.at == 0:
            raise MemoryLimitError("no memory is left", fix="free some")
        return super().allocate(*arguments, **options)


@pytest.mark.parametrize("options", [{}, {"gradients": "host"}, {"step_early": 1.0}], ids=str)
def test_a_group_that_there_is_no_memory_for_leaves_the_optimizer_as_it_was(options: dict[str, Any]) -> None:
    def trained(*, full: bool) -> tuple[dict[str, torch.Tensor], dict[tuple[Tier, str], int]]:
        model, backend = mlp(), FullAtAllocation(threads=1)
        named = list(model.named_parameters())
        optimizer = adamw(
            [{"params": named[2:]}], module=model, backend=backend, offload_fraction=0.7, overlap=True, **options
        )
        allocations = 0
        for step in range(attempts):
            with optimizer.accumulate(last=True):
                mlp_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not full and step < attempts - 1:
                continue
            backend.at = step + 1
            try:
                optimizer.add_param_group({"params": named[:2]})
                allocations = step
            except MemoryLimitError:
                assert step < attempts - 1
                assert len(optimizer.param_groups) == 1
        assert allocations == attempts - 1
        mlp_loss(model, 99).backward()
        optimizer.step()
        held = backend.ledger.held_bytes
        state = {key: held[key] for key in product(Tier, ("exp_avg", "exp_avg_sq", "weights")) if held[key]}
        return snapshot(model, optimizer), state

    attempts = 1 + allocations_of_a_group(options)
    (values, held), (expected, expected_held) = trained(full=True), trained(full=False)
    assert_equal(values, expected)
    assert held == expected_held


def allocations_of_a_group(options: dict[str, Any]) -> int:
    model, backend = mlp(), FullAtAllocation(threads=1)
    named = list(model.named_parameters())
    optimizer = adamw(
        [{"params": named[2:]}], module=model, backend=backend, offload_fraction=0.7, overlap=True, **options
    )
    backend.at = 0
    optimizer.add_param_group({"params": named[:2]})
    return -backend.at


@pytest.mark.parametrize("last", [True, False])
def test_a_group_added_within_a_microbatch_is_refused(last: bool) -> None:
    """Its gradients would be offloaded for the optimizer as it was, and the step would find none."""
    results = []
    for adds in (False, True):
        model = mlp()
        optimizer = adamw(model, offload_fraction=0.5)
        with optimizer.accumulate(last=last):
            loss = mlp_loss(model, 0)
            if adds:
                with pytest.raises(ModelError, match=r"group added within accumulate\(\)"):
                    optimizer.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(3)))]})
            loss.backward()
        optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


@pytest.mark.parametrize("fraction", PLACES)
def test_hdo_h11_h68_a_closure_is_called_once_and_its_loss_returned(fraction: float) -> None:
    calls = []
    model = mlp()
    optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=0.1)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = mlp_loss(model, 0)
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    plain_model = mlp()
    plain = adamw(plain_model, offload_fraction=fraction, max_grad_norm=0.1)
    mlp_loss(plain_model, 0).backward()
    assert plain.step() is None
    assert_equal(snapshot(model, optimizer), snapshot(plain_model, plain))


def test_step_hooks_run() -> None:
    model, seen = Model(), []
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    set_gradients(model, 0)
    optimizer.step()
    assert seen == ["pre", "post"]


def taken_out(optimizer: hostward.AdamW) -> None:
    optimizer.param_groups[0]["params"].pop()


def put_in(optimizer: hostward.AdamW) -> None:
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))


def exchanged(optimizer: hostward.AdamW) -> None:
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(optimizer.param_groups[0]["params"][0].detach())


def moved(optimizer: hostward.AdamW) -> None:
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        second[key].append(first[key].pop())


def twice_in_a_group(optimizer: hostward.AdamW) -> None:
    for key in ("params", "param_names"):
        optimizer.param_groups[0][key].append(optimizer.param_groups[0][key][0])


def in_two_groups(optimizer: hostward.AdamW) -> None:
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        second[key].append(first[key][0])


def groups_reversed(optimizer: hostward.AdamW) -> None:
    optimizer.param_groups.reverse()


def parameters_reversed(optimizer: hostward.AdamW) -> None:
    optimizer.param_groups[0]["params"].reverse()


def group_taken_out(optimizer: hostward.AdamW) -> None:
    del optimizer.param_groups[1]


def groups_made_one(optimizer: hostward.AdamW) -> None:
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        first[key] += second[key]
    del optimizer.param_groups[1]


def renamed(optimizer: hostward.AdamW) -> None:
    optimizer.param_groups[0]["param_names"][0] = "else"


def without_names(optimizer: hostward.AdamW) -> None:
    del optimizer.param_groups[0]["param_names"]


def without_params(optimizer: hostward.AdamW) -> None:
    del optimizer.param_groups[1]["params"]


BY_HAND: dict[str, tuple[Callable[[hostward.AdamW], None], str]] = {
    "taken out": (taken_out, "is in no param_group any more"),
    "put in": (put_in, "param_groups hold a new parameter"),
    "exchanged": (exchanged, "is in no param_group any more"),
    "moved": (moved, "not as they were made"),
    "twice in a group": (twice_in_a_group, r"'embed\.weight' is in param_groups twice"),
    "in two groups": (in_two_groups, r"'embed\.weight' is in param_groups twice"),
    "groups reversed": (groups_reversed, "not as they were made: their order"),
    "parameters reversed": (parameters_reversed, "not as they were made"),
    "group taken out": (group_taken_out, "is in no param_group any more"),
    "groups made one": (groups_made_one, "not as they were made"),
    "renamed": (renamed, "not as they were made"),
    "without names": (without_names, "not as they were made"),
    "without params": (without_params, "is in no param_group any more"),
}


@pytest.mark.parametrize("case", BY_HAND)
@pytest.mark.parametrize("fraction", PLACES)
def test_groups_changed_by_hand_are_refused_and_nothing_changes(fraction: float, case: str) -> None:
    """A parameter in another group would be stepped with the hyper-parameters of the one that it came from."""
    change, text = BY_HAND[case]
    model = Model(torch.bfloat16)
    optimizer = adamw(grouped(model), offload_fraction=fraction)
    set_gradients(model, 0)
    optimizer.step()
    before, saved = snapshot(model, optimizer), optimizer.state_dict()
    groups = [{k: list(v) if isinstance(v, list) else v for k, v in g.items()} for g in optimizer.param_groups]
    change(optimizer)
    set_gradients(model, 1)
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(ModelError, match=text) as caught:
            call()
        assert "add_param_group" in caught.value.fix
    optimizer.param_groups[:] = groups
    assert_equal(before, snapshot(model, optimizer))
    optimizer.step()


def test_a_group_that_has_lost_a_hyper_parameter_is_refused() -> None:
    model = Model()
    optimizer = adamw(model)
    set_gradients(model, 0)
    del optimizer.param_groups[0]["betas"]
    with pytest.raises(ConfigError, match="a parameter group has no 'betas'"):
        optimizer.step()


def test_buckets_follow_the_layers_whatever_the_groups() -> None:
    """Biases of all layers are a group of their own; those of the first layer are still copied first."""
    model = mlp()
    optimizer = adamw(grouped(model), offload_fraction=1.0, module=model)
    found = list(dict.fromkeys((b.layer, b.group) for b in optimizer.inventory.buckets))
    layers = list(dict.fromkeys(b.layer for b in adamw(mlp()).inventory.buckets))
    assert found == [(layer, group) for layer in layers for group in (0, 1)]
