"""Allocate host memory in slabs of exact size, touched in parallel, on huge pages if the kernel provides them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from hostward.core.host_limits import host_memory
from hostward.errors import MemoryLimitError
from hostward.kernels.cpu.library import bind_memory, first_touch

log = logging.getLogger("hostward")

Lock = Callable[[int, int], Callable[[], None]]
"""lock(address, size_bytes) pins memory and returns a function that unpins it. Called on a separate thread."""
Progress = Callable[[int, int], None]
"""progress(done_bytes, total_bytes) is called whenever more memory is ready; at last with done = total."""

HUGE_PAGE_BYTES = 2 * 1024 * 1024
SLAB_BYTES = 1 << 30
"""Slabs take no further block beyond this size. The driver cannot pin 512 GiB or more at once, nor copy across two
registrations; so a slab is pinned as a whole, and no block spans two slabs. With small slabs touching and pinning
overlap.
"""
BAR_BYTES = 8 << 30
"""Shows a progress bar from this size on."""
_TOUCH_BYTES = 1 << 30


class _Pages(mmap.mmap):
    """Runs `release` when the last tensor over the mapping has been freed, just before it is unmapped."""

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        # At exit the CUDA context may be gone already, and the system frees the pages anyway.
        if self.release is not None and not sys.is_finalizing():
            self.release()

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def give_back(self) -> None:
        """Unpin and unmap now, even if this object is still referenced. No tensor may use it yet."""
        release, self.release = self.release, None
        if release is not None:
            release()
        self.close()


def host_slab(
    size_bytes: int,
    *,
    owner: str,
    threads: int,
    lock: Lock | None = None,
    numa_node: int | None = None,
    progress: Progress | None = None,
    inherited: bool = True,
) -> torch.Tensor:
    """Allocate one block as `host_slabs` does: uint8 [size_bytes]."""
    return host_slabs(
        [size_bytes],
        owner=owner,
        threads=threads,
        lock=lock,
        numa_node=numa_node,
        progress=progress,
        inherited=inherited,
    )[0]


def host_slabs(
    sizes_bytes: Sequence[int],
    *,
    owner: str,
    threads: int,
    lock: Lock | None = None,
    numa_node: int | None = None,
    progress: Progress | None = None,
    slab_bytes: int = SLAB_BYTES,
    inherited: bool = True,
) -> list[torch.Tensor]:
    """Allocate blocks of anonymous zero memory, resident from the start: uint8 [size] for each of `sizes_bytes`.

    Torch's pinned allocator rounds each block up to a power of two and never frees it. Here blocks are stored end to
    end in slabs of exactly their size (rounded up to a page), and a slab is unmapped with the last tensor over it.
    While one slab is being pinned the next is being touched.

    Args:
        sizes_bytes: none negative; a block of 0 bytes needs no memory.
        owner: purpose of the memory, for error texts.
        threads: threads that touch pages.
        lock: pins a slab; None: memory stays unpinned.
        numa_node: the node that the pages should come from; None or -1 leaves it to the system. A failure is logged.
        progress: called with the progress. None: a line on stderr from `BAR_BYTES` on, if that is a terminal.
        slab_bytes: a slab takes further blocks up to this size. A block is stored in one slab, however large.
        inherited: False: forked children do not inherit the memory. They never inherit pinned memory.

    Raises:
        MemoryLimitError: the machine or its container has less left, or the system call failed. Nothing stays mapped or
            pinned after any error, also one that `lock` or `progress` raises.
    """
    groups = _groups(sizes_bytes, slab_bytes)
    total_bytes = sum(sizes_bytes)
    if total_bytes:
        require_host_memory(total_bytes, owner=owner)
    with contextlib.ExitStack() as undo:
        reached = _Reached(undo.enter_context(_reporting(progress, owner, total_bytes)), total_bytes, lock is not None)
        made = undo.enter_context(contextlib.ExitStack())
        slabs: list[_Pages] = []
        with ThreadPoolExecutor(1, thread_name_prefix="hostward-lock") as locker:
            pending: Future[None] | None = None
            for size_bytes in filter(None, map(sum, groups)):
                pages = _map_pages(size_bytes, owner, inherited=inherited and lock is None)
                made.callback(pages.give_back)
                slabs.append(pages)
                _touch(pages.address(), size_bytes, owner, threads, numa_node, reached)
                if lock is not None:
                    if pending is not None:
                        pending.result()
                        reached.locked(len(slabs[-2]))
                    pending = locker.submit(_lock_pages, pages, size_bytes, lock)
            if pending is not None:
                pending.result()
                reached.locked(len(slabs[-1]))
        made.pop_all()
    return _blocks(groups, slabs)


def _groups(sizes_bytes: Sequence[int], slab_bytes: int) -> list[list[int]]:
    """Divide blocks into slabs, in order."""
    groups: list[list[int]] = []
    for size_bytes in sizes_bytes:
        if groups and sum(groups[-1]) + size_bytes <= slab_bytes:
            groups[-1].append(size_bytes)
        else:
            groups.append([size_bytes])
    return groups


def _map_pages(size_bytes: int, owner: str, *, inherited: bool) -> _Pages:
    try:
        # Python's default is shared memory, which gets huge pages only if shmem_enabled allows it (default: never).
        pages = _Pages(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryLimitError(
            f"{owner}: the system refused to map {size_bytes:,} bytes", why=str(error), fix="see ulimit -v"
        ) from error
    if size_bytes >= HUGE_PAGE_BYTES:
        # A kernel built without huge pages fails here; small pages work too.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    if not inherited:
        # After a fork the first write copies a private page: the device would keep using the old one, and as long as
        # the child lives, such as a data loader's worker, every page that a step writes would exist twice.
        pages.madvise(mmap.MADV_DONTFORK)
    return pages


def _touch(address: int, size_bytes: int, owner: str, threads: int, numa_node: int | None, reached: _Reached) -> None:
    refusal = 0 if numa_node is None else bind_memory(address, size_bytes, numa_node)
    if refusal:
        log.warning(
            "%s: pages could not be bound to NUMA node %s (%s); the system places them, and the CPU optimizer step "
            "may be slower",
            owner,
            numa_node,
            os.strerror(refusal),
        )
    for offset in range(0, size_bytes, _TOUCH_BYTES):
        piece_bytes = min(_TOUCH_BYTES, size_bytes - offset)
        first_touch(address + offset, piece_bytes, threads)
        reached.touched(piece_bytes)


def _lock_pages(pages: _Pages, size_bytes: int, lock: Lock) -> None:
    pages.release = lock(pages.address(), size_bytes)


def _blocks(groups: Sequence[Sequence[int]], slabs: Sequence[_Pages]) -> list[torch.Tensor]:
    blocks = []
    remaining = iter(slabs)
    for group in groups:
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        slab = torch.frombuffer(next(remaining), dtype=torch.uint8) if sum(group) else nothing
        for start, stop in pairwise(accumulate(group, initial=0)):
            blocks.append(slab[start:stop] if stop > start else nothing)
    return blocks


class _Reached:
    """Counts bytes for the progress report; touching and pinning are half of the work each if memory is pinned."""

    def __init__(self, progress: Progress, total_bytes: int, locks: bool) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._parts = 2 if locks else 1
        self._done_bytes = 0

    def touched(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._progress(self._done_bytes // self._parts, self._total_bytes)

    locked = touched


@contextlib.contextmanager
def _reporting(progress: Progress | None, owner: str, total_bytes: int) -> Iterator[Progress]:
    if progress is not None:
        yield progress
    elif total_bytes < BAR_BYTES or not sys.stderr.isatty():
        yield lambda done_bytes, total_bytes: None
    else:
        try:
            yield lambda done_bytes, total_bytes: _draw(owner, done_bytes, total_bytes)
        finally:
            print(file=sys.stderr)


def _draw(owner: str, done_bytes: int, total_bytes: int) -> None:
    filled = 30 * done_bytes // total_bytes
    bar = "#" * filled + "." * (30 - filled)
    gib = f"{done_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB"
    print(f"\r{owner}: preparing host memory [{bar}] {gib}", end="", file=sys.stderr, flush=True)


def require_host_memory(size_bytes: int, *, owner: str) -> None:
    """Raise MemoryLimitError if the machine or its container has less than `size_bytes` left."""
    available = host_memory()
    if size_bytes > available.available_bytes:
        raise MemoryLimitError(
            f"{owner}: {size_bytes:,} bytes of host memory asked, {available.available_bytes:,} available",
            why=f"the limit is set by {available.limited_by} ({available.total_bytes:,} bytes in all)",
            fix="lower optimizer.optimizer_offload_fraction, or give the process more memory",
        )


def numa_node_of(pci_address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of the device at `pci_address` ("0000:3b:00.0"), if this machine has several.

    None: there is one node, or the system does not report it. `root` is the folder that contains `sys`.
    """
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if len(nodes) > 1 and node >= 0 else None
