"""What two layers of each kind hold at their real widths, against torch's allocator, for every family of models."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from published_models import PUBLISHED
from tape_cases import loss_of, transformers

from hostward.core.placement import Placement
from hostward.model.layers import find_layers
from hostward.plan.decisions import Choice, Keep
from hostward.plan.memory_model import STEADY_STEP, required
from hostward.plan.workload import Way, Workload
from hostward.profiler.workload import workload_of
from hostward.trainer.meta_trace import described_model

TOKENS = 2048
COUNTED = ("gradients", "activations", "logits and loss")
FAMILIES = [name for name, one in PUBLISHED.items() if one.less]


def predicted(work: Workload) -> tuple[float, int]:
    """Bytes that exist when the last layer has run, and those of the peak, without weights."""
    parts = [layer for layer in work.layers if layer.curves]
    held = sum(layer.curves[Way.KEEP].kept.of(TOKENS, TOKENS) for layer in parts)
    choice = Choice((Placement.DEVICE,) * len(work.inventory.buckets), (Keep.KEEP,) * len(work.repeated))
    needs = required(work, choice).phase(STEADY_STEP).device
    # The model's own loop has three more: the first layer's input, the last one's, and its output.
    own = 3 * parts[-1].input_bytes.of(TOKENS, TOKENS)
    return held + own, sum(needs.get(owner, 0) for owner in COUNTED)


def measured(model: Any) -> tuple[int, int]:
    """The same of a real step, by torch's allocator."""
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, TOKENS), device="cuda")
    loss_of(model, ids).backward()  # makes the workspaces of cuBLAS
    model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = []
    _, last = find_layers(model)[-1]
    with last.register_forward_hook(lambda *_: held.append(torch.cuda.memory_allocated() - before)):
        loss_of(model, ids).backward()
    torch.cuda.synchronize()
    return held[0], torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_of_a_step_are_those_that_are_allocated(name: str) -> None:
    one = PUBLISHED[name]
    built, _ = described_model(Path(name), one.config | one.wide, torch.bfloat16)
    held, peak = predicted(workload_of(built.train(), sequence_tokens=TOKENS, loss=loss_of))
    with torch.device("cuda"):
        real = transformers.AutoModelForCausalLM.from_config(built.config, dtype=torch.bfloat16).train()
    real_held, real_peak = measured(real)
    del real
    gc.collect()
    torch.cuda.empty_cache()
    print(f"{name}: held {held / real_held:.4f}, peak {peak / real_peak:.4f} of {real_held:,} and {real_peak:,} bytes")
    assert held == pytest.approx(real_held, rel=0.03)
    assert peak == pytest.approx(real_peak, rel=0.03)
