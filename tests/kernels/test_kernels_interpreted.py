"""What a machine without a device shows of the device kernels: checks, maps, their bits in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hostward.errors import ConfigError, DeviceError, PlacementError
from hostward.kernels.cpu.adamw import bias_tables
from hostward.kernels.cuda import adamw, norm
from hostward.kernels.cuda.operand import dtype_code, require_device_operand, require_triton

GPU_TESTS = [str(Path(__file__).parents[1] / "gpu" / f"test_{name}.py") for name in ("kernels", "kernels_norm")]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which CUDA builds of torch bring")
def test_device_kernels_equal_numpy_in_the_interpreter() -> None:
    """In a process of its own: Triton decides when it is imported whether it compiles or interprets."""
    command = [sys.executable, "-m", "pytest", *GPU_TESTS, "-q", "-m", "", "-p", "no:cacheprovider"]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sys, hostward.kernels.cuda.adamw, hostward.kernels.cuda.norm; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DeviceError, match=r"(?s)Triton is not installed.*why:.*fix: install a CUDA build of torch"):
        require_triton()


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 64))
def test_block_map_covers_every_element_once(lengths: list[int], block: int) -> None:
    rows = adamw.block_map(lengths, block)
    assert rows.dtype == np.int32
    assert rows.shape[1:] == (2,)
    assert rows.tolist() == [[i, b] for i, n in enumerate(lengths) for b in range(-(-n // block))]


def test_block_map_refuses_what_it_cannot_map() -> None:
    with pytest.raises(ConfigError, match="block is 0"):
        adamw.block_map([1], 0)
    with pytest.raises(ConfigError, match="negative length"):
        adamw.block_map([3, -1])
    with pytest.raises(ConfigError, match="2147483648 blocks"):
        adamw.block_map([2**31], 1)


def test_chunks_are_those_of_the_definition() -> None:
    assert norm.chunk_map([1, 4096, 4097]).tolist() == [[0, 0], [1, 0], [2, 0], [2, 1]]


def cpu_step(**changed: object) -> None:
    zeros = torch.zeros(8)
    operands: dict[str, object] = {
        "table": torch.zeros(1, 5, dtype=torch.int64),
        "n_ranges": 1,
        "blocks": torch.zeros(1, 2, dtype=torch.int32),
        "grad_dtype": torch.float32,
        "weight_dtype": torch.float32,
        "master_kind": 0,
        "exp_avg": zeros,
        "exp_avg_sq": zeros,
        "remainder": None,
        "master": None,
        "hyper": torch.zeros(5, dtype=torch.float64),
        "bc1": torch.ones(2, dtype=torch.float64),
        "inv_sqrt_bc2": torch.ones(2, dtype=torch.float64),
        "table_length": 2,
        "scale": torch.ones(1),
        "skip": torch.zeros(1, dtype=torch.int32),
    }
    adamw.adamw_step(**{**operands, **changed})  # type: ignore[arg-type]


def test_h54_host_memory_is_refused_by_the_step() -> None:
    with pytest.raises(PlacementError, match=r"(?s)table is on cpu.*never on host memory.*use the host kernel"):
        cpu_step()


def test_h54_host_memory_is_refused_by_the_norm() -> None:
    sums, exponents = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(PlacementError, match="items is on cpu"):
        norm.norm_partials(
            torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32), 0, sums, exponents
        )
    with pytest.raises(PlacementError, match="sums is on cpu"):
        norm.finish(
            sums, exponents, max_norm=1.0, inv_scale=None, found_inf=None,
            scale_out=torch.zeros(1), skip_out=exponents, norm_out=torch.zeros(1),
        )  # fmt: skip


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(PlacementError, match="x is on meta"):
        require_device_operand(torch.zeros(1, device="meta"), "x", torch.float32, 1)


def test_dtype_codes_are_those_of_the_native_interface() -> None:
    assert [dtype_code(d, "g") for d in (torch.float32, torch.bfloat16, torch.float16, 0, 1, 2)] == [0, 1, 2, 0, 1, 2]
    for other in (torch.float64, torch.int16, 3, -1):
        with pytest.raises(PlacementError, match=f"g has dtype {other}"):
            dtype_code(other, "g")


@pytest.mark.parametrize(
    ("kind", "code", "remainder", "master"),
    [
        (0, 2, False, False), (0, 0, True, False), (0, 0, False, True), (1, 0, True, False), (1, 1, False, False),
        (1, 1, True, True), (1, 2, True, False), (2, 0, False, True), (2, 2, True, True), (2, 1, False, False),
        (3, 1, True, False),
    ],
)  # fmt: skip
def test_operands_that_do_not_belong_together(kind: int, code: int, remainder: bool, master: bool) -> None:
    state = torch.zeros(4)
    with pytest.raises(ConfigError, match=f"master kind {kind} with weight dtype code {code}"):
        adamw.extra_operand(kind, code, state, state.to(torch.int16) if remainder else None, state if master else None)


def test_the_wrong_dtype_of_remainder_or_master() -> None:
    state = torch.zeros(4)
    with pytest.raises(PlacementError, match=r"remainder has dtype torch.float32"):
        adamw.extra_operand(1, 1, state, state, None)
    with pytest.raises(PlacementError, match=r"master has dtype torch.float64"):
        adamw.extra_operand(2, 2, state, None, state.double())


def test_step_tables_reach_one() -> None:
    """What the kernel relies on for steps past the tables."""
    bc1, inv_sqrt_bc2 = bias_tables(0.9, 0.95, 5000)
    assert (bc1[-1], inv_sqrt_bc2[-1]) == (1.0, 1.0)


def rounded_toward_zero(value: Fraction, top: float) -> float:
    """`value`, in [top, 2 * top) for a power of two `top`, rounded down to float64."""
    unit = Fraction(top) / 2**52
    return float(value // unit * unit)


@given(st.integers(1, 0x7F7FFFFF), st.integers(1, 0x7F7FFFFF))
def test_adding_a_power_of_two_toward_zero_gives_the_scaled_square(one: int, other: int) -> None:
    """The step by which norm_triton replaces the definition, for every pair of an element and its chunk's largest."""
    bits = np.array(sorted((one, other)), np.uint32)
    value, largest = (float(x) for x in bits.view(np.float32))
    exponent = int(np.frexp(largest)[1])
    top_bits = (2 * exponent + 1025) << 52
    top = float(np.array(top_bits, np.int64).view(np.float64))
    total = rounded_toward_zero(Fraction(value) ** 2 + Fraction(top), top)
    scaled = Fraction(value) / Fraction(2) ** exponent
    assert int(np.array(total).view(np.int64)) - top_bits == scaled**2 * 2**50 // 1
