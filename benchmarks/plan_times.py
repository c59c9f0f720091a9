"""What `hostward plan` takes for configurations of published models: seconds of the processor, and by the clock.

    python benchmarks/plan_times.py CONFIGS --json benchmarks/results/DATE-plan-times.json

CONFIGS has a folder with a config.json for each model. For each: the first plan, which traces the model, with an empty
cache; the plan for sequences of another length; and for 1, 4 and 8 GPUs together. One H100 by its shipped profile, 500
GiB of host memory for it and 1,000 for several. The predicted step is kept too, null where nothing fits. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from startup import timed

from machine import describe

SIZES = ["--batch", "1", "--micro-batch", "1", "--hardware", "h100"]
CASES = {
    "first": ["--seq", "4096", *SIZES, "--host-memory", "500GiB"],
    "another length": ["--seq", "2048", *SIZES, "--host-memory", "500GiB"],
    "1, 4 and 8 GPUs": [
        "--seq", "4096", "--batch", "8", *SIZES[2:], "--host-memory", "1000GiB", "--gpus", "1,4,8",
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    models = sorted(folder for folder in arguments.configs.iterdir() if (folder / "config.json").is_file())
    taken: dict[str, dict[str, list[tuple[float, float]]]] = {m.name: {case: [] for case in CASES} for m in models}
    predicted: dict[str, dict[str, float | None]] = {m.name: {} for m in models}
    for turn in range(arguments.rounds):
        for model in models:
            with tempfile.TemporaryDirectory() as cache:
                for case, words in CASES.items():
                    plan = Path(cache, "plan.json")
                    command = ["-m", "hostward", "plan", "--config", str(model), *words]
                    if case != "1, 4 and 8 GPUs":
                        command += ["--json", str(plan)]
                    taken[model.name][case].append(timed(command, Path(cache), codes=(0, 1)))
                    if turn == 0 and case != "1, 4 and 8 GPUs":
                        fits = plan.is_file()
                        predicted[model.name][case] = (
                            json.loads(plan.read_text())["predicted"]["step_s"] if fits else None
                        )
                        plan.unlink(missing_ok=True)
    rows: list[dict[str, Any]] = []
    for name, cases in taken.items():
        wall = {case: statistics.median(wall for wall, _ in values) for case, values in cases.items()}
        used = {case: statistics.median(used for _, used in values) for case, values in cases.items()}
        rows.append({"model": name, "processor_s": used, "median_s": wall, "predicted_step_s": predicted[name]})
        print(f"{name:16}", "  ".join(f"{case}: {used[case]:5.2f} s, clock {wall[case]:5.2f} s" for case in CASES))
    if arguments.json:
        result = {"benchmark": "plan times", "machine": describe(), "rounds": arguments.rounds, "models": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
