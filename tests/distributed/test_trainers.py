"""Trainer in several processes: offloaded, it trains as with torch's AdamW, and to the same bits at every fraction.

Seen red: gradients taken in backward although the model is in DDP, whose reduction comes later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import assert_equal
from world import World

import hostward

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_ranks_train_as_with_torch_and_to_the_same_bits(pair: World, sharded: bool, tmp_path: Path) -> None:
    def run(name: str, fraction: float | None, **options: Any) -> Any:
        return pair.run(
            "trainer_cases.trained", folder=str(tmp_path / name), fraction=fraction, sharded=sharded, **options
        )[0]

    theirs = run("theirs", None)
    none = run("none", 0.0)
    assert len(none[1]) == 4
    for ours, other in zip(none, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
    layers = {"activations": hostward.Activations(num_layers=1, min_bytes=0)}
    for other in (
        run("half", 0.5),
        run("all", 1.0, **layers),
        run("again", 0.5, resume=str(tmp_path / "all" / "checkpoint-2")),
    ):
        assert_equal(other[2], none[2])
        assert other[1][-4:] == none[1]
