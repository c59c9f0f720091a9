"""What a native AdamW task promises besides its arithmetic: when it reads, what it refuses, what it leaves behind."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from hostward.errors import ConfigError, HostwardError, NativeError, PlacementError
from hostward.kernels import reference
from hostward.kernels.cpu.adamw import AdamWRange, AdamWTask, adamw_step, bias_tables, hyper_array
from hostward.kernels.cpu.library import Isa, load

from native_cases import HYPER, ISAS, LAYOUTS, TABLES, Case, native_run, run_step

RNG_SEED = 11


def make_case(n: int = 1000, layout: str = "split") -> Case:
    return Case.random(np.random.default_rng(RNG_SEED), n, "bf16", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skip", [1, -7])
def test_skip_writes_nothing_and_advances_no_count(layout: str, skip: int) -> None:
    case = make_case(70_000, layout)
    run = native_run(case, isa=Isa.BEST, threads=2, cuts=(9,), count=4, skip=np.array([skip], dtype=np.int32))
    before = {name: guarded.store.copy() for name, guarded in run.operands.items()}
    adamw_step(run.task)
    for name, guarded in run.operands.items():
        assert guarded.store.tobytes() == before[name].tobytes(), name
    assert run.counts.tolist() == [4, 4]


def test_scale_skip_and_hyper_are_read_when_the_task_runs() -> None:
    case = make_case()
    scale, skip = np.array([1.0], dtype=np.float32), np.array([1], dtype=np.int32)
    run = native_run(case, isa=Isa.BEST, scale=scale, skip=skip)
    hyper = next(kept.memory for kept in run.task._operands.values() if kept.dtype == "fp64" and kept.elements == 5)
    scale[0], skip[0] = 0.25, 0
    hyper[0] = 0.5
    adamw_step(run.task)
    changed = reference.Hyper(0.5, HYPER.weight_decay, HYPER.beta1, HYPER.beta2, HYPER.eps)
    run.assert_equal(case.expected(scale=0.25, hyper=changed))


def test_host_function_runs_the_task_from_a_foreign_thread() -> None:
    case = make_case()
    run = native_run(case, isa=Isa.BEST, threads=2)
    address, argument = run.task.host_function()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    thread = threading.Thread(target=function, args=(argument,))
    thread.start()
    thread.join()
    run.task.raise_error()
    run.assert_equal(case.expected())


def test_host_function_keeps_the_first_error_and_writes_nothing_else() -> None:
    case = make_case()
    error = np.zeros(1, dtype=np.int32)
    short = (TABLES[0][:3].copy(), TABLES[1][:3].copy())
    run = native_run(case, isa=Isa.BEST, count=2, error=error)
    run.task.struct.bc1, run.task.struct.inv_sqrt_bc2 = short[0].ctypes.data, short[1].ctypes.data
    run.task.struct.table_length = 3
    before = run.operands["weight"].store.copy()
    address, argument = run.task.host_function()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    function(argument)
    run.task.struct.isa = 99
    function(argument)
    assert error[0] == 5
    assert run.operands["weight"].store.tobytes() == before.tobytes()
    assert run.counts.tolist() == [2]
    with pytest.raises(NativeError, match="past the end of bias correction tables") as caught:
        run.task.raise_error()
    assert caught.value.why == "nothing was written"
    assert "longer" in caught.value.fix


def test_one_range_past_the_tables_stops_all_of_them() -> None:
    run = native_run(make_case(), isa=Isa.BEST, cuts=(10, 20))
    run.task.struct.table_length = 5
    run.counts[:] = [0, 0, 4]
    before = run.operands["exp_avg"].store.copy()
    with pytest.raises(NativeError):
        adamw_step(run.task)
    assert run.operands["exp_avg"].store.tobytes() == before.tobytes()
    assert run.counts.tolist() == [0, 0, 4]
    run.counts[:] = [0, 0, 3]
    adamw_step(run.task)
    assert run.counts.tolist() == [1, 1, 4]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("threads", 0, 2),
        ("n_ranges", -1, 2),
        ("table_length", 0, 2),
        ("grad_dtype", 3, 3),
        ("grad_dtype", -1, 3),
        ("exp_avg_dtype", 3, 3),
        ("exp_avg_dtype", 2, 1),
        ("exp_avg_sq_dtype", -1, 3),
        ("weight_dtype", 0, 3),
        ("weight_dtype", 2, 3),
        ("master_kind", 7, 3),
        ("isa", 99, 4),
        ("isa", -1, 4),
        ("exp_avg", None, 1),
        ("exp_avg_sq", None, 1),
        ("remainder", None, 1),
        ("ranges", None, 1),
        ("hyper", None, 1),
        ("bc1", None, 1),
        ("inv_sqrt_bc2", None, 1),
    ],
)
def test_native_code_checks_the_struct_itself(field: str, value: Any, code: int) -> None:
    run = native_run(make_case(), isa=Isa.BEST)
    setattr(run.task.struct, field, value)
    assert load().adamw_step(ctypes.byref(run.task.struct)) == code
    assert int(run.task.error[0]) == code
    assert run.counts.tolist() == [0]


def test_native_code_checks_ranges_and_null_task() -> None:
    for field, value, code in (
        ("length", -1, 2),
        ("offset", -1, 2),
        ("grad", None, 1),
        ("weight", None, 1),
        ("count", None, 1),
    ):
        run = native_run(make_case(), isa=Isa.BEST)
        setattr(run.task._ranges[0], field, value)
        assert load().adamw_step(ctypes.byref(run.task.struct)) == code, field
    assert load().adamw_step(None) == 1
    run = native_run(make_case(), isa=Isa.BEST, count=-1)
    assert load().adamw_step(ctypes.byref(run.task.struct)) == 2


def test_no_thread_is_left_behind() -> None:
    case = make_case(9 * 65536)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        run_step(case, isa=Isa.BEST, threads=8)
    assert len(os.listdir("/proc/self/task")) == before


def test_the_gil_is_free_while_a_task_runs() -> None:
    run = native_run(make_case(1 << 22), isa=Isa.SCALAR)
    ticks, done = 0, threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1

    counter = threading.Thread(target=count)
    counter.start()
    before = ticks
    adamw_step(run.task)
    passed = ticks - before
    done.set()
    counter.join()
    assert passed > 100


def test_isa_that_this_processor_lacks_is_named() -> None:
    missing = next(isa for isa in Isa if isa is not Isa.BEST and isa not in ISAS)
    with pytest.raises(NativeError, match=r"lacks the instruction set") as caught:
        run_step(make_case(), isa=missing)
    assert "Isa.BEST" in caught.value.fix


def test_a_task_with_another_hyper_shares_the_operands_and_nothing_else() -> None:
    case = make_case()
    run = native_run(case, isa=Isa.BEST, threads=2, cuts=(400,))
    error = np.zeros(1, dtype=np.int32)
    twin = run.task.with_hyper(hyper_array(0.5, 0.01, HYPER.beta1, HYPER.beta2, 1e-3), error=error)
    adamw_step(twin)
    changed = reference.Hyper(0.5, 0.01, HYPER.beta1, HYPER.beta2, 1e-3)
    run.assert_equal(case.expected(hyper=changed))
    assert run.counts.tolist() == [1, 1]
    twin.struct.isa = 99
    with pytest.raises(NativeError):
        adamw_step(twin)
    assert (int(run.task.error[0]), int(error[0])) == (0, 4)
    run.task.raise_error()
    with pytest.raises(NativeError, match="lacks the instruction set"):
        twin.raise_error()


def test_the_hyper_of_each_task_of_a_ring_is_read_when_that_task_runs() -> None:
    run = native_run(make_case(), isa=Isa.BEST)
    expected = native_run(make_case(), isa=Isa.BEST)
    hypers = [hyper_array(0.0, 0.0, HYPER.beta1, HYPER.beta2, HYPER.eps) for _ in range(2)]
    ring = [run.task.with_hyper(hyper) for hyper in hypers]
    for step in range(4):
        lr = 0.1 / (step + 1)
        hypers[step % 2][0] = lr
        adamw_step(ring[step % 2])
        adamw_step(expected.task.with_hyper(hyper_array(lr, 0.0, HYPER.beta1, HYPER.beta2, HYPER.eps)))
    run.assert_equal({name: guarded.values for name, guarded in expected.operands.items()})


def test_a_task_with_other_tables_uses_them() -> None:
    case = make_case()
    run = native_run(case, isa=Isa.BEST)
    short = run.task.with_tables((TABLES[0][:2].copy(), TABLES[1][:2].copy()))
    adamw_step(short)
    run.assert_equal(case.expected())
    with pytest.raises(NativeError, match="past the end of bias correction tables"):
        adamw_step(short)
    adamw_step(run.task)
    assert run.counts.tolist() == [2]


def test_h54_replaced_operands_are_checked_and_kept_alive_and_old_ones_let_go() -> None:
    task = build()
    hyper = hyper_array(1.0, 0.0, 0.9, 0.95, 1e-8)
    twin = task.with_hyper(hyper).with_hyper(hyper)
    assert twin._operands["hyper"].memory is hyper
    assert task._operands["hyper"].memory is not hyper  # the first task still holds its own
    assert len(twin._operands) == len(task._operands)
    with pytest.raises(PlacementError, match="hyper has 4 elements, the task needs 5"):
        task.with_hyper(np.zeros(4))
    with pytest.raises(PlacementError, match="error has dtype int64"):
        task.with_hyper(hyper, error=np.zeros(1, dtype=np.int64))
    with pytest.raises(ConfigError, match="two tables differ in length"):
        task.with_tables((TABLES[0], TABLES[1][:-1]))


def build(**changes: Any) -> AdamWTask:
    n = 8
    operands: dict[str, Any] = {
        "exp_avg": torch.zeros(n),
        "exp_avg_sq": torch.zeros(n),
        "remainder": torch.zeros(n, dtype=torch.int16),
        "hyper": hyper_array(1e-3, 0.0, 0.9, 0.95, 1e-8),
        "tables": TABLES,
    }
    grad = changes.pop("grad", torch.zeros(n, dtype=torch.bfloat16))
    weight = changes.pop("weight", torch.zeros(n, dtype=torch.bfloat16))
    count = changes.pop("count", np.zeros(1, dtype=np.int64))
    ranges = changes.pop(
        "ranges", [AdamWRange(changes.pop("offset", 0), changes.pop("length", n), grad, weight, count)]
    )
    return AdamWTask(ranges, **{**operands, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"grad": torch.zeros(8, dtype=torch.float64)}, PlacementError, r"ranges\[0\]\.grad has dtype fp64"),
        ({"grad": torch.zeros(8, dtype=torch.int16)}, PlacementError, r"ranges\[0\]\.grad has dtype int16"),
        ({"grad": torch.zeros(8, device="meta", dtype=torch.bfloat16)}, PlacementError, r"is on meta"),
        ({"grad": torch.zeros(4, dtype=torch.bfloat16)}, PlacementError, r"has 4 elements, the task needs 8"),
        ({"weight": torch.zeros(16, dtype=torch.bfloat16)[::2]}, PlacementError, r"weight is not contiguous"),
        ({"weight": torch.zeros(4, 4, dtype=torch.bfloat16).t()}, PlacementError, r"weight is not contiguous"),
        ({"count": np.zeros(1, dtype=np.int32)}, PlacementError, r"count has dtype int32"),
        ({"count": np.zeros(0, dtype=np.int64)}, PlacementError, r"count has 0 elements"),
        ({"exp_avg": torch.zeros(8, dtype=torch.float16)}, PlacementError, r"exp_avg has dtype fp16"),
        ({"exp_avg": torch.zeros(128, dtype=torch.uint8)}, PlacementError, r"exp_avg has 128 bytes for 8 elements"),
        ({"exp_avg": torch.zeros(7)}, PlacementError, r"exp_avg has 7 elements, the task needs 8"),
        ({"offset": 1}, PlacementError, r"exp_avg has 8 elements, the task needs 9"),
        ({"remainder": torch.zeros(8, dtype=torch.int32)}, PlacementError, r"remainder has dtype int32"),
        ({"hyper": np.zeros(4)}, PlacementError, r"hyper has 4 elements, the task needs 5"),
        ({"hyper": np.zeros(5, np.float32)}, PlacementError, r"hyper has dtype fp32"),
        ({"scale": np.zeros(1)}, PlacementError, r"scale has dtype fp64"),
        ({"offset": -1}, ConfigError, r"ranges\[0\] has offset -1"),
        ({"length": -1}, ConfigError, r"length -1"),
        ({"ranges": []}, ConfigError, r"without ranges"),
        ({"threads": 0}, ConfigError, r"threads is 0"),
        ({"master": torch.zeros(8)}, ConfigError, r"bf16 weights with remainder and master"),
        ({"weight": torch.zeros(8)}, ConfigError, r"fp32 weights with remainder"),
        ({"weight": torch.zeros(8, dtype=torch.float16)}, ConfigError, r"fp16 weights with remainder"),
        ({"tables": (TABLES[0], TABLES[1][:-1])}, ConfigError, r"two tables differ in length"),
    ],
)
def test_h54_operands_are_checked_before_a_pointer_is_taken(
    changes: dict[str, Any], error: type[HostwardError], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        build(**changes)
    assert caught.value.fix


def test_h54_read_only_memory_is_refused() -> None:
    frozen = np.zeros(8, dtype=np.float32)
    frozen.flags.writeable = False
    with pytest.raises(PlacementError, match="exp_avg is read-only"):
        build(exp_avg=frozen)


def test_h54_mixed_gradient_dtypes_need_two_tasks() -> None:
    weight, count = torch.zeros(4, dtype=torch.bfloat16), np.zeros(2, dtype=np.int64)
    ranges = [
        AdamWRange(0, 4, torch.zeros(4), weight, count[:1]),
        AdamWRange(4, 4, torch.zeros(4, dtype=torch.bfloat16), weight, count[1:]),
    ]
    with pytest.raises(ConfigError, match="gradients of one task have dtypes bf16, fp32"):
        build(ranges=ranges)


def test_operands_stay_alive_as_long_as_the_task() -> None:
    task = build()
    assert len({id(kept.memory) for kept in task._operands.values()}) == len(task._operands) == 10


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (float("nan"), 0.9)])
def test_tables_refuse_betas_outside_their_range(betas: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"beta[12] is"):
        bias_tables(*betas, 10)


def test_tables_hold_the_stated_values_and_end_when_both_are_one() -> None:
    bc1, inv_sqrt_bc2 = bias_tables(0.9, 0.999, 1 << 20)
    assert len(bc1) == len(inv_sqrt_bc2) < 40_000
    assert bc1[-1] == inv_sqrt_bc2[-1] == 1.0
    assert not (bc1[-2] == inv_sqrt_bc2[-2] == 1.0)
    assert bc1[7] == 1.0 - 0.9**7
    assert inv_sqrt_bc2[7] == 1.0 / (1.0 - 0.999**7) ** 0.5
    assert len(bias_tables(0.9, 0.999, 10)[0]) == 10
    assert [table.tolist() for table in bias_tables(0.0, 0.0, 10)] == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(ConfigError, match="length 1"):
        bias_tables(0.9, 0.999, 1)
