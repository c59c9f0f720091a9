"""Roofs of a machine for the optimizer step: the link, the host's memory, and both at once. Used by paths.py."""

from __future__ import annotations

import time
from typing import Any

import torch

from hostward.runtime.backend_choice import backend_for
from hostward.runtime.calibrate import CHUNK_BYTES, RMW_BYTES, RMW_ELEMENTS, Links, ReadModifyWrite, recorded

HOST_LINK_BYTES, STREAMED_LINK_BYTES = 2, 10
HOST_DRAM_BYTES, STREAMED_DRAM_BYTES = RMW_BYTES + 2 * HOST_LINK_BYTES, 2 * STREAMED_LINK_BYTES


def rmw_alone(loop: ReadModifyWrite, threads: int) -> dict[str, Any]:
    """Parameters/s of the faster prefetch setting."""
    rate, prefetch = loop.fastest(threads)
    return {"threads": threads, "parameters_per_s": rate, "prefetch": prefetch, "bytes_per_s": rate * RMW_BYTES}


def rmw_with_copies(loop: ReadModifyWrite, links: Links, alone: dict[str, Any], count: int = 250) -> dict[str, Any]:
    """Both at once: what cores and copies move in the time in which neither has ended."""
    torch.cuda.synchronize()
    base = recorded(torch.cuda.current_stream())
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
