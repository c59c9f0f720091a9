"""What each rank does: a loop of torchtitan's structure, with its own optimizers or those of hostward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from sharded_cases import ORDERS, Block, digest, mesh_of, whole_of
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hostward
from hostward.integrations.fsdp2_loops import build_optimizers
from hostward.optim.offloaded_grad import OffloadedGrad
from hostward.runtime.simulated.backend import SimulatedBackend

LIMIT = 0.05
COMMON = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
NORMS = r"norm\.|bias$"
WIDTH = 33


class Part(torch.nn.Module):
    """A run of layers under the names of the whole model, with what comes before and after all of them."""

    def __init__(self, numbers: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        torch.manual_seed(1 + numbers[0])
        self.embed = torch.nn.Embedding(500, WIDTH) if first else None
        self.layers = torch.nn.ModuleDict({str(i): Block(WIDTH) for i in numbers})
        self.head = torch.nn.Linear(WIDTH, 10) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x).clone()


def parts_of(count: int, **options: Any) -> list[Any]:
    """The model in `count` parts, each sharded layer by layer."""
    made: list[Any] = [Part([0, 1], True, True)] if count == 1 else [Part([0], True, False), Part([1], False, True)]
    for part in made:
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh_of("all"), **options)
        fully_shard(part, mesh=mesh_of("all"), **options)
    return made


class TorchOptimizers:
    """torch's AdamW in a container; its state under the keys of torchtitan."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self.names = {p: name for part in parts for name, p in part.named_parameters()}
        norms = [p for p, name in self.names.items() if _is_norm(name)]
        others = [p for p, name in self.names.items() if not _is_norm(name)]
        groups = [{"params": norms, "weight_decay": 0.0}, {"params": others}]
        self.optimizer = torch.optim.AdamW(groups, **COMMON)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter([self.optimizer])

    def accumulate(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                name = self.names[p]
                flat |= {f"state.{name}.{role}": value for role, value in self.optimizer.state[p].items()}
                flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
        return flat

    def load_state_dict(self, _: Any) -> None:
        raise NotImplementedError


def _is_norm(name: str) -> bool:
    return "norm." in name or name.endswith("bias")


class Models:
    """The weights of all parts, as a checkpointer has them."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Any) -> None:
        for part in self.parts:
            part.load_state_dict({name: state[name] for name in part.state_dict()})


class Loop:
    """As torchtitan's trainer: all of the state in `states`, and microbatches within `train_step`."""

    def __init__(self, parts: list[Any], optimizers: Any, *, clips: bool) -> None:
        self.parts, self.optimizers, self.clips = parts, optimizers, clips
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)) for o in optimizers
        ]
        self.step = 0
        self.told: list[float] = []
        self.left: list[bool] = []

    def train_step(self, microbatches: int = 2) -> None:
        self.optimizers.zero_grad()
        total = 0.0
        for i in range(microbatches):
            last = i == microbatches - 1
            with contextlib.nullcontext() if self.clips else self.optimizers.accumulate(last=last):
                loss = self.loss(10 * self.step + i) / microbatches
                loss.backward()
            total += loss.item()
        self.left = [type(p.grad) is OffloadedGrad for part in self.parts for p in part.parameters()]
        norm = clip_grad_norm_(self.parts, LIMIT) if self.clips else None
        self.optimizers.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.step += 1
        self.told += [total, self.optimizers.grad_norm if norm is None else norm]

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + torch.distributed.get_rank())
        x = torch.randint(0, 500, (4, 3), generator=generator)
        for part in self.parts:
            x = part(x)
        return (x.float() - 1.0).square().mean()

    def states(self) -> dict[str, Any]:
        return {"model": Models(self.parts), "optimizer": self.optimizers, "lr": self.schedulers[0], "train": self}

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: Any) -> None:
        self.step = int(state["step"])

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole_of(p.detach()) for part in self.parts for name, p in part.named_parameters()}

    def bits(self) -> dict[str, Any]:
        weights = {name: digest(value) for name, value in self.weights().items()}
        state = {n: digest(whole_of(v).view(-1)) for n, v in self.optimizers.state_dict().items() if "state." in n}
        return {**weights, **state, "told": [value.hex() for value in self.told], "left": self.left}


def clip_grad_norm_(parts: Sequence[torch.nn.Module], limit: float) -> float:
    """Of all parts together, with DTensors."""
    parameters = [p for part in parts for p in part.parameters()]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)
    return float(norm)


def ours(fraction: float, order: str = "late", *, parts: int = 1, clips: bool = False, **options: Any) -> Loop:
    """A loop of hostward. `clips`: nothing but the builder is changed, so that the loop clips."""
    made = parts_of(parts)
    optimizers = build_optimizers(
        made,
        groups={NORMS: {"weight_decay": 0.0}},
        max_grad_norm=None if clips else LIMIT,
        offload_fraction=fraction,
        backend=SimulatedBackend(threads=1, order=ORDERS[order]),
        **{**COMMON, **options},
    )
    return Loop(made, optimizers, clips=clips)


def theirs(parts: int = 1, **options: Any) -> Loop:
    made = parts_of(parts, **options)
    return Loop(made, TorchOptimizers(made), clips=True)


def trained(loop: Loop, steps: int = 3) -> Loop:
    for _ in range(steps):
        loop.train_step()
    return loop


def require_close(mine: Loop, other: Loop) -> None:
    torch.testing.assert_close(mine.told, other.told, rtol=1e-4, atol=0)
    torch.testing.assert_close(mine.weights(), other.weights(), rtol=1e-4, atol=1e-5)


def bits(fraction: float, order: str, **options: Any) -> dict[str, Any]:
    return trained(ours(fraction, order, **options)).bits()


def close_to_torch() -> None:
    """Of two parts; of one the checkpoints say it."""
    require_close(trained(ours(1.0, parts=2)), trained(theirs(2)))


def saved_and_loaded(folder: str, before: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bits after four steps: in one go, and from a checkpoint of the second at another fraction; `before` saves it."""
    whole = trained(ours(1.0) if before == "hostward" else theirs(), 2)
    dcp.save(whole.states(), checkpoint_id=folder)
    again = ours(0.5)
    for part in again.parts:
        with torch.no_grad():
            for p in part.parameters():
                p.zero_()
    dcp.load(again.states(), checkpoint_id=folder)
    whole.told.clear()
    trained(whole, 2), trained(again, 2)
    require_close(again, whole)
    return (whole.bits(), again.bits()) if before == "hostward" else ({}, {})


def in_place_of_cpu_offload_policy() -> int:
    """Weights, gradients and state on the host, as that policy has them, and nearly its numbers; the bytes reloaded."""
    before = trained(theirs(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    loop = ours(1.0, streamed_fraction=0.0, gradients="host")
    (model,) = loop.parts
    run = hostward.attach(model, loop.optimizers.optimizer, weights=1, layers=list(model.layers.values()))
    trained(loop)
    report = run.report().weights
    run.detach()
    assert report is not None
    require_close(loop, before)
    return report.fetched_bytes
