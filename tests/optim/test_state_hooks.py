"""Hooks of torch.optim.Optimizer around state_dict, load_state_dict and step: called as torch calls them.

Seen red with: each of the four loops taken out, a result not taken over, hooks behind what they come before, the
caller's dict handed to the hooks, gradients switched off in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import Model, adamw, assert_equal, set_gradients, snapshot
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hostward
from hostward.errors import CheckpointError

Log = list[str]


def torch_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters())


MAKERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {"torch": torch_adamw, "hostward": adamw}


def noting(log: Log, word: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        log.append(f"{word} {torch.is_grad_enabled()}")

    return hook


def register_all(optimizer: torch.optim.Optimizer, log: Log) -> list[Any]:
    """Three hooks of each kind, the last one in front; and handles to take the first of each kind off again."""
    handles = []
    for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        register = getattr(optimizer, f"register_{kind}_hook")
        handles.append(register(noting(log, f"{kind} 1")))
        register(noting(log, f"{kind} 2"))
        register(noting(log, f"{kind} 3"), prepend=True)
    return handles


def test_hooks_are_called_as_torch_calls_them() -> None:
    logs = []
    for make in MAKERS.values():
        log: Log = []
        optimizer = make(Model())
        handles = register_all(optimizer, log)
        optimizer.load_state_dict(optimizer.state_dict())
        for handle in handles:
            handle.remove()
        optimizer.load_state_dict(optimizer.state_dict())
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[1]) == 20


def test_step_hooks_and_global_ones_are_called_as_torch_calls_them() -> None:
    logs = []
    for make in MAKERS.values():
        log: Log = []
        model = Model()
        optimizer = make(model)

        def backward(model: torch.nn.Module = model) -> float:
            set_gradients(model, 0)
            return 3.5

        def with_a_closure(*_: Any, closure: Callable[[], float] = backward) -> tuple[Any, Any]:
            return (optimizer, closure), {}  # noqa: B023

        handles = [
            register_optimizer_step_pre_hook(noting(log, "global pre")),
            register_optimizer_step_post_hook(noting(log, "global post")),
            optimizer.register_step_pre_hook(noting(log, "pre")),
            optimizer.register_step_post_hook(noting(log, "post")),
            optimizer.register_step_pre_hook(with_a_closure),
        ]
        before = model.head.weight.detach().clone()
        try:
            assert optimizer.step() == 3.5
        finally:
            for handle in handles:
                handle.remove()
        assert not torch.equal(before, model.head.weight)
        assert not any("wait" in entry for entry in log)
        logs.append(log)
    assert logs[0] == logs[1] == ["global pre True", "pre True", "post True", "global post True"]


def trained() -> tuple[Model, hostward.AdamW]:
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=0.5)
    set_gradients(model, 0)
    optimizer.step()
    return model, optimizer


def test_what_a_hook_before_saving_writes_is_saved() -> None:
    model, optimizer = trained()

    def average(_: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            model.head.weight.fill_(0.5)

    optimizer.register_state_dict_pre_hook(average)
    assert (optimizer.state_dict()["state"]["head.weight"]["master"] == 0.5).all()


def test_hooks_after_saving_change_or_replace_the_result() -> None:
    _, optimizer = trained()
    optimizer.register_state_dict_post_hook(lambda _, state: state.update(note=1))
    assert optimizer.state_dict()["note"] == 1
    optimizer.register_state_dict_post_hook(lambda _, state: {"whole": state})
    optimizer.register_state_dict_post_hook(lambda _, state: None)
    found = optimizer.state_dict()
    assert list(found) == ["whole"]
    assert found["whole"]["note"] == 1


@pytest.mark.parametrize("replaces", [True, False])
def test_hooks_before_loading_change_or_replace_what_is_loaded(replaces: bool) -> None:
    source, saver = trained()
    state = {"state": saver.state_dict()}

    def unpack(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        if replaces:
            return dict(given["state"])
        given.update(given["state"])
        return None

    model = Model(torch.bfloat16, seed=3)
    optimizer = adamw(model)
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(state)
    optimizer.register_load_state_dict_pre_hook(unpack)
    optimizer.load_state_dict(state)
    assert_equal(snapshot(model, optimizer), snapshot(source, saver))
    assert list(state) == ["state"], "the caller's own dict was changed"


def test_a_hook_after_loading_sees_what_was_loaded() -> None:
    _, saver = trained()
    optimizer = adamw(Model(torch.bfloat16, seed=3))
    seen = []
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state_dict()["state"]["head.weight"]))
    optimizer.load_state_dict(saver.state_dict())
    assert_equal(seen[0], saver.state_dict()["state"]["head.weight"])


def test_a_load_that_is_refused_runs_no_hook_after_it() -> None:
    _, optimizer = trained()
    log: Log = []
    optimizer.register_load_state_dict_post_hook(noting(log, "post"))
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict({})
    assert log == []
