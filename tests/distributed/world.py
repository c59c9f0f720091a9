"""Processes of one world that carry out named cases on all ranks, until they are told to end."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import os
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import forkserver, leave_what_is_imported
from recent_memory import read_seldom
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo, _world
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import hostward
import hostward.cli

START_S = 120.0
"""Importing torch on a busy machine."""
LIMIT_S = 100.0
"""A case that takes longer hangs."""
CASES_OF_GROUPS = 8
"""After which groups are left: counted, for ranks are in different numbers of groups, and must do it together."""


class _GlooOfOneThread(ProcessGroupGloo):
    """A group whose sockets the thread of another serves too: one of its own would wake up a hundred times a second."""

    device: ProcessGroupGloo.Device | None = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        device = _GlooOfOneThread.device or ProcessGroupGloo.create_default_device()
        _GlooOfOneThread.device = device
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        super().__init__(store, rank, size, options)


class CaseFailedError(AssertionError):
    """A rank raised, or did not answer in time."""


class World:
    """Gloo processes on this machine. Made when the first case is run, and anew after one that failed."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._store: dist.TCPStore | None = None
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forkserver()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(mine)

    def run(self, case: str, **options: Any) -> list[Any]:
        """What `module.function` named `case` returns on each rank. Raises CaseFailedError."""
        if not self._processes:
            self._start()
            self._answers(START_S)
        for end in self._ends:
            end.send((case, options))
        return self._answers(LIMIT_S)

    def _answers(self, limit_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline_s = time.monotonic() + limit_s
        while len(results) < self.size and time.monotonic() < deadline_s:
            for end in wait([e for i, e in enumerate(self._ends) if i not in results], timeout=1.0):
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    error, results[rank] = self._ends[rank].recv()
                except EOFError:
                    error, results[rank] = "the process ended", None
                if error:
                    failures.append(f"rank {rank}: {error}")
                    deadline_s = time.monotonic() + 1.0  # it leaves the others in a collective
        failures += [f"rank {rank}: no answer" for rank in range(self.size) if rank not in results]
        if failures:
            self.close()
            raise CaseFailedError("\n".join(failures))
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._processes, self._ends, self._store = [], [], None


def _serve(rank: int, size: int, port: int, end: Connection) -> None:
    read_seldom()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed_c10d.ProcessGroupGloo = _GlooOfOneThread  # type: ignore[misc]
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    importlib.import_module("torch.distributed.checkpoint")
    gc.collect()
    gc.freeze()  # what is imported: runs collect garbage when they begin
    end.send((None, "ready"))
    for number in itertools.count(1):
        case, options = end.recv()
        module, _, name = case.rpartition(".")
        torch.set_num_threads(1)  # Trainers of cases before may have set more
        answer = None
        try:
            answer = (None, getattr(importlib.import_module(module), name)(**options))
            if number % CASES_OF_GROUPS == 0:
                _leave_groups()
        finally:
            end.send(answer or (traceback.format_exc(), None))


def _leave_groups() -> None:
    """The groups that cases have made, once no rank is in one any more: each has three threads, of which one wakes up a
    hundred times a second. What torch remembers of DTensors has meshes of them, and so has what cases remember.
    """
    from sharded_cases import mesh_of

    dist.barrier()
    mesh_of.cache_clear()
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for group in [known for known in _world.pg_map if known is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and what it said."""

    code: int | None
    out: str
    err: str


def commands(*words: str, folder: Path, count: int = 2, before: str = "") -> list[Ended]:
    """`hostward WORDS` on each rank, in processes of their own in `folder` that find what they import already there.

    `before`: a `module.function` that each calls first. What the launcher adds to it `torchrun` below shows.
    """
    context = forkserver()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_command, args=(rank, count, port, words, folder, before), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    said = [[_text(folder / f"{rank}.{kind}") for kind in ("out", "err")] for rank in range(count)]
    return [Ended(process.exitcode, *texts) for process, texts in zip(processes, said, strict=True)]


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _into_files(folder: Path, name: str) -> None:
    """Go on in this folder, and say there whatever is said."""
    leave_what_is_imported()
    os.chdir(folder)
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def _command(rank: int, count: int, port: int, words: tuple[str, ...], folder: Path, before: str) -> None:
    _into_files(folder, str(rank))
    faulthandler.dump_traceback_later(LIMIT_S * 0.9)  # where it hangs, in what it says
    local = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in local.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    if before:
        module, _, name = before.rpartition(".")
        getattr(importlib.import_module(module), name)()
    sys.exit(hostward.cli.main(words))


def torchrun_forked(*words: str, folder: Path) -> Ended:
    """As `torchrun` below, of a program instead of a module: torchrun's own function, whose ranks find what they import
    already there. What they say is in turn, attempt by attempt.
    """
    process = forkserver().Process(target=_torchrun, args=(words, folder))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    said = [
        "".join(map(_text, [folder / f"agent.{kind}", *sorted(folder.glob(f"logs/*/attempt_*/*/std{kind}.log"))]))
        for kind in ("out", "err")
    ]
    return Ended(process.exitcode, *said)


def _torchrun(words: tuple[str, ...], folder: Path) -> None:
    _into_files(folder, "agent")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    how = ["--standalone", "--run-path", "--start-method=fork", "--redirects=3", "--log-dir=logs"]
    importlib.import_module("torch.distributed.run").main([*how, *words])


def torchrun(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Processes of their own, started as users do, in `folder`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    kept |= {"PYTHONPATH": str(Path(hostward.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    return subprocess.run(command, env=kept, cwd=folder, capture_output=True, text=True, timeout=250)
