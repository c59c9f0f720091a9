"""Copy the state that training updates on the host; the copy is written to the disk when it is complete.

Memory is copied as it is stored, every byte once: of an fp32 main weight that is stored in two halves, the upper half
is the weight. Tensors are joined when they are read from the copy. Training waits for the copy and not for the disk, so
nothing is written during the copy: writing threads would take cores and memory bandwidth from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.planner import WriteItem

from hostward.checkpoint.collective import Stop
from hostward.checkpoint.save_plan import PiecePlanner
from hostward.checkpoint.writer import STAGED_BYTES
from hostward.core.inventory import align
from hostward.kernels.cpu.memory_copy import Copy, copy
from hostward.optim.state_reader import Source, on_host
from hostward.plan.memory_model import BLOCK_BYTES, PIECE_BYTES
from hostward.runtime.backend import Backend, Tier

ALIGNED = 64
"""Bytes; places and buffers begin at multiples of it, for any dtype that they are read as."""
_TOGETHER_BYTES = 1024 * 1024 * 1024
"""Bytes that are copied at once, so that starting the copying threads takes little of the time."""
Memory: TypeAlias = tuple[int, int, int]
"""Memory of the state: its storage, its bytes, and its first byte there. The address changes where the state sleeps."""
_Part: TypeAlias = tuple[Memory, int]
"""A memory of the state, and the number of one of its parts."""


def _memory(tensor: torch.Tensor) -> Memory:
    return tensor.untyped_storage()._cdata, tensor.nbytes, int(tensor.storage_offset()) * tensor.itemsize


class Snapshot:
    """Hold host memory for the state that one process saves, from the first save on."""

    def __init__(self, backend: Backend, size_bytes: int) -> None:
        """Allocate the memory.

        Raises:
            MemoryLimitError: the allocation failed.
        """
        (self._buffer,) = backend.allocate(Tier.HOST, [size_bytes], torch.uint8, "snapshot of a save")
        self._backend = backend

    @property
    def size_bytes(self) -> int:
        return self._buffer.data.numel()

    def of(
        self, planner: PiecePlanner, items: Sequence[WriteItem], rooms: Sequence[torch.Tensor | None], stop: Stop
    ) -> Copies:
        """Return the copies of these items in this memory; the arguments are those of `Copies`."""
        begins, _ = _layout(planner.sources)
        room = self._buffer.data[-self._buffer.data.data_ptr() % BLOCK_BYTES :]
        places = {memory: room[at : at + memory[1]] for memory, at in begins.items()}
        return Copies(planner, items, places, rooms, stop, self._backend)

    def free(self) -> None:
        self._backend.free([self._buffer])


@dataclass(frozen=True)
class _Piece:
    """Describe one copy from `data` to `place`, both uint8; device memory is copied through the buffer `room`."""

    data: torch.Tensor
    place: torch.Tensor
    room: torch.Tensor | None
    backend: Backend


class Copies:
    """Copy the memory of one save's items, and read the items from the copy.

    Memory is copied group by group, by as many threads as the CPU optimizer step has, which waits for the copies.
    Concurrently one thread copies the next group's device memory to the host, so that D2H copies overlap with host
    copies.

    Args:
        planner: the plan of the items.
        items: of this process.
        places: the place in the snapshot for all memory of the sources.
        rooms: a buffer for each thread that writes; None: no memory is on the device, or joined when it is read.
        stop: asks the copies to end early.
        backend: gives the number of threads.
    """

    def __init__(
        self,
        planner: PiecePlanner,
        items: Sequence[WriteItem],
        places: Mapping[Memory, torch.Tensor],
        rooms: Sequence[torch.Tensor | None],
        stop: Stop,
        backend: Backend,
    ) -> None:
        self._planner = planner
        self._places = places
        self._stop = stop
        self._backend = backend
        self._groups: list[list[_Piece]] = []
        self._divide(items, _Rooms(rooms))

    def _divide(self, items: Sequence[WriteItem], rooms: _Rooms) -> None:
        """Divide the memory into groups of at least `_TOGETHER_BYTES`, or as large as the buffers allow."""
        seen: set[_Part] = set()
        held_bytes = 0
        for item in items:
            source = self._planner.source_of(item)
            if source is None:
                continue
            for part, data, place in self._parts(source, item, rooms.part_bytes):
                if part in seen:
                    continue
                seen.add(part)
                on_device = not on_host(data)
                if not self._groups or held_bytes >= _TOGETHER_BYTES or (on_device and not rooms.has(len(data))):
                    self._groups.append([])
                    held_bytes = 0
                    rooms.next_group()
                room = rooms.take(len(data)) if on_device else None
                self._groups[-1].append(_Piece(data, place, room, source.backend))
                held_bytes += len(data)

    def _parts(
        self, source: Source, item: WriteItem, part_bytes: int
    ) -> Iterator[tuple[_Part, torch.Tensor, torch.Tensor]]:
        """Yield the memory of an item in parts of `part_bytes` bytes, each with its place in the snapshot."""
        for tensor, start, stop in source.memory_of(*self._planner.box(item)):
            memory = _memory(tensor)
            data, place = tensor.view(torch.uint8), self._places[memory]
            for i in range(start // part_bytes, -(-stop // part_bytes)):
                part = slice(i * part_bytes, (i + 1) * part_bytes)
                yield (memory, i), data[part], place[part]

    def make(self) -> None:
        """Copy all groups."""
        with ThreadPoolExecutor(1, thread_name_prefix="hostward checkpoint fetches") as pool:
            ahead = pool.submit(_to_host, self._groups[0] if self._groups else [])
            for following in [*self._groups[1:], []]:
                copies = ahead.result()
                self._stop.check()
                ahead = pool.submit(_to_host, following)
                copy(copies, threads=self._backend.threads)

    def read(self, item: WriteItem, room: torch.Tensor | None) -> torch.Tensor:
        """Return the elements of an item on the host, after `make`; plain tensors are read from where they are."""
        return self._planner.read(item, room, self._copy_of)

    def _copy_of(self, memory: torch.Tensor) -> torch.Tensor:
        return self._places[_memory(memory)].view(memory.dtype)


class _Rooms:
    """Manage the buffers for D2H copies of groups; the writing threads use the same buffers after all copies."""

    def __init__(self, rooms: Sequence[torch.Tensor | None]) -> None:
        halves = [room.chunk(2) for room in rooms if room is not None]
        self._free = [[half[i] for half in halves] for i in range(2)]
        self.part_bytes = len(halves[0][0]) if halves else PIECE_BYTES
        """Largest size of a piece, in bytes."""
        self._left: list[torch.Tensor] = []

    def next_group(self) -> None:
        """Switch to the other half of each buffer, while the data in this half is copied."""
        self._free.reverse()
        self._left = list(self._free[0])

    def has(self, size_bytes: int) -> bool:
        """Return whether there is a free contiguous range of so many bytes."""
        while self._left and len(self._left[0]) < size_bytes:
            self._left.pop(0)
        return bool(self._left)

    def take(self, size_bytes: int) -> torch.Tensor:
        room, self._left[0] = self._left[0][:size_bytes], self._left[0][align(size_bytes, ALIGNED) :]
        return room


def _to_host(group: Sequence[_Piece]) -> list[Copy]:
    """Copy a group's device memory to the buffers, and return the host copies that are left to make."""
    fetches: dict[Backend, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for piece in group:
        if piece.room is not None:
            fetches.setdefault(piece.backend, []).append((piece.room, piece.data))
    for backend, pairs in fetches.items():  # two optimizers may have a device each
        backend.fetch(pairs)
    return [Copy(piece.place, piece.data if piece.room is None else piece.room) for piece in group]


def snapshot_bytes(sources: Sequence[Source]) -> int:
    """Return the bytes that a snapshot of these sources needs, at any address."""
    return _layout(sources)[1] + BLOCK_BYTES


def _layout(sources: Sequence[Source]) -> tuple[dict[Memory, int], int]:
    """Return the offset of each memory in a snapshot, and the bytes of all; sources may share memory."""
    begins: dict[Memory, int] = {}
    end = 0
    for memory in (_memory(m) for source in sources for m in source.memory):
        if memory not in begins:
            # Large memory is written to the disk from its place directly.
            begins[memory] = align(end, BLOCK_BYTES if memory[1] >= STAGED_BYTES else ALIGNED)
            end = begins[memory] + memory[1]
    return begins, end
