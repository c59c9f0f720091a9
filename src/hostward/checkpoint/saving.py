"""Carry out one save, by one process or all ranks, in the caller's thread or concurrently with training.

1. Rank 0 takes the folder's lock and makes a hidden folder.
2. Every rank plans its tensors; all plans together assign each piece to one rank, also of replicated tensors.
3. Every rank writes its pieces, and makes them durable. With a snapshot it first copies the state in use by training.
4. Rank 0 writes the table of contents and the manifest, and renames the folder.

A rank that fails in any step ends the save on all of them; then the hidden folder is removed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hostward.checkpoint import files
from hostward.checkpoint.collective import Ranks, Stop, StoppedError
from hostward.checkpoint.manifest import FileRecord
from hostward.checkpoint.save_plan import PiecePlanner, Value
from hostward.checkpoint.staging import Snapshot
from hostward.checkpoint.writer import PieceWriter
from hostward.errors import CheckpointError, HostwardError

PLAIN = "plain.json"
RANKS = "ranks.json"


@dataclass(frozen=True)
class Request:
    """Hold the data and the folder of a save: values by name, `plain` of rank 0, `own` of each rank."""

    directory: Path
    iteration: int
    values: Mapping[str, Value]
    plain: bytes
    own: object = None
    most_recent_k: int | None = None

    @property
    def what(self) -> str:
        return f"cannot save checkpoint {self.directory / files.folder_name(self.iteration)}"


class Save:
    """Make one save by `run`.

    Args:
        request: the data and the folder.
        ranks: the processes that save together.
        rooms: for each thread that reads and writes, a buffer that `Source.read` may use; None: none is needed.
        snapshot: memory that the state is copied to first; None: the state is written from where it is stored.
        problem: error of this rank, which is raised on all ranks.
    """

    def __init__(
        self,
        request: Request,
        ranks: Ranks,
        rooms: Sequence[torch.Tensor | None],
        snapshot: Snapshot | None = None,
        problem: HostwardError | None = None,
    ) -> None:
        self._request = request
        self._ranks = ranks
        self._rooms = rooms
        self._snapshot = snapshot
        self._problem = problem
        self.stop = Stop()
        self.has_read = threading.Event()
        """Set when the save no longer reads memory that training updates."""

    def run(self) -> Path:
        """Save and return the folder of the checkpoint.

        Raises:
            CheckpointError, MemoryLimitError: as `Saver.save`.
        """
        try:
            with ExitStack() as held:
                return self._run(held)
        finally:
            self.has_read.set()

    def wait_until_read(self) -> None:
        """Wait until the save no longer reads memory that training updates; never raises."""
        self.has_read.wait()

    def _run(self, held: ExitStack) -> Path:
        request, ranks, stop = self._request, self._ranks, self.stop
        folder = ranks.together(request.what, lambda: self._open(held), stop, arriving=True)[0]
        planner = PiecePlanner(request.values)
        writer = PieceWriter(folder, planner.read, self._rooms, stop, direct=self._snapshot is not None)
        planned = ranks.together(request.what, lambda: self._plan(planner, writer), stop)
        plan, metadata = self._agree(planner, writer, [plan for plan, _ in planned])
        written = ranks.together(request.what, lambda: self._write(planner, writer, plan), stop)
        owns = [own for _, own in planned]

        def publish() -> Path | None:
            return self._publish(folder, writer, metadata, written, owns) if ranks.first else None

        final = ranks.together(request.what, publish, stop)[0]
        if ranks.first:
            self._clean_up(final)
        return final or folder

    def _open(self, held: ExitStack) -> Path:
        if self._problem is not None:
            raise self._problem
        directory = self._request.directory
        with files.system_errors(self._request.what):
            if self._ranks.first:
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(files.locked(directory))
                held.push(self._discard)  # before the folder is made: an interrupt may come right after it
                files.clear_leftovers(directory)
            folder = files.hidden_path(directory, files.folder_name(self._request.iteration), "partial")
            if self._ranks.first:
                folder.mkdir()
        return folder

    def _discard(self, error: type[BaseException] | None, *_: object) -> None:
        """Remove the hidden folder of a failed save, while the lock is still held.

        The next save removes files that cannot be removed now, so that the error of this save is raised.
        """
        if error is not None:
            with suppress(OSError):
                files.clear_leftovers(self._request.directory)

    def _plan(self, planner: PiecePlanner, writer: PieceWriter) -> tuple[SavePlan, object]:
        if not Path(writer.path).is_dir():
            raise CheckpointError(
                self._request.what,
                why=f"the folder that rank 0 has made there is not visible to rank {self._ranks.rank}",
                fix="save to a file system that all ranks share",
            )
        with typed_failures(self._request.what):
            planner.set_up_planner(planner.described, writer.storage_meta(), self._ranks.first)
            writer.set_up_storage_writer(self._ranks.first)
            return writer.prepare_local_plan(planner.create_local_plan()), self._request.own

    def _agree(self, planner: PiecePlanner, writer: PieceWriter, plans: list[SavePlan]) -> tuple[SavePlan, Metadata]:
        """Return this rank's part of the global plan, which every rank makes from the same local plans."""
        with typed_failures(self._request.what):
            whole, metadata = planner.create_global_plan(plans)
            return planner.finish_plan(writer.prepare_global_plan(whole)[self._ranks.rank]), metadata

    def _write(
        self, planner: PiecePlanner, writer: PieceWriter, plan: SavePlan
    ) -> tuple[list[WriteResult], dict[str, FileRecord]]:
        with typed_failures(self._request.what):
            if self._snapshot is not None:
                copies = self._snapshot.of(planner, plan.items, self._rooms, self.stop)
                copies.make()
                self.has_read.set()
                writer.read = copies.read
            results = writer.write_data(plan, planner).value()
            self.has_read.set()
            return results, writer.records

    def _publish(
        self,
        folder: Path,
        writer: PieceWriter,
        metadata: Metadata,
        written: Sequence[tuple[list[WriteResult], dict[str, FileRecord]]],
        owns: Sequence[object],
    ) -> Path:
        request = self._request
        records = {name: record for _, found in written for name, record in found.items()}
        with files.system_errors(request.what):
            with typed_failures(request.what):
                writer.finish(metadata, [results for results, _ in written])
            (folder / PLAIN).write_bytes(request.plain)
            if any(own is not None for own in owns):
                (folder / RANKS).write_bytes(json.dumps(owns, separators=(",", ":")).encode())
            files.seal(folder, request.iteration, records)
            self.stop.check()
            return files.publish(request.directory, folder, request.iteration)

    def _clean_up(self, final: Path | None) -> None:
        directory, keep = self._request.directory, self._request.most_recent_k
        with files.system_errors(f"checkpoint {final} is saved, but older ones cannot be removed"):
            if keep is not None:
                files.discard_older(directory, self._request.iteration, keep)
            files.clear_leftovers(directory)


@contextmanager
def typed_failures(what: str) -> Iterator[None]:
    """Raise the error that torch's zip writer wraps, such as a full disk."""
    try:
        yield
    except (RuntimeError, OSError, ValueError, AssertionError) as failure:
        if isinstance(failure, HostwardError):
            raise
        raise _unwrapped(what, _chain(failure)) from failure


def _unwrapped(what: str, causes: Sequence[BaseException]) -> BaseException:
    # A thread that was stopped because another one failed explains nothing.
    causes = [cause for cause in causes if not isinstance(cause, StoppedError)]
    for cause in causes:
        if not isinstance(cause, Exception) or isinstance(cause, HostwardError):
            return cause
    for cause in causes:
        if isinstance(cause, OSError):
            return files.system_error(what, cause)
    return CheckpointError(what, why=f"{type(causes[0]).__name__}: {causes[0]}")


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes: a failed write shows as `unexpected pos`, with the real error as cause."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
