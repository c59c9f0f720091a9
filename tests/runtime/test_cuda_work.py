"""Works of the CUDA backend over a fake driver: which calls they make, in which order, in every kind of turn.

Seen red: a table copied at every turn, or never again; tables not forgotten after a refused call; one host copy of a
table for all turns; timed events left in after the meter is gone; a batch that enqueues after the kernel that torch
launches; addresses of copies not written; one pair of timed events for all issues of a work in a turn; timed events not
used again; timed events used again before they were read; timed events beside a host function; a host function that is
not clocked, or by a clock that another pending turn has; a host task of another turn; pieces of a copy on one stream,
without a wait between them, without their offsets, or left behind on the second stream.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_context import SECOND_OF, STREAM_OF, TURNED, FakeContext, TwoTables, launch_of
from hypothesis import given, strategies as st

from hostward.core.inventory import MasterKind
from hostward.errors import DeviceError
from hostward.kernels.cpu.adamw import GUESS_WORDS, Role, bias_tables
from hostward.kernels.cpu.library import AccumulateTaskStruct, ClockedCall, Task, load
from hostward.runtime.backend import (
    RING,
    AdamWOperands,
    BoundRange,
    Buffer,
    Constants,
    Event,
    Hyper,
    Scalars,
    SecondSet,
    Tier,
)
from hostward.runtime.cuda.backend import CudaBackend
from hostward.runtime.cuda.commands import Command, NativeCall, Verb
from hostward.runtime.cuda.streams import INDEX, PIECE_BYTES, SECOND, copy_commands
from hostward.runtime.cuda.timing import Timings
from hostward.runtime.cuda.work import (
    TOGETHER,
    CommandWork,
    HostWork,
    KernelWork,
    TableWork,
    TaskWork,
)
from hostward.runtime.host_tasks import add_task
from hostward.schedule.ops import Lane

UPDATE = STREAM_OF[Lane.UPDATE]
TABLE_BYTES, FIXED_BYTES = 32, 16


def table_work(context: FakeContext, lane: Lane = Lane.UPDATE) -> tuple[TableWork, TwoTables, Event, Event]:
    kernel, wait, done = TwoTables(context.uploads), context.event(), context.event()
    return TableWork(context, "step", lane, kernel, [wait], done), kernel, wait, done  # type: ignore[arg-type]


def kernel_call(function: int = 0xF00D, stream: int = UPDATE) -> tuple[Any, ...]:
    return "kernel", stream, function, (3, 1, 1, 128, 1, 1), 64, 0


def int64_at(address: int, n: int = 4) -> list[int]:
    return list((ctypes.c_int64 * n).from_address(address))


def test_a_table_is_copied_in_the_turns_in_which_it_has_changed() -> None:
    context = FakeContext()
    work, kernel, wait, done = table_work(context)
    begin, end = [("wait", UPDATE, wait.native, 0)], [kernel_call(), ("record", done.native, UPDATE)]

    assert work.issue() is done
    fixed, changing = (t.data.data_ptr() for t in (kernel.fixed, kernel.changing))
    first = context.calls()
    assert first == [
        *begin,
        ("copy", fixed, first[1][2], FIXED_BYTES, UPDATE),
        ("copy", changing, first[2][2], TABLE_BYTES, UPDATE),
        *end,
    ]
    assert int64_at(first[2][2]) == [1, 10, 2, 20]
    assert list((ctypes.c_double * 2).from_address(first[1][2])) == [0.5, 0.25]

    context.turn += 1
    work.issue()
    assert context.calls() == [*begin, *end]

    context.turn += 1
    kernel.values = [10, 21]
    work.issue()
    third = context.calls()
    assert third == [*begin, ("copy", changing, third[1][2], TABLE_BYTES, UPDATE), *end]
    assert int64_at(third[1][2]) == [1, 10, 2, 21]
    # What an earlier turn copies from, which may be pending, is as it was.
    assert third[1][2] != first[2][2]
    assert int64_at(first[2][2]) == [1, 10, 2, 20]


def test_every_pending_turn_has_a_host_copy_of_its_own() -> None:
    context = FakeContext()
    work, kernel, *_ = table_work(context)
    sources = []
    for _ in range(2 * RING):
        kernel.values = [context.turn, -context.turn]
        work.issue()
        sources.append(next(call[2] for call in context.calls() if call[3] == TABLE_BYTES))
        assert int64_at(sources[-1]) == [1, context.turn, 2, -context.turn]
        context.turn += 1
    assert len(set(sources)) == RING
    assert sources[:RING] == sources[RING:]


class Heard:
    """A meter that remembers what it is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float, int, int]] = []

    def __call__(self, name: str, lane: Lane, start_s: float, end_s: float, nbytes: int, turn: int) -> None:
        self.spans.append((name, start_s, end_s, nbytes, turn))


def test_timed_events_stand_around_the_kernel_while_there_is_a_meter() -> None:
    context = FakeContext()
    work, kernel, _, done = table_work(context)
    work.issue()
    plain = context.calls()
    pairs = []
    for _ in range(3 * RING):
        context.meter = Heard()
        context.begin_step()
        kernel.values = [context.turn, 0]
        work.issue()
        calls = context.calls()
        assert [call[0] for call in calls] == ["wait", "copy", "record", "kernel", "record", "record"]
        start, end, last = [call[1] for call in calls if call[0] == "record"]
        assert len({start, end, last}) == 3
        assert last == done.native
        pairs.append((start, end))
    # No turn that may be pending has the events of another one; those of turns that are over are used again.
    assert all(len({event for pair in pairs[i : i + RING] for event in pair}) == 2 * RING for i in range(2 * RING))
    assert len(set(pairs)) == RING
    context.meter = None
    kernel.forget()
    kernel.values = [10, 20]
    work.issue()
    assert [call[:2] for call in context.calls() if call[0] != "copy"] == [c[:2] for c in plain if c[0] != "copy"]


def copy_work(context: FakeContext, name: str = "copy") -> CommandWork:
    pair = tuple(Buffer(tier, torch.zeros(5), "x") for tier in (Tier.HOST, Tier.DEVICE))
    return CommandWork(context, name, Lane.D2H, [], context.event(), [pair])  # type: ignore[arg-type]


def test_every_issue_of_a_turn_is_timed_by_itself() -> None:
    """Gradients of several microbatches: one work, several copies."""
    context, heard = FakeContext(), Heard()
    works = [copy_work(context, "a"), copy_work(context, "b")]
    context.meter = heard
    context.begin_step()
    turn, base = context.turn, len(context.fake.records)
    for work in (works[0], works[1], works[0]):
        work.issue()
    for _ in range(RING):
        assert heard.spans == []
        context.begin_step()
    # Two timed events and the one that others wait for, of each issue; times count from the first turn's first record.
    assert heard.spans == [(name, base + at, base + at + 1.0, 20, turn) for name, at in (("a", 0), ("b", 3), ("a", 6))]
    assert context.fake.records[0] != context.fake.records[base]


def test_t44_what_is_captured_is_not_timed() -> None:
    """A graph's events have no times."""
    context, heard = FakeContext(), Heard()
    work = copy_work(context)
    work.issue()
    plain = context.calls()
    context.meter = heard
    context.begin_step()
    work.issue()
    timed = context.calls()
    context.in_capture = True
    work.issue()
    assert [call[0] for call in context.calls()] == [call[0] for call in plain] != [call[0] for call in timed]
    for _ in range(RING):
        context.begin_step()
    assert len(heard.spans) == 1


def test_works_that_are_thrown_away_leave_no_timed_events_behind() -> None:
    context = FakeContext()
    context.meter = Heard()
    made = []
    for _ in range(3 * RING):
        context.begin_step()
        for _ in range(5):
            copy_work(context).issue()
        made.append(context.timed_events)
    assert len(set(made[RING - 1 :])) == 1
    # Nor does a meter that goes before it has heard everything.
    context.meter = None
    for _ in range(RING):
        context.begin_step()
        copy_work(context).issue()
    context.meter = heard = Heard()
    for _ in range(2 * RING):
        context.begin_step()
        for _ in range(5):
            copy_work(context).issue()
    assert context.timed_events == made[-1]
    assert len(heard.spans) == RING * 5


def test_nothing_is_timed_in_a_turn_that_began_without_a_meter() -> None:
    context = FakeContext()
    context.begin_step()
    context.meter = Heard()
    work = copy_work(context)
    work.issue()
    assert [call[0] for call in context.calls()] == ["copy", "record"]
    context.begin_step()
    work.issue()
    assert [call[0] for call in context.calls()] == ["record", "copy", "record", "record"]


@pytest.mark.parametrize("refused", range(5))
def test_a_table_that_may_not_have_been_copied_is_copied_in_the_next_issue(refused: int) -> None:
    context = FakeContext(refused)
    work, *_ = table_work(context)
    with pytest.raises(DeviceError, match=f"command {refused + 1 + (refused > 2) + (refused > 3)} of 7"):
        work.issue()
    context.fake.refused = -1
    context.calls()
    work.issue()
    assert [call[0] for call in context.calls()] == ["wait", "copy", "copy", "kernel", "record"]


def test_tables_of_a_batch_are_copied_again_after_another_work_of_it_failed() -> None:
    context = FakeContext()
    (first, *_), (second, other, *_) = table_work(context), table_work(context)
    batch = CudaBackend(context=context).batch([first, second])  # type: ignore[arg-type]
    other.values = [1, 2, 3]
    with pytest.raises(ValueError, match="zip"):
        batch.issue()
    assert context.calls() == []
    other.values = [1, 2]
    batch.issue()
    assert [call[0] for call in context.calls()] == ["wait", "copy", "copy", "kernel", "record"] * 2


def test_another_launch_is_written_into_the_list() -> None:
    context = FakeContext()
    work, kernel, *_ = table_work(context)
    work.issue()
    kernel.launches = [launch_of(0xBEEF)]
    work.issue()
    assert [call for call in context.calls() if call[0] == "kernel"] == [kernel_call(), kernel_call(0xBEEF)]


def test_copies_take_addresses_when_they_are_issued() -> None:
    context = FakeContext()
    host, device = (Buffer(tier, torch.zeros(5), "x") for tier in (Tier.HOST, Tier.DEVICE))
    waits, done = [context.event(), context.event()], context.event()
    work = CommandWork(context, "copy", Lane.D2H, waits, done, [(host, device), (host, device)])  # type: ignore[arg-type]
    stream = STREAM_OF[Lane.D2H]
    for _ in range(3):
        device.point_to(torch.ones(5))
        work.issue()
        copy = ("copy", host.data.data_ptr(), device.data.data_ptr(), 20, stream)
        begin = [("wait", stream, event.native, 0) for event in waits]
        assert context.calls() == [*begin, copy, copy, ("record", done.native, stream)]
    assert context.ledger.copied_bytes[Lane.D2H] == 3 * 40
    context.meter = Heard()
    context.begin_step()
    work.issue()
    assert [call[0] for call in context.calls()] == ["wait", "wait", "record", "copy", "copy", "record", "record"]


def test_memory_that_is_emptied_and_filled_again_is_asked_for_its_address() -> None:
    context = FakeContext()
    weight = torch.zeros(5)
    host, device = Buffer(Tier.HOST, torch.zeros(5), "x"), Buffer(Tier.DEVICE, weight.view(-1), "x", resized=True)
    work = CommandWork(context, "copy", Lane.H2D, [], context.event(), [(device, host)])  # type: ignore[arg-type]
    before = weight.data_ptr()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(1 << 20)  # it comes back elsewhere
    assert weight.data_ptr() != before
    work.issue()
    assert context.calls()[0] == ("copy", weight.data_ptr(), host.address, 20, STREAM_OF[Lane.H2D])


@pytest.mark.parametrize("pinned", [True, False])
def test_t10_the_host_waits_before_a_copy_from_memory_that_is_not_page_locked(pinned: bool) -> None:
    """The driver may read such memory at once: what writes it has to be over, also in a batch."""
    context = FakeContext()
    here, there = torch.zeros(4), torch.zeros(4)
    pairs = [(Buffer(Tier.DEVICE, there, "weights"), Buffer(Tier.HOST, here, "weights for upload", pinned))]
    stepped, before, done = (context.event() for _ in range(3))
    mark = CommandWork(context, "step", Lane.HOST, [], stepped)  # type: ignore[arg-type]
    copy = CudaBackend(context=context).copy(Lane.H2D, pairs, name="copy", waits=[stepped, before], done=done)  # type: ignore[arg-type]
    stream = STREAM_OF[Lane.H2D]
    enqueued = [
        ("wait", stream, stepped.native, 0),
        ("wait", stream, before.native, 0),
        ("copy", there.data_ptr(), here.data_ptr(), 16, stream),
        ("record", done.native, stream),
    ]
    waited = [] if pinned else [("the host waits", stepped.native), ("the host waits", before.native)]
    assert copy.issue() is done
    assert context.calls() == [*waited, *enqueued]
    CudaBackend(context=context).batch([mark, copy]).issue()  # type: ignore[arg-type]
    assert context.calls() == [("record", stepped.native, STREAM_OF[Lane.HOST]), *waited, *enqueued]


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_to_the_host_wait_on_the_device_alone(pinned: bool) -> None:
    context = FakeContext()
    pairs = [(Buffer(Tier.HOST, torch.zeros(4), "gradients", pinned), Buffer(Tier.DEVICE, torch.zeros(4), "gradients"))]
    copy = CudaBackend(context=context).copy(
        Lane.D2H, pairs, name="copy", waits=[context.event()], done=context.event()
    )  # type: ignore[arg-type]
    copy.issue()
    assert "the host waits" not in [call[0] for call in context.calls()]


def test_works_that_change_nothing_are_not_asked_to_prepare() -> None:
    context = FakeContext()
    mark = CommandWork(context, "mark", Lane.H2D, [context.event()], context.event())  # type: ignore[arg-type]
    work, *_ = table_work(context)
    assert (mark.changes, copy_work(context).changes, work.changes) == (False, True, True)
    mark.issue()
    assert context.ledger.copied_bytes == {}


def test_a_pure_wait_is_timed_with_its_waits() -> None:
    context = FakeContext()
    context.meter = Heard()
    context.begin_step()
    wait, done = context.event(), context.event()
    work = CommandWork(context, "arrive", Lane.COMPUTE, [wait], done)  # type: ignore[arg-type]
    work.issue()
    stream = STREAM_OF[Lane.COMPUTE]
    calls = context.calls()
    start, end = calls[0][1], calls[2][1]
    assert len({start, end, done.native}) == 3
    assert calls == [
        ("record", start, stream),
        ("wait", stream, wait.native, 0),
        ("record", end, stream),
        ("record", done.native, stream),
    ]
    assert context.ledger.copied_bytes == {}


def host_operands() -> tuple[AdamWOperands, Scalars]:
    def buffer(*values: float, dtype: torch.dtype = torch.float32) -> Buffer:
        return Buffer(Tier.HOST, torch.tensor(values, dtype=dtype), "x")

    ranges = [BoundRange(0, buffer(1, 2), buffer(3, 4), buffer(0, dtype=torch.int64))]
    constants = Constants(Hyper(1.0, 2.0, 0.5, 0.25, 5.0), bias_tables(0.5, 0.25, 10))
    operands = AdamWOperands(ranges, MasterKind.WEIGHT, buffer(0, 0), buffer(0, 0), None, constants)
    return operands, Scalars(buffer(1), buffer(0, dtype=torch.int32), buffer(0))


def test_every_pending_host_step_has_hyper_parameters_of_its_own() -> None:
    context, (operands, scalars) = FakeContext(), host_operands()
    work = HostWork(context, "step", operands, scalars, [], context.event())  # type: ignore[arg-type]
    tasks = []
    for turn in range(RING):
        operands.constants.hyper = Hyper(float(turn), 2.0, 0.5, 0.25, 5.0)
        work.issue()
        host, record = context.calls()
        assert (host[:2], record[0]) == (("host", STREAM_OF[Lane.HOST]), "record")
        tasks.append(host[3])
        assert len(context.kept[context.turn]) == 1
        context.turn += 1
    hypers = [list((ctypes.c_double * 5).from_address(Task.from_address(task).hyper)) for task in tasks]
    assert hypers == [[float(turn), 2.0, 0.5, 0.25, 5.0] for turn in range(RING)]
    operands.constants.tables = bias_tables(0.5, 0.25, 20)
    work.issue()
    assert context.calls()[0][3] not in tasks


def test_a_guess_and_its_confirmation_have_hyper_parameters_of_their_own_and_run_as_host_functions() -> None:
    """The guess is enqueued with those of its time, and confirmed with those of the step."""
    context, (operands, scalars) = FakeContext(), host_operands()

    def buffer(n: int, dtype: torch.dtype = torch.float32) -> Buffer:
        return Buffer(Tier.HOST, torch.zeros(n, dtype=dtype), "x")

    record = buffer(GUESS_WORDS, torch.int64)
    weight, count = buffer(2), buffer(1, torch.int64)
    ranges = [replace(r, weight_out=weight, count_out=count) for r in operands.ranges]
    exp_avg, exp_avg_sq = buffer(2), buffer(2)
    tasks = []
    for role, lr in ((Role.GUESS, 1.0), (Role.CONFIRM, 3.0)):
        second = SecondSet(exp_avg, exp_avg_sq, None, record, role)
        work = HostWork(context, "step", replace(operands, ranges=ranges, second=second), scalars, [], context.event())  # type: ignore[arg-type]
        operands.constants.hyper = Hyper(lr, 2.0, 0.5, 0.25, 5.0)
        work.issue()
        tasks.append(context.calls()[0])
    before = [tensor.clone() for tensor in (operands.exp_avg.data, operands.ranges[0].weight.data)]
    weights = []
    for scale, (_, _, function, argument) in zip((1.0, 0.5), tasks, strict=True):
        scalars.scale.data.fill_(scale)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
        weights.append(weight.data.clone())
    assert not torch.equal(*weights)
    assert count.data.tolist() == [1]
    assert operands.ranges[0].count.data.tolist() == [0]
    assert all(map(torch.equal, before, (operands.exp_avg.data, operands.ranges[0].weight.data)))
    assert not any(int(error[0]) for error in context.errors)


def test_every_pending_turn_has_a_task_of_its_own_over_the_same_operands() -> None:
    context = FakeContext()
    total, gradient = (Buffer(Tier.HOST, torch.zeros(5), "x") for _ in range(2))
    task = functools.partial(add_task, [total], [gradient], 1, first=True, partials=None)
    wait, done = context.event(), context.event()
    work = TaskWork(context, "add", task, [wait], done)  # type: ignore[arg-type]
    stream, tasks = STREAM_OF[Lane.HOST], []
    for _ in range(2 * RING):
        work.issue()
        begin, host, end = context.calls()
        assert (begin, end) == (("wait", stream, wait.native, 0), ("record", done.native, stream))
        assert host[:3] == ("host", stream, context.kept[context.turn][0].host_function()[0])  # type: ignore[attr-defined]
        tasks.append(AccumulateTaskStruct.from_address(host[3]))
        context.turn += 1
    assert [task.error for task in tasks] == [
        context.errors[turn % RING].ctypes.data for turn in range(1, 2 * RING + 1)
    ]


def test_a_host_function_is_clocked_by_the_thread_that_calls_it() -> None:
    """No timed event stands beside it: whoever enqueues it would wait for the stream."""
    context, heard = FakeContext(), Heard()
    buffers = [Buffer(Tier.HOST, torch.ones(5), "x") for _ in range(2)]
    task = functools.partial(add_task, buffers[:1], buffers[1:], 1, first=False, partials=None)
    wait, done = context.event(), context.event()
    work = TaskWork(context, "add", task, [wait], done)  # type: ignore[arg-type]
    mark = CommandWork(context, "retire", Lane.HOST, [], context.event())  # type: ignore[arg-type]
    context.meter = heard
    called: list[ClockedCall] = []
    for turn in range(2 * RING):
        context.begin_step()
        work.issue()
        mark.issue()
        calls = context.calls()
        assert [call[0] for call in calls] == ["wait", "host", "record", "record"]
        assert [call[1] for call in calls if call[0] == "record"] == [done.native, mark.done.native]
        _, _, function, argument = calls[1]
        assert function == load().clocked_host_function
        call = ClockedCall.from_address(argument)
        assert all(ctypes.addressof(other) != argument for other in called[-(RING - 1) :])
        called.append(call)
        before_ns = time.monotonic_ns()
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
        assert before_ns <= call.started_ns <= call.ended_ns <= time.monotonic_ns()
        assert buffers[0].data.tolist() == [2.0 + turn] * 5
    context.meter = None  # the next issue calls the task itself
    work.issue()
    assert context.calls()[1][2] == load().accumulate_host_function
    assert len(heard.spans) == RING
    spans = [span[1:3] for span in heard.spans]
    assert spans == sorted(spans)
    assert all(0 <= end_s - start_s < 1 for start_s, end_s in spans)


@pytest.mark.parametrize("waits_s", [0.0, 0.03])
def test_the_host_s_clock_is_that_of_the_device_to_within_the_shortest_wait(waits_s: float) -> None:
    """The device's clock is ahead by 5 s here; some records take longer to be waited for than others."""
    recorded: dict[int, float] = {}
    handles = itertools.count(1)
    timings = Timings(lambda: next(handles), lambda begin, end: 1e3 * (recorded[end] - recorded[begin]))
    waits = itertools.chain([0.0, waits_s, waits_s, 0.0], itertools.repeat(waits_s))

    def record_and_wait(event: int) -> None:
        recorded[event] = 5 + time.monotonic()
        time.sleep(next(waits))

    timings.anchor(record_and_wait)
    origin_s = next(iter(recorded.values())) - 5
    (base,) = timings.begin(1)
    recorded[base] = 5 + time.monotonic()
    heard, call = Heard(), timings.take_call(1)
    assert call is not None
    call.started_ns = time.monotonic_ns()
    call.ended_ns = call.started_ns + 7_000_000
    timings.note(1, "step", Lane.HOST, 0, call)
    timings.read(1, heard)
    ((_, start_s, end_s, *_),) = heard.spans
    assert start_s == pytest.approx(call.started_ns / 1e9 - origin_s, abs=5e-3)
    assert end_s - start_s == pytest.approx(7e-3)


def test_a_batch_is_its_works_one_after_the_other() -> None:
    """Whatever lies between: kernels that torch launches, and more works than one call takes."""

    def made() -> tuple[FakeContext, list[Any]]:
        context = FakeContext()

        def by_torch() -> None:
            context.fake.calls.append(("torch",))

        buffers = [Buffer(Tier.HOST, torch.zeros(5), "x") for _ in range(2)]
        works: list[Any] = []
        for i in range(2 * TOGETHER + 3):
            kernel = KernelWork(context, f"{i}", Lane.COMPUTE, by_torch, [context.event()], context.event())  # type: ignore[arg-type]
            mark = CommandWork(context, f"{i}", Lane.H2D, [kernel.done], context.event())  # type: ignore[arg-type]
            add = functools.partial(add_task, buffers[:1], buffers[1:], 1, first=i % 2 == 0, partials=None)
            task = TaskWork(context, f"{i}", add, [mark.done], context.event())  # type: ignore[arg-type]
            works += [kernel, mark] if i in (0, 1, 7) else [table_work(context)[0], mark, task]
        return context, works

    context, works = made()
    batch = CudaBackend(context=context).batch(works)  # type: ignore[arg-type]
    other, alone = made()
    meters = Heard(), Heard()
    for turn in range(3):
        context.meter, other.meter = meters if turn == 1 else (None, None)
        context.begin_step()
        other.begin_step()
        for _ in range(2):
            batch.issue()
            for work in alone:
                work.issue()
            # Addresses of tables and tasks differ from one set of works to the other; everything else is the same.
            ours, theirs = (
                [call[:1] if call[0] == "copy" else call[:3] if call[0] == "host" else call for call in calls]
                for calls in (context.calls(), other.calls())
            )
            assert ours == theirs
    for _ in range(RING):
        context.meter, other.meter = meters
        context.begin_step()
        other.begin_step()
    assert len(meters[0].spans) == 2 * len(works)
    # Host functions are not called here, so their clocks show nothing.
    assert [span for span in meters[0].spans if span[2] >= 0] == [span for span in meters[1].spans if span[2] >= 0]
    assert sorted(span[0] for span in meters[0].spans) == sorted(span[0] for span in meters[1].spans)


def test_a_batch_makes_few_native_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    context = FakeContext()
    native, calls = context.driver.issue, []

    def counted(*arguments: Any) -> int:
        calls.append(NativeCall.from_address(arguments[0].value).n_lists)
        return native(*arguments)

    monkeypatch.setattr(context.driver, "issue", counted)
    works = [table_work(context)[0] for _ in range(TOGETHER + 1)]
    CudaBackend(context=context).batch(works).issue()  # type: ignore[arg-type]
    assert calls == [TOGETHER, 1]
    works[0].issue()
    assert calls == [TOGETHER, 1, 1]


# ---------------------------------------------------------------- copies in turn


@given(st.lists(st.integers(0, 4 * PIECE_BYTES), max_size=6), st.sampled_from([Lane.H2D, Lane.D2H, Lane.UPDATE]))
def test_no_stream_has_more_than_a_piece_to_copy_at_a_time(sizes: list[int], lane: Lane) -> None:
    commands, copies = copy_commands(lane, sizes, TURNED)
    home, second = INDEX[lane], SECOND.get(lane, INDEX[lane])
    here, filled, reached = home, 0, dict.fromkeys(range(len(sizes)), 0)
    where = {index: (i, first) for index, i, first in copies}
    at = 0
    while at < len(commands):
        command = commands[at]
        if command.verb is Verb.COPY:
            assert command.lane == here  # behind the one before, on this stream or by the wait
            i, first = where[at]
            assert first == reached[i]
            reached[i] += command.nbytes
            filled += command.nbytes
            assert filled <= PIECE_BYTES or lane is Lane.UPDATE
            at += 1
        else:
            there = second if here == home else home
            assert commands[at : at + 2] == [Command(Verb.RECORD, here, TURNED), Command(Verb.WAIT, there, TURNED)]
            here, filled = there, 0
            at += 2
    assert here == home
    assert list(reached.values()) == sizes


def test_a_long_copy_goes_to_both_streams_of_its_lane() -> None:
    context = FakeContext()
    here, there = STREAM_OF[Lane.D2H], SECOND_OF[Lane.D2H]
    turned, done, rest = context.turned[Lane.D2H], context.event(), 4096
    memory = [torch.empty(2 * PIECE_BYTES + rest, dtype=torch.uint8) for _ in range(3)]
    source, target = Buffer(Tier.DEVICE, memory[0], "test"), Buffer(Tier.HOST, memory[1], "test")
    work = CommandWork(context, "copy", Lane.D2H, [], done, [(target, source)])  # type: ignore[arg-type]
    source.point_to(memory[2])  # it has moved since
    work.issue()
    to, of = memory[1].data_ptr(), memory[2].data_ptr()
    assert context.calls() == [
        ("copy", to, of, PIECE_BYTES, here),
        ("record", turned, here),
        ("wait", there, turned, 0),
        ("copy", to + PIECE_BYTES, of + PIECE_BYTES, PIECE_BYTES, there),
        ("record", turned, there),
        ("wait", here, turned, 0),
        ("copy", to + 2 * PIECE_BYTES, of + 2 * PIECE_BYTES, rest, here),
        ("record", done.native, here),
    ]
