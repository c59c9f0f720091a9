"""Write the output of commands: tables and files, checked before the work that they can be written."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from hostward.checkpoint.files import is_checkpoint
from hostward.core.units import size
from hostward.errors import ConfigError
from hostward.report.schema import finite, iterations

if TYPE_CHECKING:
    from hostward.report.schema import OffloadReport, StepRow
    from hostward.trainer.run import Run


command_words: ContextVar[list[str]] = ContextVar("command")
"""Words of this command line, for reports."""
STDOUT = Path("-")
"""Written for standard output after --json; the command's text is then on stderr."""


class Marked(logging.Formatter):
    """Formats log lines like errors: with their kind, and the rank if it is not the first."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        kind = "warning: " if record.levelno == logging.WARNING else ""
        return f"{self._prefix}{kind}{super().format(record)}"


def require_writable(option: str, file: Path | None) -> None:
    """Raise ConfigError now rather than after the run if a file cannot be written.

    A new file is not left behind, and an existing one is unchanged.
    """
    if file is None or (file == STDOUT and option == "--json"):
        return
    if file == STDOUT:
        raise ConfigError(f"{option} - names no file", why="only --json writes to standard output", fix="name a file")
    # Functions of os.path: those of Path raise for a link to itself, and for a name that is too long.
    if not os.path.exists(folder := os.path.dirname(os.path.realpath(file))):
        raise ConfigError(f"{option} {file}: its folder does not exist", fix=f"mkdir -p {shlex.quote(folder)}")
    if os.path.isdir(file):
        raise ConfigError(f"{option} {file} is a folder", fix=f"name a file, as in {file / 'report.json'}")
    existed = os.path.exists(file)
    try:
        file.open("a").close()
        if not existed:
            file.unlink(missing_ok=True)  # another run may check at the same time
    except OSError as error:
        raise _unwritable(option, file, error) from error


def require_replaceable(option: str, file: Path | None) -> None:
    """Raise ConfigError if a file cannot be replaced as a whole: a trace, a plan, a hardware file."""
    if file is None or file == STDOUT:
        require_writable(option, file)
        return
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        raise ConfigError(f"{option} {file} is no plain file", why="it would be replaced", fix="name another file")
    require_writable(option, file)
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(file))).close()
    except OSError as error:
        raise _unwritable(option, file, error) from error


def require_apart(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Raise ConfigError if a file to be written is also one of the others; files are by their option."""
    seen = dict[str, str]()
    for option, file in {**read, **written}.items():
        if file is None or file == STDOUT:
            continue
        other = seen.setdefault(os.path.realpath(file), option)
        if other != option and option in written:
            raise ConfigError(
                f"{other} and {option} both name {file}", why="one would replace the other", fix="name two files"
            )


def _unwritable(option: str, file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option} {file} cannot be written", why=error.strerror or str(error), fix="name a file in another folder"
    )


def require_folder(label: str, folder: Path) -> None:
    """Make the folder if it does not exist.

    Raises ConfigError, which begins with `label`, if it cannot be made or written, or is a checkpoint.
    """
    if is_checkpoint(folder):
        raise ConfigError(
            f"{label} is a checkpoint",
            why="other files in it would be removed with it",
            fix="name another folder, for example its parent",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{label} cannot be written", why=why, fix="name another folder") from error


@contextmanager
def removed_on_failure(folder: Path | None) -> Iterator[None]:
    """Remove the folder, and those above it, that the body creates and leaves empty, if the body raises."""
    made = [] if folder is None else [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in made:
                each.rmdir()
        raise


def text_stream(json_file: Path | None) -> TextIO:
    """Return the stream of a command's text: stdout, or stderr where `--json -` has stdout for itself."""
    return sys.stderr if json_file == STDOUT else sys.stdout


def fact_lines(facts: Mapping[str, str]) -> list[str]:
    """Return facts by subject as lines of two columns that fit the terminal, or 80 columns if there is none."""
    indent = max(map(len, facts)) + 2
    width = shutil.get_terminal_size().columns
    texts = (_filled(text, width, subject.ljust(indent), " " * indent) for subject, text in facts.items())
    return "\n".join(texts).splitlines()


_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_COMMAND = re.compile(r" +hostward [a-z]+ ")


def wrapped(text: str) -> str:
    """Return text whose lines fit the terminal, or 80 columns if there is none.

    A longer line goes on below the start of its last column, if it is a row of columns, else indented. An indented
    command stays whole, for a terminal that breaks it itself pastes it as one line.
    """
    width = shutil.get_terminal_size().columns
    return "".join(_fitting(line, width) for line in text.splitlines(keepends=True))


def _fitting(line: str, width: int) -> str:
    if len(line.rstrip()) <= width or _COMMAND.match(line):
        return line
    gaps = [gap.end() for gap in _GAP.finditer(line) if gap.end() <= width * 3 // 4]
    start = gaps[-1] if gaps else len(line) - len(line.lstrip())
    hang = " " * (start if gaps else start + 4)
    return _filled(line[start:].strip(), width, line[:start], hang) + "\n"


def _filled(text: str, width: int, first: str, later: str) -> str:
    """Fill lines that begin with `first` and `later`; words, flags and paths stay whole."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def print_tables(tables: Sequence[Any], stream: TextIO) -> None:
    """Print tables of rich. Raises BrokenPipeError where the reader of the stream is gone."""
    from rich.console import Console

    class Tables(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this while it handles the error; of itself it exits with 1

    console = Tables(file=stream)
    for table in tables:
        console.print(table)


def write_report(json_file: Path | None, content: dict[str, Any]) -> None:
    """Write a report as JSON, with its circumstances (date, command and versions), as `write_json`."""
    write_json(json_file, json.dumps(finite({**circumstances(), **content}), indent=1, allow_nan=False) + "\n")


def write_json(json_file: Path | None, text: str) -> None:
    """Write the text to the file, or to stdout if that is `-`. Raises ConfigError if the file cannot be written."""
    if json_file is None:
        return
    if json_file == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        json_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable("--json", json_file, error) from error


def circumstances() -> dict[str, Any]:
    import platform
    from datetime import UTC, datetime

    from hostward import __version__

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["hostward", *command_words.get()]),
        "versions": {
            "hostward": __version__,
            "python": platform.python_version(),
            **_versions("torch", "transformers", "numpy"),
        },
    }


def _versions(*packages: str) -> dict[str, str]:
    """Return the versions of those that are installed."""
    from importlib import metadata

    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# The progress of a run on stderr: one line that is rewritten in place on a terminal, lines at intervals elsewhere.


log = logging.getLogger("hostward")

REDRAW_S = 0.1
"""Seconds between two redraws of a terminal, at least."""
MOST_COLUMNS = 80
RECENT = 32
"""Iterations whose mean time predicts the time that is left."""
_CLEAR = "\r\x1b[K"


class Progress:
    """Shows progress after each iteration, from numbers that have reached the host.

    Args:
        stream: receives the line, if it is a terminal; else lines go to the log.
        columns: width of the terminal.
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
        self._reported: OffloadReport | None = None

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
        """Show the newest iteration whose numbers have reached the host.

        Later ones may still be in flight. The times of the metered iterations are logged once.
        """
        from hostward.trainer.report import newest_row

        if run.offload is not None and run.offload is not self._reported:
            self._reported = run.offload
            log.info("%s", measured(run.offload))
        done, until = run.first_iteration + len(run.losses), run.config.train.train_iters
        if not self._live:
            if done == run.first_iteration + 1 or done % run.config.logger.log_interval == 0:
                log.info("iteration %s", "  ".join(parts(run, newest_row(run))))
            return
        now_s = self._clock_s()
        if done < until and now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now_s
        self._line = fitted(parts(run, newest_row(run)), min(self._columns() - 1, MOST_COLUMNS))
        self._stream.write(_CLEAR + self._line)
        self._stream.flush()

    def _make_way(self, record: logging.LogRecord) -> bool:
        """Clear the progress line for a log record; it is shown again after the next step."""
        self._stream.write(_CLEAR)
        self._drawn_s = -math.inf
        return True


def parts(run: Run, row: StepRow) -> list[str]:
    """Return the parts of the progress line, the most important first: memory, overlap, and the time that is left."""
    until = run.config.train.train_iters
    said = [f"{row.iteration + 1}/{until}", _memory_part(run, row)]
    if run.offload is not None:
        first, last = run.offload.first_iteration + 1, run.offload.last_iteration
        said.append(f"exposed {run.offload.exposed_s:.3f} s in {first}-{last}")
    recent = run.iteration_s[1:][-RECENT:]  # the first compiles and allocates
    if recent:
        said.append(f"{duration((until - row.iteration - 1) * sum(recent) / len(recent))} left")
    said.append(f"loss {row.loss:.4f}")
    said.append(f"{row.step_s:.3f} s")
    said.append(f"grad norm {row.grad_norm:.4f}")
    said.append(f"{row.tokens_per_s:,.0f} tokens/s")
    if row.pinned_bytes and run.device.type == "cuda":
        said.append(f"pinned {size(row.pinned_bytes)}")
    return said


def _memory_part(run: Run, row: StepRow) -> str:
    from hostward.runtime.backend import Tier

    # A simulated device counts what hostward allocates; gradients are torch's.
    held = row.device_allocated_bytes
    if held is None:
        held = run.optimizer.backend.ledger.total_bytes(Tier.DEVICE)
    on_device, on_host = size(held), size(row.host_resident_bytes)
    unit = on_host.partition(" ")[2]
    where = "simulated" if run.device.type == "cpu" else "device"
    return f"{where} {on_device.removesuffix(f' {unit}')}, host {on_host}"


def duration(seconds: float) -> str:
    """Format a time to go in the largest unit of which there are two."""
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds:.0f} s"


def measured(offload: OffloadReport) -> str:
    """Describe the cost of offloading in the metered iterations, in words."""
    span = iterations(offload.first_iteration, offload.last_iteration)
    return f"in {span}, per step: hidden {offload.hidden_s:.3f} s, exposed {offload.exposed_s:.3f} s"


def fitted(said: list[str], columns: int) -> str:
    """Join as many whole parts as fit the width."""
    line = said[0][: max(0, columns)]
    for part in said[1:]:
        if len(line) + 2 + len(part) > columns:
            break
        line = f"{line}  {part}"
    return line
