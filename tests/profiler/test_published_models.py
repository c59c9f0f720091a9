"""Models that people have: as many parameters as are published, and what their layers hold is what a real run holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from published_models import PUBLISHED
from tape_cases import loss_of, parts, tokens, transformers

from hostward.model.layers import find_layers
from hostward.profiler.layer_profiler import run
from hostward.trainer.meta_trace import described_model
from hostward.trainer.workload import config_workload, read_model_file

COUNTED = [name for name, one in PUBLISHED.items() if one.billions is not None]
SMALL = [name for name, one in PUBLISHED.items() if one.less]


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_as_many_as_are_published(name: str) -> None:
    one = PUBLISHED[name]
    model, _ = described_model(Path(name), one.config, torch.bfloat16)
    decimals = len(str(one.billions).partition(".")[2])
    assert f"{sum(p.numel() for p in model.parameters()) / 1e9:.{decimals}f}" == one.billions


@pytest.mark.parametrize("name", SMALL)
def test_layers_hold_what_those_of_a_real_run_hold(name: str) -> None:
    """Seen red: the mask of windows not counted, or the output of attention always laid out token by token."""
    model, _ = described_model(Path(name), PUBLISHED[name].config | PUBLISHED[name].less, torch.bfloat16)
    torch.manual_seed(0)
    real = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).train()
    found = parts(model.train(), tokens("meta", 2, 128))
    wanted = run(real, find_layers(real), torch.randint(0, 512, (2, 128)), loss_of)
    for here, there in zip(found, wanted, strict=True):
        assert here.kept_bytes == pytest.approx(there.kept_bytes, rel=0.001)
        assert sum(here.saved.values()) == pytest.approx(sum(there.saved.values()), rel=0.001)
        assert max(here.forward) == pytest.approx(max(there.forward), rel=0.001)
        assert max(here.backward) == pytest.approx(max(there.backward), rel=0.001)
        assert set(here.gradients) == set(there.gradients)


def test_a_model_without_fused_attention_is_planned_with_an_eager_one_and_says_so(tmp_path: Path) -> None:
    one = PUBLISHED["gpt-oss 20b"]
    saved = one.config | one.less | {"_attn_implementation": "flash_attention_2"}  # what it was trained with
    (tmp_path / "config.json").write_text(json.dumps(saved))
    work = config_workload(read_model_file(tmp_path), sequence_tokens=64)
    assert work.name == "gpt_oss (eager attention)"
    # The probabilities of eight heads, which fused attention does not save.
    assert all(layer.saved_bytes.square >= 8 * 2 for layer in work.repeated)
