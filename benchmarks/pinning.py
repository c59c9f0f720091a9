"""Page-locked host memory: GiB/s and bytes taken, hostward's slabs beside torch's pinned allocator.

    python benchmarks/pinning.py --gib 1,4,16 --json benchmarks/results/DATE-pinning.json

Each allocation runs in a process of its own with the device's context made beforehand; all of them once with torch
first and once with hostward first. Before that one process touches as much memory as the largest allocation, so that a
machine whose memory grows as it is used has grown. `held_bytes` is what the allocator says that it took; `resident`,
`locked` and `pinned` are what the process gained by the kernel's books (VmRSS, VmLck, VmPin; drivers lock pages without
an entry in the last two on some kernels).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hostward.kernels.cpu.affinity import read_cpu_facts
from hostward.runtime.backend import Tier
from hostward.runtime.backend_choice import backend_for
from hostward.runtime.pinned_memory import host_slab

from machine import describe

GIB = 1 << 30
SMALL_BYTES = 4 << 20
CONTENDERS = ("torch", "hostward")
ORDERS = {"torch first": CONTENDERS, "hostward first": CONTENDERS[::-1]}
BOOKS = {"VmRSS": "resident_bytes", "VmLck": "locked_bytes", "VmPin": "kernel_pinned_bytes"}


def books() -> dict[str, int]:
    """Bytes of this process by the kernel's books."""
    rows = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {BOOKS[key]: int(rest.split()[0]) * 1024 for key, _, rest in rows if key in BOOKS}


def one(contender: str, size_bytes: int, device: torch.device) -> dict[str, Any]:
    """One allocation in this process."""
    on_gpu = device.type == "cuda"
    backend = backend_for(device, None)

    def allocate(nbytes: int) -> object:
        if contender == "torch":
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        return backend.allocate(Tier.HOST, [nbytes], torch.uint8, "pinning benchmark", pinned=True)

    def held() -> int:
        if contender == "torch":
            return int(torch.cuda.host_memory_stats()["allocated_bytes.current"]) if on_gpu else 0
        return backend.ledger.pinned_bytes

    torch.zeros(1, device=device)
    small = allocate(SMALL_BYTES)  # the first call makes the context and loads the libraries
    held_before, before = held(), books()
    started = time.perf_counter()
    large = allocate(size_bytes)
    seconds = time.perf_counter() - started
    held_bytes, after = held() - held_before, books()
    del small, large
    return {
        "contender": contender,
        "asked_bytes": size_bytes,
        "seconds": seconds,
        "gib_per_s": size_bytes / GIB / seconds,
        "held_bytes": held_bytes,
        "held_over_asked": held_bytes / size_bytes,
        **{key: after[key] - before.get(key, 0) for key in after},
        "resident_over_asked": (after["resident_bytes"] - before["resident_bytes"]) / size_bytes,
    }


def ratios(rows: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]]:
    """How many times faster hostward is, by order and size, and over all orders of a size."""
    found = []
    for size in sizes:
        by_order = {}
        for order in ORDERS:
            seconds = {r["contender"]: r["seconds"] for r in rows if r["order"] == order and r["asked_bytes"] == size}
            if len(seconds) == len(CONTENDERS):
                by_order[order] = seconds["torch"] / seconds["hostward"]
        if by_order:
            median = statistics.median(by_order.values())
            found.append({"asked_bytes": size, "times_faster": median, "by_order": by_order})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", default="1,4,16", help="sizes, separated by commas")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: smoke test, nothing is locked")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help="run one allocation (used by the program itself)")
    arguments = parser.parse_args()
    sizes = [int(float(text) * GIB) for text in arguments.gib.split(",")]
    if arguments.one is not None:
        print(json.dumps(one(arguments.one, sizes[0], torch.device(arguments.device))))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; --device cpu is a smoke test")
    host_slab(max(sizes), owner="first touch", threads=read_cpu_facts().affinity_cpus)  # and gone again
    rows: list[dict[str, Any]] = []
    for order, contenders in ORDERS.items():
        for size in sizes:
            for contender in contenders:
                words = [sys.executable, *sys.argv, "--one", contender, "--gib", repr(size / GIB)]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                row = {"order": order, **json.loads(done.stdout.splitlines()[-1])}
                rows.append(row)
                print(
                    f"{order:>15} {size / GIB:6.2f} GiB {contender:>9} {row['seconds']:8.3f} s {row['gib_per_s']:7.2f}"
                    f" GiB/s  held/asked {row['held_over_asked']:.4f}"
                    f"  resident/asked {row['resident_over_asked']:.4f}",
                    flush=True,
                )
    summary = ratios(rows, sizes)
    for entry in summary:
        print(f"{entry['asked_bytes'] / GIB:6.2f} GiB: {entry['times_faster']:.2f} times faster  {entry['by_order']}")
    if arguments.json:
        result = {"benchmark": "pinning", "machine": describe(), "rows": rows, "ratios": summary}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
