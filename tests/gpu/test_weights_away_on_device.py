"""A model with more weights than the device has room for, on a GPU: it trains, with the bits of one that has room."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import hostward
from hostward.errors import ModelError

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024
WIDTH, DEPTH = 4096, 24
WEIGHTS_BYTES = DEPTH * WIDTH * WIDTH * 2
BUDGET_BYTES = WEIGHTS_BYTES // 2
ON_HOST: dict[str, Any] = {"offload_fraction": 1.0, "streamed_fraction": 0.0}


def network(device: str) -> torch.nn.Module:
    """A row of matrices, with the same random weights on the CPU and the GPU."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        weights = [torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16).mul_(0.02).to(device) for _ in range(DEPTH)]
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False, device="meta", dtype=torch.bfloat16) for _ in range(DEPTH)]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = torch.nn.Parameter(weight)
    net = torch.nn.Module()
    net.layers = torch.nn.ModuleList(layers)
    net.register_buffer("scale", torch.full((), 0.5, dtype=torch.bfloat16, device=device))
    net.forward = lambda x: _forward(net, x)  # type: ignore[method-assign]
    return net


def _forward(net: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = x + torch.tanh(layer(x)) * net.scale
    return x


def train(net: torch.nn.Module, optimizer: hostward.AdamW) -> list[torch.Tensor]:
    losses = []
    for step in range(3):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(32, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
        with optimizer.accumulate(last=True):
            loss = net(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    optimizer.wait()
    return losses


@pytest.mark.alone
def test_more_weights_than_the_budget() -> None:
    net = network("cuda")
    expected = train(net, hostward.AdamW(net, lr=1e-2, max_grad_norm=1.0, **ON_HOST))
    values = [p.detach().cpu() for p in net.parameters()]
    del net
    small = network("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + BUDGET_BYTES) / total_bytes)
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    try:
        hostward.move(small, "cuda")
        with pytest.raises(ModelError, match="waits on the CPU"):
            small(torch.zeros(1, WIDTH, device="cuda", dtype=torch.bfloat16))
        optimizer = hostward.AdamW(small, lr=1e-2, max_grad_norm=1.0, **ON_HOST)
        with hostward.attach(small, optimizer, weights=hostward.Weights()) as run:
            found = train(small, optimizer)
            peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
            assert run.report().weights is not None
            state = small.state_dict()
            torch.cuda.set_per_process_memory_fraction(1.0)  # detach() brings all weights back
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert peak_bytes < BUDGET_BYTES
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    kept = [state[f"layers.{i}.weight"].cpu() for i in range(DEPTH)]
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(kept, values, strict=True))
