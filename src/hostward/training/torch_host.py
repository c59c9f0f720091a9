"""The host share stepped by torch.optim.AdamW, for `use_torch_optimizer_for_cpu_offload`.

Torch's kernels round differently (fused multiply-adds, a square root that is not correctly rounded), so the bits are
torch's own. The step runs on the calling thread, on fp32 masters; its moments are views of the same slabs, so
checkpoints do not differ.
"""

from __future__ import annotations

import torch

from hostward.engine.backend import AdamWOperands, Backend, Event, Scalars, Work
from hostward.schedule import Lane

from .state import rounded


class TorchHostStep(Work):
    """Steps a host bucket with torch.optim.AdamW, on the calling thread, between empty lanes."""

    __slots__ = ("_backend", "_operands", "_scalars")

    def __init__(self, backend: Backend, name: str, operands: AdamWOperands, scalars: Scalars, done: Event) -> None:
        super().__init__(name, Lane.HOST, done)
        self._backend = backend
        self._operands = operands
        self._scalars = scalars

    def issue(self) -> Event:
        """One step of every range, unless the skip flag is set; writes the rounded weights."""
        self._backend.synchronise()
        operands, scalars = self._operands, self._scalars
        if not int(scalars.skip.data.item()):
            _step(operands, scalars)
        return self.done


def _step(operands: AdamWOperands, scalars: Scalars) -> None:
    scale = scalars.scale.data
    hyper = operands.constants.hyper
    masters = operands.low.data if operands.low is not None else None
    for r in operands.ranges:
        span = slice(r.offset, r.offset + r.length)
        weight, gradient, count = r.weight.data, r.gradient.data, r.count.data
        master = weight if masters is None else masters[span]
        parameter = torch.nn.Parameter(master)
        parameter.grad = gradient.to(torch.float32) * scale
        optimizer = torch.optim.AdamW(
            [parameter],
            lr=hyper.lr,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            fused=True,
        )
        optimizer.state[parameter] = {
            "step": count.to(torch.float32).squeeze(),
            "exp_avg": operands.exp_avg.data[span],
            "exp_avg_sq": operands.exp_avg_sq.data[span],
        }
        optimizer.step()
        count += 1
        if masters is not None:
            weight.copy_(rounded(master, weight.dtype))
