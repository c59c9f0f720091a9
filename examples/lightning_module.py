"""Train under Lightning with optimizer state offloaded: python examples/lightning_module.py

Needs pip install -c constraints.txt '.[lightning]'; no GPU and no network.
"""

from __future__ import annotations

import lightning
import torch

import hostward
from hostward.integrations.lightning import OffloadCallback


class Reverse(lightning.LightningModule):
    """Learns to write a row of numbers backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU(), torch.nn.Linear(256, 16))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch), batch.flip(1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return hostward.AdamW(self, lr=3e-3, offload_fraction=1.0)


if __name__ == "__main__":
    lightning.seed_everything(0)
    module = Reverse()
    trainer = lightning.Trainer(
        max_epochs=6,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[OffloadCallback()],  # the line to add
        accelerator="auto",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(1024, 16), batch_size=32))
    losses = module.losses
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
