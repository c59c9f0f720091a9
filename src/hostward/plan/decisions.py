"""Define what is decided about a workload: a placement for each bucket and a treatment for each layer. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hostward.core.placement import Placement


class Keep(StrEnum):
    """Say how a layer treats the tensors that it saves for backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    """Offload every tensor that the layer saves."""
    RECOMPUTE = "recompute"
    """Keep the layer's input and recompute the layer in backward."""
    RECOMPUTE_OFFLOAD = "recompute_offload"
    """Recompute the layer in backward and offload its input."""
    ELEMENTWISE = "elementwise"
    """Recompute layer norms and activations; keep the other saved tensors."""
    ELEMENTWISE_OFFLOAD = "elementwise_offload"
    """Recompute layer norms and activations; offload the other saved tensors."""


RECOMPUTED = (Keep.RECOMPUTE, Keep.RECOMPUTE_OFFLOAD)
ELEMENTWISE = (Keep.ELEMENTWISE, Keep.ELEMENTWISE_OFFLOAD)
ELEMENTWISE_MODULES = ("layernorm", "mlp_act", "moe_act")
"""Modules that are cheap to recompute: they read and write memory, and multiply no matrices."""
LEAVES = (Keep.OFFLOAD, Keep.RECOMPUTE_OFFLOAD, Keep.ELEMENTWISE_OFFLOAD)
"""Choices that offload the tensors which a layer keeps for backward."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Describe one way to train a workload."""

    placements: tuple[Placement, ...]
    """Placements by bucket, in the inventory's order."""
    activations: tuple[Keep, ...]
    """Treatments by repeated layer, in the workload's order."""
    offloaded_weights: frozenset[str] = frozenset()
    """Names of layers whose weights live on the host."""
    gradients_on_host: bool = False
    """True if gradients of several microbatches are accumulated on the host."""
    staging_bytes: int | None = None
    """Largest number of device bytes for GPU staging buffers; None: the memory that backward has freed."""
    captured: bool = False
    """True if forward and backward are a CUDA graph, whose memory nothing else may use between them."""
    serial: bool = False
    """True if the whole step runs between backward and forward: no gradient is offloaded and no state prefetched
    earlier.
    """

    @property
    def overlapped(self) -> bool:
        """Return whether gradients are offloaded during backward and the step overlaps with both passes."""
        return not (self.captured or self.serial)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """Hold one plan of those that trade device memory for time, with its predicted peak and step time."""

    label: str
    device_bytes: int
    step_s: float


WORTH_SHARE = 0.01
"""A plan is faster than another one from this share of the step time on; predictions say no less reliably."""


def faster(points: Iterable[FrontierPoint], device_bytes: int, step_s: float) -> FrontierPoint | None:
    """Return the fastest plan that takes at most `device_bytes` and is faster than a step of `step_s` seconds.

    Of several as fast, the one with the least device memory. None where there is none.
    """
    fitting = [p for p in points if p.device_bytes <= device_bytes and p.step_s < step_s * (1 - WORTH_SHARE)]
    return min(fitting, key=lambda p: (p.step_s, p.device_bytes), default=None)
