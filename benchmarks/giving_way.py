"""How long a small copy of the model's own waits while a copy lane is full, and what giving way to it costs.

    python benchmarks/giving_way.py --json benchmarks/results/DATE-giving-way.json

A lane gets a backlog of copies; then a flag is read back on the compute stream (for the host-to-device lane: written),
as models do that look at their masks. `flag_s` is what the calling thread waits for it, `backlog_s` what the whole
backlog takes. `busy_s` is what the backlog takes while a kernel keeps the compute stream busy for longer: where streams
share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS=1), giving way might wait for kernels. Rows alternate between copies
that give way after GIVE_WAY_BYTES and copies that never do; medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hostward.engine import cuda_work
from hostward.engine.backend import Tier
from hostward.engine.cuda import CudaBackend
from hostward.schedule import Lane

from machine import describe

MIB = 1 << 20
BUSY_CYCLES = int(1e9)
NEVER = 1 << 62


def measure(backend: CudaBackend, lane: Lane, copies: int, nbytes: int, give_way_bytes: int) -> tuple[float, ...]:
    """Seconds: the flag, the backlog, the backlog beside a long kernel."""
    usual, cuda_work.GIVE_WAY_BYTES = cuda_work.GIVE_WAY_BYTES, give_way_bytes
    try:
        (device,) = backend.allocate(Tier.DEVICE, [nbytes], torch.uint8, "backlog", zero=False)
        (host,) = backend.allocate(Tier.HOST, [nbytes], torch.uint8, "backlog", pinned=True)
        pair = (host, device) if lane is Lane.D2H else (device, host)
        works = [backend.copy(lane, [pair], name=f"backlog/{i}") for i in range(copies)]
    finally:
        cuda_work.GIVE_WAY_BYTES = usual
    flag = torch.ones(1, device=backend.device)
    value = torch.zeros(1, device="cpu", pin_memory=True)
    for work in works[:2]:
        work.issue()
    backend.synchronise()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for work in works:
        work.issue()
    if lane is Lane.D2H:
        bool(flag.all())
    else:
        flag.copy_(value, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    flag_s = time.perf_counter() - started
    backend.synchronise()
    backlog_s = time.perf_counter() - started
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    started = time.perf_counter()
    for work in works:
        last = work.issue()
    backend.wait(last)
    busy_s = time.perf_counter() - started
    backend.synchronise()
    backend.free([device, host])
    return flag_s, backlog_s, busy_s


def rows_of(copies: int, mib: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    backend, rows = CudaBackend(), []
    for lane in (Lane.D2H, Lane.H2D):
        for size in mib:
            found: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
            for number in range(rounds):
                for gives in (True, False) if number % 2 else (False, True):
                    limit = cuda_work.GIVE_WAY_BYTES if gives else NEVER
                    found[gives].append(measure(backend, lane, copies, size * MIB, limit))
            for gives, times in found.items():
                flags_s, backlogs_s, busy_s = zip(*times, strict=True)
                rows.append(
                    {
                        "lane": lane.value,
                        "mib": size,
                        "copies": copies,
                        "gives_way": gives,
                        "flag_s": statistics.median(flags_s),
                        "backlog_s": statistics.median(backlogs_s),
                        "busy_s": statistics.median(busy_s),
                        "flag_s_all": flags_s,
                        "backlog_s_all": backlogs_s,
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--mib", default="32,64", help="size of each, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = rows_of(arguments.copies, [int(word) for word in arguments.mib.split(",")], arguments.rounds)
    if arguments.json is not None:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        facts = {
            "command": " ".join(sys.argv),
            "cuda_device_max_connections": connections,
            "machine": describe(),
            "give_way_bytes": cuda_work.GIVE_WAY_BYTES,
        }
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(f"{'lane':>5} {'MiB':>5} {'copies':>6} {'gives way':>9} {'flag ms':>9} {'backlog ms':>10} {'busy ms':>9}")
    for row in rows:
        print(
            f"{row['lane']:>5} {row['mib']:>5} {row['copies']:>6} {row['gives_way']!s:>9} {row['flag_s'] * 1e3:9.2f} "
            f"{row['backlog_s'] * 1e3:10.2f} {row['busy_s'] * 1e3:9.2f}"
        )


if __name__ == "__main__":
    main()
