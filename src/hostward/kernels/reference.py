"""Define the step and the norm in numpy; every kernel must be bitwise identical with them.

Each numpy operation on float32 arrays is one correctly rounded IEEE operation; nothing is fused. bf16 is held as its
bits, in uint16, since numpy has no such type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NORM_CHUNK = 4096
FP8_BLOCK = 128
ALL_ZERO = int(np.iinfo(np.int32).min)
NOT_FINITE = int(np.iinfo(np.int32).max)

_QUIET_NAN = np.uint32(0x7FC00000)


@dataclass(frozen=True)
class Hyper:
    """Hold the hyper-parameters of one group, in float64 as Python holds them."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


def float_of(values: Array) -> Array:
    """Convert gradients or weights (float32, float16, or bf16 bits in uint16) to float32, exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float32)


def canonical(values: Array) -> Array:
    """Replace every NaN of float32 values by the one with bits 0x7fc00000."""
    bits = np.where(np.isnan(values), _QUIET_NAN, values.view(np.uint32))
    return bits.astype(np.uint32).view(np.float32)


def bf16_bits(master: Array) -> Array:
    """Round float32 to bf16 bits (uint16), to nearest with ties away from zero; NaNs must be canonical."""
    return ((master.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def split_master(master: Array) -> tuple[Array, Array]:
    """Split a float32 main weight into bf16 bits (uint16) and its low 16 bits (int16); NaNs must be canonical."""
    return bf16_bits(master), (master.view(np.uint32) & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)


def join_master(weight: Array, remainder: Array) -> Array:
    """Join bf16 bits (uint16) and low 16 bits (int16) to the float32 main weight, the inverse of `split_master`."""
    high = weight.astype(np.uint32) << np.uint32(16)
    low = remainder.astype(np.int32).view(np.uint32)
    return (high + low).view(np.float32)  # modulo 2**32, as unsigned integers add


def fp16_weight(master: Array) -> Array:
    """Round float32 to float16, to nearest even; NaNs become 0x7e00."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = master.astype(np.float16)
    return np.where(np.isnan(master), np.uint16(0x7E00), half.view(np.uint16)).astype(np.uint16).view(np.float16)


def mix(values: Array) -> Array:
    """Return a one-to-one function of uint32 values, each bit of which depends on every bit of the value."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x7FEB352D)
    values = (values ^ (values >> np.uint32(15))) * np.uint32(0x846CA68B)
    mixed: Array = values ^ (values >> np.uint32(16))
    return mixed


def _random(exp_avg: Array, exp_avg_sq: Array, step: int) -> Array:
    """Return 32 random bits by element (uint32): a function of both new moments, float32, and the step."""
    key = mix(np.array([step & 0xFFFFFFFF], dtype=np.uint32))
    return mix((exp_avg_sq.view(np.uint32) * np.uint32(0x9E3779B1) + exp_avg.view(np.uint32)) ^ key)


def rounding_bits(exp_avg: Array, exp_avg_sq: Array, step: int) -> tuple[Array, Array]:
    """Return 16 random bits (uint32) for the rounding of each moment: a function of both new moments and the step."""
    random = _random(exp_avg, exp_avg_sq, step)
    return random & np.uint32(0xFFFF), random >> np.uint32(16)


def weight_random(master: Array, exp_avg: Array, exp_avg_sq: Array, step: int) -> Array:
    """Return 16 random bits (uint32) for the rounding of a weight, from what the step has computed of the element."""
    return mix(master.view(np.uint32) ^ _random(exp_avg, exp_avg_sq, step)) >> np.uint32(16)


def bf16_at_random(values: Array, random: Array) -> Array:
    """Round float32 to bf16 bits (uint16), away from zero with a probability of what would be cut off.

    Args:
        values: float32, NaNs canonical.
        random: uint32 below 2**16, of the same shape.
    """
    return ((values.view(np.uint32) + random) >> np.uint32(16)).astype(np.uint16)


def fp8_parts(moment: Array) -> tuple[Array, Array]:
    """Return views of an FP8 moment: the bytes of its elements [blocks, 128], and those of its blocks [blocks]."""
    blocks = moment.size // (FP8_BLOCK + 1)
    return moment[: blocks * FP8_BLOCK].reshape(blocks, FP8_BLOCK), moment[blocks * FP8_BLOCK :]


def float_of_fp8(moment: Array, *, signed: bool) -> Array:
    """Convert an FP8 moment to float32, exactly.

    Args:
        moment: uint8 [129 b], see `fp8_at_random`.
        signed: whether it is exp_avg.

    Returns:
        float32 [128 b].
    """
    codes, tops = fp8_parts(moment)
    code, top = codes.astype(np.uint32), np.maximum(tops, 32).astype(np.uint32)[:, None]
    if not signed:
        bits: Array = np.where(code == 0, np.uint32(0), (code + 8 * top - 248) << np.uint32(20))
        return bits.view(np.float32).reshape(-1)
    magnitude = code & np.uint32(127)
    small = magnitude.astype(np.float32) * ((top - 17) << np.uint32(23)).view(np.float32)
    bits = np.where(magnitude < 8, small.view(np.uint32), (magnitude + 8 * top - 120) << np.uint32(20))
    values: Array = bits | ((code & np.uint32(128)) << np.uint32(24))
    return values.view(np.float32).reshape(-1)


def fp8_at_random(values: Array, random: Array, *, signed: bool) -> Array:
    """Round float32 to an FP8 moment, away from zero with a probability of what would be cut off.

    Args:
        values: float32 [n], NaNs canonical.
        random: uint32 [n] below 2**16.
        signed: whether it is exp_avg: sign, 4 bits of exponent and 3 of mantissa, with denormals. exp_avg_sq has 5 bits
            of exponent and none, and becomes zero only where it is zero.

    Returns:
        uint8 [129 b], b the number of blocks of 128 elements, the last one filled up with zeros: a byte for each
        element, then one for each block, the largest exponent in it and at least 32.
    """
    blocks = -(-values.size // FP8_BLOCK)
    bits, random = (
        np.pad(each, (0, blocks * FP8_BLOCK - values.size)).reshape(blocks, FP8_BLOCK)
        for each in (values.view(np.uint32), (random << np.uint32(4)) + np.uint32(8))
    )
    magnitude = bits & np.uint32(0x7FFFFFFF)
    largest = (magnitude + random).max(axis=1, initial=0) >> np.uint32(23)
    tops = np.maximum(largest, np.uint32(32))
    top = tops[:, None].astype(np.int64)
    if signed:
        field = (magnitude >> np.uint32(23)).astype(np.int64)
        mantissa = (magnitude & np.uint32(0x7FFFFF)).astype(np.int64) | np.where(field > 0, 0x800000, 0)
        above = np.maximum(field, 1) + 14 - top
        units = ((mantissa >> np.clip(-above, 0, 24)) + random) >> 20
        codes = 8 * np.maximum(above, 0) + units + ((bits >> np.uint32(31)) << np.uint32(7))
    else:
        found = ((magnitude + random) >> np.uint32(20)).astype(np.int64)
        codes = np.where(found == 0, 0, np.maximum(found - (8 * top - 248), 1))
    return np.concatenate([codes.reshape(-1), tops]).astype(np.uint8)


def table_entry(table: Array, other: Array, step: int) -> int:
    """Return the table index for `step`: the step itself, or the last entry where both tables have reached 1.

    Raises:
        IndexError: the tables end before `step` and have not reached 1.
    """
    last = len(table) - 1
    if step <= last:
        return step
    if last >= 1 and table[last] == 1.0 and other[last] == 1.0:
        return last
    raise IndexError(f"step {step} lies past tables of {len(table)} entries")


def adamw(
    master: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array,
    step: int,
    hyper: Hyper,
    tables: tuple[Array, Array],
    scale: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Make one AdamW step over arrays of one shape.

    Args:
        master: float32, or bf16 bits in uint16, which are then the weight as well.
        exp_avg, exp_avg_sq: float32, or bf16 bits in uint16, or FP8 in uint8 (`fp8_at_random`: all arrays then have one
            dimension, and begin where a block does), each of its own dtype.
        grad: float32, float16, or bf16 bits in uint16.
        step: the step being taken, 1 for the first.
        hyper, tables: see `hostward.kernels.cpu.adamw.bias_tables`.
        scale: factor of the gradients, rounded to float32.

    Returns:
        New (master, exp_avg, exp_avg_sq) in the dtypes given, NaNs canonical.

    Raises:
        IndexError: see `table_entry`.
    """
    f32 = np.float32
    entry = table_entry(tables[0], tables[1], step)
    with np.errstate(all="ignore"):
        b1, omb1 = f32(hyper.beta1), f32(1.0 - hyper.beta1)
        b2, omb2 = f32(hyper.beta2), f32(1.0 - hyper.beta2)
        eps, decay = f32(hyper.eps), f32(1.0 - hyper.lr * hyper.weight_decay)
        step_size, isb2 = f32(hyper.lr / tables[0][entry]), f32(tables[1][entry])
        g = float_of(grad) * f32(scale)
        m = (b1 * _moment(exp_avg, g.size, signed=True)) + (omb1 * g)
        v = (b2 * _moment(exp_avg_sq, g.size, signed=False)) + ((omb2 * g) * g)
        d = (np.sqrt(v) * isb2) + eps
        p = (float_of(master) * decay) - (step_size * (m / d))
    p, m, v = canonical(p), canonical(m), canonical(v)
    first, second = rounding_bits(m, v, step)
    stored = _stored(exp_avg.dtype, m, first, signed=True), _stored(exp_avg_sq.dtype, v, second, signed=False)
    new = bf16_at_random(p, weight_random(p, m, v, step)) if master.dtype == np.uint16 else p
    return new, stored[0], stored[1]


def _moment(moment: Array, n: int, *, signed: bool) -> Array:
    return float_of_fp8(moment, signed=signed)[:n] if moment.dtype == np.uint8 else float_of(moment)


def _stored(dtype: Any, moment: Array, random: Array, *, signed: bool) -> Array:
    if dtype == np.uint8:
        return fp8_at_random(moment, random, signed=signed)
    return bf16_at_random(moment, random) if dtype == np.uint16 else moment


def accumulate(total: Array | None, grad: Array) -> Array:
    """Accumulate the gradient of one more microbatch.

    Args:
        total: float32, the gradient accumulated so far; None for the first microbatch.
        grad: float32, float16, or bf16 bits in uint16, of the same shape.

    Returns:
        float32, one addition per element, NaNs canonical.
    """
    with np.errstate(all="ignore"):
        return canonical(float_of(grad) if total is None else total + float_of(grad))


def norm_partials(grad: Array) -> tuple[Array, Array]:
    """Return the partial squared norms of a flat gradient, one per chunk of 4,096 elements.

    Args:
        grad: float32, float16, or bf16 bits in uint16, 1-dimensional.

    Returns:
        (sums int64, exponents int32). exponents[c] is the smallest E with |g| < 2**E in chunk c, or ALL_ZERO, or
        NOT_FINITE; sums[c] is the sum of floor((g * 2**-E)**2 * 2**50).
    """
    chunks = -(-grad.size // NORM_CHUNK)
    sums, exponents = np.zeros(chunks, dtype=np.int64), np.full(chunks, ALL_ZERO, dtype=np.int32)
    for c in range(chunks):
        values = float_of(grad[c * NORM_CHUNK : (c + 1) * NORM_CHUNK]).astype(np.float64)
        if not np.isfinite(values).all():
            exponents[c] = NOT_FINITE
            continue
        largest = float(np.abs(values).max())
        if largest == 0.0:
            continue
        exponents[c] = math.frexp(largest)[1]
        scaled = np.ldexp(values, -int(exponents[c]))
        sums[c] = np.floor(np.ldexp(scaled * scaled, 50)).astype(np.int64).sum()
    return sums, exponents


def norm_from_partials(sums: Array, exponents: Array) -> tuple[np.float32, bool]:
    """Return the norm of the gradients that the partials cover, in any order.

    Args:
        sums: int64 [chunks].
        exponents: int32 [chunks].

    Returns:
        (norm, finite): the norm in float32, infinite where it exceeds float32; `finite` is False, and the norm
        infinite, where a gradient is a NaN or an infinity.
    """
    exponent = int(exponents.max()) if exponents.size else ALL_ZERO
    used = exponents != ALL_ZERO
    if exponent == NOT_FINITE or not bool(used.any()):
        return norm_of_total(0, 0, exponent)
    shift = np.minimum(2 * (exponent - exponents[used].astype(np.int64)), 63)
    aligned = sums[used].astype(np.int64) >> shift
    return norm_of_total(int((aligned >> 31).sum()), int((aligned & (2**31 - 1)).sum()), exponent)


def norm_of_total(high: int, low: int, exponent: int) -> tuple[np.float32, bool]:
    """Return the norm from the sum of all squares on the scale of the largest exponent: high * 2**31 + low."""
    if exponent == NOT_FINITE:
        return np.float32(np.inf), False
    if exponent == ALL_ZERO:
        return np.float32(0.0), True
    total = np.float64(high) * np.float64(2.0**31) + np.float64(low)
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(np.ldexp(np.sqrt(total), exponent - 25)), True


def clip_scale(norm: float, max_norm: float | None, inv_scale: float = 1.0) -> np.float32:
    """Return the factor of every gradient: min(1, max_norm / (norm * inv_scale + 1e-6)) * inv_scale.

    Each operation is rounded to float32.

    Args:
        norm: norm of the gradients as they are, still multiplied by the loss scale.
        max_norm: the limit, or None for no clipping.
        inv_scale: one over the loss scale.
    """
    f32 = np.float32
    with np.errstate(over="ignore"):
        if max_norm is None:
            return f32(inv_scale)
        coef = f32(max_norm) / (f32(norm) * f32(inv_scale) + f32(1e-6))
        return f32(min(f32(1.0), coef) * f32(inv_scale))
