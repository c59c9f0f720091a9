"""Choose the backend for a device."""

from __future__ import annotations

import torch

from hostward.errors import ModelError
from hostward.runtime.backend import Backend


def backend_for(device: torch.device, threads: int | None) -> Backend:
    """Return a CUDA backend for a CUDA device, a simulated one for the CPU.

    `threads`: CPU threads of the optimizer step; None: the default.

    Raises:
        ModelError: a device of another type.
    """
    if device.type == "cuda":
        from hostward.runtime.cuda.backend import CudaBackend

        return CudaBackend(device, threads=threads)
    if device.type == "cpu":
        from hostward.runtime.simulated.backend import Order, SimulatedBackend

        # In order of issue: code that reads a weight without waiting finds the value that a CPU optimizer would leave.
        return SimulatedBackend(threads=threads, order=Order(eager=True), poison=False)
    raise ModelError(
        f"parameters are on {device}",
        why="hostward supports CUDA devices, and simulates one for CPU parameters",
        fix="move the model to cuda or cpu before making the optimizer",
    )
