"""What fewer bytes of state do to the loss: a recipe in bf16, trained from several seeds with each format.

    python benchmarks/state_formats.py --seeds 4 --json benchmarks/results/DATE-state-formats.json
    python benchmarks/state_formats.py --recipe llama32_1b_pretrain_config --iterations 200 --mean-of 50 \\
        --options model.vocab_size=None model.seq_length=2048 --seeds 2 --json FILE

A seed is that of the first weights, so runs of one seed differ in the format alone; how far apart runs of one format
are says how far apart two equally good runs are. Moments rounded to nearest are emulated: moments of an fp32 state are
rounded after each step, which is what such a kernel would store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import describe

MOMENTS = ["optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"]
FP8 = ["optimizer.exp_avg_dtype=fp8", "optimizer.exp_avg_sq_dtype=fp8"]
MAIN = ["optimizer.main_params_dtype=bf16"]
FORMATS: dict[str, tuple[list[str], bool]] = {
    "fp32": ([], False),
    "bf16 moments": (MOMENTS, False),
    "bf16 exp_avg": (MOMENTS[:1], False),
    "bf16 exp_avg_sq": (MOMENTS[1:], False),
    "bf16 moments to nearest": ([], True),
    "bf16 main weights": (MAIN, False),
    "bf16 moments and main weights": ([*MOMENTS, *MAIN], False),
    "fp8 moments": (FP8, False),
    "fp8 moments, bf16 main weights": ([*FP8, *MAIN], False),
}
"""Options, and whether moments are rounded to nearest."""
SETTINGS = [
    "model.params_dtype=bf16",
    "optimizer.adam_beta2=0.999",
    "train.global_batch_size=1",
    "train.micro_batch_size=1",
]
FIRST_SEED = 1234

NEAREST = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

def rounded(optimizer, *_):
    optimizer.wait()
    for state in optimizer._states:
        for moment in (state.exp_avg.data, state.exp_avg_sq.data):
            moment.copy_(moment.to(torch.bfloat16))

register_optimizer_step_post_hook(rounded)
"""
PROGRAM = "\nimport runpy\nrunpy.run_module('hostward', run_name='__main__', alter_sys=True)\n"


def run(arguments: argparse.Namespace, name: str, seed: int, device: int) -> list[float]:
    """The losses of one run, which sees one of the GPUs if there are any."""
    options, nearest = FORMATS[name]
    iterations = arguments.iterations
    steps = [f"train.train_iters={iterations}", f"scheduler.lr_decay_iters={iterations}", "logger.log_interval=100"]
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--recipe", arguments.recipe, "--run-dir", folder, *SETTINGS, *arguments.options, *steps]
        words += [f"rng.seed={seed}", *options]
        command = [sys.executable, "-c", (NEAREST if nearest else "") + PROGRAM, *words]
        seen = {"CUDA_VISIBLE_DEVICES": str(device)} if arguments.gpus else {}
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1", **seen})
        losses: list[float] = json.loads((Path(folder) / "report.json").read_text())["losses"]
    return losses


def means(losses: list[float], mean_of: int) -> list[float]:
    return [fmean(losses[i : i + mean_of]) for i in range(0, len(losses) - mean_of + 1, mean_of)]


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and standard deviation over seeds, and the values."""
    return {
        "mean": round(fmean(values), 5),
        "deviation": round(stdev(values), 5) if len(values) > 1 else None,
        "by_seed": [round(value, 5) for value in values],
    }


def compared(losses: dict[str, list[list[float]]], mean_of: int) -> dict[str, Any]:
    """By format: the last mean loss, and its distance from fp32 of the same seed, over seeds; and the means of each."""
    averaged = {name: [means(values, mean_of) for values in seeds] for name, seeds in losses.items()}
    pairs = {name: list(zip(seeds, averaged["fp32"], strict=True)) for name, seeds in averaged.items()}
    return {
        name: {
            "last": spread([of_seed[-1] for of_seed in averaged[name]]),
            "last_minus_fp32": spread([a[-1] - b[-1] for a, b in pairs[name]]),
            "all_minus_fp32": spread([fmean(a) - fmean(b) for a, b in pairs[name]]),
            "mean_losses": [[round(value, 5) for value in of_seed] for of_seed in averaged[name]],
        }
        for name in losses
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="qwen3_moe_tiny_pretrain_config")
    parser.add_argument("--options", nargs="+", default=[], help="of the recipe, besides those of all runs")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--mean-of", type=int, default=100, help="iterations over which losses are averaged")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), choices=FORMATS, help="fp32 is always among them"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--gpus", type=int, default=0, help="each run takes the next of so many; 0: as the recipe says")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    names = list(dict.fromkeys(["fp32", *arguments.formats]))
    turns = itertools.count()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        runs = {
            n: [pool.submit(run, arguments, n, seed, next(turns) % max(arguments.gpus, 1)) for seed in seeds]
            for n in names
        }
        losses = {name: [each.result() for each in of_name] for name, of_name in runs.items()}
    found = {
        **describe(),
        "recipe": arguments.recipe,
        "options": [*SETTINGS, *arguments.options],
        "iterations": arguments.iterations,
        "mean_of": arguments.mean_of,
        "seeds": list(seeds),
        "formats": compared(losses, arguments.mean_of),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
