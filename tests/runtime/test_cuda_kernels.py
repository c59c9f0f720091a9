"""What the device kernels of a step are bound to, and when they are bound anew: named fakes in place of compiled
kernels, tables in the host's memory.

Seen red: binding anew for every slot, state addresses not written, bias corrections of another step kept.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch
from fake_context import launch_of

from hostward.core.inventory import MasterKind
from hostward.kernels.cpu.adamw import bias_tables
from hostward.kernels.cuda import adamw, norm
from hostward.kernels.cuda.launcher import KernelLaunch
from hostward.runtime.backend import AdamWOperands, BoundRange, Buffer, Constants, Hyper, Partials, Scalars, Tier
from hostward.runtime.cuda.kernels import KernelTables
from hostward.schedule.ops import Lane


class FakeLaunch:
    """Stands for a bound launch; `made` holds the arguments of all."""

    made: list[tuple[Any, ...]]

    def __init__(self, *arguments: Any) -> None:
        self.made.append(arguments)
        self._native = launch_of(len(self.made))

    def native(self) -> KernelLaunch:
        return self._native


@pytest.fixture(autouse=True)
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLaunch.made = []
    monkeypatch.setattr(norm, "bind_partials", lambda *arguments: [FakeLaunch(*arguments)])
    monkeypatch.setattr(adamw, "bind", lambda *arguments: [FakeLaunch(*arguments), FakeLaunch(*arguments)])


def tables() -> KernelTables:
    return KernelTables(torch.device("cpu"), lambda n: torch.zeros(n, dtype=torch.uint8), contextlib.nullcontext)


def buffer(n: int, dtype: torch.dtype = torch.float32) -> Buffer:
    return Buffer(Tier.DEVICE, torch.zeros(n, dtype=dtype), "x")


def int64_at(address: int, n: int) -> list[int]:
    return list((ctypes.c_int64 * n).from_address(address))


def addresses(*buffers: Buffer) -> list[int]:
    return [b.data.data_ptr() for b in buffers]


def test_partial_sums_get_a_row_for_each_gradient() -> None:
    gradients = [buffer(5000), buffer(3)]
    kernel = tables().partials(gradients, [5000, 3], [7, 9], Partials(buffer(9), buffer(9)))
    (source,), launches = kernel.prepare(0)
    assert len(launches) == kernel.n_launches == 1
    first, second = addresses(*gradients)
    assert int64_at(source, 6) == [first, 5000, 7, second, 3, 9]
    assert kernel.prepare(1) == ((0,), launches)
    gradients[1].point_to(torch.ones(3))
    (source,), again = kernel.prepare(2)
    assert int64_at(source, 6) == [first, 5000, 7, gradients[1].data.data_ptr(), 3, 9]
    assert again is launches
    for g in gradients:
        g.point_to(g.data.bfloat16())
    _, other = kernel.prepare(3)
    assert other is not launches
    assert [made[2] for made in FakeLaunch.made] == [0, 1]


def operands(constants: Constants, n: int = 16) -> AdamWOperands:
    ranges = [BoundRange(16 * i, buffer(n), buffer(n), buffer(1, torch.int64)) for i in range(2)]
    return AdamWOperands(ranges, MasterKind.PLAIN, buffer(32), buffer(32), buffer(32), constants)


SCALARS = Scalars(buffer(1), buffer(1, torch.int32), buffer(1))
HYPER = Hyper(1.0, 2.0, 0.5, 0.25, 5.0)


def test_the_state_of_a_launch_follows_its_slot_and_nothing_is_bound_anew() -> None:
    constants = Constants(HYPER, bias_tables(0.5, 0.25, 10))
    bucket = operands(constants)
    kernel = tables().adamw(Lane.UPDATE, bucket, SCALARS)
    assert bucket.low is not None
    for slot in range(3):
        for state in (bucket.exp_avg, bucket.exp_avg_sq, bucket.low):
            state.point_to(torch.zeros(32))
        _, launches = kernel.prepare(slot)
        words = [launches[0].words[at] for at in adamw.STATE_PARAMETERS]
        assert words == addresses(bucket.exp_avg, bucket.exp_avg_sq, bucket.low)
        assert not any(launches[1].words)
    assert len(FakeLaunch.made) == 2
    bucket.exp_avg.point_to(torch.zeros(33)[1:])  # other code for an address that is not 16-byte aligned
    kernel.prepare(3)
    assert len(FakeLaunch.made) == 4


def test_rows_hold_what_changes_and_what_does_not() -> None:
    bucket = operands(Constants(HYPER, bias_tables(0.5, 0.25, 10)))
    kernel = tables().adamw(Lane.COMPUTE, bucket, SCALARS)
    (hyper, rows), launches = kernel.prepare(0)
    assert len(launches) == kernel.n_launches == 2
    assert list((ctypes.c_double * 5).from_address(hyper)) == [1.0, 2.0, 0.5, 0.25, 5.0]
    expected = [[r.offset, r.length, *addresses(r.gradient, r.weight, r.count)] for r in bucket.ranges]
    assert int64_at(rows, 10) == [*expected[0], *expected[1]]
    assert kernel.prepare(0) == ((0, 0), launches)
    bucket.ranges[1].weight.point_to(torch.ones(16))
    (hyper, rows), _ = kernel.prepare(1)
    assert hyper == 0
    assert int64_at(rows, 10)[8] == bucket.ranges[1].weight.data.data_ptr()
    kernel.forget()
    assert all(kernel.prepare(1)[0])


def test_hyper_parameters_are_copied_once_for_all_buckets_of_a_group_on_a_lane() -> None:
    made, constants = tables(), Constants(HYPER, bias_tables(0.5, 0.25, 10))
    first, second = (made.adamw(Lane.UPDATE, operands(constants), SCALARS) for _ in range(2))
    third = made.adamw(Lane.COMPUTE, operands(constants), SCALARS)
    assert [bool(kernel.prepare(0)[0][0]) for kernel in (first, second, third)] == [True, False, True]
    constants.hyper = Hyper(1.0, 2.0, 0.5, 0.25, 5.0)
    assert [bool(kernel.prepare(1)[0][0]) for kernel in (first, second, third)] == [False, False, False]
    constants.hyper = Hyper(1.5, 2.0, 0.5, 0.25, 5.0)
    assert [bool(kernel.prepare(2)[0][0]) for kernel in (second, first, third)] == [True, False, True]


def test_other_bias_corrections_and_other_gradients_are_bound_anew() -> None:
    constants = Constants(HYPER, bias_tables(0.5, 0.25, 10))
    bucket = operands(constants)
    kernel = tables().adamw(Lane.COMPUTE, bucket, SCALARS)
    before = kernel.prepare(0)[1]
    constants.tables = bias_tables(0.5, 0.25, 20)
    longer = kernel.prepare(1)[1]
    assert longer is not before
    assert FakeLaunch.made[-1][5][3] == len(constants.tables[0])
    for r in bucket.ranges:
        r.gradient.point_to(r.gradient.data.bfloat16())
    assert kernel.prepare(2)[1] is not longer
    assert FakeLaunch.made[-1][3] == (1, 0, 2)


def test_an_empty_bucket_only_advances_its_counts() -> None:
    kernel = tables().adamw(Lane.COMPUTE, operands(Constants(HYPER, bias_tables(0.5, 0.25, 10)), n=0), SCALARS)
    assert kernel.n_launches == 1
    kernel.prepare(0)
