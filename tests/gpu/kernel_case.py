"""What the tests of the Triton kernels share: values, bits, a step on the device beside the same step in numpy.

With TRITON_INTERPRET=1 the kernels run in Triton's interpreter on the CPU, with smaller sizes. There the fused
multiply-add of the norm is replaced; everything else is the code that the device runs.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hostward.kernels import reference
from hostward.kernels.cpu.adamw import MasterKind, bias_tables
from hostward.kernels.cuda import adamw
from hostward.kernels.cuda.launcher import Launch, launch_all

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
device_only = pytest.mark.skipif(INTERPRETED, reason="needs the device itself")

HYPER = reference.Hyper(lr=3e-4, weight_decay=0.033, beta1=0.9, beta2=0.95, eps=1e-8)
TABLES = bias_tables(HYPER.beta1, HYPER.beta2, 5000)
GRADS = {0: np.float32, 1: np.uint16, 2: np.float16}
# (weight dtype, master kind)
LAYOUTS = {
    "fp32": (0, MasterKind.WEIGHT),
    "bf16-split": (1, MasterKind.SPLIT),
    "bf16-plain": (1, MasterKind.PLAIN),
    "fp16-plain": (2, MasterKind.PLAIN),
    "bf16-rounded": (1, MasterKind.WEIGHT),
}
COMBINATIONS = list(itertools.product(GRADS, LAYOUTS))
MOMENTS = {name: tuple(name.split("-")) for name in ("fp32-fp32", "bf16-bf16", "bf16-fp32", "fp32-bf16")}
"""Dtypes of exp_avg and exp_avg_sq."""
FP8_MOMENTS = {name: tuple(name.split("-")) for name in ("fp8-fp8", "fp8-fp32", "bf16-fp8")}


def bits_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize])


def assert_bits(name: str, got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Equal bits, or the number of differing elements and the first of them."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    differing = np.flatnonzero(bits_of(got) != bits_of(expected))
    if differing.size:
        lines = [f"{name}: {differing.size} of {got.size} elements differ"]
        for i in differing[:5]:
            lines.append(
                f"  [{i}] got {bits_of(got)[i]:#x} ({got[i]!r}), expected {bits_of(expected)[i]:#x} ({expected[i]!r})"
            )
        pytest.fail("\n".join(lines))


def to_device(array: np.ndarray[Any, Any]) -> torch.Tensor:
    array = array.view(np.int16) if array.dtype == np.uint16 else array
    return torch.from_numpy(array).to(DEVICE, copy=True)  # torch aligns its memory, numpy less so


def from_device(tensor: torch.Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    tensor = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return tensor.cpu().numpy().view(dtype)


def any_bits(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    """float32 of random bits: every exponent, denormals, infinities, NaNs of many payloads."""
    values = rng.integers(0, 2**32, n, dtype=np.uint32)
    special = np.array(
        [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32
    )
    chosen = rng.random(n) < 0.1
    values[chosen] = rng.choice(special, int(chosen.sum()))
    return values.view(np.float32)


def ordinary(rng: np.random.Generator, n: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
    """float32 over some twenty binary orders of magnitude."""
    return (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 2, n) * scale).astype(np.float32)


def as_grad(values: np.ndarray[Any, Any], code: int) -> np.ndarray[Any, Any]:
    if code == 1:
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(GRADS[code])


@dataclass
class Case:
    """Ranges of one task, in slabs with gaps: the gaps are the guard words that a step must leave alone."""

    grad_code: int
    layout: str
    lengths: list[int]
    gap: int = 3
    wild: bool = False
    counts: list[int] | None = None
    seed: int = 0
    hyper: reference.Hyper = HYPER
    tables: tuple[Any, Any] = TABLES
    moments: str = "fp32-fp32"
    slabs: dict[str, np.ndarray[Any, Any]] = field(init=False)
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        gaps = np.cumsum([self.gap] * len(self.lengths))
        self.starts = [int(s) for s in np.cumsum([0, *self.lengths[:-1]]) + gaps] if self.lengths else []
        n = self.starts[-1] + self.lengths[-1] + self.gap
        self.short = (MOMENTS | FP8_MOMENTS)[self.moments]
        if "fp8" in self.short:  # ranges begin where blocks do
            ends = np.cumsum([-(-(length + self.gap) // 128) * 128 for length in self.lengths])
            self.starts, n = [0, *map(int, ends[:-1])], int(ends[-1])
        weight_code, kind = LAYOUTS[self.layout]
        draw = any_bits if self.wild else ordinary
        master = draw(rng, n)
        self.slabs = {
            "grad": as_grad(draw(rng, n), self.grad_code),
            "exp_avg": draw(rng, n),
            "exp_avg_sq": draw(rng, n) if self.wild else ordinary(rng, n) ** 2,
            "count": np.array(self.counts or rng.integers(0, 300, len(self.lengths)), dtype=np.int64),
        }
        for name, short in zip(("exp_avg", "exp_avg_sq"), self.short, strict=True):
            if short == "bf16":
                self.slabs[name] = (self.slabs[name].view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            elif short == "fp8":  # any bytes are a moment
                self.slabs[name] = rng.integers(0, 256, n // 128 * 129).astype(np.uint8)
                self.slabs[name][n:] = np.clip(self.slabs[name][n:], 60, 180)
        if kind is MasterKind.WEIGHT:
            self.slabs["weight"] = as_grad(master, weight_code)  # bf16 ones are cut off
        elif kind is MasterKind.SPLIT:
            # Any pair of weight and remainder is a master, also those that a step never leaves.
            self.slabs["weight"] = (master.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            self.slabs["remainder"] = rng.integers(-(2**15), 2**15, n).astype(np.int16)
        else:
            self.slabs["weight"] = reference.bf16_bits(master) if weight_code == 1 else master.astype(np.float16)
            self.slabs["master"] = master
        self.device = {name: to_device(slab) for name, slab in self.slabs.items()}
        for name, short in zip(("exp_avg", "exp_avg_sq"), self.short, strict=True):
            if short == "bf16":
                self.device[name] = self.device[name].view(torch.bfloat16)
        hyper = self.hyper
        self.constants = [
            to_device(np.array([hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps])),
            *(to_device(t) for t in self.tables),
        ]
        self.scale, self.skip, self.error = (
            torch.zeros(1, dtype=t, device=DEVICE) for t in (torch.float32, *[torch.int32] * 2)
        )
        self.scale.fill_(1.0)
        self.blocks = to_device(adamw.block_map(self.lengths))
        self.table = to_device(self._table())

    def _table(self) -> np.ndarray[Any, Any]:
        def address(name: str, index: int) -> int:
            return self.device[name].data_ptr() + index * self.device[name].element_size()

        rows = [
            (start, length, address("grad", start), address("weight", start), address("count", i))
            for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True))
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    def step(self) -> None:
        """One step on the device."""
        if INTERPRETED:
            launch_all(self.bound())
        else:
            self.checked_step()

    def bound(self) -> list[Launch]:
        """The launches of a step, unchecked."""
        weight_code, kind = LAYOUTS[self.layout]
        d, (hyper, bc1, isb2) = self.device, self.constants
        return adamw.bind(
            self.table, len(self.lengths), self.blocks, (self.grad_code, weight_code, int(kind)),
            (d["exp_avg"], d["exp_avg_sq"], self.extra()), (hyper, bc1, isb2, len(bc1)), self.scale, self.skip,
            self.error,
        )  # fmt: skip

    def extra(self) -> torch.Tensor:
        """What the kernel takes besides weight and moments."""
        d = self.device
        return d.get("remainder", d.get("master", d["exp_avg"]))

    def checked_step(self, **changed: Any) -> None:
        """One step through the public function, with some operands replaced."""
        weight_code, kind = LAYOUTS[self.layout]
        d, (hyper, bc1, isb2) = self.device, self.constants
        operands: dict[str, Any] = {
            "table": self.table,
            "n_ranges": len(self.lengths),
            "blocks": self.blocks,
            "grad_dtype": self.grad_code,
            "weight_dtype": weight_code,
            "master_kind": kind,
            "exp_avg": d["exp_avg"],
            "exp_avg_sq": d["exp_avg_sq"],
            "remainder": d.get("remainder"),
            "master": d.get("master"),
            "hyper": hyper,
            "bc1": bc1,
            "inv_sqrt_bc2": isb2,
            "table_length": len(bc1),
            "scale": self.scale,
            "skip": self.skip,
            "error": self.error,
        }
        adamw.adamw_step(**{**operands, **changed})

    def expect_step(self, scale: float = 1.0) -> None:
        """The same step in numpy."""
        kind, s = LAYOUTS[self.layout][1], self.slabs
        for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            part = slice(start, start + length)
            if kind is MasterKind.SPLIT:
                master = reference.join_master(s["weight"][part], s["remainder"][part])
            else:
                master = s["weight" if kind is MasterKind.WEIGHT else "master"][part]
            s["count"][i] += 1
            moments = [self._moment(name, start, length) for name in ("exp_avg", "exp_avg_sq")]
            p, m, v = reference.adamw(
                master,
                *moments,
                s["grad"][part],
                int(s["count"][i]),
                self.hyper,
                self.tables,
                scale,
            )
            for name, value in (("exp_avg", m), ("exp_avg_sq", v)):
                if value.dtype == np.uint8:
                    codes, scales = (each.reshape(-1) for each in reference.fp8_parts(value))
                    (mine, of_blocks), blocks = reference.fp8_parts(s[name]), len(scales)
                    mine.reshape(-1)[part] = codes[:length]
                    of_blocks[start // 128 : start // 128 + blocks] = scales
                else:
                    s[name][part] = value
            if kind is MasterKind.WEIGHT:
                bits_of(s["weight"])[part] = bits_of(p)
            elif kind is MasterKind.SPLIT:
                s["weight"][part], s["remainder"][part] = reference.split_master(p)
            else:
                weight = reference.fp16_weight(p) if self.layout == "fp16-plain" else reference.bf16_bits(p)
                bits_of(s["weight"])[part], bits_of(s["master"])[part] = bits_of(weight), bits_of(p)

    def _moment(self, name: str, start: int, length: int) -> np.ndarray[Any, Any]:
        """A range's elements of a moment; of an FP8 one its blocks, of which the last holds bytes of others too."""
        slab, first, last = self.slabs[name], start // 128, -(-(start + length) // 128)
        if slab.dtype != np.uint8:
            return slab[start : start + length]
        codes, scales = reference.fp8_parts(slab)
        return np.concatenate([codes[first:last].reshape(-1), scales[first:last]])

    def check(self) -> None:
        """All memory, between the ranges too."""
        for name, slab in self.slabs.items():
            assert_bits(
                f"{self.layout}, gradient {self.grad_code}: {name}", from_device(self.device[name], slab.dtype), slab
            )


def seconds(function: Any, repeats: int = 10) -> float:
    """Median device time of one call."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(times))


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by a copy of 512 MiB: the roof for a kernel's traffic."""
    source, target = (torch.zeros(2**28, dtype=torch.int16, device=DEVICE) for _ in range(2))
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))
