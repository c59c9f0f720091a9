"""One loss scale on all stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hostward.errors import ModelError


class StagesScaler(torch.amp.GradScaler):
    """A gradient scaler that looks at the gradients of all stages of a model: their scales rise and fall together.

    torch's own sees those of its own stage. Where all of these have left in backward, the norm over all stages tells
    it; whether they have may differ from stage to stage, and then one would refuse a step that the others take.
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


def require_one_scale(optimizer: object, stages: object) -> None:
    """Raises ModelError where a gradient scaler has looked at the gradients of one of several `stages` alone."""
    looked = getattr(optimizer, "found_inf", None) is not None
    together = vars(optimizer).pop("looked_at_over", None) is stages  # for this step alone
    if stages is None or not looked or together:
        return
    raise ModelError(
        "a gradient scaler has looked at the gradients of one stage of a pipeline alone",
        why="a step that overflows on one stage is skipped on all, and the loss scales of the others would not follow",
        fix="hostward.training.scaling.StagesScaler(device, stages) in place of torch.amp.GradScaler(device)",
    )
