"""What resuming takes beyond training: the peak of resident host memory of a process that resumes, and its end.

    python benchmarks/resuming.py --json benchmarks/results/DATE-resuming.json
    python benchmarks/resuming.py --ranks 2 --options model.num_layers=4 --json FILE

One run saves after its second iteration; another process resumes from there, and trains two more. The peak is what the
system counted for the process (`ru_maxrss`: of several ranks the largest), the steady state the resident memory after
the last iteration. Both hold what Python and its libraries take. All state is offloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

RECIPE = "llama32_1b_pretrain_config"
OPTIONS = [
    "optimizer.optimizer_cpu_offload=True",
    "optimizer.optimizer_offload_fraction=1.0",
    "train.global_batch_size=1",
    "train.micro_batch_size=1",
    "dataset.format=mock",
    "scheduler.lr_decay_iters=4",
    "scheduler.lr_warmup_iters=0",
    "checkpoint.async_save=false",
]
SAVED_AT, LAST = 2, 4


def trained(arguments: argparse.Namespace, folder: Path, *words: str) -> dict[str, Any]:
    """One run: seconds, parameters, bytes of the process at their peak and after each iteration. Raises SystemExit."""
    command = [sys.executable, "-m"]
    if arguments.ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks), "-m"]
    run_options = [*OPTIONS, *arguments.options, f"checkpoint.save={folder / 'checkpoints'}"]
    command += ["hostward", "train", "--recipe", arguments.recipe, "--json", str(folder / "report.json"), *run_options]
    begun = time.perf_counter()
    with subprocess.Popen([*command, *words], stdout=sys.stderr) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"a run ended with exit code {process.returncode}")
    report = json.loads((folder / "report.json").read_text())
    resident = report["step_memory"]["host_resident_bytes"]
    return {
        "seconds": round(time.perf_counter() - begun, 1),
        "parameters": report["parameters"],
        "iterations": [report["first_iteration"], report["last_iteration"]],
        "losses": report["losses"],
        "host_bytes": report["measured"]["host_bytes"],
        "resident_bytes": resident,
        "peak_bytes": used.ru_maxrss * 1024,
        "peak_beyond_steady_bytes": used.ru_maxrss * 1024 - resident[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--options", nargs="+", default=[], help="of the recipe, besides those of all runs")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the checkpoint; default: the system's for temporary files")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        saving = trained(arguments, folder, f"train.train_iters={SAVED_AT}")
        resuming = trained(arguments, folder, f"train.train_iters={LAST}", f"checkpoint.load={folder / 'checkpoints'}")
    finally:
        shutil.rmtree(folder)
    found = {"benchmark": "resuming", "machine": describe(), "recipe": arguments.recipe, "ranks": arguments.ranks}
    found |= {"options": [*OPTIONS, *arguments.options], "saves": saving, "resumes": resuming}
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
