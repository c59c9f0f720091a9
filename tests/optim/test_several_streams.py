"""T36 and H7: hooks of one backward that run on several streams, with a fake that says which one is current.

What a device makes of it is tested on one (`tests/gpu/test_streams_on_device.py`). Here: the compute lane goes where
each gradient is taken, each stream waits for a layer that it uses, and no stream gets memory back before it has waited.

Seen red with: the lane left where it was when a gradient is taken; a layer that has arrived not waited for on another
stream; gradients dropped without holding the streams on which they were made, with those
of a weight's first bucket alone, or with those of the microbatch before; those of a gradient that came back from the
host, or was taken at the step, forgotten; slots given back to a stream that has not waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizer_cases import adamw

import hostward
from hostward.runtime.backend import Event
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.optimizer import GRADIENTS_IN_FLIGHT

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

    def wait_on_stream(self, stream: object, waits: Sequence[Event]) -> None:
        assert waits
        assert isinstance(stream, int)
        self.held.append((stream, self.lane))
        super().wait_on_stream(stream, waits)

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


def backward(model: Towers, optimizer: hostward.AdamW, backend: Streams, *, last: bool = True) -> None:
    with optimizer.accumulate(last=last):
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


@pytest.mark.parametrize("mix", MIXES)
def test_t36_a_layer_that_arrived_on_one_stream_is_waited_for_on_the_other(mix: str) -> None:
    model, optimizer, backend = made(mix)
    backward(model, optimizer, backend)
    optimizer.step()
    optimizer.zero_grad()
    backend.held.clear()
    model(torch.ones(2, WIDTH))
    # Layers arrive, and gradients of streamed state go, on the first tower's stream; what both use was taken there.
    dropped = DEPTH if mix == "streamed" else 0
    assert [stream for stream, _ in backend.held] == [2] * (DEPTH + 1 + dropped)
    backend.held.clear()
    model(torch.ones(2, WIDTH))
    assert not backend.held


def test_h12_each_bucket_of_a_weight_is_waited_for() -> None:
    """Its memory is free when the last of them has left."""
    backend = Streams()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)))
    for stream, layer in enumerate(model, 1):
        layer.weight.register_post_accumulate_grad_hook(_entering(backend, stream))
    optimizer = adamw(model, backend=backend, offload_fraction=1.0, streamed_fraction=0.0)
    assert len(optimizer.plan.buckets) >= 2 * (GRADIENTS_IN_FLIGHT + 1)
    with optimizer.accumulate(last=True):
        model(torch.ones(1, 1024)).sum().backward()
    # The first layer's buckets release those of the second that are in flight, one after the other.
    assert backend.held == [(2, 1)] * GRADIENTS_IN_FLIGHT


def test_h17_memory_that_another_stream_made_is_waited_for_there() -> None:
    """As with HSDP, whose gradients are memory of the stream that reduces and scatters, and come on a later one."""
    model, optimizer, backend = made("host")
    optimizer._executor.grads_made_on(3)  # type: ignore[arg-type]
    backward(model, optimizer, backend)
    assert {stream for stream, _ in backend.held} == {2, 3}


@pytest.mark.parametrize("swapped", [False, True])
def test_h12_each_microbatch_that_is_summed_on_the_host_is_waited_for(swapped: bool) -> None:
    backend, now = Streams(), {"stream": 1}
    model = Towers(backend)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: setattr(backend, "stream", now["stream"]))
    optimizer = adamw(model, backend=backend, offload_fraction=1.0, streamed_fraction=0.0, gradients="host")
    backward(model, optimizer, backend, last=False)
    now["stream"] = 2 if swapped else 1
    backward(model, optimizer, backend)
    assert {stream for stream, _ in backend.held} == ({1} if swapped else set())
    backend.held.clear()
    optimizer.step()
    assert {stream for stream, _ in backend.held} == {2 if swapped else 1}


def test_h12_a_gradient_that_came_back_is_memory_of_where_it_came_back() -> None:
    """Two rounds of backward before one step: the second is about to add on one stream, and hands over on another."""
    backend = Streams()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)))
    for layer in model:
        layer.weight.register_hook(_entering(backend, 2))
        layer.weight.register_post_accumulate_grad_hook(_entering(backend, 1))
    optimizer = adamw(model, backend=backend, offload_fraction=1.0, streamed_fraction=0.0)
    for expected in (set(), {2}):
        with optimizer.accumulate(last=True):
            model(torch.ones(1, 1024)).sum().backward()
        assert {stream for stream, _ in backend.held} == expected


@pytest.mark.parametrize("mix", MIXES)
def test_h12_gradients_that_are_taken_at_the_step_are_waited_for_where_they_were_made(mix: str) -> None:
    model, optimizer, backend = made(mix)
    model(torch.ones(2, WIDTH)).sum().backward()
    backend.stream = 0
    assert not backend.held
    optimizer.step()
    if mix == "streamed":
        backend.held.clear()  # they are dropped where forward uses the layers
        with backend.on(3):
            optimizer.wait_for_weights()
    assert {stream for stream, _ in backend.held} == ({0, 1, 2} if mix == "streamed" else {1, 2})


def test_h12_slots_go_back_to_the_stream_that_they_came_from() -> None:
    """Forward, in which they go back, need not be on the stream of the step."""
    backend = Streams()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer = adamw(model, backend=backend, offload_fraction=1.0, streamed_fraction=1.0)
    for _ in range(2):
        with backend.on(1), optimizer.accumulate(last=True):
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()  # here slots are taken, or it says where
        optimizer.zero_grad()
    backend.held.clear()
    assert optimizer._executor._slots.held
    with backend.on(1):
        model(torch.ones(2, WIDTH))
    assert not optimizer._executor._slots.held
    assert backend.held == [(0, 1)]


def test_arrive_is_of_the_current_stream_also_where_nothing_is_pending() -> None:
    model, optimizer, backend = made("host")
    backward(model, optimizer, backend)
    optimizer.step()
    with backend.on(1):
        optimizer.wait_for_weights()
    assert backend.lane == 1
    with backend.on(3):
        optimizer.wait_for_weights()
    assert backend.lane == 3


def test_h12_activations_go_back_to_the_stream_that_made_them() -> None:
    backend = Streams()
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
    how = hostward.Activations(min_bytes=64)
    with hostward.attach(layers, activations=how, layers=list(layers), backend=backend) as run:
        x = torch.ones(4, WIDTH, requires_grad=True) * 1
        for layer, stream in zip(layers, (1, 2, 2, 2), strict=True):
            with backend.on(stream):
                x = torch.tanh(layer(x))
        assert run.report().offloaded_bytes > 0
        # What the first layer has saved goes where the second begins, and what the others have on their own stream.
        assert [stream for stream, _ in backend.held] == [1]
        x.sum().backward()


def test_one_stream_is_never_held() -> None:
    backend = Streams()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer = adamw(model, backend=backend, offload_fraction=1.0, streamed_fraction=0.5)
    for _ in range(3):
        with optimizer.accumulate(last=True):
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not backend.held
