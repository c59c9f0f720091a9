"""How much host memory is free, read at most twice a second: to read it takes half a millisecond, and an optimizer asks
before each allocation, which took a seventh of its time in tests.
"""

from __future__ import annotations

import time

from hostward.core.host_limits import HostMemory, host_memory
from hostward.runtime import pinned_memory

SECONDS = 0.5


def read_seldom() -> None:
    """Of this process, until it ends; a test may put something else in its place."""
    read_s, found = float("-inf"), HostMemory(0, 0, "")

    def recent() -> HostMemory:
        nonlocal read_s, found
        if time.monotonic() - read_s > SECONDS:
            read_s, found = time.monotonic(), host_memory()
        return found

    pinned_memory.host_memory = recent  # type: ignore[assignment]
