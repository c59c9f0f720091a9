"""Which backend serves a device."""

from __future__ import annotations

import torch

from hostward.errors import ModelError
from hostward.runtime.backend import Backend


def backend_for(device: torch.device, threads: int | None) -> Backend:
    """A CUDA backend for a CUDA device, a simulated one for the CPU; `threads` for the host step, None: the default.

    Raises:
        ModelError: a device of another type.
    """
    if device.type == "cuda":
        from hostward.runtime.cuda.backend import CudaBackend

        return CudaBackend(device, threads=threads)
    if device.type == "cpu":
        from hostward.runtime.simulated.backend import Order, SimulatedBackend

        # In the order of issue: a loop that looks at a weight without asking finds what a CPU optimizer would leave.
        return SimulatedBackend(threads=threads, order=Order(eager=True), poison=False)
    raise ModelError(
        f"parameters lie on {device}",
        why="hostward works for CUDA devices, and simulates one for CPU parameters",
        fix="move the model to cuda or cpu before making the optimizer",
    )
