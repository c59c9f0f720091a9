"""Roofs of a machine for the optimizer step: the link, the host's memory, and both at once. Used by paths.py."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from host_adamw import huge_tensor
from hostward.engine.backend import Backend, Tier
from hostward.engine.choose import backend_for
from hostward.host.library import load

CHUNK_BYTES = 256 << 20
CHUNKS = 4
RMW_ELEMENTS = 64 << 20
RMW_BYTES = 26
HOST_LINK_BYTES, STREAMED_LINK_BYTES = 2, 10
HOST_DRAM_BYTES, STREAMED_DRAM_BYTES = RMW_BYTES + 2 * HOST_LINK_BYTES, 2 * STREAMED_LINK_BYTES


class Links:
    """Pinned memory and two streams; enqueues copies of CHUNK_BYTES in either direction."""

    def __init__(self, backend: Backend) -> None:
        self.host = backend.allocate(Tier.HOST, [CHUNK_BYTES] * 2 * CHUNKS, torch.uint8, "link roof", pinned=True)
        self._device = torch.empty(2 * CHUNKS, CHUNK_BYTES, dtype=torch.uint8, device="cuda")
        self._streams = {name: torch.cuda.Stream() for name in ("h2d", "d2h")}

    def enqueue(self, direction: str, count: int) -> list[torch.cuda.Event]:
        """`count` copies on the stream of `direction`; an event before the first and after each."""
        stream = self._streams[direction]
        first = 0 if direction == "h2d" else CHUNKS
        events = []
        with torch.cuda.stream(stream):
            events.append(_recorded(stream))
            for i in range(count):
                host, device = self.host[first + i % CHUNKS].data, self._device[first + i % CHUNKS]
                if direction == "h2d":
                    device.copy_(host, non_blocking=True)
                else:
                    host.copy_(device, non_blocking=True)
                events.append(_recorded(stream))
        return events

    def rate(self, directions: list[str], count: int = 40) -> float:
        """Bytes per second of each direction while all of them run."""
        rates = []
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for direction in directions:
                self.enqueue(direction, count)
            torch.cuda.synchronize()
            rates.append(count * CHUNK_BYTES / (time.perf_counter() - started))
        return statistics.median(rates)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class ReadModifyWrite:
    """The loop of host_adamw.py's roof: the streams of a step, one integer operation on each element."""

    def __init__(self, threads: int) -> None:
        dtypes = (torch.float32,) * 2 + (torch.int16,) * 3
        self._streams = [huge_tensor(RMW_ELEMENTS, dtype, threads) for dtype in dtypes]
        self._pointers = np.array([stream.data_ptr() for stream in self._streams], dtype=np.int64)
        self._isa = int(load().supported_isas()[-1])

    def run(self, threads: int, prefetch: int) -> float:
        """Seconds of one pass."""
        started = time.perf_counter()
        code = load().bench_rmw(self._pointers.ctypes.data, RMW_ELEMENTS, threads, self._isa, prefetch)
        if code != 0:
            raise RuntimeError(f"hostward_bench_rmw failed with code {code}")
        return time.perf_counter() - started


def rmw_alone(loop: ReadModifyWrite, threads: int) -> dict[str, Any]:
    """Parameters/s of the faster prefetch setting."""
    best: dict[str, Any] = {"threads": threads, "parameters_per_s": 0.0}
    for prefetch in (0, 1):
        seconds = [loop.run(threads, prefetch) for _ in range(12)][2:]
        rate = RMW_ELEMENTS / statistics.median(seconds)
        if rate > best["parameters_per_s"]:
            best |= {"prefetch": prefetch, "parameters_per_s": rate, "bytes_per_s": rate * RMW_BYTES}
    return best


def rmw_with_copies(loop: ReadModifyWrite, links: Links, alone: dict[str, Any], count: int = 250) -> dict[str, Any]:
    """Both at once: what cores and copies move in the time in which neither has ended."""
    torch.cuda.synchronize()
    base = _recorded(torch.cuda.current_stream())
    base.synchronize()
    base_s = time.perf_counter()
    copies = {direction: links.enqueue(direction, count) for direction in ("h2d", "d2h")}
    passes = []
    while not any(events[-1].query() for events in copies.values()):
        started = time.perf_counter() - base_s
        passes.append((started, started + loop.run(alone["threads"], alone["prefetch"])))
    torch.cuda.synchronize()
    ends = {direction: [base.elapsed_time(e) / 1e3 for e in events] for direction, events in copies.items()}
    # The first pass meets links that are still starting; the last may outlast them.
    start_s, stop_s = passes[1][0], min(times[-1] for times in ends.values())
    whole = [(a, b) for a, b in passes[1:] if b <= stop_s]
    window_s = whole[-1][1] - start_s
    moved = {
        direction: CHUNK_BYTES * sum(start_s < t <= start_s + window_s for t in times[1:])
        for direction, times in ends.items()
    }
    rate = len(whole) * RMW_ELEMENTS / window_s
    return {
        "threads": alone["threads"],
        "window_s": window_s,
        "parameters_per_s": rate,
        "h2d_bytes_per_s": moved["h2d"] / window_s,
        "d2h_bytes_per_s": moved["d2h"] / window_s,
        "dram_bytes_per_s": rate * RMW_BYTES + sum(moved.values()) / window_s,
    }


def measure_roofs(threads: int, all_threads: int) -> dict[str, Any]:
    backend = backend_for(torch.device("cuda"), threads)
    links = Links(backend)
    loop = ReadModifyWrite(threads)
    roofs: dict[str, Any] = {
        "h2d_bytes_per_s": links.rate(["h2d"]),
        "d2h_bytes_per_s": links.rate(["d2h"]),
        "duplex_each_way_bytes_per_s": links.rate(["h2d", "d2h"]),
    }
    alone = [rmw_alone(loop, n) for n in sorted({threads, all_threads})]
    both = [rmw_with_copies(loop, links, row) for row in alone]
    roofs |= {"rmw": alone, "rmw_with_duplex": both}
    roofs["host_parameters_per_s"] = max(row["parameters_per_s"] for row in alone)
    roofs["mixed_dram_bytes_per_s"] = max(
        [row["dram_bytes_per_s"] for row in both] + [row["bytes_per_s"] for row in alone]
    )
    at = {share / 100: roof_parameters_per_s(roofs, share / 100) for share in range(0, 101, 5)}
    roofs["parameters_per_s_by_streamed_share"] = at
    roofs["mixed_parameters_per_s"] = max(at.values())
    roofs["mixed_streamed_share"] = max(at, key=lambda share: at[share])
    backend.free(links.host)
    return roofs


def roof_parameters_per_s(roofs: dict[str, Any], streamed: float) -> float:
    """The most that cores, link and memory allow when share `streamed` of the parameters is streamed."""
    link_bytes = (1 - streamed) * HOST_LINK_BYTES + streamed * STREAMED_LINK_BYTES
    dram_bytes = (1 - streamed) * HOST_DRAM_BYTES + streamed * STREAMED_DRAM_BYTES
    limits = [roofs["duplex_each_way_bytes_per_s"] / link_bytes, roofs["mixed_dram_bytes_per_s"] / dram_bytes]
    if streamed < 1:
        limits.append(roofs["host_parameters_per_s"] / (1 - streamed))
    return min(limits)
