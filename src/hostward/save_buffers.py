"""Host memory that a save takes besides the state: constants of the writer that plans count with. No torch."""

from __future__ import annotations

import os

PIECE_BYTES = 32 * 1024 * 1024
"""Tensors are read, written and checked in pieces of at most so many bytes."""
MOST_WRITERS = 8
"""Threads that write, each into a file of its own: checksums take a thread more time than a disk its bytes."""


def writer_count() -> int:
    """Threads that write a checkpoint on this machine."""
    return min(MOST_WRITERS, len(os.sched_getaffinity(0)))
