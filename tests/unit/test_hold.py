"""A stream of somebody else waits for events of ours, over a driver that remembers its calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_backend import FakeBackend

from hostward.engine.backend import Event
from hostward.engine.cuda import CudaBackend


def test_it_waits_for_the_events_and_no_lane_does() -> None:
    backend: Any = FakeBackend()
    backend.context = 0
    events = [Event(0x77), Event(0x78)]
    CudaBackend.hold(backend, SimpleNamespace(cuda_stream=0xABC), events)  # type: ignore[arg-type]
    assert backend.calls() == [("wait", 0xABC, 0x77, 0), ("wait", 0xABC, 0x78, 0)]


def test_without_events_there_is_nothing_to_wait_for() -> None:
    backend: Any = FakeBackend()
    backend.context = 0
    CudaBackend.hold(backend, SimpleNamespace(cuda_stream=0xABC), [])  # type: ignore[arg-type]
    assert backend.calls() == []
