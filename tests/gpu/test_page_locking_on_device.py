"""T04 and T10 of the project's list of faults, with the driver's own refusal: the k-th block cannot be pinned, or
no more than so many bytes can. What was taken goes back, torch goes on, and what needs less trains to the same bits.

Seen red with: blocks that were locked before the refusal not given back; gradients locked all the same.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator

import pytest
import torch
from hidden_step_cases import DEVICE, assert_equal, deterministic, every_mix, make, reference, train

from hostward.errors import PageLockError
from hostward.runtime.cuda import driver, memory

__all__ = ["deterministic"]
pytestmark = pytest.mark.gpu

CAP_BYTES = 3 << 20
"""More than scalars and the tables of kernels take, less than gradients and weights do."""
NOTHING_LOCKED = {"pin_gradients": False, "pin_weights": False}


class Driver:
    """The driver's pinning up to a number of blocks or of bytes. Then it is asked to lock what is not mapped, and
    refuses.
    """

    def __init__(self) -> None:
        self.most_blocks: float = float("inf")
        self.most_bytes: float = float("inf")
        self.locked: dict[int, int] = {}

    def lock(self, address: int, size_bytes: int, *, owner: str) -> None:
        if len(self.locked) >= self.most_blocks or sum(self.locked.values()) + size_bytes > self.most_bytes:
            driver.lock_pages(mmap.PAGESIZE, size_bytes, owner=owner)
        driver.lock_pages(address, size_bytes, owner=owner)
        self.locked[address] = size_bytes

    def unlock(self, address: int, size_bytes: int) -> None:
        driver.unlock_pages(address, size_bytes)
        assert self.locked.pop(address, size_bytes) == size_bytes


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(memory, "lock_pages", found.lock)
    monkeypatch.setattr(memory, "unlock_pages", found.unlock)
    yield found
    found.most_blocks = found.most_bytes = float("inf")


def torch_goes_on() -> bool:
    """Memory of the device, memory that torch pins, and a copy between them."""
    host = torch.arange(1 << 16, dtype=torch.float32).pin_memory()
    return bool(torch.equal(host.to(DEVICE, non_blocking=True).cpu(), host))


def nothing_locked(refusing: Driver) -> bool:
    """Once nobody holds the error any more, whose frames hold the blocks."""
    gc.collect()
    return not refusing.locked


@every_mix
def test_t04_the_kth_block_cannot_be_page_locked(mix: str, refusing: Driver) -> None:
    model, optimizer = make(mix)
    blocks = len(refusing.locked)
    del model, optimizer
    assert blocks > 1
    assert nothing_locked(refusing)
    for k in range(blocks):
        refusing.most_blocks = k
        with pytest.raises(PageLockError, match="could not be pinned"):
            make(mix)
        assert nothing_locked(refusing)
        assert torch_goes_on()
    refusing.most_blocks = float("inf")
    assert_equal(train(mix), reference())


def test_t10_under_a_cap_what_locks_nothing_has_the_same_bits(refusing: Driver) -> None:
    refusing.most_bytes = CAP_BYTES
    with pytest.raises(PageLockError, match="pin_cpu_grads=False"):
        make("host")
    assert nothing_locked(refusing)
    assert_equal(train("host", **NOTHING_LOCKED), reference())
    assert torch_goes_on()
