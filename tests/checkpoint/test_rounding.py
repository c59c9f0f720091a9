"""State rounded on purpose loads where loading refuses it, and no further than it was asked.

Seen red: main weights kept, moments that need no rounding rounded again, and what a state says of its dtypes left out.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hostward
from hostward.convert import rounded
from hostward.errors import CheckpointError, ConfigError

BF16, FP8 = torch.bfloat16, torch.uint8
ASKED: dict[str, dict[str, torch.dtype]] = {
    "bf16 moments": {"exp_avg": BF16, "exp_avg_sq": BF16},
    "one of them": {"exp_avg_sq": BF16},
    "fp8 moments": {"exp_avg": FP8, "exp_avg_sq": FP8},
    "bf16 main weights": {"main_param": BF16},
    "the least": {"exp_avg": FP8, "exp_avg_sq": FP8, "main_param": BF16},
}


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(130, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 8))
    return model.to(BF16)


def trained(fraction: float = 0.0, **options: Any) -> tuple[torch.nn.Module, hostward.AdamW]:
    model = network()
    optimizer = hostward.AdamW(model, lr=1e-2, offload_fraction=fraction, **options)
    for step in range(3):
        steps(model, optimizer, step)
    return model, optimizer


def steps(model: torch.nn.Module, optimizer: hostward.AdamW, seed: int) -> None:
    batch = torch.randn(4, 130, generator=torch.Generator().manual_seed(seed)).to(BF16)
    model(batch).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}/{role}": value for name, entry in state["state"].items() for role, value in entry.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("dtypes", ASKED.values(), ids=ASKED)
def test_it_loads_as_it_was_rounded(dtypes: dict[str, torch.dtype], fraction: float) -> None:
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    smaller = hostward.AdamW(network(), lr=1e-2, offload_fraction=fraction, state_dtypes=dtypes)
    with pytest.raises(CheckpointError, match=r"hostward\.convert\.rounded\(state, state_dtypes\)"):
        smaller.load_state_dict(state)
    before = {name: tensor.clone() for name, tensor in tensors(state).items()}
    given = rounded(state, dtypes)
    assert equal(tensors(state), before)
    smaller = hostward.AdamW(copy.deepcopy(model), lr=1e-2, offload_fraction=fraction, state_dtypes=dtypes)
    smaller.load_state_dict(given)
    assert equal(tensors(smaller.state_dict()), tensors(given))
    assert equal(tensors(rounded(given, dtypes)), tensors(given))


@pytest.mark.parametrize("dtypes", ASKED.values(), ids=ASKED)
def test_it_rounds_to_nearest_what_was_asked_for_and_nothing_else(dtypes: dict[str, torch.dtype]) -> None:
    state = trained()[1].state_dict()
    given = tensors(rounded(state, dtypes))
    for name, value in tensors(state).items():
        parameter, _, role = name.rpartition("/")
        dtype = dtypes.get("main_param" if role == "master" else role)
        if role == "master" and dtype is BF16:
            assert name not in given
        elif dtype is BF16 or (dtype is FP8 and value.dim() < 2):
            assert torch.equal(given[name], value.to(BF16)), parameter
        elif dtype is FP8:
            assert given[name].dtype is BF16
            largest = value.abs().max()
            assert ((given[name].float() - value).abs() <= value.abs() / 16 + largest / 2**14).all()
        else:
            assert given[name] is value


def test_what_is_stored_in_fewer_bytes_stays() -> None:
    state = trained(state_dtypes=ASKED["the least"])[1].state_dict()
    given = rounded(state, ASKED["bf16 moments"])
    assert {key: value for key, value in given.items() if key != "state"} == {
        key: value for key, value in state.items() if key != "state"
    }
    assert equal(tensors(given), tensors(state))


def test_other_states_and_dtypes_are_refused() -> None:
    model = network()
    theirs = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="this is no optimizer state dict of hostward"):
        rounded(theirs.state_dict(), ASKED["bf16 moments"])
    with pytest.raises(ConfigError, match="state_dtypes has 'exp_avgs'"):
        rounded(trained()[1].state_dict(), {"exp_avgs": BF16})
