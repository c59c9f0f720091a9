"""One loss scale on all stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hostward.errors import ModelError


class StagesScaler(torch.amp.GradScaler):
    """A gradient scaler that looks at the gradients of all stages of a model: their scales rise and fall together.

    torch's own does it where `AdamW(stages=...)` has taken all gradients in backward, since the norm, which is over all
    stages, then looks for it. Gradients that are still in `.grad` it sees on its own stage alone.
    """

    def __init__(self, device: str, stages: dist.ProcessGroup, **options: Any) -> None:
        """`device`: its type. `stages`: those that the optimizer has. `options`: as of `torch.amp.GradScaler`."""
        super().__init__(device, **options)
        self._stages = stages

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A stage without gradients takes part, too.
        dist.all_reduce(found.setdefault(found_inf.device, found_inf), op=dist.ReduceOp.MAX, group=self._stages)
        optimizer.looked_at_over = self._stages  # type: ignore[attr-defined]
        return found


def require_one_scale(optimizer: object, stages: object, *, taken: bool) -> None:
    """Raises ModelError where a gradient scaler has looked at the gradients of one of several `stages` alone.

    Args:
        taken: some of them had left `.grad`, so that the scaler is told what the norm over all stages finds.
    """
    looked = getattr(optimizer, "found_inf", None) is not None
    together = vars(optimizer).pop("looked_at_over", None) is stages  # for this step alone
    if stages is None or not looked or taken or together:
        return
    raise ModelError(
        "a gradient scaler has looked at the gradients of one stage of a pipeline alone",
        why="a step that overflows on one stage is skipped on all, and the loss scales of the others would not follow",
        fix="optimizer.accumulate(last=True) around the last backward, without overlap=False, or "
        "hostward.training.scaling.StagesScaler(device, stages) in place of torch.amp.GradScaler(device)",
    )
