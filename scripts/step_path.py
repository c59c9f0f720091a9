"""The path of one training step through the source: which files are entered, and how often execution changes file.

    python scripts/step_path.py [--json FILE] [--calls]

A model of six buckets is trained at placement host on the simulated backend, without its race checker. After a warm-up,
one iteration (forward, backward within `accumulate(last=True)`, step, zero_grad and the next forward) runs under
`sys.setprofile`. A switch is a call of a function of hostward whose file is not that of the call before. `--calls` also
prints the pairs of files between which most switches happen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

import hostward
from hostward.runtime.simulated import backend as simulated

ROOT = str(Path(hostward.__file__).parent) + os.sep
WARM_UP = 4


class _Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class _Model(torch.nn.Module):
    """An embedding, four numbered layers and a head: six buckets."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(width, width)
        self.layers = torch.nn.ModuleList([_Layer(width) for _ in range(4)])
        self.head = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


def _without_race_checker() -> None:
    """Operations are neither stamped nor compared."""
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    for name in ("ByteRule", "LaneClocks"):
        setattr(simulated, name, lambda: SimpleNamespace(check=nothing, clear=nothing, stamp=nothing, join_all=nothing))


class _Path:
    """Files of hostward in the order in which they are called."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            self.files.append(name.removeprefix(ROOT))
            self.calls[f"{self.files[-1]}:{frame.f_code.co_qualname}"] += 1

    def switches(self) -> Counter[tuple[str, str]]:
        pairs = zip(self.files, self.files[1:], strict=False)
        return Counter((before, after) for before, after in pairs if before != after)


def measure() -> _Path:
    """The path of one iteration after the warm-up."""
    _without_race_checker()
    torch.manual_seed(0)
    model, batch = _Model(), torch.randn(4, 8)
    backend = simulated.SimulatedBackend(threads=1)
    optimizer = hostward.AdamW(model, lr=1e-3, max_grad_norm=1.0, offload_fraction=1.0, streamed_fraction=0.0,
                               backend=backend)  # fmt: skip
    if len(optimizer.plan.buckets) != 6:
        raise SystemExit(f"expected 6 buckets, the plan has {len(optimizer.plan.buckets)}")

    def iterate() -> None:
        with optimizer.accumulate(last=True):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        iterate()
    path = _Path()
    sys.setprofile(path)
    iterate()
    model(batch)
    sys.setprofile(None)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--calls", action="store_true", help="also print pairs of files and functions by count")
    options = parser.parse_args()
    path = measure()
    switches = path.switches()
    found = {"files": len(set(path.files)), "switches": switches.total(), "calls": len(path.files)}
    print(f"{found['files']} files, {found['switches']} switches between files, {found['calls']} calls")
    if options.calls:
        for name, count in Counter(path.files).most_common():
            print(f"{count:6} {name}")
        for (before, after), count in switches.most_common(50):
            print(f"{count:6} {before} -> {after}")
        for call, count in path.calls.most_common(70):
            print(f"{count:6} {call}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
