"""T36 and H7 of the project's lists: a forward on several streams, whose gradient hooks run on as many.

Two towers run side by side, on streams of their own, from the first layer to the last, and one of the two is late in
the backward of each layer. Their gradients share buckets, so that the hook that completes a bucket runs on one stream
while a gradient is still being made on the other; and what both use arrives where the first of them uses it.

Seen red with: the compute lane not following the hooks; a layer that has arrived on one stream taken for arrived on the
other.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hidden_step_cases import (
    DEVICE,
    MAX_NORM,
    MIXES,
    SIDE_LANES,
    SLEEP_CYCLES,
    assert_equal,
    deterministic,
    every_mix,
    everything,
    slow,
)

import hostward
from hostward.schedule import Lane

__all__ = ["deterministic"]
pytestmark = pytest.mark.gpu

WIDTH = 128
DEPTH = 8
STEPS = 6


class Late(torch.autograd.Function):
    """The identity. Backward sleeps on the stream on which forward ran, and gives the gradient on then."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch.cuda._sleep(SLEEP_CYCLES)
        return grad.clone()


class Net(torch.nn.Module):
    """Layers of two towers each, small enough for one bucket, and a layer that both towers use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = [[torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)] for _ in range(DEPTH)]
        self.layers = torch.nn.ModuleList(map(torch.nn.ModuleList, pairs))
        self.shared = torch.nn.Linear(WIDTH, WIDTH)
        self.to(DEVICE, torch.bfloat16)

    def forward(self, x: torch.Tensor, streams: list[torch.cuda.Stream]) -> torch.Tensor:
        here = torch.cuda.current_stream()
        found = []
        for number, stream in enumerate(streams):
            stream.wait_stream(here)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                found.append(x + number)
        for depth, towers in enumerate(self.layers):
            for number, (stream, tower) in enumerate(zip(streams, towers, strict=True)):
                with torch.cuda.stream(stream):
                    y = torch.tanh(tower(found[number]))
                    found[number] = found[number] + (Late.apply(y) if number == depth % 2 else y)
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number] = self.shared(found[number])
            here.wait_stream(stream)
            found[number].record_stream(here)
        return torch.tanh(found[0]) * torch.sigmoid(found[1])


def train(mix: str | None) -> dict[str, torch.Tensor]:
    """Everything after some steps, and what an evaluation right after each step says."""
    model, streams = Net(), [torch.cuda.Stream() for _ in range(2)]
    place = {"offload_fraction": 0.0, "overlap": False} if mix is None else dict(MIXES[mix])
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=MAX_NORM, **place)  # type: ignore[arg-type]
    looks = []
    for step in range(STEPS):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            x = torch.randn(256, WIDTH, generator=generator).to(DEVICE, torch.bfloat16)
            with optimizer.accumulate(last=microbatch == 1):
                model(x, streams).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            looks.append(model(x, streams))
    torch.cuda.synchronize()
    return {"looks": torch.stack(looks)} | everything(model, optimizer)  # type: ignore[arg-type]


@functools.cache
def reference() -> dict[str, torch.Tensor]:
    return train(None)


@pytest.mark.parametrize(
    "lanes", [[], [Lane.D2H], [Lane.H2D, Lane.UPDATE], SIDE_LANES], ids=lambda x: "+".join(x) or "none"
)
# Torch itself warns of a weight that two streams use.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@every_mix
def test_t36_h7_hooks_on_several_streams(mix: str, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference()
    slow(lanes, monkeypatch)
    assert_equal(train(mix), expected)
