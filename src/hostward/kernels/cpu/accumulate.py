"""Accumulate gradients of microbatches in fp32 on the host, and make norm partials of gradients there.

    task = AccumulateTask([AccumulateRange(total, grad, n)], first=True)
    accumulate(task)                                # now, on this thread and its helpers
    function, argument = task.host_function()       # or later, as a host function of a stream
    last = task.with_flags(first=False, last=True)  # the same operands in the last microbatch

`hostward.kernels.reference` is the definition in numpy.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hostward.errors import ConfigError
from hostward.kernels.cpu.library import (
    AccumulateRangeStruct,
    AccumulateTaskStruct,
    Isa,
    NormItem,
    NormTaskStruct,
    check,
    load,
)
from hostward.kernels.cpu.norm import chunk_count
from hostward.kernels.cpu.operand import FLOATS, Memory, Operands, one_dtype, require_threads


@dataclass(frozen=True)
class AccumulateRange:
    """Describe one contiguous run of elements of a task.

    Attributes:
        total: fp32, at least `length` elements; the first `length` are written. Overlaps no gradient.
        grad: fp32, bf16 or fp16, at least `length` elements; the first `length` are read.
        length: number of elements.
        first_chunk: index of the first chunk of this range in sums and exponents. A range with partials is a whole
            parameter, or a part of one that begins at a multiple of 4,096 elements.
    """

    total: Memory
    grad: Memory
    length: int
    first_chunk: int = 0


@dataclass(frozen=True)
class NormRange:
    """Describe a gradient of a norm task.

    Attributes:
        grad: fp32, bf16 or fp16, at least `length` elements; the first `length` are read.
        length: number of elements.
        first_chunk: as in `AccumulateRange`.
    """

    grad: Memory
    length: int
    first_chunk: int


class AccumulateTask:
    """Hold an immutable native task that accumulates gradients: total = grad, or total + grad, in fp32.

    Each element is one IEEE addition of exact conversions; any NaN is stored as 0x7fc00000. The operands' memory is
    read when the task runs. Ranges must not overlap.

    Args:
        ranges: at least one; all gradients have one dtype.
        first: the totals are overwritten, not read.
        last: the partials of the new totals are written too, as `hostward.kernels.cpu.norm.norm_partials` gives them.
        sums, exponents: int64 and int32, an element for each chunk; needed for `last`.
        error: int32 [1], set to the first error code and never cleared here; made if None.
        threads: at most this many threads, the one that runs the task included.
        isa: instruction set.

    Raises:
        PlacementError: an operand on the wrong device, of the wrong dtype, strided, read-only or too short.
        ConfigError: operands that do not belong together.
    """

    def __init__(
        self,
        ranges: Sequence[AccumulateRange],
        *,
        first: bool,
        last: bool = False,
        sums: Memory | None = None,
        exponents: Memory | None = None,
        error: Memory | None = None,
        threads: int = 1,
        isa: Isa = Isa.BEST,
    ) -> None:
        require_threads(threads)
        _require_ranges(ranges)
        self.error: Memory = np.zeros(1, dtype=np.int32) if error is None else error
        self._operands = Operands()
        native = (AccumulateRangeStruct * len(ranges))()
        dtypes: set[str] = set()
        for i, part in enumerate(ranges):
            total = self._operands.check(part.total, f"ranges[{i}].total", ("fp32",), part.length, writable=True)
            grad = self._operands.check(part.grad, f"ranges[{i}].grad", tuple(FLOATS), part.length)
            dtypes.add(grad.dtype)
            native[i] = AccumulateRangeStruct(total.address, grad.address, part.length, part.first_chunk)
        self._ranges = native
        chunks = _chunks(ranges)
        self.struct = AccumulateTaskStruct(
            grad_dtype=int(one_dtype(dtypes, "gradients")),
            threads=threads,
            isa=int(isa),
            ranges=ctypes.addressof(native),
            n_ranges=len(ranges),
            sums=self._operands.optional(sums, "sums", "int64", chunks, writable=True),
            exponents=self._operands.optional(exponents, "exponents", "int32", chunks, writable=True),
            error=self._operands.check(self.error, "error", ("int32",), 1, writable=True).address,
        )
        self._set_flags(first, last)

    def _set_flags(self, first: bool, last: bool) -> None:
        if last and not {"sums", "exponents"} <= self._operands.keys():
            raise ConfigError(
                "the last microbatch without sums and exponents",
                why="the norm partials of the totals are part of it",
                fix="pass sums (int64) and exponents (int32), or last=False",
            )
        self.struct.first, self.struct.last = int(first), int(last)

    def with_flags(self, *, first: bool, last: bool, error: Memory | None = None) -> AccumulateTask:
        """Return a second task over the same operands, which are not checked again, with other flags.

        Args:
            first, last: as for the class.
            error: another error word, int32 [1]; None: the same as this task.

        Raises:
            PlacementError: `error` on the wrong device, of the wrong dtype or empty.
            ConfigError: `last` without sums and exponents.
        """
        twin = copy.copy(self)
        twin._operands = Operands(self._operands)
        twin.struct = AccumulateTaskStruct.from_buffer_copy(self.struct)
        twin._set_flags(first, last)
        if error is not None:
            twin.error = error
            twin.struct.error = twin._operands.check(error, "error", ("int32",), 1, writable=True).address
        return twin

    def host_function(self) -> tuple[int, int]:
        """Return the address of a function `void (*)(void *)` that runs this task without the GIL, and its argument.

        The task must be kept alive until the function has run. It never throws; its error code goes to `error`.
        """
        return load().accumulate_host_function, ctypes.addressof(self.struct)

    def raise_error(self) -> None:
        """Raise NativeError if a run of this task has left a code in `error`."""
        check(int(self.error[0]), "hostward_accumulate")


class NormTask:
    """Hold an immutable native task that writes the norm partials of gradients on the host.

    Args:
        ranges: at least one; all gradients have one dtype.
        sums, exponents: int64 and int32, an element for each chunk.
        error: int32 [1], set to the first error code and never cleared here; made if None.
        threads: at most this many threads, the one that runs the task included.
        isa: instruction set.

    Raises:
        PlacementError: an operand on the wrong device, of the wrong dtype, strided, read-only or too short.
        ConfigError: operands that do not belong together.
    """

    def __init__(
        self,
        ranges: Sequence[NormRange],
        *,
        sums: Memory,
        exponents: Memory,
        error: Memory | None = None,
        threads: int = 1,
        isa: Isa = Isa.BEST,
    ) -> None:
        require_threads(threads)
        _require_ranges(ranges)
        self.error: Memory = np.zeros(1, dtype=np.int32) if error is None else error
        self._operands = Operands()
        native = (NormItem * len(ranges))()
        dtypes: set[str] = set()
        for i, part in enumerate(ranges):
            grad = self._operands.check(part.grad, f"ranges[{i}].grad", tuple(FLOATS), part.length)
            dtypes.add(grad.dtype)
            native[i] = NormItem(grad.address, part.length, part.first_chunk)
        self._items = native
        chunks = _chunks(ranges)
        self.struct = NormTaskStruct(
            grad_dtype=int(one_dtype(dtypes, "gradients")),
            threads=threads,
            isa=int(isa),
            items=ctypes.addressof(native),
            n_items=len(ranges),
            sums=self._operands.check(sums, "sums", ("int64",), chunks, writable=True).address,
            exponents=self._operands.check(exponents, "exponents", ("int32",), chunks, writable=True).address,
            error=self._operands.check(self.error, "error", ("int32",), 1, writable=True).address,
        )

    def host_function(self) -> tuple[int, int]:
        """Return the address of a function `void (*)(void *)` that runs this task without the GIL, and its argument.

        The task must be kept alive until the function has run.
        """
        return load().norm_host_function, ctypes.addressof(self.struct)

    def raise_error(self) -> None:
        """Raise NativeError if a run of this task has left a code in `error`."""
        check(int(self.error[0]), "hostward_norm")


def accumulate(task: AccumulateTask) -> None:
    """Run the task on this thread and its helpers, without the GIL.

    Raises:
        NativeError: the native code does not support the task; it has written nothing.
    """
    check(load().accumulate(ctypes.byref(task.struct)), "hostward_accumulate")


def norm_now(task: NormTask) -> None:
    """Run the task on this thread and its helpers, without the GIL.

    Raises:
        NativeError: the native code does not support the task; it has written nothing.
    """
    check(load().norm(ctypes.byref(task.struct)), "hostward_norm")


def _require_ranges(ranges: Sequence[AccumulateRange | NormRange]) -> None:
    if not ranges:
        raise ConfigError("a task without ranges", why="it has no dtype", fix="pass one range or more")
    for i, part in enumerate(ranges):
        if part.length < 0 or part.first_chunk < 0:
            raise ConfigError(
                f"ranges[{i}] has length {part.length} and first_chunk {part.first_chunk}",
                why="both are counts",
                fix="pass numbers that are not negative",
            )


def _chunks(ranges: Sequence[AccumulateRange | NormRange]) -> int:
    """Return the number of entries of sums and exponents that the ranges need."""
    return max(part.first_chunk + chunk_count(part.length) for part in ranges)
