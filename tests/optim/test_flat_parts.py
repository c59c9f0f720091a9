"""Flat parts of larger parameters in one process: their norm, their state, and what is refused of them.

Seen red: one of two fragments of a chunk overwriting the other; elements of a gradient that a part had in a step
before; parts left out of a state dict.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from optimizer_cases import adamw, assert_equal

import hostward
from hostward.errors import CheckpointError, ConfigError, ModelError

NUMEL = 10_000
BORDERS = (0, 3_000, 3_700, 9_000, NUMEL)
"""Two of them within the first chunk of 4,096 elements."""


def parts_of(borders: tuple[int, ...] = BORDERS) -> dict[str, hostward.FlatPart]:
    pairs = itertools.pairwise(borders)
    return {f"layers.0.{i}": hostward.FlatPart("w", start, stop, NUMEL) for i, (start, stop) in enumerate(pairs)}


def made(parts: dict[str, hostward.FlatPart], **options: Any) -> hostward.AdamW:
    torch.manual_seed(0)
    weight = torch.randn(NUMEL)
    named = [(name, torch.nn.Parameter(weight[part.start : part.stop].clone())) for name, part in parts.items()]
    return adamw(named, **{"shards": hostward.FlatShards(parts), "waits": "manual", "max_grad_norm": 0.5, **options})


def gradient_of(seed: int) -> torch.Tensor:
    """The whole gradient. In its first chunk the last part has another exponent than the others."""
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (10 * seed)
    gradient[BORDERS[2] : 4_096] *= 2.0**-15
    return gradient


def step(optimizer: hostward.AdamW, seed: int, without: int | None = None) -> float:
    """The norm of a step whose gradient the part of this number lacks."""
    gradient = gradient_of(seed)
    for number, (name, part) in enumerate(optimizer.parts.items()):
        if number != without:
            optimizer.wait_for_weights([name])
            optimizer.take_gradient(name, gradient[part.start : part.stop].clone())
    optimizer.step()
    return optimizer.grad_norm


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_neighbours_in_one_process_are_one_parameter(fraction: float) -> None:
    cut, whole = made(parts_of(), offload_fraction=fraction), made(parts_of((0, NUMEL)))
    for seed in range(3):
        assert step(cut, seed) == step(whole, seed)
    for key, value in whole.state_of("layers.0.0").items():
        pieces = [cut.state_of(name)[key] for name in cut.parts]
        assert torch.equal(value, pieces[0] if key == "step" else torch.cat(pieces))


def test_a_part_without_a_gradient_counts_as_zeros() -> None:
    """Also where the gradient that it had before was a thousand times as large."""
    cut, fresh = made(parts_of()), made(parts_of())
    step(cut, 1)
    assert step(cut, 0, without=1) == step(fresh, 0, without=1)
    zeros = made(parts_of((0, NUMEL)))
    gradient = gradient_of(0)
    gradient[BORDERS[1] : BORDERS[2]] = 0.0
    zeros.take_gradient("layers.0.0", gradient)
    zeros.step()
    assert fresh.grad_norm == zeros.grad_norm


def test_a_state_is_loaded_by_the_same_parts_alone() -> None:
    saved = made(parts_of())
    step(saved, 0)
    state = saved.state_dict()
    assert state["parts"]["layers.0.1"] == {"whole": "w", "start": 3_000, "stop": 3_700, "numel": NUMEL}
    again = made(parts_of(), offload_fraction=1.0)
    again.load_state_dict(state)
    assert_equal(again.state_of("layers.0.1"), saved.state_of("layers.0.1"))
    moved = {name: hostward.FlatPart("v", p.start, p.stop, NUMEL) for name, p in parts_of().items()}
    for other in (made(moved), made(parts_of(), shards=())):
        with pytest.raises(CheckpointError, match=r"'layers.0.0' is of {'whole': 'w'"):
            other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="is of a whole parameter, and here it is"):
        again.load_state_dict({key: value for key, value in state.items() if key != "parts"})
    with pytest.raises(CheckpointError, match="are 3"):
        again.load_state_dict({**state, "parts": 3})
    with pytest.raises(ModelError, match=r"'layers.0.0' is a part of 'w'"):
        saved.sources()
    whole = made(parts_of((0, NUMEL)))
    assert "parts" not in whole.state_dict()
    made(parts_of((0, NUMEL)), shards=()).load_state_dict(whole.state_dict())


@pytest.mark.parametrize("of", [("w", 3, 3, 9), ("w", -1, 3, 9), ("w", 0, 10, 9), (7, 0, 3, 9), ("w", 0.0, 3, 9)])
def test_what_is_no_part_is_refused(of: Any) -> None:
    with pytest.raises(ConfigError, match="is no part"):
        hostward.FlatPart(*of)


def test_shards_that_do_not_fit_are_refused() -> None:
    parts = parts_of()
    shards = hostward.FlatShards(parts)
    assert shards.parts == parts == made(parts).parts
    with pytest.raises(ConfigError, match="FlatPart"):
        hostward.FlatShards({"a": (0, 3)})  # type: ignore[dict-item]
    for options, error, why in (
        ({"shards": "w"}, ConfigError, "hostward.FlatShards"),
        ({"shards": [parts]}, ConfigError, "hostward.FlatShards"),
        ({"shards": [shards, hostward.FlatShards(parts)]}, ConfigError, "in two of shards"),
        ({"plan": "plan.json"}, ConfigError, "a plan divides"),
        ({"shards": [hostward.FlatShards(parts | {"b": hostward.FlatPart("v", 0, 3, 3)})]}, ModelError, "of 'b'"),
        ({"shards": [hostward.FlatShards(parts_of((0, 4_000, 5_000, 9_000, NUMEL)))]}, ModelError, "its part is"),
    ):
        with pytest.raises(error, match=why):
            made(parts, **options)
