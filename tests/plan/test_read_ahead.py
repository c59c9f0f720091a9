"""State that is read while backward runs: no more than there is time, room and state for.

Seen red: slots read from the beginning of backward on, and all slots counted whether there is time or not.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from workload_cases import chosen, llama

from hostward.core.units import MIB
from hostward.plan.cost_model import Costs, Speeds, balanced_share, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import Needs, required
from hostward.plan.search import read_ahead
from hostward.plan.workload import Workload

H200 = speeds_of(profile("h200"))
SMALL = llama(layers=6, hidden=1024, ffn=4096, heads=8, kv_heads=8, vocab=8000, sequence=2048)
ALL = chosen(SMALL, 1.0, 1.0, Keep.RECOMPUTE)
BACKWARD_S = sum(c.backward_s + (c.forward_s if c.layer.repeated else 0.0) for c in Costs(SMALL, H200).layers)


def ahead(speeds: Speeds, choice: Choice = ALL, workload: Workload = SMALL, needs: Needs | None = None) -> float:
    return read_ahead(Costs(workload, speeds), choice, needs or required(workload, choice))


def linked(bytes_per_s: float) -> Speeds:
    return replace(H200, h2d_bytes_per_s=bytes_per_s)


def test_a_fast_link_reads_as_much_as_there_are_slots_for() -> None:
    bounded = replace(ALL, staging_bytes=100 * MIB)
    needs = required(SMALL, bounded)
    sizes = [b.state_bytes for b in SMALL.inventory.buckets]
    found = ahead(linked(1e15), bounded, needs=needs)
    assert 2 <= needs.slots < len(sizes) / 2
    assert needs.slots * min(sizes) <= found * sum(sizes) <= needs.slots * 1.01 * max(sizes)
    assert ahead(linked(1e15)) == pytest.approx(1.0)


def test_a_slow_link_reads_as_much_as_there_is_time_for() -> None:
    """With a slot from the beginning, so that only time counts."""
    early = replace(required(SMALL, ALL), slots=200, stage_at=(len(SMALL.inventory.buckets) - 1,) * 200)
    slot_bytes = max(b.state_bytes for b in SMALL.inventory.buckets)
    first_s = Costs(SMALL, H200).layers[-1].backward_s  # the slots are taken where the last layer's gradients are made
    for count in (0, 1, 3):
        rate = (count + 0.5) * slot_bytes / (BACKWARD_S - first_s)
        total = sum(b.state_bytes for b in SMALL.inventory.buckets)
        assert ahead(linked(rate), needs=early) * total == pytest.approx(count * slot_bytes, rel=0.01)


def test_nothing_is_read_ahead_where_nothing_is_streamed_or_the_step_is_serial() -> None:
    assert ahead(H200, chosen(SMALL, 1.0, 0.0)) == 0.0
    serial = replace(ALL, serial=True)
    assert ahead(H200, serial) == 0.0


@settings(max_examples=20)
@given(st.sampled_from([1024, 2048, 4096, 8192]), st.floats(1e9, 1e12), st.floats(1.0, 4.0))
def test_more_time_and_a_faster_link_read_no_less(sequence: int, rate: float, faster: float) -> None:
    longer = replace(SMALL, sequence_tokens=2 * sequence)
    shorter = replace(SMALL, sequence_tokens=sequence)
    room = replace(required(SMALL, ALL), stage_at=(len(SMALL.inventory.buckets) - 1,) * 5 + (0,) * 5)
    found = ahead(linked(rate), workload=shorter, needs=room)
    assert 0.0 <= found <= ahead(linked(rate * faster), workload=shorter, needs=room) <= 1.0
    assert found <= ahead(linked(rate), workload=longer, needs=room)
    assert ahead(linked(1e15), workload=shorter, needs=room) > 0


def test_longer_sequences_stream_more() -> None:
    """Backward hides more of it, and frees more memory."""
    found = []
    for sequence in (512, 2048, 8192):
        workload = replace(SMALL, sequence_tokens=sequence)
        found.append(balanced_share(H200, workload, ahead(H200, workload=workload)))
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_slot_is_read_from_the_moment_on_at_which_it_is_taken() -> None:
    """Slots that are taken where backward ends are not filled in it, those taken half way in what is left."""
    buckets = SMALL.inventory.buckets
    slot_bytes, total = max(b.state_bytes for b in buckets), sum(b.state_bytes for b in buckets)
    rate = 20.5 * slot_bytes / BACKWARD_S
    middle = next(i for i, b in enumerate(buckets) if b.layer == SMALL.repeated[3].name)
    found = []
    for stage_at in (0, middle, len(buckets) - 1):
        needs = replace(required(SMALL, ALL), slots=40, stage_at=(stage_at,) * 40)
        found.append(round(ahead(linked(rate), needs=needs) * total / slot_bytes))
    assert found[0] == 0
    assert 5 < found[1] < 12
    assert 15 < found[2] < 21
