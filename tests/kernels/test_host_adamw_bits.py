"""The native AdamW equals the numpy definition in every bit, on every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hostward.kernels import reference
from hostward.kernels.cpu.adamw import AdamWRange, AdamWTask, adamw_step, bias_tables, hyper_array
from hostward.kernels.cpu.library import Isa

from native_cases import (
    FP8_MOMENTS,
    GRADS,
    HYPER,
    ISAS,
    LAYOUTS,
    MOMENTS,
    TABLES,
    Case,
    as_grad,
    as_main,
    as_moment,
    native_run,
    random_floats,
    run_step,
    stored,
)

PAIRS = [(grad, layout) for grad in GRADS for layout in LAYOUTS]
# Every gradient, layout and format of moments meets every other one once.
SHORT_MOMENTS = [
    (grad, layout, moments[(g + k) % len(moments)])
    for g, grad in enumerate(GRADS)
    for k, layout in enumerate(LAYOUTS)
    for moments in (MOMENTS[1:], FP8_MOMENTS)
]


@pytest.mark.parametrize(("grad", "layout"), PAIRS)
def test_t46_every_length_to_257_on_every_isa(grad: str, layout: str) -> None:
    rng = np.random.default_rng(1)
    for n in range(258):
        case = Case.random(rng, n, grad, layout)
        expected = case.expected()
        for isa in ISAS:
            run = run_step(case, isa=isa)
            run.assert_equal(expected, (n, isa))
            assert run.counts.tolist() == [1]


@pytest.mark.parametrize(("grad", "layout", "moments"), SHORT_MOMENTS)
def test_short_moments_at_every_length_and_odd_alignment(grad: str, layout: str, moments: tuple[str, str]) -> None:
    rng = np.random.default_rng(10)
    for n in (*range(0, 258, 5), 127, 128, 129, 256, 640):
        # An infinity is the largest number of its block, and leaves nothing of the others.
        case = Case.random(rng, n, grad, layout, special=0.1 if n % 2 else 0.002, moments=moments)
        expected = case.expected(step=n + 1)
        for isa in ISAS:
            shifts = tuple(int(s) for s in rng.integers(0, 33, 5))
            run_step(case, isa=isa, count=n, shifts=shifts).assert_equal(expected, (n, isa, shifts))


@pytest.mark.parametrize(("grad", "layout"), PAIRS)
def test_t46_alignment_of_an_element_only(grad: str, layout: str) -> None:
    rng = np.random.default_rng(2)
    for isa in ISAS:
        for _ in range(25):
            case = Case.random(rng, int(rng.integers(1, 700)), grad, layout)
            shifts = tuple(int(s) for s in rng.integers(0, 33, 5))
            run_step(case, isa=isa, shifts=shifts).assert_equal(case.expected(), (isa, shifts))


@pytest.mark.parametrize(
    ("grad", "layout", "moments"),
    [
        ("bf16", "split", MOMENTS[0]),
        ("bf16", "split", MOMENTS[1]),
        ("fp32", "fp32", MOMENTS[0]),
        ("fp32", "fp32", MOMENTS[2]),
        ("fp16", "fp16", MOMENTS[0]),
        ("bf16", "bf16", MOMENTS[0]),
        ("bf16", "rounded", MOMENTS[0]),
        ("bf16", "rounded", MOMENTS[1]),
        ("bf16", "rounded", FP8_MOMENTS[0]),
        ("fp32", "split", FP8_MOMENTS[3]),
    ],
)
def test_threads_and_ranges_do_not_change_a_bit(grad: str, layout: str, moments: tuple[str, str]) -> None:
    rng = np.random.default_rng(3)
    n = 5 * 65536 + 77
    case = Case.random(rng, n, grad, layout, special=0.001, moments=moments)
    expected = case.expected(scale=0.37)
    scale = np.array([0.37], dtype=np.float32)
    cuts: tuple[int, ...] = (1, 1, 100, 65535, 70000, 200001)
    if "fp8" in moments:  # ranges begin where blocks do
        cuts = (128, 128, 256, 65536, 70016, 200064)
    for isa in ISAS:
        for threads in range(1, 9):
            run = run_step(case, isa=isa, threads=threads, cuts=cuts if threads % 2 else (), scale=scale)
            run.assert_equal(expected, (isa, threads))


def as_any_moment(values: Any, dtype: str) -> Any:
    """A moment of these bits; of an FP8 one any bytes for the elements, and any for the block."""
    if dtype != "fp8":
        return as_moment(values, dtype)
    n, words = values.size, values.view(np.uint32)
    return np.concatenate([words, np.zeros(128 - n, np.uint32), words[-1:] >> np.uint32(8)]).astype(np.uint8)


@pytest.mark.parametrize("lowest", [-4, -14, -15, -16, -17])
def test_fp8_blocks_with_one_number_near_the_last_binade(lowest: int) -> None:
    """Blocks of larger numbers are stored by one subtraction, which is wrong for what is below the last binade.

    Without memory of what was, exp_avg is the gradient and exp_avg_sq its square.
    """
    rng = np.random.default_rng(16 - lowest)
    blocks = 2000
    mantissas = rng.integers(0, 0x700000, (blocks, 128))
    exponents = rng.integers(lowest + 1, 1, (blocks, 128))
    exponents[:, 0] = 0
    exponents[:, 77], mantissas[:, 77] = lowest, rng.integers(0, 1 << 23, blocks)
    bits = (exponents + 127 << 23) + mantissas + (rng.integers(0, 2, (blocks, 128)) << 31)
    grad, zero = bits.reshape(-1).astype(np.uint32).view(np.float32), np.zeros(blocks * 128, dtype=np.float32)
    hyper = reference.Hyper(lr=1e-3, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e-8)
    moments = as_moment(zero, "fp8"), as_moment(zero, "fp8", signed=False)
    case = Case("fp32", "rounded", grad, as_main(grad, "rounded"), *moments)
    expected = case.expected(hyper=hyper)
    for isa in ISAS:
        run_step(case, isa=isa, hyper=hyper).assert_equal(expected, isa)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_bits_at_all(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    words = st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n)
    values = [np.array(data.draw(words), dtype=np.uint32).view(np.float32) for _ in range(4)]
    grad, layout = data.draw(st.sampled_from(PAIRS))
    step = data.draw(st.integers(1, 200_000))
    scale = data.draw(st.floats(width=32, allow_nan=True))
    first, second = (
        as_any_moment(v, d) for v, d in zip(values[2:], data.draw(st.sampled_from(MOMENTS + FP8_MOMENTS)), strict=True)
    )
    master = as_main(reference.canonical(values[1]), layout)
    case = Case(grad, layout, as_grad(values[0], grad), master, first, second)
    for isa in ISAS:
        factor = np.array([scale], dtype=np.float32)
        run = run_step(case, isa=isa, count=step - 1, scale=factor)
        run.assert_equal(case.expected(step, scale), isa)
        assert run.counts.tolist() == [step]


@pytest.mark.parametrize(
    ("layout", "moments"),
    [*((k, MOMENTS[0]) for k in LAYOUTS), *((k, MOMENTS[1]) for k in ("split", "rounded")), ("split", FP8_MOMENTS[0])],
)
def test_a_thousand_random_steps(layout: str, moments: tuple[str, str]) -> None:
    rng = np.random.default_rng(4)
    n = 513
    master = as_main((rng.standard_normal(n) * np.exp2(rng.integers(-140, 3, n))).astype(np.float32), layout)
    first, second = (as_moment(np.zeros(n, dtype=np.float32), dtype, signed=not i) for i, dtype in enumerate(moments))
    grads = [
        as_grad((rng.standard_normal(n) * 10.0 ** rng.integers(-30, 2)).astype(np.float32), "bf16") for _ in range(8)
    ]
    runs = []
    for isa in ISAS:
        case = Case("bf16", layout, grads[0], master, first, second)
        runs.append(native_run(case, isa=isa, threads=2, cuts=(128, 256)))
    p, m, v = master, first, second
    for step in range(1, 1001):
        grad = grads[int(rng.integers(8))]
        p, m, v = reference.adamw(p, m, v, grad, step, HYPER, TABLES)
        for run in runs:
            run.operands["grad"].values[:] = grad
            adamw_step(run.task)
    for isa, run in zip(ISAS, runs, strict=True):
        run.assert_equal({"exp_avg": m, "exp_avg_sq": v, **stored(p, layout)}, isa)
        assert run.counts.tolist() == [1000] * 3


def test_many_tiny_ranges_at_their_own_steps() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 5, 5000)
    n = int(lengths.sum())
    case = Case.random(rng, n, "bf16", "split", special=0.01)
    cuts = tuple(int(c) for c in np.cumsum(lengths)[:-1])
    run = native_run(case, isa=Isa.BEST, threads=4, cuts=cuts)
    steps = rng.integers(1, 60_000, lengths.size)
    run.counts[:] = steps - 1
    adamw_step(run.task)
    edges = [0, *cuts, n]
    for i in rng.choice(lengths.size, 400, replace=False):
        part = slice(edges[i], edges[i + 1])
        p, m, v = reference.adamw(
            case.master[part], case.exp_avg[part], case.exp_avg_sq[part], case.grad[part], int(steps[i]), HYPER, TABLES
        )
        weight, remainder = reference.split_master(p)
        for name, values in (("exp_avg", m), ("exp_avg_sq", v), ("weight", weight), ("remainder", remainder)):
            assert run.operands[name].values[part].tobytes() == values.tobytes()
    assert (run.counts == steps).all()


def test_work_is_distributed_by_whole_blocks_of_fp8_moments() -> None:
    """Ranges end within blocks, and pieces of 65,536 elements would begin within them."""
    rng = np.random.default_rng(15)
    lengths = [70_001, 3, 90_000, 129, 65_535]
    cases = [Case.random(rng, n, "bf16", "split", special=0.001, moments=FP8_MOMENTS[0]) for n in lengths]
    parts = [reference.fp8_parts(case.exp_avg) + reference.fp8_parts(case.exp_avg_sq) for case in cases]
    first, second = (
        np.concatenate([np.concatenate([p[i].reshape(-1) for p in parts]), *(p[i + 1] for p in parts)]) for i in (0, 2)
    )
    blocks = np.cumsum([0, *(len(p[1]) for p in parts)])
    starts = [stored(case.master, "split") for case in cases]
    counts = np.zeros(len(cases), dtype=np.int64)
    ranges = [
        AdamWRange(int(128 * block), n, case.grad, start["weight"], counts[i : i + 1])
        for i, (block, n, case, start) in enumerate(zip(blocks, lengths, cases, starts, strict=False))
    ]
    remainder = np.zeros(128 * int(blocks[-1]), dtype=np.int16)
    for r, start in zip(ranges, starts, strict=True):
        remainder[r.offset : r.offset + r.length] = start["remainder"]
    numbers = hyper_array(HYPER.lr, HYPER.weight_decay, HYPER.beta1, HYPER.beta2, HYPER.eps)
    moments = {"exp_avg": first, "exp_avg_sq": second, "remainder": remainder}
    adamw_step(AdamWTask(ranges, **moments, hyper=numbers, tables=TABLES, threads=4))
    for i, (case, start) in enumerate(zip(cases, starts, strict=True)):
        expected, span = case.expected(), slice(blocks[i], blocks[i + 1])
        assert start["weight"].tobytes() == expected["weight"].tobytes()
        for name in ("exp_avg", "exp_avg_sq"):
            codes, scales = reference.fp8_parts(moments[name])
            assert codes[span].tobytes() + scales[span].tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_16_bit_gradient_is_converted_exactly(dtype: str) -> None:
    # With beta1 = 0 the new exp_avg is the gradient itself.
    hyper = reference.Hyper(lr=0.0, weight_decay=0.0, beta1=0.0, beta2=0.95, eps=1e-8)
    bits = np.arange(65536, dtype=np.uint16)
    grad = bits if dtype == "bf16" else bits.view(np.float16)
    zero = np.zeros(65536, dtype=np.float32)
    case = Case(dtype, "fp32", grad, zero, zero, zero)
    with np.errstate(invalid="ignore"):
        expected = reference.canonical(reference.float_of(grad) + np.float32(0.0))
    for isa in ISAS:
        run_step(case, isa=isa, hyper=hyper).assert_equal({"exp_avg": expected}, isa)


@pytest.mark.parametrize("layout", ["split", "bf16", "fp16"])
def test_every_tie_between_16_bit_weights(layout: str) -> None:
    # With lr = 0 the master stays, so that the weight is the rounding alone.
    hyper = reference.Hyper(lr=0.0, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8)
    if layout == "fp16":
        low = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
        high = np.append(low[1:], np.float32(65536.0))
        tie = ((low.astype(np.float64) + high) / 2).astype(np.float32)
    else:
        tie = ((np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000)).view(np.float32)
    bits = tie.view(np.uint32)
    positive = np.concatenate([bits - np.uint32(1), bits, bits + np.uint32(1)])
    master = np.concatenate([positive, positive | np.uint32(0x80000000)]).view(np.float32)
    zero = np.zeros(master.size, dtype=np.float32)
    case = Case("fp32", layout, zero, master, zero, zero)
    assert case.expected(hyper=hyper)["exp_avg"].tobytes() == zero.tobytes()
    for isa in ISAS:
        run_step(case, isa=isa, hyper=hyper).assert_equal(stored(master, layout), isa)


@pytest.mark.parametrize(("dtype", "off"), [("bf16", 0.06), ("fp8", 0.6)])
def test_short_moments_are_rounded_without_bias_and_never_stall(dtype: str, off: float) -> None:
    """To nearest, exp_avg_sq with beta2 = 0.999 would stay where a change is below half a unit."""
    hyper = reference.Hyper(lr=0.0, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8)
    tables = bias_tables(hyper.beta1, hyper.beta2, 5000)
    rng, n = np.random.default_rng(12), 4096
    p, m, v = np.zeros(n, np.float32), *(as_moment(np.zeros(n, np.float32), dtype) for _ in range(2))
    exact_m, exact_v = np.zeros(n), np.zeros(n)
    for step in range(1, 4001):
        grad = as_moment((rng.standard_normal(n) * 1e-3).astype(np.float32), "bf16")
        p, m, v = reference.adamw(p, m, v, grad, step, hyper, tables)
        g = reference.float_of(grad).astype(np.float64)
        exact_m, exact_v = 0.9 * exact_m + 0.1 * g, 0.999 * exact_v + 0.001 * g * g
    if dtype == "fp8":
        m, v = reference.float_of_fp8(m, signed=True), reference.float_of_fp8(v, signed=False)
    else:
        m, v = reference.float_of(m), reference.float_of(v)
    ratio = v / exact_v
    assert abs(ratio.mean() - 1.0) < 0.05 * off
    assert ratio.std() < off
    error = m - exact_m
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(n)
    assert error.std() < off / 6 * exact_m.std()


@pytest.mark.parametrize("signed", [True, False])
def test_every_byte_of_an_fp8_moment_is_a_number_that_rounding_leaves_as_it_is(signed: bool) -> None:
    """Moments are so read and written without loss, whatever block they are in, and in bf16 too."""
    for top in (32, 33, 127, 254, 255):
        largest, codes = (127 if signed else 255), np.arange(256)
        if top == 255:  # beyond the largest number are an infinity and one NaN, and no more
            largest -= 7
            codes = codes[np.isin(codes & 127 if signed else codes, [*range(largest + 1), largest + 4])]
        blocks = np.resize(codes, (3, 127))
        filled = np.concatenate([blocks, np.full((3, 1), largest)], axis=1)
        moment = np.concatenate([filled.reshape(-1), [top] * 3]).astype(np.uint8)
        values = reference.float_of_fp8(moment, signed=signed)
        assert not (values.view(np.uint32) & np.uint32(0xFFFF)).any()
        for random in (0, 0xFFFF):
            kept = reference.fp8_at_random(values, np.full(3 * 128, random, np.uint32), signed=signed)
            assert kept.tobytes() == moment.tobytes()


def test_a_positive_exp_avg_sq_never_becomes_zero_and_a_small_exp_avg_is_right_in_the_mean() -> None:
    rng = np.random.default_rng(14)
    values = np.concatenate([[1.0], 10.0 ** rng.uniform(-30, -1, 127)]).astype(np.float32)
    random = rng.integers(0, 2**16, (4096, 128)).astype(np.uint32)
    second = np.array(
        [reference.float_of_fp8(reference.fp8_at_random(values, r, signed=False), signed=False) for r in random]
    )
    assert (second >= np.float32(1.125 * 2.0**-31)).all()
    first = np.array(
        [reference.float_of_fp8(reference.fp8_at_random(values, r, signed=True), signed=True) for r in random]
    )
    np.testing.assert_allclose(first.mean(axis=0), values, rtol=0.01, atol=2.0**-17 * 0.05)


def test_a_weight_without_main_weight_is_right_in_the_mean_and_stays_where_nothing_changes_it() -> None:
    """To nearest it would stall: each step changes it by a fiftieth of its unit."""
    still = reference.Hyper(lr=0.0, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8)
    moving = reference.Hyper(lr=1e-4, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8)
    rng, n = np.random.default_rng(13), 4096
    start = as_moment(rng.uniform(1.01, 1.99, n).astype(np.float32), "bf16")
    p, exact = start, reference.float_of(start)
    zero = np.zeros(n, np.float32)
    moments = exact_moments = zero, zero
    grad = as_moment(rng.uniform(0.5, 1.5, n).astype(np.float32), "bf16")  # a constant one: m / sqrt(v) is 1
    for step in range(1, 201):
        kept, *moments = reference.adamw(p, *moments, grad, step, still, TABLES)
        assert kept.tobytes() == p.tobytes()
        moments = exact_moments
        p, *moments = reference.adamw(p, *moments, grad, step, moving, TABLES)
        exact, *exact_moments = reference.adamw(exact, *exact_moments, grad, step, moving, TABLES)
    error = reference.float_of(p).astype(np.float64) - exact
    assert (reference.float_of(start) - exact).mean() > 0.019
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(n)
    # One parameter at a time, whatever its neighbours are: each has random bits of its own.
    assert abs(np.corrcoef(error[:-1], error[1:])[0, 1]) < 0.06


def test_infinite_and_nan_moments_stay_what_they_are_in_bf16() -> None:
    given = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x00000000, 0x80000000], np.uint32).view(np.float32)
    for random in (0, 0xFFFF):
        stored = reference.bf16_at_random(given, np.full(given.size, random, np.uint32))
        assert stored.tolist() == [0x7F80, 0xFF80, 0x7FC0, 0x0000, 0x8000]


def test_split_master_is_lossless_up_to_infinity() -> None:
    master = np.concatenate(
        [random_floats(np.random.default_rng(6), 10_000, 0.5), np.array([3.4028235e38, -3.4028235e38], np.float32)]
    )
    master = reference.canonical(master)
    weight, remainder = reference.split_master(master)
    assert reference.join_master(weight, remainder).tobytes() == master.tobytes()
    assert weight[-2:].tolist() == [0x7F80, 0xFF80]


def test_tables_that_have_reached_one_serve_every_later_step() -> None:
    rng = np.random.default_rng(7)
    case = Case.random(rng, 100, "bf16", "split")
    assert TABLES[0][-1] == TABLES[1][-1] == 1.0
    for isa in ISAS:
        run_step(case, isa=isa, count=10**12).assert_equal(case.expected(10**12 + 1), isa)


def test_flush_to_zero_of_the_caller_neither_acts_nor_is_lost() -> None:
    rng = np.random.default_rng(8)
    n = 3 * 65536
    tiny = (rng.standard_normal(n) * 1e-39).astype(np.float32)
    case = Case("fp32", "fp32", tiny, tiny, tiny, np.abs(tiny))
    expected = case.expected()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        run = run_step(case, isa=Isa.BEST, threads=3)
        still_flushes = float(torch.tensor([1e-39]) * torch.tensor([0.5])) == 0.0
    finally:
        torch.set_flush_denormal(False)
    run.assert_equal(expected)
    assert still_flushes


def test_torch_tensors_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(9)
    case = Case.random(rng, 1000, "bf16", "split", special=0.0)
    expected = case.expected()
    weight, remainder = reference.split_master(case.master)
    tensors = {
        "weight": torch.from_numpy(weight.view(np.int16).copy()).view(torch.bfloat16),
        "remainder": torch.from_numpy(remainder.copy()),
        "exp_avg": torch.from_numpy(case.exp_avg.copy()),
        "exp_avg_sq": torch.from_numpy(case.exp_avg_sq.copy()),
    }
    grad = torch.from_numpy(case.grad.view(np.int16).copy()).view(torch.bfloat16)
    count = torch.zeros((), dtype=torch.int64)
    task = AdamWTask(
        [AdamWRange(0, 1000, grad, tensors["weight"], count)],
        exp_avg=tensors["exp_avg"],
        exp_avg_sq=tensors["exp_avg_sq"],
        remainder=tensors["remainder"],
        hyper=hyper_array(HYPER.lr, HYPER.weight_decay, HYPER.beta1, HYPER.beta2, HYPER.eps),
        tables=TABLES,
    )
    adamw_step(task)
    assert count.item() == 1
    for name, tensor in tensors.items():
        integers = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        assert integers.numpy().tobytes() == expected[name].tobytes(), name
