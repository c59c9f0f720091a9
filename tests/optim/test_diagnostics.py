"""Passes of the caller between operations of the compute lane.

Seen red: forward of a layer that ends where its gather was waited for, where room for a later one was made, or where
its part went.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hostward.optim.diagnostics import Tracing
from hostward.runtime.step_trace import SpanKind
from hostward.schedule.ops import Lane
from hostward.schedule.weights import GATHERED, ROOM


def test_a_wait_for_a_gather_lies_within_the_forward_of_its_layer() -> None:
    """The layer's own hook, and with it the wait for what the step has written, comes first; its part goes before it
    runs.
    """
    backend: Any = SimpleNamespace(meter=None, synchronise=lambda: None)
    executor: Any = SimpleNamespace(wait_for_all=lambda: None)
    with Tracing(backend, executor) as trace:
        for name, start_s, end_s in (
            ("offload/wait/model.layers.0", 0.0, 0.25),
            (ROOM, 0.25, 0.25),
            (GATHERED, 0.5, 1.0),
            ("offload/retire/weights", 1.0, 1.0),
            ("offload/wait/model.layers.1", 3.0, 3.0),
            ("offload/norm/0001.model.layers.1", 5.0, 5.5),
        ):
            backend.meter(name, Lane.COMPUTE, start_s, end_s, 0, 7)
    passes = {s.name: (s.start_s, s.end_s) for s in trace.spans if s.kind is SpanKind.MARK}
    assert passes == {"forward/model.layers.0": (0.25, 3.0), "backward/model.layers.1": (3.0, 5.0)}
    assert [s.duration_s for s in trace.spans if s.name == GATHERED] == [0.5]
    assert trace.summary().exposed_s == 0.75
