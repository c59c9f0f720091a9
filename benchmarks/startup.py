"""Start-up: `hostward --help`, and what `import hostward` adds to importing torch.

python benchmarks/startup.py --json benchmarks/results/DATE-startup.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import describe

COMMANDS = {
    "hostward --help": ["-m", "hostward", "--help"],
    "import torch": ["-c", "import torch"],
    "import torch, hostward": ["-c", "import torch, hostward"],
    "import torch, hostward.AdamW": ["-c", "import torch; from hostward import AdamW"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.rounds + 1):
        for name, words in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
    # The first round fills the file cache.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:32} {value:6.3f} s")
    if arguments.json:
        result = {"benchmark": "startup", "machine": describe(), "median_s": medians, "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
