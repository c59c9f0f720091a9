"""Write the files of a run: `report.json` and `trace.json`, at its end and at intervals, and scalars for
TensorBoard.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from hostward.checkpoint.files import read_latest
from hostward.cli.output import require_folder
from hostward.errors import HostwardError, needed_for
from hostward.report.schema import PAGE_FILE, REPORT_FILE, TRACE_FILE, Ended, RunReport

if TYPE_CHECKING:
    from hostward.config.schema import CheckpointConfig
    from hostward.trainer.run import Run


log = logging.getLogger("hostward")

INTERVAL_S = 30.0
"""Seconds between two reports of a running run."""
_SHARE = 0.005
"""Largest share of a run's time for writing such reports."""


PATIENCE_S = 5.0
"""Seconds in which further SIGTERMs count as the same: schedulers signal all processes, and launchers forward
theirs.
"""


class Terminated(BaseException):
    """Signals that SIGTERM has arrived.

    Like KeyboardInterrupt it is not an Exception, so that no error handling catches it.
    """


@contextlib.contextmanager
def terminable(ask: Callable[[], None] | None = None) -> Iterator[None]:
    """Raise Terminated on SIGTERM inside the block; the next SIGTERM ends the process as it would without.

    Args:
        ask: called for the very first SIGTERM, which then raises nothing, nor do others that arrive with it.
    """
    asked_s = -math.inf
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal ask, asked_s
        if ask is not None:
            ask()
            ask, asked_s = None, time.monotonic()
        if time.monotonic() - asked_s < PATIENCE_S:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def noting_resume_point(options: CheckpointConfig) -> Iterator[None]:
    """Add the checkpoint to resume from, if there is one, as a note to a signal that ends training in the block."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as ended:
        newest = None
        if options.save is not None:
            with contextlib.suppress(HostwardError, OSError):  # the error that ended the run is the one to report
                newest = read_latest(Path(options.save))
        if newest is not None:
            ended.add_note(f"the newest complete checkpoint is {newest}; {going_on(options)}")
        raise


def going_on(options: CheckpointConfig) -> str:
    """Return the advice how to resume a run that was ended."""
    without = ", and without checkpoint.finetune" if options.finetune else ""
    return f"resume with checkpoint.load={options.save}{without}"


class RunFiles:
    """Writes a report of the training inside its context.

    Args:
        folder: the run's folder; None: nothing is written during the run or after an error, and only `report` is set.
        circumstances: `date`, `command` and `versions` as of now.
    """

    def __init__(self, run: Run, folder: Path | None, circumstances: Callable[[], dict[str, Any]]) -> None:
        self._run = run
        self._folder = folder
        self._circumstances = circumstances
        self._next_s = time.monotonic() + INTERVAL_S
        self._began_ns = time.time_ns()
        self.report: RunReport | None = None
        """Final report of the run."""

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended, reason = _how(error, stopped=self._run.stopped)
        if error is None:
            self.report = self._made(ended, reason)
            self._write(self.report)
            return
        try:
            self._write(self._made(ended, reason))
        except HostwardError as second:  # the first error is the one to show
            log.warning("the report of this run could not be written: %s", second.why or second.what)

    def going_on(self, run: Run) -> None:
        """Write a report of the run so far, if the last one is old; it remains after signal 9."""
        began_s = time.monotonic()
        if self._folder is None or began_s < self._next_s:
            return
        try:
            # The checkpoints' folder is made with the first of them.
            require_folder(f"the run's folder {self._folder}", self._folder)
            self._made(Ended.RUNNING, None).write(self._folder / REPORT_FILE)
            self._drop_page(self._folder)
            _drop_trace(self._folder)
        except HostwardError as error:  # a full disk is no reason to stop training
            log.warning("the report so far could not be written: %s", error.why or error.what)
        ended_s = time.monotonic()
        self._next_s = ended_s + max(INTERVAL_S, (ended_s - began_s) / _SHARE)

    def _made(self, ended: Ended, reason: str | None) -> RunReport:
        from hostward.trainer.report import report

        return report(self._run, self._circumstances(), ended=ended, reason=reason)

    def _drop_page(self, folder: Path) -> None:
        """Remove the page that `hostward report` made of an earlier run, but not one of this run so far."""
        with contextlib.suppress(OSError):
            if (folder / PAGE_FILE).stat().st_mtime_ns < self._began_ns:
                (folder / PAGE_FILE).unlink()

    def _write(self, made: RunReport) -> None:
        if self._folder is None:
            return
        require_folder(f"the run's folder {self._folder}", self._folder)
        made.write(self._folder / REPORT_FILE)
        self._drop_page(self._folder)
        if self._run.trace is not None:
            self._run.trace.write(self._folder / TRACE_FILE)
        else:
            _drop_trace(self._folder)


def run_folder(run_dir: Path | None, save: str | None) -> Path | None:
    """Return the folder of a run's files: `--run-dir`, else checkpoint.save, else None."""
    return run_dir if run_dir is not None or save is None else Path(save)


def _drop_trace(folder: Path) -> None:
    """Remove the trace of an earlier run in this folder; this run's own is written at its end."""
    with contextlib.suppress(OSError):
        (folder / TRACE_FILE).unlink()


def _how(error: BaseException | None, *, stopped: bool) -> tuple[Ended, str | None]:
    if isinstance(error, Terminated) or (error is None and stopped):
        return Ended.TERMINATED, "SIGTERM"
    if error is None:
        return Ended.FINISHED, None
    if isinstance(error, KeyboardInterrupt):
        return Ended.INTERRUPTED, "Ctrl-C (SIGINT)"
    what = error.what if isinstance(error, HostwardError) else f"{type(error).__name__}: {error}"
    return Ended.FAILED, what.partition("\n")[0]


# The scalars of a run for TensorBoard.


class ScalarWriter(Protocol):
    """Lists the methods of torch's SummaryWriter that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...

    def close(self) -> None: ...


def require_tensorboard(folder: str) -> None:
    """Raise MissingPackageError without TensorBoard, before a run rather than in it."""
    with needed_for(f"logger.tensorboard_dir={folder}", "report", otherwise="leave logger.tensorboard_dir at null"):
        import torch.utils.tensorboard  # noqa: F401


def open_writer(folder: str) -> ScalarWriter:
    """Open torch's writer into an existing folder, after `require_tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    writer: ScalarWriter = SummaryWriter(folder)
    return writer


class Scalars:
    """Writes each iteration once its numbers have reached the host, and closes the writer at its end."""

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer = writer

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()

    def write(self, run: Run) -> None:
        """Write the newest iteration that has reached the host.

        Steps count from 1, as Megatron's do.
        """
        from hostward.trainer.report import newest_row

        row = newest_row(run)
        values: dict[str, float | None] = {
            "lm loss": row.loss,
            "grad-norm": row.grad_norm,
            "learning-rate": row.learning_rate,
            "iteration-time": row.step_s,
            "tokens-per-second": row.tokens_per_s,
            "skipped": float(row.skipped),
            "mem-allocated-bytes": row.device_allocated_bytes,
            "mem-max-allocated-bytes": row.device_peak_bytes,
            "mem-reserved-bytes": row.device_reserved_bytes,
            "host-resident-bytes": row.host_resident_bytes,
            "pinned-bytes": row.pinned_bytes,
            "offload-hidden-seconds": None if run.offload is None else run.offload.hidden_s,
            "offload-exposed-seconds": None if run.offload is None else run.offload.exposed_s,
        }
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, row.iteration + 1)
