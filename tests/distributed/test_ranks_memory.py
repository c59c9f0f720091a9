"""Device memory of one of several ranks whose embedding and output layer are nearly all of the model: that predicted is
what torch allocates, or a little more.
"""

from __future__ import annotations

import json

import pytest
from forked import call
from memory_cases import measure

pytest.importorskip("transformers")

CASES = {
    "tied bf16 whole bf16 1": 1.005,
    "tied bf16 one bf16 1": 1.005,
    "tied fp32 one fp32 2": 1.005,
    "tied bf16 one fp32 1": 1.02,
    "apart bf16 whole bf16 1": 1.005,
    "apart bf16 one bf16 1": 1.005,
    "apart bf16 one fp32 1": 1.02,
    "apart fp32 whole fp32 2": 1.08,
    "apart fp32 one fp32 2": 1.005,
}
"""At most so many times what is allocated. What is accumulated is counted beside all of the gradient that it came from.
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    file = tmp_path_factory.mktemp("memory") / "found.json"
    call(measure, list(CASES), file, limit_s=400)
    read: dict[str, tuple[int, int]] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize("case", CASES)
def test_the_ends_of_a_model_take_what_is_predicted(found: dict[str, tuple[int, int]], case: str) -> None:
    """Seen red: 14 % too little, without what a gradient of 16 bits is scattered from in 32; 10 % too little, without
    what an earlier microbatch has scattered last; 22 % too much, with a rank's part of a gradient before it was whole.
    """
    measured, predicted = found[case]
    assert 0.995 < predicted / measured < CASES[case]
