"""Compute the gradient norm on a CUDA device: partial sums of fixed chunks, then norm, clip factor and skip flag.

The result is bitwise identical with `hostward.kernels.reference`, for any order of gradients, launches or programs.
Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hostward.errors import ConfigError
from hostward.kernels.cuda.adamw import block_map
from hostward.kernels.cuda.launcher import Launch, Launcher, launch_all
from hostward.kernels.cuda.operand import dtype_code, interpreted, require_device_operand, require_rows, require_triton

CHUNK_ELEMENTS = 4096

_PARTIAL_WARPS = 4
_SUMS_PER_PROGRAM = 1024


def chunk_map(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the chunks of gradients of these lengths: int32 [n_chunks, 2], rows (item, chunk within it)."""
    return block_map(lengths, CHUNK_ELEMENTS)


def norm_partials(
    items: torch.Tensor,
    chunk_map: torch.Tensor,
    grad_dtype: torch.dtype | int,
    sums: torch.Tensor,
    exponents: torch.Tensor,
) -> None:
    """Compute the partial squared norms of all gradients of one dtype, in one launch on the current stream.

    Chunk c of an item, its elements [4096c, 4096(c+1)), goes to index first_chunk + c of the outputs. See
    `hostward.kernels.reference.norm_partials` for what is written there.

    Args:
        items: int64 [n, 3]: address of the gradient, length in elements, first_chunk. Outputs must reach the last
            chunk of the last item; that cannot be checked here.
        chunk_map: int32 [n_chunks, 2], what the function of that name returns for the lengths in `items`.
        grad_dtype: float32, bfloat16 or float16, or its code 0, 1, 2.
        sums: int64 [at least n_chunks], written.
        exponents: int32 [as sums], written.

    Raises:
        PlacementError: an operand in host memory, on another device, of another dtype, strided or too short.
        DeviceError: Triton is not installed.
    """
    require_device_operand(items, "items", torch.int64, 0)
    require_rows(chunk_map, "chunk_map", items.device)
    require_device_operand(sums, "sums", torch.int64, chunk_map.shape[0], items.device)
    require_device_operand(exponents, "exponents", torch.int32, sums.numel(), items.device)
    code = dtype_code(grad_dtype, "the gradient")
    require_triton()
    with torch.cuda.device(items.device):
        launch_all(bind_partials(items, chunk_map, code, sums, exponents))


def bind_partials(
    items: torch.Tensor, chunk_map: torch.Tensor, code: int, sums: torch.Tensor, exponents: torch.Tensor
) -> list[Launch]:
    """Return the launch of `norm_partials`, without its checks, for any number of uses; none without chunks."""
    if chunk_map.shape[0] == 0:
        return []
    arguments = (items, chunk_map, sums, exponents)
    return [_partials_launcher().bind(chunk_map.shape[0], arguments, (code, not interpreted()), arguments)]


@functools.cache
def _partials_launcher() -> Launcher:
    from hostward.kernels.cuda import norm_triton

    return Launcher(norm_triton.partials_kernel, num_warps=_PARTIAL_WARPS, enable_fp_fusion=False)


def finish(
    sums: torch.Tensor,
    exponents: torch.Tensor,
    *,
    max_norm: float,
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    scale_out: torch.Tensor,
    skip_out: torch.Tensor,
    norm_out: torch.Tensor,
) -> None:
    """Compute norm, clip factor and skip flag from the partials, on the current stream; the host reads nothing.

    Args:
        sums, exponents: int64 and int32 [n_chunks] from `norm_partials`, every element written; n_chunks may be 0.
        max_norm: the limit of the norm; 0 or less does not clip.
        inv_scale: float32 [1], one over the loss scale; None is 1.
        found_inf: float32 [1], non-zero skips the step; None is 0.
        scale_out: float32 [1], written: min(1, max_norm / (norm + 1e-6)) * inv_scale, the factor of every gradient.
        skip_out: int32 [1], written: 1 if a gradient is not finite or found_inf is not 0, else 0.
        norm_out: float32 [1], written: the norm times inv_scale; infinite if a gradient is not finite.

    Raises:
        PlacementError: an operand in host memory, on another device, of another dtype, strided or too short.
        ConfigError: max_norm is NaN.
        DeviceError: Triton is not installed.
    """
    if math.isnan(max_norm):
        raise ConfigError("max_norm is NaN", why="no norm compares with it", fix="pass a number, 0 for no clipping")
    require_device_operand(sums, "sums", torch.int64, 0)
    device = sums.device
    require_device_operand(exponents, "exponents", torch.int32, sums.numel(), device)
    for tensor, role, dtype in (
        (inv_scale, "inv_scale", torch.float32),
        (found_inf, "found_inf", torch.float32),
        (scale_out, "scale_out", torch.float32),
        (skip_out, "skip_out", torch.int32),
        (norm_out, "norm_out", torch.float32),
    ):
        if tensor is not None:
            require_device_operand(tensor, role, dtype, 1, device)
    require_triton()
    with torch.cuda.device(device):
        launch_finish(sums, exponents, max_norm, (inv_scale, found_inf), (scale_out, skip_out, norm_out))


def launch_finish(
    sums: torch.Tensor,
    exponents: torch.Tensor,
    max_norm: float,
    optional_inputs: tuple[torch.Tensor | None, torch.Tensor | None],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Make the launches of `finish` without its checks; operands must be those that it accepts.

    Args:
        optional_inputs: inv_scale, found_inf.
        outputs: scale_out, skip_out, norm_out.
    """
    n_chunks = sums.numel()
    totals = torch.zeros(2, dtype=torch.int64, device=sums.device)
    if n_chunks > 0:
        largest_exponent = exponents[:n_chunks].amax()
        bind_totals(sums, exponents, largest_exponent, totals)()
    else:
        all_zero = int(np.iinfo(np.int32).min)
        largest_exponent = torch.full((), all_zero, dtype=torch.int32, device=sums.device)
    bind_finish(totals, largest_exponent, max_norm, optional_inputs, outputs)()


def bind_totals(
    sums: torch.Tensor, exponents: torch.Tensor, largest_exponent: torch.Tensor, totals: torch.Tensor
) -> Launch:
    """Return the launch that adds the chunk sums, at least one, to `totals` on the scale of the largest exponent.

    Args:
        sums, exponents: int64 and int32 [n_chunks].
        largest_exponent: int32 of one element, the largest of `exponents`.
        totals: int64 [2], added to.
    """
    n_chunks = sums.numel()
    arguments = (sums, exponents, largest_exponent, n_chunks, totals)
    return _finish_launchers()[0].bind(-(-n_chunks // _SUMS_PER_PROGRAM), arguments, (_SUMS_PER_PROGRAM,), ())


def bind_finish(
    totals: torch.Tensor,
    largest_exponent: torch.Tensor,
    max_norm: float,
    optional_inputs: tuple[torch.Tensor | None, torch.Tensor | None],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Launch:
    """Return the last launch of `finish`, which reads the totals that the launch of `bind_totals` has written."""
    # Rounded here once, so that the launch passes the very float32 that the definition names.
    with np.errstate(over="ignore"):
        limit = float(np.float32(max_norm))
    arguments = (totals, largest_exponent, *optional_inputs, limit, *outputs)
    return _finish_launchers()[1].bind(1, arguments, (max_norm > 0.0,), ())


@functools.cache
def _finish_launchers() -> tuple[Launcher, Launcher]:
    from hostward.kernels.cuda import norm_triton

    return Launcher(norm_triton.totals_kernel), Launcher(norm_triton.finish_kernel, num_warps=1, enable_fp_fusion=False)
