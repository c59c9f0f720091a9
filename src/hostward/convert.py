"""Convert optimizer state to and from the format of `torch.optim.AdamW`."""

from __future__ import annotations

from hostward.checkpoint.torch_adamw import from_torch_adamw as from_torch_adamw, to_torch_adamw as to_torch_adamw
