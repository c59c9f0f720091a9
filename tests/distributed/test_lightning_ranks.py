"""Lightning in several processes: offloaded, it trains as with torch's AdamW, and to the same bits at every fraction.

Seen red: gradients taken in backward although DDP reduces them later; clipping that nobody does; a short last window
whose gradients stay; every microbatch reduced in a loop of Fabric.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import assert_equal
from world import World

pytest.importorskip("lightning")


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fabric"])
def test_ranks_train_as_with_torch_and_to_the_same_bits(pair: World, way: str) -> None:
    def run(fraction: float | None) -> list[Any]:
        return pair.run("lightning_cases.trained", way=way, fraction=fraction)

    theirs, none, everything = run(None), run(0.0), run(1.0)
    for (weights, losses, left, _), alone, plain in zip(everything, none, theirs, strict=True):
        assert_equal(weights, everything[0][0])
        assert_equal(weights, alone[0])
        assert_equal({"losses": losses}, {"losses": alone[1]})
        torch.testing.assert_close(losses, plain[1], rtol=1e-5, atol=0)
        torch.testing.assert_close(weights, plain[0], rtol=1e-5, atol=1e-5)
        assert "".join("nY"[gone] for gone in left) == "nnYnnYY" * 2
    not_reduced = {alone for *_, alone in everything}
    assert len(not_reduced) == (1 if way == "fsdp2" else len(everything))
