"""Runs of the command line for tests: in this process, or as a process of its own where signals matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forked import Started

import hostward
from hostward.checkpoint import api
from hostward.optim.bucket_state import same_bits

ROOT = Path(__file__).resolve().parents[2]

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.moe_ffn_hidden_size=64",
    "model.num_moe_experts=4",
    "model.seq_length=64",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.device=cpu",
    "train.num_threads=1",
)
"""The tiny recipe, made tinier: two microbatches per step, 7 buckets, milliseconds per step. On the simulated device,
wherever the tests run. One thread, because two that wait for each other take seconds where another process has their
core."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left: exit code, both outputs, and its JSON where it wrote one."""

    code: int
    out: str
    err: str
    report: dict[str, Any]


def offloaded(fraction: float) -> list[str]:
    """The words that put `fraction` of the optimizer state on the host."""
    return ["optimizer.optimizer_cpu_offload=True", f"optimizer.optimizer_offload_fraction={fraction}"]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that imports the hostward of this one, without what a launcher may have left."""
    kept = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return {**kept, "PYTHONPATH": str(Path(hostward.__file__).parents[1]), "PYTHONUNBUFFERED": "1", **(extra or {})}


def run_process(command: Sequence[str], *, extra: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python *command` to its end."""
    return subprocess.run(
        [sys.executable, *command], env=environment(extra), cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def start_process(*command: str) -> Started:
    """Start `python *command`, which finds what training imports already there."""
    return Started(command, folder=ROOT, environment=environment())


def wait_for(process: Started, text: str) -> str:
    """Read stderr up to a line that holds `text`; returns what was read."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return "".join(seen)
    raise AssertionError(f"the process ended without {text!r}:\n{''.join(seen)}")


def read_json(path: Path) -> dict[str, Any]:
    """Strict JSON: NaN and Infinity, which Python alone reads, are refused."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{path} holds {word}, which is not JSON")

    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return content


def saved(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and plain values of the latest checkpoint in `directory`."""
    path = api.latest(directory)
    assert path is not None
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in api.tensor_index(path).items()}
    api.load(path, tensors)
    return tensors, api.read_plain(path)


def different(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that only one side has, or whose bits differ."""
    return sorted(
        n for n in mine.keys() | theirs.keys() if n not in mine or n not in theirs or not same_bits(mine[n], theirs[n])
    )


def iterations_saved(directory: Path) -> list[str]:
    """Folders of complete checkpoints, in order."""
    return sorted(p.name for p in directory.iterdir() if p.name.startswith("iter_"))
