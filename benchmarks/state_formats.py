"""What moments in bf16 do to the loss: the small recipe trained with fp32 moments, with moments in bf16 as hostward
stores them (rounded at random), with moments rounded to nearest, and with fp32 moments from another seed, which says
how far apart two equally good runs are.

    python benchmarks/state_formats.py --json benchmarks/results/DATE-state-formats.json

All runs but the last have the same seed, data and options. Rounded to nearest is emulated: moments of an fp32 state are
rounded after each step, which is what such a kernel would store.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe

BF16 = ["optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"]
RUNS: dict[str, tuple[list[str], bool]] = {
    "fp32": ([], False),
    "bf16": (BF16, False),
    "rounded to nearest": ([], True),
    "fp32, another seed": (["rng.seed=4321"], False),
}
"""Options, and whether moments are rounded to nearest."""
SETTINGS = ["optimizer.adam_beta2=0.999", "train.global_batch_size=1", "train.micro_batch_size=1"]
MEAN_OF = 100
"""Iterations over which losses are averaged."""

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
MAIN = "\nimport runpy\nrunpy.run_module('hostward', run_name='__main__', alter_sys=True)\n"


def run(iterations: int, name: str) -> list[float]:
    """The losses of one run."""
    options, nearest = RUNS[name]
    steps = [f"train.train_iters={iterations}", f"scheduler.lr_decay_iters={iterations}", "logger.log_interval=100"]
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--run-dir", folder, *SETTINGS, *steps, *options]
        command = [sys.executable, "-c", (NEAREST if nearest else "") + MAIN, *words]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
        losses: list[float] = json.loads((Path(folder) / "report.json").read_text())["losses"]
    return losses


def means(losses: list[float]) -> list[float]:
    return [sum(losses[i : i + MEAN_OF]) / MEAN_OF for i in range(0, len(losses) - MEAN_OF + 1, MEAN_OF)]


def compared(losses: dict[str, list[float]]) -> dict[str, Any]:
    """Averaged losses, and how far they are from those with fp32 moments: in the end, and at most."""
    averaged = {name: means(values) for name, values in losses.items()}
    apart = {name: [a - b for a, b in zip(values, averaged["fp32"], strict=True)] for name, values in averaged.items()}
    return {
        name: {
            "mean_losses": [round(value, 5) for value in averaged[name]],
            "last_minus_fp32": round(apart[name][-1], 5),
            "largest_distance": round(max(map(abs, apart[name])), 5),
        }
        for name in losses
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        losses = dict(zip(RUNS, pool.map(partial(run, arguments.iterations), RUNS), strict=True))
    found = {
        **describe(),
        "recipe": "qwen3_moe_tiny_pretrain_config",
        "options": SETTINGS,
        "iterations": arguments.iterations,
        "mean_of": MEAN_OF,
        "runs": compared(losses),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
