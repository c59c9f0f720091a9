"""Device memory of several ranks: what the memory model predicts, and what torch counts, by how layers are divided.

    torchrun --nproc-per-node 2 benchmarks/ranks_memory.py --layers 4 --json benchmarks/results/DATE-ranks-memory.json

Layers of Qwen3-8B's sizes, all state on the host, each layer recomputed, for three steps.
Ranks that have no GPU of their own share one, and exchange through gloo: what a rank allocates is the same, and its
seconds say nothing. Columns: the case, microbatches, and of the first rank the predicted peak, the measured one, and
their ratio.

    whole           layers stay gathered from forward to backward
    one at a time   ddp.data_parallel_sharding_strategy=optim_grads_params
    away            the weights of all layers but the last leave
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.trainer import loop, setup

from machine import describe

RECIPE = "qwen3_8b_pretrain_config"
COMMON = (
    "train.micro_batch_size=1",
    "train.train_iters=3",
    "train.device=cuda",
    "dataset.format=mock",
    "model.vocab_size=32000",
    "model.recompute_granularity=full",
    "model.recompute_method=uniform",
    "model.recompute_num_layers=1",
    "optimizer.clip_grad=1.0",
    "optimizer.optimizer_cpu_offload=True",
    "optimizer.optimizer_offload_fraction=1.0",
)
ONE_AT_A_TIME = ("ddp.data_parallel_sharding_strategy=optim_grads_params",)
AWAY = (
    "model.cpu_offloading=True",
    "model.cpu_offloading_weights=True",
    "model.cpu_offloading_activations=False",
)
CASES = {"whole": (), "one at a time": ONE_AT_A_TIME, "whole, away": AWAY, "one at a time, away": ONE_AT_A_TIME + AWAY}


def measured(name: str, words: tuple[str, ...], microbatches: int, args: argparse.Namespace) -> dict[str, Any]:
    """One case: predicted and measured bytes of this rank."""
    sizes = [f"model.num_layers={args.layers}", f"model.seq_length={args.tokens}"]
    sizes += [f"train.global_batch_size={microbatches * dist.get_world_size()}"]
    sizes += [f"model.cpu_offloading_num_layers={args.layers - 1}"] if words[-len(AWAY) :] == AWAY else []
    run = setup.prepare(RECIPE, apply_overrides(recipes.load(RECIPE), [*COMMON, *sizes, *words]))
    torch.cuda.reset_peak_memory_stats()
    loop.train(run)
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated()
    predicted = run.predicted.device_peak_bytes if run.predicted is not None else None
    if run.attachment is not None:
        run.attachment.detach()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return {"case": name, "microbatches": microbatches, "predicted_bytes": predicted, "measured_bytes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if shared := torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rows: list[dict[str, Any]] = []
    for microbatches in args.microbatches:
        for name, words in CASES.items():
            rows.append(row := measured(name, words, microbatches, args))
            if dist.get_rank() == 0:
                ratio = f"{row['predicted_bytes'] / row['measured_bytes']:7.3f}" if row["predicted_bytes"] else ""
                sizes = "".join(f"{(row[k] or 0) / 1e9:8.2f} GB" for k in ("predicted_bytes", "measured_bytes"))
                print(f"{name:22}{microbatches:4}{sizes}{ratio}", flush=True)
                if args.json is not None:
                    head = {"machine": describe(), "ranks": dist.get_world_size(), "gpu_shared": shared}
                    args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
