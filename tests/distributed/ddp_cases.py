"""What each rank does with a model in DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import MIXES, Net, snapshot
from torch.nn.parallel import DistributedDataParallel

import hostward
from hostward.errors import ModelError
from hostward.runtime.simulated.backend import SimulatedBackend


def trained(
    mix: str,
    *,
    context: bool,
    static: bool = False,
    no_sync: bool = False,
    wrapped_first: bool = False,
    forward_outside: bool = False,
    bucket_views: bool = False,
    **options: Any,
) -> dict[str, str]:
    """Bits of weights and state after three steps of two microbatches. `forward_outside`: of the context."""
    model = Net()
    ways = {"static_graph": static, "gradient_as_bucket_view": bucket_views}
    wrapped = DistributedDataParallel(model, **ways) if wrapped_first else None
    settings = {"max_grad_norm": 0.5, **MIXES[mix], **options}
    optimizer = hostward.AdamW(wrapped or model, lr=1e-2, backend=SimulatedBackend(threads=1), **settings)
    ddp = wrapped or DistributedDataParallel(model, **ways)
    for step in range(3):
        optimizer.zero_grad()
        for i in range(2):
            generator = torch.Generator().manual_seed(10 * step + 4 * i + dist.get_rank())
            tokens = torch.randint(0, 50, (4,), generator=generator)
            inside = optimizer.accumulate(last=i == 1) if context else nullcontext()
            with ddp.no_sync() if no_sync and i == 0 else nullcontext():
                if forward_outside:
                    loss = ddp(tokens).square().mean()
                    with inside:
                        loss.backward()
                else:
                    with inside:
                        ddp(tokens).square().mean().backward()
        optimizer.step()
    return snapshot(model, optimizer)


def refused(*, context: bool) -> str:
    try:
        trained("host", context=context, gradients="host")
    except ModelError as error:
        return str(error)
    return "nothing was refused"
