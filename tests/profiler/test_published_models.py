"""Models that people have: as many parameters as are published, and a workload for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from published_models import PUBLISHED

from hostward.trainer.meta_trace import described_model
from hostward.trainer.workload import config_workload

COUNTED = [name for name, one in PUBLISHED.items() if one.billions is not None]


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_as_many_as_are_published(name: str) -> None:
    one = PUBLISHED[name]
    model, _ = described_model(Path(name), one.config, torch.bfloat16)
    decimals = len(str(one.billions).partition(".")[2])
    assert f"{sum(p.numel() for p in model.parameters()) / 1e9:.{decimals}f}" == one.billions


def test_a_model_without_fused_attention_is_planned_with_an_eager_one_and_says_so(tmp_path: Path) -> None:
    one = PUBLISHED["gpt-oss 20b"]
    saved = one.config | one.less | {"_attn_implementation": "flash_attention_2"}  # what it was trained with
    (tmp_path / "config.json").write_text(json.dumps(saved))
    work = config_workload(tmp_path, sequence_tokens=64)
    assert work.name == "gpt_oss (eager attention)"
    # The probabilities of eight heads, which fused attention does not save.
    assert all(layer.saved_bytes.square >= 8 * 2 for layer in work.repeated)
