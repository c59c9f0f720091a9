"""What Trainer costs with and without the integration, beside the bare loop of hostward, in one process.

    python benchmarks/trainer_integration.py --tokens 8192 32768 --json benchmarks/results/DATE-trainer.json

All optimizer state is offloaded, by the same options. `bare`: a loop with `accumulate(last=True)`. `integration`:
`offloading(Trainer)`, whose gradients leave in backward too. `unfiltered`: the same with
`logging_nan_inf_filter=False`, so that Trainer does not wait for each loss. `trainer`: Trainer with
`optimizers=(hostward.AdamW, None)`, which clips by itself, so that gradients leave at `step()`. Contenders take turns,
and each is made anew for each turn; seconds of a step are from its begin to the next one's, on the device's clock where
there is one. A ratio is the median over turns of the medians of one turn.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import hostward
from hostward.integrations.transformers import offloading
from training_row import SHAPES, build

from machine import describe

CONTENDERS = ("bare", "integration", "unfiltered", "trainer")
SETTINGS = {"lr": 1e-4, "weight_decay": 0.0}
SKIPPED = 5
"""First steps of a contender, which measure the machine and find how much memory backward leaves."""


class Clock(TrainerCallback):
    """Marks the begin of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.mark()

    def seconds(self) -> list[float]:
        """Of each step after the first ones."""
        pairs = itertools.pairwise(self.marks[SKIPPED:])
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) * 1e-3 for a, b in pairs]
        return [b - a for a, b in pairs]


def bare(model: Any, rows: list[dict[str, torch.Tensor]], batch: int, steps: int, clock: Clock) -> None:
    """Train as the README's loop does."""
    optimizer = hostward.AdamW(model, **SETTINGS, max_grad_norm=1.0, offload_fraction=1.0)
    for step in range(steps):
        clock.mark()
        ids = torch.stack([row["input_ids"] for row in rows[step * batch : (step + 1) * batch]]).to(clock.device)
        with optimizer.accumulate(last=True):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()


def by_trainer(
    name: str, model: Any, rows: list[dict[str, torch.Tensor]], batch: int, steps: int, clock: Clock
) -> None:
    """Train by Trainer, with the integration or without it."""
    optimizers: Any = (None, None)
    if name == "trainer":
        optimizers = (hostward.AdamW(model, **SETTINGS, offload_fraction=1.0), None)
    kind = Trainer if name == "trainer" else offloading(Trainer, offload_fraction=1.0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=SETTINGS["lr"],
            weight_decay=SETTINGS["weight_decay"], lr_scheduler_type="constant", max_grad_norm=1.0, report_to=[],
            disable_tqdm=True, logging_strategy="no", save_strategy="no", use_cpu=clock.device.type == "cpu",
            logging_nan_inf_filter=name != "unfiltered",
        )  # fmt: skip
        trainer = kind(model=model, args=args, train_dataset=rows, optimizers=optimizers, callbacks=[clock])
        trainer.train()
        trainer.optimizer.optimizer.wait()


def measured(name: str, arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Return seconds of each step of one contender, and its peak of allocated device memory in bytes."""
    device, shape = torch.device(arguments.device), SHAPES[arguments.model]
    torch.manual_seed(0)
    batch, steps = tokens // arguments.seq, SKIPPED + arguments.steps + 1
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, shape.vocab, (batch * steps, arguments.seq))]
    model, clock = build(shape, arguments.seq, device), Clock(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if name == "bare":
        bare(model, rows, batch, steps, clock)
    else:
        by_trainer(name, model, rows, batch, steps, clock)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"seconds": clock.seconds(), "peak_allocated_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of a step")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10, help="of each contender and turn that count")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="bare is needed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "trainer integration", "machine": describe(), "cases": []}
    for tokens in arguments.tokens:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contenders}
        for turn in range(arguments.turns):
            for name in arguments.contenders if turn % 2 == 0 else reversed(arguments.contenders):
                found[name].append(measured(name, arguments, tokens))
                gc.collect()
                if arguments.device == "cuda":
                    torch.cuda.empty_cache()
        turns = {name: [statistics.median(run["seconds"]) for run in runs] for name, runs in found.items()}
        medians = {name: statistics.median(values) for name, values in turns.items()}
        ratios = {
            name: statistics.median(mine / bare for mine, bare in zip(values, turns["bare"], strict=True))
            for name, values in turns.items()
        }
        result["cases"].append({"tokens": tokens, "median_s": medians, "ratio_to_bare": ratios, "runs": found})
        print(f"{tokens} tokens: " + ", ".join(f"{n} {medians[n]:.4f} s ({ratios[n]:.3f})" for n in medians))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
