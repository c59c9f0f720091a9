"""A program for torchrun: sharded networks trained with their weights on the device and away. Its results are digests.

    torchrun --nproc-per-node 2 tests/gpu/sharded_weights_cases.py FOLDER

writes FOLDER/RANK.json: by name of a case, what the rank found. Ranks that have no GPU of their own share one, and
exchange through gloo: FSDP2's streams are those of several GPUs.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from attached_cases import SLEEP_CYCLES, churn, slow_fetches
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import hostward
from hostward.distributed import fsdp2

WIDTH = 1023
"""Odd: the last rank's parts are smaller, and padded."""
DEPTH = 6
ALL = hostward.Weights(min_elements=0)
ON_HOST = {"offload_fraction": 1.0, "streamed_fraction": 0.0}


class Block(torch.nn.Module):
    """Large weights and few tokens: fetches last longer than what they hide behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


class Net(torch.nn.Module):
    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(Block() for _ in range(DEPTH))
        self.layers.requires_grad_(trained)
        self.to("cuda", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.clone()


def sharded(mesh: DeviceMesh, *, trained: bool = True, fp32: bool = False, **options: Any) -> Any:
    net = Net(trained=trained)
    if fp32:
        net.float()
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
    return torch.randn(64, WIDTH, generator=generator, device="cuda").bfloat16()


def digest(tensors: list[torch.Tensor]) -> str:
    raw = b"".join(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(raw).hexdigest()[:16]


def trained(
    grid: DeviceMesh, *, away: bool, slow: bool = False, frozen: bool = False, copies: bool = False, **options: Any
) -> dict[str, Any]:
    """Bits after six steps of two microbatches, what was fetched, and the device's peak in the last three.

    Args:
        grid: of one column.
    """
    mesh = grid if copies else grid["copy"]
    net = sharded(mesh, trained=not frozen, **options)
    optimizer = hostward.AdamW(net, lr=1e-2, max_grad_norm=1.0, **ON_HOST)
    run = hostward.attach(net, optimizer, weights=ALL) if away else None
    if run is not None and slow:
        slow_fetches(run)
    norms = []
    for step in range(6):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for i in range(2):
            with optimizer.accumulate(last=i == 1):
                net(batch(2 * step + i)).float().square().mean().backward()
            churn()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.hex())
        with torch.no_grad():
            net(batch(step))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    report = None if run is None else run.report().weights
    if run is not None:
        run.detach()
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    optimizer.wait()
    torch.cuda.synchronize()
    found = {
        "bits": digest([fsdp2.part_of(p) for p in net.parameters()]),
        "norms": norms,
        "peak_bytes": peak,
        "parts_bytes": sum(fsdp2.part_of(p).nbytes for p in net.layers.parameters()),
    }
    if report is not None:
        found |= {name: getattr(report, f"{name}_bytes") for name in ("offloaded", "fetched", "on_demand", "held")}
    del net, optimizer, run
    gc.collect()
    return found


def stood_still(grid: DeviceMesh, *, slow: bool) -> dict[str, Any]:
    """Seconds in which the device stood still for weights, and in all, by a trace; how many fetches it has waited for,
    at least; and the least that each takes, if `slow`.
    """
    net = sharded(grid["copy"])
    optimizer = hostward.AdamW(net, lr=1e-2, max_grad_norm=1.0, **ON_HOST)
    run = hostward.attach(net, optimizer, weights=ALL)
    if slow:
        slow_fetches(run)

    def fetches() -> float:
        weights = run.report().weights
        assert weights is not None
        return (DEPTH - 1) * weights.fetched_bytes / weights.offloaded_bytes

    def train(steps: range) -> None:
        for step in steps:
            net(batch(step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(range(3))
    with optimizer.trace() as trace:
        train(range(3, 4))  # what comes before its first gradient is not timed
        before = fetches()
        train(range(4, 6))
        count = fetches() - before  # as many come before as are ahead of the next forward
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(SLEEP_CYCLES)
    end.record()
    torch.cuda.synchronize()
    summary = trace.summary()
    run.detach()
    return {
        "weights_s": summary.parts["weights of layers"].exposed_s,
        "all_s": summary.exposed_s,
        "fetches": count,
        "sleep_s": begin.elapsed_time(end) / 1e3,
        "gathers": torch.cuda.device_count() >= dist.get_world_size(),
    }


CASES: dict[str, dict[str, Any]] = {
    "resharded": {},
    "whole until backward": {"reshard_after_forward": False},
    "mixed precision": {"fp32": True},
    "frozen": {"frozen": True},
    "copies": {"copies": True},
}
"""`copies`: each rank has all of every parameter, and FSDP2 reduces over them (HSDP)."""


STOOD_STILL = "stood still"
"""What `stood_still` finds, in the place of a case."""


def main(folder: Path) -> None:
    ranks, alone = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count() < int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0 if alone else int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if alone else "cpu:gloo,cuda:nccl")
    if alone:
        os.environ["LOCAL_RANK"] = "0"  # the mesh chooses a device by it
    grid = init_device_mesh("cuda", (ranks, 1), mesh_dim_names=("copy", "shard"))
    found: dict[str, Any] = {}
    ways: dict[str, Callable[..., Any]] = {
        "here": lambda **options: trained(grid, away=False, **options),
        "away": lambda **options: trained(grid, away=True, **options),
        "slow": lambda **options: trained(grid, away=True, slow=True, **options),
    }
    for name, options in CASES.items():
        found[name] = {way: run(**options) for way, run in ways.items()}
    found[STOOD_STILL] = {"away": stood_still(grid, slow=False), "slow": stood_still(grid, slow=True)}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
