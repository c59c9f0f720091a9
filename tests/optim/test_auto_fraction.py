"""`offload_fraction="auto"`: the least share that keeps to `device_memory`.

Seen red: gradients left out, staging slots and rounding left out.
"""

from __future__ import annotations

import pytest
import torch

import hostward
from hostward.core.placement import Placement
from hostward.errors import ConfigError, MemoryLimitError


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(torch.bfloat16)


NUMEL = 8 * (256 * 256 + 256)
WHOLE = NUMEL * (2 + 2 + 10)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.7, 0.6])
def test_what_is_on_the_device_keeps_to_the_budget(share: float) -> None:
    budget = int(WHOLE * share)
    optimizer = hostward.AdamW(network(), offload_fraction="auto", device_memory=budget, streamed_fraction=0.0)
    here = sum(b.state_bytes for b in optimizer.plan.buckets if b.placement is Placement.DEVICE)
    assert NUMEL * 4 + here <= budget
    largest = max(b.state_bytes for b in optimizer.plan.buckets)
    # No more leaves than that asks for, staging slots and rounding aside.
    assert NUMEL * 4 + here >= budget - 5 * largest
    assert optimizer.offload_fraction == optimizer.plan.asked_fraction
    assert (optimizer.offload_fraction == 0.0) == (share == 1.0)


def test_float32_gradients_count_as_such() -> None:
    budget = int(WHOLE * 0.9)
    plain, wide = (
        hostward.AdamW(network(), offload_fraction="auto", device_memory=budget, grad_dtype=dtype).plan.offloaded_bytes
        for dtype in (None, torch.float32)
    )
    assert wide >= plain + NUMEL


def test_a_text_is_a_size() -> None:
    assert hostward.AdamW(network(), offload_fraction="auto", device_memory="1GiB").offload_fraction == 0.0
    with pytest.raises(ConfigError, match="device_memory 1gib is no size"):
        hostward.AdamW(network(), offload_fraction="auto", device_memory="1gib")


def test_too_little_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match="weights and gradients alone take"):
        hostward.AdamW(network(), offload_fraction="auto", device_memory=NUMEL * 4)


@pytest.mark.parametrize(
    ("fraction", "memory"), [("auto", None), (0.5, "1GiB"), ("auto", -1), ("auto", True), ("all", 1)]
)
def test_one_without_the_other_is_refused(fraction: float | str, memory: int | str | None) -> None:
    with pytest.raises(ConfigError):
        hostward.AdamW(network(), offload_fraction=fraction, device_memory=memory)
