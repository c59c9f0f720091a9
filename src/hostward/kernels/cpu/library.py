"""Load the native library and declare its C interface (native/include/hostward.h)."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from hostward.errors import NativeError

ABI_VERSION = 11
LIBRARY = Path("_native") / "libhostward_native.so"

_BUILD = (
    "install the package with `pip install .`, or in a source tree run "
    "`cmake -S . -B build && cmake --build build && cmake --install build --prefix src` "
    "or, with g++ alone, `native/build.sh src/hostward/_native`"
)


class Isa(IntEnum):
    """Name the instruction set of the host kernels; results never depend on it."""

    BEST = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3
    NEON = 4


class Dtype(IntEnum):
    """Name the element types of gradients and weights."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


class Range(ctypes.Structure):
    """Declare one contiguous part of a task, the C struct hostward_range."""

    _fields_ = [
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("grad", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("weight_out", ctypes.c_void_p),
        ("count_out", ctypes.c_void_p),
    ]


class Task(ctypes.Structure):
    """Declare the C struct hostward_adamw_task."""

    _fields_ = [
        ("grad_dtype", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("master_kind", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("exp_avg_dtype", ctypes.c_int32),
        ("exp_avg_sq_dtype", ctypes.c_int32),
        ("role", ctypes.c_int32),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("exp_avg_scale", ctypes.c_void_p),
        ("exp_avg_sq_scale", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("n_ranges", ctypes.c_int64),
        ("hyper", ctypes.c_void_p),
        ("bc1", ctypes.c_void_p),
        ("inv_sqrt_bc2", ctypes.c_void_p),
        ("table_length", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("exp_avg_out", ctypes.c_void_p),
        ("exp_avg_sq_out", ctypes.c_void_p),
        ("exp_avg_scale_out", ctypes.c_void_p),
        ("exp_avg_sq_scale_out", ctypes.c_void_p),
        ("remainder_out", ctypes.c_void_p),
        ("master_out", ctypes.c_void_p),
        ("guess", ctypes.c_void_p),
    ]


class NormItem(ctypes.Structure):
    """Declare the C struct hostward_norm_item."""

    _fields_ = [("grad", ctypes.c_void_p), ("length", ctypes.c_int64), ("first_chunk", ctypes.c_int64)]


class NormTaskStruct(ctypes.Structure):
    """Declare the C struct hostward_norm_task."""

    _fields_ = [
        ("grad_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("items", ctypes.c_void_p),
        ("n_items", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("exponents", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
    ]


class AccumulateRangeStruct(ctypes.Structure):
    """Declare the C struct hostward_accumulate_range."""

    _fields_ = [
        ("total", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("first_chunk", ctypes.c_int64),
    ]


class AccumulateTaskStruct(ctypes.Structure):
    """Declare the C struct hostward_accumulate_task."""

    _fields_ = [
        ("grad_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("last", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("ranges", ctypes.c_void_p),
        ("n_ranges", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("exponents", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
    ]


class ClockedCall(ctypes.Structure):
    """Declare the C struct hostward_clocked_call, whose times are those of `time.monotonic_ns`."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
        ("started_ns", ctypes.c_int64),
        ("ended_ns", ctypes.c_int64),
    ]


class CopyRange(ctypes.Structure):
    """Declare the C struct hostward_copy_range."""

    _fields_ = [
        ("into", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("size_bytes", ctypes.c_int64),
    ]


class Lanes(ctypes.Structure):
    """Declare the C struct hostward_lanes."""

    _fields_ = [
        ("works", ctypes.c_int64),
        ("rounds", ctypes.c_int64),
        ("seconds", ctypes.c_void_p),
        ("orders", ctypes.c_void_p),
        ("lane_ends", ctypes.c_int64 * 4),
        ("wait_ends", ctypes.c_void_p),
        ("waits", ctypes.c_void_p),
        ("speeds", ctypes.c_void_p),
    ]


_CODES = {
    1: "a pointer that the task needs is null",
    2: "a length, offset, count or time is negative, bytes are no whole masters, numbers lead outside of what they "
    "number, or fewer than one thread was asked for",
    3: "the dtypes and the master kind do not go together",
    4: "this processor or this build lacks the instruction set that was asked for",
    5: "a step count lies past the end of bias correction tables that have not reached 1",
    6: "a piece of work waits for one that was issued after it",
}


def describe_code(code: int) -> str:
    """Return the meaning of an error code of the native library."""
    return _CODES.get(code, f"unknown error code {code}")


def check(code: int, function: str) -> None:
    """Raise NativeError unless `code` is 0.

    Raises:
        NativeError: `function` reported an error; it has written nothing.
    """
    if code == 0:
        return
    fix = "build the tables longer" if code == 5 else "choose Isa.BEST" if code == 4 else "correct the operands"
    raise NativeError(f"{function} failed with code {code}: {describe_code(code)}", why="nothing was written", fix=fix)


@dataclass(frozen=True)
class Library:
    """Hold the entry points of the native library; calls through them release the GIL."""

    path: Path
    adamw_step: Callable[[Any], int]
    norm_partials: Callable[..., int]
    norm: Callable[[Any], int]
    accumulate: Callable[[Any], int]
    copy: Callable[..., int]
    bind_memory: Callable[[int, int, int], int]
    first_touch: Callable[[int, int, int], int]
    issue: Callable[..., int]
    bench_rmw: Callable[..., int]
    simulate_lanes: Callable[..., int]
    isa_best: Callable[[], int]
    isa_supported: Callable[[int], int]
    adamw_host_function: int
    """Address of a function `void (*)(void *task)`, for stream-ordered launch, as are the three below."""
    norm_host_function: int
    accumulate_host_function: int
    clocked_host_function: int
    """Its task is a ClockedCall."""

    def supported_isas(self) -> tuple[Isa, ...]:
        """Return the instruction sets that this processor runs, without BEST, slowest first."""
        return tuple(isa for isa in Isa if isa is not Isa.BEST and self.isa_supported(int(isa)))


def library_path(folders: Sequence[str]) -> Path:
    """Return where the library is, or where it would be if it is in none of the package's folders.

    Args:
        folders: of the package, its `__path__`. An editable install has two: the library's, and the source tree's.
    """
    found = [Path(folder) / LIBRARY for folder in folders]
    return next((path for path in found if path.is_file()), found[-1])


def open_library(path: Path) -> Library:
    """Open the library at `path` and declare its functions.

    Raises:
        NativeError: the file is missing, cannot be loaded, or was built for another version of this package.
    """
    if not path.is_file():
        raise NativeError(f"the native library {path} does not exist", why="it has not been built", fix=_BUILD)
    try:
        dll = ctypes.CDLL(str(path))
        abi_version = int(dll.hostward_abi_version())
    except (OSError, AttributeError) as error:
        raise NativeError(f"the native library {path} cannot be loaded", why=str(error), fix=_BUILD) from error
    dll.hostward_task_bytes.restype = ctypes.c_int64
    if abi_version != ABI_VERSION or int(dll.hostward_task_bytes()) != ctypes.sizeof(Task):
        raise NativeError(
            f"the native library {path} has interface version {abi_version}, this package needs {ABI_VERSION}",
            why="the library and the Python files come from different versions",
            fix=_BUILD,
        )
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures: tuple[tuple[str, type[Any], list[type[Any]]], ...] = (
        ("hostward_adamw_step", ctypes.c_int, [pointer]),
        ("hostward_norm_partials", ctypes.c_int, [pointer, i64, i32, pointer, pointer, i32, i32]),
        ("hostward_norm", ctypes.c_int, [pointer]),
        ("hostward_accumulate", ctypes.c_int, [pointer]),
        ("hostward_copy", ctypes.c_int, [pointer, i64, i32, i32]),
        ("hostward_bind_memory", i32, [pointer, i64, i32]),
        ("hostward_first_touch", ctypes.c_int, [pointer, i64, i32]),
        ("hostward_issue", ctypes.c_int, [pointer]),
        ("hostward_bench_rmw", ctypes.c_int, [pointer, i64, i32, i32, i32]),
        ("hostward_simulate_lanes", ctypes.c_int, [pointer, pointer, pointer]),
        ("hostward_isa_best", i32, []),
        ("hostward_isa_supported", i32, [i32]),
    )
    for name, result, arguments in signatures:
        function = dll[name]
        function.restype = result
        function.argtypes = arguments
        setattr(dll, name, function)
    return Library(
        path=path,
        adamw_step=dll.hostward_adamw_step,
        norm_partials=dll.hostward_norm_partials,
        norm=dll.hostward_norm,
        accumulate=dll.hostward_accumulate,
        copy=dll.hostward_copy,
        bind_memory=dll.hostward_bind_memory,
        first_touch=dll.hostward_first_touch,
        issue=dll.hostward_issue,
        bench_rmw=dll.hostward_bench_rmw,
        simulate_lanes=dll.hostward_simulate_lanes,
        isa_best=dll.hostward_isa_best,
        isa_supported=dll.hostward_isa_supported,
        adamw_host_function=_address(dll.hostward_adamw_host_function),
        norm_host_function=_address(dll.hostward_norm_host_function),
        accumulate_host_function=_address(dll.hostward_accumulate_host_function),
        clocked_host_function=_address(dll.hostward_clocked_host_function),
    )


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@functools.cache
def load() -> Library:
    """Return the library that was built with this package, opened once.

    Raises:
        NativeError: see `open_library`.
    """
    return open_library(library_path(sys.modules["hostward"].__path__))


def bind_memory(address: int, size_bytes: int, numa_node: int) -> int:
    """Ask the system to take pages that are not touched yet from one NUMA node while it has free pages.

    Args:
        address: page-aligned start of the memory.
        size_bytes: its length.
        numa_node: number of the node; -1: any.

    Returns:
        0, or the errno of a failure, which changes nothing.
    """
    return load().bind_memory(address, size_bytes, numa_node)


def first_touch(address: int, size_bytes: int, threads: int) -> None:
    """Write a zero byte into every page of `size_bytes` bytes at `address`, in parallel.

    Raises:
        NativeError: an argument is negative or null.
    """
    check(load().first_touch(address, size_bytes, threads), "hostward_first_touch")
