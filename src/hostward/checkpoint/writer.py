"""Write the files of a checkpoint in DCP's file format, with a checksum of every chunk."""

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

WRITE_BACK_BYTES = 8 * CHUNK_BYTES
"""Bytes of a file that are advised for dropping again, since the disk may have written them meanwhile."""

STAGED_BYTES = 1024 * 1024
"""Writes below this size go through a buffer if the file bypasses the page cache."""

T = TypeVar("T")
Read = Callable[[WriteItem, "torch.Tensor | None"], torch.Tensor]
"""read(item, room): return the elements of an item on the host."""


class PieceWriter(FileSystemWriter):
    """Write files as DCP does and in its format; each thread writes its own file, one piece at a time.

    The inherited `write_data` keeps every staged copy until its file ends, which doubles host memory when the tensors
    are views of slabs or on the device; and with several threads it loses the error of a thread.

    Args:
        path: the hidden folder of the save.
        read: returns the elements of an item.
        rooms: a buffer for each thread; None: none is needed.
        stop: asks the writers to end early.
        direct: files bypass the page cache, where their file system supports that.
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
        """Records of the files that this process has written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        names = [f"{plan.storage_data.prefix}{i}.distcp" for i in range(len(self._rooms))]
        shares = split_by_bytes(plan.items, len(names))
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
                tensor = own_storage(self.read(item, room))
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


def split_by_bytes(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Split the items into `count` shares of about equal bytes, in their order."""
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
    """Run each function on its own thread and return the results, or raise the error of the first that failed."""
    if len(bodies) <= 1:
        return [body() for body in bodies]
    errors: list[BaseException] = []

    def ended(future: futures.Future[T]) -> None:
        error = future.exception()
        if error is not None:
            errors.append(error)
            stop.ask()  # the other threads end early

    with futures.ThreadPoolExecutor(len(bodies), thread_name_prefix="hostward checkpoint") as pool:
        started = [pool.submit(body) for body in bodies]
        for future in started:
            future.add_done_callback(ended)
    if errors:
        raise errors[0]
    return [future.result() for future in started]


def save_tensor(tensor: torch.Tensor, file: CheckedFile) -> None:
    """Write what `torch.save` writes, without the checksum in its archive.

    No reader compares that checksum, and computing it takes a core as long as writing. Chunks of the file have their
    own checksums. `torch.serialization.set_crc32_options` would leave it out too, but in torch 2.11 for all threads,
    and so for saves by other code. Tested with torch 2.11 and 2.13.
    """
    aligned = max(file.aligned_bytes(tensor.nbytes), serialization._get_storage_alignment())
    archive = torch._C.PyTorchFileWriter(cast("IO[bytes]", file), False, aligned)
    try:
        serialization._save(tensor, archive, pickle, serialization.DEFAULT_PROTOCOL, False)  # type: ignore[no-untyped-call]
    finally:
        archive.write_end_of_file()


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements in a storage that holds nothing else, since torch.save writes whole storages."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    own = storage[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())


class CheckedFile:
    """Write a new file from beginning to end without a buffer, with the CRC-32 of each chunk."""

    near_bytes = NEAR_BYTES
    """Bytes that are written at once: small enough to stay in a cache after the checksum."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = 0
        self._begun_bytes = 0
        """Bytes that the disk has been asked to write."""
        self._crc32: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        """Do nothing, as torch's writer needs no data on the disk before the end."""

    def aligned_bytes(self, size_bytes: int) -> int:
        """Return the alignment of data of so many bytes, relative to the start of their archive."""
        return 1

    def begin(self, size_bytes: int) -> int:
        """Pad the file to the alignment of so many bytes, and return the offset where their archive begins."""
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
            self._write_back()
        return done

    def _write_checked(self, part: memoryview) -> None:
        """Write at most `near_bytes` bytes, within one chunk, and update its checksum."""
        if self.size_bytes % CHUNK_BYTES:
            self._crc32[-1] = crc32(part, self._crc32[-1])
        else:
            self._crc32.append(crc32(part))
        self.size_bytes += len(part)
        self._put(part)

    def _put(self, part: memoryview) -> None:
        write_all(self._descriptor, part)

    def _write_back(self) -> None:
        """Start writing these bytes to the disk now, and drop bytes that are already written from the page cache.

        So writing overlaps with checksums and reading, instead of all of it waiting for `fsync`. Otherwise files fill
        the free memory, and a machine without free memory reclaims some at every page, on the cores that the CPU
        optimizer step needs.

        The advice is to drop the bytes from memory. Linux starts to write those that are dirty, without waiting, and
        drops the others. A file system that does not support the advice ignores it.
        """
        if self.size_bytes - self._begun_bytes >= CHUNK_BYTES:
            self._advise(max(0, self._begun_bytes - WRITE_BACK_BYTES))
            self._begun_bytes = self.size_bytes

    def _advise(self, start: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, start, self.size_bytes - start, os.POSIX_FADV_DONTNEED)

    def settle(self) -> None:
        """Wait until all written bytes are on the disk, and drop them from the page cache."""
        os.fsync(self._descriptor)
        self._advise(0)

    def record(self) -> FileRecord:
        """Return the size and the checksums of the written bytes."""
        return FileRecord(self.size_bytes, tuple(self._crc32))


class DirectFile(CheckedFile):
    """Write a file that bypasses the page cache: the disk reads aligned whole blocks from memory, without a copy.

    Other bytes, such as headers, go through a buffer.
    """

    near_bytes = CHUNK_BYTES  # it is not read again

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._staged = memoryview(mmap.mmap(-1, STAGED_BYTES))
        self._into = np.frombuffer(self._staged, dtype=np.uint8)
        self._held = 0
        """Bytes in the buffer that are not written to the file yet."""

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
            # As arrays, so that the copy releases the GIL.
            np.copyto(self._into[self._held : self._held + taken], np.frombuffer(part[:taken], dtype=np.uint8))
            self._held += taken
            part = part[taken:]
            if self._held == STAGED_BYTES:
                self._write_staged(STAGED_BYTES)

    def _write_staged(self, size_bytes: int) -> None:
        write_all(self._descriptor, self._staged[:size_bytes])
        self._held = 0

    def _write_back(self) -> None:
        if not bypasses_page_cache(self._descriptor):  # a write may have changed this
            super()._write_back()

    def settle(self) -> None:
        use_page_cache(self._descriptor)  # the last block may not be whole
        self._write_staged(self._held)
        super().settle()


def new_file(path: Path, *, direct: bool) -> CheckedFile:
    """Create a file; with `direct` it bypasses the page cache, if its file system supports that (tmpfs may not)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return DirectFile(os.open(path, flags | os.O_DIRECT, 0o666))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            path.unlink(missing_ok=True)  # the failed open may have made it
    return CheckedFile(os.open(path, flags, 0o666))


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all bytes; a file system with larger blocks gets them, and all later ones, through the page cache."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not use_page_cache(descriptor):
                raise


def bypasses_page_cache(descriptor: int) -> bool:
    """Return whether an open file bypasses the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def use_page_cache(descriptor: int) -> bool:
    """Let a file use the page cache from now on, and return whether it bypassed the cache before."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])
