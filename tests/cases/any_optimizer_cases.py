"""Optimizers of many kinds over one set of awkward parameters, with gradients from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hostward.optim.any_optimizer.offload import StreamedStates, offload_optimizer_states
from hostward.optim.any_optimizer.staging import AwayState
from hostward.optim.bucket_state import same_bits
from hostward.runtime.simulated.backend import Order, SimulatedBackend

SHAPES = [*[(256, 256)] * 8, (129, 127), (256,), (4097,), (3,), (1,), ()]
OWNER = "optimizer state"
Groups = list[dict[str, Any]]


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """Dense and plain ones, then a channels-last and a transposed one."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made.append(torch.randn((32, 16, 3, 3), generator=generator).to(dtype, memory_format=torch.channels_last))
    made.append(torch.randn((128, 64), generator=generator).to(dtype).t())
    return [torch.nn.Parameter(t) for t in made]


def groups(params: Sequence[torch.Tensor]) -> Groups:
    """Matrices, and the others in a group of their own with a lower rate: chunks cross the border."""
    return [
        {"params": [p for p in params if p.dim() == 2], "flag": True},
        {"params": [p for p in params if p.dim() != 2], "lr": 1e-3, "flag": False},
    ]


def set_gradients(params: Iterable[torch.Tensor], seed: int, skip: Sequence[int] = ()) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, p in enumerate(params):
        noise = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in skip else torch.empty_like(p).copy_(noise)


class MuonLike(torch.optim.Optimizer):
    """Newton-Schulz for the matrices of flagged groups, AdamW for the rest; the flag is a value of the group."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "flag": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if group["flag"]:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.mul_(0.95).add_(p.grad)
                    p.add_(newton_schulz(p.grad.add(momentum, alpha=0.95)), alpha=-group["lr"])
                    continue
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                correction = 1 - 0.9 ** state["step"]
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-group["lr"] / correction)


def newton_schulz(gradient: torch.Tensor) -> torch.Tensor:
    x = gradient / (gradient.norm() + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


class Restless(torch.optim.Optimizer):
    """Puts new tensors in place of its state, swaps two of them, counts in its groups and on itself, and gets a third
    tensor in the third step.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> int:
        self.total += 1
        for group in self.param_groups:
            if all(p.grad is None for p in group["params"]):
                continue
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                a, b = state.get("a", torch.zeros_like(p)), state.get("b", torch.ones_like(p))
                state["a"], state["b"] = b.add_(p.grad), a
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(p)) + 0.5 * p.grad
                if group["step"] >= 3:
                    state["late"] = state.get("late", torch.zeros_like(p)).add_(state["b"])
                    p.sub_(state["late"], alpha=1e-3)
                p.sub_(state["mean"] + state["a"], alpha=group["lr"] / group["step"])
        return self.total


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda g: torch.optim.SGD(g, lr=1e-2),
    "sgd momentum": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "sgd nesterov": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda g: torch.optim.Adam(g, lr=1e-2, amsgrad=True),
    "adam fused": lambda g: torch.optim.Adam(g, lr=1e-2, fused=True),
    "adamw loop": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=False),
    "adamw foreach": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True),
    "adamw fused": lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=1e-2, momentum=0.9, centered=True),
    "adadelta": lambda g: torch.optim.Adadelta(g),
    "adamax": lambda g: torch.optim.Adamax(g),
    "nadam": lambda g: torch.optim.NAdam(g),
    "radam": lambda g: torch.optim.RAdam(g),
    "rprop": lambda g: torch.optim.Rprop(g),
    "asgd": lambda g: torch.optim.ASGD(g),
    "adafactor": lambda g: torch.optim.Adafactor(g),
    "muon like": MuonLike,
    "restless": Restless,
}


def assert_same(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Weights, state and groups, bit for bit; layouts and the order of keys too."""
    pairs = zip(all_parameters(mine), all_parameters(theirs), strict=True)
    for i, (p, q) in enumerate(pairs):
        assert same_bits(p.detach(), q.detach()), f"parameter {i} {tuple(p.shape)} differs"
    a, b = mine.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert list(a["state"]) == list(b["state"])
    for i, entry in a["state"].items():
        assert list(entry) == list(b["state"][i])
        for key, value in entry.items():
            other = b["state"][i][key]
            if isinstance(value, torch.Tensor):
                assert same_layout(value, other), f"{key} of parameter {i} has another layout"
                assert same_bits(value, other), f"{key} of parameter {i} differs"
            else:
                assert value == other


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def all_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def simulated(**order: Any) -> SimulatedBackend:
    return SimulatedBackend(order=Order(**order), threads=1)


def offloaded(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> tuple[Any, StreamedStates]:
    optimizer = make(groups(parameters(options.pop("dtype", torch.float32))))
    options = {"chunk_size_mb": 1, "backend": simulated(), **options}
    return optimizer, offload_optimizer_states(optimizer, **options)


def cut_small(states: StreamedStates, chunk_bytes: int) -> AwayState:
    """What is offloaded, in chunks that are smaller than a MiB from now on."""
    states._away._chunk_bytes = chunk_bytes
    return states._away


def train(*optimizers: torch.optim.Optimizer, steps: int = 4, first: int = 0) -> None:
    """The same steps with each: some parameters have no gradient in the second, and the rate changes in the third."""
    for n in range(first, first + steps):
        for optimizer in optimizers:
            set_gradients(all_parameters(optimizer), n, skip=(1, 9, 12) if n == 1 else ())
            optimizer.param_groups[0]["lr"] = 1e-2 if n < 2 else 3e-3
            optimizer.step()
