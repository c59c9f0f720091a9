"""Run AdamW on a CUDA device: one launch steps all ranges of a bucket, a second one advances their step counts.

The result is bitwise identical with `hostward.kernels.reference.adamw`. Nothing here waits for the device, so a step
may be captured in a CUDA graph once the kernels are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostward.errors import ConfigError, PlacementError
from hostward.kernels.cpu.operand import FP8_BLOCK, require_blocks
from hostward.kernels.cuda.launcher import Launch, Launcher, launch_all
from hostward.kernels.cuda.operand import dtype_code, require_device_operand, require_rows, require_triton

BLOCK_ELEMENTS = 4096
"""Elements per row of the block map, the work of one program. A larger share forms the constants less often."""

STATE_PARAMETERS = (2, 3, 4)
"""Indices of the parameters that are the addresses of `state`, in the first launch that `bind` returns for blocks."""

_WARPS = 4
# Four elements per thread keep 16-byte accesses to fp32 and one register layout for streams of both widths.
_LANES = 4 * 32 * _WARPS
_COUNTS_PER_PROGRAM = 256
_FP32, _BF16 = 0, 1
MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
"""Moments have these dtypes, in the order of their codes; uint8 is FP8."""
_MASTER_WEIGHT, _MASTER_SPLIT, _MASTER_PLAIN, _MASTER_ROUNDED = 0, 1, 2, 3


def block_map(lengths: Sequence[int], block: int = BLOCK_ELEMENTS) -> npt.NDArray[np.int32]:
    """Return which part of which range each program of a launch works on.

    Args:
        lengths: elements of each range; a range of length 0 gets no program.
        block: elements per program. `adamw_step` takes maps of BLOCK_ELEMENTS only.

    Returns:
        int32 [n_blocks, 2]: (range index, block index within the range), in order.

    Raises:
        ConfigError: a negative length, a block below 1, or a range of more than 2**31 - 1 blocks.
    """
    if block < 1:
        raise ConfigError(f"block is {block}", why="it counts elements", fix="choose 1 or more")
    elements = np.asarray(lengths, dtype=np.int64)
    if (elements < 0).any():
        raise ConfigError("a range has a negative length", why="it counts elements", fix="pass lengths of 0 or more")
    blocks = -(-elements // block)
    total = int(blocks.sum())
    if total > np.iinfo(np.int32).max:
        raise ConfigError(
            f"the ranges have {total} blocks",
            why="a launch has at most 2**31 - 1 programs",
            fix="use fewer ranges at a time or larger blocks",
        )
    first = np.cumsum(blocks) - blocks
    result = np.empty((total, 2), dtype=np.int32)
    result[:, 0] = np.repeat(np.arange(len(elements)), blocks)
    result[:, 1] = np.arange(total) - np.repeat(first, blocks)
    return result


def adamw_step(
    *,
    table: torch.Tensor,
    n_ranges: int,
    blocks: torch.Tensor,
    grad_dtype: torch.dtype | int,
    weight_dtype: torch.dtype | int,
    master_kind: int,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    remainder: torch.Tensor | None,
    master: torch.Tensor | None,
    hyper: torch.Tensor,
    bc1: torch.Tensor,
    inv_sqrt_bc2: torch.Tensor,
    table_length: int,
    scale: torch.Tensor,
    skip: torch.Tensor,
    error: torch.Tensor | None = None,
) -> None:
    """Make one AdamW step over disjoint ranges on the current stream of their device, and advance every count by one.

    All tensors are contiguous and on one CUDA device. The memory at the pointers in `table` cannot be checked here.

    Args:
        table: int64 [n_ranges, 5]: offset (first element in exp_avg, exp_avg_sq, remainder, master), length, and the
            addresses of the gradient, of the weight (both of the range's first element) and of the int64 step count.
            No two ranges share a count. Any alignment of the elements' own size is right; 16-byte aligned ranges are
            faster.
        n_ranges: rows of `table`.
        blocks: int32 [n_blocks, 2], `block_map(lengths)` of the lengths in `table`.
        grad_dtype, weight_dtype: float32, bfloat16 or float16, or their codes 0, 1, 2.
        master_kind: 0 the weight itself, fp32 or bf16, 1 bf16 weight and remainder, 2 `master` besides a 16-bit weight.
        exp_avg, exp_avg_sq: float32 or bfloat16 [n], each of its own dtype; or uint8 [129 n / 128], a byte for each
            element and then one for each block of 128: n and all offsets are then multiples of 128.
        remainder: int16 [n], low 16 bits of the fp32 main weights, for master kind 1, else None.
        master: float32 [n], the fp32 main weights, for master kind 2, else None.
        hyper: float64 [5]: lr, weight decay, beta1, beta2, eps.
        bc1, inv_sqrt_bc2: float64 [table_length], `hostward.kernels.cpu.adamw.bias_tables`.
        table_length: entries of each table, at least 1.
        scale: float32 [1], factor of every gradient.
        skip: int32 [1]; non-zero: nothing is written, no count advances.
        error: int32 [1] or None; set to 5 (HOSTWARD_ERROR_TABLE) if a range's step lies past tables that have not
            reached 1. Such a range is left as it is, and so is its count.

    Raises:
        PlacementError: an operand in host memory, on another device, of another dtype, strided or too short.
        ConfigError: a master kind, weight dtype, remainder and master that do not belong together, or an empty table.
        DeviceError: Triton is not installed.
    """
    require_device_operand(table, "table", torch.int64, 5 * n_ranges)
    require_rows(blocks, "blocks", table.device)
    grad_code, weight_code = dtype_code(grad_dtype, "the gradient"), dtype_code(weight_dtype, "the weight")
    extra = extra_operand(int(master_kind), weight_code, exp_avg, remainder, master)
    if table_length < 1:
        raise ConfigError("the bias correction tables are empty", why="entry 0 is unused", fix="use bias_tables")
    device, elements = table.device, _elements(exp_avg, "exp_avg")
    operands = (
        (exp_avg, "exp_avg", _moment_dtype(exp_avg), 0),
        (exp_avg_sq, "exp_avg_sq", _moment_dtype(exp_avg_sq), _size(exp_avg_sq, elements)),
        (extra, "remainder" if remainder is not None else "master", extra.dtype, _size(extra, elements)),
        (hyper, "hyper", torch.float64, 5),
        (bc1, "bc1", torch.float64, table_length),
        (inv_sqrt_bc2, "inv_sqrt_bc2", torch.float64, table_length),
        (scale, "scale", torch.float32, 1),
        (skip, "skip", torch.int32, 1),
    )
    for tensor, role, dtype, elements in operands:
        require_device_operand(tensor, role, dtype, elements, device)
    if error is not None:
        require_device_operand(error, "error", torch.int32, 1, device)
    require_triton()
    with torch.cuda.device(device):
        launches = bind(
            table, n_ranges, blocks, (grad_code, weight_code, int(master_kind)), (exp_avg, exp_avg_sq, extra),
            (hyper, bc1, inv_sqrt_bc2, table_length), scale, skip, error,
        )  # fmt: skip
        launch_all(launches)


def bind(
    table: torch.Tensor,
    n_ranges: int,
    blocks: torch.Tensor,
    codes: tuple[int, int, int],
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    constants: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
    scale: torch.Tensor,
    skip: torch.Tensor,
    error: torch.Tensor | None,
) -> list[Launch]:
    """Return the launches of `adamw_step`, at most two, without its checks; each may be used any number of times.

    Args:
        codes: gradient dtype, weight dtype, master kind.
        state: exp_avg and exp_avg_sq, each float32, bfloat16 or uint8 (see `adamw_step`), and the remainder, the
            master, or exp_avg again where neither exists.
        constants: hyper, bc1, inv_sqrt_bc2, table_length.
    """
    step, advance = _launchers()
    hyper, bc1, inv_sqrt_bc2, table_length = constants
    launches = []
    keep = (table, blocks, hyper, bc1, inv_sqrt_bc2)
    if blocks.shape[0] > 0:
        grad, weight, kind = codes
        if kind == _MASTER_WEIGHT and weight == _BF16:
            kind = _MASTER_ROUNDED
        scales = next((_elements(m, "moment") for m in state[:2] if m.dtype is torch.uint8), 0)
        arguments = (table, blocks, *state, hyper, bc1, inv_sqrt_bc2, table_length, scale, skip, scales)
        moments = [MOMENTS.index(moment.dtype) for moment in state[:2]]
        launches.append(
            step.bind(blocks.shape[0], arguments, (grad, weight, kind, *moments, BLOCK_ELEMENTS, _LANES), keep)
        )
    if n_ranges > 0:
        # In the same launch it would race with the programs that have yet to read the count.
        counts = (table, n_ranges, bc1, inv_sqrt_bc2, table_length, skip, error)
        programs = -(-n_ranges // _COUNTS_PER_PROGRAM)
        launches.append(advance.bind(programs, counts, (_COUNTS_PER_PROGRAM,), keep))
    return launches


def _moment_dtype(moment: torch.Tensor) -> torch.dtype:
    """Return the dtype that a moment has to have: its own where the kernel takes that, else float32."""
    return moment.dtype if moment.dtype in MOMENTS else torch.float32


def _elements(moment: torch.Tensor, role: str) -> int:
    """Return the number of elements of a moment. Raises PlacementError for an FP8 one that is not in whole blocks."""
    if moment.dtype is not torch.uint8:
        return moment.numel()
    return require_blocks(moment.numel(), role, 0) * FP8_BLOCK


def _size(tensor: torch.Tensor, elements: int) -> int:
    """Return the length that a tensor of the state has to have, for so many elements of it."""
    return elements + -(-elements // FP8_BLOCK) if tensor.dtype is torch.uint8 else elements


@functools.cache
def _launchers() -> tuple[Launcher, Launcher]:
    from hostward.kernels.cuda import adamw_triton

    # mul and add must stay two roundings.
    options: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": _WARPS}
    return Launcher(adamw_triton.step_kernel, **options), Launcher(adamw_triton.advance_kernel, **options)


def extra_operand(
    kind: int, weight_code: int, exp_avg: torch.Tensor, remainder: torch.Tensor | None, master: torch.Tensor | None
) -> torch.Tensor:
    """Return the remainder or master operand; where there is none, exp_avg, which the kernel then ignores."""
    expected = {_MASTER_SPLIT: torch.int16, _MASTER_PLAIN: torch.float32}
    if kind == _MASTER_WEIGHT and weight_code in (_FP32, _BF16) and remainder is None and master is None:
        return exp_avg
    extra = None
    if kind == _MASTER_SPLIT and weight_code == _BF16 and master is None:
        extra = remainder
    elif kind == _MASTER_PLAIN and weight_code != _FP32 and remainder is None:
        extra = master
    if extra is None:
        raise ConfigError(
            f"master kind {kind} with weight dtype code {weight_code}, "
            f"{'a' if remainder is not None else 'no'} remainder and {'a' if master is not None else 'no'} master",
            why="fp32 is its own master (0), bf16 too, or has a remainder (1) or a master (2); fp16 has a master (2)",
            fix="pass exactly the operand that the master kind calls for",
        )
    if extra.dtype != expected[kind]:
        raise PlacementError(
            f"{'remainder' if kind == _MASTER_SPLIT else 'master'} has dtype {extra.dtype}",
            why=f"the device kernel takes {expected[kind]} here and never converts",
            fix=f"pass {expected[kind]}",
        )
    return extra
