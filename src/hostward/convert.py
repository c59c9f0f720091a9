"""Convert optimizer state: to and from the format of `torch.optim.AdamW`, and to fewer bytes."""

from __future__ import annotations

from hostward.checkpoint.rounding import rounded as rounded
from hostward.checkpoint.torch_adamw import from_torch_adamw as from_torch_adamw, to_torch_adamw as to_torch_adamw
