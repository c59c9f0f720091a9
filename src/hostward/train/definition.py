"""The kernels of this machine against the definition of the step: what `hostward verify` checks besides the runs."""

from __future__ import annotations

import numpy as np
import torch

from hostward.host import reference
from hostward.host.adamw import bias_tables
from hostward.plan import Placement
from hostward.training.optimizer import AdamW
from hostward.training.state import same_bits

_ELEMENTS = 100_003
_STEPS = 3


def differing_role(device: torch.device, dtype: torch.dtype, placement: Placement) -> str | None:
    """The first of exp_avg, exp_avg_sq, master and weight that numpy makes differently of the same gradients, or None.

    Three clipped steps of one tensor of `dtype` on `device`, all its buckets at `placement`.
    """
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(_ELEMENTS, generator=generator).to(dtype)
    parameter = torch.nn.Parameter(start.to(device))
    hyper = reference.Hyper(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    optimizer = AdamW(
        [("w", parameter)],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        max_grad_norm=1.0,
        offload_fraction=1.0 if placement.offloaded else 0.0,
        streamed_fraction=1.0 if placement is Placement.STREAMED else 0.0,
    )
    tables = bias_tables(hyper.beta1, hyper.beta2, 16)
    master = start.float().numpy().copy()
    exp_avg, exp_avg_sq = np.zeros_like(master), np.zeros_like(master)
    for step in range(1, _STEPS + 1):
        gradient = torch.randn(_ELEMENTS, generator=generator).to(dtype)
        parameter.grad = gradient.to(device)
        optimizer.step()
        flat = gradient.float().numpy()
        norm, _ = reference.norm_from_partials(*reference.norm_partials(flat))
        scale = float(reference.clip_scale(float(norm), 1.0))
        master, exp_avg, exp_avg_sq = reference.adamw(master, exp_avg, exp_avg_sq, flat, step, hyper, tables, scale)
    optimizer.wait()
    state = optimizer.state_dict()["state"]["w"]
    expected = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master}
    for role, value in expected.items():
        if role in state and not same_bits(state[role], torch.from_numpy(value)):
            return role
    weight = master
    if dtype is torch.bfloat16:
        weight = reference.bf16_bits(master).view(np.int16)
    elif dtype is torch.float16:
        weight = reference.fp16_weight(master)
    held = parameter.detach().cpu()
    held = held.view(torch.int16) if dtype is torch.bfloat16 else held
    return None if same_bits(held, torch.from_numpy(np.ascontiguousarray(weight))) else "weight"
