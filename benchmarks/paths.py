"""What the paths of the optimizer step reach, beside the roofs of the machine measured in the same process.

    python benchmarks/paths.py --json benchmarks/results/DATE-paths.json

Roofs: pinned copies H2D and D2H alone and both at once; a read-modify-write loop over the host memory that a step
touches (26 bytes per parameter), alone and while copies fill both directions of the link. What the host's memory moves
in that last run, copies included, is the mixed roof.

Paths: `hostward.AdamW` over a synthetic bf16 module whose gradients are set, from step() to wait(): all of the state
stepped on the host (host:1), all of it streamed through the device (streamed:1), mixtures of both (mixS:1: share S is
streamed), and the mixture that hostward chooses (auto:1). `latency_s` is one step alone, its filling and draining
included; `period_s` is one of several steps that follow one another. Shares of a roof are of the period.

    bytes per parameter       link, each way     host memory
    host:1                    2                  26 by the cores + 4 by copies
    streamed:1                10                 20 by copies

At the end the cost per parameter over sizes of the module, with the time that enqueueing takes for each bucket.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hostward
from hostward.core.host_limits import host_memory, resident_bytes
from hostward.errors import HostwardError, MemoryLimitError
from hostward.runtime.backend_choice import backend_for
from roofs import measure_roofs, roof_parameters_per_s
from training_row import row_options

from machine import describe

LAYERS, COLUMNS = 64, 4096


class Layer(torch.nn.Module):
    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        weight = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device=device)
        self.weight = torch.nn.Parameter(weight.normal_(std=0.02))


@dataclass
class Driver:
    """An optimizer over a synthetic module, and gradients that are set before every step."""

    optimizer: Any
    weights: list[torch.nn.Parameter]
    gradients: list[torch.Tensor]

    def set_gradients(self) -> None:
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = gradient

    def latency(self) -> tuple[float, float]:
        """One step from empty lanes: seconds of the call, seconds until everything has arrived."""
        self.set_gradients()
        synchronise()
        started = time.perf_counter()
        self.optimizer.step()
        called = time.perf_counter()
        self.optimizer.wait()
        synchronise()
        ended = time.perf_counter()
        self.optimizer.zero_grad()
        return called - started, ended - started

    def period(self, steps: int) -> float:
        """Seconds of each of `steps` steps without a pause between."""
        synchronise()
        started = time.perf_counter()
        for _ in range(steps):
            self.set_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.optimizer.wait()
        synchronise()
        return (time.perf_counter() - started) / steps


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_path(name: str, numel: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """One row: a path (`host:1`, ...) over a module of about `numel` parameters."""
    options = row_options(name)
    if options is None:
        raise ValueError(f"{name!r} is no path of hostward")
    rows = max(1, numel // (LAYERS * COLUMNS))
    model = torch.nn.ModuleList(Layer(rows, device) for _ in range(LAYERS))
    started = time.perf_counter()
    optimizer = hostward.AdamW(
        model,
        lr=1e-4,
        max_grad_norm=1.0,
        offload_fraction=options.fraction,
        streamed_fraction=options.streamed,
        overlap=options.overlap,
        host_threads=options.threads,
    )
    setup_s = time.perf_counter() - started
    weights = list(model.parameters())
    driver = Driver(optimizer, weights, [torch.empty_like(w).normal_(std=0.01) for w in weights])
    for _ in range(2):
        driver.latency()
    copied = dict(optimizer.backend.ledger.copied_bytes)
    timed = [driver.latency() for _ in range(rounds)]
    per_step = {
        lane.value: (total - copied.get(lane, 0)) / rounds
        for lane, total in optimizer.backend.ledger.copied_bytes.items()
    }
    period_s = statistics.median(driver.period(4) for _ in range(2))
    plan, count = optimizer.plan, sum(w.numel() for w in weights)
    latency_s = statistics.median(seconds for _, seconds in timed)
    enqueue_s = statistics.median(seconds for seconds, _ in timed)
    places = {
        place: sum(b.numel for b in plan.buckets if b.placement == place) for place in ("device", "host", "streamed")
    }
    return {
        "path": name,
        "status": "ok",
        "parameters": count,
        "placed_parameters": places,
        "buckets": len(plan.buckets),
        "setup_s": setup_s,
        "latency_s": latency_s,
        "latency_s_all": [seconds for _, seconds in timed],
        "latency_parameters_per_s": count / latency_s,
        "period_s": period_s,
        "parameters_per_s": count / period_s,
        "per_parameter_ns": period_s / count * 1e9,
        "enqueue_s": enqueue_s,
        "enqueue_per_bucket_s": enqueue_s / len(plan.buckets),
        "copied_bytes_per_step": per_step,
        "link_bytes_per_s": {
            direction: sum(n for lane, n in per_step.items() if lane.endswith(direction)) / period_s
            for direction in ("h2d", "d2h")
        },
        "pinned_bytes": optimizer.backend.ledger.pinned_bytes,
        "backend": dict(optimizer.backend.describe()),
    }


def measured_path(name: str, numel: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """`measure_path`, with memory given back afterwards; a size that does not fit is a row that says so."""
    # 10 bytes of state, and gradient and weight for what is stepped on the host.
    needed_bytes = numel * (10 if name.startswith("streamed") else 14 if name.startswith("host") else 12)
    row = {"path": name, "parameters": numel, "status": "skipped"}
    if needed_bytes > 0.92 * host_memory().available_bytes:
        return row | {"why": f"about {needed_bytes:,} bytes of host memory needed"}
    try:
        row = measure_path(name, numel, device, rounds)
    except MemoryLimitError as error:
        row |= {"status": "out of memory", "why": str(error)}
    except HostwardError as error:
        row |= {"status": "failed", "why": str(error)}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row | {"resident_after_bytes": resident_bytes()}


def add_shares(row: dict[str, Any], roofs: dict[str, Any]) -> None:
    """Shares of the roofs of this run, in place."""
    if row["status"] != "ok" or not roofs:
        return
    streamed = row["placed_parameters"]["streamed"] / row["parameters"]
    row["streamed_share"] = streamed
    row["roof_parameters_per_s"] = roof_parameters_per_s(roofs, streamed)
    row["share_of_own_roof"] = row["parameters_per_s"] / row["roof_parameters_per_s"]
    row["share_of_mixed_roof"] = row["parameters_per_s"] / roofs["mixed_parameters_per_s"]
    row["share_of_link"] = {
        direction: rate / roofs["duplex_each_way_bytes_per_s"] for direction, rate in row["link_bytes_per_s"].items()
    }


def verdict(rows: list[dict[str, Any]], linear: list[dict[str, Any]]) -> dict[str, Any]:
    """What the paths have to reach, each beside what was reached."""
    done = {row["path"]: row for row in rows if row["status"] == "ok"}
    host, streamed, auto = (done.get(name) for name in ("host:1", "streamed:1", "auto:1"))
    mixes = [row for name, row in done.items() if name not in ("host:1", "streamed:1")]
    best = max(mixes, key=lambda row: row["parameters_per_s"], default=None)
    found: dict[str, Any] = {
        "host_parameters_per_s": {"wanted": 4.6e9, "reached": host and host["parameters_per_s"]},
        "streamed_share_of_link": {
            "wanted": 0.95,
            "reached": streamed and min(streamed["share_of_link"].values(), default=None)
            if streamed and "share_of_link" in streamed
            else None,
        },
        "mix_share_of_mixed_roof": {"wanted": 0.90, "reached": best and best.get("share_of_mixed_roof")},
        "auto_over_best_mix": auto and best and auto["parameters_per_s"] / best["parameters_per_s"],
        "mix_over_either_alone": None,
        "enqueue_per_bucket_s": {
            "wanted": 40e-6,
            "reached": max(
                (r["enqueue_per_bucket_s"] for r in [*done.values(), *linear] if r["status"] == "ok"), default=None
            ),
        },
    }
    if best and host and streamed:
        alone = max(host["parameters_per_s"], streamed["parameters_per_s"])
        found["mix_over_either_alone"] = best["parameters_per_s"] / alone
    for path in sorted({row["path"] for row in linear}):
        costs = [row["per_parameter_ns"] for row in linear if row["path"] == path and row["status"] == "ok"]
        if costs:
            spread = max(costs) / min(costs) - 1
            found[f"cost_spread {path}"] = {"wanted": 0.10, "reached": spread, "sizes": len(costs)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=2e9, help="of the synthetic module")
    parser.add_argument("--paths", default="host:1,streamed:1,auto:1,mix0.3:1,mix0.5:1,mix0.6:1,mix0.7:1,mix0.8:1")
    parser.add_argument(
        "--linear", default="0.5e9,1e9,2e9,4e9,8e9", help="parameters, separated by commas; '' for none"
    )
    parser.add_argument("--linear-paths", default="auto:1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: smoke test, without roofs")
    parser.add_argument("--time-limit-s", type=float, default=3600.0, help="paths that would start later are skipped")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.time_limit_s
    device = torch.device(arguments.device)
    result: dict[str, Any] = {"benchmark": "paths", "machine": describe(), "roofs": {}, "paths": [], "linear": []}

    def take(place: str, measure: Callable[[], dict[str, Any]]) -> None:
        row = measure() if time.monotonic() < ends else {"path": "-", "status": "skipped", "why": "no time left"}
        add_shares(row, result["roofs"])
        result[place].append(row)
        print_row(row)
        save()

    def save() -> None:
        result["verdict"] = verdict(result["paths"], result["linear"])
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    if device.type == "cuda":
        facts = backend_for(device, None).describe()
        result["roofs"] = measure_roofs(int(str(facts["host_threads"])), result["machine"]["cpus"])
        print(json.dumps({k: v for k, v in result["roofs"].items() if not isinstance(v, dict)}, indent=1), flush=True)
        save()
    for name in arguments.paths.split(","):
        take("paths", lambda name=name: measured_path(name, int(arguments.parameters), device, arguments.rounds))
    for size in filter(None, arguments.linear.split(",")):
        for name in arguments.linear_paths.split(","):
            take("linear", lambda name=name, n=int(float(size)): measured_path(name, n, device, arguments.rounds))
    print(json.dumps(result["verdict"], indent=1))


def print_row(row: dict[str, Any]) -> None:
    if row["status"] != "ok":
        print(f"{row['path']:>12} {row['status']}: {row['why']}", flush=True)
        return
    shares = "".join(
        f"  {label} {row[key] * 100:5.1f} %"
        for label, key in (("own roof", "share_of_own_roof"), ("mixed roof", "share_of_mixed_roof"))
        if key in row
    )
    link = " ".join(f"{name} {rate / 1e9:.1f}" for name, rate in row["link_bytes_per_s"].items())
    print(
        f"{row['path']:>12} {row['parameters'] / 1e9:6.2f} G  {row['parameters_per_s'] / 1e9:6.3f} G/s (alone "
        f"{row['latency_parameters_per_s'] / 1e9:6.3f})  {row['enqueue_per_bucket_s'] * 1e6:6.1f} us/bucket x "
        f"{row['buckets']}  link {link} GB/s{shares}",
        flush=True,
    )


if __name__ == "__main__":
    main()
