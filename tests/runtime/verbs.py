"""A simulated backend of one thread, and its verbs issued at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hostward.runtime.backend import Buffer, Event, Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def backend_with(order: Order | None = None, *, poison: bool = True) -> SimulatedBackend:
    return SimulatedBackend(order=order, threads=1, poison=poison)


def pair(backend: SimulatedBackend, dtype: torch.dtype = torch.float32, numel: int = 8) -> tuple[Buffer, Buffer]:
    """One device buffer and one host buffer, ready for every lane."""
    (device,) = backend.allocate(Tier.DEVICE, [numel], dtype, "on device")
    (host,) = backend.allocate(Tier.HOST, [numel], dtype, "on host", pinned=True)
    backend.synchronise()
    return device, host


def fill(backend: SimulatedBackend, buffer: Buffer, value: float, waits: Sequence[Event] = ()) -> Event:
    kernel = lambda: buffer.data.fill_(value)  # noqa: E731
    return backend.launch(f"fill {value}", kernel, reads=[], writes=[buffer], waits=waits).issue()


def copy(
    backend: SimulatedBackend, lane: Lane, destination: Buffer, source: Buffer, name: str, waits: Sequence[Event] = ()
) -> Event:
    return backend.copy(lane, [(destination, source)], name=name, waits=waits).issue()


def retire(backend: SimulatedBackend, buffers: Sequence[Buffer], lane: Lane, waits: Sequence[Event] = ()) -> Event:
    return backend.retire(buffers, lane, waits=waits).issue()


def wait(backend: SimulatedBackend, *events: Event) -> Event:
    """The caller's own code goes on behind these."""
    return backend.mark("wait", Lane.COMPUTE, waits=events).issue()
