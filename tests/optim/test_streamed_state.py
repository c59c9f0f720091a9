"""Streamed state saved, loaded and re-seeded, also while it is on its way, and groups that are added to it.

Seen red: a load that keeps what was staged, or that the step in flight overwrites; slots lost with the schedule that a
new group replaces.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from networks import Net, loss_of, make
from optimizer_cases import (
    DTYPES,
    MIXES,
    NEVER,
    Model,
    NumpyOptimizer,
    adamw,
    assert_equal,
    backend,
    set_gradients,
    snapshot,
)

import hostward
from hostward.core.placement import Placement
from hostward.errors import ModelError
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import SimulatedBackend
from hostward.schedule.ops import Lane

STEPS = 4
SLOTS = "staging slots"
with_streamed = pytest.mark.parametrize("mix", ["streamed", "half streamed", "both", "mixed"])


def gradients(model: torch.nn.Module, step: int) -> None:
    """In every other step some are missing: one range of a bucket, then a whole bucket. Some norms are small."""
    skip = {1: [NEVER], 3: ["layers.2.weight", "layers.2.after", NEVER]}.get(step, [])
    set_gradients(model, step, skip=skip, factor=1e-3 if step % 2 else 1.0)


def trained(
    mix: Mapping[str, float], dtype: torch.dtype, on: SimulatedBackend | None = None, **options: Any
) -> tuple[Model, hostward.AdamW]:
    model = Model(dtype)
    optimizer = adamw(model, **mix, **({} if on is None else {"backend": on}), **options)
    for step in range(STEPS):
        gradients(model, step)
        optimizer.step()
        assert not optimizer.last_step_skipped
    return model, optimizer


PAIRS = [(*pair, torch.bfloat16) for pair in itertools.permutations(MIXES, 2)]
PAIRS += [("streamed", "mixed", dtype) for dtype in DTYPES] + [("mixed", "host", dtype) for dtype in DTYPES]


@pytest.mark.parametrize(("saved_at", "loaded_at", "dtype"), PAIRS, ids=str)
def test_t48_t51_saved_at_one_mix_goes_on_at_another(saved_at: str, loaded_at: str, dtype: torch.dtype) -> None:
    source, first = trained(MIXES[saved_at], dtype, max_grad_norm=0.5)
    model = Model(dtype, seed=9)
    second = adamw(model, **MIXES[loaded_at], max_grad_norm=0.5, backend=backend(seed=1))
    weights = {name: value.clone() for name, value in source.state_dict().items()}
    model.load_state_dict(weights)
    second.load_state_dict(first.state_dict())
    assert_equal(snapshot(model, second), snapshot(source, first))
    for m, o in ((source, first), (model, second)):
        for step in range(STEPS, STEPS + 2):
            gradients(m, step)
            o.step()
    assert_equal(snapshot(model, second), snapshot(source, first))


@with_streamed
def test_t48_a_load_while_weights_are_still_on_their_way(mix: str) -> None:
    """Back to the state before, from the middle of a step's drain: nothing of that step comes after it."""
    late = backend(late=[lane for lane in Lane if lane is not Lane.COMPUTE])
    model, optimizer = trained(MIXES[mix], torch.bfloat16, late)
    state, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    before = snapshot(model, optimizer)
    gradients(model, 9)
    optimizer.step()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_equal(before, snapshot(model, optimizer))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_hdo_h9_groups_added_later_are_streamed_too(fraction: float) -> None:
    model = Model(torch.bfloat16)
    named = list(model.named_parameters())
    mix = {"offload_fraction": 1.0, "streamed_fraction": fraction}
    optimizer = adamw([{"params": named[:4]}], **mix, backend=backend(seed=1))
    expected = NumpyOptimizer.over(named)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": named[4:]})
        set_gradients(model, step, skip=[] if step >= 2 else [n for n, _ in named[4:]])
        expected.step({n: p.grad for n, p in named})
        optimizer.step()
    assert_equal(snapshot(model, optimizer), expected.snapshot())
    assert optimizer.backend.ledger.by_owner(Tier.DEVICE).get(SLOTS, 0) == 0
    assert (optimizer.plan.count(Placement.STREAMED) > 0) is (fraction > 0)


@with_streamed
def test_a_group_added_while_weights_are_on_their_way_leaves_no_slot_behind(mix: str) -> None:
    model = Net(torch.bfloat16)
    head = list(model.head.named_parameters(prefix="head"))
    rest = [(n, p) for n, p in model.named_parameters() if not n.startswith("head.")]
    optimizer = adamw([{"params": rest}], module=model, **MIXES[mix], backend=backend(seed=2))
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.add_param_group({"params": head})
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.wait()
    assert optimizer.backend.ledger.by_owner(Tier.DEVICE).get(SLOTS, 0) == 0
    state = optimizer.state_dict()["state"]
    assert int(state["embed.weight"]["step"]) == 2
    assert int(state["head.weight"]["step"]) == 1


@with_streamed
def test_a_group_added_between_backward_and_step_is_refused_and_loses_no_gradient(mix: str) -> None:
    results = []
    for each in (mix, None):
        model = Net(torch.bfloat16)
        rest = [(n, p) for n, p in model.named_parameters() if not n.startswith("head.")]
        optimizer = adamw([{"params": rest}], module=model, **(MIXES[each] if each else {}))
        with optimizer.accumulate(last=True):
            loss_of(model, 0).backward()
        if each:
            with pytest.raises(ModelError, match="between backward and step") as caught:
                optimizer.add_param_group({"params": list(model.head.named_parameters(prefix="head"))})
            assert "after step()" in caught.value.fix
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("change", ["in place", "reseed", "load"])
@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_state_that_was_staged_follows_what_changes_before_the_step(mix: str, change: str, given_up: bool) -> None:
    """Backward has brought state into slots already when weights are written, re-seeded, or loaded."""
    results = []
    for each in (mix, "device"):
        model, optimizer = make(each, torch.bfloat16)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = optimizer.state_dict()
        for seed in range(2):
            optimizer.zero_grad()
            with optimizer.accumulate(last=True):
                loss_of(model, seed).backward()
            optimizer.step()
        with optimizer.accumulate(last=True):
            loss_of(model, 2).backward()
        if given_up:
            optimizer.zero_grad()
        if change == "in place":
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
        elif change == "reseed":
            optimizer.reseed()
        else:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        if given_up or change == "load":
            optimizer.zero_grad()
            with optimizer.accumulate(last=True):
                loss_of(model, 3).backward()
        optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)
