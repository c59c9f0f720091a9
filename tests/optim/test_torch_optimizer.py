"""The distance to torch.optim.AdamW, and `use_torch_optimizer`, which really steps the host share with it.

Seen red with: use_torch_optimizer ignored, its skip flag ignored, the count not passed on, the clip factor left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from optimizer_cases import BETAS, DTYPES, EPS, LR, Model, NumpyOptimizer, adamw, assert_equal, set_gradients, snapshot

import hostward
from hostward.core.inventory import MasterKind
from hostward.optim.bucket_state import rounded

STEPS = 5


def plain_adamw(named: Mapping[str, torch.Tensor], weight_decay: float = 0.1, **options: Any) -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(p.detach().float().clone()) for p in named.values()]
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay, **options)


def step_plain(plain: torch.optim.AdamW, model: torch.nn.Module) -> None:
    for p, q in zip(plain.param_groups[0]["params"], model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.float()
    plain.step()


def masters(model: torch.nn.Module, optimizer: hostward.AdamW) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[name].get("master", p.detach()) for name, p in model.named_parameters()]


def worst_ulps(mine: torch.Tensor, theirs: torch.Tensor, floor: float) -> float:
    """Largest difference in ulps of fp32, where values below `floor` count as `floor`."""
    if not mine.numel():
        return 0.0
    size = theirs.abs().double().clamp_min(floor)
    return float(((mine.double() - theirs.double()).abs() / (size * 2.0**-23)).max())


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_hdo_h17_masters_stay_within_ulps_of_torch(fused: bool, dtype: torch.dtype, fraction: float) -> None:
    """Weights near 1 and updates of lr = 1e-2 each: 4 ulps after 5 steps is 5e-7, 1/20,000 of one update.

    Second moments within 4 ulps of their size; first moments of 1.0, since terms of that size may cancel.
    """
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    plain = plain_adamw(dict(model.named_parameters()), fused=fused)
    for step in range(STEPS):
        set_gradients(model, step)
        step_plain(plain, model)
        optimizer.step()
    theirs = plain.param_groups[0]["params"]
    state = optimizer.state_dict()["state"]
    for mine, other, (name, _) in zip(masters(model, optimizer), theirs, model.named_parameters(), strict=True):
        assert worst_ulps(mine, other.detach(), floor=1.0) <= 4
        for role, floor in (("exp_avg", 1.0), ("exp_avg_sq", 0.0)):
            if other.numel():
                assert worst_ulps(state[name][role], plain.state[other][role], floor) <= 4


def test_the_bound_above_would_see_a_missing_first_update() -> None:
    model = Model()
    optimizer = adamw(model)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model, 0)
    optimizer.step()
    moved = [worst_ulps(a, b.detach(), 1.0) for a, b in zip(before, model.parameters(), strict=True) if a.numel()]
    assert min(moved) > 1000


ALIGNED = {"layers.0.a": (64, 64), "layers.0.b": (256,), "layers.1.a": (1024, 64), "layers.1.b": (32, 16)}


def aligned(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    """Sizes of whole vectors and single ranges: torch's fused kernel rounds its tail differently from its body."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for name, s in ALIGNED.items()}


@functools.cache
def gradient(name: str, step: int) -> torch.Tensor:
    return torch.randn(ALIGNED[name], generator=torch.Generator().manual_seed(step * 100 + len(name)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_s6_use_torch_optimizer_gives_the_bits_of_torch(dtype: torch.dtype) -> None:
    """At fraction 1: exactly torch.optim.AdamW(fused=True) on fp32 masters, and its weights rounded as ours."""
    parameters = aligned(dtype)
    plain = plain_adamw(parameters, fused=True)
    optimizer = adamw(list(parameters.items()), offload_fraction=1.0, use_torch_optimizer=True)
    theirs = plain.param_groups[0]["params"]
    for step in range(STEPS):
        for (name, p), q in zip(parameters.items(), theirs, strict=True):
            p.grad = gradient(name, step).to(dtype, copy=True)  # the step may overwrite what it took
            q.grad = gradient(name, step).to(dtype).float()
        optimizer.step()
        plain.step()
    state = optimizer.state_dict()["state"]
    for (name, p), q in zip(parameters.items(), theirs, strict=True):
        expected = {role: plain.state[q][role] for role in ("exp_avg", "exp_avg_sq")} | {
            "weight": rounded(q.detach(), dtype)
        }
        assert_equal(
            {"weight": p.detach(), **{r: state[name][r] for r in ("exp_avg", "exp_avg_sq")}},
            {r: expected[r] for r in ("weight", "exp_avg", "exp_avg_sq")},
        )
        assert int(state[name]["step"]) == STEPS
        if dtype is not torch.float32:
            assert torch.equal(state[name]["master"], q.detach())


def test_s6_the_switch_has_an_effect_and_only_on_the_host_share() -> None:
    results = {}
    for fraction, use_torch in itertools.product((0.0, 1.0), (False, True)):
        model = Model()
        optimizer = adamw(model, offload_fraction=fraction, use_torch_optimizer=use_torch, max_grad_norm=1.0)
        for step in range(STEPS):
            set_gradients(model, step)
            optimizer.step()
        results[fraction, use_torch] = snapshot(model, optimizer)
    assert_equal(results[0.0, False], results[0.0, True])
    assert_equal(results[0.0, False], results[1.0, False])
    assert not torch.equal(results[1.0, True]["weight embed.weight"], results[1.0, False]["weight embed.weight"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_s6_masters_stay_within_ulps_and_clipping_and_skips_hold(fraction: float, dtype: torch.dtype) -> None:
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction, use_torch_optimizer=True, max_grad_norm=1.0)
    expected = NumpyOptimizer.over(model.named_parameters())
    for step in range(STEPS):
        set_gradients(model, step)
        if step == 2:
            model.embed.weight.grad[0, 0] = float("nan")
            before = snapshot(model, optimizer)
            optimizer.step()
            assert optimizer.last_step_skipped
            assert_equal(before, snapshot(model, optimizer))
            continue
        expected.step({n: p.grad for n, p in model.named_parameters()}, max_norm=1.0)
        optimizer.step()
        assert optimizer.grad_norm == expected.norm
    for (name, p), mine in zip(model.named_parameters(), masters(model, optimizer), strict=True):
        theirs = torch.from_numpy(expected.master[name]).view(p.shape)
        assert worst_ulps(mine, theirs, floor=1.0) <= 4
        assert torch.equal(rounded(mine, dtype), p.detach())


def test_s6_masters_are_unsplit() -> None:
    optimizer = adamw(Model(torch.bfloat16), offload_fraction=1.0, use_torch_optimizer=True)
    assert {b.kind for b in optimizer.inventory.buckets} == {MasterKind.PLAIN}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("torch_first", [False, True])
def test_s6_checkpoints_are_the_same_with_and_without(torch_first: bool, dtype: torch.dtype) -> None:
    """A state saved with the switch goes on without it, bit for bit from there, and the reverse."""
    source = Model(dtype)
    first = adamw(source, offload_fraction=1.0, use_torch_optimizer=torch_first)
    set_gradients(source, 0)
    first.step()
    ends = []
    for use_torch, fraction in ((not torch_first, 0.5), (torch_first, 1.0)):
        model = Model(dtype)
        optimizer = adamw(model, offload_fraction=fraction, use_torch_optimizer=use_torch)
        model.load_state_dict(source.state_dict())
        optimizer.load_state_dict(first.state_dict())
        assert_equal(snapshot(model, optimizer), snapshot(source, first))
        ends.append((model, optimizer))
    model, optimizer = ends[1]
    for m, o in ((model, optimizer), (source, first)):
        set_gradients(m, 1)
        o.step()
    assert_equal(snapshot(model, optimizer), snapshot(source, first))


def test_s6_unused_parameters_and_groups() -> None:
    model = Model(torch.bfloat16)
    named = list(model.named_parameters())
    groups = [{"params": named[:3], "lr": 0.0, "weight_decay": 0.0}, {"params": named[3:], "lr": LR}]
    optimizer = adamw(groups, offload_fraction=1.0, use_torch_optimizer=True)
    before = snapshot(model, optimizer)
    set_gradients(model, 0, skip=["head.weight"])
    optimizer.step()
    after = snapshot(model, optimizer)
    for name, _ in named[:3]:
        assert torch.equal(before[f"master {name}"], after[f"master {name}"])
        assert int(after[f"step {name}"]) == 1
    assert int(after["step head.weight"]) == 0
    assert not torch.equal(before["master layers.2.weight"], after["master layers.2.weight"])
