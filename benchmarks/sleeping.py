"""Sleep and wake of a model on one GPU: seconds, the share of the link's rate, and what torch and the driver count.

    python benchmarks/sleeping.py --parameters-b 4 --json benchmarks/results/DATE-sleeping.json

A stack of linear layers in bf16 with AdamW makes one step. Then each set of kinds sleeps and wakes: once for the first
time, which pins, and --naps times more. The rate of the link is measured by the same program before, one direction at a
time. Columns: bytes that leave, seconds of the first sleep; medians over the naps of the seconds of sleep and wake, and
of these bytes over these seconds as a share of the link; bytes that torch and the driver say were freed. Gradients are
in `.grad` when they sleep: the optimizer has `overlap=False`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hostward
from hostward.runtime.calibrate import Links

from machine import describe

KINDS: dict[str, tuple[str, ...]] = {
    "state": ("state",),
    "weights": ("weights",),
    "gradients": ("gradients",),
    "all": ("state", "gradients", "weights"),
}


def stack(parameters: int, width: int) -> torch.nn.Module:
    layers = max(1, round(parameters / width**2))
    with torch.device("cuda"):
        made = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
    return torch.nn.Sequential(*made)


def backward(model: torch.nn.Module, width: int) -> None:
    model(torch.randn(8, width, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()


def timed(optimizer: hostward.AdamW, kinds: tuple[str, ...]) -> tuple[Any, float, float]:
    """Return the report of one sleep, and the seconds of sleep and wake."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    report = optimizer.sleep(kinds)
    slept_s = time.perf_counter()
    optimizer.wake()
    return report, slept_s - start_s, time.perf_counter() - slept_s


def measure(optimizer: hostward.AdamW, name: str, naps: int, rates: dict[str, float]) -> dict[str, Any]:
    report, first_s, _ = timed(optimizer, KINDS[name])
    nbytes = sum(report.freed_bytes.values())
    later = [timed(optimizer, KINDS[name]) for _ in range(naps)]
    sleep_s, wake_s = (statistics.median(row[i] for row in later) for i in (1, 2))
    last = later[-1][0]
    return {
        "kinds": name, "bytes": nbytes, "first_sleep_s": first_s, "pinned_by_first_bytes": report.pinned_now_bytes,
        "sleep_s": sleep_s, "wake_s": wake_s, "pinned_by_last_bytes": last.pinned_now_bytes,
        "sleep_of_link": nbytes / sleep_s / rates["d2h"], "wake_of_link": nbytes / wake_s / rates["h2d"],
        "torch_freed_bytes": last.torch_freed_bytes, "driver_freed_bytes": last.driver_freed_bytes,
        "stays": [vars_of(stays) for stays in last.stays],
    }  # fmt: skip


def vars_of(stays: Any) -> dict[str, Any]:
    return {name: getattr(stays, name) for name in ("kind", "name", "nbytes", "why")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters-b", type=float, default=2.0, help="billions of parameters")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--fraction", type=float, default=0.0, help="offload_fraction")
    parser.add_argument("--naps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    model = stack(int(args.parameters_b * 1e9), args.width)
    optimizer = hostward.AdamW(model, offload_fraction=args.fraction, overlap=False)
    links = Links(optimizer.backend)
    rates = {name: links.rate([name]) for name in ("d2h", "h2d")}
    del links
    backward(model, args.width)
    optimizer.step()
    optimizer.wait()
    print(f"link: {rates['d2h'] / 1e9:.1f} GB/s to the host, {rates['h2d'] / 1e9:.1f} GB/s to the GPU")
    print(
        f"{'kinds':12}{'GB':>8}{'first s':>9}{'sleep s':>9}{'wake s':>9}{'of link':>9}{'of link':>9}{'driver GB':>11}"
    )
    rows = []
    for name in KINDS:
        row = measure(optimizer, name, args.naps, rates)
        rows.append(row)
        seconds = f"{row['first_sleep_s']:9.3f}{row['sleep_s']:9.3f}{row['wake_s']:9.3f}"
        shares = f"{row['sleep_of_link']:9.3f}{row['wake_of_link']:9.3f}"
        print(f"{name:12}{row['bytes'] / 1e9:8.2f}{seconds}{shares}{row['driver_freed_bytes'] / 1e9:11.2f}", flush=True)
    if args.json is not None:
        parameters = sum(p.numel() for p in model.parameters())
        head = {"machine": describe(), "parameters": parameters, "link_bytes_per_s": rates}
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
