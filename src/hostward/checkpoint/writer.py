"""Files of a checkpoint as they are written: DCP's file format, with a checksum of every chunk on the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import IO, Self, TypeVar, cast

import numpy as np
import torch
from isal.isal_zlib import crc32
from torch import serialization
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hostward.checkpoint.collective import Stop
from hostward.checkpoint.manifest import CHUNK_BYTES, NEAR_BYTES, FileRecord
from hostward.checkpoint.save_plan import item_bytes
from hostward.plan.memory_model import BLOCK_BYTES

BEHIND_BYTES = 8 * CHUNK_BYTES
"""Of a file, looked at again for what the disk has written meanwhile."""

STAGED_BYTES = 1024 * 1024
"""Past the page cache less than so much goes by way of a buffer."""

T = TypeVar("T")
Read = Callable[[WriteItem, "torch.Tensor | None"], torch.Tensor]
"""read(item, room): the elements of an item on the host."""


class PieceWriter(FileSystemWriter):
    """DCP's file writer and file format. Each thread writes a file of its own, one piece at a time.

    The inherited `write_data` keeps every staged copy until its file ends, which doubles host memory when the tensors
    are views of slabs or lie on the device; and with several threads it loses what a thread raised.

    Args:
        rooms: one for each thread; None: none is needed.
        direct: files pass the page cache by, where their file system can do that.
    """

    def __init__(
        self, path: Path, read: Read, rooms: Sequence[torch.Tensor | None], stop: Stop, *, direct: bool = False
    ) -> None:
        super().__init__(str(path), sync_files=False)
        self._direct = direct
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
        with new_file(Path(self.path) / name, direct=self._direct) as stream:
            for item in items:
                self._stop.check()
                tensor = alone(self.read(item, room))
                start = stream.begin(tensor.nbytes)
                save_tensor(tensor, stream)
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
    aligned = max(file.aligned_bytes(tensor.nbytes), serialization._get_storage_alignment())
    archive = torch._C.PyTorchFileWriter(cast("IO[bytes]", file), False, aligned)
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

    near_bytes = NEAR_BYTES
    """Written at once: still in a near cache behind its checksum."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = 0
        self._begun_bytes = 0
        """What the disk has been asked to write."""
        self._crc32: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        """Nothing is held back that is asked for before the end."""

    def aligned_bytes(self, size_bytes: int) -> int:
        """What data of so many bytes begin at a multiple of, from where their archive begins."""
        return 1

    def begin(self, size_bytes: int) -> int:
        """Where an archive begins that holds so many bytes: at a multiple of what they are aligned to."""
        self.write(bytes(-self.size_bytes % self.aligned_bytes(size_bytes)))
        return self.size_bytes

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            begun = self.size_bytes % CHUNK_BYTES
            part = view[done : done + CHUNK_BYTES - begun]
            for first in range(0, len(part), self.near_bytes):
                self._write_checked(part[first : first + self.near_bytes])
            done += len(part)
            self._look_behind()
        return done

    def _write_checked(self, part: memoryview) -> None:
        """At most `near_bytes`, within one chunk."""
        if self.size_bytes % CHUNK_BYTES:
            self._crc32[-1] = crc32(part, self._crc32[-1])
        else:
            self._crc32.append(crc32(part))
        self.size_bytes += len(part)
        self._put(part)

    def _put(self, part: memoryview) -> None:
        write_all(self._descriptor, part)

    def _look_behind(self) -> None:
        """Let the disk write these bytes now, beside checksums and reading, instead of all of them in `fsync`; and let
        go of what it has written before. Else files fill the memory that is left, and a machine without free memory
        looks for some at every page, on the cores that the host's step needs.

        What is asked for is that they be dropped from memory. Linux begins to write those that are dirty, without
        waiting, and drops the others. A file system that takes no advice goes on as it would.
        """
        if self.size_bytes - self._begun_bytes >= CHUNK_BYTES:
            self._advise(max(0, self._begun_bytes - BEHIND_BYTES))
            self._begun_bytes = self.size_bytes

    def _advise(self, behind: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, behind, self.size_bytes - behind, os.POSIX_FADV_DONTNEED)

    def settle(self) -> None:
        """All that was written is on the disk, and memory has let go of it."""
        os.fsync(self._descriptor)
        self._advise(0)

    def record(self) -> FileRecord:
        """Size and checksums of all that was written."""
        return FileRecord(self.size_bytes, tuple(self._crc32))


class DirectFile(CheckedFile):
    """The same past the page cache: the disk reads memory where it lies, in whole blocks at aligned places, and no core
    copies. What lies otherwise, headers among it, goes through a buffer.
    """

    near_bytes = CHUNK_BYTES  # it is not read again

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._staged = memoryview(mmap.mmap(-1, STAGED_BYTES))
        self._into = np.frombuffer(self._staged, dtype=np.uint8)
        self._held = 0
        """Bytes in it, which the file lacks."""

    def aligned_bytes(self, size_bytes: int) -> int:
        return BLOCK_BYTES if size_bytes >= STAGED_BYTES else 1

    def _put(self, part: memoryview) -> None:
        while part:
            if self._held % BLOCK_BYTES == 0 and len(part) >= STAGED_BYTES and address_of(part) % BLOCK_BYTES == 0:
                self._write_staged(self._held)
                whole = len(part) - len(part) % BLOCK_BYTES
                write_all(self._descriptor, part[:whole])
                part = part[whole:]
                continue
            taken = min(len(part), STAGED_BYTES - self._held)
            # As arrays: a copy that lets go of Python's lock.
            np.copyto(self._into[self._held : self._held + taken], np.frombuffer(part[:taken], dtype=np.uint8))
            self._held += taken
            part = part[taken:]
            if self._held == STAGED_BYTES:
                self._write_staged(STAGED_BYTES)

    def _write_staged(self, size_bytes: int) -> None:
        write_all(self._descriptor, self._staged[:size_bytes])
        self._held = 0

    def _look_behind(self) -> None:
        if not passes_cache(self._descriptor):  # any more
            super()._look_behind()

    def settle(self) -> None:
        through_the_cache(self._descriptor)  # the last block may not be whole
        self._write_staged(self._held)
        super().settle()


def new_file(path: Path, *, direct: bool) -> CheckedFile:
    """A file that is not there yet; with `direct` past the page cache, if its file system can (tmpfs may not)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return DirectFile(os.open(path, flags | os.O_DIRECT, 0o666))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            path.unlink(missing_ok=True)  # made all the same
    return CheckedFile(os.open(path, flags, 0o666))


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of it. A file system whose blocks are larger than ours gets it, and what follows, through its cache."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not through_the_cache(descriptor):
                raise


def passes_cache(descriptor: int) -> bool:
    """Whether an open file passes the page cache by."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def through_the_cache(descriptor: int) -> bool:
    """Have a file pass the page cache by no more; returns whether it did."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])
