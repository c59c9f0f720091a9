"""Read and write Megatron's indexed data: `PREFIX.bin` holds token ids, `PREFIX.idx` the position of each sequence.

The index, little-endian, without padding:

    9 bytes   magic, b"MMIDIDX" and two zeros
    uint64    version, 1
    uint8     dtype of the tokens, see `_DTYPES`
    uint64    S, number of sequences
    uint64    D, number of document boundaries: documents + 1
    int32[S]  tokens per sequence
    int64[S]  byte offset of each sequence in the .bin
    int64[D]  first sequence of each document, ending with S
    int8[S]   mode per sequence, in multimodal data only; not read here
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hostward.errors import DataError
from hostward.trainer.data.documents import INDEXED_SUFFIXES, reading

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_EDGE_BYTES = 2**20

_Array = npt.NDArray[Any]


def indexed_prefix(path: str) -> str:
    """Return `path` without `.bin` or `.idx`."""
    return path[:-4] if path.endswith(INDEXED_SUFFIXES) else path


def is_indexed(path: str) -> bool:
    """Return whether `path` names indexed data: a `.bin` or `.idx` suffix, or a prefix without a file of its own."""
    if path.endswith(INDEXED_SUFFIXES):
        return True
    return not os.path.exists(path) and any(os.path.exists(path + suffix) for suffix in INDEXED_SUFFIXES)


@final
class IndexedTokens:
    """Reads the tokens of indexed data as one flat stream, sequence after sequence, through memory maps.

    Sequences may be anywhere in the `.bin`, in any order, and may share bytes. Nothing is put between documents: the
    writer of the data has put its end-of-document tokens in.

    Args:
        path: the prefix, or the path of either file.

    Attributes:
        description: name, documents and dtype.
        identity: hash of the whole index, and of size, beginning and end of the `.bin`.
        n_documents: number of documents.

    Raises:
        DataError: a file is missing, not readable, truncated, of another format or version, or the two disagree.
    """

    def __init__(self, path: str) -> None:
        prefix = indexed_prefix(path)
        self._idx_path = Path(prefix + ".idx")
        self._bin_path = Path(prefix + ".bin")
        index = _map(self._idx_path)
        self._data = _map(self._bin_path)
        self._dtype, n_sequences, n_boundaries = self._read_header(index)
        offset = _HEADER.size
        self._lengths: _Array = np.frombuffer(index, "<i4", n_sequences, offset)
        self._pointers: _Array = np.frombuffer(index, "<i8", n_sequences, offset + 4 * n_sequences)
        boundaries: _Array = np.frombuffer(index, "<i8", n_boundaries, offset + 12 * n_sequences)
        self._check_layout(boundaries)
        self.n_documents = n_boundaries - 1
        # Position in the stream of the first token of each sequence, and of the end.
        self._starts: _Array = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths, dtype=np.int64)])
        self.description = f"indexed data {Path(prefix).name} ({self.n_documents:,} documents, {self._dtype.name})"
        self.identity = _identity(index, self._data)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [stop - start] of the stream from `start` on."""
        tokens = np.empty(stop - start, dtype=np.int64)
        done = start
        sequence = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < stop:
            end = min(stop, int(self._starts[sequence + 1]))
            within_bytes = (done - int(self._starts[sequence])) * self._dtype.itemsize
            piece = np.frombuffer(
                self._data, self._dtype, end - done, offset=int(self._pointers[sequence]) + within_bytes
            )
            tokens[done - start : end - start] = piece
            done = end
            sequence += 1
        return tokens

    def _read_header(self, index: _Array) -> tuple[np.dtype[Any], int, int]:
        """Return the dtype of the tokens, and the numbers of sequences and of document boundaries."""
        path = self._idx_path
        head = index[: _HEADER.size].tobytes()
        if not head.startswith(_MAGIC[: len(head)]):
            raise DataError(
                f"{path} is not an index of Megatron's format",
                why=f"it begins with {head[: len(_MAGIC)]!r} and not with {_MAGIC!r}",
                fix="write the data with Megatron's preprocessing, or set dataset.path to text, JSON lines or parquet",
            )
        if len(head) < _HEADER.size:
            raise _truncated(path, _HEADER.size, len(index))
        _, version, code, n_sequences, n_boundaries = _HEADER.unpack(head)
        if version != _VERSION:
            raise DataError(
                f"{path} has version {version}; only version {_VERSION} is known", fix="write the data again"
            )
        if code not in _DTYPES:
            raise DataError(
                f"{path} names token dtype {code}; known are {min(_DTYPES)} to {max(_DTYPES)}",
                fix="write the data again",
            )
        dtype = np.dtype(_DTYPES[code])
        if dtype.kind == "f":
            raise DataError(
                f"{path} holds {dtype.name} values, which are no token ids",
                fix="write the data with an integer dtype",
            )
        needed_bytes = _HEADER.size + 12 * n_sequences + 8 * n_boundaries
        if len(index) < needed_bytes:
            raise _truncated(path, needed_bytes, len(index))
        if len(index) not in (needed_bytes, needed_bytes + n_sequences):
            raise DataError(
                f"{path} has {len(index) - needed_bytes:,} bytes more than its header declares",
                fix="the file is damaged: write the data again",
            )
        return dtype, n_sequences, n_boundaries

    def _check_layout(self, boundaries: _Array) -> None:
        n_sequences = len(self._lengths)
        if (
            len(boundaries) == 0
            or boundaries[0] != 0
            or boundaries[-1] != n_sequences
            or np.any(np.diff(boundaries) < 0)
        ):
            raise DataError(
                f"the document boundaries of {self._idx_path} do not run from 0 to its {n_sequences:,} sequences",
                fix="the file is damaged: write the data again",
            )
        if n_sequences == 0:
            raise DataError(
                f"{self._idx_path} lists no sequences: the data are empty",
                why="the writer had no documents",
                fix="write them again from documents with text, or set dataset.path to the prefix of other data",
            )
        if int(self._lengths.min()) < 0 or int(self._pointers.min()) < 0:
            raise DataError(
                f"{self._idx_path} holds a negative length or offset", fix="the file is damaged: write the data again"
            )
        # Compared by subtraction: a damaged offset near 2**63 must not wrap around in the sum.
        room_bytes = len(self._data) - self._pointers
        lengths_bytes = self._lengths.astype(np.int64) * self._dtype.itemsize
        if np.any(room_bytes < lengths_bytes):
            worst = int(np.argmin(room_bytes - lengths_bytes))
            needed_bytes = int(self._pointers[worst]) + int(lengths_bytes[worst])
            raise _truncated(self._bin_path, needed_bytes, len(self._data))


def write_indexed(prefix: str, documents: Iterable[npt.ArrayLike], *, dtype: npt.DTypeLike = np.int32) -> None:
    """Write `PREFIX.bin` and `PREFIX.idx`, one sequence per document, as Megatron's own tools do.

    Args:
        prefix: path without suffix.
        documents: token ids [n] of each document, with the end-of-document id where one is wanted.
        dtype: integer dtype to store; Megatron takes uint16 for vocabularies below 65,500 and int32 above.

    Raises:
        DataError: a dtype that the format does not know, an id that does not fit it, or a file that cannot be written.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    codes = {np.dtype(name): code for code, name in _DTYPES.items()}
    if stored not in codes or stored.kind == "f":
        raise DataError(
            f"indexed data cannot hold tokens of dtype {stored.name}",
            fix="use uint8, int8, int16, uint16, int32 or int64",
        )
    limits = np.iinfo(stored)
    lengths: list[int] = []
    with reading(Path(prefix + ".bin")), open(prefix + ".bin", "wb") as data:
        for number, document in enumerate(documents):
            tokens = np.asarray(document)
            if tokens.size and (int(tokens.min()) < limits.min or int(tokens.max()) > limits.max):
                raise DataError(
                    f"document {number} holds a token id that does not fit {stored.name}",
                    why=f"its ids run from {tokens.min()} to {tokens.max()}",
                    fix="choose a wider dtype",
                )
            data.write(tokens.astype(stored).tobytes())
            lengths.append(tokens.size)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    with reading(Path(prefix + ".idx")), open(prefix + ".idx", "wb") as index:
        index.write(_HEADER.pack(_MAGIC, _VERSION, codes[stored], len(lengths), len(lengths) + 1))
        index.write(np.asarray(lengths, "<i4").tobytes())
        index.write((starts[:-1] * stored.itemsize).astype("<i8").tobytes())
        index.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def _map(path: Path) -> _Array:
    """Map the bytes of a file read-only.

    An empty file cannot be mapped and gives an empty array.
    """
    with reading(path):
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")


def _truncated(path: Path, needed_bytes: int, found_bytes: int) -> DataError:
    return DataError(
        f"{path} is truncated: it has {found_bytes:,} bytes, and its index needs {needed_bytes:,}",
        why="copying or writing it was cut short, or .bin and .idx belong to different data",
        fix="copy or write both files again",
    )


def _identity(index: _Array, data: _Array) -> str:
    # The .bin may hold terabytes: its size and both ends stand for it, next to the complete index.
    digest = hashlib.blake2b(digest_size=16)
    for part in (index, data[:_EDGE_BYTES], data[-_EDGE_BYTES:]):
        digest.update(part.data)
    return f"indexed:{len(data)}:{digest.hexdigest()}"
