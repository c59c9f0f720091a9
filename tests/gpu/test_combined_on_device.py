"""Muon and AdamW as one on a GPU: matrices that two ranks share have the bits of one process, wherever state is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 240.0

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_fraction_has_the_bits_of_one_process(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*command, str(Path(__file__).with_name("combined_ranks.py")), str(tmp_path)]
    done = subprocess.run(words, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT_S)
    found = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert len(found) == ranks, done.stderr[:4000]
    for rank in found:
        for dtype in ("fp32", "bf16"):
            assert {name: bits == found[0][dtype]["one"] for name, bits in rank[dtype].items()} == {
                "one": True,
                "0.0": True,
                "0.5": True,
                "1.0": True,
            }
        assert rank["refused"].startswith("FSDP2's CPUOffloadPolicy together with offload_optimizer_states")
