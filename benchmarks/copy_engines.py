"""What a small copy of somebody else waits for while a long one is under way (docs/decisions/0013-copies-in-turn.md).

    python benchmarks/copy_engines.py --json benchmarks/results/DATE-copy-engines.json

8 GiB are copied in each direction, in pieces that follow one another on one stream, or that go to two streams in turn,
each behind an event of the one before. Then --small copies of 4 KiB are enqueued on torch's current stream, each behind
the one before. Columns: seconds until the first of them is done, seconds of the slowest other one, and seconds of the
long copy. CUDA_DEVICE_MAX_CONNECTIONS is read by the driver when it starts: set it before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch

from hostward.core.units import MIB
from hostward.runtime.backend import Tier
from hostward.runtime.cuda.backend import CudaBackend

from machine import describe

MEMORY_BYTES, LONG_BYTES = 4096 * MIB, 8192 * MIB


class Copies:
    """A long copy and small ones, in either direction."""

    def __init__(self, small: int) -> None:
        backend = CudaBackend()
        (host,) = backend.allocate(Tier.HOST, [MEMORY_BYTES], torch.uint8, "benchmark", pinned=True)
        self._sides = {"host": host.data, "device": torch.empty(MEMORY_BYTES, dtype=torch.uint8, device="cuda")}
        self._small = {
            "host": torch.empty(4096, dtype=torch.uint8, pin_memory=True),
            "device": torch.empty(4096, dtype=torch.uint8, device="cuda"),
        }
        self._count = small
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._backend = backend

    def measure(self, direction: str, piece_bytes: int, in_turn: bool) -> dict[str, Any]:
        of, to = ("host", "device") if direction == "h2d" else ("device", "host")
        torch.cuda.synchronize()
        began = _recorded(self._streams[0])
        self._streams[1].wait_event(began)
        before: torch.cuda.Event | None = None
        for k in range(LONG_BYTES // piece_bytes):
            stream = self._streams[k % 2 if in_turn else 0]
            first = k * piece_bytes % MEMORY_BYTES
            with torch.cuda.stream(stream):
                if before is not None and in_turn:
                    stream.wait_event(before)
                part = slice(first, first + piece_bytes)
                self._sides[to][part].copy_(self._sides[of][part], non_blocking=True)
                before = _recorded(stream)
        ended = before
        smalls = []
        for _ in range(self._count):
            self._small[to].copy_(self._small[of], non_blocking=True)
            smalls.append(_recorded(torch.cuda.current_stream()))
        torch.cuda.synchronize()
        assert ended is not None
        others = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(smalls)]
        return {
            "direction": direction,
            "piece_bytes": piece_bytes,
            "streams": 2 if in_turn else 1,
            "first_small_s": began.elapsed_time(smalls[0]) / 1e3,
            "slowest_other_s": max(others),
            "long_s": began.elapsed_time(ended) / 1e3,
        }


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=20)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    copies, rows = Copies(a.small), []
    for _ in range(2):  # the second round counts: what the first sets up takes its own time
        rows = [
            copies.measure(direction, size * MIB, in_turn)
            for direction in ("h2d", "d2h")
            for size in (16, 64, 256)
            for in_turn in (False, True)
        ]
    for r in rows:
        print(
            f"{r['direction']} {r['piece_bytes'] // MIB:4} MiB on {r['streams']}: "
            f"first {r['first_small_s'] * 1e3:7.2f} ms, "
            f"slowest other {r['slowest_other_s'] * 1e3:7.2f} ms, long {r['long_s'] * 1e3:7.2f} ms"
        )
    if a.json is not None:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        result = {"benchmark": "copy_engines", "machine": describe(), "max_connections": connections, "rows": rows}
        a.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
