"""The progress of a run on stderr: one line that is rewritten in place on a terminal, lines at intervals elsewhere."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from hostward.run_report import iterations
from hostward.sizes import size

if TYPE_CHECKING:
    from hostward.run_report import StepRow
    from hostward.train.loop import Run

log = logging.getLogger("hostward")

REDRAW_S = 0.1
"""A terminal is drawn no more often."""
_CLEAR = "\r\x1b[K"


class Progress:
    """A context in which `show` may be called after each iteration. It only reads what has arrived on the host.

    Args:
        stream: where the line goes, if it is a terminal; else lines go to the log.
        columns: the width of the terminal.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._clock_s = clock_s
        self._columns = columns
        self._drawn_s = -math.inf
        self._line = ""

    def __enter__(self) -> Progress:
        if self._live:
            for handler in logging.getLogger().handlers:
                handler.addFilter(self._make_way)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            for handler in logging.getLogger().handlers:
                handler.removeFilter(self._make_way)
            if self._line:
                self._stream.write("\n")
                self._stream.flush()

    def show(self, run: Run) -> None:
        """The newest iteration whose numbers have arrived; later ones may be on their way already."""
        from hostward.train.report import newest_row

        done, until = run.first_iteration + len(run.losses), run.config.train.train_iters
        if not self._live:
            if done == run.first_iteration + 1 or done % run.config.logger.log_interval == 0:
                log.info("%s", "  ".join(parts(run, newest_row(run))))
            return
        now_s = self._clock_s()
        if done < until and now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now_s
        self._line = fitted(parts(run, newest_row(run)), self._columns() - 1)
        self._stream.write(_CLEAR + self._line)
        self._stream.flush()

    def _make_way(self, record: logging.LogRecord) -> bool:
        """Before a line of the log: it takes the place of the progress line, which comes again after the next step."""
        self._stream.write(_CLEAR)
        self._drawn_s = -math.inf
        return True


def parts(run: Run, row: StepRow) -> list[str]:
    """What there is to say, the most important first."""
    from hostward.engine.backend import Tier

    said = [
        f"iteration {row.iteration + 1}/{run.config.train.train_iters}",
        f"loss {row.loss:.6f}",
        f"grad norm {row.grad_norm:.4f}",
        f"{row.step_s:.3f} s",
        f"{row.tokens_per_s:,.0f} tokens/s",
    ]
    held = row.device_allocated_bytes
    if held is None:
        held = run.optimizer.backend.ledger.total_bytes(Tier.DEVICE)
    said.append(f"{'simulated device' if run.device.type == 'cpu' else 'device'} {size(held)}")
    said.append(f"host {size(row.host_resident_bytes)}")
    if row.pinned_bytes and run.device.type == "cuda":
        said.append(f"pinned {size(row.pinned_bytes)}")
    if run.offload is not None:
        span = iterations(run.offload.first_iteration, run.offload.last_iteration)
        said.append(f"in {span}: hidden {run.offload.hidden_s:.3f} s, exposed {run.offload.exposed_s:.3f} s")
    return said


def fitted(said: list[str], columns: int) -> str:
    """As many parts as fit, whole."""
    line = said[0][: max(0, columns)]
    for part in said[1:]:
        if len(line) + 2 + len(part) > columns:
            break
        line = f"{line}  {part}"
    return line
