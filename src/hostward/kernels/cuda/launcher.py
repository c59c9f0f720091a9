"""Launch compiled Triton kernels through the driver, without Triton's own overhead: a step has hundreds of launches.

Triton compiles and loads a kernel; then the driver launches it, with parameters laid out here once. This file holds all
code that depends on undocumented behaviour of Triton. It supports Triton 3.5 to 3.7, whose NVIDIA backends agree:

- `CompiledKernel.run` loads the kernel into the current context, with the attribute that more than 48 KiB of shared
  memory need; `function` is then its CUfunction, `metadata` tells warps and shared bytes, `asm["ptx"]` the program;
- `src.signature` has a type for each argument; those that are "constexpr" (None among them) are no parameters;
- after the arguments come two pointers to scratch memory, null for kernels that need none.

Each of these is checked against the compiled program itself before the first launch.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch

from hostward.errors import DeviceError
from hostward.kernels.cuda.operand import interpreted

ALIGNMENT_BYTES = 16
"""Triton compiles one kernel for pointers that are multiples of this, and another for those that are not."""

PARAMETER_BYTES = 8
"""Of a parameter in a `KernelLaunch`."""

_WARP_THREADS = 32
_NULL = bytes(PARAMETER_BYTES)
_SCRATCH = (8, 8)
# Format and bytes of a parameter of each type; the value is at the beginning of its place.
_TYPES = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f", "fp64": "<d"}
_POINTER = "<Q"
_ABSENT = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
"""Metadata of a kernel that a plain launch can start."""


class _NativeLaunch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("programs", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class KernelLaunch:
    """A launch of a kernel with its parameters, in native memory. A command KERNEL takes its `address`.

    Args:
        function: CUfunction, of the context that is current when it is issued.
        programs, threads: blocks, and threads of each, both along x.
        shared_bytes: dynamic shared memory of a block.
        parameters: the values in the kernel's order, each PARAMETER_BYTES long, the value at its beginning. The driver
            copies them when the launch is enqueued.

    `words` are the parameters as unsigned 64-bit words: write one to change an address from the next issue on.

    Raises:
        DeviceError: no programs or no threads, or a parameter of another length.
    """

    __slots__ = ("_native", "_pointers", "_values", "address", "words")

    def __init__(
        self, function: int, *, programs: int, threads: int, shared_bytes: int, parameters: Sequence[bytes]
    ) -> None:
        if min(programs, threads) < 1 or any(len(p) != PARAMETER_BYTES for p in parameters):
            raise DeviceError(
                f"a launch of {programs} programs of {threads} threads, parameters of "
                f"{sorted({len(p) for p in parameters})} bytes",
                why=f"a launch has at least one of both, and a parameter takes {PARAMETER_BYTES} bytes",
            )
        n = len(parameters)
        self._values = (ctypes.c_uint64 * max(1, n))(*(int.from_bytes(p, sys.byteorder) for p in parameters))
        self.words = memoryview(self._values).cast("B").cast("Q")
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * n)(*(first + i * PARAMETER_BYTES for i in range(n)))
        pointers = ctypes.addressof(self._pointers)
        self._native = _NativeLaunch(function, pointers, programs, threads, shared_bytes, 0)
        self.address = ctypes.addressof(self._native)


class Launcher:
    """Compile one Triton kernel, whose integers are all `do_not_specialize`, once per kind of operands.

    A compilation depends on compile-time parameters, dtypes and alignment of pointers, width of integers, which
    arguments are None, and the device; these make the key of the compiled kernels.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel = kernel
        self.options = options
        self.compiled: dict[tuple[object, ...], Any] = {}

    def bind(
        self, programs: int, arguments: Sequence[Any], constants: Sequence[Any], keep: Sequence[torch.Tensor]
    ) -> Launch:
        """Return a launch of `programs` programs, with arguments and constants in the kernel's order.

        The launch keeps `keep` alive, and the other arguments only until its first use: they may be freed and made
        again at the same address in between.
        """
        return Launch(self, programs, tuple(arguments), tuple(constants), tuple(keep))


class Launch:
    """Hold a launch with its arguments, whose device must be the current one whenever the launch is used."""

    __slots__ = (
        "_arguments",
        "_compiled",
        "_constants",
        "_keep",
        "_launcher",
        "_native",
        "_programs",
        "_raw",
        "_runner",
    )

    def __init__(
        self,
        launcher: Launcher,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        self._launcher = launcher
        self._programs = programs
        self._arguments = arguments
        self._constants = constants
        self._keep = keep
        # Addresses as numbers: given a tensor, the launch asks the driver about it each time.
        self._raw = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        self._compiled: Any = None
        self._runner: Any = None
        self._native: KernelLaunch | None = None

    def __call__(self) -> None:
        """Launch on the current stream through Triton, or in Triton's interpreter where that is on."""
        if interpreted():
            self._launcher.kernel[(self._programs,)](*self._arguments, *self._constants, **self._launcher.options)
            return
        if self._runner is None:
            self._runner = self._compile()[self._programs, 1, 1]
        self._runner(*self._raw, *self._constants)

    def native(self) -> KernelLaunch:
        """Return the same launch for the driver; the context in which it is issued must be current.

        Raises:
            DeviceError: the kernel needs more than a plain launch, or this version of Triton is not supported.
        """
        if self._native is None:
            self._native = native_launch(self._compile(), self._programs, (*self._raw, *self._constants))
        return self._native

    def _compile(self) -> Any:
        if self._compiled is None:
            launcher = self._launcher
            key = (torch.cuda.current_device(), *self._constants, *map(_kind, self._arguments))
            if key not in launcher.compiled:
                arguments = (*self._arguments, *self._constants)
                launcher.compiled[key] = launcher.kernel.warmup(*arguments, grid=(self._programs,), **launcher.options)
            self._compiled = launcher.compiled[key]
            self._arguments = self._keep
        return self._compiled


def launch_all(launches: Sequence[Launch]) -> None:
    """Launch one after the other on the current stream."""
    for launch in launches:
        launch()


def native_launch(compiled: Any, programs: int, arguments: Sequence[Any]) -> KernelLaunch:
    """Return the driver's launch of a compiled kernel, which is loaded into the current context.

    Args:
        compiled: Triton's CompiledKernel.
        programs: blocks.
        arguments: all arguments of the kernel in its order, constants and None included; addresses as integers.

    Raises:
        DeviceError: as `Launch.native`.
    """
    try:
        _ = compiled.run
        name, function, metadata = str(compiled.name), compiled.function, compiled.metadata
        types = tuple(compiled.src.signature.values())
        threads, shared_bytes = _WARP_THREADS * metadata.num_warps, metadata.shared
        extras = {field: getattr(metadata, field) for field in _ABSENT}
        text = compiled.asm["ptx"]
    except (AttributeError, KeyError) as error:
        raise DeviceError(
            f"the compiled kernel {getattr(compiled, 'name', compiled)} has no {error}",
            why="launches rely on what Triton 3.5 to 3.7 leave there, the text of the program included",
            fix="use such a Triton, without TRITON_STORE_BINARY_ONLY",
        ) from error
    needed = {field: value for field, value in extras.items() if value != _ABSENT[field]}
    if needed or not isinstance(function, int) or not function:
        raise DeviceError(
            f"kernel {name} cannot be launched plainly: {needed or f'its function is {function!r}'}",
            why="scratch memory, clusters and cooperative launches are not implemented",
            fix="launch it through Triton",
        )
    parameters, widths = _parameters(name, types, arguments)
    expected = ([*widths, *_SCRATCH], threads)
    found = _program_shape(name, text)
    if found != expected:
        raise DeviceError(
            f"kernel {name} takes parameters of {found[0]} bytes and {found[1]} threads, not {expected[0]} and "
            f"{expected[1]}",
            why="this Triton lays out parameters differently from 3.5 to 3.7",
            fix="use one of these",
        )
    parameters += [_NULL] * len(_SCRATCH)
    return KernelLaunch(function, programs=programs, threads=threads, shared_bytes=shared_bytes, parameters=parameters)


def _parameters(name: str, types: Sequence[object], arguments: Sequence[Any]) -> tuple[list[bytes], list[int]]:
    """Return the values as parameters, and the bytes that each takes."""
    parameters, widths = [], []
    if len(types) != len(arguments):
        raise DeviceError(f"kernel {name} takes {len(types)} arguments, not {len(arguments)}", fix="bind all of them")
    for i, (kind, argument) in enumerate(zip(types, arguments, strict=True)):
        if kind == "constexpr":
            continue
        form = _POINTER if str(kind).startswith("*") else _TYPES.get(str(kind))
        try:
            if form is None:
                raise TypeError("of a type that no plain parameter has")
            value = struct.pack(form, argument)
        except (struct.error, TypeError, OverflowError) as error:
            raise DeviceError(
                f"argument {i} of kernel {name}, {argument!r}, cannot be passed as {kind}",
                why=str(error),
                fix="pass what the kernel was compiled for",
            ) from error
        parameters.append(value.ljust(PARAMETER_BYTES, b"\0"))
        widths.append(len(value))
    return parameters, widths


def _program_shape(name: str, text: str) -> tuple[list[int], int]:
    """Return the bytes of each parameter of a PTX entry, and its threads.

    A parameter that is not a single value counts 0 bytes.
    """
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)([^{{]*)\{{", text, re.DOTALL)
    if entry is None:
        return [], 0
    widths = []
    for parameter in re.findall(r"\.param\s+([^,]*)", entry[1]):
        bits = re.match(r"\.[usfb](\d+)\s(?!.*\[)", parameter)
        widths.append(int(bits[1]) // 8 if bits else 0)
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", entry[2])
    return widths, int(threads[1]) if threads else 0


def _kind(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT_BYTES == 0
    if isinstance(argument, int):
        return int, -(2**31) <= argument < 2**31
    return None if argument is None else type(argument)
