"""A step that is cut short: lanes are drained, the state belongs to no step and says so, a checkpoint makes it whole.

Seen red: `_torn` never set; `drain` left out; the flag not cleared by load_state_dict.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import hostward
from hostward.errors import ModelError, NativeError
from hostward.optim.bucket_state import same_bits
from hostward.runtime.simulated import backend as simulated
from hostward.runtime.simulated.backend import Order, SimulatedBackend


def trained() -> tuple[torch.nn.Module, hostward.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
    optimizer = hostward.AdamW(model, lr=1e-2, offload_fraction=0.5, backend=backend())
    give_gradients(model)
    optimizer.step()
    return model, optimizer


def backend() -> SimulatedBackend:
    return SimulatedBackend(threads=1, order=Order(eager=True))


def give_gradients(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


class FailsAt:
    """An AdamW kernel that raises `error` at its n-th call."""

    def __init__(self, n: int, error: BaseException) -> None:
        self.left, self.error = n, error

    def __call__(self, task: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error
        hostward.kernels.cpu.adamw.adamw_step(task)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error", [NativeError("broken on purpose"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("n", [1, 3, 6])
def test_a_step_cut_short_is_noticed_and_a_state_makes_it_whole(
    n: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    state = optimizer.state_dict()
    give_gradients(model)
    with monkeypatch.context() as patch:
        patch.setattr(simulated, "adamw_step", FailsAt(n, error))
        with pytest.raises(type(error)):
            optimizer.step()
    assert not any(optimizer.backend._queues.values())  # type: ignore[attr-defined]
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ModelError, match="interrupted half way"):
            call()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    give_gradients(model)
    optimizer.step()
    other_model, other = trained()
    give_gradients(other_model)
    other.step()
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert same_bits(mine.detach(), theirs.detach())


def test_a_refused_gradient_is_no_torn_step() -> None:
    model, optimizer = trained()
    before = optimizer.state_dict()["state"]
    give_gradients(model)
    model[0].weight.grad = None
    model[0].weight.grad_dtype = torch.float64
    model[0].weight.grad = torch.ones(300, 300, dtype=torch.float64)
    with pytest.raises(ModelError, match="float64"):
        optimizer.step()
    after = optimizer.state_dict()["state"]
    assert all(same_bits(before[n][r], after[n][r]) for n in before for r in before[n])


def test_h61_dcp_state_functions_run_no_hidden_step() -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    exported = get_optimizer_state_dict(model, optimizer)
    assert all(int(entry["step"]) == 1 for entry in optimizer.state_dict()["state"].values())
    before = optimizer.state_dict()["state"]
    set_optimizer_state_dict(model, optimizer, exported)
    after = optimizer.state_dict()["state"]
    assert all(same_bits(before[n][r], after[n][r]) for n in before for r in before[n])
