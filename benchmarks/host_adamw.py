"""Parameters per second of the host AdamW step with each format of the state, beside a read-modify-write roof and
torch's CPU AdamW.

    python benchmarks/host_adamw.py --threads 1,2,4 --json benchmarks/results/2026-01-31-host-adamw.json

All contenders of one thread count run in the same process over huge pages, in alternating order, and the median
counts. The roof moves the same 26 bytes per parameter as a step with bf16 gradients, bf16 weights and a split master,
with one integer operation per stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hostward.core.inventory import Dtype, MasterKind, state_bytes_per_element, stored_elements
from hostward.core.placement import host_step_bytes
from hostward.kernels.cpu.adamw import AdamWRange, AdamWTask, adamw_step, bias_tables, hyper_array
from hostward.kernels.cpu.library import Isa, load
from hostward.kernels.cpu.norm import norm_partials
from hostward.optim.param_groups import checked_form
from hostward.runtime.backend import STATE_DTYPES
from hostward.runtime.pinned_memory import host_slab
from training_row import STATES

from machine import describe

LR, WEIGHT_DECAY, BETAS, EPS = 3e-4, 0.1, (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Contender:
    name: str
    isa: str | None
    step: Callable[[], object]
    bytes_per_parameter: int


def huge_tensor(elements: int, dtype: torch.dtype, threads: int) -> torch.Tensor:
    """Zeroed tensor in its own mapping, on huge pages where the system grants them, touched in parallel."""
    return host_slab(elements * dtype.itemsize, owner="host_adamw benchmark", threads=threads).view(dtype)


def fill(tensor: torch.Tensor, scale: float, seed: int) -> torch.Tensor:
    """Fills in place with a repeated pattern of normal numbers: drawing all of them takes longer than the benchmark."""
    pattern = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)) * scale
    for part in tensor.split(pattern.numel()):
        part.copy_(pattern[: part.numel()])
    return tensor


def hostward_contenders(elements: int, threads: int, isas: list[Isa]) -> list[Contender]:
    exp_avg, exp_avg_sq = (huge_tensor(elements, torch.float32, threads) for _ in range(2))
    weight = fill(huge_tensor(elements, torch.bfloat16, threads), 0.02, 0)
    grad = fill(huge_tensor(elements, torch.bfloat16, threads), 0.01, 1)
    remainder = huge_tensor(elements, torch.int16, threads)
    ranges = [AdamWRange(0, elements, grad, weight, np.zeros(1, dtype=np.int64))]
    contenders = []
    for isa in isas:
        task = AdamWTask(
            ranges,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            remainder=remainder,
            hyper=hyper_array(LR, WEIGHT_DECAY, *BETAS, EPS),
            tables=bias_tables(*BETAS, 1 << 16),
            threads=threads,
            isa=isa,
        )
        contenders.append(Contender("hostward", isa.name.lower(), lambda task=task: adamw_step(task), 26))
    contenders += [of_format(name, elements, threads, isas[-1], grad) for name in STATES]
    grad32 = fill(huge_tensor(elements, torch.float32, threads), 0.01, 1)
    for name, values in (("norm_bf16", grad), ("norm_fp32", grad32)):
        contenders.append(
            Contender(
                name, isas[-1].name.lower(), lambda g=values: norm_partials([g], threads=threads), values.element_size()
            )
        )
    # The roof gets memory of its own: its integer arithmetic would leave numbers that slow the others down.
    streams = [huge_tensor(elements, dtype, threads) for dtype in (torch.float32,) * 2 + (torch.int16,) * 3]
    pointers = np.array([stream.data_ptr() for stream in streams], dtype=np.int64)
    for prefetch in (0, 1):

        def roof(prefetch: int = prefetch, streams: list[torch.Tensor] = streams) -> None:
            del streams  # named only to keep the memory
            code = load().bench_rmw(pointers.ctypes.data, elements, threads, int(isas[-1]), prefetch)
            if code != 0:
                raise RuntimeError(f"hostward_bench_rmw failed with code {code}")

        contenders.append(Contender(f"roof, prefetch {prefetch}", isas[-1].name.lower(), roof, 26))
    return contenders


def of_format(name: str, elements: int, threads: int, isa: Isa, grad: torch.Tensor) -> Contender:
    """The step of a bf16 weight with a format of the state."""
    form = checked_form(dict(STATES[name]), use_torch_optimizer=False)
    kind = form.master_kind(Dtype.BF16)
    exp_avg, exp_avg_sq = (
        huge_tensor(stored_elements(dtype, elements), STATE_DTYPES[dtype], threads) for dtype in form.moments.values()
    )
    weight = fill(huge_tensor(elements, torch.bfloat16, threads), 0.02, 0)
    task = AdamWTask(
        [AdamWRange(0, elements, grad, weight, np.zeros(1, dtype=np.int64))],
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        remainder=huge_tensor(elements, torch.int16, threads) if kind is MasterKind.SPLIT else None,
        hyper=hyper_array(LR, WEIGHT_DECAY, *BETAS, EPS),
        tables=bias_tables(*BETAS, 1 << 16),
        threads=threads,
        isa=isa,
    )
    nbytes = host_step_bytes(state_bytes=state_bytes_per_element(kind, form), weight_bytes=2)
    return Contender(f"hostward {name}", isa.name.lower(), lambda: adamw_step(task), nbytes)


def torch_contenders(elements: int, threads: int) -> list[Contender]:
    parameter = torch.nn.Parameter(fill(huge_tensor(elements, torch.float32, threads), 0.02, 0))
    parameter.grad = fill(huge_tensor(elements, torch.float32, threads), 0.01, 1)
    weight16 = huge_tensor(elements, torch.bfloat16, threads)
    grad16 = fill(huge_tensor(elements, torch.bfloat16, threads), 0.01, 1)
    moments = {name: huge_tensor(elements, torch.float32, threads) for name in ("exp_avg", "exp_avg_sq")}
    optimizers = {}
    for kind in ("fused", "foreach"):
        optimizers[kind] = torch.optim.AdamW(
            [parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **{kind: True}
        )
        optimizers[kind].state[parameter] = {"step": torch.tensor(0.0), **moments}

    def with_casts() -> None:
        parameter.grad.copy_(grad16)
        optimizers["fused"].step()
        weight16.copy_(parameter.detach())

    return [
        Contender("torch fused", None, optimizers["fused"].step, 28),
        Contender("torch fused with both casts", None, with_casts, 40),
        Contender("torch foreach", None, optimizers["foreach"].step, 28),
    ]


def measure(contenders: list[Contender], rounds: int) -> list[list[float]]:
    """Seconds of each contender in each round; odd rounds run in reverse order."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for contender in contenders:
        contender.step()
    for round_index in range(rounds):
        order = range(len(contenders))
        for i in order if round_index % 2 == 0 else reversed(order):
            start = time.perf_counter()
            contenders[i].step()
            seconds[i].append(time.perf_counter() - start)
    return seconds


def run(elements: int, threads: int, isas: list[Isa], rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    contenders = hostward_contenders(elements, threads, isas) + torch_contenders(elements, threads)
    rows = []
    for contender, seconds in zip(contenders, measure(contenders, rounds), strict=True):
        median_s = statistics.median(seconds)
        rows.append(
            {
                "name": contender.name,
                "isa": contender.isa,
                "threads": threads,
                "parameters_per_s": elements / median_s,
                "bytes_per_s": elements * contender.bytes_per_parameter / median_s,
                "median_s": median_s,
                "min_s": min(seconds),
                "max_s": max(seconds),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1", help="thread counts, separated by commas")
    parser.add_argument("--elements", type=int, default=64 << 20, help="parameters; 100 bytes of memory each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    isas = list(load().supported_isas())
    rows: list[dict[str, Any]] = []
    for threads in (int(text) for text in arguments.threads.split(",")):
        rows += run(arguments.elements, threads, isas, arguments.rounds)
        for row in rows:
            if row["threads"] == threads:
                print(
                    f"{threads:4d} threads  {row['name']:28s} {row['isa'] or '':7s}"
                    f"{row['parameters_per_s'] / 1e9:8.3f} G parameters/s {row['bytes_per_s'] / 1e9:8.1f} GB/s",
                    flush=True,
                )
    if arguments.json is not None:
        result = {
            "benchmark": "host_adamw",
            "machine": describe(),
            "elements": arguments.elements,
            "rounds": arguments.rounds,
            "results": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
