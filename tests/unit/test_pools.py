"""Slabs of host memory: exact, zero, refused in time, released once."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hostward.engine.pools import HUGE_PAGE_BYTES, host_slab
from hostward.errors import MemoryLimitError
from hostward.hardware import host_memory, resident_bytes

MIB = 1024**2


@dataclass
class FakeLock:
    """Stands for page-locking: remembers what was locked and released."""

    locked: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def __call__(self, address: int, size_bytes: int) -> Callable[[], None]:
        self.locked.append((address, size_bytes))
        return lambda: self.released.append(address)


def mapped_kib(key: str, address: int) -> int:
    """A value, in KiB, of the mapping that `address` lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == f"{key}:":
            return int(line.split()[1])
    return 0


@pytest.mark.parametrize("size_bytes", [1, 3, 4095, 4096, 4097, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * MIB + 7])
def test_size_is_exact_and_contents_are_zero(size_bytes: int) -> None:
    slab = host_slab(size_bytes, owner="test", threads=2)
    assert (slab.dtype, tuple(slab.shape)) == (torch.uint8, (size_bytes,))
    assert slab.is_contiguous()
    assert slab.data_ptr() % 4096 == 0
    assert not slab.any()


def test_size_zero_needs_no_memory_and_no_lock() -> None:
    lock = FakeLock()
    slab = host_slab(0, owner="test", threads=1, lock=lock)
    assert tuple(slab.view(torch.float32).shape) == (0,)
    assert (lock.locked, lock.released) == ([], [])


def test_slabs_are_separate_and_writable() -> None:
    a, b = (host_slab(4096, owner="test", threads=1) for _ in range(2))
    a.fill_(7)
    assert not b.any()


def test_h26_memory_is_resident_from_the_start_and_not_rounded_up_to_a_power_of_two() -> None:
    size_bytes = 33 * MIB
    before = resident_bytes()
    slab = host_slab(size_bytes, owner="test", threads=2)
    grown = resident_bytes() - before
    assert size_bytes - MIB <= grown <= 1.03 * size_bytes + HUGE_PAGE_BYTES
    del slab
    assert resident_bytes() - before <= MIB


def test_large_slabs_lie_on_huge_pages_where_the_kernel_gives_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this kernel gives no huge pages")
    slab = host_slab(16 * MIB, owner="test", threads=2)
    middle = slab.data_ptr() + 8 * MIB
    assert mapped_kib("AnonHugePages", middle) >= 4 * MIB // 1024


def test_the_lock_sees_address_and_size_and_is_released_once_with_the_last_tensor() -> None:
    lock = FakeLock()
    slab = host_slab(10_000, owner="test", threads=1, lock=lock)
    address = slab.data_ptr()
    assert lock.locked == [(address, 10_000)]
    views = [slab[:5000].view(torch.float32), slab[5000:]]
    del slab
    gc.collect()
    assert lock.released == []
    views.pop()
    gc.collect()
    assert lock.released == []
    views.pop()
    assert lock.released == [address]
    gc.collect()
    assert lock.released == [address]


def test_release_runs_while_the_pages_are_still_mapped() -> None:
    seen: list[int] = []

    def lock(address: int, size_bytes: int) -> Callable[[], None]:
        return lambda: seen.append(mapped_kib("Size", address))

    slab = host_slab(64 * 1024, owner="test", threads=1, lock=lock)
    assert seen == []
    del slab
    assert seen[0] >= 64


def test_memory_that_could_not_be_locked_is_given_back() -> None:
    addresses: list[int] = []

    def refuse(address: int, size_bytes: int) -> Callable[[], None]:
        addresses.append(address)
        raise MemoryLimitError("the driver refused")

    before = resident_bytes()
    with pytest.raises(MemoryLimitError, match="the driver refused"):
        host_slab(32 * MIB, owner="test", threads=1, lock=refuse)
    gc.collect()
    assert len(addresses) == 1
    assert resident_bytes() - before <= MIB


def test_t01_more_than_is_left_is_refused_before_memory_is_touched() -> None:
    asked = 2 * host_memory().total_bytes
    before = resident_bytes()
    with pytest.raises(MemoryLimitError) as caught:
        host_slab(asked, owner="exp_avg", threads=1)
    assert caught.value.what.startswith(f"exp_avg: {asked:,} bytes of host memory asked, ")
    assert caught.value.what.endswith(" available")
    assert "the limit is set by the " in caught.value.why
    assert "optimizer.optimizer_offload_fraction" in caught.value.fix
    assert resident_bytes() - before <= MIB


def test_t01_a_refusal_of_the_system_says_where_to_look() -> None:
    code = (
        "import resource\nfrom hostward.engine.pools import host_slab\nfrom hostward.errors import MemoryLimitError\n"
        "host_slab(4096, owner='warm-up', threads=1)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))\n"
        "try:\n    host_slab(256 << 20, owner='exp_avg', threads=1)\n"
        "except MemoryLimitError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.startswith("exp_avg: the system refused to map 268,435,456 bytes\n  why: "), result.stderr
    assert result.stdout.endswith("fix: see ulimit -v\n")


def test_h22_nothing_is_released_at_exit() -> None:
    code = (
        "import builtins, os\nfrom hostward.engine.pools import host_slab\n"
        "def slab(mark):\n"
        "    return host_slab(4096, owner='x', threads=1, lock=lambda a, n: lambda: os.write(1, mark))\n"
        "dropped = slab(b'dropped')\ndel dropped\nbuiltins.kept_to_the_end = slab(b'kept')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "dropped"), result.stderr
