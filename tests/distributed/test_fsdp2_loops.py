"""Loops of torchtitan's structure with hostward's optimizers: the bits of fraction 0, nearly the numbers of torch."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from world import World

from hostward.errors import CheckpointError, ConfigError, ModelError
from hostward.integrations.fsdp2_loops import build_optimizers


def run(world: World, name: str, **options: Any) -> list[Any]:
    return world.run(f"fsdp2_loop_cases.{name}", **options)


def test_the_bits_of_fraction_0(pair: World) -> None:
    """Of two parts, with gradients taken in backward and one norm."""
    expected = run(pair, "bits", fraction=0.0, order="eager", parts=2)
    assert run(pair, "bits", fraction=0.5, order="late", parts=2) == expected
    assert run(pair, "bits", fraction=1.0, order="late", parts=2) == expected
    assert len({found["told"][1] for found in expected}) == 1
    assert any(expected[0]["left"])


def test_a_loop_that_clips_by_itself(pair: World) -> None:
    """Nothing but the builder was changed."""
    expected = run(pair, "bits", fraction=0.0, order="eager", clips=True)
    assert run(pair, "bits", fraction=1.0, order="late", clips=True) == expected
    assert not any(expected[0]["left"])


def test_nearly_the_numbers_of_torch(pair: World) -> None:
    run(pair, "close_to_torch")


@pytest.mark.parametrize("before", ["hostward", "torch"])
def test_checkpoints(pair: World, tmp_path: Path, before: str) -> None:
    """Of hostward at another fraction, and of torch's AdamW, with which training goes on nearly as it would have."""
    for whole, again in run(pair, "saved_and_loaded", folder=str(tmp_path), before=before):
        assert whole == again


def test_in_place_of_cpu_offload_policy(pair: World) -> None:
    assert all(reloaded > 0 for reloaded in run(pair, "in_place_of_cpu_offload_policy"))


def net(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.LayerNorm(width))


def test_refused() -> None:
    with pytest.raises(ConfigError, match=r"of a model\n(.|\n)*\[model\]"):
        build_optimizers(net())
    with pytest.raises(ConfigError, match="no regular expression"):
        build_optimizers([net()], groups={"(": {"lr": 1.0}})
    with pytest.raises(ConfigError, match="without a part"):
        build_optimizers([])
    with pytest.raises(ConfigError, match="left for the group 'none'"):
        build_optimizers([net()], groups={"none": {"lr": 1.0}})
    with pytest.raises(ConfigError, match="left for the group 'bias'"):
        build_optimizers([net()], groups={".": {"lr": 1.0}, "bias": {"lr": 2.0}})
    with pytest.raises(ModelError, match=r"two parts of the model have a parameter '0\.weight'"):
        build_optimizers([net(), net()])
    saved = build_optimizers([net()], groups={"bias": {"weight_decay": 0.0}}).state_dict()
    with pytest.raises(CheckpointError, match=r"options of '0\.bias' are not those of '0\.weight'"):
        build_optimizers([net()]).load_state_dict(saved)


def test_the_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "fsdp2_loop.py"
    losses = runpy.run_path(str(example), run_name="__main__")["losses"]
    assert losses[-1] < losses[0] / 2
    assert not torch.distributed.is_initialized()
