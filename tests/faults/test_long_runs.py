"""T12 of the project's list of faults: a run that takes a little more memory with every step.

Seen red with: as many bytes as the gradients have, kept at every step.
"""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

import hostward
from hostward.core.host_limits import resident_bytes
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend

WARM, STEPS = 40, 80
MIB = 1 << 20
MODES = {
    "mixed": {"offload_fraction": 0.7, "streamed_fraction": 0.5},
    "serial": {"offload_fraction": 1.0, "streamed_fraction": 0.5, "overlap": False},
    "summed on the host": {"offload_fraction": 1.0, "streamed_fraction": 0.0, "gradients": "host"},
}


def settled_bytes() -> int:
    """Resident, without what the C library holds back for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("mode", MODES)
def test_further_steps_take_no_more_memory(mode: str) -> None:
    model = Net()
    backend = SimulatedBackend(order=Order(seed=3), threads=1)
    optimizer = hostward.AdamW(model, lr=1e-3, max_grad_norm=1.0, backend=backend, **MODES[mode])  # type: ignore[arg-type]
    attachment = hostward.attach(model, optimizer, activations=hostward.Activations(4, min_bytes=1))
    held: dict[int, tuple[int, int, int]] = {}
    grown = 0
    for step in range(WARM + STEPS):
        for last in (False, True):
            with optimizer.accumulate(last=last):
                model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 19:
            optimizer.wait()
            ledger = backend.ledger
            held[step] = ledger.total_bytes(Tier.HOST), ledger.total_bytes(Tier.DEVICE), ledger.pinned_bytes
            if step == WARM - 1:
                grown = -settled_bytes()
    grown += settled_bytes()
    assert len({held[step] for step in held if step >= WARM - 1}) == 1
    assert grown < STEPS * MIB // 8  # a gradient of every step would be 1.5 MiB a step
    attachment.detach()
