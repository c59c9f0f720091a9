"""Streamed state: what is refused, with which words, and what is left after an error in the middle of a step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_cases import (
    OPTIMIZERS,
    OWNER,
    MuonLike,
    all_parameters,
    assert_same,
    groups,
    offloaded,
    parameters,
    set_gradients,
    simulated,
    train,
)

import hostward
from hostward.engine.backend import Buffer, Tier
from hostward.engine.simulated import SimulatedBackend
from hostward.errors import ConfigError, MemoryLimitError, ModelError
from hostward.training.foreign import offload_optimizer_states


def refused(optimizer: Any, text: str, **options: Any) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        offload_optimizer_states(optimizer, backend=simulated(), **options)
    assert text in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fraction": 1.1}, "fraction must be a number in [0.0, 1.0], got 1.1"),
        ({"fraction": "1"}, "fraction must be a number in [0.0, 1.0], got '1'"),
        ({"fraction": float("nan")}, "fraction must be a number in [0.0, 1.0], got nan"),
        ({"chunk_size_mb": -1}, "chunk_size_mb must be a whole number of MiB, at least 0, got -1"),
        ({"chunk_size_mb": 1.5}, "chunk_size_mb must be a whole number of MiB, at least 0, got 1.5"),
        ({"chunk_size_mb": True}, "chunk_size_mb must be a whole number of MiB, at least 0, got True"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], text: str) -> None:
    optimizer = torch.optim.Adam(parameters())
    refused(optimizer, text, **options)
    assert "step" not in vars(optimizer)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> Any:  # type: ignore[override]
        return super().step(closure)


def with_shared_state() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters())
    optimizer.state["global"] = {"norm": torch.zeros(3)}  # type: ignore[index]
    return optimizer


def with_foreign_step() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters())
    optimizer.step = MuonLike.step.__get__(optimizer)  # type: ignore[method-assign]
    return optimizer


def on_two_devices() -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters(), torch.nn.Parameter(torch.zeros(3, device="meta"))])


class Subclass(torch.Tensor):
    pass


def of_a_subclass() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(3).as_subclass(Subclass).requires_grad_()])


def already() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters())
    offload_optimizer_states(optimizer, backend=simulated())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.optim.LBFGS(parameters()), "LBFGS cannot be stepped in parts"),
        (lambda: NeedsClosure(parameters()), "NeedsClosure cannot be stepped in parts"),
        (lambda: hostward.AdamW([("w", torch.nn.Parameter(torch.zeros(3)))]), "hostward.AdamW places its own state"),
        (lambda: "adam", "str is not a torch.optim.Optimizer"),
        (lambda: torch.optim.Adam(parameters(), differentiable=True), "Adam was made with differentiable=True"),
        (with_shared_state, "SGD has state under 'global', which is no parameter"),
        (with_foreign_step, "the step of this SGD has been replaced by MuonLike.step"),
        (on_two_devices, "a parameter (3,) lies on meta, others on cpu"),
        (of_a_subclass, "a parameter (3,) is a Subclass"),
        (lambda: torch.optim.SGD([{"params": []}]), "SGD has no parameter"),
        (already, "the states of this optimizer are offloaded already"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_optimizers_that_are_refused(make: Callable[[], Any], text: str) -> None:
    refused(make(), text)


def test_t81_a_device_without_backend_is_refused() -> None:
    with pytest.raises(ModelError, match="parameters lie on meta"):
        offload_optimizer_states(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device="meta"))]))


def test_a_backend_of_another_device_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device="meta"))])
    refused(optimizer, "the parameters lie on meta, the backend serves cpu")


# -------------------------------------------------------------------- optimizers that mix parameters


class Mixing(torch.optim.SGD):
    """Adapts a value of its group to all gradients, as learning-rate-free optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["distance"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        super().step()


class InPlace(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["counter"] += 1


class SharedState(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"] = {"steps": 1}  # type: ignore[index]


def mixing(_: Any) -> torch.optim.Optimizer:
    return Mixing(parameters(), lr=1e-2, momentum=0.9)


def in_place(_: Any) -> torch.optim.Optimizer:
    optimizer = InPlace(parameters(), lr=1e-2, momentum=0.9)
    optimizer.param_groups[0]["counter"] = torch.zeros(1)
    return optimizer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (mixing, "Mixing leaves another 'distance' for each part of its parameters"),
        (in_place, "InPlace changes a tensor of its group in place"),
        (lambda _: SharedState(parameters(), momentum=0.9), "SharedState has state under 'all', which is no parameter"),
    ],
    ids=["mixing", "in place", "shared"],
)
def test_mixing_that_leaves_a_trace_is_an_error(make: Any, text: str) -> None:
    optimizer, _ = offloaded(make)
    with pytest.raises(ModelError, match=text):
        train(optimizer, steps=2, first=4)
    for group in optimizer.param_groups:
        assert len(group["params"]) == len(parameters())


def test_a_single_part_may_change_what_it_likes() -> None:
    optimizer = InPlace(parameters(shapes=[(256, 256)]), lr=1e-2, momentum=0.9)
    optimizer.param_groups[0]["counter"] = torch.zeros(1)
    states = offload_optimizer_states(optimizer, backend=simulated())
    for n in range(3):
        set_gradients(all_parameters(optimizer), n)
        optimizer.step()
    assert optimizer.param_groups[0]["counter"].item() == 3
    assert states.offloaded_bytes > 0


# -------------------------------------------------------------------- errors in the middle of a step


class Failing(MuonLike):
    """Raises when it comes to the parameter `at`; with `early` before the call has written anything."""

    at: torch.Tensor | None = None
    early = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.early and self._reaches():
            raise ValueError("no room for temporaries")
        if self._reaches():
            for group in self.param_groups:
                group["params"] = group["params"][: len(group["params"]) // 2 + 1]
                group["lr"] = -1.0
            super().step()
            raise ValueError("failed half way")
        super().step()

    def _reaches(self) -> bool:
        return any(p is self.at for p in all_parameters(self))


def stepped_twice() -> tuple[Failing, Any, MuonLike]:
    plain = MuonLike(groups(parameters()))
    optimizer, states = offloaded(Failing)
    train(plain, optimizer, steps=2)
    set_gradients(all_parameters(optimizer), 2)
    return optimizer, states, plain


def test_an_error_before_anything_is_written_leaves_everything() -> None:
    optimizer, states, plain = stepped_twice()
    optimizer.at, optimizer.early = all_parameters(optimizer)[0], True
    before = [list(group["params"]) for group in optimizer.param_groups]
    # The parameters of one element have state on the device, and are the first part of a step.
    for p in (p for p in all_parameters(optimizer) if p.numel() == 1):
        p.grad = None
    with pytest.raises(ValueError, match="no room for temporaries"):
        optimizer.step()
    after = [group["params"] for group in optimizer.param_groups]
    assert all(p is q for a, b in zip(before, after, strict=True) for p, q in zip(a, b, strict=True))
    optimizer.at = None
    train(plain, optimizer, first=2, steps=2)
    assert_same(optimizer, plain)
    assert states.backend.ledger.held_bytes[Tier.DEVICE, f"{OWNER} slots"] == 0


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("at", [0, 5, -1])
def test_t42_an_error_half_way_is_remembered_until_a_state_is_loaded(at: int, early: bool) -> None:
    optimizer, states, plain = stepped_twice()
    saved = optimizer.state_dict()
    weights = [p.detach().clone() for p in all_parameters(optimizer)]
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.at, optimizer.early = all_parameters(optimizer)[at], early
    with pytest.raises(ValueError, match="no room for temporaries" if early else "failed half way"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(g["params"]) for g in plain.param_groups]
    for again in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ModelError, match="an earlier step of this Failing failed half way") as caught:
            again()
        assert "load the last checkpoint" in caught.value.fix
    for p, q in zip(all_parameters(optimizer), weights, strict=True):
        p.data.copy_(q)
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    optimizer.at = None
    train(plain, optimizer, first=2, steps=2)
    assert_same(optimizer, plain)
    states.detach()
    assert_same(optimizer, plain)


def test_detach_after_a_torn_step_says_so(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, states, _ = stepped_twice()
    optimizer.at = all_parameters(optimizer)[5]
    with pytest.raises(ValueError, match="failed half way"):
        optimizer.step()
    states.detach()
    assert "Failing: an earlier step failed half way; weights and state do not belong together" in caplog.text
    assert states.backend.ledger.held_bytes[Tier.HOST, OWNER] == 0


class Small(SimulatedBackend):
    """A host with room for `room_bytes` of pinned memory."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__(threads=1)
        self.room_bytes = room_bytes

    def allocate(self, tier: Tier, sizes: Any, dtype: torch.dtype, owner: str, **options: Any) -> list[Buffer]:
        if tier is Tier.HOST and self.ledger.pinned_bytes + sum(sizes) * dtype.itemsize > self.room_bytes:
            raise MemoryLimitError(f"{owner}: {sum(sizes)} bytes could not be page-locked", fix="ulimit -l")
        return super().allocate(tier, sizes, dtype, owner, **options)


def test_t07_a_full_host_at_attach_changes_nothing() -> None:
    plain = OPTIMIZERS["adagrad"](groups(parameters()))
    optimizer = OPTIMIZERS["adagrad"](groups(parameters()))
    backend = Small(1 << 20)
    with pytest.raises(MemoryLimitError, match=f"{OWNER}: [0-9]+ bytes could not be page-locked"):
        offload_optimizer_states(optimizer, chunk_size_mb=1, backend=backend)
    assert "step" not in vars(optimizer)
    assert backend.ledger.held_bytes[Tier.HOST, OWNER] == 0
    train(plain, optimizer, steps=2)
    assert_same(optimizer, plain)


def test_t07_a_host_that_is_full_in_the_first_step_leaves_a_whole_step() -> None:
    plain = OPTIMIZERS["adam"](groups(parameters()))
    backend = Small(3 << 20)
    optimizer, states = offloaded(OPTIMIZERS["adam"], backend=backend)
    with pytest.raises(MemoryLimitError, match=re.escape("could not be page-locked")):
        train(optimizer, steps=1)
    train(plain, steps=1)
    assert_same(optimizer, plain)
    assert 0 < states.offloaded_bytes <= 3 << 20
    backend.room_bytes = 1 << 30
    train(plain, optimizer, first=1, steps=2)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 3 << 20


def test_t07_a_host_that_is_full_while_loading_asks_for_the_load_again() -> None:
    plain, backend = OPTIMIZERS["adam"](groups(parameters())), Small(1 << 30)
    optimizer, _ = offloaded(OPTIMIZERS["adam"], backend=backend)
    train(plain, optimizer, steps=1)
    saved = optimizer.state_dict()
    backend.room_bytes = 3 << 20
    with pytest.raises(MemoryLimitError, match=re.escape("could not be page-locked")):
        optimizer.load_state_dict(saved)
    with pytest.raises(ModelError, match="loading the state of this Adam failed half way"):
        optimizer.step()
    backend.room_bytes = 1 << 30
    optimizer.load_state_dict(saved)
    train(plain, optimizer, first=1, steps=2)
    assert_same(optimizer, plain)
