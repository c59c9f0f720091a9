"""T36 and H7: hooks of one backward that run on several streams, with a fake that says which one is current.

What a device makes of it is tested on one (`tests/gpu/test_several_streams.py`); here, that the compute lane goes where
each gradient is taken and each layer used, and that memory does not go back to a stream that has not waited.

Seen red with: the lane left where it was when a gradient is taken, or when a layer that has arrived is used again;
gradients dropped without holding the streams on which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizer_cases import adamw

import hostward
from hostward.engine.backend import Event
from hostward.engine.simulated import Order, SimulatedBackend

WIDTH, DEPTH = 8, 6
MIXES = {"host": 0.0, "streamed": 1.0}


class Streams(SimulatedBackend):
    """The caller's stream is what the test says. Notes where the compute lane is, and which streams were held."""

    def __init__(self) -> None:
        super().__init__(threads=1, order=Order(eager=True))
        self.stream = self.lane = 0
        self.held: list[tuple[int, int]] = []
        """(stream, where the lane was)"""

    def compute_key(self) -> int:
        return self.stream

    def follow_compute(self) -> int:
        self.lane = self.stream
        return self.lane

    def caller_stream(self) -> Any:
        return self.stream

    def hold(self, stream: object, waits: Sequence[Event]) -> None:
        assert waits
        assert isinstance(stream, int)
        self.held.append((stream, self.lane))
        super().hold(stream, waits)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


class Towers(torch.nn.Module):
    """Two towers, on streams 1 and 2, whose layers share buckets, and a last layer that both use."""

    def __init__(self, backend: Streams) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = [[torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)] for _ in range(DEPTH)]
        self.layers = torch.nn.ModuleList(map(torch.nn.ModuleList, pairs))
        self.shared = torch.nn.Linear(WIDTH, WIDTH)
        self._backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x, x + 1]
        for towers in self.layers:
            for number, tower in enumerate(towers):
                with self._backend.on(1 + number):
                    found[number] = torch.tanh(tower(found[number]))
        for number in range(2):
            with self._backend.on(1 + number):
                found[number] = self.shared(found[number])
        return found[0] * found[1]


def stream_of(name: str) -> int:
    """That of the parameter's hook: its tower's, and the first for what both use."""
    return 1 + int(name.split(".")[2]) if name.startswith("layers.") else 1


def made(mix: str) -> tuple[Towers, hostward.AdamW, Streams]:
    """Hooks set the stream before the optimizer's own, as autograd does."""
    backend = Streams()
    model = Towers(backend)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(_entering(backend, stream_of(name)))
    return model, adamw(model, backend=backend, offload_fraction=1.0, streamed_fraction=MIXES[mix]), backend


def _entering(backend: Streams, stream: int) -> Callable[[torch.Tensor], None]:
    return lambda _: setattr(backend, "stream", stream)


def backward(model: Towers, optimizer: hostward.AdamW, backend: Streams) -> None:
    with optimizer.accumulate(last=True):
        model(torch.ones(2, WIDTH)).sum().backward()
    backend.stream = 0


@pytest.mark.parametrize("mix", MIXES)
def test_t36_the_compute_lane_is_where_each_gradient_is_taken(mix: str) -> None:
    model, optimizer, backend = made(mix)
    seen = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: seen.update({name: backend.lane}))  # type: ignore[misc]
    backward(model, optimizer, backend)
    assert seen == {name: stream_of(name) for name, _ in model.named_parameters()}


def test_h12_streams_wait_before_they_may_overwrite_gradients_that_were_taken_on_them() -> None:
    model, optimizer, backend = made("host")
    backward(model, optimizer, backend)
    # Each bucket but the newest is released by a hook of the first tower, with gradients of both.
    assert backend.held
    assert {stream for stream, _ in backend.held} == {2}
    backend.held.clear()
    optimizer.step()
    assert {stream for stream, _ in backend.held} == {1, 2}


def test_h12_gradients_of_streamed_state_are_dropped_when_their_layer_is_used() -> None:
    model, optimizer, backend = made("streamed")
    backward(model, optimizer, backend)
    optimizer.step()
    optimizer.zero_grad()
    backend.held.clear()
    model(torch.ones(2, WIDTH))
    assert set(backend.held) == {(2, 1)}  # layers arrive on the first tower's stream


@pytest.mark.parametrize("mix", MIXES)
def test_t36_a_layer_that_arrived_on_one_stream_is_waited_for_on_the_other(mix: str) -> None:
    model, optimizer, backend = made(mix)
    backward(model, optimizer, backend)
    optimizer.step()
    optimizer.zero_grad()
    lanes = []
    model.shared.register_forward_pre_hook(lambda *_: lanes.append(backend.lane))
    model(torch.ones(2, WIDTH))
    model(torch.ones(2, WIDTH))
    assert lanes == [1, 2, 1, 2]


def test_one_stream_is_never_held() -> None:
    backend = Streams()
    model = Towers(backend)
    optimizer = adamw(model, backend=backend, offload_fraction=1.0, streamed_fraction=0.0)
    for _ in range(2):
        backward(model, optimizer, backend)
        optimizer.step()
        optimizer.zero_grad()
    assert not backend.held
