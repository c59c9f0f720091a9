"""Support models in `torch.nn.parallel.DistributedDataParallel`, which reduces gradients at the end of backward."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel


def in_forward() -> bool:
    """Return whether the forward of a wrapped model is running, on any thread."""
    return DistributedDataParallel._active_ddp_module is not None
