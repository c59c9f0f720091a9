"""The native norm partials equal the numpy definition; the norm does not depend on order, threads or ISA."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hostward.errors import ConfigError, NativeError, PlacementError
from hostward.kernels import reference
from hostward.kernels.cpu.library import Isa
from hostward.kernels.cpu.norm import chunk_count, norm_partials
from hostward.kernels.reference import ALL_ZERO, NORM_CHUNK, NOT_FINITE, clip_scale, norm_from_partials

from native_cases import GRADS, ISAS, Guarded, as_grad, random_floats


def finite_floats(rng: np.random.Generator, n: int) -> np.ndarray:
    values = (rng.standard_normal(n) * np.exp2(rng.integers(-30, 8, n))).astype(np.float32)
    values[rng.random(n) < 0.2] = 0.0
    return values


def float64_norm(grads: list[np.ndarray]) -> float:
    squares = [math.fsum(np.square(reference.float_of(g).astype(np.float64)).tolist()) for g in grads]
    return math.sqrt(math.fsum(squares))


@pytest.mark.parametrize("dtype", GRADS)
def test_t46_partials_equal_numpy_at_every_length_and_alignment(dtype: str) -> None:
    rng = np.random.default_rng(1)
    for n in [*range(258), 4095, 4096, 4097, 3 * 4096 + 5]:
        guarded = Guarded(as_grad(random_floats(rng, n, 0.0), dtype), int(rng.integers(0, 33)))
        sums, exponents = reference.norm_partials(guarded.values)
        for isa in ISAS:
            actual = norm_partials([guarded.values], isa=isa)
            assert actual[0].tolist() == sums.tolist(), (n, isa)
            assert actual[1].tolist() == exponents.tolist(), (n, isa)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), dtype=st.sampled_from(GRADS))
def test_partials_of_any_bits_equal_numpy(words: list[int], dtype: str) -> None:
    grad = as_grad(np.array(words, dtype=np.uint32).view(np.float32), dtype)
    sums, exponents = reference.norm_partials(grad)
    for isa in ISAS:
        actual = norm_partials([grad], isa=isa)
        assert (actual[0].tolist(), actual[1].tolist()) == (sums.tolist(), exponents.tolist())


def test_partials_of_denormals_alone() -> None:
    for bits in ([1], [1, 2, 3], [0x7FFFFF, 0x80000001], [0x800000, 1]):
        grad = np.array(bits, dtype=np.uint32).view(np.float32)
        sums, exponents = reference.norm_partials(grad)
        for isa in ISAS:
            actual = norm_partials([grad], isa=isa)
            assert (actual[0].tolist(), actual[1].tolist()) == (sums.tolist(), exponents.tolist())
    assert norm_partials([np.array([1], np.uint32).view(np.float32)])[1].tolist() == [-148]


def test_the_largest_possible_chunk_does_not_overflow() -> None:
    grad = np.full(NORM_CHUNK, np.nextafter(np.float32(1.0), np.float32(0.0)), dtype=np.float32)
    for isa in ISAS:
        sums, exponents = norm_partials([grad], isa=isa)
        assert exponents.tolist() == [0]
        assert 2**62 - 2**40 < sums[0] < 2**62


@pytest.mark.parametrize(
    ("value", "exponent"), [(np.nan, NOT_FINITE), (np.inf, NOT_FINITE), (-np.inf, NOT_FINITE), (-0.0, ALL_ZERO)]
)
@pytest.mark.parametrize("dtype", GRADS)
def test_special_chunks(value: float, exponent: int, dtype: str) -> None:
    values = np.zeros(2 * NORM_CHUNK + 10, dtype=np.float32)
    values[NORM_CHUNK + 7] = value
    grad = as_grad(values, dtype)
    for isa in ISAS:
        sums, exponents = norm_partials([grad], isa=isa)
        assert sums.tolist() == [0, 0, 0]
        assert exponents.tolist() == [ALL_ZERO, exponent, ALL_ZERO]


@pytest.mark.parametrize("dtype", GRADS)
def test_threads_isa_and_order_do_not_change_the_norm(dtype: str) -> None:
    rng = np.random.default_rng(2)
    lengths = [1, 4096, 70_000, 3, 0, 300_001, 12_288, 5000]
    grads = [as_grad(finite_floats(rng, n), dtype) for n in lengths]
    reference_partials = [np.concatenate(parts) for parts in zip(*map(reference.norm_partials, grads), strict=True)]
    norm, finite = norm_from_partials(*reference_partials)
    assert finite
    for isa in ISAS:
        for threads in range(1, 9):
            sums, exponents = norm_partials(grads, threads=threads, isa=isa)
            assert sums.tolist() == reference_partials[0].tolist()
            assert exponents.tolist() == reference_partials[1].tolist()
    for _ in range(20):
        order = rng.permutation(len(sums))
        assert norm_from_partials(sums[order], exponents[order]) == (norm, True)
    shuffled = [grads[i] for i in rng.permutation(len(grads))]
    assert norm_from_partials(*norm_partials(shuffled, threads=2)) == (norm, True)
    assert float(norm) == pytest.approx(float64_norm(grads), rel=1e-7)


@settings(max_examples=100, deadline=None)
@given(
    exponents=st.lists(st.integers(-149, 120), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_norm_is_close_to_float64_at_any_magnitude(exponents: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    grads = [np.ldexp(rng.uniform(-1, 1, int(rng.integers(1, 9000))), e).astype(np.float32) for e in exponents]
    norm, finite = norm_from_partials(*norm_partials(grads))
    assert finite
    exact = float64_norm(grads)
    with np.errstate(over="ignore"):
        rounded = np.float32(exact)
    # One part in 10**7, or one unit of the last place where float32 is denormal or overflows.
    if np.isfinite(rounded):
        assert abs(float(norm) - exact) <= max(1e-7 * exact, float(np.spacing(rounded)))
    else:
        assert norm == np.inf or float(norm) > 3.4e38


def test_norm_of_nothing_and_of_zeros_is_zero() -> None:
    empty = np.array([], dtype=np.int64), np.array([], dtype=np.int32)
    assert norm_from_partials(*empty) == (0.0, True)
    assert norm_from_partials(*norm_partials([np.zeros(10_000, np.float32)])) == (0.0, True)
    assert [part.size for part in norm_partials([])] == [0, 0]


def test_norm_of_anything_not_finite_is_infinite_and_says_so() -> None:
    for value in (np.nan, np.inf, -np.inf):
        norm, finite = norm_from_partials(*norm_partials([np.array([1.0, value], np.float32)]))
        assert (float(norm), finite) == (np.inf, False)


def test_norm_above_float32_is_infinite_but_the_gradients_are_finite() -> None:
    norm, finite = norm_from_partials(*norm_partials([np.full(4, 3e38, np.float32)]))
    assert (float(norm), finite) == (np.inf, True)


def test_sums_of_very_many_chunks_stay_exact() -> None:
    # 2**13 chunks at the limit pass 2**63 in one integer; the two limbs do not.
    sums, exponents = np.full(1 << 13, 2**62 - 1, dtype=np.int64), np.zeros(1 << 13, dtype=np.int32)
    norm, finite = norm_from_partials(sums, exponents)
    assert finite
    assert float(norm) == float(np.float32(math.sqrt((2**62 - 1) * 2**13) * 2.0**-25))


def test_torch_gradients_and_no_thread_left_behind() -> None:
    grad = torch.randn(400_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = reference.norm_partials(grad.view(torch.int16).numpy().view(np.uint16))
    before = len(os.listdir("/proc/self/task"))
    sums, exponents = norm_partials([grad], threads=4)
    assert len(os.listdir("/proc/self/task")) == before
    assert sums.tolist() == expected[0].tolist()
    assert exponents.tolist() == expected[1].tolist()


def test_more_threads_than_the_library_ever_starts() -> None:
    grad = np.tile(np.arange(4096, dtype=np.uint16), 16 * 300)  # 300 pieces of work
    few, many = norm_partials([grad], threads=1), norm_partials([grad], threads=1000)
    assert few[0].tobytes() == many[0].tobytes()
    assert few[1].tobytes() == many[1].tobytes()


def test_h54_gradients_are_checked() -> None:
    with pytest.raises(PlacementError, match=r"grads\[1\] is not contiguous"):
        norm_partials([torch.zeros(4), torch.zeros(8)[::2]])
    with pytest.raises(ConfigError, match="dtypes bf16, fp32"):
        norm_partials([torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)])
    with pytest.raises(ConfigError, match="threads is 0"):
        norm_partials([torch.zeros(4)], threads=0)
    missing = next(isa for isa in Isa if isa is not Isa.BEST and isa not in ISAS)
    with pytest.raises(NativeError, match="lacks the instruction set"):
        norm_partials([torch.zeros(4)], isa=missing)


@pytest.mark.parametrize(
    ("norm", "max_norm", "inv_scale", "scale"),
    [
        (0.5, 1.0, 1.0, 1.0),
        (0.0, 1.0, 1.0, 1.0),
        (4.0, 1.0, 1.0, np.float32(1.0) / (np.float32(4.0) + np.float32(1e-6))),
        (4.0, None, 0.5, 0.5),
        (1024.0, 1.0, 2.0**-10, np.float32(1.0) / (np.float32(1.0) + np.float32(1e-6)) * np.float32(2.0**-10)),
        (np.inf, 1.0, 1.0, 0.0),
    ],
)
def test_clip_scale(norm: float, max_norm: float | None, inv_scale: float, scale: float) -> None:
    actual = clip_scale(norm, max_norm, inv_scale)
    assert actual.dtype == np.float32
    assert actual == np.float32(scale)


def test_chunk_count() -> None:
    assert [chunk_count(n) for n in (0, 1, 4096, 4097)] == [0, 1, 1, 2]
