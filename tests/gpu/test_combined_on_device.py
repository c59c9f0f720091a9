"""Muon and AdamW as one on a GPU: matrices that two ranks share have the bits of one process, wherever state is."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import found_in, launched, said_in

LIMIT_S = 240.0

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_fraction_has_the_bits_of_one_process(ranks: int, tmp_path: Path) -> None:
    with launched("combined_ranks.py", ranks, tmp_path) as torchrun:
        torchrun.wait(LIMIT_S)
    found = found_in(tmp_path)
    assert len(found) == ranks, said_in(tmp_path)
    for rank in found:
        for dtype in ("fp32", "bf16"):
            assert {name: bits == found[0][dtype]["one"] for name, bits in rank[dtype].items()} == {
                "one": True,
                "0.0": True,
                "0.5": True,
                "1.0": True,
            }
        assert rank["refused"].startswith("FSDP2's CPUOffloadPolicy together with offload_optimizer_states")
