"""What lives around an optimizer whose state is streamed: closures, hooks, schedulers, scalers, checkpoints.

Seen red: with state that was changed by hand still to be looked at after a load (the load's own was freed).
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from any_optimizer_cases import (
    OPTIMIZERS,
    Restless,
    all_parameters,
    assert_same,
    cut_small,
    groups,
    offloaded,
    parameters,
    set_gradients,
    simulated,
    train,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from hostward.optim.any_optimizer.offload import offload_optimizer_states
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import Lane, Tier


def test_a_closure_is_evaluated_once_and_its_loss_returned() -> None:
    results = []
    for attach in (False, True):
        optimizer = OPTIMIZERS["adam"](groups(parameters()))
        if attach:
            offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
        calls: list[bool] = []

        def closure(optimizer: Any = optimizer, calls: Any = calls) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in all_parameters(optimizer))
            loss.backward()
            return loss

        with torch.no_grad():
            losses = [optimizer.step(closure), optimizer.step(closure=closure)]
        assert calls == [True, True]
        results.append((optimizer, losses))
    (plain, expected), (optimizer, losses) = results
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert_same(optimizer, plain)


def test_what_a_step_returns_and_counts_is_what_one_call_would() -> None:
    optimizer, _ = offloaded(Restless)
    set_gradients(all_parameters(optimizer), 0, skip=(8, 9))  # the last part steps nothing of the first group
    assert [optimizer.step() for _ in range(3)] == [1, 2, 3]
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


class Parent(torch.optim.SGD):
    """Its instances make torch put hooks around a step that `Child` calls."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Child(Parent):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adam, Child])
def test_step_hooks_run_once_and_may_change_the_arguments(kind: Any) -> None:
    Parent(parameters())
    optimizer = kind(groups(parameters()))
    offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
    seen: list[object] = []
    everything = len(all_parameters(optimizer))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(len(all_parameters(o))))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7.0), {}))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    of_all = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("after all"))
    set_gradients(all_parameters(optimizer), 0)
    try:
        assert optimizer.step() == 7.0
    finally:
        of_all.remove()
    # Torch itself runs the hooks of a parent's step that a child calls; those of all optimizers it keeps elsewhere.
    assert [what for what in seen if what != "after all"] == [everything, "after"]
    assert seen.count("after all") == 1 or kind is Child


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_schedulers_see_every_step(when: str) -> None:
    def scheduled(attach: bool) -> tuple[Any, Any, Any]:
        optimizer = OPTIMIZERS["adam"](groups(parameters()))
        make = torch.optim.lr_scheduler.StepLR
        schedulers = [make(optimizer, 2)] if when != "after" else []
        states = offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated()) if attach else None
        schedulers += [make(optimizer, 3)] if when != "before" else []
        return optimizer, schedulers, states

    plain, optimizer = scheduled(False), scheduled(True)
    for n in range(6):
        for each, schedulers, states in (plain, optimizer):
            set_gradients(all_parameters(each), n)
            each.step()
            assert each._opt_called
            for scheduler in schedulers:
                scheduler.step()
            if n == 3 and states is not None:
                states.detach()
    assert_same(optimizer[0], plain[0])
    assert optimizer[2].offloaded_bytes == 0


@pytest.mark.parametrize("name", ["sgd momentum", "adamw foreach", "adamw fused", "adam fused"])
def test_a_gradient_scaler_skips_and_unscales(name: str) -> None:
    found = []
    for attach in (False, True):
        optimizer = OPTIMIZERS[name](groups(parameters()))
        if attach:
            offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for n in range(5):
            set_gradients(all_parameters(optimizer), n)
            scaler.scale(torch.zeros(()))
            if n == 2:
                all_parameters(optimizer)[4].grad.view(-1)[3] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found.append((optimizer, scales))
    assert found[0][1] == found[1][1]
    assert found[0][1] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert_same(found[1][0], found[0][0])


# -------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["adamw foreach", "adagrad", "muon like", "restless", "adafactor"])
@pytest.mark.parametrize("fractions", [(1.0, 1.0), (1.0, None), (None, 0.5)], ids=str)
def test_t48_save_and_load_anywhere(name: str, fractions: tuple[float | None, float | None]) -> None:
    def make(fraction: float | None) -> tuple[Any, Any]:
        optimizer = OPTIMIZERS[name](groups(parameters()))
        options: dict[str, Any] = {"chunk_size_mb": 1, "backend": simulated(late=frozenset({Lane.D2H}))}
        return optimizer, fraction and offload_optimizer_states(optimizer, fraction=fraction, **options)

    unbroken, _ = make(None)
    first, _ = make(fractions[0])
    train(unbroken, first, steps=2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second, states = make(fractions[1])
    train(second, steps=1, first=7)
    for p, q in zip(all_parameters(second), all_parameters(first), strict=True):
        p.data.copy_(q.data)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_same(second, first)
    if states:
        assert states.offloaded_bytes > 0
    train(unbroken, second, first=2)
    assert_same(second, unbroken)


@pytest.mark.parametrize("late", [(), (Lane.D2H, Lane.H2D)], ids=["in order", "late"])
def test_a_load_replaces_state_that_was_given_more_tensors_by_hand(late: tuple[Lane, ...]) -> None:
    """What the state was before the load must not decide about the memory of what was loaded."""
    plain = OPTIMIZERS["adamw loop"](groups(parameters()))
    optimizer, states = offloaded(OPTIMIZERS["adamw loop"], backend=simulated(late=frozenset(late)))
    cut_small(states, 1 << 10)
    train(plain, optimizer, steps=1)
    for one in (plain, optimizer):
        saved = copy.deepcopy(one.state_dict())
        entry = one.state[all_parameters(one)[1]]
        entry["mine"] = entry["exp_avg"] * 2
        one.load_state_dict(saved)
    train(plain, optimizer, steps=2, first=1)  # in the first of these that parameter has no gradient
    assert_same(optimizer, plain)


def test_t52_h67_a_state_dict_has_tensors_of_its_own() -> None:
    optimizer, _ = offloaded(OPTIMIZERS["adamw foreach"], backend=simulated(late=frozenset({Lane.D2H})))
    train(optimizer, steps=1)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    train(optimizer, steps=2, first=1)
    for i, entry in saved["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(entry[key], before["state"][i][key])
            assert entry[key].untyped_storage().nbytes() == entry[key].nbytes
    file = io.BytesIO()
    torch.save(saved["state"][0]["exp_avg"], file)
    assert file.tell() < 1.02 * 256 * 256 * 4
    optimizer.load_state_dict(saved)
    reloaded = optimizer.state_dict()["state"]
    assert all(same_bits(reloaded[i]["exp_avg"], e["exp_avg"]) for i, e in before["state"].items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_compiled_step_is_the_plain_one(scheduled: bool) -> None:
    """The compiler is kept out of it; it would trace what reloads the state."""
    plain = OPTIMIZERS["adamw foreach"](groups(parameters()))
    optimizer, states = offloaded(OPTIMIZERS["adamw foreach"])
    if scheduled:
        for each in (plain, optimizer):
            torch.optim.lr_scheduler.ConstantLR(each, factor=1.0)
    step = torch.compile(optimizer.step, backend="eager")
    for n in range(3):
        for each, stepped in ((plain, plain.step), (optimizer, step)):
            set_gradients(all_parameters(each), n)
            stepped()
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_saved_and_loaded_within_inference_mode(fraction: float) -> None:
    """As an evaluation does that saves the best state so far: what it loads is trained afterwards."""
    plain = OPTIMIZERS["adamw foreach"](groups(parameters()))
    optimizer, _ = offloaded(OPTIMIZERS["adamw foreach"], fraction=fraction)
    train(plain, optimizer, steps=2)
    for each in (plain, optimizer):
        with torch.inference_mode():
            each.load_state_dict(each.state_dict())
    train(plain, optimizer, steps=2, first=2)
    assert_same(optimizer, plain)


def test_hooks_of_others_see_whole_state() -> None:
    optimizer, _ = offloaded(OPTIMIZERS["adamw foreach"])
    train(optimizer, steps=2)
    seen: list[int] = []
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append(len(d["state"][0])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state[all_parameters(o)[0]])))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [3, 3]


def test_t58_loading_puts_one_chunk_on_the_device_at_a_time() -> None:
    source, _ = offloaded(OPTIMIZERS["adam"])
    train(source, steps=1)
    saved = source.state_dict()

    class Watching(torch.optim.Adam):
        """Notes how many state bytes torch has put on the device since the last chunk left."""

        waiting_bytes = 0

        @staticmethod
        def _process_value_according_to_param_policy(*args: Any, **kwargs: Any) -> torch.Tensor:
            value = torch.optim.Optimizer._process_value_according_to_param_policy(*args, **kwargs)
            Watching.waiting_bytes += value.nbytes
            return value

    class Noting(type(simulated())):  # type: ignore[misc]
        largest_bytes = 0

        def copy(self, lane: Lane, *args: Any, **options: Any) -> Any:
            self.largest_bytes = max(self.largest_bytes, Watching.waiting_bytes)
            Watching.waiting_bytes = 0
            return super().copy(lane, *args, **options)

    optimizer, backend = Watching(groups(parameters()), lr=1e-2), Noting(threads=1)
    offload_optimizer_states(optimizer, chunk_size_mb=1, backend=backend)
    optimizer.load_state_dict(saved)
    assert 0 < backend.largest_bytes <= 1.1 * (1 << 20)
    assert backend.ledger.held_bytes[Tier.HOST, "optimizer state"] > 4 * (1 << 20)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    optimizer, states = offloaded(OPTIMIZERS["adam"])
    plain = OPTIMIZERS["adam"](groups(parameters()))
    train(plain, optimizer, steps=2)
    other = torch.optim.Adam(parameters()).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(other)
    train(plain, optimizer, steps=1, first=2)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0
