"""Allocate blocks of host memory that is pinned once and reused in every step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from hostward.core.inventory import align
from hostward.errors import MemoryLimitError, ModelError, PageLockError
from hostward.runtime.backend import Backend, Buffer, Event, Tier

ALIGNMENT_BYTES = 512
_REMEMBERED = 8
"""Steps whose largest use is remembered."""
_SLACK = 1.25


@dataclass(eq=False, slots=True)
class Block:
    """Holds bytes of the arena, uint8 [size]; the next writer waits for `after`, the last use of their old contents."""

    buffer: Buffer
    after: Event | None = None


class HostArena:
    """Allocates blocks of pinned memory.

    Within a step a returned block serves the next request of its size; other requests are cut from the rest of a slab,
    or from a new slab of exactly that size. Between steps all slabs are empty again, so that steps of other sizes use
    the same memory.

    Args:
        owner: what the memory is for, in the ledger and in errors.
        limit_bytes: the most memory that all slabs take; None: all that the machine has.
        retain: keep pinned memory until `close`. False: `rest` frees memory that has not been needed for some steps.

    An arena that `hand_over` returned pins nothing: a request that does not fit raises ModelError.
    """

    def __init__(self, backend: Backend, owner: str, *, limit_bytes: int | None = None, retain: bool = True) -> None:
        self.backend = backend
        self._owner = owner
        self._limit_bytes = limit_bytes
        self.retain = retain
        self._fixed = False
        self._handed_bytes = 0
        self._slabs: list[Buffer] = []
        self._ends: list[int] = []
        """First free byte in each slab."""
        self._free: dict[int, deque[Block]] = {}
        # Finalisers return blocks on any thread at any moment, which is safe with a deque.
        self._returned: deque[Block] = deque()
        self._blocks = self._taken_bytes = self._most_bytes = 0
        self._mosts: deque[int] = deque(maxlen=_REMEMBERED)
        self._grown = False
        self.slab_bytes = 0
        """Pinned bytes held."""
        self.slabs_made = 0

    @property
    def blocks_in_use(self) -> int:
        """Return the number of blocks that were taken and not given back."""
        self._collect()
        return self._blocks

    def reserve(self, size_bytes: int) -> None:
        """Pin a slab of that many bytes. Raises MemoryLimitError, or ModelError if this arena does not grow."""
        if self._fixed:
            raise ModelError(
                f"{self._owner}: {self.slab_bytes:,} bytes of host memory do not suffice for a CUDA graph",
                why="no memory is pinned during a capture: the graph gets what the iterations before it have used",
                fix="run a few iterations of the same shapes, backward included, directly before each capture",
            )
        held_bytes = self.slab_bytes + self._handed_bytes
        if self._limit_bytes is not None and held_bytes + size_bytes > self._limit_bytes:
            raise MemoryLimitError(
                f"{self._owner}: {held_bytes + size_bytes:,} bytes of host memory needed",
                why=f"{self._limit_bytes:,} were allowed",
                fix="offload fewer layers, shorten the sequence or allow more host memory",
            )
        try:
            with torch.inference_mode(False):
                (slab,) = self.backend.allocate(Tier.HOST, [size_bytes], torch.uint8, self._owner, pinned=True)
        except PageLockError as error:
            there = f"{held_bytes:,} bytes are locked for them"
            raise PageLockError(
                error.what,
                why="; ".join(filter(None, (error.why, there))),
                fix=f"offload fewer layers, shorten the sequence; or {error.fix}",
            ) from error
        self._slabs.append(slab)
        self._ends.append(0)
        self.slab_bytes += size_bytes
        self.slabs_made += 1
        self._grown = True

    def take(self, size_bytes: int) -> Block:
        """Take a block of at least that many bytes. Raises as `reserve` does."""
        self._collect()
        size_bytes = align(size_bytes, ALIGNMENT_BYTES)
        free = self._free.get(size_bytes)
        block = free.popleft() if free else self._cut(size_bytes)
        self._blocks += 1
        self._taken_bytes += size_bytes
        self._most_bytes = max(self._most_bytes, self._taken_bytes)
        return block

    def _cut(self, size_bytes: int) -> Block:
        # The fullest slab with enough room, so that large rests stay for large requests.
        rests = [(slab.nbytes - end, i) for i, (slab, end) in enumerate(zip(self._slabs, self._ends, strict=True))]
        fitting = [rest for rest in rests if rest[0] >= size_bytes]
        if not fitting:
            self.reserve(size_bytes)
        i = min(fitting)[1] if fitting else len(self._slabs) - 1
        start = self._ends[i]
        self._ends[i] = start + size_bytes
        data = self._slabs[i].data[start : start + size_bytes]
        return Block(Buffer(Tier.HOST, data, self._owner, pinned=True))

    def give(self, block: Block, after: Event | None) -> None:
        """Return a block; `after` is its last use. May be called from a finaliser."""
        block.after = after
        self._returned.append(block)

    def rest(self) -> None:
        """Empty all slabs between two steps, when no block is in use and the compute stream has waited for all uses.

        Slabs that together are much larger than a step needs are replaced by one of the needed size: if they have grown
        in this step or, without `retain`, if the last steps have not needed them. Replacing waits for all lanes.
        """
        if self.blocks_in_use:
            return
        self._free.clear()
        self._ends = [0] * len(self._slabs)
        self._mosts.append(self._most_bytes)
        self._most_bytes = 0
        grown, self._grown = self._grown, False
        need_bytes = self._mosts[-1] if grown else max(self._mosts)
        idle = not self.retain and len(self._mosts) == _REMEMBERED
        if (grown or idle) and self.slab_bytes > _SLACK * need_bytes:
            self.close()
            self._mosts.clear()
            if need_bytes:
                self.reserve(need_bytes)
            self._grown = False

    def hand_over(self) -> HostArena:
        """Hand all memory to a new arena of a CUDA graph, which never grows, and start anew without memory.

        No block may be in use. Memory that was handed over still counts towards the limit of this arena.
        """
        self._collect()
        graph = HostArena(self.backend, self._owner)
        graph._fixed = True
        graph._slabs, self._slabs = self._slabs, []
        graph._ends, self._ends = [0] * len(graph._slabs), []
        graph.slab_bytes, self.slab_bytes = self.slab_bytes, 0
        self._handed_bytes += graph.slab_bytes
        self._free.clear()
        self._mosts.clear()
        self._most_bytes, self._grown = 0, False
        return graph

    def close(self) -> None:
        """Return all memory to the system. No block may be in use."""
        self.backend.free(self._slabs)
        self._slabs.clear()
        self._ends.clear()
        self._free.clear()
        self._returned.clear()
        self.slab_bytes = 0

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._blocks -= 1
            self._taken_bytes -= block.buffer.nbytes
            self._free.setdefault(block.buffer.nbytes, deque()).append(block)
