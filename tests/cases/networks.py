"""A network with a forward, trained microbatch by microbatch in whatever way a test asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from optimizer_cases import adamw, snapshot
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

MIXES: Mapping[str, Mapping[str, float]] = {
    "device": {"offload_fraction": 0.0, "streamed_fraction": 0.0},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 0.5, "streamed_fraction": 0.5},
}
"""In `mixed` the split embedding lies on two sides, and what follows is streamed and on the host in turn."""
OFFLOADED = [mix for mix in MIXES if mix != "device"]
LATEST = Order(late=frozenset(lane for lane in Lane if lane is not Lane.COMPUTE))
"""What nobody waits for does not run."""
LATE = (frozenset({Lane.D2H, Lane.HOST}), frozenset({Lane.H2D}), frozenset({Lane.UPDATE, Lane.D2H}))


class Block(torch.nn.Module):
    """A normalised residual layer. `fail`, if set, is called in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, width)
        self.down = torch.nn.Linear(width, width)
        self.fail: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail is not None:
            self.fail()
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(torch.nn.Module):
    """Tokens to logits: an embedding of two buckets, three blocks, a norm, a head, and a scale that the root owns."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.full((1,), 0.7))
        self.embed = torch.nn.Embedding(66_560 // width, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 10)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor, *, without: int | None = None, reentrant: bool | None = None) -> Any:
        """Logits [4, 10]. `without`: the block left out; `reentrant`: blocks are checkpointed in that way."""
        x = self.embed(tokens) * self.scale
        for i, block in enumerate(self.blocks):
            if i != without:
                x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return self.head(self.norm(x))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 2000, (4,), generator=torch.Generator().manual_seed(seed))


def loss_of(model: torch.nn.Module, seed: int, **options: Any) -> torch.Tensor:
    logits = model(tokens(seed), **options).float()
    loss: torch.Tensor = (logits - 1.0).square().mean()
    return loss


def make(
    mix: str, dtype: torch.dtype = torch.float32, order: Order | None = None, **options: Any
) -> tuple[Net, hostward.AdamW]:
    """A network and its optimizer, by default on a backend that runs what is issued, with poison."""
    model = Net(dtype)
    backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
    settings = {"max_grad_norm": 0.5, **MIXES[mix], **options}
    return model, adamw(model, backend=backend, **settings)


def microbatch(optimizer: hostward.AdamW, context: bool, last: bool) -> AbstractContextManager[None]:
    return optimizer.accumulate(last=last) if context else nullcontext()


def train(
    mix: str,
    dtype: torch.dtype = torch.float32,
    *,
    context: bool = True,
    microbatches: int = 2,
    steps: int = 3,
    order: Order | None = None,
    backward: Callable[[Net, int, int], None] | None = None,
    set_to_none: bool = True,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Weights, state and norms after some steps. `backward(model, step, i)` is one microbatch."""
    grad_dtype = torch.float32 if dtype is not torch.float32 else None
    model, optimizer = make(mix, dtype, order, grad_dtype=grad_dtype, **options)
    norms = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(microbatches):
            with microbatch(optimizer, context, i == microbatches - 1):
                if backward is not None:
                    backward(model, step, i)
                else:
                    (loss_of(model, 10 * step + i) / microbatches).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return snapshot(model, optimizer) | {"norms": torch.tensor(norms)}


class Heard:
    """A meter that remembers the names of what has run."""

    def __init__(self, backend: SimulatedBackend) -> None:
        self.names: list[str] = []
        backend.meter = self

    def __call__(self, name: str, *_: object) -> None:
        self.names.append(name)

    def arrived(self) -> list[str]:
        """Buckets whose weights have been uploaded, or stepped on the device, in that order."""
        own = ("offload/h2d/weight/", "offload/streamed/adamw/")
        return [name.removeprefix(start) for name in self.names for start in own if name.startswith(start)]


def stepped(mix: str, **options: Any) -> tuple[Net, hostward.AdamW, Heard]:
    """A network one step further, of which nothing has arrived."""
    model, optimizer = make(mix, order=LATEST, **options)
    with optimizer.accumulate(last=True):
        loss_of(model, 0).backward()
    optimizer.wait()
    heard = Heard(optimizer.backend)  # type: ignore[arg-type]
    optimizer.step()
    assert heard.arrived() == []
    return model, optimizer, heard


@functools.cache
def expected() -> tuple[Net, dict[str, torch.Tensor]]:
    """The same step without offloading, and the weights after it."""
    model, optimizer = make("device")
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()
    return model, {name: p.detach().clone() for name, p in model.named_parameters()}


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def part_of(weights: dict[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    start = f"{path}." if path else ""
    return {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}
