"""Sleep on a GPU: bits, the driver's count of what left, and the rate of the copies.

The edges were seen red on the simulated backend (tests/optim/test_sleep.py). Here copies are slow, too, and memory that
is freed is taken at once and filled with NaN.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hidden_step_cases import (
    MIXES,
    Net,
    assert_equal,
    deterministic as deterministic,
    make,
    one_backward,
    reference,
    slow,
    train,
)

import hostward
from hostward.core.full_device import ALLOCATOR_VARIABLES, EXPANDABLE
from hostward.core.inventory import align
from hostward.core.units import GIB, MIB
from hostward.errors import AsleepError
from hostward.runtime.backend import Tier
from hostward.schedule.ops import Lane

pytestmark = pytest.mark.gpu
LARGE_BYTES = 8 * GIB
PINNED_PER_TABLE = 512
"""Pinned bytes for one of GPU memory: of each page of 4 KiB the driver keeps an address of 8 bytes there."""


def take_nap(_: Net, optimizer: hostward.AdamW) -> None:
    optimizer.sleep()
    others = [torch.full((MIB,), float("nan"), device="cuda") for _ in range(64)]
    del others
    optimizer.wake()


@pytest.mark.parametrize("mix", [None, *MIXES])
@pytest.mark.parametrize("lanes", [[], [Lane.D2H, Lane.H2D]], ids=["as they are", "slow"])
def test_bits_are_those_of_a_run_that_never_slept(
    mix: str | None, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(steps=6)
    if lanes:
        slow(lanes, monkeypatch)
    assert_equal(train(mix, steps=6, between=take_nap), expected)


@pytest.mark.parametrize("mix", [None, *MIXES])
def test_gradients_sleep_between_microbatches_and_before_the_step(mix: str | None) -> None:
    def trained(*, naps: bool) -> list[torch.Tensor]:
        model, optimizer = make(mix)
        for step in range(3):
            for i in range(2):
                with optimizer.accumulate(last=i == 1):
                    one_backward(model, 10 * step + i)
                if naps:
                    take_nap(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(naps=True), trained(naps=False), strict=True))


def large(nbytes: int = LARGE_BYTES) -> tuple[torch.nn.Module, hostward.AdamW]:
    """All on the device: 10 bytes of state and 2 of weights for each parameter, so many bytes in all.

    In memory of its own: what lies in a segment of torch's cache keeps all of that segment.
    """
    gc.collect()  # optimizers of other tests give their memory to the cache when they go
    torch.cuda.empty_cache()
    width = 8192
    layers = nbytes // (12 * width * width)
    with torch.device("cuda"):
        made = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
    model = torch.nn.Sequential(*made)
    return model, hostward.AdamW(model)


def driver_counts(*, at_edges_bytes: int = 0) -> None:
    """`at_edges_bytes`: may stay reserved, since other tensors are in the same pages of an expandable segment."""
    model, optimizer = large()
    free_before = torch.cuda.mem_get_info()[0]
    report = optimizer.sleep()
    freed = sum(report.freed_bytes.values())
    assert report.stays == ()
    of_parameters = 12 * sum(p.numel() for p in model.parameters())  # 10 of state and 2 of weights
    assert of_parameters <= freed < of_parameters + MIB  # and step counts
    assert report.torch_freed_bytes is not None
    assert report.torch_freed_bytes >= freed
    taken_bytes = at_edges_bytes + align(report.pinned_now_bytes // PINNED_PER_TABLE, 2 * MIB)
    assert report.driver_freed_bytes is not None
    assert report.driver_freed_bytes >= freed - taken_bytes
    assert torch.cuda.mem_get_info()[0] - free_before >= freed - taken_bytes
    assert optimizer.backend.ledger.by_owner(Tier.HOST)["asleep"] == report.pinned_bytes
    with pytest.raises(AsleepError):
        model(torch.zeros(1, 8192, device="cuda", dtype=torch.bfloat16))
    optimizer.wake()
    assert model(torch.zeros(1, 8192, device="cuda", dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.alone
def test_the_driver_counts_what_left() -> None:
    driver_counts()


@pytest.mark.alone
def test_in_expandable_segments() -> None:
    """Which `hostward train` asks for. Torch reads it once, so another process."""
    program = "import test_sleep_on_device as tests; tests.all_in_expandable_segments()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, ALLOCATOR_VARIABLES[0]: EXPANDABLE, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def all_in_expandable_segments() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    driver_counts(at_edges_bytes=2 * 20 * MIB)
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    expected = reference(steps=6)
    for mix in MIXES:
        assert_equal(train(mix, steps=6, between=take_nap), expected)


def test_the_second_sleep_pins_nothing() -> None:
    """How long it takes, benchmarks/sleeping.py measures."""
    _, optimizer = large()
    first = optimizer.sleep()
    optimizer.wake()
    for _ in range(2):
        report = optimizer.sleep()
        optimizer.wake()
        assert report.pinned_now_bytes == 0 < first.pinned_now_bytes
        assert report.freed_bytes == first.freed_bytes


def test_no_room_on_the_device_leaves_everything_asleep() -> None:
    model, optimizer = large(GIB)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.sleep()
    reserved, _, total = torch.cuda.memory_reserved(), *torch.cuda.mem_get_info()
    assert reserved - torch.cuda.memory_allocated() < GIB // 2, torch.cuda.memory_summary()  # others may hold memory
    torch.cuda.set_per_process_memory_fraction((reserved + GIB // 8) / total)
    try:
        with pytest.raises(hostward.errors.MemoryLimitError, match="call wake"):
            optimizer.wake()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert set(optimizer.asleep) == {"state", "gradients", "weights"}
    optimizer.wake()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
