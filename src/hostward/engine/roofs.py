"""Roofs of a machine: what the link carries and what the host's memory moves, with nothing else to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from hostward.host.library import check, load

from .backend import Backend, Tier
from .pools import host_slab

SPAN_BYTES = 1 << 30
"""Copied round and round in each direction: far more than any cache holds."""
CHUNK_BYTES = 256 << 20
RMW_ELEMENTS = 64 << 20
RMW_BYTES = 26
"""Memory traffic per element of the read-modify-write loop: that of a host step with 16-bit gradient and weight."""


class Links:
    """Page-locked memory, device memory and two streams; enqueues copies in either direction."""

    def __init__(self, backend: Backend, span_bytes: int = SPAN_BYTES) -> None:
        """Raises MemoryLimitError where there is no room for `span_bytes`, twice on either side."""
        self._span_bytes = span_bytes
        self.host = backend.allocate(Tier.HOST, [span_bytes] * 2, torch.uint8, "link roof", pinned=True)
        self._device = [torch.empty(span_bytes, dtype=torch.uint8, device=backend.device) for _ in range(2)]
        self._streams = {name: torch.cuda.Stream(backend.device) for name in ("h2d", "d2h")}  # type: ignore[no-untyped-call]

    def enqueue(
        self, direction: str, count: int, chunk_bytes: int = CHUNK_BYTES, *, timed: bool = True
    ) -> list[torch.cuda.Event]:
        """`count` copies on the stream of `direction`; where `timed` an event before the first and after each."""
        stream, side = self._streams[direction], 0 if direction == "h2d" else 1
        host = torch.split(self.host[side].data, chunk_bytes)
        device = torch.split(self._device[side], chunk_bytes)
        whole = self._span_bytes // chunk_bytes
        events = []
        with torch.cuda.stream(stream):
            if timed:
                events.append(recorded(stream))
            for i in range(count):
                pair = device[i % whole], host[i % whole]
                target, source = pair if direction == "h2d" else pair[::-1]
                target.copy_(source, non_blocking=True)
                if timed:
                    events.append(recorded(stream))
        return events

    def rate(
        self, directions: Sequence[str], count: int = 40, chunk_bytes: int = CHUNK_BYTES, rounds: int = 3
    ) -> float:
        """Bytes per second of each direction while all of them run."""
        rates = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            for direction in directions:
                self.enqueue(direction, count, chunk_bytes, timed=False)
            torch.cuda.synchronize()
            rates.append(count * chunk_bytes / (time.perf_counter() - started_s))
        return statistics.median(rates)


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event with timing, recorded on `stream`."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class ReadModifyWrite:
    """The streams of a host step over huge pages, one integer operation on each element."""

    def __init__(self, threads: int, elements: int = RMW_ELEMENTS) -> None:
        """Raises MemoryLimitError where there is no room for 14 bytes per element, NativeError without the library."""
        self.elements = elements
        dtypes = (torch.float32,) * 2 + (torch.int16,) * 3
        sizes = [elements * dtype.itemsize for dtype in dtypes]
        self._streams = [
            host_slab(size, owner="memory roof", threads=threads).view(d) for size, d in zip(sizes, dtypes, strict=True)
        ]
        self._pointers = np.array([stream.data_ptr() for stream in self._streams], dtype=np.int64)
        self._isa = int(load().supported_isas()[-1])

    def run(self, threads: int, prefetch: int) -> float:
        """Seconds of one pass. Raises NativeError."""
        started_s = time.perf_counter()
        code = load().bench_rmw(self._pointers.ctypes.data, self.elements, threads, self._isa, prefetch)
        check(code, "hostward_bench_rmw")
        return time.perf_counter() - started_s

    def fastest(self, threads: int, rounds: int = 12) -> tuple[float, int]:
        """Elements per second, the median of `rounds` less two to warm up, and the prefetch setting that gave it."""
        rates = {}
        for prefetch in (0, 1):
            seconds = [self.run(threads, prefetch) for _ in range(rounds)][2:]
            rates[prefetch] = self.elements / statistics.median(seconds)
        best = max(rates, key=lambda prefetch: rates[prefetch])
        return rates[best], best
