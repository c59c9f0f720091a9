"""Host memory as operands of native code: type, place and layout are checked here, once, before a pointer is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hostward.errors import PlacementError

Memory: TypeAlias = "torch.Tensor | npt.NDArray[Any]"

_TORCH_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
# numpy has no bf16; its bits travel as uint16.
_NUMPY_NAMES = {
    np.dtype(np.float32): "fp32",
    np.dtype(np.uint16): "bf16",
    np.dtype(np.float16): "fp16",
    np.dtype(np.float64): "fp64",
    np.dtype(np.int16): "int16",
    np.dtype(np.int32): "int32",
    np.dtype(np.int64): "int64",
}


@dataclass(frozen=True)
class Operand:
    """Contiguous host memory: address, number of elements, dtype name ("fp32", "bf16", ...)."""

    address: int
    elements: int
    dtype: str
    memory: Memory
    """What the address belongs to; holding the operand keeps the memory alive."""


def host_operand(memory: Memory, role: str, dtypes: tuple[str, ...], *, writable: bool = False) -> Operand:
    """Checks that `memory` can be handed to native code.

    Args:
        memory: a torch tensor or numpy array; uint16 arrays hold bf16 bits.
        role: its name in error texts.
        dtypes: the dtype names that are allowed.
        writable: whether native code will write to it.

    Raises:
        PlacementError: the memory lies on a device, is not contiguous, is read-only, or has another dtype.
    """
    if isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu" or memory.layout is not torch.strided:
            raise PlacementError(
                f"{role} lies on {memory.device} with layout {memory.layout}",
                why="host kernels read and write strided host memory",
                fix="pass a dense CPU tensor",
            )
        dtype = _TORCH_NAMES.get(memory.dtype, str(memory.dtype))
        contiguous, elements, address, read_only = memory.is_contiguous(), memory.numel(), memory.data_ptr(), False
    else:
        dtype = _NUMPY_NAMES.get(memory.dtype, str(memory.dtype))
        contiguous, elements, address = memory.flags.c_contiguous, memory.size, memory.ctypes.data
        read_only = not memory.flags.writeable
    if dtype not in dtypes:
        raise PlacementError(
            f"{role} has dtype {dtype}",
            why=f"the host kernel takes {' or '.join(dtypes)} here and never converts",
            fix=f"pass {' or '.join(dtypes)}",
        )
    if not contiguous:
        raise PlacementError(
            f"{role} is not contiguous",
            why="the host kernel walks memory element by element and would touch what lies between",
            fix="pass contiguous memory, or one range for each contiguous part",
        )
    if writable and read_only:
        raise PlacementError(f"{role} is read-only", why="the host kernel writes to it", fix="pass a writable array")
    return Operand(address, elements, dtype, memory)
