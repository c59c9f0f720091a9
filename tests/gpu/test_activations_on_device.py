"""Offloaded activations on a GPU: the same gradients whatever lane is slow, bytes that leave, memory that is level."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from attached_cases import MIB, WIDTH, Net, churn, deterministic_algorithms, put_to_sleep, same

import hostward
from hostward.runtime.backend import Tier
from hostward.schedule.ops import Lane

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with deterministic_algorithms(warn_only=True):
        yield


def batch(seed: int, rows: int = 16384) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()


def gradients(net: Net, steps: int = 4, *, churned: bool = False) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        net.zero_grad()
        net(batch(step)).float().square().mean().backward()
        if churned:
            churn()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


def attach(net: Net, **options: Any) -> hostward.Attachment:
    return hostward.attach(net, activations=hostward.Activations(min_bytes=4096, **options))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("slow", [(), (Lane.D2H,), (Lane.H2D,), (Lane.D2H, Lane.H2D)], ids=str)
def test_t30_t31_gradients_keep_their_bits(slow: tuple[Lane, ...], double_buffering: bool, recompute: bool) -> None:
    expected = gradients(Net(recompute=recompute))
    for num_layers in (1, 3, 5):
        net = Net(recompute=recompute)
        run = attach(net, num_layers=num_layers, double_buffering=double_buffering)
        put_to_sleep(run, slow)
        assert same(gradients(net, churned=True), expected), num_layers
        report = run.report()
        run.detach()
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        assert report.on_demand_bytes == 0
        assert run._arena.blocks_in_use == 0


def test_h2_training_on_a_side_stream() -> None:
    expected = gradients(Net())
    net = Net()
    run = attach(net)
    put_to_sleep(run, (Lane.D2H, Lane.H2D))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = gradients(net, churned=True)
    side.synchronize()
    assert same(found, expected)
    run.detach()


def test_h19_bytes_leave_the_device() -> None:
    """Between forward and backward: device before = device after + what was freed, to the allocator's granule."""
    held = []
    for attached in (False, True):
        net = Net()
        run = attach(net, num_layers=4) if attached else None
        gradients(net, 2)
        net.zero_grad()
        gc.collect()
        before = 0 if run is None else run.report().freed_bytes
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        loss = net(batch(0)).float().square().mean()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - start)
        if run is not None:
            freed = run.report().freed_bytes - before
            assert freed > 0.5 * held[0]
            assert abs(held[0] - held[1] - freed) <= 512 * 6 * 8
            assert run.backend.ledger.by_owner(Tier.HOST)["saved activations"] >= freed
            loss.backward()
            run.detach()
        del loss


@pytest.mark.alone
def test_h13_h15_memory_stays_level_and_peaks_are_equal() -> None:
    net = Net()
    run = attach(net)
    gradients(net, 5)
    reserved, locked, peaks = torch.cuda.memory_reserved(), run.report().host_bytes, set()
    for _ in range(20):
        torch.cuda.reset_peak_memory_stats()
        gradients(net, 2)
        peaks.add(torch.cuda.max_memory_allocated())
    assert len(peaks) == 1
    assert torch.cuda.memory_reserved() == reserved
    assert run.report().host_bytes == locked
    run.detach()


@pytest.mark.parametrize("mix", [(0.0, 0.0), (1.0, 0.0), (1.0, 0.5)])
def test_together_with_the_optimizer(mix: tuple[float, float]) -> None:
    def trained(*, attached: bool) -> list[torch.Tensor]:
        net = Net()
        optimizer = hostward.AdamW(
            net, lr=1e-2, max_grad_norm=1.0, offload_fraction=mix[0], streamed_fraction=mix[1], grad_dtype=torch.float32
        )
        run = hostward.attach(net, optimizer, activations=hostward.Activations(min_bytes=4096)) if attached else None
        for step in range(6):
            for i in range(2):
                with optimizer.accumulate(last=i == 1):
                    net(batch(2 * step + i)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        found = [p.detach().clone() for p in net.parameters()]
        if run is not None:
            run.detach()
        return found

    assert same(trained(attached=True), trained(attached=False))


def test_h12_what_dies_in_flight_is_not_handed_on() -> None:
    """A forward whose loss is dropped while its copies are still asleep, and the same memory at once filled anew."""
    net = Net()
    expected = gradients(Net())
    run = attach(net)
    put_to_sleep(run, (Lane.D2H, Lane.H2D))
    for seed in range(3):
        loss = net(batch(seed)).float().square().mean()
        del loss
        torch.full((64 * MIB // 2,), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert same(gradients(net, churned=True), expected)
    run.detach()


def test_h65_nothing_waits_on_the_host(no_host_waits: Callable[[], AbstractContextManager[None]]) -> None:
    net = Net()
    run = attach(net)
    gradients(net, 3)
    x = batch(0)
    with no_host_waits():
        net(x).float().square().mean().backward()
    run.detach()
