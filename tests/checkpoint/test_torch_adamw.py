"""hostward's optimizer state to torch.optim.AdamW and back: no bit is lost, and what cannot be held is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostward
from hostward.checkpoint.torch_adamw import from_torch_adamw, to_torch_adamw
from hostward.errors import CheckpointError

SHAPES = {"embed.weight": (8, 6), "norm.bias": (6,), "scale": (), "head.weight": (6, 8)}
HYPERPARAMETERS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.033}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits(first), bits(second))


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def make_adamw(parameters: dict[str, torch.nn.Parameter], named: bool = True, **options: Any) -> torch.optim.AdamW:
    """AdamW with two groups of different hyper-parameters."""
    items: list[Any] = list(parameters.items()) if named else list(parameters.values())
    second = {"params": items[2:], "lr": 1e-2, "weight_decay": 0.0}
    return torch.optim.AdamW([{"params": items[:2]}, second], **{**HYPERPARAMETERS, **options})


def train(
    optimizer: torch.optim.AdamW, parameters: dict[str, torch.nn.Parameter], steps: range, unused: str = ""
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if name == unused else gradient
        optimizer.step()


def hostward_state(dtype: torch.dtype, count: int = 12345) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    state = {}
    for name, shape in SHAPES.items():
        moments = {key: torch.randn(shape, generator=generator).abs() for key in ("exp_avg", "exp_avg_sq")}
        state[name] = {"step": torch.tensor(count), **moments}
        if dtype != torch.float32:
            state[name]["master"] = torch.randn(shape, generator=generator)
    names = list(SHAPES)
    hyperparameters = {**HYPERPARAMETERS, "betas": [0.9, 0.95], "initial_lr": 1e-2}
    groups = [{"params": names[:2], **hyperparameters}, {"params": names[2:], **hyperparameters, "lr": 0.5}]
    return {"format": 1, "state": state, "param_groups": groups}


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["default", "foreach", "fused"])
@pytest.mark.parametrize("named", [True, False])
def test_t48_torch_trains_on_from_the_converted_state_with_the_same_bits(options: dict[str, Any], named: bool) -> None:
    parameters = make_parameters()
    optimizer = make_adamw(parameters, named, **options)
    train(optimizer, parameters, range(5))
    converted = from_torch_adamw(copy.deepcopy(optimizer.state_dict()), None if named else list(SHAPES))
    back, masters = to_torch_adamw(converted)

    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    other = make_adamw(copies)
    other.load_state_dict(back)
    train(optimizer, parameters, range(5, 10))
    train(other, copies, range(5, 10))

    assert masters == {}
    assert all(same_bits(parameters[name], copies[name]) for name in SHAPES)
    for name in SHAPES:
        mine, theirs = optimizer.state[parameters[name]], other.state[copies[name]]
        assert mine.keys() == theirs.keys()
        assert all(same_bits(mine[key], theirs[key]) for key in mine)


def test_t48_torch_state_survives_the_round_trip_whole() -> None:
    parameters = make_parameters()
    optimizer = make_adamw(parameters, fused=True)
    train(optimizer, parameters, range(3))
    original = optimizer.state_dict()
    back, _ = to_torch_adamw(from_torch_adamw(original))
    assert back["param_groups"] == original["param_groups"]
    assert list(back["state"]) == list(original["state"])
    for key in original["state"]:
        assert all(same_bits(back["state"][key][field], value) for field, value in original["state"][key].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t48_hostward_state_survives_the_round_trip_whole(dtype: torch.dtype) -> None:
    state_dict = hostward_state(dtype)
    back_torch, masters = to_torch_adamw(state_dict)
    back = from_torch_adamw(back_torch, masters=masters)
    assert back["format"] == 1
    assert back["param_groups"] == state_dict["param_groups"]
    assert list(back["state"]) == list(state_dict["state"])
    for name, entry in state_dict["state"].items():
        assert back["state"][name].keys() == entry.keys()
        assert all(same_bits(back["state"][name][key], value) for key, value in entry.items())


def test_h60_masters_of_a_16_bit_model_become_the_weights_of_an_fp32_model() -> None:
    torch_state, masters = to_torch_adamw(hostward_state(torch.bfloat16))
    parameters = {name: torch.nn.Parameter(master.clone()) for name, master in masters.items()}
    optimizer = make_adamw(parameters)
    optimizer.load_state_dict(torch_state)
    for name, entry in hostward_state(torch.bfloat16)["state"].items():
        loaded = optimizer.state[parameters[name]]
        assert loaded["step"].dtype == torch.float32
        assert loaded["step"].item() == 12345
        assert same_bits(loaded["exp_avg"], entry["exp_avg"])
        assert same_bits(loaded["exp_avg_sq"], entry["exp_avg_sq"])
        assert same_bits(parameters[name], entry["master"])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert optimizer.param_groups[0]["param_names"] == list(SHAPES)[:2]
    assert optimizer.param_groups[1]["lr"] == 0.5


def test_moments_of_a_16_bit_torch_model_are_widened_exactly() -> None:
    parameters = make_parameters(torch.bfloat16)
    optimizer = make_adamw(parameters)
    train(optimizer, parameters, range(2))
    masters = {name: parameter.detach().float() for name, parameter in parameters.items()}
    state = from_torch_adamw(optimizer.state_dict(), masters=masters)["state"]
    for name in SHAPES:
        kept = optimizer.state[parameters[name]]["exp_avg"]
        assert state[name]["exp_avg"].dtype == torch.float32
        assert same_bits(state[name]["exp_avg"].to(torch.bfloat16), kept)
        assert same_bits(state[name]["master"], masters[name])
    names = [group["param_names"] for group in optimizer.param_groups]
    ours = hostward.AdamW([{"params": [(name, parameters[name]) for name in group]} for group in names])
    with pytest.raises(
        CheckpointError, match=r"no master for parameter .*\n.*16-bit.*\n.*from_torch_adamw\(\.\.\., masters="
    ):
        ours.load_state_dict(from_torch_adamw(optimizer.state_dict()))


def test_t50_a_parameter_torch_never_stepped_gets_step_zero_and_zeros() -> None:
    parameters = make_parameters()
    optimizer = make_adamw(parameters)
    train(optimizer, parameters, range(2), unused="norm.bias")
    entry = from_torch_adamw(optimizer.state_dict(), shapes=SHAPES)["state"]["norm.bias"]
    assert same_bits(entry["step"], torch.tensor(0))
    assert same_bits(entry["exp_avg"], torch.zeros(6))
    assert same_bits(entry["exp_avg_sq"], torch.zeros(6))
    with pytest.raises(CheckpointError, match=r"torch holds no state for 'norm.bias'\n.*never stepped.*\n.*shapes"):
        from_torch_adamw(optimizer.state_dict())


def torch_state(**options: Any) -> dict[str, Any]:
    parameters = make_parameters()
    optimizer = make_adamw(parameters, **options)
    train(optimizer, parameters, range(1))
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"amsgrad": True}, r"group 0 has amsgrad=True\n.*maximum of the second moment"),
        ({"maximize": True}, r"group 0 has maximize=True\n.*hostward minimizes"),
    ],
)
def test_torch_options_that_hostward_does_not_compute_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        from_torch_adamw(torch_state(**options))


def test_state_of_adam_with_l2_decay_is_refused() -> None:
    parameters = make_parameters()
    adam = torch.optim.Adam(list(parameters.items()), weight_decay=0.1)
    with pytest.raises(CheckpointError, match=r"decoupled_weight_decay=False\n.*through the gradient"):
        from_torch_adamw(adam.state_dict(), shapes=SHAPES)


def _edit(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(state_dict: dict[str, Any]) -> None:
        target: Any = state_dict
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_edit(("state", 0, "step"), torch.tensor(1.5)), "step count of 'embed.weight' is 1.5"),
        (_edit(("state", 0, "step"), torch.tensor(float("nan"))), "step count of 'embed.weight' is nan"),
        (_edit(("state", 0, "step"), torch.tensor(-1.0)), "step count of 'embed.weight' is -1.0"),
        (
            _edit(("state", 1, "exp_avg"), torch.zeros(6, dtype=torch.float64)),
            "exp_avg of 'norm.bias' is torch.float64",
        ),
        (_edit(("state", 1, "exp_avg"), torch.zeros(5)), r"moments of 'norm.bias' have shapes \[5\] and \[6\]"),
        (_edit(("state", 1), {"step": 1, "momentum_buffer": 0}), "'norm.bias' has no 'exp_avg'"),
        (_edit(("param_groups", 0, "param_names"), ["a", "a"]), r"4 names \(3 different\) for 4 parameters"),
        (_edit(("param_groups",), [{"params": [0]}]), "has no 'lr'"),
        (_edit(("param_groups",), None), "not an optimizer state dict"),
    ],
)
def test_malformed_torch_state_is_refused(edit: Callable[[dict[str, Any]], None], text: str) -> None:
    state_dict = torch_state()
    edit(state_dict)
    with pytest.raises(CheckpointError, match=text):
        from_torch_adamw(state_dict)


def test_names_are_needed_once_and_must_agree() -> None:
    with pytest.raises(CheckpointError, match=r"no parameter names\n.*without names\n.*pass `names`"):
        from_torch_adamw(torch_state(named=False))
    with pytest.raises(CheckpointError, match="3 names"):
        from_torch_adamw(torch_state(named=False), list(SHAPES)[:3])
    with pytest.raises(CheckpointError, match="not those of the optimizer state"):
        from_torch_adamw(torch_state(), ["a", "b", "c", "d"])
    with pytest.raises(CheckpointError, match="master is given for 'other'"):
        from_torch_adamw(torch_state(), masters={"other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"master of 'norm.bias' is torch.bfloat16 \[6\]"):
        from_torch_adamw(torch_state(), masters={"norm.bias": torch.zeros(6, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"moments of 'norm.bias' have shape \[6\]\n.*has shape \[7\]"):
        from_torch_adamw(torch_state(), shapes={"norm.bias": (7,)})


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_edit(("format",), 2), "format 2"),
        (_edit(("state", "other"), {}), "'other', which is in no parameter group"),
        (_edit(("param_groups", 1, "params"), ["scale", "scale"]), "'scale' stands twice"),
        (_edit(("state", "scale", "step"), torch.tensor(2**24)), r"has made 16777216 steps\n.*counts in float32"),
        (_edit(("state", "scale", "master"), torch.zeros(3)), r"master of 'scale' is torch.float32 \[3\]"),
    ],
)
def test_malformed_hostward_state_is_refused(edit: Callable[[dict[str, Any]], None], text: str) -> None:
    state_dict = hostward_state(torch.bfloat16)
    edit(state_dict)
    with pytest.raises(CheckpointError, match=text):
        to_torch_adamw(state_dict)


@pytest.mark.parametrize("count", [0, 1, 2**24 - 1])
def test_step_counts_survive_up_to_the_largest(count: int) -> None:
    back, masters = to_torch_adamw(hostward_state(torch.float32, count))
    assert masters == {}
    assert all(entry["step"].item() == count for entry in back["state"].values())
    again = from_torch_adamw(back)["state"]
    assert all(same_bits(entry["step"], torch.tensor(count)) for entry in again.values())


def test_t56_both_state_dicts_load_with_weights_only(tmp_path: Any) -> None:
    state_dict = hostward_state(torch.bfloat16)
    for index, value in enumerate(itertools.chain([state_dict], to_torch_adamw(state_dict))):
        torch.save(value, tmp_path / f"{index}.pt")
        torch.load(tmp_path / f"{index}.pt", weights_only=True)
