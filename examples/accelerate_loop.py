"""Train in a loop of accelerate with all optimizer state offloaded: python examples/accelerate_loop.py

Needs pip install -c constraints.txt '.[accelerate]'; no GPU and no network. The loop below the one line is as
accelerate's own examples have it.
"""

import tempfile

import torch
from accelerate import Accelerator

from hostward.integrations.accelerate import offload

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
optimizer = offload(accelerator, optimizer, model, offload_fraction=1.0)  # the one line, before the scheduler
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
loader = torch.utils.data.DataLoader(torch.randn(40, 32), batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

with tempfile.TemporaryDirectory() as folder:
    for epoch in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
        accelerator.save_state(folder)
    accelerator.load_state(folder)
print(optimizer)
