"""Read documents from files: the Python standard library, plain text, JSON lines and parquet.

Each reader is a generator of `Document` in a fixed order: files by relative path, then lines or rows as they stand.
"""

from __future__ import annotations

import importlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hostward.errors import DataError, needed_for
from hostward.trainer.data.tokenizer import Document

JSONL_SUFFIXES = (".jsonl", ".json")
PARQUET_SUFFIXES = (".parquet",)
INDEXED_SUFFIXES = (".bin", ".idx")
_PARQUET_TEXT_TYPES = ("string", "large_string", "string_view")

# Enough for some million tokens in every Python version, little enough to read in a second.
STDLIB_LIMIT_BYTES = 32 * 2**20
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a DataError about `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist",
            why="" if path.is_absolute() else f"the path is relative to {Path.cwd()}",
            fix="set dataset.path to a file or folder that is there, or to PREFIX where PREFIX.bin and PREFIX.idx are",
        ) from error
    except PermissionError as error:
        raise DataError(
            f"{path} cannot be read: permission denied",
            fix="give this user the right to read it, or set dataset.path to a copy that it may read",
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}",
            fix="repair the file, or set dataset.path to a copy that can be read",
        ) from error


def stdlib_files() -> list[Path]:
    """Return the `*.py` files of the running Python's standard library, by relative path.

    Installed packages and tests are left out. Files are taken in order until the next would pass `STDLIB_LIMIT_BYTES`.

    Raises:
        DataError: the sources are not on this machine, or cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    total_bytes = 0
    for path in _walk(root, skipped=_STDLIB_SKIPPED):
        if path.suffix != ".py":
            continue
        with reading(path):
            size_bytes = path.stat().st_size
        if total_bytes + size_bytes > STDLIB_LIMIT_BYTES:
            break
        total_bytes += size_bytes
        files.append(path)
    if not files:
        raise DataError(
            "the sources of the Python standard library are not on this machine",
            why=f"{root} holds no .py files",
            fix="set dataset.path to text of your own, or dataset.format=mock",
        )
    return files


def find_files(path: Path, suffixes: tuple[str, ...] | None) -> list[Path]:
    """Return the file `path`, or the files below the folder `path` by relative path, without hidden ones.

    Args:
        suffixes: lower-case suffixes to take in a folder; None takes every file, but raises for other formats.

    Raises:
        DataError: nothing there, not readable, or a folder without such files.
    """
    with reading(path):
        path.stat()
    if path.is_file():
        return [path]
    found = list(_walk(path, skipped=frozenset()))
    if suffixes is not None:
        files = [file for file in found if file.suffix.lower() in suffixes]
        if not files:
            raise DataError(
                f"the folder {path} holds no {' or '.join(suffixes)} file",
                fix="set dataset.path to a folder with such files, or dataset.format to what is in this one",
            )
        return files
    if not found:
        raise DataError(
            f"the folder {path} holds no files",
            why="hidden ones are left out",
            fix="put text into it, or set dataset.path to a file or to a folder with text",
        )
    for file in found:
        if file.suffix.lower() in (".jsonl", *PARQUET_SUFFIXES, *INDEXED_SUFFIXES):
            raise DataError(
                f"the folder {path} holds {file.relative_to(path)}, which is not plain text",
                why="a folder is read as text, every file of it",
                fix="set dataset.format=jsonl or parquet, or set dataset.path to the file or the .bin/.idx prefix",
            )
    return found


def text_documents(files: Sequence[Path]) -> Iterator[Document]:
    """Yield each file as one document.

    Raises DataError for a file that cannot be read.
    """
    for path in files:
        with reading(path):
            raw = path.read_bytes()
        yield Document(raw, str(path))


def jsonl_documents(files: Sequence[Path], text_key: str) -> Iterator[Document]:
    """Yield the document under `text_key` of each line, a JSON object; blank lines are skipped.

    Raises:
        DataError: with the line number: malformed JSON, not an object, `text_key` missing or not text.
    """
    for path in files:
        with reading(path), path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_document(line, f"{path} line {number}", text_key)


def parquet_documents(files: Sequence[Path], text_key: str) -> Iterator[Document]:
    """Yield each row's column `text_key` as a document.

    Raises:
        MissingPackageError: pyarrow is not installed.
        DataError: the file is not parquet, the column is missing, not text, or has a null.
    """
    with needed_for("dataset.format=parquet", "train"):
        # Through importlib, because pyarrow carries no types and may be absent where types are checked.
        pa: Any = importlib.import_module("pyarrow")
        pq: Any = importlib.import_module("pyarrow.parquet")
    for path in files:
        with reading(path):
            path.open("rb").close()
        try:
            with pq.ParquetFile(path) as file:
                _check_column(file.schema_arrow, path, text_key)
                row = 0
                for batch in file.iter_batches(columns=[text_key], batch_size=1024):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        yield _text_document(text, f"{path} row {row}", text_key)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is not a readable parquet file", why=str(error).splitlines()[0], fix="write the file again"
            ) from error


def _walk(root: Path, *, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield files below `root`, sorted by relative path with `/` between parts, so that the order is the same
    everywhere.
    """

    def refuse(error: OSError) -> None:
        with reading(Path(error.filename)):
            raise error

    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            with reading(path):
                if not name.startswith(".") and path.is_file():
                    found.append((path.relative_to(root).as_posix(), path))
    return (path for _, path in sorted(found))


def _json_document(line: bytes, origin: str, text_key: str) -> Document:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{origin} is not valid JSON",
            why=str(error),
            fix="each line must be one JSON object; for plain text set dataset.format=text",
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{origin} is a JSON {type(record).__name__}, not an object",
            fix=f'each line must be one object such as {{"{text_key}": "..."}}',
        )
    if text_key not in record:
        raise DataError(
            f"{origin} has no key '{text_key}'; its keys are: {_listed(record)}",
            fix="set dataset.text_key to the key that holds the text",
        )
    return _text_document(record[text_key], origin, text_key)


def _text_document(text: object, origin: str, text_key: str) -> Document:
    if not isinstance(text, str):
        found = "null" if text is None else f"a value of type {type(text).__name__}"
        raise DataError(
            f"{origin} holds {found} in '{text_key}', not text",
            fix="remove such records, or set dataset.text_key to the key that holds the text",
        )
    try:
        return Document(text.encode("utf-8"), origin)
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin} has half a surrogate pair in '{text_key}', which no UTF-8 text can hold",
            fix="repair or remove that record",
        ) from error


def _check_column(schema: Any, path: Path, text_key: str) -> None:
    fields = {field.name: str(field.type) for field in schema}
    if text_key not in fields:
        raise DataError(
            f"{path} has no column '{text_key}'; its columns are: {_listed(fields)}",
            fix="set dataset.text_key to the column that holds the text",
        )
    if fields[text_key] not in _PARQUET_TEXT_TYPES:
        raise DataError(
            f"the column '{text_key}' of {path} holds {fields[text_key]}, not text",
            fix="set dataset.text_key to the column that holds the text",
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
