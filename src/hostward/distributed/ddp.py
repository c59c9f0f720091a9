"""Models wrapped in `torch.nn.parallel.DistributedDataParallel`, which reduces gradients when backward is over."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel


def in_forward() -> bool:
    """Whether the forward of a wrapped model is running, on whichever thread."""
    return DistributedDataParallel._active_ddp_module is not None
