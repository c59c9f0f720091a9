"""The native AdamW equals the numpy definition in every bit, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hostward.kernels import reference
from hostward.kernels.cpu.adamw import AdamWRange, AdamWTask, adamw_step, hyper_array
from hostward.kernels.cpu.library import Isa

from native_cases import (
    GRADS,
    HYPER,
    ISAS,
    LAYOUTS,
    TABLES,
    Case,
    as_grad,
    native_run,
    random_floats,
    run_step,
    stored,
)

PAIRS = [(grad, layout) for grad in GRADS for layout in LAYOUTS]


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


@pytest.mark.parametrize(("grad", "layout"), PAIRS)
def test_t46_alignment_of_an_element_only(grad: str, layout: str) -> None:
    rng = np.random.default_rng(2)
    for isa in ISAS:
        for _ in range(25):
            case = Case.random(rng, int(rng.integers(1, 700)), grad, layout)
            shifts = tuple(int(s) for s in rng.integers(0, 33, 5))
            run_step(case, isa=isa, shifts=shifts).assert_equal(case.expected(), (isa, shifts))


@pytest.mark.parametrize(("grad", "layout"), [("bf16", "split"), ("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")])
def test_threads_and_ranges_do_not_change_a_bit(grad: str, layout: str) -> None:
    rng = np.random.default_rng(3)
    n = 5 * 65536 + 77
    case = Case.random(rng, n, grad, layout, special=0.001)
    expected = case.expected(scale=0.37)
    scale = np.array([0.37], dtype=np.float32)
    cuts = (1, 1, 100, 65535, 70000, 200001)
    for isa in ISAS:
        for threads in range(1, 9):
            run = run_step(case, isa=isa, threads=threads, cuts=cuts if threads % 2 else (), scale=scale)
            run.assert_equal(expected, (isa, threads))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_bits_at_all(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    words = st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n)
    values = [np.array(data.draw(words), dtype=np.uint32).view(np.float32) for _ in range(4)]
    grad, layout = data.draw(st.sampled_from(PAIRS))
    step = data.draw(st.integers(1, 200_000))
    scale = data.draw(st.floats(width=32, allow_nan=True))
    case = Case(grad, layout, as_grad(values[0], grad), reference.canonical(values[1]), values[2], values[3])
    for isa in ISAS:
        factor = np.array([scale], dtype=np.float32)
        run = run_step(case, isa=isa, count=step - 1, scale=factor)
        run.assert_equal(case.expected(step, scale), isa)
        assert run.counts.tolist() == [step]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_random_steps(layout: str) -> None:
    rng = np.random.default_rng(4)
    n = 513
    master = (rng.standard_normal(n) * np.exp2(rng.integers(-140, 3, n))).astype(np.float32)
    zero = np.zeros(n, dtype=np.float32)
    grads = [
        as_grad((rng.standard_normal(n) * 10.0 ** rng.integers(-30, 2)).astype(np.float32), "bf16") for _ in range(8)
    ]
    runs = []
    for isa in ISAS:
        case = Case("bf16", layout, grads[0], master, zero, zero)
        runs.append(native_run(case, isa=isa, threads=2, cuts=(130, 131)))
    p, m, v = master, zero, zero
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
