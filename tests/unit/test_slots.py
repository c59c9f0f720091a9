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


def made(forward: list[int], backward: list[int]) -> Slots:
    """One bucket a layer; peaks of their spans."""
    layers = [f"layers.{i}" for i in range(len(forward))]
    gauge = Peaks([*forward, *backward])
    return Slots(SimulatedBackend(threads=1), [state(layer) for layer in layers], gauge=gauge)


def profiled(forward: list[int], backward: list[int]) -> Slots:
    """After its third step."""
    layers = [f"layers.{i}" for i in range(len(forward))]
    slots = made(forward, backward)
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


def test_buckets_of_a_slot_share_its_views() -> None:
    slots = made([0] * 6, [0] * 6)
    assert slots.count == FEWEST
    assert all(slots.of(b) is slots.of(b % FEWEST) for b in range(6))
    slots.acquire()
    first, second = slots.of(0)[0], slots.of(1)[0]
    assert first.nbytes == second.nbytes == SLOT
    assert first.address != second.address


@pytest.mark.parametrize(("peak", "kept"), [(10, True), (1, False)])
def test_views_stay_where_the_number_of_slots_does(peak: int, kept: bool) -> None:
    """Operations are bound to them, and are bound anew only where `settle` says that the number has changed."""
    slots = made([SLOT] * 6, [SLOT * n for n in (10, 8, 6, peak, 5, 5)])
    views = slots.of(3)
    slots.settle()
    slots.settle()
    for layer in range(6):
        slots.sample_use(f"layers.{layer}")
    for b in reversed(range(6)):
        slots.sample(b)
    assert slots.settle() is not kept
    assert (slots.of(3) is views) is kept
