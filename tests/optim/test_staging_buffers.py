"""How many staging slots there are, and when they go back: from the most memory between one point and the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from hostward.core.placement import Placement
from hostward.errors import MemoryLimitError
from hostward.optim.staging_buffers import StagingBuffers
from hostward.runtime.backend import Buffer, Tier
from hostward.runtime.simulated.backend import SimulatedBackend
from hostward.schedule.ops import Lane
from hostward.schedule.optimizer import StepShape, lower_step, staging_buffer_by_bucket, staging_buffers_by_last_use
from hostward.schedule.staging import MIN_STAGING_BUFFERS, TriggerInterval, decide_staging, late_trigger_bucket

SLOT = 1024


class Peaks:
    """Of each span of one step, in order; and a clock of which each place comes at one of `at_s`."""

    def __init__(self, peaks: list[int], at_s: Sequence[float] = ()) -> None:
        self._peaks = iter(peaks)
        self._at_s = iter(at_s)

    def peak_bytes(self) -> int:
        return next(self._peaks)

    def restart(self) -> None:
        pass

    def stamp(self, lane: Lane) -> float:
        return next(self._at_s)

    def seconds(self, first: float, last: float) -> float:
        return last - first


def state(layer: str) -> Any:
    buffer = Buffer(Tier.HOST, torch.zeros(SLOT // 4), "state")
    bucket = SimpleNamespace(numel=256, layer=layer)
    return SimpleNamespace(placement=Placement.STREAMED, bucket=bucket, streamed=lambda: [buffer])


def made(
    forward: list[int], backward: list[int], backend: SimulatedBackend | None = None, *, at_s: Sequence[float] = ()
) -> StagingBuffers:
    """One bucket a layer; peaks of their spans."""
    layers = [f"layers.{i}" for i in range(len(forward))]
    gauge = Peaks([*forward, *backward], at_s)
    return StagingBuffers(backend or SimulatedBackend(threads=1), [state(layer) for layer in layers], gauge=gauge)


def profiled(
    forward: list[int], backward: list[int], *, order: Sequence[int] = (), others: Sequence[int] = ()
) -> StagingBuffers:
    """After its third step. `order`: of gradient points, from last to first without; `others`: bytes that somebody else
    reads before each of them.
    """
    backend = SimulatedBackend(threads=1)
    layers = [f"layers.{i}" for i in range(len(forward))]
    slots = made(forward, backward, backend)
    slots.settle()
    slots.settle()
    for layer in layers:
        slots.sample_use(layer)
    for b, nbytes in zip_longest(order or reversed(range(len(layers))), others, fillvalue=0):
        backend.ledger.copied_bytes[Lane.H2D] += nbytes
        slots.sample(b)
    slots.settle()
    return slots


def staged_at(slots: StagingBuffers, order: Sequence[int]) -> int:
    """The bucket at whose point the last slot is taken."""
    return next(b for b in order if slots.ready(b) == slots.count)


@pytest.mark.parametrize("inner", [0, 3])
def test_what_a_layer_allocates_between_its_points_is_not_taken(inner: int) -> None:
    """Staging begins at bucket 2 of 6, with four spans to come; one of them has its peak inside."""
    backward = [10, 8, 6, 3, 2, 1]
    backward[3] += inner
    slots = profiled([1, 2, 4, 6, 8, 9], [n * SLOT for n in backward])
    assert slots.count == min(6, MIN_STAGING_BUFFERS + 10 - max(backward[3:]))


FORWARD, BACKWARD = [1, 2, 4, 6, 8, 9], [10, 8, 6, 6, 6, 5]


@pytest.mark.parametrize(
    ("backward", "first", "count"),
    [
        ([10, 8, 6, 6, 6, 5], 3, 6),  # from bucket 3 on nothing takes more than from bucket 2 on
        ([10, 8, 7, 6, 6, 5], 2, 6),  # bucket 3 takes one more: five slots would fit
        ([10, 1, 1, 1, 1, 1], 4, 6),
        ([1, 1, 1, 10, 1, 1], 5, MIN_STAGING_BUFFERS),  # no more fit later
        ([1, 1, 1, 1, 1, 10], 5, MIN_STAGING_BUFFERS),
    ],
)
def test_state_is_read_as_soon_as_all_slots_fit(backward: list[int], first: int, count: int) -> None:
    slots = profiled([n * SLOT for n in FORWARD], [n * SLOT for n in backward])
    assert slots.count == count
    assert staged_at(slots, range(5, -1, -1)) == first


@pytest.mark.parametrize(
    ("others", "first"),
    [
        ([100], 3),  # before the first of them: that was forward's
        ([0, 0, 0, 1], 2),
        ([0, 0, 0, 0, 0, 1], 2),
    ],
)
def test_what_others_read_in_backward_comes_first(others: list[int], first: int) -> None:
    slots = profiled([n * SLOT for n in FORWARD], [n * SLOT for n in BACKWARD], others=others)
    assert slots.count == 6
    assert staged_at(slots, range(5, -1, -1)) == first


def test_a_point_behind_a_lower_one_is_none_to_begin_at() -> None:
    """Gradients come in any order. Bucket 4 comes when all slots fit, but whoever began there would begin at 3."""
    order = [5, 3, 4, 2, 1, 0]
    slots = profiled([n * SLOT for n in FORWARD], [n * SLOT for n in [10, 8, 6, 6, 6, 5]], order=order)
    assert slots.count == 6
    assert staged_at(slots, order) == 2


def test_slots_go_back_before_the_layer_that_needs_the_memory() -> None:
    slots = profiled([SLOT * n for n in (1, 2, 4, 6, 8, 9)], [SLOT * n for n in (10, 8, 6, 5, 5, 5)])
    assert slots.count == 6  # 10 at most, and two slots besides, less 5
    slots.acquire(6)
    wanted = [slots.wanted_back([f"layers.{layer}"]) for layer in range(6)]
    assert wanted == [[], [], [], [], [0, 1], [2]]  # 8 + 4 and 9 + 3 are 12
    assert slots.wanted_back(["layers.4", "layers.5"]) == [0, 1, 2]
    slots.give_back([0, 1])
    assert slots.wanted_back(["layers.4", "layers.5"]) == [2]
    assert slots.held == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("streamed", "slots", "order"), [(6, 4, [2, 3, 0, 1]), (4, 4, [0, 1, 2, 3]), (1, 3, [1, 2, 0])]
)
def test_slots_go_back_in_the_order_in_which_they_are_written(streamed: int, slots: int, order: list[int]) -> None:
    """Of six buckets in four slots the last but three has slot 2."""
    placements = (Placement.STREAMED,) * streamed
    assert staging_buffers_by_last_use(staging_buffer_by_bucket(placements, slots), slots) == order
    schedule = lower_step(StepShape(placements, ("a",) * streamed, staging_buffers=slots, transient=True))
    assert [op.name for op in schedule.ops if op.name.startswith("unstage/")] == [f"unstage/{slot}" for slot in order]


def test_buckets_of_a_slot_share_its_views() -> None:
    slots = made([0] * 6, [0] * 6)
    assert slots.count == MIN_STAGING_BUFFERS
    assert all(slots.of(b) is slots.of(b % MIN_STAGING_BUFFERS) for b in range(6))
    slots.acquire(slots.count)
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


def test_as_many_slots_are_filled_in_backward_as_it_hides() -> None:
    slots = made([SLOT] * 6, [SLOT * n for n in (10, 1, 1, 1, 1, 1)], at_s=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 3.5))
    slots.settle()
    slots.settle()
    for layer in range(6):
        slots.sample_use(f"layers.{layer}")
    for b in reversed(range(6)):
        slots.sample(b)
    assert slots.settle()
    assert (slots.count, slots.ahead) == (6, 6)
    slots.pace.begins()
    for _ in range(6):
        slots.pace.issued()
    slots.pace.backward_is_over()
    assert slots.settle()
    assert (slots.count, slots.ahead) == (6, 3)  # two were over, and one was being read
    assert not slots.settle()


def test_slots_are_taken_one_by_one_as_memory_is_freed() -> None:
    """At most 10 are held, and two slots besides; later peaks of 9, 8, 7, 6, 5 leave room for 3 to 7 slots."""
    slots = profiled([SLOT * n for n in FORWARD], [SLOT * n for n in (10, 9, 8, 7, 6, 5)])
    assert slots.count == 5  # at bucket 3, where two fifths of backward are left: 12 - 7
    assert [slots.ready(b) for b in (5, 4, 3, 2, 1, 0)] == [2, 3, 4, 5, 5, 5]
    slots.ahead = 3
    assert [slots.ready(b) for b in (5, 4, 3, 2, 1, 0)] == [2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("early", [False, True])
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=12),
    st.lists(st.integers(0, 40), min_size=2, max_size=12),
    st.integers(1, 12),
)
def test_slots_that_come_earlier_raise_no_peak(early: bool, forward: list[int], backward: list[int], most: int) -> None:
    spans = [TriggerInterval(f"l{i}", None, 0, n) for i, n in enumerate(forward)]
    spans += [TriggerInterval(None, b, 0, n) for b, n in zip(reversed(range(len(backward))), backward, strict=True)]
    late = late_trigger_bucket([1] * len(backward))
    found = decide_staging(spans, slot_size_bytes=3, most=most, acquire_at=late, early=early)
    assert found is not None
    assert list(found.acquire_at) == sorted(found.acquire_at, reverse=True)
    assert len(found.acquire_at) == found.count
    limit = max([*forward, *backward]) + MIN_STAGING_BUFFERS * 3
    for span in spans[len(forward) :]:
        held = sum(span.bucket <= at for at in found.acquire_at) * 3
        assert span.peak_bytes + held <= limit
    if not early:
        assert set(found.acquire_at) <= {late}
    names = [span.layer for span in spans[: len(forward)]]
    back = [len(names) - 1 if layer is None else names.index(layer) for layer in found.release_at]
    assert len(back) == found.count
    assert back == sorted(back)
    for i, span in enumerate(spans[: len(forward)]):
        assert span.peak_bytes + sum(i < at for at in back) * 3 <= limit


class Small(SimulatedBackend):
    """Has room for so many slots."""

    room = 3

    def allocate(self, *arguments: Any, **options: Any) -> list[Buffer]:
        if self.ledger.by_owner(Tier.DEVICE).get("staging slots", 0) >= self.room * SLOT:
            raise MemoryLimitError("out of device memory")
        return super().allocate(*arguments, **options)


def test_slots_that_are_being_filled_stay_where_there_is_no_room_for_more() -> None:
    backend = Small(threads=1)
    slots = made([0] * 6, [0] * 6, backend)
    slots._set_count(6)
    slots.acquire(2)
    filled = [slots.of(b)[0].address for b in (0, 1)]
    with pytest.raises(MemoryLimitError):
        slots.acquire(5)
    assert slots.held == [0, 1]
    assert [slots.of(b)[0].address for b in (0, 1)] == filled
    assert backend.ledger.by_owner(Tier.DEVICE)["staging slots"] == 2 * SLOT
    backend.room = 6
    slots.acquire(5)
    assert [slots.of(b)[0].address for b in (0, 1)] == filled
    assert len({slots.of(b)[0].address for b in range(5)}) == 5
    slots.give_back(slots.held)
    assert backend.ledger.by_owner(Tier.DEVICE).get("staging slots", 0) == 0
