"""Define the operands of operations: buffers of a memory tier, and the arguments of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hostward.core.inventory import Dtype, MasterKind
from hostward.errors import PlacementError
from hostward.kernels.cpu.adamw import FloatTable, Role

TORCH_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
STATE_DTYPES = {**TORCH_DTYPES, Dtype.FP8: torch.uint8}
"""Buffers of moments have these dtypes; those of FP8 end in the scales of blocks."""
LOW_DTYPES = {MasterKind.SPLIT: torch.int16, MasterKind.PLAIN: torch.float32}
"""What is stored of a main weight besides the weight: its low 16 bits, or all of it."""
DTYPES = {value: key for key, value in TORCH_DTYPES.items()}


class Tier(StrEnum):
    """Names a kind of memory."""

    DEVICE = "device"
    HOST = "host"


class Buffer:
    """Holds bytes of one tier with an owner, for operations to read or write and the memory report to count.

    `data` is a contiguous tensor that `point_to` sets, and `address` its address at that time: asking the tensor again
    would cost a work more than all else it does. `resized`: the storage is freed and allocated again, so the tensor has
    to be asked. `pinned`: the host pages are pinned, or would be on a machine with a GPU. `borrowed`: the owner of
    the memory goes on using it.
    """

    __slots__ = ("address", "borrowed", "data", "owner", "pinned", "resized", "tier")

    if TYPE_CHECKING:

        @property
        def data(self) -> torch.Tensor:
            """An attribute, which a step reads very often. An assignment would leave the address behind."""

    def __init__(
        self, tier: Tier, data: torch.Tensor, owner: str, pinned: bool = False, *, resized: bool = False
    ) -> None:
        self.tier = tier
        self.owner = owner
        self.pinned = pinned
        self.resized = resized
        self.borrowed = False
        self.point_to(data)

    def point_to(self, tensor: torch.Tensor) -> None:
        """Let the buffer be the memory of another contiguous tensor."""
        self.data = tensor  # type: ignore[misc]
        self.address = tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Scalars:
    """Holds scalars that a step reads from memory, one element each: float32 scale, int32 skip, float32 norm."""

    scale: Buffer
    skip: Buffer
    norm: Buffer

    def all(self) -> tuple[Buffer, Buffer, Buffer]:
        return self.scale, self.skip, self.norm


@dataclass(frozen=True, slots=True)
class Hyper:
    """Holds the hyper-parameters of one parameter group at one step, as the kernels read them."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float

    def as_array(self) -> npt.NDArray[np.float64]:
        """Return float64 [5], in the order of the kernels' interface."""
        return np.array([self.lr, self.weight_decay, self.beta1, self.beta2, self.eps], dtype=np.float64)


@dataclass(slots=True, eq=False)
class Constants:
    """Holds constants that all buckets of a parameter group read at a step; replaced, never changed in place.

    `tables` are the bias corrections by step count.
    """

    hyper: Hyper
    tables: tuple[FloatTable, FloatTable]


@dataclass(frozen=True, slots=True)
class BoundRange:
    """Describes one range of a bucket: its first element in the state, and its buffers; `count` is int64 [1].

    `weight_out` and `count_out` are those of the second set, where the operands have one.
    """

    offset: int
    gradient: Buffer
    weight: Buffer
    count: Buffer
    weight_out: Buffer | None = None
    count_out: Buffer | None = None

    @property
    def length(self) -> int:
        return self.weight.data.numel()


@dataclass(frozen=True, slots=True)
class SecondSet:
    """Holds a second set of a host bucket's state, of the dtypes and lengths of the first, which the step writes.

    `guess` is int64 [7], the record of what was guessed; `role` says whether the step is guessed or confirmed.
    """

    exp_avg: Buffer
    exp_avg_sq: Buffer
    low: Buffer | None
    guess: Buffer
    role: Role


@dataclass(frozen=True, slots=True)
class AdamWOperands:
    """Holds one bucket's state as an AdamW kernel takes it.

    `exp_avg`, `exp_avg_sq` are float32 or bfloat16 [padded length], or uint8 (FP8, scales at the end); `low` is the low
    16 bits of the fp32 main weight (int16, split) or the fp32 main weight itself (float32, plain), or None. All
    gradients have one dtype. With a `second` set, on the host only, the state itself is read, and the other written.
    """

    ranges: Sequence[BoundRange]
    kind: MasterKind
    exp_avg: Buffer
    exp_avg_sq: Buffer
    low: Buffer | None
    constants: Constants
    second: SecondSet | None = None

    def read(self) -> list[Buffer]:
        gradients = [r.gradient for r in self.ranges]
        return gradients if self.second is None else [*gradients, *self._own()]

    def written(self) -> list[Buffer]:
        second = self.second
        if second is None:
            return self._own()
        state = [second.exp_avg, second.exp_avg_sq, *([] if second.low is None else [second.low])]
        out = (buffer for r in self.ranges for buffer in (r.weight_out, r.count_out) if buffer is not None)
        return [*state, *out, second.guess]

    def left(self) -> list[Buffer]:
        """Return the buffers whose contents are of no use after the step: the first set, once the second is right."""
        return self._own() if self.second is not None and self.second.role is Role.CONFIRM else []

    def _own(self) -> list[Buffer]:
        state = [self.exp_avg, self.exp_avg_sq, *([] if self.low is None else [self.low])]
        return [*state, *(r.weight for r in self.ranges), *(r.count for r in self.ranges)]


@dataclass(frozen=True, slots=True)
class Partials:
    """Holds partial sums of the norm, by chunk of 4,096 elements: int64 and int32 [chunks], on one tier."""

    sums: Buffer
    exponents: Buffer

    def all(self) -> tuple[Buffer, Buffer]:
        return self.sums, self.exponents

    def part(self, first: int, chunks: int) -> Partials:
        """Return the partial sums of `chunks` chunks from `first` on."""
        span = slice(first, first + chunks)
        sums, exponents = (Buffer(b.tier, b.data[span], b.owner, b.pinned) for b in self.all())
        return Partials(sums, exponents)


CHUNK_ELEMENTS = 4096
ALL_ZERO = -(2**31)
"""Stands for the exponent of a chunk that contains only zeros."""


def chunks_of(elements: int) -> int:
    """Return the number of norm chunks in that many elements."""
    return -(-elements // CHUNK_ELEMENTS)


def empty_buffer(owner: str, tier: Tier = Tier.DEVICE) -> Buffer:
    """Return a buffer without memory, to be filled later."""
    return Buffer(tier, torch.empty(0, device="cpu"), owner)


@dataclass(slots=True, eq=False)
class Clipping:
    """Holds the norm's arguments besides the gradients: the limit (0: none), float32 [1] factors and flags, or None.

    The skip flag is added to `overflow_out`, for a gradient scaler that could not check the gradients itself.
    """

    max_norm: float = 0.0
    inv_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    overflow_out: torch.Tensor | None = None


def require_tier(buffers: Sequence[Buffer], tier: Tier, operation: str) -> None:
    """Raise PlacementError if an operand is in the wrong tier."""

    for buffer in buffers:
        if buffer.tier is not tier:
            raise PlacementError(
                f"{operation}: operand {buffer.owner!r} lies on the {buffer.tier.value}, not on the {tier.value}",
                why="device kernels never run on host memory, and host kernels never on device memory",
                fix="report this with the plan: placements and operands disagree",
            )
