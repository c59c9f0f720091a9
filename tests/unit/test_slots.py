"""How many staging slots there are, and when they go back: from the most memory between one point and the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hostward.engine.backend import Buffer, Tier
from hostward.engine.simulated import SimulatedBackend
from hostward.lowering.staging import FEWEST
from hostward.plan import Placement
from hostward.training.slots import Slots

SLOT = 1024


class Peaks:
    """Of each span of one step, in order."""

    def __init__(self, peaks: list[int]) -> None:
        self._peaks = iter(peaks)

    def peak_bytes(self) -> int:
        return next(self._peaks)

    def restart(self) -> None:
        pass


def state(layer: str) -> Any:
    buffer = Buffer(Tier.HOST, torch.zeros(SLOT // 4), "state")
    bucket = SimpleNamespace(numel=256, layer=layer)
    return SimpleNamespace(placement=Placement.STREAMED, bucket=bucket, streamed=lambda: [buffer])


def profiled(forward: list[int], backward: list[int]) -> Slots:
    """One bucket a layer; peaks of their spans."""
    layers = [f"layers.{i}" for i in range(len(forward))]
    gauge = Peaks([*forward, *backward])
    slots = Slots(SimulatedBackend(threads=1), [state(layer) for layer in layers], gauge=gauge)
    slots.settle()
    slots.settle()
    for layer in layers:
        slots.sample_use(layer)
    for b in reversed(range(len(layers))):
        slots.sample(b)
    slots.settle()
    return slots


@pytest.mark.parametrize("inner", [0, 3])
def test_what_a_layer_allocates_between_its_points_is_not_taken(inner: int) -> None:
    """Staging begins at bucket 2 of 6, with four spans to come; one of them has its peak inside."""
    backward = [10, 8, 6, 3, 2, 1]
    backward[3] += inner
    slots = profiled([1, 2, 4, 6, 8, 9], [n * SLOT for n in backward])
    assert slots.count == min(6, FEWEST + 10 - max(backward[3:]))


def test_slots_go_back_before_the_layer_that_needs_the_memory() -> None:
    slots = profiled([SLOT * n for n in (1, 2, 4, 6, 8, 9)], [SLOT * n for n in (10, 8, 6, 5, 5, 5)])
    assert slots.count == 6  # 10 at most, and two slots besides, less 5
    assert [layer for layer in range(6) if slots.wanted_back(f"layers.{layer}")] == [4]  # 8 + 6 > 12
