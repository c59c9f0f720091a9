"""Host memory: exact-size slabs, touched in parallel, on huge pages where the kernel gives them."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable

import torch

from hostward.errors import MemoryLimitError
from hostward.hardware import host_memory
from hostward.host.library import first_touch

HUGE_PAGE_BYTES = 2 * 1024 * 1024


class _Pages(mmap.mmap):
    """A mapping that runs `release` when the last tensor over it is gone, just before it is unmapped."""

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        # At exit the CUDA context may be gone already, and the system takes the pages back anyway (H22).
        if self.release is not None and not sys.is_finalizing():
            self.release()


def host_slab(
    size_bytes: int, *, owner: str, threads: int, lock: Callable[[int, int], Callable[[], None]] | None = None
) -> torch.Tensor:
    """Anonymous zero memory of exactly `size_bytes` (rounded up to a page), resident from the start: uint8
    [size_bytes].

    Torch's pinned allocator rounds each block up to a power of two and never gives it back; a slab takes what was
    asked and is unmapped with the last tensor over it. `lock(address, size_bytes)` page-locks the memory and returns
    what undoes it. Raises MemoryLimitError where the machine or its container has less than `size_bytes` left.
    """
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    require_host_memory(size_bytes, owner=owner)
    try:
        # Python's default is shared memory, which gets huge pages only where shmem_enabled says so; it says "never".
        pages = _Pages(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryLimitError(
            f"{owner}: the system refused to map {size_bytes:,} bytes", why=str(error), fix="see ulimit -v"
        ) from error
    if size_bytes >= HUGE_PAGE_BYTES:
        # A kernel built without huge pages refuses; small ones work too.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    if lock is not None:
        # After a fork the first write moves a private page, and the device would go on using the old one.
        pages.madvise(mmap.MADV_DONTFORK)
    data = torch.frombuffer(pages, dtype=torch.uint8)
    first_touch(data.data_ptr(), size_bytes, threads)
    if lock is not None:
        pages.release = lock(data.data_ptr(), size_bytes)
    return data


def require_host_memory(size_bytes: int, *, owner: str) -> None:
    """Raises MemoryLimitError where the machine or its container has less than `size_bytes` left."""
    available = host_memory()
    if size_bytes > available.available_bytes:
        raise MemoryLimitError(
            f"{owner}: {size_bytes:,} bytes of host memory asked, {available.available_bytes:,} available",
            why=f"the limit is set by {available.limited_by} ({available.total_bytes:,} bytes in all)",
            fix="lower optimizer.optimizer_offload_fraction, or give the process more memory",
        )
