"""The training behind the golden digests: public names alone, and values that no instruction set rounds in its own way.

Weights and gradients come from integers, each gradient element is a product with 1, and the optimizer's arithmetic is
the one that hostward.kernels.reference fixes bit for bit. So the digests do not depend on the machine: scalar, AVX2 and
AVX-512 code of torch and of the host kernels give the same ones. Losses are no part of them: torch.sum adds in an order
that depends on the machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import hostward

HERE = Path(__file__).parent
DIGESTS = HERE / "training-digests.json"
RESUMED = HERE / "checkpoint-digests.json"
PLAN = HERE / "plan-qwen3-moe-tiny.json"
REPORT = HERE / "run" / "report.json"

PLACEMENTS: Mapping[str, Mapping[str, float]] = {
    "device": {"offload_fraction": 0.0, "streamed_fraction": 0.0},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 0.6, "streamed_fraction": 0.5},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ACCUMULATION: Mapping[str, Mapping[str, Any]] = {
    "one microbatch": {},
    "two microbatches": {},
    "two microbatches on the host": {"gradients": "host"},
}
OPTIONS: Mapping[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}
STEPS, SAVED_STEPS, RESUMED_STEPS = 5, 3, 2
OVERFLOW_STEP = 2
"""Its gradients hold an infinity, so that the step is skipped."""

PLAN_COMMAND = (
    *("plan", "--recipe", "qwen3_moe_tiny_pretrain_config", "--hardware", "h100"),
    *("--device-memory", "230MiB", "--host-memory", "4GiB"),
)


def values(shape: torch.Size, seed: int) -> torch.Tensor:
    """fp32 values in (-1, 1) times a power of two: exact products of a congruential hash of position and seed."""
    position = torch.arange(shape.numel(), dtype=torch.int64)
    hashed = ((position + 1) * 2654435761 + seed * 40503) % 2**32
    hashed = (hashed ^ (hashed >> 15)) * 2246822519 % 2**32
    mantissa = ((hashed >> 8) - 2**23).to(torch.float32) / 2.0**23
    return (mantissa * torch.exp2((hashed % 11 - 8).to(torch.float32))).view(shape)


class Layer(torch.nn.Module):
    """A matrix and a bias whose gradients are what `forward` is given."""

    def __init__(self, width: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(values(torch.Size((width, width + 1)), seed).to(dtype))
        self.bias = torch.nn.Parameter(values(torch.Size((width,)), seed + 1).to(dtype))

    def forward(self, x: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for name, parameter in self.named_parameters():
            x = x + (parameter * gradients[name]).sum()
        return x


class Model(torch.nn.Module):
    """Four layers, each with buckets of its own. The derivative of `forward` by each parameter is given."""

    def __init__(self, dtype: torch.dtype, width: int = 24) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(width, 10 * (n + 1), dtype) for n in range(4))

    def forward(self, step: int, microbatch: int) -> torch.Tensor:
        x = torch.zeros((), dtype=self.layers[0].weight.dtype)
        for n, layer in enumerate(self.layers):
            gradients = {}
            for k, (name, p) in enumerate(layer.named_parameters()):
                gradients[name] = values(p.shape, 1000 * step + 100 * microbatch + 10 * n + k).to(p.dtype)
            if step == OVERFLOW_STEP and n == 1:
                gradients["bias"][3] = torch.inf
            x = layer(x, gradients)
        return x


def adamw(model: torch.nn.Module, **options: Any) -> hostward.AdamW:
    return hostward.AdamW(model, **OPTIONS, **options)


def train(model: Model, optimizer: hostward.AdamW, steps: Iterable[int], microbatches: int) -> list[str]:
    """Train, and return each step's gradient norm as C99 hexadecimal, "skipped" for a skipped step."""
    norms = []
    for step in steps:
        for microbatch in range(microbatches):
            with optimizer.accumulate(last=microbatch == microbatches - 1):
                model(step, microbatch).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append("skipped" if optimizer.last_step_skipped else optimizer.grad_norm.hex())
    return norms


def digests(model: Model, optimizer: hostward.AdamW) -> dict[str, str]:
    """sha256 over the bytes of all weights and of the state of each role, by name."""
    optimizer.wait()
    found = {"weight": {name: p.detach() for name, p in model.named_parameters()}}
    for name, entry in optimizer.state_dict()["state"].items():
        for role, value in entry.items():
            found.setdefault(role, {})[name] = value
    return {role: _digest(tensors) for role, tensors in sorted(found.items())}


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        whole.update(flat.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def trained(placement: str, dtype: str, accumulation: str) -> dict[str, Any]:
    """Norms and digests after `STEPS` steps."""
    model = Model(DTYPES[dtype])
    optimizer = adamw(model, **PLACEMENTS[placement], **ACCUMULATION[accumulation])
    norms = train(model, optimizer, range(STEPS), 1 if accumulation == "one microbatch" else 2)
    return {"grad_norms": norms, "sha256": digests(model, optimizer)}


def checkpoint_folder(dtype: str) -> Path:
    return HERE / f"checkpoint-{dtype}"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def text_of(report: str) -> str:
    """A report without the paths of the machine that wrote it."""
    return re.sub(r"(/[\w.-]+)+/run\b", "run", report)
