"""How long a sequence a model can train on, by the memory model: predicted bytes by tokens and share of the state.

    python benchmarks/longest_sequence.py --model 8b --tokens 131072,262144 --json benchmarks/results/DATE-longest.json

One sequence per step, layers checkpointed with their inputs on the host, gradients on the device, state streamed: the
row `streamed:F+inputs` of step.py. For each length the share is the smallest, in twentieths, with which the device
fits; the wall is where the host then does not. Needs no GPU; what a run measured stands in step.py's results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hostward.core.placement import place_fraction
from hostward.plan.decisions import Choice, Keep
from hostward.plan.memory_model import STEADY_STEP, required
from predictions import workload
from training_row import CONTEXT_BYTES, SHAPES

from machine import describe

GIB = 1 << 30
PARTS = 20


def needs(model: str, tokens: int, part: int) -> dict[str, Any]:
    """Of a steady step with `part` twentieths of the state on the host."""
    work = workload(SHAPES[model], tokens, tokens)
    plan = place_fraction(work.inventory.buckets, part / PARTS, 1.0)
    keeps = (*(Keep.RECOMPUTE_OFFLOAD,) * (len(work.repeated) - 1), Keep.RECOMPUTE)
    found = required(work, Choice(tuple(b.placement for b in plan.buckets), keeps)).phase(STEADY_STEP)
    return {
        "tokens": tokens,
        "share_on_host": part / PARTS,
        "device_bytes": found.device_bytes + CONTEXT_BYTES,
        "pinned_bytes": found.pinned_bytes,
        "device_by_owner": dict(found.device),
        "pinned_by_owner": dict(found.pinned),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=list(SHAPES))
    parser.add_argument("--tokens", default="131072,196608,262144")
    parser.add_argument("--device-gib", type=float, default=139.8, help="an H200's")
    parser.add_argument("--host-gib", type=float, default=113.0, help="for pinned memory")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        tried = (needs(arguments.model, tokens, part) for part in range(PARTS + 1))
        row = next((r for r in tried if r["device_bytes"] <= arguments.device_gib * GIB), None)
        if row is None:
            rows.append({"tokens": tokens, "fits": False})
            continue
        row["fits"] = row["pinned_bytes"] <= arguments.host_gib * GIB
        rows.append(row)
        print(
            f"{tokens:>8} tokens, {row['share_on_host']:.2f} of the state on the host: device "
            f"{row['device_bytes'] / GIB:.1f} GiB, pinned {row['pinned_bytes'] / GIB:.1f} GiB, "
            f"{'fits' if row['fits'] else 'does not fit'}"
        )
    if arguments.json is not None:
        facts = {"command": " ".join(sys.argv), "machine": describe(), "model": arguments.model, "rows": rows}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
