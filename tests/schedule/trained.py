"""A small network trained in any order of lanes, and everything that must come out alike."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

import hostward
from hostward.optim.bucket_state import same_bits
from hostward.runtime.simulated.backend import Order, SimulatedBackend

STEPS = 4
MAX_NORM = 0.5
FACTORS = (1.0, 0.02, 1.5, 0.02)
"""Of the loss, by step: the norm exceeds MAX_NORM in the first and third step alone."""
ABSENT = (None, None, 2, 0)
"""The numbered layer that takes no part in a step."""
MIXES: Mapping[str, Mapping[str, float]] = {
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "half host": {"offload_fraction": 0.5, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "both": {"offload_fraction": 1.0, "streamed_fraction": 0.5},
    "all three": {"offload_fraction": 0.7, "streamed_fraction": 0.5},
}


class Net(torch.nn.Module):
    """Eight buckets in seven layers, one of which may be left out of forward; a scale that the root owns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.embed = torch.nn.Linear(8, 12)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(4))
        self.norm = torch.nn.LayerNorm(12)
        self.head = torch.nn.Linear(12, 6)
        self.to(dtype)

    def forward(self, x: torch.Tensor, without: int | None = None) -> torch.Tensor:
        x = self.embed(x * self.scale)
        for i, layer in enumerate(self.layers):
            if i != without:
                x = torch.tanh(layer(x)) + x
        out: torch.Tensor = self.head(self.norm(x))
        return out


def data(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(
    mix: Mapping[str, float],
    backend: SimulatedBackend | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    microbatches: int = 1,
    context: bool = True,
    norms: bool = True,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """All outputs of forward, weights and state, and the gradient norms of all steps where `norms`."""
    model = Net(dtype)
    grad_dtype = torch.float32 if dtype is not torch.float32 and microbatches > 1 else None
    backend = backend or SimulatedBackend(threads=1, order=Order(eager=True))
    settings = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": MAX_NORM, "grad_dtype": grad_dtype}
    optimizer = hostward.AdamW(model, backend=backend, **mix, **settings, **options)  # type: ignore[arg-type]
    found = {}
    for step, factor in enumerate(FACTORS):
        for i in range(microbatches):
            without = ABSENT[step]
            last = i == microbatches - 1
            with optimizer.accumulate(last=last) if context else nullcontext():
                out = one_backward(model, 10 * step + i, without, factor / microbatches)
            found[f"output {step}.{i}"] = out
        optimizer.step()
        if norms:
            found[f"norm {step}"] = torch.tensor(optimizer.grad_norm)
        if step < STEPS - 1:
            optimizer.zero_grad()
    found["last output"] = model(data(99, dtype)).detach().clone()
    found |= {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    for name, entry in optimizer.state_dict()["state"].items():
        found |= {f"{role} {name}": value for role, value in entry.items()}
    return found


def one_backward(model: Net, seed: int, without: int | None, factor: float) -> torch.Tensor:
    dtype = model.scale.dtype
    out = model(data(seed, dtype), without)
    (out.float() - 3.0).square().mean().mul(factor).backward()
    return out.detach().clone()


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same bit for bit; norms that one side has not read are left out."""
    names = [name for name in a if not name.startswith("norm ") or (name in a and name in b)]
    return [name for name in names if not same_bits(a[name], b[name])]
