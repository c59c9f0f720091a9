"""Define the device code of the AdamW step, imported at the first step since Triton is slow to import.

Every operation is one correctly rounded IEEE fp32 operation; the launch option of `hostward.kernels.cuda.adamw` keeps
the compiler from fusing two into one. Moments, weights and remainders are loaded and stored as integers: the bits of a
NaN must not be left to the compiler.
"""

# Compile-time parameters are in capitals, and a conditional expression would not be resolved when compiling.
# ruff: noqa: N803, SIM108
# Triton's decorator is untyped, and the parameters of device functions are device values without Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
FP8 = tl.constexpr(2)  # of moments, which are never fp16
FP8_BLOCK = tl.constexpr(128)
MASTER_SPLIT = tl.constexpr(1)
MASTER_PLAIN = tl.constexpr(2)
MASTER_ROUNDED = tl.constexpr(3)  # the bf16 weight; 0 is the fp32 weight
ERROR_TABLE = tl.constexpr(5)  # HOSTWARD_ERROR_TABLE of native/include/hostward.h


@triton.jit
def _table_entry(count, bc1, inv_sqrt_bc2, table_length):
    """Return the table index for the step after `count`, and whether the tables reach that far or have reached 1."""
    last = table_length - 1
    step = count + 1
    saturated = (last >= 1) & (tl.load(bc1 + last) == 1.0) & (tl.load(inv_sqrt_bc2 + last) == 1.0)
    legal = (count >= 0) & ((step <= last) | saturated)
    return tl.minimum(tl.maximum(step, 0), last), legal


@triton.jit
def _pointer(address, first, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr):
    """Return a pointer to element `first` of the array at a 64-bit address; ALIGNED promises 16-byte alignment."""
    pointer = (address + first * ITEM_BYTES).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(
    address, first, inside, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    pointer = _pointer(address, first, ALIGNED, DTYPE, ITEM_BYTES)
    if ALIGNED:
        value = tl.load(pointer + lanes)
    else:
        value = tl.load(pointer + lanes, mask=inside, other=0)
    return value


@triton.jit
def _store(
    address,
    first,
    value,
    inside,
    ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    pointer = _pointer(address, first, ALIGNED, DTYPE, ITEM_BYTES)
    if ALIGNED:
        tl.store(pointer + lanes, value)
    else:
        tl.store(pointer + lanes, value, mask=inside)


@triton.jit
def load_as_fp32(address, first, inside, ALIGNED: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK values of dtype CODE (0 fp32, 1 bf16, 2 fp16) from element `first` on, converted exactly to fp32."""
    if CODE == FP32:
        value = _load(address, first, inside, ALIGNED, tl.float32, 4, BLOCK)
    elif CODE == FP16:
        value = _load(address, first, inside, ALIGNED, tl.int16, 2, BLOCK).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = _load(address, first, inside, ALIGNED, tl.int16, 2, BLOCK).to(tl.int32) << 16
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def _canonical_bits(value):
    """Return the bits of fp32 values with one NaN for all, since host and device make different NaNs."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@triton.jit
def _weight_bits(bits, WEIGHT: tl.constexpr):
    """Return the 16-bit weight for main weight bits that hold no NaN but 0x7fc00000."""
    if WEIGHT == FP16:
        half = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
        # Not `bits == 0x7FC00000`: the compiler would put that constant into the conversion, see 0x7E00 come out, and
        # drop the choice; the device's own conversion makes 0x7FFF of a NaN.
        weight = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, tl.full((), 0x7E00, tl.int16), half)
    else:
        # Ties away from zero: the low half, read as signed, is then exactly main weight minus weight.
        weight = ((bits + 0x8000) >> 16).to(tl.int16)
    return weight


@triton.jit
def _mix(value):
    """Return a one-to-one function of uint32 values, as `hostward.kernels.reference.mix`."""
    value = (value ^ (value >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    value = (value ^ (value >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return value ^ (value >> 16)


@triton.jit
def _of_lanes(of_blocks, LANES: tl.constexpr):
    """Return for each lane the value of its FP8 block, from one for each of LANES // 128 blocks."""
    blocks: tl.constexpr = LANES // FP8_BLOCK
    return tl.reshape(tl.broadcast_to(tl.expand_dims(of_blocks, 1), (blocks, FP8_BLOCK)), (LANES,))


@triton.jit
def _scale_pointers(scales, first, LANES: tl.constexpr):
    """Return pointers to the bytes of the FP8 blocks from element `first` on, with which a block begins."""
    return (scales + first // FP8_BLOCK).to(tl.pointer_type(tl.uint8)) + tl.arange(0, LANES // FP8_BLOCK)


@triton.jit
def _load_moment(
    address,
    scales,
    first,
    length,
    inside,
    ALIGNED: tl.constexpr,
    CODE: tl.constexpr,
    SIGNED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Load moments, converted exactly to fp32. `scales`: address of the byte of block 0 of an FP8 moment."""
    if CODE == FP8:
        code = _load(address, first, inside, ALIGNED, tl.uint8, 1, LANES).to(tl.int32)
        begins = first + FP8_BLOCK * tl.arange(0, LANES // FP8_BLOCK)
        tops = tl.load(_scale_pointers(scales, first, LANES), mask=begins < length, other=0).to(tl.int32)
        top = _of_lanes(tl.maximum(tops, 32), LANES)
        if SIGNED:
            magnitude = code & 127
            small = magnitude.to(tl.float32) * ((top - 17) << 23).to(tl.float32, bitcast=True)
            bits = tl.where(magnitude < 8, small.to(tl.int32, bitcast=True), (magnitude + 8 * top - 120) << 20)
            bits = bits | ((code & 128) << 24)
        else:
            bits = tl.where(code == 0, 0, (code + 8 * top - 248) << 20)
        value = bits.to(tl.float32, bitcast=True)
    elif CODE == BF16:
        value = load_as_fp32(address, first, inside, ALIGNED, BF16, LANES)
    else:
        value = _load(address, first, inside, ALIGNED, tl.int32, 4, LANES).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _block_tops(rounded, inside, LANES: tl.constexpr):
    """Return the largest exponent in each FP8 block, at least 32, from magnitudes as uint32 bits."""
    largest = tl.where(inside, rounded, 0).to(tl.int32, bitcast=True)  # the sign bit is not set
    tops = tl.max(tl.reshape(largest, (LANES // FP8_BLOCK, FP8_BLOCK)), 1) >> 23
    return tl.maximum(tops, 32)


@triton.jit
def _fp8_code(bits, random, top, SIGNED: tl.constexpr):
    """Return the bytes for moments given by their fp32 bits (uint32), as `hostward.kernels.reference.fp8_at_random`."""
    magnitude = bits & 0x7FFFFFFF
    if SIGNED:
        field = (magnitude >> 23).to(tl.int32)
        mantissa = (magnitude & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0).to(tl.uint32)
        above = tl.maximum(field, 1) + 14 - top
        lacking = tl.minimum(tl.maximum(-above, 0), 24).to(tl.uint32)
        units = (((mantissa >> lacking) + random) >> 20).to(tl.int32)
        code = 8 * tl.maximum(above, 0) + units + ((bits >> 31) << 7).to(tl.int32)
    else:
        found = ((magnitude + random) >> 20).to(tl.int32)
        code = tl.where(found == 0, 0, tl.maximum(found - (8 * top - 248), 1))
    return code


@triton.jit
def _store_moment(
    address,
    scales,
    first,
    length,
    bits,
    random,
    inside,
    ALIGNED: tl.constexpr,
    CODE: tl.constexpr,
    SIGNED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store moments given by their fp32 bits (int32); others than fp32 are rounded up by `random`, uint32 below 2**16.

    Whatever has loaded the scales of a block has given it a value before the largest of them is known.
    """
    if CODE == FP8:
        unsigned = bits.to(tl.uint32, bitcast=True)
        cut = (random << 4) + 8
        tops = _block_tops((unsigned & 0x7FFFFFFF) + cut, inside, LANES)
        code = _fp8_code(unsigned, cut, _of_lanes(tops, LANES), SIGNED)
        _store(address, first, code.to(tl.uint8), inside, ALIGNED, tl.uint8, 1, LANES)
        begins = first + FP8_BLOCK * tl.arange(0, LANES // FP8_BLOCK)
        tl.store(_scale_pointers(scales, first, LANES), tops.to(tl.uint8), mask=begins < length)
    elif CODE == BF16:
        rounded = (bits.to(tl.uint32, bitcast=True) + random) >> 16
        _store(address, first, rounded.to(tl.int16), inside, ALIGNED, tl.int16, 2, LANES)
    else:
        _store(address, first, bits, inside, ALIGNED, tl.int32, 4, LANES)


@triton.jit
def _step_lanes(
    grad,
    weight,
    exp_avg,
    exp_avg_sq,
    exp_avg_scales,
    exp_avg_sq_scales,
    extra,
    first,
    length,
    scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    decay,
    step_size,
    inv_sqrt_bc2,
    step_key,
    ALIGNED: tl.constexpr,
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    MASTER: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    LANES: tl.constexpr,
):
    """Step elements [first, first + LANES) of a range; the addresses are those of the range's element 0.

    ALIGNED says that the elements are all inside the range and that every array is 16-byte aligned.
    """
    inside = (first + tl.arange(0, LANES)) < length
    gradient = load_as_fp32(grad, first, inside, ALIGNED, GRAD, LANES)
    m = _load_moment(exp_avg, exp_avg_scales, first, length, inside, ALIGNED, EXP_AVG, True, LANES)
    v = _load_moment(exp_avg_sq, exp_avg_sq_scales, first, length, inside, ALIGNED, EXP_AVG_SQ, False, LANES)
    if MASTER == MASTER_SPLIT:
        high = _load(weight, first, inside, ALIGNED, tl.int16, 2, LANES).to(tl.int32) << 16
        bits = high + _load(extra, first, inside, ALIGNED, tl.int16, 2, LANES).to(tl.int32)
    elif MASTER == MASTER_PLAIN:
        bits = _load(extra, first, inside, ALIGNED, tl.int32, 4, LANES)
    elif MASTER == MASTER_ROUNDED:
        bits = _load(weight, first, inside, ALIGNED, tl.int16, 2, LANES).to(tl.int32) << 16
    else:
        bits = _load(weight, first, inside, ALIGNED, tl.int32, 4, LANES)
    p = bits.to(tl.float32, bitcast=True)

    g = gradient * scale
    m = (beta1 * m) + (one_minus_beta1 * g)
    v = (beta2 * v) + ((one_minus_beta2 * g) * g)
    d = (tl.sqrt_rn(v) * inv_sqrt_bc2) + eps
    p = (p * decay) - (step_size * tl.div_rn(m, d))

    p_bits = _canonical_bits(p)
    m_bits, v_bits = _canonical_bits(m), _canonical_bits(v)
    random = step_key  # not used where nothing is rounded at random
    if (EXP_AVG != FP32) | (EXP_AVG_SQ != FP32) | (MASTER == MASTER_ROUNDED):
        both = v_bits.to(tl.uint32, bitcast=True) * tl.full((), 0x9E3779B1, tl.uint32)
        random = _mix((both + m_bits.to(tl.uint32, bitcast=True)) ^ step_key)
    _store_moment(
        exp_avg, exp_avg_scales, first, length, m_bits, random & 0xFFFF, inside, ALIGNED, EXP_AVG, True, LANES
    )  # fmt: skip
    _store_moment(
        exp_avg_sq, exp_avg_sq_scales, first, length, v_bits, random >> 16, inside, ALIGNED, EXP_AVG_SQ, False, LANES
    )  # fmt: skip
    if MASTER == MASTER_SPLIT:
        _store(weight, first, _weight_bits(p_bits, WEIGHT), inside, ALIGNED, tl.int16, 2, LANES)
        _store(extra, first, p_bits.to(tl.int16), inside, ALIGNED, tl.int16, 2, LANES)
    elif MASTER == MASTER_PLAIN:
        _store(weight, first, _weight_bits(p_bits, WEIGHT), inside, ALIGNED, tl.int16, 2, LANES)
        _store(extra, first, p_bits, inside, ALIGNED, tl.int32, 4, LANES)
    elif MASTER == MASTER_ROUNDED:
        unsigned = p_bits.to(tl.uint32, bitcast=True)
        rounded = (unsigned + (_mix(unsigned ^ random) >> 16)) >> 16
        _store(weight, first, rounded.to(tl.int16), inside, ALIGNED, tl.int16, 2, LANES)
    else:
        _store(weight, first, p_bits, inside, ALIGNED, tl.int32, 4, LANES)


@triton.jit(do_not_specialize=["table_length", "scales"])
def step_kernel(
    table,
    blocks,
    exp_avg,
    exp_avg_sq,
    extra,
    hyper,
    bc1,
    inv_sqrt_bc2_table,
    table_length,
    scale_pointer,
    skip,
    scales,
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    MASTER: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Step the block of one row of `blocks` per program, LANES elements at a time.

    `extra` is the remainder (split), the master (plain), or exp_avg where neither exists. `scales` is the number of
    bytes before the scales of an FP8 moment.
    """
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(blocks + 2 * program).to(tl.int64) * 5
    first = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    offset = tl.load(row)
    length = tl.load(row + 1)
    grad = tl.load(row + 2)
    weight = tl.load(row + 3)
    count = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.int64)))
    entry, legal = _table_entry(count, bc1, inv_sqrt_bc2_table, table_length)
    if (tl.load(skip) == 0) & legal:
        lr = tl.load(hyper)
        beta1 = tl.load(hyper + 2)
        beta2 = tl.load(hyper + 3)
        decay = (1.0 - lr * tl.load(hyper + 1)).to(tl.float32)
        eps = tl.load(hyper + 4).to(tl.float32)
        one_minus_beta1 = (1.0 - beta1).to(tl.float32)
        one_minus_beta2 = (1.0 - beta2).to(tl.float32)
        beta1 = beta1.to(tl.float32)
        beta2 = beta2.to(tl.float32)
        step_size = (lr / tl.load(bc1 + entry)).to(tl.float32)
        inv_sqrt_bc2 = tl.load(inv_sqrt_bc2_table + entry).to(tl.float32)
        scale = tl.load(scale_pointer)
        step_key = _mix((count + 1).to(tl.uint32))
        exp_avg_address = exp_avg.to(tl.int64) + offset * (4 >> EXP_AVG)
        exp_avg_sq_address = exp_avg_sq.to(tl.int64) + offset * (4 >> EXP_AVG_SQ)
        exp_avg_scales = exp_avg.to(tl.int64) + scales + offset // FP8_BLOCK
        exp_avg_sq_scales = exp_avg_sq.to(tl.int64) + scales + offset // FP8_BLOCK
        if MASTER == MASTER_SPLIT:
            extra_address = extra.to(tl.int64) + offset * 2
        else:
            extra_address = extra.to(tl.int64) + offset * 4
        # Alignment is checked here, for each block, not promised by the caller: a false promise is a device fault.
        unaligned = (grad | weight | exp_avg_address | exp_avg_sq_address | extra_address) & 15
        if (unaligned == 0) & (first + BLOCK <= length):
            for part in range(BLOCK // LANES):
                _step_lanes(
                    grad, weight, exp_avg_address, exp_avg_sq_address, exp_avg_scales, exp_avg_sq_scales,
                    extra_address, first + part * LANES, length, scale,
                    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, inv_sqrt_bc2, step_key,
                    True, GRAD, WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ, LANES,
                )  # fmt: skip
        else:
            for part in range(BLOCK // LANES):
                if first + part * LANES < length:
                    _step_lanes(
                        grad, weight, exp_avg_address, exp_avg_sq_address, exp_avg_scales, exp_avg_sq_scales,
                        extra_address, first + part * LANES, length, scale,
                        beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, inv_sqrt_bc2, step_key,
                        False, GRAD, WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ, LANES,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["n_ranges", "table_length"])
def advance_kernel(table, n_ranges, bc1, inv_sqrt_bc2, table_length, skip, error, BLOCK: tl.constexpr):
    """Add one to the count of every range that was stepped, and report ranges beyond the tables."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    running = (index < n_ranges) & (tl.load(skip) == 0)
    counter = tl.load(table + index * 5 + 4, mask=running, other=0).to(tl.pointer_type(tl.int64))
    count = tl.load(counter, mask=running, other=0)
    _, legal = _table_entry(count, bc1, inv_sqrt_bc2, table_length)
    tl.store(counter, count + 1, mask=running & legal)
    if error is not None:
        failed = tl.sum((running & (legal == 0)).to(tl.int32), 0)
        if failed > 0:
            tl.store(error, ERROR_TABLE)
