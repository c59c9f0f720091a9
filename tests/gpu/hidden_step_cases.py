"""A network on a GPU, trained in whatever way a test asks for, with lanes as slow as it asks for."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import Backend, Event
from hostward.runtime.cuda import work as cuda_work
from hostward.runtime.cuda.backend import CudaBackend
from hostward.runtime.cuda.context import CudaContext
from hostward.runtime.cuda.work import CudaWork, KernelWork, ListedWork
from hostward.schedule.ops import Lane

DEVICE = "cuda"
MIXES = {
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 0.8, "streamed_fraction": 0.5},
}
SIDE_LANES = [lane for lane in Lane if lane is not Lane.COMPUTE]
SLEEP_CYCLES = 3_000_000
MAX_NORM = 1.0
WIDTH = 512
every_mix = pytest.mark.parametrize("mix", MIXES)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


class Net(torch.nn.Module):
    """Four numbered layers; one may be left out, and each may be recomputed in backward."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.embed = torch.nn.Linear(32, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 300)
        self.to(DEVICE, dtype)

    def forward(
        self, x: torch.Tensor, without: int | None = None, reentrant: bool | None = None, only: int | None = None
    ) -> torch.Tensor:
        """`only`: that layer three times, and no other."""
        x = self.embed(x) * self.scale
        for i, layer in enumerate(self.layers if only is None else [self.layers[only]] * 3):
            if i != without:
                y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
                x = torch.tanh(y) + x
        out: torch.Tensor = self.head(self.norm(x))
        return out


def loss_of(model: Net, seed: int, **options: Any) -> torch.Tensor:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE, model.scale.dtype)
    # Every third batch is loud: clipping works in some steps.
    return (model(x, **options).float() - 1.0).square().mean() * (10.0 if seed % 3 == 0 else 0.05)


Backward = Callable[[Net, int], None]


def one_backward(model: Net, seed: int) -> None:
    loss_of(model, seed).backward()


def make(mix: str | None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Net, hostward.AdamW]:
    model = Net(dtype)
    place: dict[str, Any] = {"offload_fraction": 0.0, "overlap": False} if mix is None else dict(MIXES[mix])
    grad_dtype = torch.float32 if dtype is torch.bfloat16 else None
    return model, hostward.AdamW(model, lr=1e-2, max_grad_norm=MAX_NORM, grad_dtype=grad_dtype, **place, **options)


def train(
    mix: str | None,
    backward: Backward = one_backward,
    *,
    steps: int = 20,
    microbatches: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    between: Callable[[Net, hostward.AdamW], object] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Everything after some steps. `between` is called after each step."""
    model, optimizer = make(mix, dtype, **options)
    norms = []
    for step in range(steps):
        for i in range(microbatches):
            with optimizer.accumulate(last=i == microbatches - 1):
                backward(model, 10 * step + i)
        optimizer.step()
        if between is not None:
            between(model, optimizer)
        if step % 5 == 4:  # a look at the norm waits for it: not at every step
            norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    found = {"loss": loss_of(model, 999).detach().clone(), "norms": torch.tensor(norms)}
    return found | everything(model, optimizer)


def everything(model: Net, optimizer: hostward.AdamW) -> dict[str, torch.Tensor]:
    optimizer.wait()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, entry in optimizer.state_dict()["state"].items():
        found |= {f"{role} {name}": value for role, value in entry.items()}
    return found


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


@functools.cache
def reference(steps: int = 20, microbatches: int = 2) -> dict[str, torch.Tensor]:
    return train(None, steps=steps, microbatches=microbatches)


def slow(lanes: list[Lane], monkeypatch: pytest.MonkeyPatch) -> Counter[Lane]:
    """Every operation issued on these lanes comes behind a sleeping kernel, from now on, and is enqueued alone. Returns
    how many have.
    """
    slept: Counter[Lane] = Counter()
    enqueue, launch = cuda_work.enqueue, KernelWork.issue

    def sleep(work: CudaWork) -> None:
        if work.lane not in lanes:
            return
        slept[work.lane] += 1
        if work.lane is Lane.COMPUTE:
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        else:
            with torch.cuda.stream(work.context.lanes.side[work.lane]):
                torch.cuda._sleep(SLEEP_CYCLES)

    def enqueue_behind(context: CudaContext, works: Sequence[ListedWork], *rest: Any) -> None:
        for work in works:
            sleep(work)
        enqueue(context, works, *rest)

    def launch_behind(self: KernelWork) -> Event:
        sleep(self)
        return launch(self)

    monkeypatch.setattr(cuda_work, "enqueue", enqueue_behind)
    monkeypatch.setattr(KernelWork, "issue", launch_behind)
    monkeypatch.setattr(CudaBackend, "batch", Backend.batch)
    return slept
