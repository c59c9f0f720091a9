"""Device memory of one of several ranks: that predicted is what torch allocates, or a little more."""

from __future__ import annotations

import json

import pytest
from forked import call
from memory_cases import measure

pytest.importorskip("transformers")

MIXES = ("EEEERRRR", "EERRRKKK", "eeEERRKK", "eOOrRRKK", "eeerrrRR")
CASES = {
    "ends tied bf16 whole bf16 1": 1.005,
    "ends tied bf16 one bf16 1": 1.005,
    "ends tied fp32 one fp32 2": 1.005,
    "ends tied bf16 one fp32 1": 1.02,
    "ends apart bf16 whole bf16 1": 1.005,
    "ends apart bf16 one bf16 1": 1.005,
    "ends apart bf16 one fp32 1": 1.02,
    "ends apart fp32 whole fp32 2": 1.08,
    "ends apart fp32 one fp32 2": 1.005,
    "layers tied fp32 one fp32 2": 1.005,
    "layers apart bf16 one bf16 1": 1.005,
    "layers apart fp32 one fp32 4": 1.005,
    "layers apart fp32 whole fp32 1": 1.02,
    "layers apart fp32 whole fp32 2": 1.09,
    "layers apart fp32 whole fp32 4": 1.02,
    **{f"saved apart bf16 {held} bf16 1 {mix}": 1.005 for held in ("one", "whole") for mix in MIXES},
    **{f"saved apart fp32 one fp32 2 {mix}": 1.005 for mix in MIXES},
    **{f"saved apart {dtype} one {dtype} 1 rrrrrrRR": 1.005 for dtype in ("bf16", "fp32")},
}
"""At most so many times what is allocated."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    file = tmp_path_factory.mktemp("memory") / "found.json"
    call(measure, list(CASES), file, limit_s=400)
    read: dict[str, tuple[int, int]] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize("case", CASES)
def test_a_rank_takes_what_is_predicted(found: dict[str, tuple[int, int]], case: str) -> None:
    """Seen red: 14 % too little, without what a gradient of 16 bits is scattered from in 32; 10 % too little, without
    what an earlier microbatch has scattered last; 22 % too much, with a rank's part of a gradient before it was whole;
    7 % too little, without the memory into which the layer before was gathered; 0.9 % too little, without an input
    that was reloaded and that a norm in float32 saves again.
    """
    measured, predicted = found[case]
    assert 0.995 < predicted / measured < CASES[case]
