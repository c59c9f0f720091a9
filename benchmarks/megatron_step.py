"""Time Megatron-Core's training step with its device optimizer, its hybrid optimizer and hostward, in one process.

    python benchmarks/megatron_step.py --tokens 8192 32768 --json benchmarks/results/DATE-megatron.json

A dense model of Megatron's local layers, bf16, one GPU, attention recomputed, gradients added up in fp32, Megatron's
distributed optimizer with both overlaps, clipping at 1. `device`: nothing offloaded. `hybrid`: Megatron's
HybridDeviceOptimizer at 100 % on torch's AdamW for CPUs, `hybrid-overlap` with overlap_cpu_optimizer_d2h_h2d.
`hostward-25`, `-50`, `-100`: the same flags after `hostward.integrations.megatron.use()`. Each contender is made anew
for each turn, and turns go through them in both orders. Seconds of a step are from its begin to the next one's, on the
device's clock; bytes are the peak that torch's allocator gave out, and the growth of this process's resident memory.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cases"))


from machine import describe

CONTENDERS = ("device", "hybrid", "hybrid-overlap", "hostward-25", "hostward-50", "hostward-100")
SHAPES = {
    "1.7b": {"num_layers": 28, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 16},
    "0.2b": {"num_layers": 12, "hidden_size": 1024, "ffn_hidden_size": 3072, "num_attention_heads": 16},
}
SKIPPED = 3
"""First steps of a contender."""


def resident_bytes() -> int:
    """Return the resident memory of this process, page-locked memory with it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def built(name: str, shape: str, seq: int) -> Any:
    """Return Megatron's model and optimizer as this contender has them."""
    import megatron_cases as cases

    import hostward.integrations.megatron as integration

    kind, _, percent = name.partition("-")
    flags: dict[str, Any] = {"clip_grad": 1.0}
    if kind != "device":
        flags |= {
            "offload_fraction": float(percent) / 100 if kind == "hostward" else 1.0,
            "use_precision_aware_optimizer": True,
            "overlap_cpu_optimizer_d2h_h2d": name != "hybrid",
        }
    model = {**SHAPES[shape], "recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    (integration.use if kind == "hostward" else integration.stop_using)()
    data = cases.Data(vocabulary=32_000, sequence=seq, rows=1)
    return cases.build("single", overlap=True, bucket_size=40_000_000, model=model, data=data, **flags)


def measured(name: str, arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Return seconds of each step, losses, and bytes of one contender."""
    import megatron_cases as cases

    torch.cuda.reset_peak_memory_stats()
    before = resident_bytes()
    run = built(name, arguments.model, arguments.seq)
    marks = []

    def mark(_: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)

    told = cases.train(run, SKIPPED + arguments.steps + 1, microbatches=tokens // arguments.seq, before_step=mark)
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks[SKIPPED:])]
    weights = sum(p.numel() for chunk in run.chunks for p in chunk.parameters())
    return {
        "seconds": seconds,
        "losses": told.losses,
        "parameters": weights,
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "host_bytes": resident_bytes() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of a step")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence, one in each microbatch")
    parser.add_argument("--steps", type=int, default=6, help="of each contender and turn that count")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="device is needed"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import megatron_cases as cases

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    result: dict[str, Any] = {"benchmark": "megatron", "machine": describe(), "cases": []}
    with cases.without_transformer_engine():
        for tokens in arguments.tokens:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contenders}
            for turn in range(arguments.turns):
                for name in arguments.contenders if turn % 2 == 0 else reversed(arguments.contenders):
                    found[name].append(measured(name, arguments, tokens))
                    gc.collect()
                    torch.cuda.empty_cache()
            medians = {n: statistics.median(s for run in runs for s in run["seconds"]) for n, runs in found.items()}
            ratios = {name: median / medians["device"] for name, median in medians.items()}
            case = {"tokens": tokens, "median_s": medians, "ratio_to_device": ratios, "runs": found}
            result["cases"].append(case)
            for name, median in medians.items():
                last = found[name][-1]
                gib = last["peak_device_bytes"] / 2**30, last["host_bytes"] / last["parameters"]
                loss = last["losses"][-1]
                print(
                    f"{tokens} tokens, {name}: {median:.4f} s ({ratios[name]:.3f}), "
                    f"{gib[0]:.1f} GiB of the device, {gib[1]:.1f} host bytes a parameter, loss {loss:.4f}",
                    flush=True,
                )
            if arguments.json is not None:  # also when a later length ends the run
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
