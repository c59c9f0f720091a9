"""A stream of somebody else waits for events of ours, and the compute lane for it, over a driver that remembers its
calls.

Seen red: records where nobody looks, or of a hold that nobody asks about; the whole wait told, or the whole hold; the
wait timed where nobody looks any more; events of a hold not used again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_context import STREAM_OF, FakeContext

from hostward.runtime.backend import RING, Event, Held
from hostward.runtime.cuda.backend import CudaBackend
from hostward.schedule.ops import Lane

COPY_IN: Any = SimpleNamespace(cuda_stream=0xABC)
GATHER: Any = SimpleNamespace(cuda_event=0x99)
COMPUTE = STREAM_OF[Lane.COMPUTE]


def fake() -> Any:
    context: Any = FakeContext()
    return context


class Heard:
    """A meter that remembers what it is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Lane, float, float, int, int]] = []

    def __call__(self, *told: Any) -> None:
        self.spans.append(told)


HOLDS = [CudaBackend.wait_on_stream, CudaBackend.wait_on_stream_timed]


@pytest.mark.parametrize("hold", HOLDS)
def test_it_waits_for_the_events_and_no_lane_does(hold: Any) -> None:
    context = fake()
    assert hold(CudaBackend(context=context), COPY_IN, [Event(0x77), Event(0x78)]) is None
    assert context.calls() == [("wait", 0xABC, 0x77, 0), ("wait", 0xABC, 0x78, 0)]


@pytest.mark.parametrize("hold", HOLDS)
def test_without_events_there_is_nothing_to_wait_for(hold: Any) -> None:
    context = fake()
    hold(CudaBackend(context=context), COPY_IN, [])
    assert context.calls() == []


def looked_at() -> tuple[Any, Heard]:
    context, heard = fake(), Heard()
    context.meter = heard
    context.begin_step()
    return context, heard


def test_what_nobody_asks_about_is_not_timed() -> None:
    context, _ = looked_at()
    made = context.timed_events
    CudaBackend(context=context).wait_on_stream(COPY_IN, [Event(0x77)])
    assert (context.calls(), context.timed_events) == ([("wait", 0xABC, 0x77, 0)], made)


def traced(held_s: int, stood_s: int) -> tuple[Any, Heard, Held]:
    """A context that was asked for a hold that took so long, and for the wait behind it, and what the meter heard then.
    One second goes by between two records.
    """
    context, heard = looked_at()
    held = CudaBackend(context=context).wait_on_stream_timed(COPY_IN, [Event(0x77)])
    assert held is not None
    records = context.fake.records
    at = records.index(held[1])
    records[at:at] = [0] * (held_s - 1)
    CudaBackend(context=context).wait_behind("wait", held, GATHER)
    records[-1:-1] = [0] * (stood_s - 1)
    for _ in range(RING):
        assert heard.spans == []
        context.begin_step()
    return context, heard, held


def test_while_somebody_looks_both_waits_are_timed_each_on_its_stream() -> None:
    context, _, held = traced(1, 1)
    calls = context.calls()
    before, after = (call[1] for call in calls if call[0] == "record" and call[2] == COMPUTE)
    assert calls == [
        ("record", held[0], 0xABC),
        ("wait", 0xABC, 0x77, 0),
        ("record", held[1], 0xABC),
        ("record", before, COMPUTE),
        ("wait", COMPUTE, 0x99, 0),
        ("record", after, COMPUTE),
    ]
    assert len({*held, before, after}) == 4


@pytest.mark.parametrize(
    ("held_s", "stood_s", "counts_s"),
    [(3, 5, 3), (5, 3, 3), (4, 4, 4), (1, 7, 1)],
    ids=["the gather lasts, too", "hidden in part", "as long", "there in time"],
)
def test_the_end_of_the_wait_counts_as_long_as_the_hold_took(held_s: int, stood_s: int, counts_s: int) -> None:
    context, heard, _ = traced(held_s, stood_s)
    ((name, lane, start_s, end_s, nbytes, turn),) = heard.spans
    assert (name, lane, nbytes, turn) == ("wait", Lane.COMPUTE, 0, 2)
    assert end_s - start_s == counts_s
    over = next(call[1] for call in reversed(context.calls()) if call[0] == "record" and call[2] == COMPUTE)
    assert end_s == context.fake.records.index(over)


def test_who_has_stopped_looking_in_between_is_told_nothing() -> None:
    """The caller waits for the gather in any case."""
    context, heard = looked_at()
    held = CudaBackend(context=context).wait_on_stream_timed(COPY_IN, [Event(0x77)])
    assert held is not None
    context.meter = None
    context.calls()
    CudaBackend(context=context).wait_behind("wait", held, GATHER)
    assert context.calls() == []
    context.meter = heard
    for _ in range(2 * RING):
        context.begin_step()
    assert heard.spans == []


def test_what_is_captured_is_not_timed() -> None:
    context, _ = looked_at()
    context.in_capture = True
    assert CudaBackend(context=context).wait_on_stream_timed(COPY_IN, [Event(0x77)]) is None
    assert context.calls() == [("wait", 0xABC, 0x77, 0)]


def test_timed_events_are_used_again() -> None:
    context, _ = looked_at()
    made = []
    for _ in range(3 * RING):
        context.begin_step()
        for _ in range(5):
            held = CudaBackend(context=context).wait_on_stream_timed(COPY_IN, [Event(0x77)])
            assert held is not None
            CudaBackend(context=context).wait_behind("wait", held, GATHER)
        made.append(context.timed_events)
    assert len(set(made[RING - 1 :])) == 1
