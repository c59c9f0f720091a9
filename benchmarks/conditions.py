"""Writes the last section of docs/benchmarks.md: date, machine, versions and command of each result file named there.

python benchmarks/conditions.py docs/benchmarks.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TITLE = "## Conditions of each run"
GIB = 1 << 30


def with_conditions(page: str) -> str:
    """Return the page with the table of its result files made anew; the text above that table stays."""
    above, title, below = page.partition(TITLE)
    introduction = below.partition("\n| ")[0].rstrip()
    names = sorted(set(re.findall(r"results/([\w.-]+\.json)", above)))
    rows = [row_of(name, json.loads((RESULTS / name).read_text(encoding="utf-8"))) for name in names]
    head = ["| file | date | machine | torch, transformers | command |", "|---|---|---|---|---|"]
    return above + title + introduction + "\n\n" + "\n".join([*head, *rows]) + "\n"


def row_of(name: str, result: dict[str, Any]) -> str:
    """Return the row of one result file, whether of a benchmark or of `hostward train` and `hostward verify`."""
    machine = result.get("machine") or {}
    conditions = machine if "command" in machine else result
    versions = conditions.get("packages") or conditions["versions"]
    # The part of the command that only names this file again says nothing.
    command = re.sub(r" --json \S+", "", conditions["command"]).replace("|", "\\|")
    cells = [
        f"[{name.removesuffix('.json')}](../benchmarks/results/{name})",
        conditions["date"][:10],
        machine_of(machine, result.get("host") or {}),
        ", ".join(versions[package] for package in ("torch", "transformers") if package in versions),
        f"`{command}`",
    ]
    return f"| {' | '.join(cells)} |"


def machine_of(machine: dict[str, Any], host: dict[str, Any]) -> str:
    """Return GPUs, CPUs and host memory, as far as the file has them."""
    devices = [device["name"] for device in machine.get("devices", [])] or [machine.get("device")]
    gpus = f"{len(devices)} × {devices[0]}" if len(devices) > 1 else devices[0]
    cpus, nbytes = (machine.get(key) or host.get(key) for key in ("cpus", "memory_bytes"))
    words = [gpus, f"{cpus} CPUs" if cpus else None, f"{nbytes / GIB:.0f} GiB" if nbytes else None]
    return ", ".join(word for word in words if word)


def main() -> None:
    """Rewrite the page."""
    path = Path(sys.argv[1])
    path.write_text(with_conditions(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
