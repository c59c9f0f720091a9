"""A plan goes to JSON and back; everything else is refused.

Seen red: streamed buckets left out of `offloaded_bytes`, counted with their upload source in `host_bytes`, and left out
of what `explain` prints.
"""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core.inventory import Dtype, Parameter, cut_buckets
from hostward.core.placement import PlacedBucket, Placement, Plan, placed
from hostward.errors import ConfigError

counts = st.integers(0, 2**62)
rows = st.builds(PlacedBucket, st.text(max_size=20), counts, counts, counts, st.sampled_from(Placement))
plans = st.builds(Plan, st.floats(0, 1), st.lists(rows, max_size=6).map(tuple))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["asked_fraction", "buckets", "name", "numel", "placement"]), inner)
    ),
    max_leaves=12,
)

GOOD_ROW = {"name": "0000.l", "numel": 1, "state_bytes": 8, "host_bytes": 12, "placement": "host"}


def plan_text(**changes: Any) -> str:
    return json.dumps({"asked_fraction": 0.5, "buckets": [GOOD_ROW]} | changes)


def row_text(**changes: Any) -> str:
    return plan_text(buckets=[GOOD_ROW | changes])


@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@given(json_values.map(json.dumps) | st.text(max_size=40))
def test_any_other_text_is_a_config_error_or_a_plan_that_round_trips(text: str) -> None:
    try:
        plan = Plan.from_json(text)
    except ConfigError:
        return
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ("null", "not subscriptable"),
        ("{}", "key 'asked_fraction' is missing"),
        (json.dumps({"asked_fraction": 0.5}), "key 'buckets' is missing"),
        (plan_text(buckets={}), "buckets is not a list"),
        (plan_text(buckets=["x"]), "indices"),
        (plan_text(buckets=[{}]), "key 'name' is missing"),
        (plan_text(asked_fraction=float("nan")), "asked_fraction is nan, not a number in"),
        (plan_text(asked_fraction=1.5), "asked_fraction is 1.5"),
        (plan_text(asked_fraction="0.5"), "asked_fraction is '0.5'"),
        (plan_text(asked_fraction=True), "asked_fraction is True"),
        (plan_text(asked_fraction=10**400), "asked_fraction is 1000"),
        (row_text(name=3), "a bucket's name is 3"),
        (row_text(numel=-1), "numel of bucket '0000.l' is -1, not a count"),
        (row_text(numel=1.5), "numel of bucket '0000.l' is 1.5"),
        (row_text(state_bytes=float("inf")), "state_bytes of bucket '0000.l' is inf"),
        (row_text(host_bytes=True), "host_bytes of bucket '0000.l' is True"),
        (row_text(placement="disk"), "'disk' is not a valid Placement"),
        (row_text(placement=None), "'None' is not a valid Placement"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_bad_json_says_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(text)
    assert caught.value.what == "not a plan file"
    assert why in caught.value.why
    assert caught.value.fix == "write one with Plan.to_json()"


@given(plans)
def test_bytes_and_fraction_are_those_of_the_buckets_off_the_device(plan: Plan) -> None:
    on_host = [b for b in plan.buckets if b.placement is Placement.HOST]
    streamed = [b for b in plan.buckets if b.placement is Placement.STREAMED]
    assert plan.offloaded_bytes == sum(b.state_bytes for b in (*on_host, *streamed))
    # A streamed bucket is stepped on the device: no weight is uploaded, so none has a source on the host.
    assert plan.host_bytes == sum(b.host_bytes for b in on_host) + sum(b.state_bytes for b in streamed)
    assert (plan.count(Placement.HOST), plan.count(Placement.STREAMED)) == (len(on_host), len(streamed))
    assert sum(map(plan.count, Placement)) == len(plan.buckets)
    assert 0.0 <= plan.placed_fraction <= 1.0
    if plan.state_bytes == 0:
        assert plan.placed_fraction == 0.0


def test_only_the_device_keeps_its_state() -> None:
    assert [p for p in Placement if not p.offloaded] == [Placement.DEVICE]


def test_s4_explain_prints_asked_and_placed() -> None:
    rows = (PlacedBucket("a", 100, 1000, 1200, Placement.DEVICE), PlacedBucket("b", 300, 3000, 3600, Placement.HOST))
    assert Plan(0.7, rows).explain() == (
        "optimizer state on the host: asked 0.7000, placed 0.7500 (3,000 of 4,000 bytes, 1 of 2 buckets)"
    )
    nothing = Plan(0.0, rows[:1]).explain()
    assert nothing.endswith("(0 of 1,000 bytes, 0 of 1 buckets); no state is offloaded")


def test_s7_explain_says_what_is_streamed() -> None:
    rows = tuple(PlacedBucket(p.value, 100, 1000, 1200, p) for p in (*Placement, Placement.STREAMED))
    assert Plan(0.7, rows).explain() == (
        "optimizer state on the host: asked 0.7000, placed 0.7500 (3,000 of 4,000 bytes, 3 of 4 buckets: "
        "1 stepped on the host, 2 streamed)"
    )


def test_placed_takes_one_placement_for_each_bucket() -> None:
    buckets = cut_buckets([Parameter("a", 10, Dtype.BF16, "l0"), Parameter("b", 20, Dtype.BF16, "l1")])
    plan = placed(buckets, [Placement.DEVICE, Placement.HOST], 0.5)
    assert plan.buckets == (
        PlacedBucket("0000.l0", 10, 100, 120, Placement.DEVICE),
        PlacedBucket("0001.l1", 20, 200, 240, Placement.HOST),
    )
    with pytest.raises(ValueError, match="shorter"):
        placed(buckets, [Placement.HOST], 0.5)
