"""Read and write the manifest of a checkpoint: size and CRC-32 per chunk of each file, and its own checksum.

CRC-32 finds truncation and flipped bits at several GB/s per thread; it does not defend against forgery.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from hostward.errors import CheckpointError

FORMAT = 1
CHUNK_BYTES = 16 * 2**20
NEAR_BYTES = 4 * 2**20
"""Bytes that are read or written and checked at once: small enough to stay in a core's cache in between."""
MANIFEST = "manifest.json"
MAX_CHECKSUM_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """Hold the size of one file and the CRC-32 of each of its chunks, in order."""

    size_bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """List the files of a complete checkpoint: `files` maps each file name to its record."""

    iteration: int
    chunk_bytes: int
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """Return the text form, with a checksum of everything else in it."""
        body = {
            "format": FORMAT,
            "iteration": self.iteration,
            "chunk_bytes": self.chunk_bytes,
            "files": {name: {"bytes": f.size_bytes, "crc32": list(f.crc32)} for name, f in sorted(self.files.items())},
        }
        return (json.dumps(body | {"blake2b": _digest(body)}, indent=1) + "\n").encode()

    @staticmethod
    def from_bytes(text: bytes) -> Manifest:
        """Parse the text form.

        Raises:
            CheckpointError: the text is damaged, or of a newer format.
        """
        damaged = CheckpointError(f"{MANIFEST} is damaged", why="its text does not agree with its own checksum")
        try:
            body = json.loads(text.decode())
            if not isinstance(body, dict):
                raise damaged
            if isinstance(body.get("format"), int) and body["format"] > FORMAT:
                raise CheckpointError(
                    f"{MANIFEST} has format {body['format']}",
                    why=f"this version of hostward reads formats up to {FORMAT}",
                    fix="upgrade hostward",
                )
            files = {n: FileRecord(int(f["bytes"]), tuple(map(int, f["crc32"]))) for n, f in body["files"].items()}
            manifest = Manifest(int(body["iteration"]), int(body["chunk_bytes"]), files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged from error
        # One text per manifest, checksum included; so every other byte string is damage.
        if manifest.chunk_bytes < 1 or manifest.to_bytes() != text:
            raise damaged
        # A name is never a path: the checksum does not stop a manifest from being written by hand.
        if any(name in ("", ".", "..") or "/" in name or "\0" in name for name in files):
            raise damaged
        if any(len(f.crc32) != count_chunks(f.size_bytes, manifest.chunk_bytes) for f in files.values()):
            raise damaged
        return manifest


def _digest(body: Mapping[str, object]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def count_chunks(size_bytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks of a file."""
    return -(-size_bytes // chunk_bytes)


def read_checksums(path: Path, chunks: Sequence[int], chunk_bytes: int) -> list[int]:
    """Return the CRC-32 of these chunks of a file, in their order.

    Raises:
        OSError: the file cannot be read.
    """

    def checksum(chunk: int) -> int:
        with path.open("rb", buffering=0) as stream:
            stream.seek(chunk * chunk_bytes)
            found, left_bytes = 0, chunk_bytes
            while left_bytes and (part := stream.read(min(left_bytes, NEAR_BYTES))):
                found = crc32(part, found)
                left_bytes -= len(part)
            return found

    if len(chunks) < 2:
        return [checksum(chunk) for chunk in chunks]
    # The checksum and the read release the GIL.
    pool = ThreadPoolExecutor(min(MAX_CHECKSUM_THREADS, len(os.sched_getaffinity(0)), len(chunks)))
    try:
        return list(pool.map(checksum, chunks))
    finally:
        pool.shutdown(cancel_futures=True)
