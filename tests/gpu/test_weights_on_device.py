"""Offloaded weights on a GPU: the same bits whatever lane is slow, a lower peak, memory that is level."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from attached_cases import MIB, churn, deterministic_algorithms, same, slow_fetches
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.runtime.backend import Tier

pytestmark = pytest.mark.gpu

WIDTH = 1024
LAYER_BYTES = 2 * WIDTH * WIDTH * 2
"""Two bf16 matrices."""
ALL = hostward.Weights(min_elements=0)
ON_HOST = {"offload_fraction": 1.0, "streamed_fraction": 0.0}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with deterministic_algorithms(warn_only=True):
        yield


class Block(torch.nn.Module):
    """Large weights and few tokens: fetches last longer than what they hide behind."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.run, x, use_reentrant=False) if self.recompute else self.run(x)
        assert isinstance(found, torch.Tensor)
        return found

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self, *, depth: int = 6, recompute: bool = False, trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(Block(recompute=recompute) for _ in range(depth))
        self.layers.requires_grad_(trained)
        self.to("cuda", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def batch(seed: int, rows: int = 64) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()


def gradients(net: Net, steps: int = 4) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        net.zero_grad()
        x = batch(step)
        loss = net(x).float().square().mean()
        churn()
        loss.backward()
        churn()
        found += [loss.detach().bfloat16(), x.grad, net.scale.grad.clone()]  # type: ignore[union-attr]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_t30_t31_gradients_keep_their_bits(both: bool, recompute: bool, slow: bool) -> None:
    expected = gradients(Net(recompute=recompute))
    for num_layers in (1, 3, 5):
        net = Net(recompute=recompute)
        saved = hostward.Activations(num_layers=num_layers, min_bytes=4096) if both else None
        run = hostward.attach(net, activations=saved, weights=hostward.Weights(num_layers, min_elements=0))
        if slow:
            slow_fetches(run)
        assert same(gradients(net), expected), num_layers
        report = run.report().weights
        assert report is not None
        assert report.on_demand_bytes == LAYER_BYTES, "but for the first forward's first layer all are foreseen"
        assert report.held_bytes == 0
        run.detach()
        assert same(gradients(net), expected)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_with_the_host_step(recompute: bool, slow: bool) -> None:
    def trained(*, attached: bool) -> list[torch.Tensor]:
        net = Net(recompute=recompute, trained=True)
        optimizer = hostward.AdamW(net, lr=1e-2, max_grad_norm=1.0, **ON_HOST)
        run = hostward.attach(net, optimizer, weights=ALL) if attached else None
        if run is not None and slow:
            slow_fetches(run)
        for step in range(6):
            for i in range(2):
                with optimizer.accumulate(last=i == 1):
                    net(batch(2 * step + i)).float().square().mean().backward()
                churn()
            optimizer.step()
            optimizer.zero_grad()
        if run is not None:
            run.detach()
        optimizer.wait()
        return [p.detach().clone() for p in net.parameters()]

    assert same(trained(attached=True), trained(attached=False))


def test_h2_on_a_side_stream() -> None:
    expected = gradients(Net())
    net = Net()
    run = hostward.attach(net, weights=ALL)
    slow_fetches(run)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = gradients(net)
    side.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    assert same(found, expected)
    assert same(gradients(net), expected), "back on the first stream"
    run.detach()


def test_h19_conservation() -> None:
    net = Net()
    gradients(net, 1)
    net.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run = hostward.attach(net, weights=ALL)
    torch.cuda.synchronize()
    host_bytes = run.backend.ledger.by_owner(Tier.HOST)["offloaded weights"]
    assert host_bytes == 5 * LAYER_BYTES
    assert abs(torch.cuda.memory_allocated() + host_bytes - before) <= 512 * 16, "to the allocator's granule"
    run.detach()
    torch.cuda.synchronize()
    assert abs(torch.cuda.memory_allocated() - before) <= 512 * 16
    assert run.backend.ledger.by_owner(Tier.HOST).get("offloaded weights", 0) == 0


@pytest.mark.alone
def test_the_peak_is_lower_by_what_left() -> None:
    """Two layers of those that come and go are on the device at a time."""
    peaks = []
    for attached in (False, True):
        net = Net(depth=12)
        run = hostward.attach(net, weights=ALL) if attached else None
        for step in range(3):
            torch.cuda.reset_peak_memory_stats()
            net.zero_grad()
            net(batch(step)).float().square().mean().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        if run is not None:
            run.detach()
        del net, run
        gc.collect()
    assert peaks[0] - peaks[1] >= (11 - 2) * LAYER_BYTES - MIB


@pytest.mark.alone
def test_h13_h15_memory_stays_level_and_peaks_are_equal() -> None:
    net = Net(trained=True)
    optimizer = hostward.AdamW(net, lr=1e-3, **ON_HOST)
    run = hostward.attach(net, optimizer, weights=ALL)

    def step(seed: int) -> None:
        with optimizer.accumulate(last=True):
            net(batch(seed)).float().square().mean().backward()
        optimizer.step()

    for seed in range(5):
        step(seed)
    reserved, peaks = torch.cuda.memory_reserved(), set()
    for _ in range(20):
        torch.cuda.reset_peak_memory_stats()
        step(0)
        peaks.add(torch.cuda.max_memory_allocated())
    assert len(peaks) == 1
    assert torch.cuda.memory_reserved() == reserved
    run.detach()


def test_h12_a_fetch_that_is_never_used_is_not_handed_on() -> None:
    expected = gradients(Net())
    net = Net()
    run = hostward.attach(net, weights=ALL)
    slow_fetches(run)
    assert run._weights is not None
    for _ in range(3):
        run._weights.residency.prefetch(2)
        run._weights.residency.sweep()
        kept = [torch.ones(LAYER_BYTES // 4, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(bool((k == 1).all()) for k in kept)
    assert same(gradients(net), expected)
    run.detach()


def test_n4_saved_weights_have_their_bytes() -> None:
    net = Net()
    whole = {name: value.cpu() for name, value in net.state_dict().items()}
    with hostward.attach(net, weights=ALL):
        gradients(net, 1)
        found = net.state_dict()
        assert all(torch.equal(found[name].cpu(), whole[name]) for name in whole)
        net.load_state_dict(whole)
        expected = gradients(Net())
        assert same(gradients(net), expected)


def test_h65_nothing_waits_on_the_host(no_host_waits: Callable[[], AbstractContextManager[None]]) -> None:
    net = Net(trained=True)
    optimizer = hostward.AdamW(net, lr=1e-3, **ON_HOST)
    run = hostward.attach(net, optimizer, weights=ALL)

    def step(x: torch.Tensor) -> None:
        with optimizer.accumulate(last=True):
            net(x).float().square().mean().backward()
        optimizer.step()

    for seed in range(4):
        step(batch(seed))
    torch.cuda.synchronize()
    x = batch(0)
    with no_host_waits():
        step(x)
    run.detach()
