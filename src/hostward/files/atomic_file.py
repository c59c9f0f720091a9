"""Read small text files as a whole, and replace them atomically. No torch."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from hostward.errors import ConfigError


def read_text(path: Path, fix: str, *, what: str = "") -> str:
    """Return the file's text, where `what` is the kind of file.

    Raises ConfigError with this `fix` where the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{what} {path} cannot be read".lstrip(), why=why, fix=fix) from error


def replace_text(path: Path, text: str, *, what: str) -> None:
    """Write `text`, UTF-8, in place of what is at `path`; readers see the old file or the new one, never a part.

    Args:
        what: the kind of file, for errors: "trace", "report".

    Raises:
        ConfigError: `path` is no plain file, or cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{what} {path} is no plain file", why="it would be replaced", fix="name another file")
        with partial.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be written",
            why=error.strerror or str(error),
            fix="name a file in a folder that exists, that this user may write to and that has space",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # gone already, unless something failed
