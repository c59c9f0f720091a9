"""Define the device code of the gradient norm; `hostward.kernels.cuda.norm` imports it at the first norm.

For a chunk with exponent E the definition asks for q = floor((g * 2**-E)**2 * 2**50). Adding g*g, rounded toward
zero, to C = 2**(2E+2) in float64 gives the same: g*g < C/4, so the sum has C's exponent, its unit in the last place
is 2**(2E-50), and its bits are those of C plus q. One fused multiply-add with that rounding does it, exactly,
denormals included.
"""

# Compile-time parameters are in capitals.
# ruff: noqa: N803
# Triton's decorator is untyped, and the parameters of device functions are device values without Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from hostward.kernels.cuda.adamw_triton import load_as_fp32

CHUNK = tl.constexpr(4096)
ALL_ZERO = tl.constexpr(-(2**31))
NOT_FINITE = tl.constexpr(2**31 - 1)
FP32 = tl.constexpr(0)


@triton.jit
def _chunk_exponent(largest):
    """Return the smallest E with |g| < 2**E for the bits `largest` of the largest |g|, not zero or infinite."""
    field = largest >> 23
    # A denormal is its bits times 2**-149, and these bits convert to fp32 exactly.
    denormal = (largest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126 - 149
    return tl.where(field == 0, denormal, field - 126)


@triton.jit
def _chunk_partial(grad, first, length, ALIGNED: tl.constexpr, GRAD: tl.constexpr, FUSED: tl.constexpr):
    """Return (sum, exponent) of the chunk from element `first` on.

    FUSED is False in Triton's interpreter, which lacks fma_rz.
    """
    inside = (first + tl.arange(0, CHUNK)) < length
    value = load_as_fp32(grad, first, inside, ALIGNED, GRAD, CHUNK)
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    finite = largest < 0x7F800000
    ordinary = finite & (largest > 0)
    exponent = tl.where(ordinary, _chunk_exponent(largest), 0)
    top_bits = (2 * exponent + 1025).to(tl.int64) << 52
    wide = value.to(tl.float64)
    if FUSED:
        top = tl.full((CHUNK,), 0.0, tl.float64) + top_bits.to(tl.float64, bitcast=True)
        # Lanes past the end hold zero and count as top_bits too. Sums wrap modulo 2**64; the difference is below 2**62.
        total = tl.sum(libdevice.fma_rz(wide, wide, top).to(tl.int64, bitcast=True), 0) - top_bits * CHUNK
    else:
        units = ((1073 - 2 * exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        total = tl.sum((wide * wide * units).to(tl.int64), 0)
    return tl.where(ordinary, total, 0), tl.where(ordinary, exponent, tl.where(finite, ALL_ZERO, NOT_FINITE))


@triton.jit
def partials_kernel(items, chunk_map, sums, exponents, GRAD: tl.constexpr, FUSED: tl.constexpr):
    """Write the partial of one row (item, chunk) of `chunk_map` per program."""
    program = tl.program_id(0).to(tl.int64)
    row = items + tl.load(chunk_map + 2 * program).to(tl.int64) * 3
    chunk = tl.load(chunk_map + 2 * program + 1).to(tl.int64)
    grad = tl.load(row)
    length = tl.load(row + 1)
    first = chunk * CHUNK
    if ((grad & 15) == 0) & (first + CHUNK <= length):
        total, exponent = _chunk_partial(grad, first, length, True, GRAD, FUSED)
    else:
        total, exponent = _chunk_partial(grad, first, length, False, GRAD, FUSED)
    slot = tl.load(row + 2) + chunk
    tl.store(sums + slot, total)
    tl.store(exponents + slot, exponent)


@triton.jit(do_not_specialize=["n_chunks"])
def totals_kernel(sums, exponents, largest_exponent, n_chunks, totals, BLOCK: tl.constexpr):
    """Add the chunk sums, on the scale of the largest exponent, to totals int64[2], in units of 2**31 and 1."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n_chunks
    top = tl.load(largest_exponent).to(tl.int64)
    exponent = tl.load(exponents + index, mask=inside, other=0).to(tl.int64)
    shift = tl.minimum(tl.maximum(2 * (top - exponent), 0), 63)
    scaled = tl.load(sums + index, mask=inside, other=0) >> shift
    # Integer sums do not depend on the order of the programs.
    tl.atomic_add(totals, tl.sum(scaled >> 31, 0))
    tl.atomic_add(totals + 1, tl.sum(scaled & 0x7FFFFFFF, 0))


@triton.jit
def finish_kernel(
    totals, largest_exponent, inv_scale, found_inf, max_norm, scale_out, skip_out, norm_out, CLIP: tl.constexpr
):
    """Compute norm, clip coefficient and skip flag from the totals, in one program."""
    top = tl.load(largest_exponent)
    finite = top != NOT_FINITE
    ordinary = finite & (top != ALL_ZERO)
    total = tl.load(totals).to(tl.float64) * 2147483648.0 + tl.load(totals + 1).to(tl.float64)
    power = (tl.where(ordinary, top - 25, 0) + 1023).to(tl.int64) << 52
    norm = (tl.sqrt(total) * power.to(tl.float64, bitcast=True)).to(tl.float32)
    norm = tl.where(finite, norm, float("inf"))
    skip = finite == 0
    inverse = tl.full((), 1.0, tl.float32)
    if inv_scale is not None:
        inverse = tl.load(inv_scale)
    if found_inf is not None:
        skip = skip | (tl.load(found_inf) != 0.0)
    norm = norm * inverse
    scale = inverse
    if CLIP:
        coefficient = tl.div_rn(tl.full((), max_norm, tl.float32), norm + 1e-6)
        scale = tl.where(coefficient < 1.0, coefficient, 1.0) * inverse
    tl.store(norm_out, norm)
    tl.store(scale_out, scale)
    tl.store(skip_out, skip.to(tl.int32))
