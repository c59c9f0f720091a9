"""Start-up: `hostward --help`, what `import hostward` adds to importing torch, and a whole `hostward plan` of a model
for the first time, beside the imports that it cannot do without, and again. Seconds by the clock and of the processor.
And of the planner alone, once everything is imported, for 80 layers.

    python benchmarks/startup.py --json benchmarks/results/DATE-startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from machine import describe

PLAN = ["-m", "hostward", "plan", "--recipe", "qwen3_30b_a3b_pretrain_config", "--hardware", "h200"]
DEEP = ["-m", "hostward", "plan", "--recipe", "qwen3_8b_pretrain_config", "--hardware", "h200"]
FIRST = "hostward plan, for the first time"
COMMANDS = {
    "hostward --help": ["-m", "hostward", "--help"],
    "import torch": ["-c", "import torch"],
    "import torch, hostward": ["-c", "import torch, hostward"],
    "import torch, hostward.AdamW": ["-c", "import torch; from hostward import AdamW"],
    "import torch, a model of transformers": ["-c", "import torch; from transformers import Qwen3MoeForCausalLM"],
    FIRST: PLAN,
    "hostward plan": PLAN,
    "hostward plan, less memory": [*PLAN, "--device-memory", "120GiB"],
    "hostward plan, 4 GPUs": [*PLAN, "--gpus", "4", "--host-memory", "512GiB"],
    "hostward plan, 1, 4 and 8 GPUs": [*PLAN, "--gpus", "1,4,8", "--host-memory", "512GiB"],
    "hostward plan, 80 layers on 8 GPUs": [*DEEP, "--gpus", "8", "--host-memory", "1TiB", "model.num_layers=80"],
}

PLANNER = """
import time, scipy.optimize
from hostward import recipes
from hostward.trainer.garbage_collection import gc_disabled
from hostward.plan.hardware_profile import profile
from hostward.config.overrides import apply_overrides
from hostward.plan.result import Question, answer, default_budgets
from hostward.plan.solver import Forced
from hostward.plan.rank_partition import required_of, sharded
from hostward.trainer.workload import usual_folder
from hostward.trainer.workload import recipe_workload
config = apply_overrides(recipes.load("qwen3_8b_pretrain_config"), ["model.num_layers=80"])
workload = sharded(recipe_workload(config, folder=usual_folder()), 8)
question = Question(workload, profile("h200"), 8, default_budgets(profile("h200"), 8), Forced())
with gc_disabled():  # as the command does
    start = time.perf_counter()
    answer(question, required_of(workload)).frontier.unbeaten()
    print(time.perf_counter() - start)
"""
"""Prints the seconds of the planner for 80 layers on 8 GPUs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    processor: dict[str, list[float]] = {name: [] for name in COMMANDS}
    planner: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds + 1):
            for name, words in COMMANDS.items():
                cache = Path(folder, f"first-{turn}" if name == FIRST else "kept")
                wall_s, processor_s = timed(words, cache)
                times[name].append(wall_s)
                processor[name].append(processor_s)
            planner.append(planner_s(Path(folder, "kept")))
    # The first round fills the file cache.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    used = {name: statistics.median(values[1:]) for name, values in processor.items()}
    for name, value in medians.items():
        print(f"{name:38} {value:6.3f} s, {used[name]:6.3f} s of the processor")
    alone_s = statistics.median(planner[1:])
    print(f"{'the planner alone, 80 layers on 8 GPUs':38} {alone_s:6.3f} s")
    if arguments.json:
        result = {
            "benchmark": "startup",
            "machine": describe(),
            "median_s": medians,
            "processor_s": used,
            "planner_alone_s": alone_s,
            "rounds": arguments.rounds,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def timed(words: list[str], cache: Path, codes: Collection[int] = (0,)) -> tuple[float, float]:
    """Seconds by the clock and of the processor of `python *words`, with this cache folder.

    Raises RuntimeError if it exits with none of `codes`.
    """
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, env=environment)
    if done.returncode not in codes:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1000:]}")
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def planner_s(cache: Path) -> float:
    """Seconds that `PLANNER` prints, with this cache folder."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", PLANNER]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


if __name__ == "__main__":
    main()
