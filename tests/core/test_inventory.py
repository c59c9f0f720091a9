"""Buckets: every element once, in order, within the cap, aligned."""

from __future__ import annotations

import doctest
from dataclasses import replace
from itertools import groupby, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core import inventory
from hostward.core.inventory import (
    FP32_STATE,
    LARGEST_BUCKET_CAP,
    RANGE_ALIGNMENT_ELEMENTS,
    SMALLEST_BUCKET_CAP,
    SPLIT_ELEMENTS,
    Bucket,
    Dtype,
    Inventory,
    MasterKind,
    Parameter,
    Range,
    StateFormat,
    align,
    bucket_cap,
    cut_buckets,
    host_bytes_per_element,
    layer_of,
    state_bytes_per_element,
)
from hostward.errors import ConfigError

caps = st.integers(1, 6).map(lambda k: k * SPLIT_ELEMENTS)
sizes = st.one_of(
    st.sampled_from([0, 1, 127, 128, 129, SPLIT_ELEMENTS - 1, SPLIT_ELEMENTS, SPLIT_ELEMENTS + 1]),
    st.integers(0, 12 * SPLIT_ELEMENTS),
)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[Parameter]:
    rows = draw(
        st.lists(
            st.tuples(sizes, st.sampled_from(Dtype), st.integers(0, 2), st.integers(0, 1)), min_size=0, max_size=12
        )
    )
    return [
        Parameter(f"layers.{layer}.p{i}", numel, dtype, f"layers.{layer}", group)
        for i, (numel, dtype, layer, group) in enumerate(rows)
    ]


@given(parameter_lists(), caps)
def test_every_element_lies_in_one_bucket_by_layers_and_groups(parameters: list[Parameter], cap: int) -> None:
    found = [r for b in cut_buckets(parameters, cap=cap) for r in b.ranges]
    merged: list[Range] = []
    for r in found:
        if merged and merged[-1].name == r.name:
            assert r.start == merged[-1].stop
            merged[-1] = Range(r.name, merged[-1].start, r.stop)
        else:
            merged.append(r)
    layers = [list(run) for _, run in groupby(parameters, key=lambda p: p.layer)]
    ordered = [p for run in layers for group in (0, 1) for p in run if p.group == group]
    assert merged == [Range(p.name, 0, p.numel) for p in ordered if p.numel]


@given(parameter_lists(), caps)
def test_a_bucket_has_one_layer_dtype_and_group_and_at_most_cap_elements(parameters: list[Parameter], cap: int) -> None:
    by_name = {p.name: p for p in parameters}
    for bucket in cut_buckets(parameters, cap=cap):
        keys = {(p.layer, p.dtype, p.group) for p in (by_name[r.name] for r in bucket.ranges)}
        assert keys == {(bucket.layer, bucket.dtype, bucket.group)}
        assert 0 < bucket.numel <= cap
        assert all(r.numel > 0 for r in bucket.ranges)


@given(parameter_lists(), caps)
def test_only_tensors_above_the_cap_are_split_and_only_at_multiples_of_4096(
    parameters: list[Parameter], cap: int
) -> None:
    by_name = {p.name: p for p in parameters}
    for r in (r for b in cut_buckets(parameters, cap=cap) for r in b.ranges):
        numel = by_name[r.name].numel
        assert r.start % SPLIT_ELEMENTS == 0
        assert r.stop == numel or r.stop % SPLIT_ELEMENTS == 0
        if numel <= cap:
            assert (r.start, r.stop) == (0, numel)


@given(parameter_lists(), caps)
def test_no_bucket_could_have_taken_the_first_range_of_the_next(parameters: list[Parameter], cap: int) -> None:
    for one, other in pairwise(cut_buckets(parameters, cap=cap)):
        if (one.layer, one.dtype, one.group) == (other.layer, other.dtype, other.group):
            assert one.numel + other.ranges[0].numel > cap


@given(parameter_lists(), caps)
def test_offsets_are_aligned_and_ranges_do_not_overlap(parameters: list[Parameter], cap: int) -> None:
    for bucket in cut_buckets(parameters, cap=cap):
        offsets = bucket.offsets
        assert len(offsets) == len(bucket.ranges) + 1
        assert offsets[0] == 0
        for r, (start, following) in zip(bucket.ranges, pairwise(offsets), strict=True):
            assert start % RANGE_ALIGNMENT_ELEMENTS == 0
            assert start + r.numel <= following < start + r.numel + RANGE_ALIGNMENT_ELEMENTS
        assert offsets[-1] % RANGE_ALIGNMENT_ELEMENTS == 0


@given(parameter_lists(), caps, st.integers(0, 9))
def test_buckets_are_numbered_in_order_from_the_first_index(
    parameters: list[Parameter], cap: int, first_index: int
) -> None:
    buckets = cut_buckets(parameters, cap=cap, first_index=first_index)
    assert [b.index for b in buckets] == list(range(first_index, first_index + len(buckets)))
    assert len({b.name for b in buckets}) == len(buckets)


@given(parameter_lists())
def test_bytes_of_buckets_are_those_of_the_parameters(parameters: list[Parameter]) -> None:
    buckets = cut_buckets(parameters)
    whole = Inventory(tuple(parameters), buckets)
    assert whole.numel == sum(b.numel for b in buckets)
    kinds = [FP32_STATE.master_kind(p.dtype) for p in parameters]
    sizes = zip(parameters, map(state_bytes_per_element, kinds), strict=True)
    assert whole.state_bytes == sum(p.numel * size for p, size in sizes)
    for b in buckets:
        assert b.host_bytes == b.numel * host_bytes_per_element(b.dtype, b.kind)


def test_pieces_of_a_large_tensor_are_equal_and_about_as_large_as_the_largest_whole_one() -> None:
    """Every staging slot is as large as the largest streamed bucket."""
    table = Parameter("table", 32000 * 2048, Dtype.BF16, "embed")
    layers = [Parameter(f"layers.{i}.up", 2048 * 8192, Dtype.BF16, f"layers.{i}") for i in range(8)]
    numels = [bucket.numel for bucket in cut_buckets([table, *layers], cap=27 * 4096 * 256)]
    assert numels == [16384000] * 4 + [16777216] * 8
    small = [Parameter(f"layers.{i}.up", 4096, Dtype.BF16, f"layers.{i}") for i in range(2)]
    numels = [bucket.numel for bucket in cut_buckets([table, *small], cap=32000 * 1024)]
    assert numels == [32000 * 1024] * 2 + [4096] * 2


def test_scalar_and_zero_size_parameters() -> None:
    parameters = [
        Parameter("a", 0, Dtype.FP32, "l"),
        Parameter("b", 1, Dtype.FP32, "l"),
        Parameter("c", 0, Dtype.FP32, "l"),
    ]
    assert [b.ranges for b in cut_buckets(parameters)] == [(Range("b", 0, 1),)]
    assert cut_buckets(parameters[:1]) == ()
    assert cut_buckets([]) == ()


def test_a_zero_size_parameter_of_another_layer_does_not_close_the_bucket() -> None:
    parameters = [Parameter(f"p{i}", int(i != 1), Dtype.FP32, layer) for i, layer in enumerate(("l0", "l1", "l0"))]
    assert [b.ranges for b in cut_buckets(parameters)] == [(Range("p0", 0, 1), Range("p2", 0, 1))]


def test_an_iterator_of_parameters_is_read_once() -> None:
    parameters = [Parameter("a", 10, Dtype.FP32, "l"), Parameter("b", 10, Dtype.FP32, "l")]
    assert cut_buckets(iter(parameters)) == cut_buckets(parameters)


@pytest.mark.parametrize("cap", [0, -SPLIT_ELEMENTS, 1, 5000])
def test_a_cap_that_would_cut_a_norm_chunk_is_refused(cap: int) -> None:
    with pytest.raises(ConfigError, match=rf"bucket cap of {cap} elements\n  why: .*norm.*\n  fix: .*multiple of 4096"):
        cut_buckets([Parameter("a", 10_000, Dtype.FP32, "l")], cap=cap)


@given(st.integers(0, 10**12))
def test_bucket_cap_lies_in_its_bounds_and_is_a_64th_in_between(numel: int) -> None:
    cap = bucket_cap(numel)
    assert SMALLEST_BUCKET_CAP <= cap <= LARGEST_BUCKET_CAP
    assert cap % SPLIT_ELEMENTS == 0
    if 64 * SMALLEST_BUCKET_CAP <= numel <= 64 * LARGEST_BUCKET_CAP:
        assert 0 <= numel // 64 - cap < SPLIT_ELEMENTS
    assert bucket_cap(numel + 1) >= cap


@pytest.mark.parametrize(
    ("dtype", "split", "kind", "state_bytes", "host_bytes"),
    [
        (Dtype.FP32, True, MasterKind.WEIGHT, 8, 12),
        (Dtype.FP32, False, MasterKind.WEIGHT, 8, 12),
        (Dtype.BF16, True, MasterKind.SPLIT, 10, 12),
        (Dtype.BF16, False, MasterKind.PLAIN, 12, 14),
        (Dtype.FP16, True, MasterKind.PLAIN, 12, 14),
    ],
)
def test_bytes_per_element(dtype: Dtype, split: bool, kind: MasterKind, state_bytes: int, host_bytes: int) -> None:
    (bucket,) = cut_buckets([Parameter("a", 10, dtype, "l")], form=StateFormat(split_master=split))
    assert bucket.kind is kind
    assert (bucket.state_bytes, bucket.host_bytes) == (10 * state_bytes, 10 * host_bytes)


def test_bytes_of_bf16_main_weights_are_those_of_moments_alone() -> None:
    form = StateFormat(Dtype.BF16, Dtype.BF16, main_param=Dtype.BF16)
    weights = [Parameter("a", 10, Dtype.BF16, "l"), Parameter("b", 10, Dtype.FP32, "l")]
    narrow, wide = cut_buckets(weights, form=form)
    assert [(b.kind, b.state_bytes, b.host_bytes) for b in (narrow, wide)] == [
        (MasterKind.WEIGHT, 40, 60),
        (MasterKind.WEIGHT, 40, 80),
    ]
    assert Inventory(tuple(weights), (narrow, wide)).saved_bytes == [40, 40]
    assert [form.saved_element_bytes(d) for d in (Dtype.BF16, Dtype.FP32)] == [4, 4]
    assert [FP32_STATE.saved_element_bytes(d) for d in (Dtype.BF16, Dtype.FP32)] == [12, 8]
    with pytest.raises(ConfigError, match="main weights in bf16 of fp16 weights"):
        form.master_kind(Dtype.FP16)


@given(parameter_lists(), st.lists(st.integers(0, 3), min_size=12, max_size=12), caps)
def test_fp8_is_the_format_of_matrices_and_no_bucket_has_two_formats(
    parameters: list[Parameter], dims: list[int], cap: int
) -> None:
    parameters = [replace(p, dims=n) for p, n in zip(parameters, dims, strict=False)]
    of = {p.name: p.dims for p in parameters}
    for moments in ((Dtype.FP8, Dtype.FP8), (Dtype.FP8, Dtype.FP32), (Dtype.BF16, Dtype.FP8)):
        asked, short = StateFormat(*moments), [Dtype.BF16 if m is Dtype.FP8 else m for m in moments]
        buckets = cut_buckets(parameters, cap=cap, form=asked)
        for bucket in buckets:
            assert {asked if of[r.name] > 1 else StateFormat(*short) for r in bucket.ranges} == {bucket.form}
        held = [r for b in buckets for r in b.ranges]
        assert sum(r.numel for r in held) == sum(p.numel for p in parameters)
        if any(of[r.name] > 1 for r in held):
            assert Inventory(tuple(parameters), buckets).form == asked
        narrow = Inventory(tuple(parameters), cut_buckets(parameters, cap=cap, form=StateFormat(*short)))
        assert narrow.saved_bytes == Inventory(tuple(parameters), buckets).saved_bytes
    assert cut_buckets(parameters, cap=cap) == cut_buckets([replace(p, dims=2) for p in parameters], cap=cap)


def test_vectors_among_matrices_make_one_bucket_more_in_a_layer() -> None:
    """In the order of modules they alternate."""
    layer = [Parameter(f"layers.0.p{i}", 256, Dtype.BF16, "layers.0", dims=1 + i % 2) for i in range(6)]
    matrices, vectors = cut_buckets(layer, form=StateFormat(Dtype.FP8, Dtype.FP8))
    assert [r.name[-1] for r in matrices.ranges] == ["1", "3", "5"]
    assert [r.name[-1] for r in vectors.ranges] == ["0", "2", "4"]
    assert (matrices.state_bytes, vectors.state_bytes) == (3 * (4 * 256 + 4), 3 * 6 * 256)
    assert len(cut_buckets(layer, form=StateFormat(Dtype.BF16, Dtype.BF16))) == 1


@given(st.integers(0, 10**9), st.integers(1, 10**4))
def test_align_is_the_least_multiple_not_below(value: int, unit: int) -> None:
    assert align(value, unit) % unit == 0
    assert 0 <= align(value, unit) - value < unit


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.0.mlp.experts.7.weight", "layers.0"),
        ("encoder.layers.12.weight", "encoder.layers.12"),
        ("0.weight", "0"),
        ("lm_head.weight", "lm_head"),
        ("layer1.mlp.weight", "layer1.mlp"),
        ("bias", ""),
        ("", ""),
    ],
)
def test_layer_of(name: str, layer: str) -> None:
    assert layer_of(name) == layer


@given(st.lists(st.text(st.characters(codec="ascii"), max_size=4), min_size=1, max_size=5).map(".".join))
def test_a_layer_is_a_whole_number_of_leading_parts_of_the_name(name: str) -> None:
    layer = layer_of(name)
    assert layer == "" or name == layer or name.startswith(layer + ".")


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(inventory)
    assert result.attempted >= 1
    assert result.failed == 0


def test_a_bucket_name_sorts_by_index() -> None:
    assert Bucket(7, "layers.1", Dtype.BF16, 0, MasterKind.SPLIT, ()).name == "0007.layers.1"


@given(st.integers(0, 3 * SPLIT_ELEMENTS), sizes, caps)
def test_a_part_is_cut_where_chunks_of_the_whole_parameter_begin(first: int, numel: int, cap: int) -> None:
    part = Parameter("p", numel, Dtype.BF16, "layer", first=first)
    ranges = [r for b in cut_buckets([part], cap=cap) for r in b.ranges]
    assert [i for r in ranges for i in range(r.start, r.stop)] == list(range(numel))
    assert all((first + r.start) % SPLIT_ELEMENTS == 0 for r in ranges[1:])
    assert all(r.numel <= cap for r in ranges)
    in_one_chunk = (first + numel - 1) // SPLIT_ELEMENTS == first // SPLIT_ELEMENTS
    assert first % SPLIT_ELEMENTS == 0 or in_one_chunk or (first + ranges[0].stop) % SPLIT_ELEMENTS == 0
