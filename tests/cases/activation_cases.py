"""Networks of several kinds, trained with and without offloading of what backward needs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import hostward
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

STEPS = 3
LANES = (Lane.D2H, Lane.H2D, Lane.COMPUTE)
ORDERS = [
    Order(),
    Order(eager=True),
    *[Order(late=frozenset(lane for i, lane in enumerate(LANES) if mask >> i & 1)) for mask in range(1, 8)],
    Order(seed=1),
    Order(seed=2),
]
FEW = [Order(eager=True), Order(late=frozenset(LANES)), Order(late=frozenset({Lane.D2H})), Order(seed=3)]
Batch = Callable[[int], Any]


def transformer(kind: str, **options: Any) -> torch.nn.Module:
    """A tiny causal language model of transformers, four layers, bf16."""
    return copy.deepcopy(_first_transformer(kind, **options))


@functools.cache
def _first_transformer(kind: str, **options: Any) -> torch.nn.Module:
    """Copied, because that takes a tenth of the time."""
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    more: dict[str, dict[str, Any]] = {
        "Llama": {},
        "Qwen3": {"head_dim": 16},
        "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more[kind], **options})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()  # type: ignore[no-any-return]


class Encoder(torch.nn.Module):
    """torch's own transformer encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(x)
        return out


class Images(torch.nn.Module):
    """Convolutions in channels-last layout, with batch norm, which changes what it has saved, and an odd view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.GELU())
            for _ in range(4)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = x + stage(x).transpose(2, 3)[:, :, ::1, :].transpose(2, 3)
        return x


NETWORKS: Mapping[str, Callable[[], torch.nn.Module]] = {
    "Llama": functools.partial(transformer, "Llama"),
    "Qwen3": functools.partial(transformer, "Qwen3"),
    "Qwen3, eager attention": functools.partial(transformer, "Qwen3", attn_implementation="eager"),
    "Qwen3Moe": functools.partial(transformer, "Qwen3Moe"),
    "encoder": Encoder,
    "convolutions": Images,
}


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if hasattr(model, "config"):
        ids = torch.randint(0, 64, (2, 24), generator=generator)
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    shape = (2, 8, 6, 6) if isinstance(model, Images) else (2, 10, 32)
    x = torch.randn(shape, generator=generator)
    if isinstance(model, Images):
        x = x.to(memory_format=torch.channels_last)
    out: torch.Tensor = model(x).square().mean()
    return out


def trained(model: torch.nn.Module, *, steps: int = STEPS) -> list[torch.Tensor]:
    """Gradients of every step; weights move between steps."""
    torch.manual_seed(1)  # dropout
    found = []
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step).backward()
        for p in model.parameters():
            assert p.grad is not None
            found.append(p.grad.clone())
            p.data.sub_(p.grad, alpha=0.1)
    return found


@functools.cache
def trained_alone(name: str) -> list[torch.Tensor]:
    """Gradients of a network of that name to which nothing is attached."""
    return trained(NETWORKS[name]())


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextmanager
def offloading(
    model: torch.nn.Module,
    order: Order | None = None,
    *,
    num_layers: int | None = None,
    min_bytes: int = 64,
    layers: Sequence[torch.nn.Module] | None = None,
    **options: Any,
) -> Iterator[hostward.Attachment]:
    """Attached for the block; afterwards nothing is left of it."""
    backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
    how = hostward.Activations(num_layers=num_layers, min_bytes=min_bytes, **options)
    run = hostward.attach(model, activations=how, layers=layers, backend=backend)
    try:
        yield run
    finally:
        run.detach()
    autograd = torch._C._autograd
    assert autograd._top_saved_tensors_default_hooks(True) is None, "saved-tensor hooks are left installed"


def left_over(run: hostward.Attachment) -> int:
    """Host blocks that were not given back."""
    return run._arena.blocks_in_use
