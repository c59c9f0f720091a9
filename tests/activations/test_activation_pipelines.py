"""Offloaded activations under the schedules of torch.distributed.pipelining: several microbatches in flight (H37, T47).

Two processes, gloo, no network. Zero-bubble unpacks a layer's input twice, once for its input's gradient and once for
its weight's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from forked import forkserver

import hostward
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
MICROBATCHES = 4
ORDERS = (Order(), Order(late=frozenset({Lane.D2H, Lane.H2D})), Order(seed=5))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def steps(schedule: str, rank: int, order: Order | None, num_layers: int = 0) -> tuple[list[torch.Tensor], int]:
    """Gradients of three steps on this rank, and host blocks that are left."""
    from torch.distributed import pipelining

    virtual = 2 if schedule.startswith("Interleaved") else 1
    torch.manual_seed(0)
    parts = [Stage() for _ in range(2 * virtual)]
    x, y = torch.randn(2 * MICROBATCHES, 8), torch.randn(2 * MICROBATCHES, 8)
    mine = [i for i in range(len(parts)) if i % 2 == rank]
    stages = [pipelining.PipelineStage(parts[i], i, len(parts), torch.device("cpu")) for i in mine]
    kind = getattr(pipelining, f"Schedule{schedule}")
    run = kind(stages if virtual > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    own = torch.nn.ModuleList(parts[i] for i in mine)
    attached = None
    if order is not None:
        attached = hostward.attach(
            own,
            activations=hostward.Activations(num_layers=num_layers, min_bytes=8),
            layers=[layer for i in mine for layer in parts[i].layers],
            backend=SimulatedBackend(threads=1, order=order),
        )
    found = []
    for _ in range(3):
        own.zero_grad()
        if rank == 0:
            run.step(x)
        else:
            run.step(target=y)
        found += [p.grad.clone() for p in own.parameters() if p.grad is not None]
    if attached is None:
        return found, 0
    attached.backend.synchronise()
    left = attached._arena.blocks_in_use
    assert attached.report().offloaded_bytes > 0
    attached.detach()
    return found, left


def run_rank(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    told = {}
    for schedule in SCHEDULES:
        expected, _ = steps(schedule, rank, None)
        layers = 6 if schedule.startswith("Interleaved") else 3
        for order, num_layers in zip(ORDERS, (1, layers - 1, layers - 1), strict=True):
            found, left = steps(schedule, rank, order, num_layers)
            same = len(found) == len(expected) and all(map(torch.equal, found, expected))
            told[f"{schedule} {order} {num_layers}"] = [same, left]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_t47_h37_pipelines_keep_their_gradients(tmp_path: Path) -> None:
    forkserver()  # has torch imported
    torch.multiprocessing.start_processes(run_rank, (str(tmp_path),), nprocs=2, start_method="forkserver")
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(told) == len(SCHEDULES) * len(ORDERS)
        assert {name: found for name, found in told.items() if found != [True, 0]} == {}
