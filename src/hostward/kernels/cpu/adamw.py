"""Run AdamW on the host: build the task for native code from checked memory.

    tables = bias_tables(0.9, 0.999, 1 << 20)
    task = AdamWTask(ranges, exp_avg=..., exp_avg_sq=..., remainder=..., hyper=..., tables=tables)
    adamw_step(task)                              # now, on this thread and its helpers
    function, argument = task.host_function()     # or later, as a host function of a stream

docs/exactness.md states the arithmetic; `hostward.kernels.reference` is its definition in numpy.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from hostward.errors import ConfigError
from hostward.kernels.cpu.library import Dtype, Isa, Range, Task, check, load
from hostward.kernels.cpu.operand import (
    FLOATS,
    FP8_BLOCK,
    MOMENTS,
    Memory,
    Operand,
    Operands,
    one_dtype,
    require_blocks,
    require_threads,
)

FloatTable = npt.NDArray[np.float64]


class MasterKind(IntEnum):
    """Name how the fp32 main weight is stored."""

    WEIGHT = 0
    """The weight itself: fp32, or bf16 that is rounded at random."""
    SPLIT = 1
    """The bf16 weight and, as int16 remainder, the low 16 bits."""
    PLAIN = 2
    """An fp32 tensor besides the bf16 or fp16 weight."""


class Role(IntEnum):
    """Name what a task does (hostward_role)."""

    STEP = 0
    """It steps its own set of the state."""
    GUESS = 1
    """It steps from its own set to the other, on the guess that the step does not clip, and records that.

    `scale` and `skip` are those of the step before: nothing is done if that one clipped or was skipped.
    """
    CONFIRM = 2
    """It is the step of a guess: it does nothing if the guess was right, and else writes the other set anew."""


GUESS_WORDS = 6
"""Length of the record of a guess, int64 (hostward_guess)."""


@dataclass(frozen=True)
class OtherSet:
    """Hold a second set of the state, of the dtypes and lengths of a task's own.

    `guess` is the record of the guess, int64 [6]. Weights and counts of the other set are in the ranges.
    """

    exp_avg: Memory
    exp_avg_sq: Memory
    remainder: Memory | None
    master: Memory | None
    guess: Memory


@dataclass(frozen=True)
class AdamWRange:
    """Describe one contiguous run of elements of a task.

    Attributes:
        offset: first element in exp_avg, exp_avg_sq, remainder and master.
        length: number of elements.
        grad: at least `length` elements, fp32, bf16 or fp16; the first `length` are read.
        weight: at least `length` elements, fp32, bf16 or fp16; the first `length` are written.
        count: one int64, the finished steps; no two ranges of a task share one.
        weight_out, count_out: the same of the other set, where the task has one.
    """

    offset: int
    length: int
    grad: Memory
    weight: Memory
    count: Memory
    weight_out: Memory | None = None
    count_out: Memory | None = None


def bias_tables(beta1: float, beta2: float, length: int) -> tuple[FloatTable, FloatTable]:
    """Return the bias corrections by step t, in float64.

    bc1[t] is 1 - beta1**t, and inv_sqrt_bc2[t] is 1 / sqrt(1 - beta2**t).

    Entry 0 is unused and 1. The tables end at the first step where both are exactly 1, which then stands for every
    later step, and have at most `length` entries.

    Raises:
        ConfigError: a beta outside [0, 1), or `length` below 2.
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"{name} is {beta}", why="a decay rate lies in [0, 1)", fix=f"choose {name} in [0, 1)")
    if length < 2:
        raise ConfigError(f"the tables have length {length}", why="entry 0 is unused", fix="ask for 2 entries or more")
    bc1, inv_sqrt_bc2 = [1.0], [1.0]
    for step in range(1, length):
        bc1.append(1.0 - beta1**step)
        inv_sqrt_bc2.append(1.0 / math.sqrt(1.0 - beta2**step))
        if bc1[-1] == 1.0 and inv_sqrt_bc2[-1] == 1.0:
            break
    return np.array(bc1, dtype=np.float64), np.array(inv_sqrt_bc2, dtype=np.float64)


def hyper_array(lr: float, weight_decay: float, beta1: float, beta2: float, eps: float) -> FloatTable:
    """Return the hyper-parameters as the five float64 that a task reads when it runs.

    Write to index 0 to change lr.
    """
    return np.array([lr, weight_decay, beta1, beta2, eps], dtype=np.float64)


class AdamWTask:
    """Hold a native AdamW task and the memory that its pointers point to.

    The task is immutable: operands are checked and pointers are taken once. Gradients, scale, skip and hyper are read
    when the task runs. Ranges must not overlap.

    Args:
        ranges: the runs of elements, at least one; all gradients have one dtype, all weights another.
        exp_avg, exp_avg_sq: fp32 or bf16 [n], each of its own dtype, n at least the largest offset + length; or uint8
            [129 b], a byte for each of 128 b elements and one for each of b blocks of 128: all offsets are then
            multiples of 128.
        remainder: int16 [n], the low 16 bits of the fp32 main weights, for MasterKind.SPLIT, else None.
        master: fp32 [n], the fp32 main weights, for MasterKind.PLAIN, else None. With neither, the weights
            are their own main weights, fp32 or bf16.
        hyper: float64 [5]: lr, weight_decay, beta1, beta2, eps.
        tables: what `bias_tables` returned for the betas in `hyper`.
        scale: fp32 [1], factor of every gradient; None is 1.
        skip: int32 [1]; non-zero makes the task write nothing and advance no count. None is 0.
        error: int32 [1], set to the first error code and never cleared here; made if None.
        threads: at most this many threads, the one that runs the task included.
        isa: instruction set.
        role: what the task does.
        other: a second set of the state, which roles other than STEP write, and only they.

    Raises:
        PlacementError: an operand on the wrong device, of the wrong dtype, strided, read-only or too short.
        ConfigError: operands that do not belong together.
    """

    def __init__(
        self,
        ranges: Sequence[AdamWRange],
        *,
        exp_avg: Memory,
        exp_avg_sq: Memory,
        remainder: Memory | None = None,
        master: Memory | None = None,
        hyper: Memory,
        tables: tuple[Memory, Memory],
        scale: Memory | None = None,
        skip: Memory | None = None,
        error: Memory | None = None,
        threads: int = 1,
        isa: Isa = Isa.BEST,
        role: Role = Role.STEP,
        other: OtherSet | None = None,
    ) -> None:
        require_threads(threads)
        if (other is None) is not (role is Role.STEP):
            raise ConfigError(
                f"a task with the role {role.name} and {'no' if other is None else 'an'} other set",
                why="a step changes its own set, a guess and its confirmation write another one",
                fix="pass the other set with Role.GUESS and Role.CONFIRM, and only with them",
            )
        self.error: Memory = np.zeros(1, dtype=np.int32) if error is None else error
        self._operands = Operands()
        if not ranges:
            raise ConfigError("a task without ranges", why="it has no dtype", fix="pass one range or more")
        elements = max(r.offset + r.length for r in ranges)
        native, grad_dtype, weight_dtype = self._native_ranges(ranges)
        self._ranges = native
        kind = _master_kind(weight_dtype, remainder is not None, master is not None)
        first, first_scale = self._moment(exp_avg, "exp_avg", elements)
        second, second_scale = self._moment(exp_avg_sq, "exp_avg_sq", elements)
        self.struct = Task(
            grad_dtype=int(grad_dtype),
            weight_dtype=int(weight_dtype),
            master_kind=int(kind),
            threads=threads,
            isa=int(isa),
            role=int(role),
            exp_avg_dtype=MOMENTS[first.dtype],
            exp_avg_sq_dtype=MOMENTS[second.dtype],
            exp_avg=first.address,
            exp_avg_sq=second.address,
            exp_avg_scale=first_scale,
            exp_avg_sq_scale=second_scale,
            remainder=self._operands.optional(remainder, "remainder", "int16", elements, writable=True),
            master=self._operands.optional(master, "master", "fp32", elements, writable=True),
            ranges=ctypes.addressof(native),
            n_ranges=len(ranges),
            scale=self._operands.optional(scale, "scale", "fp32", 1),
            skip=self._operands.optional(skip, "skip", "int32", 1),
            error=self._operands.check(self.error, "error", ("int32",), 1, writable=True).address,
        )
        self._set_hyper(hyper)
        self._set_tables(tables)
        if other is not None:
            self._set_other(other, kind, elements)

    def _set_other(self, other: OtherSet, kind: MasterKind, elements: int) -> None:
        """Take the operands of the other set. Raises ConfigError where they are not those of the task's own."""
        if _master_kind(Dtype(self.struct.weight_dtype), other.remainder is not None, other.master is not None) != kind:
            raise ConfigError("two sets that store main weights differently", fix="pass two sets of the same operands")
        struct, optional = self.struct, self._operands.optional
        first, struct.exp_avg_scale_out = self._moment(other.exp_avg, "exp_avg_out", elements)
        second, struct.exp_avg_sq_scale_out = self._moment(other.exp_avg_sq, "exp_avg_sq_out", elements)
        if (MOMENTS[first.dtype], MOMENTS[second.dtype]) != (struct.exp_avg_dtype, struct.exp_avg_sq_dtype):
            raise ConfigError("two sets whose moments differ in dtype", fix="pass two sets of the same operands")
        struct.exp_avg_out, struct.exp_avg_sq_out = first.address, second.address
        struct.remainder_out = optional(other.remainder, "remainder_out", "int16", elements, writable=True)
        struct.master_out = optional(other.master, "master_out", "fp32", elements, writable=True)
        struct.guess = optional(other.guess, "guess", "int64", GUESS_WORDS, writable=True)

    def _moment(self, memory: Memory, role: str, elements: int) -> tuple[Operand, int | None]:
        """Return the operand of a moment, and the address of its scales where it has them."""
        found = self._operands.check(memory, role, tuple(MOMENTS), elements, writable=True)
        if found.dtype != "uint8":
            return found, None
        blocks = require_blocks(found.elements, role, elements)
        return found, found.address + blocks * FP8_BLOCK

    def _set_hyper(self, hyper: Memory) -> None:
        self.struct.hyper = self._operands.check(hyper, "hyper", ("fp64",), 5).address

    def _set_tables(self, tables: tuple[Memory, Memory]) -> None:
        bc1, inv_sqrt_bc2 = (self._operands.check(t, f"tables[{i}]", ("fp64",), 1) for i, t in enumerate(tables))
        if bc1.elements != inv_sqrt_bc2.elements:
            raise ConfigError("the two tables differ in length", fix="pass the pair that bias_tables returned")
        self.struct.bc1, self.struct.inv_sqrt_bc2 = bc1.address, inv_sqrt_bc2.address
        self.struct.table_length = bc1.elements

    def _twin(self) -> AdamWTask:
        twin = copy.copy(self)
        twin._operands = Operands(self._operands)
        twin.struct = Task.from_buffer_copy(self.struct)
        return twin

    def with_hyper(self, hyper: Memory, *, error: Memory | None = None) -> AdamWTask:
        """Return a second task over the same operands, which are not checked again, with other hyper-parameters.

        A ring of immutable tasks is made this way.

        Args:
            hyper: float64 [5].
            error: another error word, int32 [1]; None: the same as this task.

        Raises:
            PlacementError: `hyper` or `error` on the wrong device, of the wrong dtype, strided or too short.
        """
        twin = self._twin()
        twin._set_hyper(hyper)
        if error is not None:
            twin.error = error
            twin.struct.error = twin._operands.check(error, "error", ("int32",), 1, writable=True).address
        return twin

    def with_tables(self, tables: tuple[Memory, Memory]) -> AdamWTask:
        """Return a second task over the same operands with other bias corrections, as `bias_tables` returns them.

        Raises:
            PlacementError: a table on the wrong device, of the wrong dtype, strided or empty.
            ConfigError: tables of different lengths.
        """
        twin = self._twin()
        twin._set_tables(tables)
        return twin

    def _native_ranges(self, ranges: Sequence[AdamWRange]) -> tuple[ctypes.Array[Range], Dtype, Dtype]:
        native = (Range * len(ranges))()
        grad_dtypes: set[str] = set()
        weight_dtypes: set[str] = set()
        floats, optional = tuple(FLOATS), self._operands.optional
        for i, part in enumerate(ranges):
            if part.offset < 0 or part.length < 0:
                raise ConfigError(
                    f"ranges[{i}] has offset {part.offset} and length {part.length}",
                    why="both count elements",
                    fix="pass numbers that are not negative",
                )
            grad = self._operands.check(part.grad, f"ranges[{i}].grad", floats, part.length)
            weight = self._operands.check(part.weight, f"ranges[{i}].weight", floats, part.length, writable=True)
            count = self._operands.check(part.count, f"ranges[{i}].count", ("int64",), 1, writable=True)
            grad_dtypes.add(grad.dtype)
            weight_dtypes.add(weight.dtype)
            weight_out = optional(part.weight_out, f"ranges[{i}].weight_out", weight.dtype, part.length, writable=True)
            count_out = optional(part.count_out, f"ranges[{i}].count_out", "int64", 1, writable=True)
            native[i] = Range(
                part.offset, part.length, grad.address, weight.address, count.address, weight_out, count_out
            )
        grad_dtype, weight_dtype = one_dtype(grad_dtypes, "gradients"), one_dtype(weight_dtypes, "weights")
        return native, grad_dtype, weight_dtype

    def host_function(self) -> tuple[int, int]:
        """Return the address of a function `void (*)(void *)` that runs this task without the GIL, and its argument.

        The task must be kept alive until the function has run. It never throws; its error code goes to `error`.
        """
        return load().adamw_host_function, ctypes.addressof(self.struct)

    def raise_error(self) -> None:
        """Raise NativeError if a run of this task has left a code in `error`.

        Raises:
            NativeError: the text says what the code means.
        """
        check(int(self.error[0]), "hostward_adamw_step")


def adamw_step(task: AdamWTask) -> None:
    """Run the task on this thread and its helpers, without the GIL.

    Raises:
        NativeError: the native code does not support the task; it has written nothing.
    """
    code = load().adamw_step(ctypes.byref(task.struct))
    if code:
        check(code, "hostward_adamw_step")


def _master_kind(weight_dtype: Dtype, has_remainder: bool, has_master: bool) -> MasterKind:
    if has_remainder and not has_master and weight_dtype is Dtype.BF16:
        return MasterKind.SPLIT
    if has_master and not has_remainder and weight_dtype is not Dtype.FP32:
        return MasterKind.PLAIN
    if not has_master and not has_remainder and weight_dtype is not Dtype.FP16:
        return MasterKind.WEIGHT
    given = [name for name, has in (("remainder", has_remainder), ("master", has_master)) if has]
    raise ConfigError(
        f"{weight_dtype.name.lower()} weights with {' and '.join(given) or 'neither remainder nor master'}",
        why="fp32 weights are their own master, bf16 weights may have a remainder or a master, fp16 ones have a master",
        fix="pass exactly the operand that the weight dtype calls for",
    )
