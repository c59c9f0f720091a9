"""Time the phases of a run before its first step, and log the slow ones while they last. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hostward.core.host_limits import host_memory, resident_bytes
from hostward.core.units import size

log = logging.getLogger("hostward")

SLOW_S = 5.0
"""A phase that takes longer is logged,"""
AGAIN_S = 30.0
"""and again after each of these seconds while it lasts."""


@contextmanager
def watched(doing: str) -> Iterator[None]:
    """Log `doing` from a thread once the block has taken longer than `SLOW_S`, and again while it lasts.

    Each line has the seconds so far, and the host memory, which shows how far an allocation has come, and what is left.
    """
    began_s, over = time.perf_counter(), threading.Event()

    def watch() -> None:
        wait_s = SLOW_S
        while not over.wait(wait_s):
            so_far_s, wait_s = time.perf_counter() - began_s, AGAIN_S
            resident, left = size(resident_bytes()), size(host_memory().available_bytes)
            log.info("%s: %.0f s so far, host memory %s resident, %s available", doing, so_far_s, resident, left)

    watcher = threading.Thread(target=watch, name="hostward-startup", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class Startup:
    """Times phases and logs each one that takes longer than `SLOW_S`: with the seconds so far, and when it is over.

    `seconds` holds the seconds of each phase that is over, by its name, in order. A phase that raises has none.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, doing: str, done: str) -> Iterator[None]:
        """Time the block as the phase `name`.

        Args:
            doing: text of the log while the block runs, as "drawing 8.19 B weights".
            done: text of the log after it, as "drew 8.19 B weights".
        """
        began_s = time.perf_counter()
        with watched(doing):
            yield
        self.seconds[name] = time.perf_counter() - began_s
        if self.seconds[name] > SLOW_S:
            log.info("%s in %.0f s", done, self.seconds[name])

    def log_total(self) -> None:
        """Log that iterations begin, if the phases together took longer than `SLOW_S`."""
        total_s = sum(self.seconds.values())
        if total_s > SLOW_S:
            log.info("ready after %.0f s: iterations begin", total_s)
