"""Train a sharded model with optimizer state offloaded: torchrun --nproc-per-node 2 examples/fsdp2_loop.py.

Plain `python` runs it in one process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hostward.integrations.fsdp2_loops import build_optimizers

MICROBATCHES = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_parts() -> list[torch.nn.Module]:
    layers = [
        torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU(), torch.nn.Linear(256, 16)) for _ in range(2)
    ]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    return [model]


def main() -> list[float]:
    torch.manual_seed(0)
    parts = model_parts()
    # Instead of an OptimizersContainer of torch.optim.AdamW:
    optimizers = build_optimizers(parts, lr=3e-3, weight_decay=0.1, max_grad_norm=1.0, offload_fraction=1.0)
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=10) for o in optimizers]
    losses = []
    for _ in range(100):
        optimizers.zero_grad()
        for i in range(MICROBATCHES):
            batch = torch.randn(32, 16, device=DEVICE)
            with optimizers.accumulate(last=i == MICROBATCHES - 1):  # around forward and backward
                loss = torch.nn.functional.mse_loss(parts[0](batch), batch.flip(1))
                (loss / MICROBATCHES).backward()
        losses.append(loss.item())
        optimizers.step()  # clips: clip_grad_norm_ goes
        for scheduler in schedulers:
            scheduler.step()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, norm of the last gradients {optimizers.grad_norm:.3f}")
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        losses = main()
    finally:
        dist.destroy_process_group()
