"""Optimizers of other packages, with their state offloaded, give the bits that they give without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_optimizer_cases import cut_small, simulated

from hostward.optim.any_optimizer.offload import offload_optimizer_states
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import Lane

Make = Callable[[list[torch.Tensor]], Any]

SHAPES = [*[(64, 64)] * 6, (64, 32), (128,), (64,), (65, 33)]

NAMES = (
    *("adafactor", "adabelief", "adan", "adopt", "came", "dadaptadam", "dadaptlion", "galore", "kron", "lamb", "lars"),
    *("lion", "mars", "muon", "nero", "prodigy", "scalableshampoo", "schedulefreeadamw", "schedulefreesgd", "shampoo"),
    *("sm3", "soap", "spam", "stableadamw", "tiger", "vsgd"),
)


def trained(make: Make, offload: bool) -> tuple[list[torch.Tensor], int]:
    """Weights after four steps, and the bytes of state that are offloaded."""
    generator = torch.Generator().manual_seed(0)
    params: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    torch.manual_seed(0)
    optimizer, states = make(params), None
    if offload:
        backend = simulated(late=frozenset({Lane.H2D, Lane.D2H}))
        states = offload_optimizer_states(optimizer, chunk_size_mb=1, backend=backend)
        cut_small(states, 70_000)
    for n in range(4):
        generator = torch.Generator().manual_seed(100 + n)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) * 0.1
        torch.manual_seed(n)
        optimizer.step()
        if n == 2 and hasattr(optimizer, "eval"):  # schedule-free ones swap weights with state
            optimizer.eval()
            optimizer.train()
    return params, states.offloaded_bytes if states else 0


def assert_equal(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these packages
        (plain, _), (mine, nbytes) = trained(make, offload=False), trained(make, offload=True)
    for p, q in zip(mine, plain, strict=True):
        assert same_bits(p.detach(), q.detach())
    assert nbytes > 0


@pytest.mark.parametrize("name", NAMES)
def test_pytorch_optimizer(name: str) -> None:
    package = pytest.importorskip("pytorch_optimizer")

    def make(params: list[torch.Tensor]) -> Any:
        of_groups = [{"params": params, "use_muon": True}]
        return package.load_optimizer(name)(of_groups if name == "muon" else params)

    assert_equal(make)


def test_sharpness_aware_steps_with_a_closure() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    results = []
    for offload in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
        optimizer = package.SAM(params, package.Lion)
        if offload:
            offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
            offload_optimizer_states(optimizer.base_optimizer, chunk_size_mb=1, backend=simulated())

        def closure(params: Any = params) -> torch.Tensor:
            loss: torch.Tensor = sum((p - 1).square().mean() for p in params)  # type: ignore[assignment]
            loss.backward()
            return loss.detach()

        for _ in range(3):
            closure()
            optimizer.step(closure)
            optimizer.zero_grad()
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Lion8bit", "AdEMAMix8bit", "RMSprop8bit", "PagedAdamW8bit"])
def test_bitsandbytes(name: str) -> None:
    """Where it is installed: its CPU library steps 8-bit state. `EightBit` of the traps is built like it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip("bitsandbytes")
    assert_equal(lambda params: getattr(package.optim, name)(params, min_8bit_size=1024))
