"""What is sampled of a run's memory never exceeds what torch's allocator holds, and says so where it would.

Seen red: a rest of 0 where owners held more than the allocator; gradients of all ranks on each of them.
"""

from __future__ import annotations

import pytest
import torch

from hostward.runtime.backend import Ledger, Tier
from hostward.trainer.memory_sampler import BACKWARD, FORWARD, MemorySampler


class FakeAllocator:
    """Stands for torch's CUDA allocator: holds what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated_bytes = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.allocated_bytes)


def test_owners_and_the_rest_are_what_the_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, ledger = FakeAllocator(monkeypatch), Ledger()
    ledger.held_bytes[Tier.DEVICE, "weights"] = 400
    parameter = torch.nn.Parameter(torch.zeros(10))
    sampler = MemorySampler(torch.device("cuda", 0), ledger, [parameter], staying=set(), first=0, until=1)
    allocator.allocated_bytes = 1000
    sampler.sample(0, FORWARD)
    parameter.grad = torch.zeros(10)
    allocator.allocated_bytes = 440
    sampler.sample(0, BACKWARD)
    found = sampler.owners()
    assert found.device_by_owner_bytes == {"weights": (400, 400), "gradients": (0, 40)}
    assert found.rest_of_device_bytes == (600, 0)
    assert found.overcounted_bytes == 0


def test_owners_that_hold_more_than_the_allocator_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, ledger = FakeAllocator(monkeypatch), Ledger()
    ledger.held_bytes[Tier.DEVICE, "weights"] = 400
    sampler = MemorySampler(torch.device("cuda", 0), ledger, [], staying=set(), first=0, until=1)
    for moment, allocated in ((FORWARD, 500), (BACKWARD, 370)):
        allocator.allocated_bytes = allocated
        sampler.sample(0, moment)
    assert sampler.owners().rest_of_device_bytes == (100, -30)
    assert sampler.owners().overcounted_bytes == 30
