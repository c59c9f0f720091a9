"""Time Megatron-Core's training step with its device optimizer, its hybrid optimizer and hostward, in one run.

    python benchmarks/megatron_step.py --tokens 8192 32768 --json benchmarks/results/DATE-megatron.json
    torchrun --nproc-per-node 2 benchmarks/megatron_step.py ...          # data parallel

Megatron's local layers with torch's fused attention, bf16, gradients added up in fp32, Megatron's distributed optimizer
with both overlaps, clipping at 1. `device`: nothing offloaded, torch's fused AdamW. `hybrid`: Megatron's
HybridDeviceOptimizer at 100 % on torch's fused AdamW for CPUs, `hybrid-overlap` with overlap_cpu_optimizer_d2h_h2d.
`hostward-25`, `-50`, `-100`: the same flags after `hostward.integrations.megatron.use()`, `hostward-100-early` after
`use(step_early=...)`, which gains in steps that do not clip (`--clip-grad 1000`). Each turn of a contender is a
process of its own, and turns go through them in both orders. Seconds of a step are from its begin to the next one's, on
the device's clock; bytes are the peak that torch's allocator gave out on the first device, and the growth of the
resident memory of all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cases"))


from machine import describe

EARLY = {"streamed_fraction": 0.3, "step_early": 0.7}
CONTENDERS = ("device", "hybrid", "hybrid-overlap", "hostward-25", "hostward-50", "hostward-100", "hostward-100-early")
SHAPES = {
    "1.7b": {"num_layers": 28, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 16},
    "0.2b": {"num_layers": 12, "hidden_size": 1024, "ffn_hidden_size": 3072, "num_attention_heads": 16},
    "moe": {
        "num_layers": 12,
        "hidden_size": 1024,
        "ffn_hidden_size": 2816,
        "num_attention_heads": 16,
        "num_moe_experts": 16,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
    },
}
SKIPPED = 5
"""First steps of a contender, in which hostward's step tunes itself."""


class Attention(torch.nn.Module):
    """Causal attention that keeps no scores, as that of Transformer Engine, which need not be installed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Return (sequence, rows, heads * size) of three times (sequence, rows, heads, size)."""
        heads = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        return F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def resident_bytes() -> int:
    """Return the resident memory of this process, page-locked memory with it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def built(name: str, arguments: argparse.Namespace) -> Any:
    """Return Megatron's model and optimizer as this contender has them."""
    import megatron_cases as cases

    import hostward.integrations.megatron as integration

    kind, percent, *more = [*name.split("-"), ""]
    flags: dict[str, Any] = {"clip_grad": arguments.clip_grad}
    if kind != "device":
        flags |= {
            "offload_fraction": float(percent) / 100 if kind == "hostward" else 1.0,
            "use_precision_aware_optimizer": True,
            "overlap_cpu_optimizer_d2h_h2d": name != "hybrid",
        }
    model = {**SHAPES[arguments.model], "use_cpu_initialization": False, "perform_initialization": False}
    if kind == "hostward":
        integration.use(**(EARLY if "early" in more else {}))
    else:
        integration.stop_using()
    run = cases.build(
        cases.Layout(dist.get_world_size()),
        overlap=True,
        bucket_size=40_000_000,
        model=model,
        data=cases.Data(vocabulary=32_000, sequence=arguments.seq, rows=arguments.rows),
        attention=Attention,
        **flags,
    )
    if kind == "device":
        for part in cases.inner_optimizers(run):
            for group in part.param_groups:
                group["fused"], group["foreach"] = True, False
    return run


def measured(name: str, arguments: argparse.Namespace, tokens: int, port: int) -> dict[str, Any]:
    """Return seconds of each step, losses, and bytes of one contender, in a new process."""
    import megatron_cases as cases

    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # else torch looks for torchrun's own store at this port
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    dist.barrier()  # what NCCL needs of memory is not counted
    with cases.without_transformer_engine():
        told = _measured(name, arguments, tokens)
    dist.destroy_process_group()
    return told


def _measured(name: str, arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    import megatron_cases as cases

    before = resident_bytes()
    run = built(name, arguments)
    marks = []

    def mark(_: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)

    microbatches = tokens // (arguments.seq * arguments.rows) // dist.get_world_size()
    told = cases.train(run, SKIPPED + arguments.steps + 1, microbatches=microbatches, before_step=mark)
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks[SKIPPED:])]
    host = torch.tensor(resident_bytes() - before, device="cuda")
    dist.all_reduce(host)
    weights = sum(p.numel() for chunk in run.chunks for p in chunk.parameters())
    return {
        "seconds": seconds,
        "losses": told.losses,
        "parameters": weights,
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "host_bytes": int(host),
    }


def summary(tokens: int, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what one number of tokens showed, and print a line for each contender."""
    medians = {n: statistics.median(s for run in runs for s in run["seconds"]) for n, runs in found.items() if runs}
    ratios = {name: median / medians["device"] for name, median in medians.items() if "device" in medians}
    for name, median in medians.items():
        last = found[name][-1]
        gib = last["peak_device_bytes"] / 2**30, last["host_bytes"] / last["parameters"]
        print(
            f"{tokens} tokens, {name}: {median:.4f} s ({ratios.get(name, 0):.3f}), {gib[0]:.1f} GiB of the device, "
            f"{gib[1]:.1f} host bytes a parameter, loss {last['losses'][-1]:.4f}",
            flush=True,
        )
    return {"tokens": tokens, "median_s": medians, "ratio_to_device": ratios, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of a step, of all ranks")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--rows", type=int, default=1, help="sequences in a microbatch")
    parser.add_argument("--steps", type=int, default=6, help="of each contender and turn that count")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")  # importing Megatron-Core starts CUDA, which forks do not survive
    ports = itertools.count(int(os.environ.get("MASTER_PORT", "29400")) + 1)

    def alone(what: Callable[..., Any], *of: Any) -> Any:
        with spawn.Pool(1) as pool:
            return pool.apply(what, of)

    result: dict[str, Any] = {
        "benchmark": "megatron",
        "machine": alone(describe),
        "model": arguments.model,
        "rows": arguments.rows,
        "clip_grad": arguments.clip_grad,
        "cases": [],
    }
    for tokens in arguments.tokens:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contenders}
        result["cases"].append({})
        for turn in range(arguments.turns):
            for name in arguments.contenders if turn % 2 == 0 else reversed(arguments.contenders):
                found[name].append(alone(measured, name, arguments, tokens, next(ports)))
                if os.environ.get("RANK", "0") == "0":
                    result["cases"][-1] = summary(tokens, found)
                    if arguments.json is not None:  # so that a later one that fails leaves this
                        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
