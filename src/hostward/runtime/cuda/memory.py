"""Allocate memory of a CUDA device, and host memory for copies to and from it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from hostward.core.full_device import fix_of
from hostward.errors import MemoryLimitError
from hostward.runtime.cuda.driver import lock_pages, unlock_pages
from hostward.runtime.pinned_memory import host_slabs


def device_slab(device: torch.device, elements: int, dtype: torch.dtype, owner: str, zero: bool) -> torch.Tensor:
    """Allocate one slab on the device, [elements]. Raises MemoryLimitError."""
    make = torch.zeros if zero else torch.empty
    try:
        return make(elements, dtype=dtype, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"{owner}: {elements * dtype.itemsize:,} bytes of device memory could not be allocated",
            why=str(error).splitlines()[0],
            fix=fix_of(error, "raise optimizer.optimizer_offload_fraction"),
        ) from error


def host_blocks(
    device: torch.device,
    threads: int,
    numa_node: int | None,
    sizes: Sequence[int],
    dtype: torch.dtype,
    owner: str,
    pinned: bool,
) -> list[torch.Tensor]:
    """Allocate one zero block of host memory per size (elements), pinned for copies if `pinned`.

    Blocks are on the device's NUMA node while that has memory; forked children do not inherit them. Raises
    MemoryLimitError.
    """

    def lock(address: int, size_bytes: int) -> Callable[[], None]:
        torch.cuda.current_stream(device).query()  # makes the context current in this thread
        lock_pages(address, size_bytes, owner=owner)
        return functools.partial(_unlock, device, address, size_bytes)

    sizes_bytes = [size * dtype.itemsize for size in sizes]
    locks = lock if pinned else None
    blocks = host_slabs(sizes_bytes, owner=owner, threads=threads, lock=locks, numa_node=numa_node, inherited=False)
    return [block.view(dtype) for block in blocks]


def _unlock(device: torch.device, address: int, size_bytes: int) -> None:
    torch.cuda.synchronize(device)
    unlock_pages(address, size_bytes)


def fetch(stream: torch.Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors of the device, on `stream`, or of the host, to the host, and wait; callable from any thread.

    Without pairs it returns at once, since earlier work on the stream may take long.
    """
    if not pairs:
        return
    with torch.cuda.stream(stream):  # type: ignore[arg-type]
        for into, data in pairs:
            into.copy_(data, non_blocking=True)
        there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        there.record()
    there.synchronize()


@contextlib.contextmanager
def memory_of(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    """See `Backend.memory_of`."""
    here = torch.cuda.current_stream(device)
    if not isinstance(stream, torch.cuda.Stream) or stream == here:
        yield
        return
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        # Work on `stream` may still use the memory that the allocator has returned, and with deterministic algorithms
        # torch enqueues a fill of it there.
        here.wait_stream(stream)
