"""Operands for the native kernels with guard elements around them, and the step that numpy makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from hostward.kernels import reference
from hostward.kernels.cpu.adamw import (
    GUESS_WORDS,
    AdamWRange,
    AdamWTask,
    OtherSet,
    Role,
    adamw_step,
    bias_tables,
    hyper_array,
)
from hostward.kernels.cpu.library import Isa, load

Array = Any

GRADS = ("fp32", "bf16", "fp16")
MOMENTS = (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"))
FP8_MOMENTS = (("fp8", "fp8"), ("fp8", "fp32"), ("fp32", "fp8"), ("fp8", "bf16"), ("bf16", "fp8"))
LAYOUTS = ("fp32", "split", "bf16", "fp16", "rounded")
"""fp32 weight; split bf16; bf16 or fp16 with an fp32 master; bf16 without one, rounded at random."""
HYPER = reference.Hyper(lr=3e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
TABLES = bias_tables(HYPER.beta1, HYPER.beta2, 1 << 16)
ISAS = load().supported_isas()
GUARD = 64
SENTINEL = 0x5A

SPECIAL_BITS = np.array(
    [
        0x00000000,
        0x80000000,  # -0.0
        0x00000001,
        0x807FFFFF,  # denormals
        0x00800000,
        0x7F7FFFFF,
        0xFF7FFFFF,  # largest finite: infinity in bf16
        0x7F7F7FFF,
        0x7F7F8000,  # below and at the tie between the largest bf16 and infinity
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0xFFC12345,
        0x7F800001,  # NaNs of several kinds
        0x3F800000,
        0x3F808000,  # a tie in bf16
        0x477FF000,
        0x33000000,
        0x33000001,
        0x387FFFFF,  # edges of fp16
    ],
    dtype=np.uint32,
)


def random_floats(rng: np.random.Generator, n: int, special: float) -> Array:
    """float32 of many magnitudes, of which the share `special` are zeros, denormals, infinities and NaNs."""
    values = rng.standard_normal(n) * np.exp2(rng.integers(-40, 10, n))
    bits = values.astype(np.float32).view(np.uint32)
    chosen = rng.random(n) < special
    return np.where(chosen, rng.choice(SPECIAL_BITS, n), bits).astype(np.uint32).view(np.float32)


def as_moment(values: Array, dtype: str, *, signed: bool = True) -> Array:
    """What a moment may hold, close to these values; FP8 as the bytes of elements and then of blocks."""
    if dtype == "fp8":
        random = np.zeros(values.size, np.uint32)
        return reference.fp8_at_random(reference.canonical(values), random, signed=signed)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "bf16" else values


def as_grad(values: Array, dtype: str) -> Array:
    if dtype == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(all="ignore"):
        return values.astype(np.float16 if dtype == "fp16" else np.float32)


@dataclass
class Guarded:
    """An array with `GUARD` elements of sentinel bytes on either side, `shift` elements off its natural alignment."""

    initial: Array
    shift: int = 0
    store: Array = field(init=False)
    values: Array = field(init=False)

    def __post_init__(self) -> None:
        size = self.initial.dtype.itemsize
        n = self.initial.size
        self.store = np.full((n + 2 * GUARD + self.shift) * size, SENTINEL, dtype=np.uint8)
        start = (GUARD + self.shift) * size
        self.values = self.store[start : start + n * size].view(self.initial.dtype)
        self.values[:] = self.initial

    def assert_guards(self) -> None:
        size = self.initial.dtype.itemsize
        before, after = self.store[: (GUARD + self.shift) * size], self.store[self.store.size - GUARD * size :]
        assert (before == SENTINEL).all()
        assert (after == SENTINEL).all()


@dataclass
class Case:
    """Initial values of one step over n elements; `weight` follows from `master` (see `as_main`) and the layout."""

    grad_dtype: str
    layout: str
    grad: Array
    master: Array
    exp_avg: Array
    exp_avg_sq: Array

    @staticmethod
    def random(
        rng: np.random.Generator,
        n: int,
        grad_dtype: str,
        layout: str,
        special: float = 0.1,
        moments: tuple[str, str] = MOMENTS[0],
    ) -> Case:
        return Case(
            grad_dtype,
            layout,
            as_grad(random_floats(rng, n, special), grad_dtype),
            as_main(reference.canonical(random_floats(rng, n, special)), layout),
            as_moment(random_floats(rng, n, special), moments[0]),
            as_moment(np.abs(random_floats(rng, n, special)), moments[1], signed=False),
        )

    def expected(self, step: int = 1, scale: float = 1.0, hyper: reference.Hyper = HYPER) -> dict[str, Array]:
        master, exp_avg, exp_avg_sq = reference.adamw(
            self.master, self.exp_avg, self.exp_avg_sq, self.grad, step, hyper, TABLES, scale
        )
        return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, **stored(master, self.layout)}


def as_main(values: Array, layout: str) -> Array:
    return as_moment(values, "bf16" if layout == "rounded" else "fp32")


def stored(master: Array, layout: str) -> dict[str, Array]:
    """What a layout keeps of a master: fp32, or bf16 bits where it keeps no more."""
    if layout in ("fp32", "rounded"):
        return {"weight": master}
    if layout == "split":
        weight, remainder = reference.split_master(master)
        return {"weight": weight, "remainder": remainder}
    weight = reference.bf16_bits(master) if layout == "bf16" else reference.fp16_weight(master)
    return {"weight": weight, "master": master}


@dataclass
class NativeRun:
    """The operands of a case in guarded memory, and the task over them."""

    operands: dict[str, Guarded]
    counts: Array
    task: AdamWTask

    def assert_equal(self, expected: dict[str, Array], what: object = "") -> None:
        for name, values in expected.items():
            actual = self.operands[name].values
            unsigned = np.dtype(f"u{values.dtype.itemsize}")
            wrong = np.flatnonzero(actual.view(unsigned) != values.view(unsigned))
            assert wrong.size == 0, f"{what} {name}: {wrong.size} differ, first at {wrong[0]}"
        for guarded in self.operands.values():
            guarded.assert_guards()


def native_run(
    case: Case,
    *,
    isa: Isa,
    threads: int = 1,
    cuts: tuple[int, ...] = (),
    shifts: tuple[int, ...] = (0, 0, 0, 0, 0),
    count: int = 0,
    hyper: reference.Hyper = HYPER,
    **options: Any,
) -> NativeRun:
    """The task of `case`, cut into ranges at `cuts`; shifts: weight, grad, exp_avg, exp_avg_sq, remainder or master."""
    n = case.master.size
    start = stored(case.master, case.layout)
    operands = {
        "weight": Guarded(start.pop("weight"), shifts[0]),
        "grad": Guarded(case.grad, shifts[1]),
        "exp_avg": Guarded(case.exp_avg, shifts[2]),
        "exp_avg_sq": Guarded(case.exp_avg_sq, shifts[3]),
        **{name: Guarded(values, shifts[4]) for name, values in start.items()},
    }
    edges = [0, *cuts, n]
    counts = np.full(len(edges) - 1, count, dtype=np.int64)
    ranges = [
        AdamWRange(
            begin,
            end - begin,
            operands["grad"].values[begin:end],
            operands["weight"].values[begin:end],
            counts[i : i + 1],
        )
        for i, (begin, end) in enumerate(pairwise(edges))
    ]
    state = {
        name: operands[name].values for name in ("exp_avg", "exp_avg_sq", "remainder", "master") if name in operands
    }
    numbers = hyper_array(hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps)
    task = AdamWTask(ranges, hyper=numbers, tables=TABLES, isa=isa, threads=threads, **state, **options)
    return NativeRun(operands, counts, task)


def run_step(case: Case, **options: Any) -> NativeRun:
    run = native_run(case, **options)
    adamw_step(run.task)
    return run


STATE = ("exp_avg", "exp_avg_sq", "remainder", "master")


@dataclass
class TwoSets:
    """A case with a second set of its state, in guarded memory, and tasks between the two.

    `scale` and `skip` are what tasks read when they run.
    """

    own: NativeRun
    other: NativeRun
    scale: Array
    skip: Array
    guess: Array

    def task(self, role: Role, *, hyper: reference.Hyper = HYPER, threads: int = 1, isa: Isa = Isa.BEST) -> AdamWTask:
        own, other = self.own, self.other
        state, out = ({n: o[n].values for n in STATE if n in o} for o in (own.operands, other.operands))
        ranges, start = [], 0
        for i, length in enumerate(r.length for r in own.task._ranges):
            span = slice(start, start + length)
            grad, weight = own.operands["grad"].values[span], own.operands["weight"].values[span]
            counts = own.counts[i : i + 1], other.counts[i : i + 1]
            out_weight = other.operands["weight"].values[span]
            ranges.append(AdamWRange(start, length, grad, weight, counts[0], out_weight, counts[1]))
            start += length
        out = {name: out.get(name) for name in STATE}
        numbers = hyper_array(hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps)
        return AdamWTask(
            ranges,
            hyper=numbers,
            tables=TABLES,
            isa=isa,
            threads=threads,
            scale=self.scale,
            skip=self.skip,
            role=role,
            other=OtherSet(guess=self.guess, **out),
            **state,
        )

    def run(self, role: Role, **options: Any) -> None:
        adamw_step(self.task(role, **options))


def two_sets(case: Case, *, cuts: tuple[int, ...] = (), count: int = 0, shifts: tuple[int, ...] = (0,) * 5) -> TwoSets:
    """The state of `case`, and a second set full of other values."""
    own = native_run(case, isa=Isa.BEST, cuts=cuts, count=count, shifts=shifts)
    other = native_run(case, isa=Isa.BEST, cuts=cuts, count=99, shifts=shifts[::-1])
    n = case.master.size
    for name in (*STATE, "weight"):
        if name in other.operands:
            values = other.operands[name].values
            values[:n].view(np.uint8)[:] = 0xA5
            values[values.size // 129 * 128 if values.dtype == np.uint8 else n :] = 0xA5  # scales, after padding
    one = np.ones(1, dtype=np.float32)
    return TwoSets(own, other, one, np.zeros(1, dtype=np.int32), np.zeros(GUESS_WORDS, dtype=np.int64))
