"""Files of a checkpoint as they are written: DCP's file format, with a checksum of every chunk on the way."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import IO, TypeVar, cast

import torch
from isal.isal_zlib import crc32
from torch import serialization
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hostward.checkpoint_manifest import CHUNK_BYTES, NEAR_BYTES, FileRecord
from hostward.checkpoint_plan import item_bytes
from hostward.checkpoint_ranks import Stop

BEHIND_BYTES = 8 * CHUNK_BYTES
"""Of a file, looked at again for what the disk has written meanwhile."""

T = TypeVar("T")
Read = Callable[[WriteItem, "torch.Tensor | None"], torch.Tensor]
"""read(item, room): the elements of an item on the host."""


class PieceWriter(FileSystemWriter):
    """DCP's file writer and file format. Each thread writes a file of its own, one piece at a time.

    The inherited `write_data` keeps every staged copy until its file ends, which doubles host memory when the tensors
    are views of slabs or lie on the device; and with several threads it loses what a thread raised.

    Args:
        rooms: one for each thread; None: none is needed.
    """

    def __init__(self, path: Path, read: Read, rooms: Sequence[torch.Tensor | None], stop: Stop) -> None:
        super().__init__(str(path), sync_files=False)
        self.read = read
        self._rooms = rooms
        self._stop = stop
        self.records: dict[str, FileRecord] = {}
        """Of the files that this process has written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        names = [f"{plan.storage_data.prefix}{i}.distcp" for i in range(len(self._rooms))]
        shares = shared_out(plan.items, len(names))
        places = zip(names, shares, self._rooms, strict=True)
        bodies = [partial(self._write, *place) for place in places if place[1] or place[0] == names[0]]
        results = in_threads(bodies, self._stop)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for found in results for result in found])
        return future

    def _write(self, name: str, items: Sequence[WriteItem], room: torch.Tensor | None) -> list[WriteResult]:
        results = []
        with CheckedFile(Path(self.path) / name) as stream:
            for item in items:
                self._stop.check()
                start = stream.size_bytes
                save_tensor(alone(self.read(item, room)), stream)
                length = stream.size_bytes - start
                info = _StorageInfo(name, start, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
            stream.settle()
        self.records[name] = stream.record()
        return results

    def storage_meta(self) -> StorageMeta:
        # Without the path: that of the hidden folder means nothing once it is renamed.
        return StorageMeta(save_id=self.save_id)


def shared_out(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Items for each of so many threads, of about equal bytes, in their order."""
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    limit = sum(map(item_bytes, items)) / count
    at, held = 0, 0.0
    for item in items:
        if held >= limit * (at + 1) and at < count - 1:
            at += 1
        shares[at].append(item)
        held += item_bytes(item)
    return shares


def in_threads(bodies: Sequence[Callable[[], T]], stop: Stop) -> list[T]:
    """What they return, each run on a thread of its own; raises what the first that failed raised."""
    if len(bodies) <= 1:
        return [body() for body in bodies]
    errors: list[BaseException] = []

    def ended(future: futures.Future[T]) -> None:
        error = future.exception()
        if error is not None:
            errors.append(error)
            stop.ask()  # the others need not go on

    with futures.ThreadPoolExecutor(len(bodies), thread_name_prefix="hostward checkpoint") as pool:
        started = [pool.submit(body) for body in bodies]
        for future in started:
            future.add_done_callback(ended)
    if errors:
        raise errors[0]
    return [future.result() for future in started]


def save_tensor(tensor: torch.Tensor, file: CheckedFile) -> None:
    """What `torch.save` writes, but for the checksum in its archive: nothing that reads it compares that one, and
    to make it takes a core as long as to write. Chunks of the file have their own.

    `torch.serialization.set_crc32_options` would leave it out too; in torch 2.11 it does so for all threads, and what
    others save is theirs. Tested with torch 2.11 and 2.13.
    """
    archive = torch._C.PyTorchFileWriter(cast("IO[bytes]", file), False, serialization._get_storage_alignment())
    try:
        serialization._save(tensor, archive, pickle, serialization.DEFAULT_PROTOCOL, False)  # type: ignore[no-untyped-call]
    finally:
        archive.write_end_of_file()


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in a storage that holds nothing else: torch.save writes storages as a whole."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    own = storage[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())


class CheckedFile:
    """A new file, written from beginning to end without a buffer, with the CRC-32 of each chunk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self.size_bytes = 0
        self._begun_bytes = 0
        """What the disk has been asked to write."""
        self._crc32: list[int] = []

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        """Nothing is held back."""

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            begun = self.size_bytes % CHUNK_BYTES
            part = view[done : done + CHUNK_BYTES - begun]
            for first in range(0, len(part), NEAR_BYTES):
                self._write_checked(part[first : first + NEAR_BYTES])
            done += len(part)
            if self.size_bytes - self._begun_bytes >= CHUNK_BYTES:
                self._begin_writeback()
        return done

    def _write_checked(self, part: memoryview) -> None:
        """At most `NEAR_BYTES`, within one chunk."""
        if self.size_bytes % CHUNK_BYTES:
            self._crc32[-1] = crc32(part, self._crc32[-1])
        else:
            self._crc32.append(crc32(part))
        self.size_bytes += len(part)
        while part:
            part = part[os.write(self._file.fileno(), part) :]

    def _begin_writeback(self) -> None:
        """Let the disk write these bytes now, beside checksums and reading, instead of all of them in `fsync`; and let
        go of what it has written before. Else files fill the memory that is left, and a machine without free memory
        looks for some at every page, on the cores that the host's step needs.

        What is asked for is that they be dropped from memory. Linux begins to write those that are dirty, without
        waiting, and drops the others. A file system that takes no advice goes on as it would.
        """
        self._advise(max(0, self._begun_bytes - BEHIND_BYTES))
        self._begun_bytes = self.size_bytes

    def _advise(self, behind: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._file.fileno(), behind, self.size_bytes - behind, os.POSIX_FADV_DONTNEED)

    def settle(self) -> None:
        """All that was written is on the disk, and memory has let go of it."""
        os.fsync(self._file.fileno())
        self._advise(0)

    def record(self) -> FileRecord:
        """Size and checksums of all that was written."""
        return FileRecord(self.size_bytes, tuple(self._crc32))
