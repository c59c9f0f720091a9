"""Which modules are the layers of a model.

Seen red: dicts left out; keys taken in any order.
"""

from __future__ import annotations

import pytest
import torch

from hostward.errors import ModelError
from hostward.model.layers import find_layers


def model_of(*keys: str) -> torch.nn.Module:
    layers = torch.nn.ModuleDict({key: torch.nn.Linear(4, 4) for key in keys})
    return torch.nn.ModuleDict({"embedding": torch.nn.Linear(4, 4), "layers": layers})


@pytest.mark.parametrize("keys", [("0", "1", "2"), ("4", "5")])
def test_a_dict_with_numbers_for_keys_holds_layers(keys: tuple[str, ...]) -> None:
    """torchtitan's models hold theirs so; a stage of a pipeline has those from a later number on."""
    assert [path for path, _ in find_layers(model_of(*keys))] == [f"layers.{key}" for key in keys]


@pytest.mark.parametrize("keys", [("0",), ("1", "0"), ("0", "2"), ("up", "down")])
def test_other_dicts_do_not(keys: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match="no lists of layers"):
        find_layers(model_of(*keys))
