"""What is decided about a workload: a placement for each bucket, and what becomes of each layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hostward.core.placement import Placement


class Keep(StrEnum):
    """What becomes of what a layer saves for backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    """All that it saves goes to the host."""
    RECOMPUTE = "recompute"
    """The layer keeps its input and runs again in backward."""
    RECOMPUTE_OFFLOAD = "recompute_offload"
    """As recompute, and the input goes to the host."""
    ELEMENTWISE = "elementwise"
    """Norms and activations run again, the rest stays."""
    ELEMENTWISE_OFFLOAD = "elementwise_offload"
    """Norms and activations run again, the rest goes to the host."""


RECOMPUTED = (Keep.RECOMPUTE, Keep.RECOMPUTE_OFFLOAD)
ELEMENTWISE = (Keep.ELEMENTWISE, Keep.ELEMENTWISE_OFFLOAD)
ELEMENTWISE_MODULES = ("layernorm", "mlp_act", "moe_act")
"""What costs little to run again: it reads and writes memory, and multiplies no matrices."""
LEAVES = (Keep.OFFLOAD, Keep.RECOMPUTE_OFFLOAD, Keep.ELEMENTWISE_OFFLOAD)
"""What a layer keeps for backward goes to the host."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train a workload."""

    placements: tuple[Placement, ...]
    """Of the inventory's buckets, in their order."""
    activations: tuple[Keep, ...]
    """Of the workload's repeated layers, in order."""
    offloaded_weights: frozenset[str] = frozenset()
    """Names of layers whose weights live on the host."""
    gradients_on_host: bool = False
    """Whether gradients of several microbatches are added up on the host."""
    staging_bytes: int | None = None
    """Most device bytes of staging slots; None: what backward has freed."""
    captured: bool = False
    """Whether forward and backward are a CUDA graph, whose memory nothing else may use between them."""
    serial: bool = False
    """Whether all of the step comes between backward and forward: no gradient leaves before, no state is read ahead."""

    @property
    def overlapped(self) -> bool:
        """Whether gradients leave while backward runs, and the step hides behind it and the next forward."""
        return not (self.captured or self.serial)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan among those that trade device memory for time, with its predicted peak and step time."""

    label: str
    device_bytes: int
    step_s: float
