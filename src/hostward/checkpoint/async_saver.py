"""Make the saves of one run, one after the other: synchronously, or concurrently with training in two modes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from hostward.checkpoint.collective import Ranks
from hostward.checkpoint.save_plan import Value, sources_of
from hostward.checkpoint.saving import Request, Save
from hostward.checkpoint.staging import Snapshot, snapshot_bytes
from hostward.checkpoint.validate import JSON, check_plain, plain_bytes, values_of
from hostward.core.inventory import align
from hostward.errors import CheckpointError, HostwardError, PageLockError
from hostward.kernels.cpu.affinity import local_ranks
from hostward.model.parameters import local_of
from hostward.optim.state_reader import Source
from hostward.plan.memory_model import BLOCK_BYTES, PIECE_BYTES, writer_count
from hostward.runtime.backend import Backend, Buffer, Tier

log = logging.getLogger("hostward")

Mode = Literal["snapshot", "stream"]
MODES: tuple[Mode, ...] = ("snapshot", "stream")
OWNER = "buffers of a save"
"""Memory category of the buffers, which stay allocated from one save to the next if saves run during training."""


class Saver:
    """Saves checkpoints into one folder.

    Args:
        directory: created if missing; one run at a time saves into it.
        mode: None: `save` returns when all data is on the disk. "snapshot" and "stream": `save` returns at once, and
            the disk is written concurrently with training. With "snapshot" the state is copied on the host first, into
            memory that stays allocated from the first save on; the next optimizer step waits for that copy. With
            "stream" the state is written from where it is stored; the next step waits until all of it is written.
        group: process group of the ranks that save together; all of them make a Saver and call `save` alike. None: one
            process.
        most_recent_k: after a save keep the newest k checkpoints up to its iteration (at least 1); None keeps all.

    Raises:
        CheckpointError: most_recent_k below 1, or no such mode.
    """

    def __init__(
        self,
        directory: Path,
        *,
        mode: Mode | None = None,
        group: dist.ProcessGroup | None = None,
        most_recent_k: int | None = None,
    ) -> None:
        if mode not in (None, *MODES):
            raise CheckpointError(
                f"there is no mode of saving {mode!r}",
                why="a save is synchronous (None), or runs during training, from a copy ('snapshot') or not ('stream')",
                fix="mode=None, 'snapshot' or 'stream'",
            )
        if most_recent_k is not None and most_recent_k < 1:
            raise CheckpointError(
                f"most_recent_k is {most_recent_k}",
                why="the checkpoint just saved must stay",
                fix="use 1 or more, or leave it out to keep all",
            )
        self.directory = Path(directory)
        self.mode = mode
        self._most_recent_k = most_recent_k
        self._ranks = Ranks(group)
        self._snapshot: Snapshot | None = None
        self._rooms: list[Buffer] = []
        self._backend: Backend | None = None
        self._running: _RunningSave | None = None

    def save(
        self,
        iteration: int,
        *,
        tensors: Mapping[str, Value],
        plain: Mapping[str, JSON],
        own: Mapping[str, JSON] | None = None,
    ) -> Path | None:
        """Save a checkpoint as `directory/iter_NNNNNNN` and point `directory/latest` at it.

        A save is atomic: if it fails, is interrupted or is killed, the earlier checkpoints and the pointer stay as they
        were, and no partial checkpoint loads; the next save removes the files that a killed save has left. An existing
        checkpoint of the same iteration is replaced, with one complete at every instant. A save that is still running
        is waited for first.

        Args:
            iteration: number of finished training steps, at least 0.
            tensors: by unique name: tensors of any shape, dtype and device, plain or sharded by FSDP2, and sources (of
                `AdamW.sources`). With a mode, plain tensors are copied before this returns. A view is saved without the
                rest of its storage. The part of a name that torch.compile adds (`_orig_mod.`) is left out.
            plain: numbers, strings, lists and mappings, of rank 0. Tuples load as lists.
            own: the same, of each rank.

        Returns:
            The folder of the checkpoint; with a mode None, and `finish` or `poll` return it.

        Raises:
            CheckpointError: a value that cannot be saved, names that become equal, no permission, disk full, another
                run saving there, another rank that failed; the same on all ranks.
            MemoryLimitError: no memory for the snapshot or the buffers.
        """
        self.finish()
        problem: HostwardError | None = None
        values: dict[str, Value] = {}
        text = b""
        try:
            values = values_of(iteration, tensors, ranks=self._ranks.size)
            text = plain_bytes(plain)
            check_plain(own, "own")
            _finish_kernels(values)
            if self.mode is not None:
                values = {n: v if isinstance(v, Source) else _copy(v) for n, v in values.items()}
            self._allocate(values)
        except HostwardError as error:
            if self._ranks.size == 1:
                raise
            problem = error  # reported to the other ranks, and raised on all of them
        request = Request(self.directory, iteration, values, text, own, self._most_recent_k)
        rooms: list[torch.Tensor | None] = [buffer.data for buffer in self._rooms]
        rooms = rooms or [None] * _threads(values)
        save = Save(request, self._ranks, rooms, self._snapshot, problem)
        if self.mode is None:
            try:
                return save.run()
            finally:
                self._free_buffers()
        for readers in {id(s.readers): s.readers for s in sources_of(values)}.values():
            readers.add(save.wait_until_read)
        self._running = _RunningSave(save)
        return None

    @property
    def saving(self) -> bool:
        """Return whether a save is running, or has ended and neither `poll` nor `finish` has returned it."""
        return self._running is not None

    def poll(self) -> Path | None:
        """Return the folder of a save that has ended; None while it runs, or without a save. Raises as `save`."""
        return self.finish() if self._running is not None and self._running.done() else None

    def finish(self) -> Path | None:
        """Wait for the running save and return its folder, or None without a save. Raises as `save`."""
        if self._running is None:
            return None
        self._running.wait()  # if this is interrupted, the save keeps running
        running, self._running = self._running, None
        return running.result()

    def close(self) -> None:
        """Cancel a running save, and free all memory."""
        if self._running is not None:
            self._running.cancel()
        self._running = None
        self._free_buffers()
        if self._snapshot is not None:
            self._snapshot.free()
            self._snapshot = None
        self._ranks.close()

    def _allocate(self, values: Mapping[str, Value]) -> None:
        sources = sources_of(values)
        if not sources:
            return
        backend = self._backend = sources[0].backend
        if any(s.needs_room() for s in sources):
            room_bytes = align(2 * max(min(PIECE_BYTES, s.nbytes) for s in sources), BLOCK_BYTES)
            count = _threads(values)
            if len(self._rooms) < count or self._rooms[0].nbytes < room_bytes:
                self._free_buffers()
                self._rooms = _rooms(backend, [room_bytes] * count)
        if self.mode == "snapshot":
            wanted_bytes = snapshot_bytes(sources)
            if self._snapshot is not None and self._snapshot.size_bytes < wanted_bytes:
                self._snapshot.free()
                self._snapshot = None
            if self._snapshot is None:
                self._snapshot = Snapshot(backend, wanted_bytes)

    def _free_buffers(self) -> None:
        if self._backend is not None and self._rooms:
            self._backend.free(self._rooms)
        self._rooms = []


class _RunningSave:
    """Run a save on its own thread."""

    def __init__(self, save: Save) -> None:
        self._save = save
        pool = ThreadPoolExecutor(1, thread_name_prefix="hostward checkpoint")
        self._future = pool.submit(save.run)
        pool.shutdown(wait=False)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        wait([self._future])

    def result(self) -> Path:
        return self._future.result()

    def cancel(self) -> None:
        self._save.stop.ask()
        self.wait()


def _rooms(backend: Backend, sizes_bytes: list[int]) -> list[Buffer]:
    try:
        return backend.allocate(Tier.HOST, sizes_bytes, torch.uint8, OWNER, pinned=True)
    except PageLockError as error:
        # A run that cannot pin more memory must not lose its checkpoint: pageable memory works too.
        log.warning("%s: the device is read through pageable memory, which takes longer", error.what)
        return backend.allocate(Tier.HOST, sizes_bytes, torch.uint8, OWNER)


def _threads(values: Mapping[str, Value]) -> int:
    """Return the number of threads that these values are worth."""
    size_bytes = sum(v.nbytes if isinstance(v, Source) else local_of(v).nbytes for v in values.values())
    return max(1, min(writer_count(local_ranks(os.environ)), size_bytes // PIECE_BYTES))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that may change while it is saved to the host; a sharded tensor stays sharded."""
    return tensor.detach().to("cpu", copy=True)


def _finish_kernels(values: Mapping[str, Value]) -> None:
    """Wait for the kernels that make these tensors, since the threads that read them use other streams."""
    devices = {local_of(v).device for v in values.values() if isinstance(v, torch.Tensor)}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
