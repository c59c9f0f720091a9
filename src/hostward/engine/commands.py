"""Lists of driver commands, enqueued by one native call.

    driver = driver_table()
    streams = Streams(2)
    streams.set(0, compute_handle)
    streams.set(1, copy_handle)
    commands = CommandList(
        [Command(Verb.WAIT, 1, event), Command(Verb.COPY, 1, to, source, size), Command(Verb.RECORD, 1, done)], driver
    )
    commands.issue(streams)

A list is made once and issued in every step; addresses of its copies may change in between.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from hostward.errors import DeviceError
from hostward.host.library import load

from . import driver


class Verb(IntEnum):
    """What a command does on its stream; the numbers are those of hostward_command_kind."""

    WAIT = 0
    """The stream waits for event `a`."""
    RECORD = 1
    """Event `a` is recorded."""
    COPY = 2
    """`nbytes` bytes go to address `a` from address `b`; nothing happens for 0 bytes."""
    HOST = 3
    """The C function at address `a` is called with argument `b`, in stream order, on a thread of the driver."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: handles and addresses as integers, `lane` the index of its stream in `Streams`."""

    verb: Verb
    lane: int
    a: int
    b: int = 0
    nbytes: int = 0


class _NativeCommand(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("lane", ctypes.c_int32),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    ]


class _NativeDriver(ctypes.Structure):
    _fields_ = [
        ("stream_wait_event", ctypes.c_void_p),
        ("event_record", ctypes.c_void_p),
        ("memcpy_async", ctypes.c_void_p),
        ("launch_host_function", ctypes.c_void_p),
    ]


# A command seen as four 64-bit words: kind and lane, a, b, bytes.
_WORDS = ctypes.sizeof(_NativeCommand) // 8
_A, _B = 1, 2


class DriverTable:
    """The four driver functions that command lists call.

    Args:
        stream_wait_event: address of cuStreamWaitEvent(stream, event, flags) or of a function like it.
        event_record: address of cuEventRecord(event, stream).
        memcpy_async: address of cuMemcpyAsync(destination, source, bytes, stream).
        launch_host_function: address of cuLaunchHostFunc(stream, function, argument).
        error_name: the name of a result that is not 0.
    """

    def __init__(
        self,
        *,
        stream_wait_event: int,
        event_record: int,
        memcpy_async: int,
        launch_host_function: int,
        error_name: Callable[[int], str],
    ) -> None:
        self._struct = _NativeDriver(stream_wait_event, event_record, memcpy_async, launch_host_function)
        self.pointer = ctypes.c_void_p(ctypes.addressof(self._struct))
        self.error_name = error_name


@functools.cache
def driver_table() -> DriverTable:
    """The functions of the CUDA driver. Raises DeviceError where the driver is missing."""
    return DriverTable(
        stream_wait_event=driver.function_address("cuStreamWaitEvent"),
        event_record=driver.function_address("cuEventRecord"),
        memcpy_async=driver.function_address("cuMemcpyAsync"),
        launch_host_function=driver.function_address("cuLaunchHostFunc"),
        error_name=driver.error_name,
    )


class Streams:
    """The stream handles (CUstream) of `count` lanes, 0 (the legacy default stream) at first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._handles = (ctypes.c_void_p * count)()
        self.pointer = ctypes.c_void_p(ctypes.addressof(self._handles))

    def set(self, lane: int, handle: int) -> None:
        """What is issued on `lane` from now on goes to the stream `handle`. Raises DeviceError for a lane that is
        none.
        """
        if not 0 <= lane < self.count:
            raise DeviceError(f"there is no lane {lane}", why=f"the lanes are 0 to {self.count - 1}")
        self._handles[lane] = handle


class CommandList:
    """Commands in native memory, enqueued in order by one call.

    What the commands point to (events, memory, host functions and their arguments) belongs to the caller and must
    outlive what has been enqueued.

    Raises:
        DeviceError: a command with a negative lane.
        NativeError: the native library is missing.
    """

    __slots__ = ("_arguments", "_call", "_code", "_driver", "_lanes", "_length", "_native", "_verbs", "_words")

    def __init__(self, commands: Sequence[Command], driver: DriverTable) -> None:
        lanes = [command.lane for command in commands]
        if min(lanes, default=0) < 0:
            raise DeviceError(f"a command for lane {min(lanes)}", why="lanes count from 0")
        self._driver = driver
        self._lanes = max(lanes, default=-1) + 1
        self._verbs = tuple(command.verb for command in commands)
        self._length = len(self._verbs)
        self._native = (_NativeCommand * self._length)(
            *(_NativeCommand(int(c.verb), c.lane, c.a, c.b, c.nbytes) for c in commands)
        )
        self._words = memoryview(self._native).cast("B").cast("Q")
        self._code = ctypes.c_int32()
        # ctypes objects of the right type, made once, are passed on as they are.
        self._arguments = (
            ctypes.c_void_p(ctypes.addressof(self._native)),
            ctypes.c_int64(self._length),
            ctypes.c_void_p(ctypes.addressof(self._code)),
        )
        self._call = load().issue

    def __len__(self) -> int:
        return self._length

    def issue(self, streams: Streams) -> None:
        """Enqueue all commands, in order, each on the stream of its lane.

        Raises:
            DeviceError: the driver refused a command, or a lane has no stream. The text names verb, lane and result;
                the commands before it are enqueued, those behind it are not.
        """
        if self._lanes > streams.count:
            raise DeviceError(f"a command for lane {self._lanes - 1}", why=f"there are {streams.count} streams")
        done = self._call(self._driver.pointer, streams.pointer, *self._arguments)
        if done != self._length:
            self._raise_failed(done)

    def set_source(self, index: int, address: int) -> None:
        """Command `index`, a copy, reads from `address` from the next issue on. Raises DeviceError if it is none."""
        self._patch(index, _B, address)

    def set_destination(self, index: int, address: int) -> None:
        """Command `index`, a copy, writes to `address` from the next issue on. Raises DeviceError if it is none."""
        self._patch(index, _A, address)

    def _patch(self, index: int, word: int, address: int) -> None:
        if not 0 <= index < self._length or self._verbs[index] is not Verb.COPY:
            verb = self._verbs[index].name if 0 <= index < self._length else "missing"
            raise DeviceError(f"command {index} of {self._length} is {verb}", why="only copies have addresses to set")
        self._words[index * _WORDS + word] = address

    def _raise_failed(self, index: int) -> None:
        command = self._native[index]
        raise DeviceError(
            f"command {index + 1} of {self._length}, {self._verbs[index].name} on lane {command.lane}, "
            "could not be enqueued",
            why=f"the driver returned {self._driver.error_name(self._code.value)}",
            fix="an error of earlier work on the device shows here too: run with CUDA_LAUNCH_BLOCKING=1 to find it",
        )
