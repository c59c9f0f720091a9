"""Small text files: read as a whole, written as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import ConfigError


def read_text(path: Path, fix: str) -> str:
    """The file's text. Raises ConfigError with this `fix` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path} cannot be read", why=why, fix=fix) from error


def write_text(path: Path, text: str) -> None:
    """Put a file with this text in the place of `path`. Raises ConfigError where that cannot be done."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written", why=error.strerror or str(error), fix="name a file in another folder"
        ) from error
