"""Host memory that a save takes besides the state: constants of the writer that plans count with. No torch."""

from __future__ import annotations

import os

PIECE_BYTES = 32 * 1024 * 1024
"""Tensors are read, written and checked in pieces of at most so many bytes."""
BLOCK_BYTES = 4096
"""Past the page cache memory, places in files and lengths are multiples of it: of a page, and of any disk's block."""
MOST_WRITERS = 8
"""Threads of one machine that write, each into a file of its own: to read, check and hand over what a disk takes in
parallel needs several.
"""


def writer_count(ranks: int = 1) -> int:
    """Threads by which one of so many ranks of this machine writes. They share its disk, and the cores that their steps
    need; two are left to each, so that one reads while the other writes.
    """
    most = min(MOST_WRITERS, len(os.sched_getaffinity(0)))
    return max(min(2, most), most // ranks)
