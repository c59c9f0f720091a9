"""The phases before the first step are timed, and the slow ones told while they last."""

from __future__ import annotations

import logging
import threading

import pytest

from hostward.core import startup
from hostward.core.startup import Startup


class Heard(logging.Handler):
    """Keeps messages, and says when there are `count` of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.enough = threading.Event()
        self._count = count

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == self._count:
            self.enough.set()


def test_a_slow_phase_is_told_while_it_lasts_and_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: a watcher that tells once; a total of nothing."""
    monkeypatch.setattr(startup, "SLOW_S", 0.0)
    monkeypatch.setattr(startup, "AGAIN_S", 0.0)
    timed, heard = Startup(), Heard(2)
    with caplog.at_level(logging.INFO, "hostward"):
        startup.log.addHandler(heard)
        try:
            with timed.phase("weights", "drawing 3 weights", "drew 3 weights"):
                assert heard.enough.wait(60)
            timed.log_total()
        finally:
            startup.log.removeHandler(heard)
    assert all(line.startswith("drawing 3 weights: 0 s so far, ") for line in heard.messages[:-2])
    assert heard.messages[0].endswith(" available")
    assert heard.messages[-2:] == ["drew 3 weights in 0 s", "ready after 0 s: iterations begin"]
    assert list(timed.seconds) == ["weights"]


def test_quick_phases_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    timed = Startup()
    with caplog.at_level(logging.INFO, "hostward"):
        with timed.phase("weights", "drawing 3 weights", "drew 3 weights"):
            pass
        timed.log_total()
    assert caplog.messages == []


def test_a_phase_that_raises_has_no_seconds_and_no_thread() -> None:
    """Seen red: a watcher that goes on."""
    timed, before = Startup(), threading.active_count()
    with pytest.raises(ZeroDivisionError), timed.phase("weights", "drawing", "drew"):
        raise ZeroDivisionError
    assert not timed.seconds
    assert threading.active_count() == before
