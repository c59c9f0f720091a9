"""A program for torchrun: Muon and AdamW as one, of matrices that the ranks share. Its results are digests.

    torchrun --nproc-per-node 2 tests/gpu/combined_ranks.py FOLDER

writes FOLDER/RANK.json. Ranks that have no GPU of their own share one, and exchange through gloo.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hostward
from hostward.distributed import fsdp2

SHAPES = ((1023, 257), (257, 1023), (512, 512), (511, 256), (3, 640))
"""Tall and wide ones, with parts of other sizes on the last rank; a size of torch's kernels; few rows."""


def network(dtype: torch.dtype) -> torch.nn.Module:
    """Weights are matrices, biases are not."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(n, m) for m, n in SHAPES)).to("cuda", dtype)


def set_gradients(model: torch.nn.Module, step: int) -> None:
    for i, (name, p) in enumerate(model.named_parameters()):
        generator = torch.Generator("cuda").manual_seed(100 * step + i)
        whole = torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype)
        p.grad = fsdp2.like(fsdp2.layout_of(name, p).part(whole).clone(), p) if isinstance(p, DTensor) else whole


def optimizer_of(model: torch.nn.Module) -> hostward.CombinedOptimizer:
    params = list(model.parameters())
    muon = torch.optim.Muon([p for p in params if p.ndim == 2], lr=2e-2)
    return hostward.CombinedOptimizer(muon, torch.optim.AdamW([p for p in params if p.ndim != 2], lr=1e-2))


def whole(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor that ranks share by rows, or that this one has.

    `full_tensor()` is not for ranks that share a GPU: gloo reads the device's memory as if it were the host's
    (pytorch/pytorch issue 152645).
    """
    if isinstance(tensor, DTensor):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, tensor.to_local().cpu())
        tensor = torch.cat(parts)
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def train(model: torch.nn.Module, fraction: float, steps: int = 6) -> list[str]:
    """Digests of whole weights and momentum."""
    optimizer = optimizer_of(model)
    states = hostward.offload_optimizer_states(optimizer, fraction=fraction, chunk_size_mb=1)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    found = [whole(p) for p in model.parameters()]
    found += [whole(optimizer.state[p]["momentum_buffer"]) for p in model.parameters() if p.ndim == 2]
    assert bool(states.offloaded_bytes) is (fraction > 0)
    return found


def sharded(dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    model: Any = network(dtype)
    fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)), **options)
    return model  # type: ignore[no-any-return]


def refused() -> str:
    """What is said where FSDP2 offloads as well."""
    try:
        hostward.offload_optimizer_states(
            optimizer_of(sharded(torch.float32, offload_policy=CPUOffloadPolicy(pin_memory=False)))
        )
    except hostward.HostwardError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend, os.environ["LOCAL_RANK"] = "gloo", "0"  # the mesh chooses a device by it
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    found: dict[str, Any] = {"refused": refused()}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found[name] = {"one": train(network(dtype), 0.0)}
        found[name] |= {str(f): train(sharded(dtype), f) for f in (0.0, 0.5, 1.0)}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
