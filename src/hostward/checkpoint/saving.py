"""One save, by one process or by all ranks of a group, in the caller's thread or beside training.

1. The first rank takes the folder's lock and makes a hidden folder.
2. Every rank plans what it has; all plans together say who writes what: of copies on several ranks, one does.
3. Every rank writes its pieces, and makes them durable. With a snapshot it copies what training goes on with before.
4. The first rank writes the table of contents and the manifest, and gives the folder its name.

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
    """What is saved and where: values by name, `plain` of the first rank, `own` of each rank."""

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
    """One save, made by `run`.

    Args:
        rooms: for each thread that reads and writes, memory that `Source.read` may use; None: none is needed.
        problem: this rank cannot take part; all are told.
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
        """Set when nothing is read any more that training goes on with."""

    def run(self) -> Path:
        """Save; returns the folder of the checkpoint. Raises CheckpointError, MemoryLimitError."""
        try:
            with ExitStack() as held:
                return self._run(held)
        finally:
            self.has_read.set()

    def wait_until_read(self) -> None:
        """Return when nothing is read any more that training goes on with; it does not raise."""
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
            self._tidy(final)
        return final or folder

    def _open(self, held: ExitStack) -> Path:
        if self._problem is not None:
            raise self._problem
        directory = self._request.directory
        with files.system_errors(self._request.what):
            if self._ranks.first:
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(files.locked(directory))
                held.push(self._give_up)  # before there is anything: an interrupt may come right behind it
                files.clear_leftovers(directory)
            folder = files.hidden_path(directory, files.folder_name(self._request.iteration), "partial")
            if self._ranks.first:
                folder.mkdir()
        return folder

    def _give_up(self, error: type[BaseException] | None, *_: object) -> None:
        """The save ends, with an error or without, and the lock is still held. What cannot be removed now is removed by
        the next save: the error that ended this one is the one to be told.
        """
        if error is not None:
            with suppress(OSError):
                files.clear_leftovers(self._request.directory)

    def _plan(self, planner: PiecePlanner, writer: PieceWriter) -> tuple[SavePlan, object]:
        if not Path(writer.path).is_dir():
            raise CheckpointError(
                self._request.what,
                why=f"the folder that rank 0 has made there is not to be seen from rank {self._ranks.rank}",
                fix="save to a file system that all ranks share",
            )
        with typed_failures(self._request.what):
            planner.set_up_planner(planner.described, writer.storage_meta(), self._ranks.first)
            writer.set_up_storage_writer(self._ranks.first)
            return writer.prepare_local_plan(planner.create_local_plan()), self._request.own

    def _agree(self, planner: PiecePlanner, writer: PieceWriter, plans: list[SavePlan]) -> tuple[SavePlan, Metadata]:
        """This rank's part of the plan that every rank makes of the same plans."""
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

    def _tidy(self, final: Path | None) -> None:
        directory, keep = self._request.directory, self._request.most_recent_k
        with files.system_errors(f"checkpoint {final} is saved, but older ones cannot be removed"):
            if keep is not None:
                files.discard_older(directory, self._request.iteration, keep)
            files.clear_leftovers(directory)


@contextmanager
def typed_failures(what: str) -> Iterator[None]:
    """Bring out what torch's zip writer wraps, as a full disk."""
    try:
        yield
    except (RuntimeError, OSError, ValueError, AssertionError) as failure:
        if isinstance(failure, HostwardError):
            raise
        raise _brought_out(what, _chain(failure)) from failure


def _brought_out(what: str, causes: Sequence[BaseException]) -> BaseException:
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
    """Return an error and those it replaced: a failed write shows as `unexpected pos` with the real one behind it."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
