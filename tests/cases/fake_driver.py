"""A driver that remembers what it was called with, and streams for it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from hostward.runtime.cuda.commands import DriverTable, Streams

STREAMS = (0x7F0000001000, 0, 0x7F0000003000)
KERNEL_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


@dataclass
class FakeDriver:
    """Stands for the CUDA driver: remembers its calls, and refuses the one with index `refused` with code 700."""

    refused: int = -1
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    """Events, in the order in which they were recorded."""
    context: int | None = None

    def __post_init__(self) -> None:
        pointer, word = ctypes.c_void_p, ctypes.c_uint64
        self._functions = {
            "stream_wait_event": ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_uint)(self._call("wait")),
            "event_record": ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(self._call("record")),
            "memcpy_async": ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, pointer)(self._call("copy")),
            "launch_host_function": ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer)(self._call("host")),
            "launch_kernel": KERNEL_TYPE(self._kernel),
            "context_get_current": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(pointer))(self._get_context),
            "context_set_current": ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._set_context),
        }

    def _call(self, name: str) -> Any:
        def call(*arguments: int | None) -> int:
            self.calls.append((name, *(argument or 0 for argument in arguments)))
            if name == "record":
                self.records.append(arguments[0] or 0)
            return 700 if len(self.calls) - 1 == self.refused else 0

        return call

    def _kernel(self, *arguments: Any) -> int:
        """(kernel, stream, function, grid and block, shared bytes, first parameter as int64)"""
        function, *shape, shared_bytes, stream, parameters, extra = arguments
        assert extra is None
        first = ctypes.cast(parameters[0], ctypes.POINTER(ctypes.c_int64))[0]
        return int(self._call("kernel")(stream, function, tuple(shape), shared_bytes, first))

    def _get_context(self, context: Any) -> int:
        context[0] = self.context
        return 0

    def _set_context(self, context: int | None) -> int:
        self.context = context
        return int(self._call("context")(context))

    def table(self) -> DriverTable:
        addresses = {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in self._functions.items()}
        return DriverTable(**addresses, error_name=lambda code: f"FAKE_ERROR_{code}")


def streams() -> Streams:
    made = Streams(len(STREAMS))
    for lane, handle in enumerate(STREAMS):
        made.set(lane, handle)
    return made
