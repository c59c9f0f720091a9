"""Parts of ranks: rows divided as FSDP2 does, every element once, buckets alike on all ranks."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from workload_cases import llama

from hostward.core.inventory import SPLIT_ELEMENTS, Dtype, Inventory, Parameter, StateFormat, cut_buckets
from hostward.plan.rank_partition import UndividedError, cut_alike, first_parts, sharded

shapes = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 3, 64, 1000, 4096])), min_size=1, max_size=6)


def whole(given_shapes: list[tuple[int, int]]) -> list[Parameter]:
    return [
        Parameter(f"l{i // 2}.p{i}", rows * row, Dtype.BF16, f"l{i // 2}", rows=rows)
        for i, (rows, row) in enumerate(given_shapes)
    ]


def part(of: Parameter, ranks: int, rank: int) -> Parameter:
    """As torch.chunk divides rows."""
    rows = of.rows
    each = -(-rows // ranks)
    first, last = min(rank * each, rows), min((rank + 1) * each, rows)
    row = of.numel // rows if rows else 0
    return replace(of, numel=(last - first) * row, first=first * row)


@given(shapes, st.integers(1, 8))
def test_the_first_rank_has_the_largest_part(given_shapes: list[tuple[int, int]], ranks: int) -> None:
    parameters = whole(given_shapes)
    assert [p.numel for p in first_parts(parameters, ranks)] == [part(p, ranks, 0).numel for p in parameters]
    for rows, row in given_shapes:
        if rows:
            assert first_parts(whole([(rows, row)]), ranks)[0].numel == torch.empty(rows, row).chunk(ranks)[0].numel()


@given(shapes, st.integers(1, 8), st.sampled_from([1, 2, 5]))
def test_every_rank_has_the_buckets_of_the_first_as_far_as_it_has_elements(
    given_shapes: list[tuple[int, int]], ranks: int, cap: int
) -> None:
    parameters = whole(given_shapes)
    first = cut_buckets(first_parts(parameters, ranks), cap=cap * SPLIT_ELEMENTS)
    for rank in range(ranks):
        parts = {p.name: part(p, ranks, rank) for p in parameters}
        buckets, origins = cut_alike(first, parts, first_index=7)
        assert [b.index for b in buckets] == list(range(7, 7 + len(buckets)))
        if rank == 0:
            assert [replace(b, index=b.index - 7) for b in buckets] == list(first)
            assert origins == tuple(range(len(first)))
        held = [r for b in buckets for r in b.ranges]
        for p in parts.values():
            ranges = [r for r in held if r.name == p.name]
            assert [i for r in ranges for i in (r.start, r.stop)][1:-1:2] == [r.start for r in ranges][1:]
            assert sum(r.numel for r in ranges) == p.numel
            assert all((p.first + r.start) % SPLIT_ELEMENTS == 0 for r in ranges[1:])
            # What begins within a chunk is by itself up to the next one.
            for r in ranges[:1]:
                into = (p.first + r.start) % SPLIT_ELEMENTS
                assert not into or into + r.numel <= SPLIT_ELEMENTS
        for bucket, origin in zip(buckets, origins, strict=True):
            of_first = first[origin]
            assert (bucket.layer, bucket.dtype, bucket.kind) == (of_first.layer, of_first.dtype, of_first.kind)
            assert {r.name for r in bucket.ranges} <= {r.name for r in of_first.ranges}
            assert bucket.numel < of_first.numel + SPLIT_ELEMENTS * len(of_first.ranges)


def test_blocks_of_fp8_moments_are_those_of_matrices_and_are_not_divided() -> None:
    """A norm of 128 elements is cut anywhere; a matrix is not, and another number of ranks may divide it."""
    model = llama(layers=1, hidden=256, ffn=512, heads=2, kv_heads=2, vocab=512)
    odd = Parameter("layers.0.odd", 6 * 64, Dtype.BF16, "layers.0", rows=6)
    norm = Parameter("layers.0.q_norm", 128, Dtype.BF16, "layers.0", rows=128, dims=1)

    def divided(ranks: int, form: StateFormat, *more: Parameter) -> int:
        parameters = (*model.inventory.parameters, *more)
        inventory = Inventory(parameters, cut_buckets(parameters, form=form))
        return sharded(replace(model, inventory=inventory, microbatches=8), ranks).inventory.state_bytes

    both = StateFormat(Dtype.FP8, Dtype.FP8)
    for ranks in (2, 4):
        assert divided(ranks, both, norm) - divided(ranks, both) == 6 * 128 // ranks
    assert divided(4, both, odd) - divided(4, both) == 4 * 128 + 2
    for form in (both, StateFormat(Dtype.BF16, Dtype.FP8)):
        with pytest.raises(UndividedError, match=r"moments in FP8, of 'layers.0.odd' as well, of which each of 2 GPUs"):
            divided(2, form, odd, norm)
    divided(2, StateFormat(Dtype.BF16, Dtype.BF16), odd)


def test_elements_are_divided_where_rows_are_not_known() -> None:
    assert first_parts([Parameter("p", 10, Dtype.BF16, "l")], 4)[0].numel == 3


@pytest.mark.parametrize(("numel", "rows"), [(0, 0), (0, 5)])
def test_a_parameter_without_elements_has_no_part(numel: int, rows: int) -> None:
    assert first_parts([Parameter("p", numel, Dtype.BF16, "l", rows=rows)], 4)[0].numel == 0
