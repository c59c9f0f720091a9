"""The compute lane goes from stream to stream, and into captures and out of them, over a fake driver.

Seen red: a capture that waits for what is outside of it; after it, work that waits for nothing; the lane left on the
stream of the capture.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_driver import FakeDriver

from hostward.runtime.cuda.commands import Command, CommandList, Streams, Verb
from hostward.runtime.cuda.streams import ComputeLane

TURNED, PROBE = 0x11, 0x22
FIRST, OTHER, GRAPH = 0xA00, 0xB00, 0xC00


class Caller:
    """Issues one record on the lane from whatever stream it says is current."""

    def __init__(self) -> None:
        self.fake = FakeDriver()
        self.driver = self.fake.table()
        self.streams = Streams(1)
        self.lane = ComputeLane(self.streams, 0, FIRST, TURNED, self.driver)
        self.probe = CommandList([Command(Verb.RECORD, 0, PROBE)], self.driver)

    def issue(self, stream: int, *, capturing: bool = False) -> list[tuple[Any, ...]]:
        if not self.lane.is_at(stream):
            self.lane.go_to(stream, capturing=capturing)
        self.probe.issue(self.streams)
        found, self.fake.calls = self.fake.calls, []
        return found


def turn(old: int, new: int) -> list[tuple[Any, ...]]:
    return [("record", TURNED, old), ("wait", new, TURNED, 0)]


def test_h2_the_new_stream_waits_for_the_old_one() -> None:
    caller = Caller()
    assert caller.issue(FIRST) == [("record", PROBE, FIRST)]
    assert caller.issue(OTHER) == [*turn(FIRST, OTHER), ("record", PROBE, OTHER)]
    assert caller.issue(OTHER) == [("record", PROBE, OTHER)]
    assert caller.issue(FIRST) == [*turn(OTHER, FIRST), ("record", PROBE, FIRST)]


def test_t44_a_capture_waits_for_nothing_outside_and_the_lane_goes_on_behind_what_was_before() -> None:
    caller = Caller()
    for _ in range(2):
        assert caller.issue(GRAPH, capturing=True) == [("record", PROBE, GRAPH)]
        assert caller.issue(FIRST) == [("record", PROBE, FIRST)]
    caller.issue(GRAPH, capturing=True)
    assert caller.issue(OTHER) == [*turn(FIRST, OTHER), ("record", PROBE, OTHER)]


def test_t44_the_stream_of_a_capture_used_outside_of_it() -> None:
    caller = Caller()
    caller.issue(GRAPH, capturing=True)
    assert caller.issue(GRAPH) == [*turn(FIRST, GRAPH), ("record", PROBE, GRAPH)]
    assert caller.issue(GRAPH, capturing=True) == [("record", PROBE, GRAPH)]
    assert caller.issue(FIRST) == [*turn(GRAPH, FIRST), ("record", PROBE, FIRST)]


def test_changes_of_stream_build_no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller()
    monkeypatch.setattr("hostward.runtime.cuda.streams.CommandList", None)
    assert caller.issue(OTHER) == [*turn(FIRST, OTHER), ("record", PROBE, OTHER)]
    assert caller.issue(FIRST) == [*turn(OTHER, FIRST), ("record", PROBE, FIRST)]
