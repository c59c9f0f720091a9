"""A copy of what training goes on with, on the host, which is written once it is whole.

Memory is copied as it lies, every byte once: of a master that is kept in two halves the upper one is the weight. What
is to be written is put together when it is read from the copy. Training waits for the copy and not for the disk:
threads that write would only take cores and memory from those that copy.
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
"""Bytes; places and rooms begin at multiples of it, whatever dtype they are read as."""
_TOGETHER_BYTES = 1024 * 1024 * 1024
"""Copied at once, so that starting the threads that do it takes little of the time."""
Memory: TypeAlias = tuple[int, int]
"""Memory of the state: its address and its bytes."""
_Part: TypeAlias = tuple[Memory, int]
"""Of it: one of its parts, by number."""


def _memory(tensor: torch.Tensor) -> Memory:
    return tensor.data_ptr(), tensor.nbytes


class Snapshot:
    """Host memory that holds what one process saves, from the first save on."""

    def __init__(self, backend: Backend, size_bytes: int) -> None:
        """Raises MemoryLimitError."""
        (self._buffer,) = backend.allocate(Tier.HOST, [size_bytes], torch.uint8, "snapshot of a save")
        self._backend = backend

    @property
    def size_bytes(self) -> int:
        return self._buffer.data.numel()

    def of(
        self, planner: PiecePlanner, items: Sequence[WriteItem], rooms: Sequence[torch.Tensor | None], stop: Stop
    ) -> Copies:
        """Of these items, as they are to be copied and read: the arguments of `Copies`."""
        begins, _ = _layout(planner.sources)
        room = self._buffer.data[-self._buffer.data.data_ptr() % BLOCK_BYTES :]
        places = {memory: room[at : at + memory[1]] for memory, at in begins.items()}
        return Copies(planner, items, places, rooms, stop, self._backend)

    def free(self) -> None:
        self._backend.free([self._buffer])


@dataclass(frozen=True)
class _Piece:
    """What is copied from `data` to `place`, both uint8; what lies on the device by way of `room`."""

    data: torch.Tensor
    place: torch.Tensor
    room: torch.Tensor | None
    backend: Backend


class Copies:
    """The memory that items of one save lie in, as it is copied, and as they are read from the copy.

    It is copied group by group, by as many threads as the host's step has, which waits for the copies. Beside that a
    thread fetches what the next group has on the device: the device reads and the cores copy at the same time.

    Args:
        items: of this process.
        places: for all memory of the sources.
        rooms: one for each thread that writes; None: nothing lies on the device, or is put together to be read.
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
        """Into groups, each of as much as is worth it, or has room."""
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
                fetched = not on_host(data)
                if not self._groups or held_bytes >= _TOGETHER_BYTES or (fetched and not rooms.has(len(data))):
                    self._groups.append([])
                    held_bytes = 0
                    rooms.turn()
                room = rooms.take(len(data)) if fetched else None
                self._groups[-1].append(_Piece(data, place, room, source.backend))
                held_bytes += len(data)

    def _parts(
        self, source: Source, item: WriteItem, part_bytes: int
    ) -> Iterator[tuple[_Part, torch.Tensor, torch.Tensor]]:
        """What an item lies in, in parts of so many bytes of its memory, each with its place."""
        for tensor, start, stop in source.memory_of(*self._planner.box(item)):
            memory = _memory(tensor)
            data, place = tensor.view(torch.uint8), self._places[memory]
            for i in range(start // part_bytes, -(-stop // part_bytes)):
                part = slice(i * part_bytes, (i + 1) * part_bytes)
                yield (memory, i), data[part], place[part]

    def make(self) -> None:
        """Copy all of them."""
        with ThreadPoolExecutor(1, thread_name_prefix="hostward checkpoint fetches") as pool:
            ahead = pool.submit(_fetched, self._groups[0] if self._groups else [])
            for following in [*self._groups[1:], []]:
                copies = ahead.result()
                self._stop.check()
                ahead = pool.submit(_fetched, following)
                copy(copies, threads=self._backend.threads)

    def read(self, item: WriteItem, room: torch.Tensor | None) -> torch.Tensor:
        """The elements of an item, on the host, once all are copied. What is no source is read where it lies."""
        return self._planner.read(item, room, self._copy_of)

    def _copy_of(self, memory: torch.Tensor) -> torch.Tensor:
        return self._places[_memory(memory)].view(memory.dtype)


class _Rooms:
    """Where groups have room for what they fetch: that of the threads which write, once all is copied."""

    def __init__(self, rooms: Sequence[torch.Tensor | None]) -> None:
        halves = [room.chunk(2) for room in rooms if room is not None]
        self._free = [[half[i] for half in halves] for i in range(2)]
        self.part_bytes = len(halves[0][0]) if halves else PIECE_BYTES
        """Most bytes of a piece."""
        self._left: list[torch.Tensor] = []

    def turn(self) -> None:
        """For the next group: into the other half of each, while what is in this one is copied."""
        self._free.reverse()
        self._left = list(self._free[0])

    def has(self, size_bytes: int) -> bool:
        """Whether there is room for so many bytes together."""
        while self._left and len(self._left[0]) < size_bytes:
            self._left.pop(0)
        return bool(self._left)

    def take(self, size_bytes: int) -> torch.Tensor:
        room, self._left[0] = self._left[0][:size_bytes], self._left[0][align(size_bytes, ALIGNED) :]
        return room


def _fetched(group: Sequence[_Piece]) -> list[Copy]:
    """What is left to be copied on the host once this returns."""
    fetches: dict[Backend, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for piece in group:
        if piece.room is not None:
            fetches.setdefault(piece.backend, []).append((piece.room, piece.data))
    for backend, pairs in fetches.items():  # two optimizers may have a device each
        backend.fetch(pairs)
    return [Copy(piece.place, piece.data if piece.room is None else piece.room) for piece in group]


def snapshot_bytes(sources: Sequence[Source]) -> int:
    """Bytes that a snapshot of these needs, wherever it comes to lie."""
    return _layout(sources)[1] + BLOCK_BYTES


def _layout(sources: Sequence[Source]) -> tuple[dict[Memory, int], int]:
    """Where in a snapshot each memory begins, which several sources may have in common, and the bytes of all."""
    begins: dict[Memory, int] = {}
    end = 0
    for memory in (_memory(m) for source in sources for m in source.memory):
        if memory not in begins:
            # Much of it at once goes to the disk from where it lies.
            begins[memory] = align(end, BLOCK_BYTES if memory[1] >= STAGED_BYTES else ALIGNED)
            end = begins[memory] + memory[1]
    return begins, end
