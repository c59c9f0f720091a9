"""Command lists: every command reaches its driver function and stream, in order, and failures are named."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from fake_driver import STREAMS, FakeDriver, streams
from hypothesis import given, strategies as st

from hostward.errors import DeviceError
from hostward.kernels.cuda.launcher import KernelLaunch
from hostward.runtime.cuda.commands import Command, CommandBatch, CommandList, DriverTable, Streams, Verb

ADDRESSES = st.integers(0, 2**64 - 1)
LAUNCH = KernelLaunch(0xF00D, programs=3, threads=128, shared_bytes=64, parameters=[(7).to_bytes(8, "little")])


def expected_call(command: Command) -> tuple[Any, ...]:
    stream = STREAMS[command.lane]
    if command.verb is Verb.WAIT:
        return "wait", stream, command.a, 0
    if command.verb is Verb.RECORD:
        return "record", command.a, stream
    if command.verb is Verb.COPY:
        return "copy", command.a, command.b, command.nbytes, stream
    if command.verb is Verb.KERNEL:
        return "kernel", stream, 0xF00D, (3, 1, 1, 128, 1, 1), 64, 7
    return "host", stream, command.a, command.b


def expected_calls(commands: list[Command]) -> list[tuple[Any, ...]]:
    def nothing(c: Command) -> bool:
        return (c.verb is Verb.COPY and c.nbytes == 0) or (c.verb is Verb.RECORD and c.a == 0)

    return [expected_call(c) for c in commands if not nothing(c)]


anything = st.builds(
    Command,
    verb=st.sampled_from([verb for verb in Verb if verb is not Verb.KERNEL]),
    lane=st.integers(0, len(STREAMS) - 1),
    a=st.one_of(st.just(0), ADDRESSES),
    b=ADDRESSES,
    nbytes=st.one_of(st.just(0), ADDRESSES),
)
kernels = st.builds(
    Command, verb=st.just(Verb.KERNEL), lane=st.integers(0, len(STREAMS) - 1), a=st.just(LAUNCH.address)
)
commands = st.one_of(anything, kernels)


@given(st.lists(commands, max_size=8))
def test_every_command_reaches_its_function_and_stream_in_order(wanted: list[Command]) -> None:
    fake = FakeDriver()
    made = CommandList(wanted, fake.table())
    assert len(made) == len(wanted)
    expected = expected_calls(wanted)
    made.issue(streams())
    assert fake.calls == expected
    made.issue(streams())
    assert fake.calls == expected * 2


@given(st.lists(st.lists(commands, max_size=4), max_size=4))
def test_a_batch_is_its_lists_one_behind_the_other(wanted: list[list[Command]]) -> None:
    fake = FakeDriver()
    lists = [CommandList(one, fake.table()) for one in wanted]
    CommandBatch(lists, fake.table()).issue(streams())
    assert fake.calls == [call for one in wanted for call in expected_calls(one)]


def test_what_is_written_into_a_list_counts_in_its_batch() -> None:
    fake = FakeDriver()
    first, second = (
        CommandList([Command(Verb.COPY, 0, 1, 2, 0), Command(Verb.RECORD, 1, 0)], fake.table()) for _ in "ab"
    )
    batch = CommandBatch([first, second], fake.table())
    second.words[second.word(0, Verb.COPY, "nbytes")] = 16
    first.words[first.word(1, Verb.RECORD, "a")] = 9
    batch.issue(streams())
    assert fake.calls == [("record", 9, 0), ("copy", 1, 2, 16, STREAMS[0])]


def test_a_refused_command_of_a_batch_is_named_by_its_own_list() -> None:
    fake = FakeDriver(refused=2)
    lists = [CommandList([Command(Verb.WAIT, lane, 1), Command(Verb.RECORD, lane, 2)], fake.table()) for lane in (0, 2)]
    with pytest.raises(DeviceError, match="command 1 of 2, WAIT on lane 2, could not be enqueued"):
        CommandBatch(lists, fake.table()).issue(streams())
    assert len(fake.calls) == 3
    more = CommandList([Command(Verb.WAIT, 3, 1)], fake.table())
    with pytest.raises(DeviceError, match="a command for lane 3"):
        CommandBatch([*lists, more], fake.table()).issue(streams())


def test_a_launch_is_read_when_it_is_issued_and_its_parameters_then() -> None:
    fake = FakeDriver()
    made = CommandList([Command(Verb.KERNEL, 2, LAUNCH.address)], fake.table())
    other = KernelLaunch(0xBEEF, programs=1, threads=32, shared_bytes=0, parameters=[b"\xff" * 8, bytes(8)])
    made.issue(streams())
    made.words[made.word(0, Verb.KERNEL, "a")] = other.address
    made.issue(streams())
    assert fake.calls == [
        ("kernel", STREAMS[2], 0xF00D, (3, 1, 1, 128, 1, 1), 64, 7),
        ("kernel", STREAMS[2], 0xBEEF, (1, 1, 1, 32, 1, 1), 0, -1),
    ]


def test_launches_that_the_driver_would_refuse_are_refused_before() -> None:
    for wrong in ({"programs": 0}, {"threads": 0}, {"parameters": [b"1234"]}):
        with pytest.raises(DeviceError, match=r"a launch of \d programs"):
            KernelLaunch(**{"function": 1, "programs": 1, "threads": 1, "shared_bytes": 0, "parameters": [], **wrong})


@pytest.mark.parametrize("before", [None, 0xC0, 0xC1])
def test_the_context_is_current_while_commands_are_enqueued_and_not_after(before: int | None) -> None:
    fake, lanes = FakeDriver(context=before), Streams(1, context=0xC1)
    CommandList([Command(Verb.WAIT, 0, 1)], fake.table()).issue(lanes)
    wait = ("wait", 0, 1, 0)
    assert fake.calls == ([wait] if before == 0xC1 else [("context", 0xC1), wait, ("context", before or 0)])
    assert fake.context == before


def test_a_context_that_cannot_be_made_current_is_told() -> None:
    fake, lanes = FakeDriver(refused=0), Streams(1, context=0xC1)
    with pytest.raises(DeviceError, match=r"(?s)the device's context could not be made current.*FAKE_ERROR_700"):
        CommandList([Command(Verb.WAIT, 0, 1)], fake.table()).issue(lanes)
    assert fake.calls == [("context", 0xC1)]


def test_a_lane_may_move_to_another_stream_between_issues() -> None:
    fake, lanes = FakeDriver(), streams()
    made = CommandList([Command(Verb.RECORD, 1, 5), Command(Verb.RECORD, 2, 6)], fake.table())
    made.issue(lanes)
    lanes.set(1, 0xABC)
    made.issue(lanes)
    assert fake.calls == [("record", 5, 0), ("record", 6, STREAMS[2]), ("record", 5, 0xABC), ("record", 6, STREAMS[2])]


def test_addresses_of_copies_change_between_issues_and_nothing_else_does() -> None:
    fake, lanes = FakeDriver(), streams()
    made = CommandList(
        [Command(Verb.COPY, 0, 1, 2, 10), Command(Verb.WAIT, 0, 9), Command(Verb.COPY, 2, 3, 4, 20)], fake.table()
    )
    made.words[made.word(0, Verb.COPY, "b")] = 2**64 - 1
    made.words[made.word(2, Verb.COPY, "a")] = 77
    made.issue(lanes)
    assert fake.calls == [
        ("copy", 1, 2**64 - 1, 10, STREAMS[0]),
        ("wait", STREAMS[0], 9, 0),
        ("copy", 77, 4, 20, STREAMS[2]),
    ]


@pytest.mark.parametrize("index", [0, 2, -1])
def test_words_are_given_only_for_the_verb_that_has_them(index: int) -> None:
    made = CommandList([Command(Verb.HOST, 0, 1, 2), Command(Verb.COPY, 0, 3, 4, 8)], FakeDriver().table())
    with pytest.raises(DeviceError, match=f"command {index} of 2 is (HOST|missing), not COPY"):
        made.word(index, Verb.COPY, "b")


@pytest.mark.parametrize("refused", range(4))
def test_a_refused_command_is_named_and_stops_the_list(refused: int) -> None:
    fake = FakeDriver(refused)
    wanted = [
        Command(Verb.WAIT, 0, 1),
        Command(Verb.COPY, 1, 2, 3, 4),
        Command(Verb.HOST, 2, 5, 6),
        Command(Verb.RECORD, 1, 7),
    ]
    made = CommandList(wanted, fake.table())
    with pytest.raises(DeviceError) as caught:
        made.issue(streams())
    verb, lane = wanted[refused].verb.name, wanted[refused].lane
    assert caught.value.what == f"command {refused + 1} of 4, {verb} on lane {lane}, could not be enqueued"
    assert caught.value.why == "the driver returned FAKE_ERROR_700"
    assert "CUDA_LAUNCH_BLOCKING=1" in caught.value.fix
    assert fake.calls == [expected_call(c) for c in wanted[: refused + 1]]
    fake.refused, fake.calls = -1, []
    made.issue(streams())  # the list is as good as before
    assert fake.calls == [expected_call(c) for c in wanted]


def test_a_lane_without_a_stream_is_refused_before_anything_is_enqueued() -> None:
    fake = FakeDriver()
    made = CommandList([Command(Verb.WAIT, 0, 1), Command(Verb.WAIT, 3, 1)], fake.table())
    with pytest.raises(DeviceError, match="a command for lane 3"):
        made.issue(streams())
    with pytest.raises(DeviceError, match="a command for lane -1"):
        CommandList([Command(Verb.WAIT, -1, 1)], fake.table())
    for lane in (-1, 3):
        with pytest.raises(DeviceError, match=f"there is no lane {lane}"):
            streams().set(lane, 1)
    assert fake.calls == []


def test_a_host_function_gets_its_argument() -> None:
    seen: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: seen.append(argument or 0))
    launch_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def launch(stream: int | None, address: int, argument: int) -> int:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(argument)
        return 0

    launcher = launch_type(launch)
    rest = dict.fromkeys(
        (
            "stream_wait_event",
            "event_record",
            "memcpy_async",
            "launch_kernel",
            "context_get_current",
            "context_set_current",
        ),
        0,
    )
    table = DriverTable(launch_host_function=ctypes.cast(launcher, ctypes.c_void_p).value or 0, error_name=str, **rest)
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    CommandList([Command(Verb.HOST, 0, address, 41), Command(Verb.HOST, 2, address, 42)], table).issue(streams())
    assert seen == [41, 42]
