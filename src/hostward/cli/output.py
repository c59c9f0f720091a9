"""What commands write: tables, files, and whether they can be written, asked before the work rather than after it."""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hostward.checkpoint_files import is_checkpoint
from hostward.errors import ConfigError
from hostward.run_report import finite

command_words: ContextVar[list[str]] = ContextVar("command")
"""The words of this command line, for reports."""


class Marked(logging.Formatter):
    """Lines of the log as errors are written: by the rank, if it is not the first, and with their kind."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        kind = "warning: " if record.levelno == logging.WARNING else ""
        return f"{self._prefix}{kind}{super().format(record)}"


def require_writable(option: str, file: Path | None) -> None:
    """Raises ConfigError now rather than after the run. Leaves no file behind, and one that is there as it was."""
    if file is None:
        return
    if not file.resolve().parent.is_dir():
        raise ConfigError(f"{option} {file}: its folder does not exist", fix=f"mkdir -p {file.parent}")
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a folder", fix=f"name a file, as in {file / 'report.json'}")
    existed = file.exists()
    try:
        file.open("a").close()
        if not existed:
            file.unlink(missing_ok=True)  # ranks of a run ask at the same time
    except OSError as error:
        raise _unwritable(option, file, error) from error


def require_replaceable(option: str, file: Path | None) -> None:
    """The same for what comes as a new file in place of the old one: a trace, a plan, a hardware file."""
    if file is None:
        return
    if file.exists() and not file.is_file() and not file.is_dir():
        raise ConfigError(f"{option} {file} is no plain file", why="it would be replaced", fix="name another file")
    require_writable(option, file)
    try:
        tempfile.TemporaryFile(dir=file.resolve().parent).close()
    except OSError as error:
        raise _unwritable(option, file, error) from error


def _unwritable(option: str, file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option} {file} cannot be written", why=error.strerror or str(error), fix="name a file in another folder"
    )


def require_folder(told: str, folder: Path) -> None:
    """Make the folder, if need be. Raises ConfigError, which begins with `told`, where it cannot be made or written, or
    is a checkpoint.
    """
    if is_checkpoint(folder):
        raise ConfigError(
            f"{told} is a checkpoint",
            why="what else is written into it is removed with it",
            fix="name another folder, as in the one that it lies in",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{told} cannot be written", why=why, fix="name another folder") from error


@contextmanager
def gone_if_refused(folder: Path | None) -> Iterator[None]:
    """A folder that the body makes, and leaves empty, goes again where the body fails."""
    is_new = folder is not None and not folder.exists()
    try:
        yield
    except BaseException:
        if folder is not None and is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def print_tables(tables: Sequence[Any]) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)


def write_report(json_file: Path | None, content: dict[str, Any]) -> None:
    """A report as JSON, with what it takes to read it later: date, command and versions."""
    write_json(json_file, json.dumps(finite({**circumstances(), **content}), indent=1, allow_nan=False) + "\n")


def write_json(json_file: Path | None, text: str) -> None:
    if json_file is None:
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
    """Of those that are installed."""
    from importlib import metadata

    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
