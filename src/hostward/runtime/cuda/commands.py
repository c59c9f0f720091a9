"""Enqueue lists of driver commands by one native call.

    driver = driver_table()
    streams = Streams(2)
    streams.set(0, compute_handle)
    streams.set(1, copy_handle)
    commands = CommandList(
        [Command(Verb.WAIT, 1, event), Command(Verb.COPY, 1, to, source, size), Command(Verb.RECORD, 1, done)], driver
    )
    commands.issue(streams)

A list is made once and issued in every step; changes in between are written into it. Several lists are enqueued by one
call as `CommandBatch`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from hostward.errors import DeviceError
from hostward.kernels.cpu.library import load
from hostward.runtime.cuda import driver


class Verb(IntEnum):
    """Names the action of a command on its stream; the numbers are those of hostward_command_kind."""

    WAIT = 0
    """Stream waits for event `a`."""
    RECORD = 1
    """Event `a` is recorded; event 0 does nothing."""
    COPY = 2
    """`nbytes` bytes go to address `a` from address `b`; nothing happens for 0 bytes."""
    HOST = 3
    """C function at address `a` is called with argument `b`, in stream order, on a thread of the driver."""
    KERNEL = 4
    """Kernel of the `KernelLaunch` at address `a` is launched, with its contents at the time of issue."""


@dataclass(frozen=True, slots=True)
class Command:
    """Describes one command: handles and addresses as integers, `lane` the index of its stream in `Streams`."""

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


class _NativeList(ctypes.Structure):
    _fields_ = [("commands", ctypes.c_void_p), ("n", ctypes.c_int64)]


class _NativeFailure(ctypes.Structure):
    _fields_ = [
        ("list", ctypes.c_int64),
        ("command", ctypes.c_int64),
        ("code", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class NativeCall(ctypes.Structure):
    """Holds the argument of the native call."""

    _fields_ = [
        ("driver", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("streams", ctypes.c_void_p),
        ("lists", ctypes.c_void_p),
        ("n_lists", ctypes.c_int64),
        ("failure", _NativeFailure),
    ]


_FUNCTIONS = (
    "stream_wait_event",
    "event_record",
    "memcpy_async",
    "launch_host_function",
    "launch_kernel",
    "context_get_current",
    "context_set_current",
)


class _NativeDriver(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _FUNCTIONS]


# A command seen as four 64-bit words: kind and lane, a, b, bytes.
_WORDS = ctypes.sizeof(_NativeCommand) // 8
_FIELDS = {"a": 1, "b": 2, "nbytes": 3}


class DriverTable:
    """Holds the driver functions that command lists call.

    Args:
        stream_wait_event: address of cuStreamWaitEvent(stream, event, flags) or of a function like it.
        event_record: address of cuEventRecord(event, stream).
        memcpy_async: address of cuMemcpyAsync(destination, source, bytes, stream).
        launch_host_function: address of cuLaunchHostFunc(stream, function, argument).
        launch_kernel: address of cuLaunchKernel.
        context_get_current: address of cuCtxGetCurrent(context).
        context_set_current: address of cuCtxSetCurrent(context).
        error_name: returns the name of a result that is not 0.

    Raises:
        NativeError: the native library is missing.
    """

    def __init__(
        self,
        *,
        stream_wait_event: int,
        event_record: int,
        memcpy_async: int,
        launch_host_function: int,
        launch_kernel: int,
        context_get_current: int,
        context_set_current: int,
        error_name: Callable[[int], str],
    ) -> None:
        self._native = _NativeDriver(
            stream_wait_event,
            event_record,
            memcpy_async,
            launch_host_function,
            launch_kernel,
            context_get_current,
            context_set_current,
        )
        self.address = ctypes.addressof(self._native)
        self.error_name = error_name
        self.issue = load().issue


@functools.cache
def driver_table() -> DriverTable:
    """Return the functions of the CUDA driver. Raises DeviceError if the driver is missing."""
    return DriverTable(
        stream_wait_event=driver.function_address("cuStreamWaitEvent"),
        event_record=driver.function_address("cuEventRecord"),
        memcpy_async=driver.function_address("cuMemcpyAsync"),
        launch_host_function=driver.function_address("cuLaunchHostFunc"),
        launch_kernel=driver.function_address("cuLaunchKernel"),
        context_get_current=driver.function_address("cuCtxGetCurrent"),
        context_set_current=driver.function_address("cuCtxSetCurrent"),
        error_name=driver.error_name,
    )


class Streams:
    """Holds the stream handles (CUstream) of `count` lanes, 0 (the legacy default stream) at first.

    `context` (CUcontext) is current while commands are enqueued, on whatever thread that happens; 0: the thread's own.
    """

    def __init__(self, count: int, context: int = 0) -> None:
        self.count = count
        self.context = context
        self._handles = (ctypes.c_void_p * count)()
        self.address = ctypes.addressof(self._handles)

    def set(self, lane: int, handle: int) -> None:
        """Send commands issued on `lane` from now on to stream `handle`. Raises DeviceError for an unknown lane."""
        if not 0 <= lane < self.count:
            raise DeviceError(f"there is no lane {lane}", why=f"the lanes are 0 to {self.count - 1}")
        self._handles[lane] = handle


class CommandList:
    """Holds commands in native memory, and enqueues them in order by one call.

    Events, memory, launches, host functions and their arguments belong to the caller and must outlive the enqueued
    commands; launches only the call.

    `words` are the commands as unsigned 64-bit words; `word` returns the index of the word to write in order to change
    a command from the next issue on.

    Raises:
        DeviceError: a command with a negative lane.
    """

    __slots__ = ("_call", "_native", "_verbs", "lanes", "words")

    def __init__(self, commands: Sequence[Command], driver: DriverTable) -> None:
        lanes = [command.lane for command in commands]
        if min(lanes, default=0) < 0:
            raise DeviceError(f"a command for lane {min(lanes)}", why="lanes count from 0")
        self.lanes = max(lanes, default=-1) + 1
        """Streams that are needed at least."""
        self._verbs = tuple(command.verb for command in commands)
        self._native = (_NativeCommand * len(commands))(
            *(_NativeCommand(int(c.verb), c.lane, c.a, c.b, c.nbytes) for c in commands)
        )
        self.words = memoryview(self._native).cast("B").cast("Q")
        self._call = _Call([self.entry()], self.lanes, driver)

    def __len__(self) -> int:
        return len(self._verbs)

    def issue(self, streams: Streams) -> None:
        """Enqueue all commands, in order, each on the stream of its lane.

        Raises:
            DeviceError: the driver returned an error, or a lane has no stream. The text names verb, lane and result;
                the commands before it are enqueued, those after it are not.
        """
        if self._call.refused(streams):
            raise self._call.error((self,))

    def word(self, index: int, verb: Verb, field: str) -> int:
        """Return the index in `words` of field "a", "b" or "nbytes" of command `index`.

        Raises:
            DeviceError: the command is not a `verb`.
        """
        found = self._verbs[index].name if 0 <= index < len(self) else "missing"
        if found != verb.name:
            raise DeviceError(f"command {index} of {len(self)} is {found}, not {verb.name}", why="it takes other words")
        return index * _WORDS + _FIELDS[field]

    def entry(self) -> tuple[int, int]:
        """Return the address and number of the commands."""
        return ctypes.addressof(self._native), len(self)

    def describe(self, index: int) -> str:
        """Describe command `index` for an error text."""
        command = self._native[index]
        return f"command {index + 1} of {len(self)}, {self._verbs[index].name} on lane {command.lane},"


class CommandBatch:
    """Enqueues lists one after the other by one call; later changes of the lists take effect."""

    __slots__ = ("_call", "_lists")

    def __init__(self, lists: Sequence[CommandList], driver: DriverTable) -> None:
        self._lists = tuple(lists)
        self._call = _Call([one.entry() for one in lists], max((one.lanes for one in lists), default=0), driver)

    def issue(self, streams: Streams) -> None:
        """Enqueue all commands of all lists. Raises DeviceError as `CommandList.issue` does."""
        if self._call.refused(streams):
            raise self._call.error(self._lists)


class _Call:
    """Prepares the native call for some lists, so that each issue passes one pointer only.

    Args:
        entries: address and number of the commands of each list; the caller keeps them alive.
        lanes: number of streams that are needed.
    """

    __slots__ = ("_driver", "_entries", "_issue", "_lanes", "_native", "_pointer", "_streams")

    def __init__(self, entries: Sequence[tuple[int, int]], lanes: int, driver: DriverTable) -> None:
        self._driver = driver
        self._issue = driver.issue
        self._lanes = lanes
        self._entries = (_NativeList * len(entries))(*(_NativeList(*entry) for entry in entries))
        self._native = NativeCall(driver.address, None, None, ctypes.addressof(self._entries), len(entries))
        # A ctypes object of the right type is passed on as it is.
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._native))
        self._streams: Streams | None = None

    def refused(self, streams: Streams) -> bool:
        """Enqueue, and return whether the driver returned an error. Raises DeviceError for too few streams."""
        if streams is not self._streams:
            if self._lanes > streams.count:
                raise DeviceError(f"a command for lane {self._lanes - 1}", why=f"there are {streams.count} streams")
            self._native.context, self._native.streams = streams.context, streams.address
            self._streams = streams
        return bool(self._issue(self._pointer))

    def error(self, lists: Sequence[CommandList]) -> DeviceError:
        """Return the error of the last call; `lists` are those of `entries`."""
        failure = self._native.failure
        return DeviceError(
            f"{lists[failure.list].describe(failure.command)} could not be enqueued"
            if failure.list >= 0
            else "the device's context could not be made current",
            why=f"the driver returned {self._driver.error_name(failure.code)}",
            fix="an error of earlier work on the device shows here too: run with CUDA_LAUNCH_BLOCKING=1 to find it",
        )
