"""`offload_optimizer_states` on a CUDA device: the optimizer's own bits, and state that is really away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from hostward.optim.any_optimizer.offload import StreamedStates, offload_optimizer_states
from hostward.optim.bucket_state import same_bits

pytestmark = pytest.mark.gpu

MIB = 1 << 20

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd nesterov": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd fused": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, fused=True),
    "adam amsgrad": lambda g: torch.optim.Adam(g, lr=1e-3, amsgrad=True),
    "adamw loop": lambda g: torch.optim.AdamW(g, lr=1e-3, foreach=False),
    "adamw foreach": lambda g: torch.optim.AdamW(g, lr=1e-3, foreach=True),
    "adamw fused": lambda g: torch.optim.AdamW(g, lr=1e-3, fused=True),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=1e-2),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=1e-3, momentum=0.9, centered=True),
    "adafactor": lambda g: torch.optim.Adafactor(g),
    "muon": lambda g: torch.optim.Muon([{**group, "params": matrices(group["params"])} for group in g]),
}


def matrices(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in params if p.dim() == 2]


def build(width: int = 512, layers: int = 8, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to("cuda", dtype)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:7]}, {"params": params[7:], "weight_decay": 0.0}]


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype)


def assert_same(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Weights and state, bit for bit."""
    for ours, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(ours["params"], other["params"], strict=True):
            assert same_bits(p.detach(), q.detach()), f"a weight {tuple(p.shape)} differs"
    a, b = mine.state_dict()["state"], theirs.state_dict()["state"]
    assert list(a) == list(b)
    for i, entry in a.items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(value.cpu(), b[i][key].cpu()), f"{key} of parameter {i} differs"


def pair(
    name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[tuple[Any, Any], tuple[Any, Any], StreamedStates]:
    """The same model and optimizer twice; the second has its state streamed."""
    models = build(dtype=dtype), build(dtype=dtype)
    plain, optimizer = (OPTIMIZERS[name](groups(model)) for model in models)
    states = offload_optimizer_states(optimizer, **{"chunk_size_mb": 3, **options})
    return (models[0], plain), (models[1], optimizer), states


def train(*runs: tuple[Any, Any], steps: int, first: int = 0) -> None:
    for n in range(first, first + steps):
        for model, optimizer in runs:
            set_gradients(model, n)
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_its_own_bits(name: str, dtype: torch.dtype) -> None:
    plain, streamed, states = pair(name, dtype=dtype)
    train(plain, streamed, steps=20)
    assert_same(streamed[1], plain[1])
    # Read as they lie: whoever asks the entries gets tensors on the device.
    tensors = [t for e in streamed[1].state.values() for t in dict.values(e) if torch.is_tensor(t) and t.numel() > 1]
    assert tensors
    assert not any(t.is_cuda for t in tensors)
    assert states.offloaded_bytes == sum(t.nbytes for t in tensors)
    states.detach()
    train(plain, streamed, steps=2, first=20)
    assert_same(streamed[1], plain[1])


class Mixes(torch.optim.Optimizer):
    """Counts in a tensor, scales by a norm over all gradients, draws numbers, and steps by position."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.count = torch.zeros((), device="cuda")

    def every(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        norm = torch.stack([p.grad.float().norm() for p in self.every() if p.grad is not None]).norm()
        for i, p in enumerate(self.every()):
            state = self.state[p]
            if not state:
                state["z"], state["m"] = p.clone(), torch.zeros_like(p)
            state["m"].mul_(0.9).add_(p.grad / norm)  # type: ignore[operator]
            state["z"].sub_(state["m"] * torch.rand_like(p), alpha=1 / (1 + i))
            p.lerp_(state["z"], (1 / self.count).to(p.dtype))

    @torch.no_grad()
    def swap(self) -> None:
        """What schedule-free optimizers do between steps."""
        for p in self.every():
            p.lerp_(self.state[p]["z"], -0.5)


class Collects(Mixes):
    """Reads all state before it uses any, as foreach does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.every():
            self.state[p].setdefault("z", torch.zeros_like(p))
        moments = [self.state[p]["z"].detach() for p in self.every()]
        torch._foreach_mul_(moments, 0.9)
        torch._foreach_add_(moments, [p.grad for p in self.every()])
        torch._foreach_add_(self.every(), moments, alpha=-1e-2)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("kind", [Mixes, Collects])
def test_an_optimizer_that_mixes_gives_its_own_bits(kind: type[Mixes], busy: bool) -> None:
    runs = [(model, kind(groups(model))) for model in (build(width=1024), build(width=1024))]
    states = offload_optimizer_states(runs[1][1], chunk_size_mb=9)
    for n in range(6):
        for model, optimizer in runs:
            torch.manual_seed(n)
            set_gradients(model, n)
            if busy:
                torch.cuda._sleep(50_000_000)
            optimizer.step()
            if n % 2:
                optimizer.swap()
            if n == 4:
                optimizer.every()[3].grad = optimizer.state[optimizer.every()[3]]["z"].clone()
    assert_same(runs[1][1], runs[0][1])
    assert states.offloaded_bytes > 0
    states.detach()
    assert_same(runs[1][1], runs[0][1])


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_t28_a_share_of_the_state(fraction: float) -> None:
    plain, streamed, states = pair("adamw fused", fraction=fraction)
    train(plain, streamed, steps=5)
    assert_same(streamed[1], plain[1])
    total = 2 * sum(p.nbytes for p in streamed[0].parameters())
    assert abs(states.offloaded_bytes - fraction * total) <= 2 * 512 * 512 * 4 / 2


def test_t48_save_and_load() -> None:
    plain, streamed, _ = pair("adamw fused")
    train(plain, streamed, steps=3)
    saved = streamed[1].state_dict()
    train(streamed, steps=2, first=9)
    streamed[0].load_state_dict(plain[0].state_dict())
    streamed[1].load_state_dict(saved)
    train(plain, streamed, steps=3, first=3)
    assert_same(streamed[1], plain[1])


@pytest.mark.parametrize("name", ["adamw fused", "sgd nesterov"])
def test_a_gradient_scaler(name: str) -> None:
    plain, streamed, _ = pair(name)
    scalers = [torch.amp.GradScaler("cuda", init_scale=16.0) for _ in range(2)]
    for n in range(4):
        for (model, optimizer), scaler in zip((plain, streamed), scalers, strict=True):
            set_gradients(model, n)
            if n == 2:
                next(model.parameters()).grad.view(-1)[5] = float("inf")
            scaler.scale(torch.zeros((), device="cuda"))
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 8.0
    assert_same(streamed[1], plain[1])


def memory_after(offload: bool) -> tuple[int, int, StreamedStates | None]:
    """Device bytes between steps, and what a step adds to them at its peak."""
    model = build(width=1024, layers=24)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    states = offload_optimizer_states(optimizer, chunk_size_mb=9) if offload else None
    train((model, optimizer), steps=3)
    set_gradients(model, 3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated() - before, states


def test_h19_memory_between_steps_and_in_them() -> None:
    kept_bytes, _, _ = memory_after(offload=False)
    left_bytes, extra_bytes, states = memory_after(offload=True)
    assert states is not None
    assert states.offloaded_bytes == 24 * 2 * 4 * (1024 * 1024 + 1024)
    assert kept_bytes - left_bytes >= 0.98 * states.offloaded_bytes
    assert extra_bytes <= 3 * 9 * MIB + MIB


def test_a_step_returns_before_the_device_is_done(no_host_waits: Callable[[], AbstractContextManager[None]]) -> None:
    _, streamed, states = pair("adamw fused")
    train(streamed, steps=3)
    set_gradients(streamed[0], 3)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with no_host_waits():
        torch.cuda._sleep(4_000_000_000)
        streamed[1].step()
    done.record()
    assert not done.query()
    states.wait()


@pytest.mark.parametrize("sleeps_before", ["step", "gradients"])
def test_t30_t31_a_late_compute_stream(sleeps_before: str) -> None:
    """Copies that did not wait for the compute stream would bring stale or half-made state."""
    plain, streamed, _ = pair("adamw foreach")
    for n in range(4):
        for model, optimizer in (plain, streamed):
            if sleeps_before == "gradients":
                torch.cuda._sleep(50_000_000)
            set_gradients(model, n)
            if sleeps_before == "step":
                torch.cuda._sleep(50_000_000)
            optimizer.step()
    assert_same(streamed[1], plain[1])


def test_h02_steps_under_another_stream() -> None:
    plain, streamed, _ = pair("adamw foreach")
    train(plain, streamed, steps=2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(plain, streamed, steps=2, first=2)
    torch.cuda.current_stream().wait_stream(side)
    train(plain, streamed, steps=2, first=4)
    assert_same(streamed[1], plain[1])
