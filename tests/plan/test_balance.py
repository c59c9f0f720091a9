"""The mix by predicted steps: no other share's step is much shorter, and measured rates move it.

Seen red: the coarse shares alone, and placements of the choice taken as they are.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from workload_cases import chosen, llama

from hostward.core.host_limits import Rates
from hostward.core.inventory import Dtype, Inventory, StateFormat, cut_buckets
from hostward.core.placement import place_fraction
from hostward.plan.cost_model import Costs, Speeds, measured, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import required
from hostward.plan.search import best_share
from hostward.plan.step_time import predict_of
from hostward.plan.workload import Workload

H200 = speeds_of(profile("h200"))
SMALL = llama(layers=6, hidden=1024, ffn=4096, heads=8, kv_heads=8, vocab=8000, sequence=2048)
KEEPING = chosen(SMALL, 0.0, 0.0, Keep.RECOMPUTE)


def step_s(workload: Workload, speeds: Speeds, choice: Choice, fraction: float, share: float) -> float:
    rows = place_fraction(workload.inventory.buckets, fraction, share).buckets
    tried = replace(choice, placements=tuple(row.placement for row in rows))
    return predict_of(Costs(workload, speeds), tried, required(workload, tried)).step_s


rates = st.builds(
    lambda host, link, busy_host, busy_link: Rates(host, 1.5 * link, busy_host * host, 1.5 * busy_link * link, link),
    st.floats(1e8, 1e11),
    st.floats(1e9, 1e12),
    st.floats(0.2, 1.0),
    st.floats(0.2, 1.0),
)


@settings(max_examples=25)
@given(rates, st.sampled_from([512, 2048, 8192]), st.sampled_from([0.3, 0.7, 1.0]))
def test_no_other_share_has_a_much_shorter_step(found: Rates, sequence: int, fraction: float) -> None:
    """Of the coarse ones none; of all, none by much."""
    workload, speeds = replace(SMALL, sequence_tokens=sequence), measured(H200, found, None)
    share = best_share(Costs(workload, speeds), KEEPING, fraction)
    assert 0.0 <= share <= 1.0
    best_s = step_s(workload, speeds, KEEPING, fraction, share)
    others_s = [step_s(workload, speeds, KEEPING, fraction, part / 40) for part in range(41)]
    assert best_s <= min(others_s[::4])
    assert best_s <= min(others_s) * 1.05


def test_a_slow_host_streams_more_and_a_slow_link_less() -> None:
    """Down to nothing and up to everything."""
    found = []
    for host, link in ((1e8, 1e11), (2e9, 50e9), (8e9, 20e9), (1e11, 1e8)):
        speeds = measured(H200, Rates(host, 1.6 * link, 0.8 * host, 1.2 * link, link), None)
        found.append(best_share(Costs(SMALL, speeds), KEEPING, 1.0))
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.9
    assert found[-1] == 0.0


def test_what_the_choice_says_of_placements_does_not_count() -> None:
    shares = {best_share(Costs(SMALL, H200), replace(KEEPING, placements=()), 1.0)}
    shares |= {best_share(Costs(SMALL, H200), chosen(SMALL, 1.0, s, Keep.RECOMPUTE), 1.0) for s in (0.0, 1.0)}
    assert len(shares) == 1


def test_of_nothing_nothing_is_streamed() -> None:
    assert best_share(Costs(SMALL, H200), KEEPING, 0.0) == 0.0


def test_what_was_measured_stands_in_for_the_profile() -> None:
    speeds = measured(speeds_of(profile("h100")), Rates(3e9, 80e9, 2e9, 40e9, 50e9), None)
    assert (speeds.h2d_bytes_per_s, speeds.d2h_bytes_per_s, speeds.host_parameters_per_s) == (50e9, 50e9, 3e9)
    assert [name for name, _ in speeds.assumed] == ["gpu.bf16_matmul_flops_per_s"]
    alone, both = speeds.slowdown[3], speeds.slowdown[7]
    assert alone[1] * 50e9 + alone[2] * 50e9 == pytest.approx(80e9)
    assert both[1] * 50e9 + both[2] * 50e9 == pytest.approx(40e9)
    assert both[3] * 3e9 == pytest.approx(2e9)


def test_rates_are_of_the_state_that_was_measured() -> None:
    """Seen red: fewer bytes made the step faster a second time, in the search and in what is predicted."""
    for moments in (Dtype.BF16, Dtype.FP8):
        parameters, form = SMALL.inventory.parameters, StateFormat(moments, moments)
        workload = replace(SMALL, inventory=Inventory(parameters, cut_buckets(parameters, form=form)))
        bucket = workload.inventory.as_asked
        assert bucket is not None
        costs = Costs(workload, measured(H200, Rates(3e9, 80e9, 2e9, 40e9, 50e9), bucket))
        seconds = dict(zip(workload.inventory.buckets, costs.host_s, strict=True))
        assert seconds[bucket] == pytest.approx(bucket.numel / 3e9)
        assert costs.moved(chosen(workload, 1.0)).host_s == pytest.approx(sum(costs.host_s))
