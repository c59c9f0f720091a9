"""Streamed state: what is refused, with which words, and what is left after an error in the middle of a step."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_optimizer_cases import (
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
from hostward.errors import ConfigError, MemoryLimitError, ModelError
from hostward.optim.any_optimizer.offload import offload_optimizer_states
from hostward.runtime.backend import Buffer, Tier
from hostward.runtime.simulated.backend import SimulatedBackend


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


def with_another_state() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters())
    optimizer.state = UserDict()  # type: ignore[assignment]
    return optimizer


class NeverInitialised(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = inner.param_groups, inner.state


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
        (lambda: hostward.AdamW([("w", torch.nn.Parameter(torch.zeros(3)))]), "hostward.AdamW places its own state"),
        (lambda: "adam", "str is not a torch.optim.Optimizer"),
        (lambda: torch.optim.Adam(parameters(), differentiable=True), "Adam was made with differentiable=True"),
        (lambda: NeverInitialised(torch.optim.SGD(parameters())), "NeverInitialised has never called torch.optim"),
        (with_another_state, "the state of this SGD is a UserDict, not a dict"),
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
    with pytest.raises(ModelError, match="parameters are on meta"):
        offload_optimizer_states(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device="meta"))]))


class Capturing(SimulatedBackend):
    def capture(self) -> int:
        return 7

    def capturing(self) -> bool:
        return self.capture() != 0


def test_a_step_in_a_capture_is_refused() -> None:
    optimizer, _ = offloaded(OPTIMIZERS["adam"], backend=Capturing(threads=1))
    weights = [p.detach().clone() for p in all_parameters(optimizer)]
    with pytest.raises(ModelError, match="a step of this Adam is captured in a CUDA graph"):
        train(optimizer, steps=1)
    assert all(torch.equal(p, q) for p, q in zip(all_parameters(optimizer), weights, strict=True))


def test_a_backend_of_another_device_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device="meta"))])
    refused(optimizer, "the parameters lie on meta, the backend serves cpu")


# -------------------------------------------------------------------- errors in the middle of a step


class Failing(MuonLike):
    """Raises when it comes to the parameter `at`: `early` before it has written anything."""

    at: torch.Tensor | None = None
    early = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.at is not None and self.early:
            self.state[self.at].get("exp_avg")
            raise ValueError("no room for temporaries")
        if self.at is not None:
            self.state[self.at]["exp_avg" if "exp_avg" in self.state[self.at] else "momentum_buffer"].add_(1.0)
            raise ValueError("failed half way")
        super().step()


def stepped_twice() -> tuple[Failing, Any, MuonLike]:
    plain = MuonLike(groups(parameters()))
    optimizer, states = offloaded(Failing)
    train(plain, optimizer, steps=2)
    set_gradients(all_parameters(optimizer), 2)
    return optimizer, states, plain


@pytest.mark.parametrize("at", [0, 5, -1])
def test_an_error_before_anything_is_written_leaves_everything(at: int) -> None:
    optimizer, states, plain = stepped_twice()
    optimizer.at, optimizer.early = all_parameters(optimizer)[at], True
    with pytest.raises(ValueError, match="no room for temporaries"):
        optimizer.step()
    optimizer.at = None
    train(plain, optimizer, first=2, steps=2)
    assert_same(optimizer, plain)
    assert states.backend.ledger.held_bytes[Tier.DEVICE, f"{OWNER} on the device"] == 0


@pytest.mark.parametrize("at", [0, 5, -1])
def test_t42_an_error_half_way_is_remembered_until_a_state_is_loaded(at: int) -> None:
    optimizer, states, plain = stepped_twice()
    saved = optimizer.state_dict()
    optimizer.at = all_parameters(optimizer)[at]
    with pytest.raises(ValueError, match="failed half way"):
        optimizer.step()
    for again in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ModelError, match="an earlier step of this Failing failed half way") as caught:
            again()
        assert "load the last checkpoint" in caught.value.fix
    optimizer.load_state_dict(saved)
    optimizer.at = None
    train(plain, optimizer, first=2, steps=2)
    assert_same(optimizer, plain)
    states.detach()
    assert_same(optimizer, plain)


def test_t42_an_error_between_two_parts_is_remembered() -> None:
    """The second group has a gradient that SparseAdam refuses; the first has been stepped by then."""
    first = torch.nn.Parameter(torch.zeros(300, 300))
    second = torch.nn.Parameter(torch.zeros(300, 300))
    optimizer = torch.optim.SparseAdam([{"params": [first]}, {"params": [second]}])
    states = offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
    for p in (first, second):
        p.grad = torch.ones_like(p).to_sparse()
    optimizer.step()
    saved = optimizer.state_dict()
    second.grad = torch.ones_like(second)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    with pytest.raises(ModelError, match="an earlier step of this SparseAdam failed half way"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    second.grad = None
    optimizer.step()
    assert states.backend.ledger.held_bytes[Tier.DEVICE, f"{OWNER} on the device"] == 0


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
            raise MemoryLimitError(f"{owner}: {sum(sizes)} bytes could not be pinned", fix="ulimit -l")
        return super().allocate(tier, sizes, dtype, owner, **options)


def test_t07_a_full_host_at_attach_changes_nothing() -> None:
    plain = OPTIMIZERS["adagrad"](groups(parameters()))
    optimizer = OPTIMIZERS["adagrad"](groups(parameters()))
    backend = Small(1 << 20)
    with pytest.raises(MemoryLimitError, match=f"{OWNER}: [0-9]+ bytes could not be pinned"):
        offload_optimizer_states(optimizer, chunk_size_mb=1, backend=backend)
    assert "step" not in vars(optimizer)
    assert backend.ledger.held_bytes[Tier.HOST, OWNER] == 0
    train(plain, optimizer, steps=2)
    assert_same(optimizer, plain)


def test_t07_a_host_that_is_full_in_the_first_step_leaves_a_whole_step() -> None:
    plain = OPTIMIZERS["adam"](groups(parameters()))
    backend = Small(3 << 20)
    optimizer, states = offloaded(OPTIMIZERS["adam"], backend=backend)
    with pytest.raises(MemoryLimitError, match=re.escape("could not be pinned")):
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
    with pytest.raises(MemoryLimitError, match=re.escape("could not be pinned")):
        optimizer.load_state_dict(saved)
    with pytest.raises(ModelError, match="loading the state of this Adam failed half way"):
        optimizer.step()
    backend.room_bytes = 1 << 30
    optimizer.load_state_dict(saved)
    train(plain, optimizer, first=1, steps=2)
    assert_same(optimizer, plain)
