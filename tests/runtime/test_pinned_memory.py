"""Slabs of host memory: exact, zero, refused in time, released once."""

from __future__ import annotations

import gc
import io
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hostward.core.host_limits import host_memory, resident_bytes
from hostward.errors import MemoryLimitError
from hostward.runtime import pinned_memory
from hostward.runtime.pinned_memory import HUGE_PAGE_BYTES, host_slab, host_slabs, numa_node_of

MIB = 1024**2


@dataclass
class FakeLock:
    """Stands for pinning: remembers what was locked and released, and refuses the call with index `refused`."""

    refused: int = -1
    locked: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def __call__(self, address: int, size_bytes: int) -> Callable[[], None]:
        self.locked.append((address, size_bytes))
        if len(self.locked) - 1 == self.refused:
            raise MemoryLimitError("the driver refused")
        return lambda: self.released.append(address)


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def mappings() -> list[tuple[int, int, dict[str, list[str]]]]:
    """First address, end, and the values by key of every mapping of this process."""
    found: list[tuple[int, int, dict[str, list[str]]]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *values = line.split()
        if head.endswith(":"):
            found[-1][2][head[:-1]] = values
        else:
            low, high = (int(part, 16) for part in head.split("-"))
            found.append((low, high, {}))
    return found


def mapped_kib(key: str, address: int) -> int:
    """A value, in KiB, of the mapping that `address` lies in."""
    return next((int(keys[key][0]) for low, high, keys in mappings() if low <= address < high), 0)


def vm_flags(address: int) -> list[str]:
    return next((keys["VmFlags"] for low, high, keys in mappings() if low <= address < high), [])


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


def require_whole_blocks(blocks: list[torch.Tensor], lock: FakeLock, slab_bytes: int) -> None:
    """Every block lies in one locked slab, and slabs hold nothing else."""
    used = [block for block in blocks if block.numel()]
    counts = []
    for start, size in lock.locked:
        inside = [b for b in used if start <= b.data_ptr() and b.data_ptr() + b.numel() <= start + size]
        counts.append(len(inside))
        assert sum(b.numel() for b in inside) == size
        assert size <= slab_bytes or len(inside) == 1
    assert sum(counts) == len(used)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(1, 40_000)), max_size=12),
    slab_bytes=st.sampled_from([1, 4096, 30_000, 10**9]),
)
def test_t06_no_block_lies_in_two_registrations(sizes: list[int], slab_bytes: int) -> None:
    lock = FakeLock()
    blocks = host_slabs(sizes, owner="test", threads=1, lock=lock, slab_bytes=slab_bytes)
    assert [tuple(block.shape) for block in blocks] == [(size,) for size in sizes]
    assert sum(size for _, size in lock.locked) == sum(sizes)
    require_whole_blocks(blocks, lock, slab_bytes)
    assert not any(block.any() for block in blocks)
    for i in range(len(blocks)):
        blocks[i].fill_(i + 1)
    assert all((block == i + 1).all() for i, block in enumerate(blocks))
    blocks.clear()
    assert sorted(lock.released) == sorted(address for address, _ in lock.locked)


def test_blocks_of_one_slab_lie_end_to_end() -> None:
    blocks = host_slabs([5, 0, 4096, 3], owner="test", threads=1)
    base = blocks[0].data_ptr()
    assert [block.data_ptr() - base for block in (blocks[2], blocks[3])] == [5, 4101]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_t04_a_refused_lock_gives_everything_back_at_once(refused: int) -> None:
    lock = FakeLock(refused)
    with pytest.raises(MemoryLimitError, match="the driver refused") as caught:
        host_slabs([MIB, 2 * MIB, 3 * MIB], owner="test", threads=1, lock=lock, slab_bytes=MIB)
    # The exception is still held, and with it every frame that it passed through.
    assert caught.value is not None
    assert [size for _, size in lock.locked] == [MIB, 2 * MIB, 3 * MIB][: refused + 1]
    assert sorted(lock.released) == sorted(address for address, _ in lock.locked[:refused])
    assert [vm_flags(address) for address, _ in lock.locked] == [[]] * (refused + 1)
    again = FakeLock()
    assert len(host_slabs([MIB, 2 * MIB], owner="test", threads=1, lock=again, slab_bytes=MIB)) == 2


def test_an_error_of_the_callback_gives_everything_back() -> None:
    lock, before = FakeLock(), resident_bytes()

    def progress(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > 16 * MIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        host_slabs([16 * MIB] * 3, owner="test", threads=1, lock=lock, progress=progress, slab_bytes=MIB)
    assert lock.locked
    assert sorted(lock.released) == sorted(address for address, _ in lock.locked)
    assert resident_bytes() - before <= MIB


def test_the_next_slab_is_touched_while_one_is_being_locked() -> None:
    second_touched, seen = threading.Event(), []

    def lock(address: int, size_bytes: int) -> Callable[[], None]:
        seen.append(second_touched.wait(10))
        return lambda: None

    def progress(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == MIB:  # both touched, none locked
            second_touched.set()

    host_slabs([MIB, MIB], owner="test", threads=1, lock=lock, progress=progress, slab_bytes=MIB)
    assert seen == [True, True]


@pytest.mark.parametrize("locks", [False, True])
def test_progress_rises_to_the_total(monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    monkeypatch.setattr(pinned_memory, "_TOUCH_BYTES", 4096)
    seen: list[tuple[int, int]] = []
    host_slabs(
        [10_000, 0, 6000, 384],
        owner="test",
        threads=1,
        lock=FakeLock() if locks else None,
        progress=lambda done_bytes, total_bytes: seen.append((done_bytes, total_bytes)),
        slab_bytes=7000,
    )
    done = [entry[0] for entry in seen]
    assert done == sorted(done)
    assert len(set(done)) >= 5
    assert {entry[1] for entry in seen} == {16_384}
    assert done[-1] == 16_384


def test_a_bar_is_drawn_for_large_memory_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(stream: io.StringIO, size_bytes: int) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        host_slab(size_bytes, owner="exp_avg", threads=1, lock=FakeLock())
        return stream.getvalue()

    assert pinned_memory.BAR_BYTES == 8 << 30
    monkeypatch.setattr(pinned_memory, "BAR_BYTES", 16 * MIB)
    monkeypatch.setattr(pinned_memory, "_TOUCH_BYTES", 8 * MIB)
    assert drawn(io.StringIO(), 32 * MIB) == ""
    assert drawn(FakeTerminal(), 16 * MIB - 1) == ""
    lines = drawn(FakeTerminal(), 16 * MIB).split("\r")
    assert lines[0] == ""
    assert lines[1] == f"exp_avg: preparing host memory [{'#' * 7}{'.' * 23}] 0.0 of 0.0 GiB"
    assert lines[-1] == f"exp_avg: preparing host memory [{'#' * 30}] 0.0 of 0.0 GiB\n"
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(MemoryLimitError):
        host_slab(16 * MIB, owner="exp_avg", threads=1, lock=FakeLock(0))
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("asked", [0, 3, 18 * MIB, 36 * MIB])
def test_t07_memory_taken_is_what_was_asked_and_a_page(asked: int) -> None:
    # 18 and 36 MiB stand for 1.125 and 2.25 GiB: as far from a power of two.
    def taken() -> tuple[int, int]:
        own = [keys for _, _, keys in mappings() if "dc" in keys["VmFlags"]]  # not inherited by forks: locked slabs
        size, resident = (sum(int(keys[key][0]) * 1024 for keys in own) for key in ("Size", "Rss"))
        return size, resident

    lock, before = FakeLock(), taken()
    slab = host_slab(asked, owner="x", threads=2, lock=lock)
    after = taken()
    assert slab.numel() == asked == sum(size for _, size in lock.locked)
    for grown in (after[0] - before[0], after[1] - before[1]):
        assert asked <= grown <= min(asked + 4096, 1.03 * asked + 4096)
    del slab
    assert taken() == before


def test_locked_slabs_are_kept_out_of_forks_and_ask_for_huge_pages() -> None:
    first, second = host_slabs([4 * MIB] * 2, owner="x", threads=1, lock=FakeLock(), slab_bytes=MIB)
    plain = host_slab(4 * MIB, owner="x", threads=1)
    assert {"dc", "hg"} <= set(vm_flags(first.data_ptr())) & set(vm_flags(second.data_ptr()))
    assert "dc" not in vm_flags(plain.data_ptr())
    alone = host_slab(MIB, owner="test", threads=1, inherited=False)
    assert "dc" in vm_flags(alone.data_ptr())
    assert "hg" in vm_flags(plain.data_ptr())


def test_pages_come_from_the_node_that_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this kernel tells no NUMA policies")

    def policy(address: int) -> str:
        # Neighbours of one policy may have become one mapping; lines rise by address.
        lines = [line.split() for line in maps.read_text().splitlines()]
        return [line[1] for line in lines if int(line[0], 16) <= address][-1]

    caplog.set_level(logging.WARNING, logger="hostward")
    slab = host_slab(4 * MIB, owner="x", threads=2, numa_node=0)
    assert policy(slab.data_ptr()) == "prefer:0"
    left = [host_slab(8 * MIB, owner="x", threads=2, lock=FakeLock(), numa_node=node) for node in (None, -1)]
    assert [policy(slab.data_ptr()) for slab in left] == ["default", "default"]
    assert caplog.records == []


@pytest.mark.parametrize("node", [1000, 5000])
def test_a_node_that_is_missing_is_said_and_the_memory_is_good(node: int, caplog: pytest.LogCaptureFixture) -> None:
    slab = host_slab(MIB, owner="exp_avg", threads=2, numa_node=node)
    assert not slab.any()
    [record] = caplog.records
    assert record.getMessage().startswith(f"exp_avg: pages could not be bound to NUMA node {node} (Invalid argument)")


@pytest.mark.parametrize(
    ("nodes", "text", "node"), [(2, "1\n", 1), (2, "0\n", 0), (2, "-1\n", None), (1, "0\n", None), (2, None, None)]
)
def test_t78_numa_node_of_a_device(tmp_path: Path, nodes: int, text: str | None, node: int | None) -> None:
    for i in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{i}").mkdir(parents=True)
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    if text is not None:
        (device / "numa_node").write_text(text)
    assert numa_node_of("0000:3B:00.0", tmp_path) == node


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
        "import resource\nfrom hostward.runtime.pinned_memory import host_slab\n"
        "from hostward.errors import MemoryLimitError\n"
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
        "import builtins, os\nfrom hostward.runtime.pinned_memory import host_slab\n"
        "def slab(mark):\n"
        "    return host_slab(4096, owner='x', threads=1, lock=lambda a, n: lambda: os.write(1, mark))\n"
        "dropped = slab(b'dropped')\ndel dropped\nbuiltins.kept_to_the_end = slab(b'kept')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "dropped"), result.stderr
