"""What the fence before weights costs: a step of the 1.74 B model, and the calling thread with 500 parameters.

    python benchmarks/fence.py --json benchmarks/results/DATE-fence.json

`step`: bf16 weights, checkpointed layers, a share of the state stepped on the host, with and without `fence` by turns
in one process, in blocks of iterations that follow one another without any synchronisation. `thread`: 250 Linears with
biases, tiny, so that the calling thread is what takes the time; with and without by turns in one process, processor
time of the calling thread in forward, backward, `step()` and `zero_grad()` together; and what it costs a program that
takes an average of the weights after each step, beside `optimizer.wait_for_weights()` and the same average without the
fence.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hostward
from training_row import SHAPES, build

from machine import describe

ITERATIONS = 8
ROUNDS = 8


class Large:
    """The model of the benchmarks, trained with or without the fence."""

    def __init__(self, *, fence: bool, fraction: float, tokens: int, seq: int, model_name: str) -> None:
        device = torch.device("cuda")
        torch.manual_seed(0)
        self.model = build(SHAPES[model_name], seq, device)
        self.optimizer = hostward.AdamW(
            self.model, lr=1e-4, max_grad_norm=1.0, offload_fraction=fraction, streamed_fraction=0.0, fence=fence
        )
        self.ids = torch.randint(0, SHAPES[model_name].vocab, (tokens // seq, seq), device=device)

    def seconds(self, iterations: int) -> list[float]:
        """Of each iteration but the first two, which follow another model's."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        for event in events:
            event.record()
            with self.optimizer.accumulate(last=True):
                self.model(input_ids=self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.optimizer.wait()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events[2:])]


def interval(ratios: list[float], rounds: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median of `ratios`, by drawing them again with replacement."""
    drawing = random.Random(0)
    medians = sorted(statistics.median(drawing.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[rounds // 40], medians[-rounds // 40]


def step_seconds(fraction: float, tokens: int, seq: int, model_name: str, pairs: int) -> dict[str, Any]:
    """Medians of blocks of iterations, with and without the fence by turns in one process."""
    models = {
        name: Large(fence=name == "with", fraction=fraction, tokens=tokens, seq=seq, model_name=model_name)
        for name in ("with", "without")
    }
    gc.collect()
    gc.disable()
    blocks: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(pairs + 1):
        for name in list(models) if turn % 2 else list(reversed(models)):
            seconds = models[name].seconds(ITERATIONS)
            if turn:
                blocks[name].append(statistics.median(seconds))
    gc.enable()
    medians = {name: statistics.median(found) for name, found in blocks.items()}
    ratios = [a / b for a, b in zip(blocks["with"], blocks["without"], strict=True)]
    found = {"blocks_s": blocks, "median_s": medians, "ratio": statistics.median(ratios), "ratios": ratios}
    return {**found, "interval_95": interval(ratios)}


class Small:
    """500 parameters, trained with or without the fence."""

    def __init__(self, *, fence: bool, device: torch.device, average: bool = False, arrive: bool = False) -> None:
        layers = [torch.nn.Linear(8, 8) for _ in range(250)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = hostward.AdamW(self.model, offload_fraction=1.0, streamed_fraction=0.0, fence=fence)
        self.x = torch.ones(2, 8, device=device)
        self.shadow = [torch.zeros_like(p) for p in self.model.parameters()] if average else []
        self.arrive = arrive

    def iterate(self) -> float:
        """Seconds of the calling thread's processor time in one iteration, with empty queues before."""
        self.optimizer.wait()
        start = time.thread_time()
        with self.optimizer.accumulate(last=True):
            self.model(self.x).sum().backward()
        self.optimizer.step()
        if self.arrive:
            self.optimizer.wait_for_weights()
        with torch.no_grad():
            for shadow, p in zip(self.shadow, self.model.parameters(), strict=False):
                shadow.lerp_(p, 0.1)
        self.optimizer.zero_grad()
        return time.thread_time() - start


def thread_seconds(device: torch.device) -> dict[str, dict[str, float]]:
    """Over iterations, the contenders by turns."""
    contenders = {
        "without": Small(fence=False, device=device),
        "with": Small(fence=True, device=device),
        "average, wait_for_weights() by hand": Small(fence=False, device=device, average=True, arrive=True),
        "average, with": Small(fence=True, device=device, average=True),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    for turn in range(ROUNDS * 5):
        order = list(contenders) if turn % 2 else list(reversed(contenders))
        for name in order:
            seconds = contenders[name].iterate()
            if turn >= ROUNDS:
                found[name].append(seconds)
    gc.enable()
    return {name: {"median": statistics.median(v), "least": min(v)} for name, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.0, 0.25, 1.0])
    parser.add_argument("--pairs", type=int, default=5, help="blocks of each contender that count")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the calling thread alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "fence", "machine": describe()}
    result["thread_s"] = thread_seconds(torch.device(arguments.device))
    both = result["thread_s"]["with"], result["thread_s"]["without"]
    result["thread_added_s"] = {key: both[0][key] - both[1][key] for key in both[0]}
    if arguments.device == "cuda":
        shape = {"tokens": arguments.tokens, "seq": arguments.seq, "model": arguments.model}
        result["step"] = [
            {"fraction": fraction, **shape, **step_seconds(fraction, *shape.values(), arguments.pairs)}
            for fraction in arguments.fractions
        ]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "machine"}, indent=1))


if __name__ == "__main__":
    main()
