"""Works of the CUDA backend over a fake driver: which calls they make, in which order, in every kind of turn.

Seen red: a table copied at every turn, or never again; tables not forgotten after a refused call; one host copy of a
table for all turns; timed events left in after the meter is gone; a batch that enqueues after the kernel that torch
launches; addresses of copies not written.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from fake_backend import STREAM_OF, FakeBackend, TwoTables, launch_of

from hostward.engine.backend import RING, AdamWOperands, BoundRange, Buffer, Constants, Event, Hyper, Scalars, Tier
from hostward.engine.cuda_work import TOGETHER, CommandWork, CudaBatch, HostWork, KernelWork, TableWork
from hostward.errors import DeviceError
from hostward.host.adamw import bias_tables
from hostward.host.library import Task
from hostward.inventory import MasterKind
from hostward.schedule import Lane

UPDATE = STREAM_OF[Lane.UPDATE]
TABLE_BYTES, FIXED_BYTES = 32, 16


def table_work(backend: FakeBackend, lane: Lane = Lane.UPDATE) -> tuple[TableWork, TwoTables, Event, Event]:
    kernel, wait, done = TwoTables(backend.uploads), backend.event(), backend.event()
    return TableWork(backend, "step", lane, kernel, [wait], done), kernel, wait, done  # type: ignore[arg-type]


def kernel_call(function: int = 0xF00D, stream: int = UPDATE) -> tuple[Any, ...]:
    return "kernel", stream, function, (3, 1, 1, 128, 1, 1), 64, 0


def int64_at(address: int, n: int = 4) -> list[int]:
    return list((ctypes.c_int64 * n).from_address(address))


def test_a_table_is_copied_in_the_turns_in_which_it_has_changed() -> None:
    backend = FakeBackend()
    work, kernel, wait, done = table_work(backend)
    begin, end = [("wait", UPDATE, wait.native, 0)], [kernel_call(), ("record", done.native, UPDATE)]

    assert work.issue() is done
    fixed, changing = (t.data.data_ptr() for t in (kernel.fixed, kernel.changing))
    first = backend.calls()
    assert first == [
        *begin,
        ("copy", fixed, first[1][2], FIXED_BYTES, UPDATE),
        ("copy", changing, first[2][2], TABLE_BYTES, UPDATE),
        *end,
    ]
    assert int64_at(first[2][2]) == [1, 10, 2, 20]
    assert list((ctypes.c_double * 2).from_address(first[1][2])) == [0.5, 0.25]

    backend.turn += 1
    work.issue()
    assert backend.calls() == [*begin, *end]

    backend.turn += 1
    kernel.values = [10, 21]
    work.issue()
    third = backend.calls()
    assert third == [*begin, ("copy", changing, third[1][2], TABLE_BYTES, UPDATE), *end]
    assert int64_at(third[1][2]) == [1, 10, 2, 21]
    # What an earlier turn copies from, which may be pending, is as it was.
    assert third[1][2] != first[2][2]
    assert int64_at(first[2][2]) == [1, 10, 2, 20]


def test_every_pending_turn_has_a_host_copy_of_its_own() -> None:
    backend = FakeBackend()
    work, kernel, *_ = table_work(backend)
    sources = []
    for _ in range(2 * RING):
        kernel.values = [backend.turn, -backend.turn]
        work.issue()
        sources.append(next(call[2] for call in backend.calls() if call[3] == TABLE_BYTES))
        assert int64_at(sources[-1]) == [1, backend.turn, 2, -backend.turn]
        backend.turn += 1
    assert len(set(sources)) == RING
    assert sources[:RING] == sources[RING:]


def test_timed_events_stand_around_the_kernel_while_there_is_a_meter() -> None:
    backend = FakeBackend()
    work, kernel, _, done = table_work(backend)
    work.issue()
    plain = backend.calls()
    seen = set()
    for _ in range(2 * RING):
        backend.turn += 1
        backend.meter = "somebody looks"
        kernel.values = [backend.turn, 0]
        work.issue()
        start, end = work.timing(backend.turn % RING)
        calls = backend.calls()
        assert [call[0] for call in calls] == ["wait", "copy", "record", "kernel", "record", "record"]
        assert [call[1] for call in calls if call[0] == "record"] == [start, end, done.native]
        seen |= {start, end}
    assert len(seen) == 2 * RING
    assert backend.noted == [work] * 2 * RING
    backend.meter = None
    kernel.forget()
    kernel.values = [10, 20]
    work.issue()
    assert [call[:2] for call in backend.calls() if call[0] != "copy"] == [c[:2] for c in plain if c[0] != "copy"]


@pytest.mark.parametrize("refused", range(5))
def test_a_table_that_may_not_have_been_copied_is_copied_in_the_next_issue(refused: int) -> None:
    backend = FakeBackend(refused)
    work, *_ = table_work(backend)
    with pytest.raises(DeviceError, match=f"command {refused + 1 + (refused > 2) + (refused > 3)} of 7"):
        work.issue()
    backend.fake.refused = -1
    backend.calls()
    work.issue()
    assert [call[0] for call in backend.calls()] == ["wait", "copy", "copy", "kernel", "record"]


def test_tables_of_a_batch_are_copied_again_after_another_work_of_it_failed() -> None:
    backend = FakeBackend()
    (first, *_), (second, other, *_) = table_work(backend), table_work(backend)
    batch = CudaBatch(backend, [first, second])  # type: ignore[arg-type]
    other.values = [1, 2, 3]
    with pytest.raises(ValueError, match="zip"):
        batch.issue()
    assert backend.calls() == []
    other.values = [1, 2]
    batch.issue()
    assert [call[0] for call in backend.calls()] == ["wait", "copy", "copy", "kernel", "record"] * 2


def test_another_launch_is_written_into_the_list() -> None:
    backend = FakeBackend()
    work, kernel, *_ = table_work(backend)
    work.issue()
    kernel.launches = [launch_of(0xBEEF)]
    work.issue()
    assert [call for call in backend.calls() if call[0] == "kernel"] == [kernel_call(), kernel_call(0xBEEF)]


def test_copies_take_addresses_when_they_are_issued() -> None:
    backend = FakeBackend()
    host, device = (Buffer(tier, torch.zeros(5), "x") for tier in (Tier.HOST, Tier.DEVICE))
    waits, done = [backend.event(), backend.event()], backend.event()
    work = CommandWork(backend, "copy", Lane.D2H, waits, done, [(host, device), (host, device)])  # type: ignore[arg-type]
    stream = STREAM_OF[Lane.D2H]
    for _ in range(3):
        device.data = torch.ones(5)
        work.issue()
        copy = ("copy", host.data.data_ptr(), device.data.data_ptr(), 20, stream)
        begin = [("wait", stream, event.native, 0) for event in waits]
        assert backend.calls() == [*begin, copy, copy, ("record", done.native, stream)]
    assert backend.ledger.copied_bytes[Lane.D2H] == 3 * 40
    backend.meter = "somebody looks"
    work.issue()
    assert [call[0] for call in backend.calls()] == ["wait", "wait", "record", "copy", "copy", "record", "record"]


def test_a_pure_wait_is_timed_with_its_waits() -> None:
    backend = FakeBackend()
    backend.meter = "somebody looks"
    wait, done = backend.event(), backend.event()
    work = CommandWork(backend, "arrive", Lane.COMPUTE, [wait], done)  # type: ignore[arg-type]
    work.issue()
    start, end = work.timing(backend.turn % RING)
    stream = STREAM_OF[Lane.COMPUTE]
    assert backend.calls() == [
        ("record", start, stream),
        ("wait", stream, wait.native, 0),
        ("record", end, stream),
        ("record", done.native, stream),
    ]
    assert backend.ledger.copied_bytes == {}


def host_operands() -> tuple[AdamWOperands, Scalars]:
    def buffer(*values: float, dtype: torch.dtype = torch.float32) -> Buffer:
        return Buffer(Tier.HOST, torch.tensor(values, dtype=dtype), "x")

    ranges = [BoundRange(0, buffer(1, 2), buffer(3, 4), buffer(0, dtype=torch.int64))]
    constants = Constants(Hyper(1.0, 2.0, 0.5, 0.25, 5.0), bias_tables(0.5, 0.25, 10))
    operands = AdamWOperands(ranges, MasterKind.WEIGHT, buffer(0, 0), buffer(0, 0), None, constants)
    return operands, Scalars(buffer(1), buffer(0, dtype=torch.int32), buffer(0))


def test_every_pending_host_step_has_hyper_parameters_of_its_own() -> None:
    backend, (operands, scalars) = FakeBackend(), host_operands()
    work = HostWork(backend, "step", operands, scalars, [], backend.event())  # type: ignore[arg-type]
    tasks = []
    for turn in range(RING):
        operands.constants.hyper = Hyper(float(turn), 2.0, 0.5, 0.25, 5.0)
        work.issue()
        host, record = backend.calls()
        assert (host[:2], record[0]) == (("host", STREAM_OF[Lane.HOST]), "record")
        tasks.append(host[3])
        assert len(backend.kept[backend.turn]) == 1
        backend.turn += 1
    hypers = [list((ctypes.c_double * 5).from_address(Task.from_address(task).hyper)) for task in tasks]
    assert hypers == [[float(turn), 2.0, 0.5, 0.25, 5.0] for turn in range(RING)]
    operands.constants.tables = bias_tables(0.5, 0.25, 20)
    work.issue()
    assert backend.calls()[0][3] not in tasks


def test_a_batch_is_its_works_one_after_the_other() -> None:
    """Whatever lies between: kernels that torch launches, and more works than one call takes."""

    def made() -> tuple[FakeBackend, list[Any]]:
        backend = FakeBackend()

        def by_torch() -> None:
            backend.fake.calls.append(("torch",))

        works: list[Any] = []
        for i in range(2 * TOGETHER + 3):
            kernel = KernelWork(backend, f"{i}", Lane.COMPUTE, by_torch, [backend.event()], backend.event())  # type: ignore[arg-type]
            mark = CommandWork(backend, f"{i}", Lane.H2D, [kernel.done], backend.event())  # type: ignore[arg-type]
            works += [kernel, mark] if i in (0, 1, 7) else [table_work(backend)[0], mark]
        return backend, works

    backend, works = made()
    batch = CudaBatch(backend, works)  # type: ignore[arg-type]
    other, alone = made()
    for meter in (None, "somebody looks", None):
        backend.meter = other.meter = meter
        for _ in range(2):
            batch.issue()
            for work in alone:
                work.issue()
            ours, theirs = backend.calls(), other.calls()
            # Addresses of tables differ from one set of works to the other; everything else is the same.
            strip = [[call for call in calls if call[0] != "copy"] for calls in (ours, theirs)]
            assert strip[0] == strip[1]
            assert [call[0] for call in ours] == [call[0] for call in theirs]
            assert [w.name for w in backend.noted] == [w.name for w in other.noted]
        backend.turn += 1
        other.turn += 1


def test_a_batch_makes_few_native_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    native, calls = backend.driver.issue, []

    def counted(*arguments: Any) -> int:
        calls.append(arguments[4])
        return native(*arguments)

    monkeypatch.setattr(backend.driver, "issue", counted)
    works = [table_work(backend)[0] for _ in range(TOGETHER + 1)]
    CudaBatch(backend, works).issue()  # type: ignore[arg-type]
    assert calls == [TOGETHER, 1]
    works[0].issue()
    assert calls == [TOGETHER, 1, 1]
