"""T36 and H7 of the project's lists: a forward on several streams, whose gradient hooks run on as many.

Two towers run side by side, on streams of their own, from the first layer to the last, and one of the two is late in
the backward of each layer. Their gradients share buckets, so that the hook that completes a bucket runs on one stream
while a gradient is still being made on the other; and what both use arrives where the first of them uses it.

Seen red with: the compute lane not following the hooks; a layer that has arrived on one stream taken for arrived on the
other; memory of another stream used before what torch enqueues there to fill it.
"""

from __future__ import annotations

import contextlib
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
from hostward.runtime.backend import Tier
from hostward.runtime.cuda.backend import CudaBackend
from hostward.schedule.ops import Lane

__all__ = ["deterministic"]
pytestmark = pytest.mark.gpu

WIDTH = 128
DEPTH = 8
STEPS = 6
SIZES = [WIDTH * 2, WIDTH * WIDTH * 2]
"""Bytes of gradients."""


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


def train(mix: str | None, *, armed: bool = True, churning: bool = False) -> dict[str, torch.Tensor]:
    """Everything after some steps, and what an evaluation right after each step says.

    armed: gradients leave in backward, and not at the step. churning: what a step or the evaluation behind it frees, on
    the towers' streams, is taken again there and filled with NaN.
    """
    model, streams = Net(), [torch.cuda.Stream() for _ in range(2)]
    place = {"offload_fraction": 0.0, "overlap": False} if mix is None else dict(MIXES[mix])
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=MAX_NORM, **place)  # type: ignore[arg-type]
    looks = []
    for step in range(STEPS):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            x = torch.randn(256, WIDTH, generator=generator).to(DEVICE, torch.bfloat16)
            with optimizer.accumulate(last=microbatch == 1) if armed else contextlib.nullcontext():
                model(x, streams).float().square().mean().backward()
        optimizer.step()
        churn(streams if churning else [])
        optimizer.zero_grad()
        with torch.no_grad():
            looks.append(model(x, streams))
        churn(streams if churning else [])
    torch.cuda.synchronize()
    return {"looks": torch.stack(looks)} | everything(model, optimizer)  # type: ignore[arg-type]


def churn(streams: list[torch.cuda.Stream]) -> None:
    """Of what lies in their caches, and is as large as gradients and slots are."""
    for stream in streams:
        with torch.cuda.stream(stream):
            blocks = [torch.empty(n, dtype=torch.uint8, device=DEVICE).fill_(0xFF) for n in SIZES for _ in range(16)]
            del blocks


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


@pytest.mark.parametrize("lanes", [[Lane.D2H], [Lane.UPDATE, Lane.H2D], SIDE_LANES], ids=lambda x: "+".join(x))
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@every_mix
def test_h12_gradients_of_several_streams_are_not_reused_while_a_lane_uses_them(
    mix: str, armed: bool, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference()
    slow(lanes, monkeypatch)
    assert_equal(train(mix, armed=armed, churning=True), expected)


@every_mix
def test_arrive_is_of_each_stream_that_calls_it(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(SIDE_LANES, monkeypatch)
    model, stream = Net(), torch.cuda.Stream()
    optimizer = hostward.AdamW(model, lr=1e-2, **MIXES[mix])  # type: ignore[arg-type]
    stream.wait_stream(torch.cuda.current_stream())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.wait_for_weights()
    with torch.cuda.stream(stream):  # it has waited for nothing of this
        optimizer.wait_for_weights()
        found = [p.detach().clone() for p in model.parameters()]
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))


def test_h12_activations_go_back_to_the_stream_that_made_them() -> None:
    """The first layer runs on a stream of its own, and what it has saved is released where the next one begins."""
    n, how, backend = 4 * 1024 * 1024, hostward.Activations(min_bytes=64), CudaBackend()
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid()) for _ in range(4))
    streams = [torch.cuda.Stream() for _ in range(2)]

    def gradient() -> torch.Tensor | None:
        x = torch.linspace(-1, 1, n, device=DEVICE, requires_grad=True)
        y = x * 1
        for layer, stream in zip(layers, (streams[0], *[streams[1]] * 3), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            stream.wait_stream(streams[0])
            with torch.cuda.stream(stream):
                y = layer(y)
                y.record_stream(streams[1])
        with torch.cuda.stream(streams[0]):
            blocks = [torch.full((n,), float("nan"), device=DEVICE) for _ in range(6)]
            del blocks
        torch.cuda.current_stream().wait_stream(streams[1])
        y.sum().backward()
        torch.cuda.synchronize()
        return x.grad

    expected = gradient()
    assert expected is not None
    with hostward.attach(layers, activations=how, layers=list(layers), backend=backend) as run:
        with torch.cuda.stream(backend.context.lanes.side[Lane.D2H]):
            torch.cuda._sleep(20 * SLEEP_CYCLES)
        found = gradient()
        assert run.report().offloaded_bytes > 0
    assert found is not None
    assert torch.equal(found, expected)


def test_h2_memory_of_another_stream_is_there_behind_what_fills_it() -> None:
    """With deterministic algorithms torch fills what it allocates, on the stream whose memory it is."""
    backend, here, other = CudaBackend(), torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(2):  # the first time the device may stand still until its kernels are loaded
        with torch.cuda.stream(here):
            with backend.memory_of(other):
                torch.cuda._sleep(10 * SLEEP_CYCLES)
                (slot,) = backend.allocate(Tier.DEVICE, [1024], torch.uint8, "test", zero=False)
            slot.data.zero_()
        torch.cuda.synchronize()
        assert not slot.data.any()
        backend.free([slot])
