"""A word before the host's memory runs out: the kernel, when it kills, says none. And one where the device's has run
out without an error: torch's allocator then takes time instead.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from hostward.hardware import host_memory, resident_bytes
from hostward.run_report import StepBytes
from hostward.sizes import gib

log = logging.getLogger("hostward")

LEVELS = (0.95, 0.98)
"""Shares of the memory in use at which something is said, once each."""


class Watermark:
    """Looks at the memory that this process may use, in several files: now and then, and until all has been said.

    Args:
        root: where `proc` and `sys` are looked up.
        interval_s: between two looks, at least.
    """

    def __init__(self, root: Path = Path("/"), *, interval_s: float = 1.0) -> None:
        self._root = root
        self._interval_s = interval_s
        self._looked_s = -math.inf
        self._left = list(LEVELS)

    def look(self, iteration: int) -> None:
        """Warn if a level has been reached since the last look, if that is long enough ago."""
        now_s = time.monotonic()
        if not self._left or now_s - self._looked_s < self._interval_s:
            return
        self._looked_s = now_s
        memory = host_memory(self._root)
        used = 1 - memory.available_bytes / memory.total_bytes
        reached = [level for level in self._left if used >= level]
        if reached:
            self._left = [level for level in self._left if level not in reached]
            log.warning(
                "iteration %d: %.0f %% of the host's memory is in use (%s GiB left of %s by %s; this process has %s). "
                "At the limit the kernel kills with signal 9. Lower optimizer.optimizer_offload_fraction or the data "
                "loader's share, or give the process more memory; `hostward plan` says what the run needs",
                iteration, 100 * used, gib(memory.available_bytes), gib(memory.total_bytes), memory.limited_by,
                gib(resident_bytes(self._root)),
            )  # fmt: skip


class FullDevice:
    """Says once that torch's CUDA allocator finds no memory in one iteration after the other. It then gives back what
    it keeps for later, and CUDA lets it only when the whole GPU has come to rest: host steps and copies too, so that
    nothing of them is hidden, and no operation is seen to wait for them.
    """

    PATIENCE = 4
    """Iterations in a row. In a few it may happen while pools of several streams find their sizes."""

    def __init__(self) -> None:
        self._retries: int | None = None
        self._in_a_row = 0
        self._told = False

    def look(self, iteration: int, step: StepBytes) -> None:
        """After the step of an iteration has been issued."""
        now = step.alloc_retries
        if now is None or self._told:
            return
        more, self._retries = now - (now if self._retries is None else self._retries), now
        self._in_a_row = self._in_a_row + 1 if more else 0
        if self._in_a_row == self.PATIENCE:
            self._told = True
            log.warning(
                "iterations %d to %d: torch's CUDA allocator found no memory and gave back what it keeps, %d times in "
                "the last. The host then waits until the GPU has finished, offloaded work too, and nothing of that is "
                "hidden. It holds %s GiB, of which at most %s are in use at a time: pools of several streams do not "
                "lend to one another. Let the run hold less: `hostward plan` names choices",
                iteration - self.PATIENCE + 1, iteration, more, gib(step.device_reserved_bytes or 0),
                gib(step.device_peak_bytes or 0),
            )  # fmt: skip
