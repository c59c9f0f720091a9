"""Train in a loop of Fabric with optimizer state offloaded: python examples/fabric_loop.py

Needs pip install -c constraints.txt '.[lightning]'; no GPU and no network.
"""

from __future__ import annotations

import lightning
import torch

import hostward
from hostward.integrations.lightning import accumulate

MICROBATCHES = 2


def main() -> list[float]:
    fabric = lightning.Fabric(accelerator="auto", devices=1, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU(), torch.nn.Linear(256, 16))
    model = fabric.setup_module(net)  # moves the weights: the optimizer comes after
    optimizer = fabric.setup_optimizers(hostward.AdamW(model.module, lr=3e-3, max_grad_norm=1.0, offload_fraction=1.0))
    losses = []
    for _ in range(100):
        for i in range(MICROBATCHES):
            batch = torch.randn(32, 16, device=fabric.device)
            with accumulate(fabric, model, optimizer, last=i == MICROBATCHES - 1):  # the line to add
                loss = torch.nn.functional.mse_loss(model(batch), batch.flip(1))
                fabric.backward(loss / MICROBATCHES)
        losses.append(loss.item())
        optimizer.step()  # clips
        optimizer.zero_grad()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, norm of the last gradients {optimizer.grad_norm:.3f}")
    return losses


if __name__ == "__main__":
    losses = main()
