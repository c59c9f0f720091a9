"""What each rank does in Lightning's Trainer, with DDP or FSDP2 around the model, and in a loop of Fabric."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hostward
from hostward.integrations.lightning import OffloadCallback, accumulate
from hostward.optim.offloaded_grad import OffloadedGrad
from hostward.runtime.simulated.backend import LATEST, SimulatedBackend

LIMIT = 0.05
"""Of the norm: every step is clipped."""


class Module(lightning.LightningModule):
    """Two Linears, and a record of what each rank saw: losses, norms, and in which steps gradients had left."""

    def __init__(self, fraction: float | None, *, sharded: bool = False, clips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 9))
        self.fraction, self.sharded, self.clips = fraction, sharded, clips
        self.losses: list[float] = []
        self.left: list[bool] = []
        self.alone = 0.0
        """The norm of this rank's gradient of the first microbatch, of which nothing has been reduced; 0 of shards."""

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        gradient = next(self.parameters()).grad
        if not self.left and not self.sharded:
            self.alone = gradient.norm().item()
        self.left.append(isinstance(gradient, OffloadedGrad))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.fraction is None:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        backend = SimulatedBackend(order=LATEST, threads=1)
        limit = LIMIT if self.clips else 0.0
        options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": limit, "backend": backend}
        return hostward.AdamW(self, offload_fraction=self.fraction, **options)


def trained(way: str, fraction: float | None) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[bool], float]:
    """Whole weights, this rank's losses, in which microbatches gradients had left at the end of backward, and
    `Module.alone`, after two epochs of seven microbatches in windows of three, three and one.

    Args:
        way: "ddp" or "fsdp2" in a Trainer, or "fabric". fraction: None is torch's AdamW.
    """
    warnings.simplefilter("ignore")  # Lightning's advice on workers and loggers
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # so that Lightning starts no processes
    module = Module(fraction, sharded=way == "fsdp2", clips=way == "fabric")
    data = torch.randn(7 * dist.get_world_size(), 9, generator=torch.Generator().manual_seed(1))
    rows = torch.utils.data.DataLoader(data)
    try:
        (_in_fabric if way == "fabric" else _in_trainer)(module, rows)
    finally:
        del os.environ["LOCAL_RANK"]
    weights = {
        name: (p.data.full_tensor() if isinstance(p.data, DTensor) else p.data.clone())
        for name, p in module.named_parameters()
    }
    return weights, torch.tensor(module.losses), module.left, module.alone


def _in_trainer(module: Module, rows: Any) -> None:
    size = dist.get_world_size()
    strategy = ModelParallelStrategy(size, 1) if module.sharded else "ddp"
    lightning.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_epochs=2, accumulate_grad_batches=3,
        gradient_clip_val=LIMIT, callbacks=[] if module.fraction is None else [OffloadCallback()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    ).fit(module, rows)  # fmt: skip


def _in_fabric(module: Module, rows: Any) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = fabric.setup_module(module.net)
    optimizer = fabric.setup_optimizers(module.configure_optimizers())
    batches = list(fabric.setup_dataloaders(rows)) * 2
    for number, batch in enumerate(batches):
        last = number % 7 in (2, 5, 6)
        inside = accumulate(fabric, model, optimizer, last=last) if module.fraction is not None else None
        with inside or fabric.no_backward_sync(model, enabled=not last):
            loss = (model(batch) - batch).square().mean()
            fabric.backward(loss / 3)
        module.losses.append(loss.item())
        module.on_after_backward()
        if last:
            if module.fraction is None:
                fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
            optimizer.step()
            optimizer.zero_grad()
