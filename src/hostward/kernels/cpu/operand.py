"""Check dtype, device and layout of host memory once, before native code gets a pointer to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hostward.errors import ConfigError, PlacementError
from hostward.kernels.cpu.library import Dtype

Memory: TypeAlias = "torch.Tensor | npt.NDArray[Any]"

_TORCH_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}
# numpy has no bf16; its bits are held as uint16.
_NUMPY_NAMES = {
    np.dtype(np.float32): "fp32",
    np.dtype(np.uint16): "bf16",
    np.dtype(np.float16): "fp16",
    np.dtype(np.float64): "fp64",
    np.dtype(np.int16): "int16",
    np.dtype(np.int32): "int32",
    np.dtype(np.int64): "int64",
    np.dtype(np.uint8): "uint8",
}


FLOATS = {"fp32": Dtype.FP32, "bf16": Dtype.BF16, "fp16": Dtype.FP16}
"""Element types of gradients and weights by name."""

MOMENTS = {"fp32": 0, "bf16": 1, "uint8": 2}
"""Element types of moments by name, and their codes (hostward_moment): uint8 is FP8 with a scale for each block."""


@dataclass(frozen=True)
class Operand:
    """Describe contiguous host memory: address, number of elements, dtype name ("fp32", "bf16", ...)."""

    address: int
    elements: int
    dtype: str
    memory: Memory
    """The tensor or array at the address, which the operand keeps alive."""


def host_operand(memory: Memory, role: str, dtypes: tuple[str, ...], *, writable: bool = False) -> Operand:
    """Check that `memory` can be passed to native code, and return it as an operand.

    Args:
        memory: a torch tensor or numpy array; uint16 arrays hold bf16 bits.
        role: its name in error texts.
        dtypes: the dtype names that are allowed.
        writable: whether native code will write to it.

    Raises:
        PlacementError: the memory is on a device, is not contiguous, is read-only, or has another dtype.
    """
    if isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu" or memory.layout is not torch.strided:
            raise PlacementError(
                f"{role} is on {memory.device} with layout {memory.layout}",
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
            why="the host kernel reads memory element by element and would also read the bytes in between",
            fix="pass contiguous memory, or one range for each contiguous part",
        )
    if writable and read_only:
        raise PlacementError(f"{role} is read-only", why="the host kernel writes to it", fix="pass a writable array")
    return Operand(address, elements, dtype, memory)


class Operands(dict[str, Operand]):
    """Keep the checked operands of a task by role, and their memory alive."""

    def check(
        self, memory: Memory, role: str, dtypes: tuple[str, ...], elements: int, *, writable: bool = False
    ) -> Operand:
        """Check `memory` as `host_operand` does, and that it has at least `elements` elements, and keep it.

        Raises:
            PlacementError: see `host_operand`; or the memory is too short.
        """
        operand = host_operand(memory, role, dtypes, writable=writable)
        if operand.elements < elements:
            raise PlacementError(
                f"{role} has {operand.elements} elements, the task needs {elements}",
                why="the host kernel would run past its end",
                fix="pass memory of the full length",
            )
        self[role] = operand
        return operand

    def optional(
        self, memory: Memory | None, role: str, dtype: str, elements: int, *, writable: bool = False
    ) -> int | None:
        """Check `memory` as `check` does and return its address, or None for None."""
        return None if memory is None else self.check(memory, role, (dtype,), elements, writable=writable).address


def one_dtype(names: set[str], role: str) -> Dtype:
    """Return the only dtype among `names`, which is not empty.

    Raises:
        ConfigError: there are several.
    """
    if len(names) > 1:
        raise ConfigError(
            f"the {role} of one task have dtypes {', '.join(sorted(names))}",
            why="a task runs one kernel",
            fix="make one task for each dtype",
        )
    return FLOATS[next(iter(names))]


FP8_BLOCK = 128
"""So many elements of an FP8 moment share a scale."""


def require_blocks(size_bytes: int, role: str, elements: int) -> int:
    """Return the number of blocks in an FP8 moment: a byte for each of their elements, and one for each of them.

    Raises:
        PlacementError: memory that is no whole number of blocks, or too short.
    """
    blocks, rest = divmod(size_bytes, FP8_BLOCK + 1)
    if rest or blocks * FP8_BLOCK < elements:
        raise PlacementError(
            f"{role} has {size_bytes} bytes for {elements} elements",
            why=f"a block of {FP8_BLOCK} elements takes {FP8_BLOCK + 1}: one for each of them, and their scale",
            fix=f"pass {-(-elements // FP8_BLOCK) * (FP8_BLOCK + 1)} bytes, or a larger multiple of {FP8_BLOCK + 1}",
        )
    return blocks


def require_threads(threads: int) -> None:
    """Raise ConfigError for fewer than one thread."""
    if threads < 1:
        raise ConfigError(f"threads is {threads}", why="the calling thread works too", fix="choose 1 or more")
