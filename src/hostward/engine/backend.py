"""What a backend does: a short list of verbs over lanes, buffers and events.

`cuda` is the real one. `simulated` runs on any machine: there the device tier is separate memory in RAM and every
lane is a queue. Code above this module decides what to do and in which order; it never asks which backend carries it
out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from hostward.errors import HostwardError, PlacementError
from hostward.host.adamw import AdamWRange, FloatTable
from hostward.inventory import Dtype, MasterKind
from hostward.schedule import Lane

TORCH_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
DTYPES = {value: key for key, value in TORCH_DTYPES.items()}


_DRAIN_ATTEMPTS = 1000
"""Each failing operation ends one attempt."""


class Tier(StrEnum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"


@dataclass(eq=False, slots=True)
class Buffer:
    """Bytes of one tier with an owner: what an operation reads or writes, and what the memory report counts.

    `data` is a flat contiguous tensor. `pinned` says that the host pages are locked, or would be on a machine with a
    GPU.
    """

    tier: Tier
    data: torch.Tensor
    owner: str
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, slots=True)
class Event:
    """Completion of one operation. `native` belongs to the backend that made it."""

    native: object


@dataclass(slots=True)
class Ledger:
    """Bytes held, by tier and owner, and bytes copied, by direction."""

    held_bytes: defaultdict[tuple[Tier, str], int] = field(default_factory=lambda: defaultdict(int))
    pinned_bytes: int = 0
    copied_bytes: defaultdict[Lane, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, buffer: Buffer, sign: int = 1) -> None:
        self.held_bytes[buffer.tier, buffer.owner] += sign * buffer.nbytes
        if buffer.pinned:
            self.pinned_bytes += sign * buffer.nbytes

    def by_owner(self, tier: Tier) -> dict[str, int]:
        return {owner: n for (t, owner), n in sorted(self.held_bytes.items()) if t is tier and n}

    def total_bytes(self, tier: Tier) -> int:
        return sum(self.by_owner(tier).values())


@dataclass(frozen=True, slots=True)
class Scalars:
    """What every step reads through memory, one element each: float32 scale, int32 skip, float32 norm."""

    scale: Buffer
    skip: Buffer
    norm: Buffer

    def all(self) -> tuple[Buffer, Buffer, Buffer]:
        return self.scale, self.skip, self.norm


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyper-parameters of one parameter group at one step, as the kernels read them."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float

    def as_array(self) -> npt.NDArray[np.float64]:
        """float64 [5], in the order of the kernels' interface."""
        return np.array([self.lr, self.weight_decay, self.beta1, self.beta2, self.eps], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class AdamWOperands:
    """One bucket's state as an AdamW kernel takes it.

    `exp_avg`, `exp_avg_sq` are float32 [padded length]; `remainder` int16 (split) or `master` float32 (plain) or
    neither. `ranges` hold each range's offset into those and its gradient, weight and step count; all gradients have
    one dtype. `tables` are the bias corrections by step count.
    """

    ranges: Sequence[AdamWRange]
    kind: MasterKind
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None
    master: torch.Tensor | None
    hyper: Hyper
    tables: tuple[FloatTable, FloatTable]


class Backend(ABC):
    """Lanes of one device. All methods are called from one thread."""

    device: torch.device
    ledger: Ledger

    @abstractmethod
    def allocate(
        self, tier: Tier, sizes: Sequence[int], dtype: torch.dtype, owner: str, *, pinned: bool = False
    ) -> list[Buffer]:
        """One slab of zeros of exactly sum(sizes) elements, cut into one buffer per size. Raises MemoryLimitError."""

    @abstractmethod
    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        """Give buffers of `allocate` back. A free is a write: it is ordered after `after`."""

    @abstractmethod
    def copy(self, lane: Lane, destination: Buffer, source: Buffer, *, name: str, waits: Sequence[Event] = ()) -> Event:
        """Copy `source` to `destination`, of equal dtype and length, on a copy lane."""

    @abstractmethod
    def launch(
        self,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        """Run torch operations on device buffers on the compute lane."""

    @abstractmethod
    def norm(
        self,
        gradients: Sequence[Buffer],
        out: Scalars,
        *,
        max_norm: float,
        inv_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        waits: Sequence[Event] = (),
    ) -> Event:
        """Global norm, clip factor and finite flag of device gradients, into device scalars (docs/exactness.md)."""

    @abstractmethod
    def device_adamw(
        self,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        """AdamW of a device bucket on the compute lane. All operands lie on the device."""

    @abstractmethod
    def host_adamw(
        self,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        """AdamW of a host bucket as a host function on the host lane. All operands lie on the host."""

    @abstractmethod
    def record(self) -> Event:
        """Completion of everything that the compute lane holds now, the caller's own operations included."""

    @abstractmethod
    def retire(self, buffers: Sequence[Buffer], lane: Lane, waits: Sequence[Event] = ()) -> Event:
        """The contents of `buffers` are dead once `lane` gets here. `simulated` poisons them, `cuda` does nothing."""

    @abstractmethod
    def join(self, events: Sequence[Event]) -> None:
        """Make everything that is issued from now on, on any lane and by the caller's own code, wait for `events`."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait on the host until all lanes are empty; raises what a host function reported."""

    def drain(self) -> None:
        """Empty all lanes after an error that is already on its way: what they report besides is dropped."""
        for _ in range(_DRAIN_ATTEMPTS):
            try:
                self.synchronise()
            except (HostwardError, RuntimeError):
                continue
            return

    @abstractmethod
    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        """A buffer over device memory that somebody else allocated: weights, gradients. `counted`: in the ledger."""

    @abstractmethod
    def describe(self) -> Mapping[str, object]:
        """Plain facts for reports: name, device, host threads, instruction set."""


def require_tier(buffers: Sequence[Buffer], tier: Tier, operation: str) -> None:
    """Raises PlacementError if an operand lies on the wrong side."""
    for buffer in buffers:
        if buffer.tier is not tier:
            raise PlacementError(
                f"{operation}: operand {buffer.owner!r} lies on the {buffer.tier.value}, not on the {tier.value}",
                why="device kernels never run on host memory, and host kernels never on device memory",
                fix="report this with the plan: placements and operands disagree",
            )


def require_copyable(lane: Lane, destination: Buffer, source: Buffer) -> None:
    """Raises PlacementError unless both sides have the dtype, length and tier that `lane` copies (H24)."""
    tiers = {Lane.D2H: (Tier.DEVICE, Tier.HOST), Lane.H2D: (Tier.HOST, Tier.DEVICE)}
    if lane not in tiers or (source.tier, destination.tier) != tiers[lane]:
        raise PlacementError(
            f"lane {lane.value} cannot copy from {source.tier.value} to {destination.tier.value}",
            fix="use d2h for device to host and h2d for host to device",
        )
    if source.data.dtype != destination.data.dtype or source.data.shape != destination.data.shape:
        raise PlacementError(
            f"copy of {source.owner!r}: {source.data.dtype} {tuple(source.data.shape)} into "
            f"{destination.data.dtype} {tuple(destination.data.shape)}",
            why="a copy never converts: conversion on the way would round",
            fix="make both sides of one dtype and length",
        )
    if not (source.data.is_contiguous() and destination.data.is_contiguous()):
        raise PlacementError(
            f"copy of {source.owner!r}: one side is not contiguous",
            why="a strided copy goes through a hidden kernel and buffer, on a stream that no event covers",
            fix="make the tensor contiguous before it is adopted",
        )
