"""Megatron-Core trains on CPUs as it should, before hostward is put into it.

Seen red: stages of a virtual pipeline that send in batches; one tensor that counts the steps of all weights; a hybrid
optimizer that is not divided; weights that differ from layout to layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron_ranks import Ranks, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="megatron-core is not installed")

WORLDS = {"single": 1, "dp2": 2, "tp2": 2, "pp2": 2, "pp2-interleaved": 2, "ep2": 2, "dp2-pp2": 4}
"""By layouts of `megatron_cases.LAYOUTS`."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


@pytest.mark.parametrize("layout", WORLDS)
def test_same_bits_twice_and_nearly_the_hybrid_optimizers(ranks: Ranks, layout: str) -> None:
    hybrid = {"offload_fraction": 0.5, "use_precision_aware_optimizer": True}
    ways = [{}, {"overlap": True}, {"overlap": True}, hybrid]
    found = ranks.run(WORLDS[layout], "megatron_cases.trained", layout=layout, ways=ways)
    for told, overlapped, again, half in found:
        assert overlapped == again
        assert half["divided"] == [True] * len(half["divided"])
        for other in (overlapped, half):
            np.testing.assert_allclose(other["grad_norms"], told["grad_norms"], rtol=1e-3)
            if told["losses"][0] is not None:
                np.testing.assert_allclose(other["losses"], told["losses"], rtol=1e-4)
    if layout != "ep2":
        (alone,) = ranks.run(1, "megatron_cases.trained", layout="single", ways=[{}])
        assert any(rank[0]["losses"][0] == pytest.approx(alone[0]["losses"][0], rel=1e-4) for rank in found)


@pytest.mark.parametrize("form", ["dp_reshardable", "fully_reshardable"])
def test_checkpoints_resume_to_the_same_bits(ranks: Ranks, tmp_path: Path, form: str) -> None:
    for world, layout, how in ((1, "single", {"precision": "fp16"}), (2, "dp2", {"offload_fraction": 0.5})):
        folder = tmp_path / layout
        folder.mkdir()
        how["use_precision_aware_optimizer"] = "offload_fraction" in how
        found = ranks.run(world, "megatron_cases.resumed", layout=layout, folder=str(folder), form=form, how=how)
        assert all(resumed == uninterrupted for resumed, uninterrupted in found)
