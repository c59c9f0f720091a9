"""Placing a fraction: as near as buckets allow, the last buckets first; streamed and host buckets take turns.

Seen red: a streamed share that counts buckets instead of bytes, a host bucket first, a share of all instead of what is
offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from fractions import Fraction
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core.host_limits import Rates
from hostward.core.inventory import Bucket, Dtype, MasterKind, Range, state_bytes_per_element
from hostward.core.placement import (
    Placement,
    checked_fraction,
    place_fraction,
    stepped_early,
    streamed_share,
    summed_on_host,
)
from hostward.errors import ConfigError

kinds = st.sampled_from(
    [(Dtype.FP32, MasterKind.WEIGHT), (Dtype.BF16, MasterKind.SPLIT), (Dtype.FP16, MasterKind.PLAIN)]
)
bucket_lists = st.lists(st.tuples(st.integers(1, 64 * 1024**2), kinds), max_size=80).map(
    lambda rows: [
        Bucket(i, f"layers.{i}", dtype, 0, kind, (Range(f"p{i}", 0, numel),))
        for i, (numel, (dtype, kind)) in enumerate(rows)
    ]
)
fractions = st.floats(0, 1)


@given(bucket_lists, fractions)
def test_t15_the_placed_share_is_within_half_a_bucket_of_what_was_asked(buckets: list[Bucket], fraction: float) -> None:
    plan = place_fraction(buckets, fraction)
    asked_bytes = Fraction(fraction) * plan.state_bytes
    largest = max((b.state_bytes for b in buckets), default=0)
    assert abs(plan.offloaded_bytes - asked_bytes) <= Fraction(largest, 2) + Fraction(1, 1000)
    assert plan.asked_fraction == fraction


@given(bucket_lists)
def test_t15_zero_places_nothing_and_one_places_all(buckets: list[Bucket]) -> None:
    assert all(b.placement is Placement.DEVICE for b in place_fraction(buckets, 0.0).buckets)
    assert all(b.placement is Placement.HOST for b in place_fraction(buckets, 1.0).buckets)


@given(bucket_lists, fractions, fractions)
def test_the_first_buckets_stay_on_the_device(buckets: list[Bucket], fraction: float, share: float) -> None:
    placements = [b.placement for b in place_fraction(buckets, fraction, share).buckets]
    offloaded = [p.offloaded for p in placements]
    assert offloaded == sorted(offloaded)
    # What is streamed decides nothing about what is offloaded.
    assert offloaded == [b.placement.offloaded for b in place_fraction(buckets, fraction).buckets]


@given(bucket_lists, fractions, fractions)
def test_s7_the_streamed_share_of_what_is_offloaded_is_within_a_bucket(
    buckets: list[Bucket], fraction: float, share: float
) -> None:
    plan = place_fraction(buckets, fraction, share)
    offloaded = [b for b in plan.buckets if b.placement.offloaded]
    streamed_bytes = sum(b.state_bytes for b in offloaded if b.placement is Placement.STREAMED)
    asked = Fraction(share) * sum(b.state_bytes for b in offloaded)
    assert abs(streamed_bytes - asked) <= max((b.state_bytes for b in offloaded), default=0) + 1


def test_large_buckets_are_not_streamed_where_the_others_suffice() -> None:
    """Every staging slot is as large as the largest streamed bucket."""
    sizes = [8192, *[4096] * 8, 8192]
    buckets = [Bucket(i, "l", Dtype.FP32, 0, MasterKind.WEIGHT, (Range("p", 0, n),)) for i, n in enumerate(sizes)]

    def kinds(share: float) -> str:
        return "".join(b.placement.value[0].upper() for b in place_fraction(buckets, 1.0, share).buckets)

    assert kinds(0.5).count("S") == 6
    assert {kinds(0.5)[0], kinds(0.5)[-1]} == {"H"}
    assert kinds(0.9).count("H") == 1


@given(bucket_lists, fractions)
def test_s7_a_share_of_none_or_all_is_exact(buckets: list[Bucket], fraction: float) -> None:
    for share, kind in ((0.0, Placement.HOST), (1.0, Placement.STREAMED)):
        plan = place_fraction(buckets, fraction, share)
        assert {b.placement for b in plan.buckets} <= {Placement.DEVICE, kind}
        assert plan.offloaded_bytes == place_fraction(buckets, fraction).offloaded_bytes


@pytest.mark.parametrize(
    ("share", "kinds"),
    [(0.5, "SHSHSHSH"), (0.25, "SHHHSHHH"), (0.75, "SSSHSSSH"), (1e-9, "SHHHHHHH"), (1.0, "SSSSSSSS")],
)
def test_equal_buckets_take_turns_and_a_streamed_one_is_first(share: float, kinds: str) -> None:
    buckets = [Bucket(i, "l", Dtype.FP32, 0, MasterKind.WEIGHT, (Range("p", 0, 4096),)) for i in range(10)]
    plan = place_fraction(buckets, 0.8, share)
    assert "".join(b.placement.value[0].upper() for b in plan.buckets) == "DD" + kinds


@pytest.mark.parametrize("share", ["auto", "0.5", float("nan"), -0.1, 1.1, True])
def test_a_streamed_share_outside_its_range_is_refused_by_name(share: object) -> None:
    with pytest.raises(ConfigError, match=r"^streamed_fraction must be a number in \[0\.0, 1\.0\]"):
        place_fraction([], 0.5, share)  # type: ignore[arg-type]


@given(bucket_lists, fractions, fractions)
def test_a_larger_fraction_never_places_less(buckets: list[Bucket], a: float, b: float) -> None:
    small, large = sorted((a, b))
    assert place_fraction(buckets, small).offloaded_bytes <= place_fraction(buckets, large).offloaded_bytes


@given(bucket_lists, fractions)
def test_the_plan_keeps_names_sizes_and_order(buckets: list[Bucket], fraction: float) -> None:
    plan = place_fraction(buckets, fraction)
    assert [(b.name, b.numel, b.state_bytes) for b in plan.buckets] == [
        (b.name, b.numel, b.numel * state_bytes_per_element(b.kind)) for b in buckets
    ]


def test_one_bucket_goes_to_the_nearer_side_and_stays_when_it_is_a_tie() -> None:
    bucket = Bucket(0, "l", Dtype.FP32, 0, MasterKind.WEIGHT, (Range("p", 0, 10),))
    shares = [place_fraction([bucket], f).placed_fraction for f in (0.0, 0.49, 0.5, 0.51, 1.0)]
    assert shares == [0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "value",
    ["50%", "0.5", "", b"1", float("nan"), -0.1, 1.1, -1, 2, 10**400, True, False, math.inf, -math.inf, [0.5], 0.5j],
    ids=lambda v: repr(v)[:12],
)
def test_t15_anything_else_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_fraction(value, "optimizer.optimizer_offload_fraction")
    assert caught.value.what == (f"optimizer.optimizer_offload_fraction must be a number in [0.0, 1.0], got {value!r}")
    assert caught.value.why
    assert "optimizer.optimizer_offload_fraction=0.5 puts half" in caught.value.fix
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("value", "expected"), [(None, 0.0), (0, 0.0), (0.37, 0.37), (1, 1.0), (5e-324, 5e-324)])
def test_t15_none_means_off_and_numbers_in_range_are_kept(value: object, expected: float) -> None:
    result = checked_fraction(value)
    assert type(result) is float
    assert result == expected


def test_t15_minus_zero_is_zero() -> None:
    assert math.copysign(1.0, checked_fraction(-0.0)) == 1.0


def test_t15_place_fraction_refuses_what_checked_fraction_refuses() -> None:
    with pytest.raises(ConfigError, match="offload_fraction must be"):
        place_fraction([], float("nan"))


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(Placement)), max_size=7), st.floats(0, 1))
def test_the_last_host_buckets_are_stepped_early(rows: list[tuple[int, Placement]], share: float) -> None:
    buckets = [
        Bucket(i, "layer", Dtype.BF16, 0, MasterKind.SPLIT, (Range("w", 0, 4096 * size),))
        for i, (size, _) in enumerate(rows)
    ]
    found = stepped_early(buckets, [placement for _, placement in rows], share)
    on_host = [b for b, (_, placement) in enumerate(rows) if placement is Placement.HOST]
    assert sorted(found) == on_host[len(on_host) - len(found) :]
    total = sum(rows[b][0] for b in on_host)
    away = abs(sum(rows[b][0] for b in found) - share * total)
    assert away <= max((rows[b][0] for b in on_host), default=0) / 2
    assert stepped_early(buckets, [placement for _, placement in rows], 1.0) == frozenset(on_host)
    assert stepped_early(buckets, [placement for _, placement in rows], 0.0) == frozenset()


@given(
    st.lists(
        st.tuples(st.frozensets(st.sampled_from("abcdef"), min_size=1, max_size=3), st.sampled_from(Placement)),
        max_size=6,
    )
)
def test_gradients_are_added_up_where_all_of_a_parameter_is(rows: list[tuple[frozenset[str], Placement]]) -> None:
    """The largest set of host buckets that shares no parameter with the rest."""
    buckets = [
        Bucket(i, "layer", Dtype.BF16, 0, MasterKind.SPLIT, tuple(Range(name, 0, 4096) for name in sorted(names)))
        for i, (names, _) in enumerate(rows)
    ]
    found = summed_on_host(buckets, [placement for _, placement in rows])

    def names_of(chosen: Collection[int]) -> set[str]:
        return {name for b in chosen for name in rows[b][0]}

    on_host = [b for b, (_, placement) in enumerate(rows) if placement is Placement.HOST]
    allowed = [
        frozenset(chosen)
        for n in range(len(on_host) + 1)
        for chosen in combinations(on_host, n)
        if not names_of(chosen) & names_of(set(range(len(rows))) - set(chosen))
    ]
    assert found == max(allowed, key=len)


giga = st.floats(0.05, 400.0)


@given(giga, giga, st.floats(0.1, 1.3), st.floats(0.1, 1.3), st.sampled_from([8, 10, 12]))
def test_with_no_other_share_host_and_link_end_earlier(
    host: float, link: float, busy_host: float, busy_link: float, state: int
) -> None:
    rates = Rates(host, 2 * link, busy_host * host, busy_link * 2 * link, link)

    def seconds(s: float) -> float:
        """From one end to the next, each at its rate beside the other while that is not done."""
        left, now = [1 - s, s * state], 0.0
        while any(left):
            speeds = (busy_host * host, busy_link * link) if all(left) else (host, link)
            took = min(amount / speed for amount, speed in zip(left, speeds, strict=True) if amount)
            left = [n - took * v if n - took * v > 1e-9 else 0.0 for n, v in zip(left, speeds, strict=True)]
            now += took
        return now

    share = streamed_share(rates, state_bytes=state, weight_bytes=2)
    assert 0.0 <= share <= 1.0
    assert seconds(share) <= min(seconds(k / 200) for k in range(201)) * (1 + 1e-6)


PATHS = Rates(4.58e9, 94.5e9, 3.44e9, 2 * 26.8e9, 55e9)
TWO = Rates(4.226e9, 72.46e9, 2.915e9, 44.2e9, 49.5e9)


def test_the_share_is_the_one_that_reached_these_rates() -> None:
    """One H200 with 16 cores, 2026-11-21-paths-h200.json: at 0.4375, where host and link ended together, the host
    stepped 3.44 G parameters per second and the link moved 26.8 GB of state per second in each direction.
    """
    assert streamed_share(PATHS, state_bytes=10, weight_bytes=2) == pytest.approx(0.4375, abs=0.002)


shares = st.floats(0.0, 1.0)


@given(giga, giga, st.floats(0.1, 1.0), st.floats(0.1, 1.0), shares, shares)
def test_what_is_read_ahead_makes_no_step_longer(
    host: float, link: float, busy_host: float, busy_link: float, one: float, other: float
) -> None:
    """And the share is the best of all, with the time of each direction counted by itself."""
    rates = Rates(host, 2 * link, busy_host * host, busy_link * 2 * link, 1.2 * link)

    def seconds(s: float, ahead: float) -> float:
        writes, reads = 10 * s, max(0.0, 10 * (s - ahead)) + 2 * (1 - s)

        def link_s(duplex: float) -> float:
            return max((writes + reads) / duplex, writes / (1.2 * link), reads / (1.2 * link))

        host_s, copies_s = (1 - s) / (busy_host * host), link_s(busy_link * 2 * link)
        if host_s <= copies_s:
            return host_s + (1 - host_s / copies_s) * link_s(2 * link)
        return copies_s + (1 - copies_s / host_s) * (1 - s) / host

    best = {ahead: streamed_share(rates, state_bytes=10, weight_bytes=2, ahead=ahead) for ahead in (one, other)}
    for ahead, share in best.items():
        assert 0.0 <= share <= 1.0
        assert seconds(share, ahead) <= min(seconds(k / 100, ahead) for k in range(101)) * (1 + 1e-9)
    less, more = sorted((one, other))
    assert seconds(best[more], more) <= seconds(best[less], less) * (1 + 1e-9)


def test_with_all_read_ahead_the_host_ends_with_the_writes() -> None:
    """Rates of one of two H200 (2026-11-22-scaling-two-32k-fractions.json): 43 % of the parameters at the host's rate
    take as long as the state of 57 % and the weights of 43 % on the link.
    """
    share = streamed_share(TWO, state_bytes=10, weight_bytes=2, ahead=1.0)
    host_s = (1 - share) / TWO.busy_host_parameters_per_s
    link_s = (10 * share + 2 * (1 - share)) / TWO.busy_duplex_bytes_per_s
    assert share > streamed_share(TWO, state_bytes=10, weight_bytes=2) + 0.1
    assert host_s == pytest.approx(link_s, rel=0.05)


def test_where_the_link_gains_more_than_the_host_gives_all_is_streamed() -> None:
    """Where copies hardly move beside the host's step."""
    assert streamed_share(Rates(3.23e9, 72.0e9, 2.09e9, 30.0e9, 50e9), state_bytes=10, weight_bytes=2) == 1.0


def test_without_a_link_worth_the_name_nothing_is_streamed() -> None:
    assert streamed_share(Rates(5e9, 2e9, 4e9, 1e9, 1.5e9), state_bytes=10, weight_bytes=2) == 0.0
