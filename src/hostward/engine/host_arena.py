"""Host memory for what comes and goes in every step: page-locked once, handed out in blocks again and again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from hostward.errors import MemoryLimitError
from hostward.inventory import align

from .backend import Backend, Buffer, Event, Tier

ALIGNMENT_BYTES = 512
_REMEMBERED = 8
"""Steps whose need is remembered."""
_SLACK = 1.25


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of the arena, uint8 [size]. Whoever writes them first waits for `after`, the last use of what was there."""

    buffer: Buffer
    after: Event | None = None


class HostArena:
    """Blocks of page-locked memory.

    A block that was given back serves the next request of its size: steps ask for the same sizes again and again. What
    no block fits comes from the rest of a slab, or from a new slab.

    Args:
        owner: what the memory is for, in the ledger and in errors.
        limit_bytes: the most memory that all slabs take; None: what the machine has.
        retain: keep what has been locked until `close`. False: `rest` gives back what has not been needed for a while.
    """

    def __init__(self, backend: Backend, owner: str, *, limit_bytes: int | None = None, retain: bool = True) -> None:
        self._backend = backend
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._retain = retain
        self._taken_bytes = 0
        self._most_bytes = 0
        self._mosts: deque[int] = deque(maxlen=_REMEMBERED)
        self._slabs: list[Buffer] = []
        self._rest: Buffer | None = None
        self._rest_start = 0
        self._free: dict[int, deque[Block]] = {}
        # Blocks come back in finalisers, on whatever thread and at whatever moment: a deque takes them safely.
        self._returned: deque[Block] = deque()
        self._blocks = 0
        self.slab_bytes = 0
        """Bytes held."""
        self.slabs_made = 0

    @property
    def blocks_in_use(self) -> int:
        """Blocks that were taken and have not come back."""
        self._collect()
        return self._blocks

    def reserve(self, size_bytes: int) -> None:
        """Lock memory for requests of that many bytes together, unless the rest of a slab has them. Raises
        MemoryLimitError.
        """
        left = 0 if self._rest is None else self._rest.nbytes - self._rest_start
        if size_bytes <= left:
            return
        if self._limit_bytes is not None and self.slab_bytes + size_bytes > self._limit_bytes:
            raise MemoryLimitError(
                f"{self._owner}: {self.slab_bytes + size_bytes:,} bytes of host memory needed",
                why=f"{self._limit_bytes:,} were allowed",
                fix="offload fewer layers, shorten the sequence or allow more host memory",
            )
        with torch.inference_mode(False):
            (slab,) = self._backend.allocate(Tier.HOST, [size_bytes], torch.uint8, self._owner, pinned=True)
        self._slabs.append(slab)
        self._rest, self._rest_start = slab, 0
        self.slab_bytes += size_bytes
        self.slabs_made += 1

    def expect(self, size_bytes: int) -> None:
        """Requests of about that many bytes together are to come: lock memory for them at once, if that is allowed."""
        if self._limit_bytes is None or self.slab_bytes + size_bytes <= self._limit_bytes:
            self.reserve(size_bytes)

    def take(self, size_bytes: int) -> Block:
        """A block of at least that many bytes. Raises MemoryLimitError."""
        self._collect()
        size_bytes = align(size_bytes, ALIGNMENT_BYTES)
        free = self._free.get(size_bytes)
        if not free:
            self.reserve(size_bytes)
        self._blocks += 1
        self._taken_bytes += size_bytes
        self._most_bytes = max(self._most_bytes, self._taken_bytes)
        if free:
            return free.popleft()
        start, slab = self._rest_start, self._rest
        self._rest_start += size_bytes
        data = torch.empty(0, dtype=torch.uint8) if slab is None else slab.data[start : start + size_bytes]
        return Block(Buffer(Tier.HOST, data, self._owner, pinned=True))

    def give(self, block: Block, after: Event | None) -> None:
        """Take a block back; `after` is its last use. May be called from a finaliser."""
        block.after = after
        self._returned.append(block)

    def rest(self) -> None:
        """Nothing is in use, between two steps. What has been locked and the last few have not needed is given back,
        which empties all lanes; it is locked anew when it is needed.
        """
        if self.blocks_in_use:
            return
        self._mosts.append(self._most_bytes)
        self._most_bytes = 0
        if not self._retain and len(self._mosts) == _REMEMBERED and self.slab_bytes > _SLACK * max(self._mosts):
            most_bytes = max(self._mosts)
            self.close()
            self._mosts.clear()
            if most_bytes:
                self.reserve(most_bytes)

    def close(self) -> None:
        """Return all memory to the system. No block is in use."""
        self._backend.free(self._slabs)
        self._slabs.clear()
        self._free.clear()
        self._returned.clear()
        self._rest, self._rest_start, self.slab_bytes = None, 0, 0

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._blocks -= 1
            self._taken_bytes -= block.buffer.nbytes
            self._free.setdefault(block.buffer.nbytes, deque()).append(block)
