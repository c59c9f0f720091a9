"""Check device memory once, before a Triton kernel gets a pointer to it."""

from __future__ import annotations

from types import ModuleType

import torch

from hostward.errors import DeviceError, PlacementError

# The numbering of hostward_dtype in native/include/hostward.h.
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def dtype_code(dtype: torch.dtype | int, role: str) -> int:
    """Return the code 0, 1 or 2 of float32, bfloat16 or float16, given as torch dtype or as code.

    Raises:
        PlacementError: any other dtype.
    """
    code = _DTYPE_CODES.get(dtype) if isinstance(dtype, torch.dtype) else int(dtype)
    if code is None or code not in _DTYPE_CODES.values():
        raise PlacementError(
            f"{role} has dtype {dtype}",
            why="the device kernel takes float32, bfloat16 or float16 here and never converts",
            fix="pass one of these dtypes",
        )
    return code


def require_device_operand(
    tensor: torch.Tensor, role: str, dtype: torch.dtype, elements: int, device: torch.device | None = None
) -> None:
    """Check that `tensor` can be an operand of a device kernel.

    Args:
        tensor: any tensor.
        role: its name in error texts.
        dtype: the dtype that the kernel reads or writes.
        elements: the least number of elements.
        device: the device of the other operands; None accepts any CUDA device.

    Raises:
        PlacementError: host memory, another device, another dtype, strided or too short memory.
    """
    if tensor.device.type != "cuda" or (device is not None and tensor.device != device):
        raise PlacementError(
            f"{role} is on {tensor.device}",
            why=f"the kernel runs on {'a CUDA device' if device is None else device} and never on host memory",
            fix="pass a tensor on the device of the kernel, or use the host kernel",
        )
    if tensor.dtype != dtype:
        raise PlacementError(
            f"{role} has dtype {tensor.dtype}",
            why=f"the device kernel takes {dtype} here and never converts",
            fix=f"pass {dtype}",
        )
    if not tensor.is_contiguous():
        raise PlacementError(
            f"{role} is not contiguous",
            why="the device kernel reads memory element by element and would also read the bytes in between",
            fix="pass contiguous memory",
        )
    if tensor.numel() < elements:
        raise PlacementError(
            f"{role} has {tensor.numel()} elements, the kernel needs {elements}",
            why="the device kernel would run past its end",
            fix="pass memory of the full length",
        )


def require_rows(tensor: torch.Tensor, role: str, device: torch.device) -> None:
    """Check that `tensor` is a map int32 [n, 2] on `device`.

    Raises:
        PlacementError: the tensor has another dtype, shape or device.
    """
    require_device_operand(tensor, role, torch.int32, 0, device)
    if tensor.dim() != 2 or tensor.shape[1] != 2:
        raise PlacementError(
            f"{role} has shape {tuple(tensor.shape)}",
            why="a row is (index of the run, block within it), one row for each program",
            fix="pass the result of block_map or chunk_map",
        )


def interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter instead of compiling them.

    Raises:
        DeviceError: Triton is not installed.
    """
    return bool(_triton().knobs.runtime.interpret)


def require_triton() -> None:
    """Raise DeviceError if Triton is not installed."""
    _triton()


def _triton() -> ModuleType:
    try:
        import triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise DeviceError(
            "Triton is not installed",
            why="the device kernels are written in it",
            fix="install a CUDA build of torch, which brings Triton, or place all optimizer state on the host",
        ) from error
    module: ModuleType = triton
    return module
