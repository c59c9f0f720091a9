"""Command lists: every command reaches its driver function and stream, in order, and failures are named."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostward.engine.commands import Command, CommandList, DriverTable, Streams, Verb
from hostward.errors import DeviceError

STREAMS = (0x7F0000001000, 0, 0x7F0000003000)
ADDRESSES = st.integers(0, 2**64 - 1)


@dataclass
class FakeDriver:
    """Stands for the CUDA driver: remembers its calls, and refuses the one with index `refused` with code 700."""

    refused: int = -1
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pointer, word = ctypes.c_void_p, ctypes.c_uint64
        self._functions = {
            "stream_wait_event": ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_uint)(self._call("wait")),
            "event_record": ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(self._call("record")),
            "memcpy_async": ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, pointer)(self._call("copy")),
            "launch_host_function": ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer)(self._call("host")),
        }

    def _call(self, name: str) -> Any:
        def call(*arguments: int | None) -> int:
            self.calls.append((name, *(argument or 0 for argument in arguments)))
            return 700 if len(self.calls) - 1 == self.refused else 0

        return call

    def table(self) -> DriverTable:
        addresses = {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in self._functions.items()}
        return DriverTable(**addresses, error_name=lambda code: f"FAKE_ERROR_{code}")


def streams() -> Streams:
    made = Streams(len(STREAMS))
    for lane, handle in enumerate(STREAMS):
        made.set(lane, handle)
    return made


def expected_call(command: Command) -> tuple[Any, ...]:
    stream = STREAMS[command.lane]
    if command.verb is Verb.WAIT:
        return "wait", stream, command.a, 0
    if command.verb is Verb.RECORD:
        return "record", command.a, stream
    if command.verb is Verb.COPY:
        return "copy", command.a, command.b, command.nbytes, stream
    return "host", stream, command.a, command.b


commands = st.builds(
    Command,
    verb=st.sampled_from(Verb),
    lane=st.integers(0, len(STREAMS) - 1),
    a=ADDRESSES,
    b=ADDRESSES,
    nbytes=st.one_of(st.just(0), ADDRESSES),
)


@given(st.lists(commands, max_size=8))
def test_every_command_reaches_its_function_and_stream_in_order(wanted: list[Command]) -> None:
    fake = FakeDriver()
    made = CommandList(wanted, fake.table())
    assert len(made) == len(wanted)
    expected = [expected_call(c) for c in wanted if not (c.verb is Verb.COPY and c.nbytes == 0)]
    made.issue(streams())
    assert fake.calls == expected
    made.issue(streams())
    assert fake.calls == expected * 2


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
    made.set_source(0, 2**64 - 1)
    made.set_destination(2, 77)
    made.issue(lanes)
    assert fake.calls == [
        ("copy", 1, 2**64 - 1, 10, STREAMS[0]),
        ("wait", STREAMS[0], 9, 0),
        ("copy", 77, 4, 20, STREAMS[2]),
    ]


@pytest.mark.parametrize("index", [0, 2, -1])
@pytest.mark.parametrize("patch", ["set_source", "set_destination"])
def test_only_copies_have_addresses_to_set(patch: str, index: int) -> None:
    fake = FakeDriver()
    made = CommandList([Command(Verb.HOST, 0, 1, 2), Command(Verb.COPY, 0, 3, 4, 8)], fake.table())
    with pytest.raises(DeviceError, match=f"command {index} of 2 is (HOST|missing)") as caught:
        getattr(made, patch)(index, 99)
    assert caught.value.why == "only copies have addresses to set"
    made.issue(streams())
    assert fake.calls == [("host", STREAMS[0], 1, 2), ("copy", 3, 4, 8, STREAMS[0])]


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
    table = DriverTable(
        stream_wait_event=0,
        event_record=0,
        memcpy_async=0,
        launch_host_function=ctypes.cast(launcher, ctypes.c_void_p).value or 0,
        error_name=str,
    )
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    CommandList([Command(Verb.HOST, 0, address, 41), Command(Verb.HOST, 2, address, 42)], table).issue(streams())
    assert seen == [41, 42]
