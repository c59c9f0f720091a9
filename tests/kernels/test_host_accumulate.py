"""Gradients summed on the host equal the numpy definition and torch, and their partials those of the norm."""

from __future__ import annotations

import ctypes
import os
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hostward.errors import ConfigError, HostwardError, NativeError, PlacementError
from hostward.kernels import reference
from hostward.kernels.cpu.accumulate import AccumulateRange, AccumulateTask, NormRange, NormTask, accumulate, norm_now
from hostward.kernels.cpu.library import Isa, load
from hostward.kernels.cpu.norm import chunk_count, norm_partials
from hostward.kernels.reference import NORM_CHUNK

from native_cases import GRADS, ISAS, Guarded, as_grad, random_floats

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def bits(values: np.ndarray) -> list[int]:
    return values.view(np.uint32).tolist()


def added(
    total: Guarded, grad: Guarded, *, first: bool, isa: Isa = Isa.BEST, threads: int = 1, last: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Adds `grad` to `total` in place; the partials where `last`."""
    n = total.values.size
    sums, exponents = np.full(chunk_count(n), -1, np.int64), np.full(chunk_count(n), -1, np.int32)
    task = AccumulateTask(
        [AccumulateRange(total.values, grad.values, n)],
        first=first,
        last=last,
        sums=sums,
        exponents=exponents,
        isa=isa,
        threads=threads,
    )
    accumulate(task)
    total.assert_guards()
    grad.assert_guards()
    return sums, exponents


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", GRADS)
def test_t46_bits_equal_numpy_at_every_length_and_alignment(dtype: str, first: bool) -> None:
    rng = np.random.default_rng(3)
    for n in [*range(258), 4095, 4096, 4097, 3 * 4096 + 5]:
        start, grad = random_floats(rng, n, 0.2), as_grad(random_floats(rng, n, 0.2), dtype)
        expected = reference.accumulate(None if first else start, grad)
        partials = reference.norm_partials(expected)
        shifts = rng.integers(0, 33, 2)
        for isa in ISAS:
            total = Guarded(start, int(shifts[0]))
            actual = added(total, Guarded(grad, int(shifts[1])), first=first, isa=isa, last=True)
            assert bits(total.values) == bits(expected), (n, isa)
            assert [part.tolist() for part in actual] == [part.tolist() for part in partials], (n, isa)


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=30),
    dtype=st.sampled_from(GRADS),
    first=st.booleans(),
)
def test_sums_of_any_bits_equal_numpy(words: list[tuple[int, int]], dtype: str, first: bool) -> None:
    start, values = (np.array(column, dtype=np.uint32).view(np.float32) for column in zip(*words, strict=True))
    grad = as_grad(values, dtype)
    expected = reference.accumulate(None if first else start, grad)
    for isa in ISAS:
        total = Guarded(start)
        added(total, Guarded(grad), first=first, isa=isa)
        assert bits(total.values) == bits(expected)


@pytest.mark.parametrize("dtype", GRADS)
def test_sums_over_microbatches_equal_torch(dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    grads = [
        torch.randn(70_001, generator=generator).mul_(2.0 ** (3 * i - 9)).to(TORCH_DTYPES[dtype]) for i in range(4)
    ]
    grads[1][:3] = torch.tensor([torch.inf, 0.0, -0.0])
    expected = grads[0].float().clone()
    for grad in grads[1:]:
        expected += grad.float()
    for threads in (1, 2, 3, 4):
        total = torch.full((70_001,), torch.nan)  # what lies there before the first microbatch is not read
        sums, exponents = torch.empty(chunk_count(70_001), dtype=torch.int64), np.empty(chunk_count(70_001), np.int32)
        landing = torch.empty_like(grads[0])
        task = AccumulateTask(
            [AccumulateRange(total, landing, 70_001)], first=True, sums=sums, exponents=exponents, threads=threads
        )
        ring = [task, task.with_flags(first=False, last=False), task.with_flags(first=False, last=True)]
        for i, grad in enumerate(grads):
            landing.copy_(grad)
            accumulate(ring[0 if i == 0 else 2 if i == 3 else 1])
        assert torch.equal(total.view(torch.int32), expected.view(torch.int32))
        partials = norm_partials([expected])
        assert sums.tolist() == partials[0].tolist()
        assert exponents.tolist() == partials[1].tolist()


@pytest.mark.parametrize("dtype", GRADS)
def test_threads_and_isa_change_nothing_over_many_ranges(dtype: str) -> None:
    rng = np.random.default_rng(7)
    lengths = [1, 4096, 70_000, 3, 0, 150_001, 12_288]
    edges = np.cumsum([0, *lengths]).tolist()
    start, grad = random_floats(rng, edges[-1], 0.01), as_grad(random_floats(rng, edges[-1], 0.01), dtype)
    expected = reference.accumulate(start, grad)
    # Chunks in another order than the ranges, with a gap that stays as it is.
    firsts = np.cumsum([1, *map(chunk_count, lengths[::-1])])[:-1].tolist()[::-1]
    chunks = 1 + sum(map(chunk_count, lengths))
    sums_wanted, exponents_wanted = np.full(chunks, -1, np.int64), np.full(chunks, -1, np.int32)
    for (a, b), first in zip(pairwise(edges), firsts, strict=True):
        partials = reference.norm_partials(expected[a:b])
        sums_wanted[first : first + len(partials[0])], exponents_wanted[first : first + len(partials[1])] = partials
    for isa in ISAS:
        for threads in (1, 2, 4):
            total, sums, exponents = start.copy(), np.full(chunks, -1, np.int64), np.full(chunks, -1, np.int32)
            ranges = [
                AccumulateRange(total[a:b], grad[a:b], b - a, first)
                for (a, b), first in zip(pairwise(edges), firsts, strict=True)
            ]
            accumulate(
                AccumulateTask(ranges, first=False, last=True, sums=sums, exponents=exponents, threads=threads, isa=isa)
            )
            assert bits(total) == bits(expected)
            assert sums.tolist() == sums_wanted.tolist()
            assert exponents.tolist() == exponents_wanted.tolist()


def test_partials_are_left_alone_until_the_last_microbatch() -> None:
    total, grad = Guarded(np.ones(5000, np.float32)), Guarded(np.ones(5000, np.float32))
    sums, exponents = added(total, grad, first=False)
    assert (sums.tolist(), exponents.tolist()) == ([-1, -1], [-1, -1])
    assert (total.values == 2.0).all()


def test_t46_caller_with_flush_to_zero_gets_denormals_all_the_same() -> None:
    total, grad = Guarded(np.full(100, 1e-39, np.float32)), Guarded(np.full(100, 1e-40, np.float32))
    expected = reference.accumulate(total.values, grad.values)
    flushes = torch.set_flush_denormal(True)
    try:
        added(total, grad, first=False)
    finally:
        torch.set_flush_denormal(False)
    assert flushes
    assert bits(total.values) == bits(expected)
    assert expected[0] > 1e-39


def test_no_thread_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/task"))
    n = 400_000
    added(Guarded(np.zeros(n, np.float32)), Guarded(np.zeros(n, np.float32)), first=False, threads=4)
    assert len(os.listdir("/proc/self/task")) == before


def run_in_thread(host_function: tuple[int, int]) -> None:
    address, argument = host_function
    thread = threading.Thread(target=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), args=(argument,))
    thread.start()
    thread.join()


def test_host_functions_run_the_tasks_from_a_foreign_thread() -> None:
    rng = np.random.default_rng(9)
    grad = as_grad(random_floats(rng, 9000, 0.0), "bf16")
    total = np.zeros(9000, np.float32)
    sums, exponents = np.zeros(3, np.int64), np.zeros(3, np.int32)
    task = AccumulateTask(
        [AccumulateRange(total, grad, 9000)], first=True, last=True, sums=sums, exponents=exponents, threads=2
    )
    run_in_thread(task.host_function())
    task.raise_error()
    assert bits(total) == bits(reference.accumulate(None, grad))
    # bf16 gradients and their fp32 copies have the same partials.
    again, exponents_again = np.zeros(4, np.int64), np.zeros(4, np.int32)
    norm = NormTask([NormRange(grad, 9000, 1)], sums=again, exponents=exponents_again, threads=2)
    run_in_thread(norm.host_function())
    norm.raise_error()
    assert again.tolist() == [0, *sums.tolist()]
    assert exponents_again.tolist() == [0, *exponents.tolist()]


@pytest.mark.parametrize("dtype", GRADS)
def test_a_norm_task_equals_norm_partials(dtype: str) -> None:
    rng = np.random.default_rng(10)
    grads = [as_grad(random_floats(rng, n, 0.001), dtype) for n in (5000, 0, 70_000, 4096)]
    wanted = norm_partials(grads)
    firsts = np.cumsum([0, *(chunk_count(g.size) for g in grads)]).tolist()
    for threads in (1, 2, 4):
        sums, exponents = np.zeros(firsts[-1], np.int64), np.zeros(firsts[-1], np.int32)
        ranges = [NormRange(g, g.size, first) for g, first in zip(grads, firsts, strict=False)]
        norm_now(NormTask(ranges, sums=sums, exponents=exponents, threads=threads))
        assert sums.tolist() == wanted[0].tolist()
        assert exponents.tolist() == wanted[1].tolist()


def make(kind: type[AccumulateTask] | type[NormTask], **changes: Any) -> Any:
    n = NORM_CHUNK + 1
    total, grad = changes.pop("total", torch.zeros(n)), changes.pop("grad", torch.zeros(n, dtype=torch.bfloat16))
    length, first_chunk = changes.pop("length", n), changes.pop("first_chunk", 0)
    operands: dict[str, Any] = {"sums": np.zeros(2, np.int64), "exponents": np.zeros(2, np.int32)}
    ranges: Any = [NormRange(grad, length, first_chunk)]
    if kind is AccumulateTask:
        ranges = [AccumulateRange(total, grad, length, first_chunk)]
        operands.update(first=False, last=True)
    return kind(changes.pop("ranges", ranges), **{**operands, **changes})


REFUSED: list[tuple[dict[str, Any], type[HostwardError], str]] = [
    ({"grad": torch.zeros(5000, dtype=torch.float64)}, PlacementError, r"ranges\[0\]\.grad has dtype fp64"),
    ({"grad": torch.zeros(5000, device="meta")}, PlacementError, r"is on meta"),
    ({"grad": torch.zeros(10_000)[::2]}, PlacementError, r"grad is not contiguous"),
    ({"grad": torch.zeros(4096)}, PlacementError, r"grad has 4096 elements, the task needs 4097"),
    ({"sums": np.zeros(1, np.int64)}, PlacementError, r"sums has 1 elements, the task needs 2"),
    ({"first_chunk": 1}, PlacementError, r"sums has 2 elements, the task needs 3"),
    ({"exponents": np.zeros(2, np.int64)}, PlacementError, r"exponents has dtype int64"),
    ({"error": np.zeros(0, np.int32)}, PlacementError, r"error has 0 elements"),
    ({"length": -1}, ConfigError, r"ranges\[0\] has length -1 and first_chunk 0"),
    ({"first_chunk": -1}, ConfigError, r"ranges\[0\] has length 4097 and first_chunk -1"),
    ({"ranges": []}, ConfigError, r"without ranges"),
    ({"threads": 0}, ConfigError, r"threads is 0"),
]


@pytest.mark.parametrize("kind", [AccumulateTask, NormTask])
@pytest.mark.parametrize(("changes", "error", "text"), REFUSED)
def test_h54_operands_are_checked_before_a_pointer_is_taken(
    kind: type[AccumulateTask] | type[NormTask], changes: dict[str, Any], error: type[HostwardError], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        make(kind, **changes)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"total": torch.zeros(5000, dtype=torch.bfloat16)}, PlacementError, r"ranges\[0\]\.total has dtype bf16"),
        ({"total": torch.zeros(4096)}, PlacementError, r"total has 4096 elements"),
        ({"sums": None}, ConfigError, r"last microbatch without sums and exponents"),
        ({"exponents": None}, ConfigError, r"last microbatch without sums and exponents"),
    ],
)
def test_h54_operands_of_sums_are_checked(changes: dict[str, Any], error: type[HostwardError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        make(AccumulateTask, **changes)
    assert caught.value.fix


def test_h54_read_only_totals_and_mixed_dtypes_are_refused() -> None:
    frozen = np.zeros(5000, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(PlacementError, match="total is read-only"):
        make(AccumulateTask, total=frozen)
    parts = [AccumulateRange(torch.zeros(4), torch.zeros(4, dtype=t), 4) for t in (torch.float32, torch.bfloat16)]
    with pytest.raises(ConfigError, match="gradients of one task have dtypes bf16, fp32"):
        AccumulateTask(parts, first=True)


def test_other_flags_share_the_operands_and_may_have_an_error_word_of_their_own() -> None:
    without = make(AccumulateTask, sums=None, exponents=None, last=False)
    with pytest.raises(ConfigError, match="last microbatch without sums"):
        without.with_flags(first=False, last=True)
    error = np.zeros(1, np.int32)
    twin = without.with_flags(first=True, last=False, error=error)
    twin.struct.isa = 99
    with pytest.raises(NativeError, match="lacks the instruction set"):
        accumulate(twin)
    assert (int(without.error[0]), int(error[0])) == (0, 4)
    assert (without._operands["error"].memory, twin._operands["error"].memory) == (without.error, error)
    with pytest.raises(NativeError, match="hostward_accumulate failed with code 4"):
        twin.raise_error()
    with pytest.raises(PlacementError, match="error has dtype int64"):
        without.with_flags(first=True, last=False, error=np.zeros(1, np.int64))


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("threads", 0, 2),
        ("n_ranges", -1, 2),
        ("grad_dtype", 3, 3),
        ("grad_dtype", -1, 3),
        ("isa", 99, 4),
        ("ranges", None, 1),
        ("sums", None, 1),
        ("exponents", None, 1),
    ],
)
def test_native_code_checks_the_struct_itself(field: str, value: Any, code: int) -> None:
    total = torch.ones(NORM_CHUNK + 1)
    task = make(AccumulateTask, total=total)
    setattr(task.struct, field, value)
    assert load().accumulate(ctypes.byref(task.struct)) == code
    assert int(task.error[0]) == code
    assert (total == 1).all()
    norm = make(NormTask)
    field = {"ranges": "items", "n_ranges": "n_items"}.get(field, field)
    setattr(norm.struct, field, value)
    assert load().norm(ctypes.byref(norm.struct)) == code
    with pytest.raises(NativeError, match=f"hostward_norm failed with code {code}"):
        norm.raise_error()


def test_native_code_refuses_null_and_negative_ranges() -> None:
    assert load().accumulate(None) == load().norm(None) == 1
    for field, value, code in (("total", None, 1), ("grad", None, 1), ("length", -1, 2), ("first_chunk", -1, 2)):
        task = make(AccumulateTask)
        setattr(task._ranges[0], field, value)
        assert load().accumulate(ctypes.byref(task.struct)) == code
