"""A copy of what training goes on with, on the host: made while the pieces that are there are written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from hostward.checkpoint_plan import PiecePlanner, item_bytes
from hostward.checkpoint_ranks import Stop
from hostward.checkpoint_writer import shared_out
from hostward.engine.backend import Backend, Tier
from hostward.host.copy import Copy, copy
from hostward.inventory import align
from hostward.training.sources import Source

ALIGNED = 64
"""Bytes; places and rooms begin at multiples of it, whatever dtype they are read as."""
_TOGETHER_BYTES = 1024 * 1024 * 1024
"""Copied at once, so that starting the threads that do it takes little of the time; then writers get them."""
_LOOK_S = 0.1
"""Between two looks of a thread that waits for a copy, at whether the save has been given up."""

Group: TypeAlias = list[tuple[WriteItem, bool]]
"""Items that are copied at once, each with whether some of it lies on the device."""


class Snapshot:
    """Host memory that holds what one process saves, from the first save on."""

    def __init__(self, backend: Backend, size_bytes: int) -> None:
        """Raises MemoryLimitError."""
        (self._buffer,) = backend.allocate(Tier.HOST, [size_bytes], torch.uint8, "snapshot of a save")
        self._backend = backend

    @property
    def size_bytes(self) -> int:
        return self._buffer.data.numel()

    def of(self, planner: PiecePlanner, items: Sequence[WriteItem], stop: Stop) -> Copies:
        """Places for those of these items that training goes on with."""
        places: dict[MetadataIndex, torch.Tensor] = {}
        end = 0
        for item in filter(planner.live, items):
            places[item.index] = self._buffer.data[end : end + item_bytes(item)]
            end += align(item_bytes(item), ALIGNED)
        return Copies(planner, items, places, stop, self._backend)

    def free(self) -> None:
        self._backend.free([self._buffer])


class Copies:
    """Items of one save as they are copied, and read from their copies by other threads, each once it is there.

    One thread copies, group by group, by as many threads as the host's step has, which waits for the copies. Beside it
    another fetches what the next group has on the device: the device reads and the cores copy at the same time.

    Args:
        items: of this process, as they are shared out among the threads that write.
        places: for those that are copied.
    """

    def __init__(
        self,
        planner: PiecePlanner,
        items: Sequence[WriteItem],
        places: Mapping[MetadataIndex, torch.Tensor],
        stop: Stop,
        backend: Backend,
    ) -> None:
        self._planner = planner
        self._items = items
        self._places = places
        self._stop = stop
        self._backend = backend
        self._there = {index: threading.Event() for index in places}

    def make(self, rooms: Sequence[torch.Tensor | None]) -> None:
        """Copy all of them.

        Args:
            rooms: one for each thread that writes, of the bytes of two items; None: nothing lies on the device.
        """
        halves = [half for room in rooms if room is not None for half in room.chunk(2)]
        taken, following = halves[::2], halves[1::2]  # what is copied from, and what is fetched into meanwhile
        groups = list(self._groups(len(rooms), len(following)))
        with ThreadPoolExecutor(1, thread_name_prefix="hostward checkpoint fetches") as pool:
            ahead = pool.submit(self._take, groups[0] if groups else [], taken)
            for i, group in enumerate(groups):
                copies = ahead.result()
                self._stop.check()
                ahead = pool.submit(self._take, groups[i + 1] if i + 1 < len(groups) else [], following)
                copy(copies, threads=self._backend.threads)
                taken, following = following, taken
                for item, _ in group:
                    self._there[item.index].set()

    def _groups(self, writers: int, rooms: int) -> Iterator[Group]:
        """What is copied at once, as much as is worth it, or as has room. Of each writer's share the first items come
        first: none waits for another's.
        """
        turns = zip_longest(*shared_out(self._items, writers))
        group: Group = []
        held_bytes = on_device = 0
        for item in (item for turn in turns for item in turn if item is not None and item.index in self._places):
            needs_room = self._planner.on_device(item)
            if held_bytes >= _TOGETHER_BYTES or (needs_room and on_device == rooms):
                yield group
                group, held_bytes, on_device = [], 0, 0
            group.append((item, needs_room))
            held_bytes += item_bytes(item)
            on_device += needs_room
        if group:
            yield group

    def _take(self, group: Group, rooms: Sequence[torch.Tensor]) -> list[Copy]:
        """What is left to be copied on the host once this returns."""
        fetches: dict[Backend, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        copies: list[Copy] = []
        free = iter(rooms)
        for item, needs_room in group:
            room = next(free) if needs_room else None
            taking = self._planner.taking(item, self._places[item.index], room)
            fetches.setdefault(self._planner.backend_of(item), []).extend(taking.fetches)
            copies += taking.copies
        for backend, pairs in fetches.items():  # two optimizers may have a device each
            backend.fetch(pairs)
        return copies

    def read(self, item: WriteItem, _: torch.Tensor | None) -> torch.Tensor:
        """The elements of an item, on the host. What is not copied is no source, and takes no room."""
        if item.index not in self._places or item.tensor_data is None:
            return self._planner.read(item, None)
        while not self._there[item.index].wait(_LOOK_S):
            self._stop.check()
        data = item.tensor_data
        return self._places[item.index].view(data.properties.dtype).view(tuple(data.chunk.sizes))


def snapshot_bytes(sources: Sequence[Source]) -> int:
    """Bytes that a snapshot of these needs at most."""
    pieces = sum(align(s.nbytes, ALIGNED) for s in sources)
    return pieces + sum(ALIGNED * (s.nbytes >> 20) for s in sources)  # a place for each piece is rounded up
