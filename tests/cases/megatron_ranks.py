"""Processes in which Megatron-Core trains on CPUs. The tests' own imports nothing of it, for that takes seconds."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recent_memory import read_seldom

SIZE = 4
START_S = 150.0
"""Importing Megatron-Core on a busy machine."""
LIMIT_S = 100.0
"""A case that takes longer hangs."""

IMPORTED = ["hostward", "megatron_cases", "megatron.core.dist_checkpointing.strategies.torch", "torch._dynamo"]
"""Once for all ranks; torch itself imports the last one for its optimizers."""


def is_installed() -> bool:
    """Whether Megatron-Core is, without importing it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


class RankFailedError(AssertionError):
    """A rank raised, or did not answer in time."""


class Ranks:
    """Four processes, of which a case takes as many as its world has. They are started for the first case, and anew
    after one that failed: one process imports Megatron-Core, and forks the ranks.
    """

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._process: Any = None
        self._ends: list[Connection] = []
        self._cases = 0

    def run(self, world: int, case: str, **options: Any) -> list[Any]:
        """What `module.function` named `case` returns on each rank of a world of that size, inside of `on_cpu()`.

        Raises RankFailedError.
        """
        if self._process is None:
            self._start()
            self._answers(SIZE, START_S)
        self._cases += 1
        for end in self._ends[:world]:
            end.send((self._cases, world, case, options))
        return self._answers(world, LIMIT_S)

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe() for _ in range(SIZE)]
        theirs = [end for _, end in pipes]
        self._ends = [end for end, _ in pipes]
        self._process = context.Process(target=_fork_ranks, args=(self._store.port, theirs), daemon=True)
        self._process.start()
        for end in theirs:
            end.close()

    def _answers(self, count: int, limit_s: float) -> list[Any]:
        ends, results, failures = self._ends[:count], {}, []
        deadline_s = time.monotonic() + limit_s
        while len(results) < count and time.monotonic() < deadline_s:
            for end in wait([e for i, e in enumerate(ends) if i not in results], timeout=1.0):
                rank = ends.index(end)  # type: ignore[arg-type]
                try:
                    error, results[rank] = ends[rank].recv()
                except EOFError:
                    error, results[rank] = "the process ended", None
                if error:
                    failures.append(f"rank {rank}: {error}")
                    deadline_s = min(deadline_s, time.monotonic() + 1.0)  # it leaves the others in a collective
        failures += [f"rank {rank}: no answer" for rank in range(count) if rank not in results]
        if failures:
            self.close()
            raise RankFailedError("\n".join(failures))
        return [results[rank] for rank in range(count)]

    def close(self) -> None:
        if self._process is not None:
            if self._process.is_alive():
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        for end in self._ends:
            end.close()
        self._ends, self._process, self._store = [], None, None


def _fork_ranks(port: int, ends: list[Connection]) -> None:
    os.setpgrp()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    read_seldom()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with pytest.MonkeyPatch.context() as patch:
        # Megatron compiles its small functions. Here that takes longer than they do, and importing the compiler, too.
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda other: other))
        for name in IMPORTED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for rank, end in enumerate(ends):
        if os.fork() == 0:
            for other in (e for e in ends if e is not end):
                other.close()
            try:
                _serve(rank, port, end)
            finally:
                os._exit(0)
    for end in ends:
        end.close()
    for _ in ends:
        os.wait()


def _serve(rank: int, port: int, end: Connection) -> None:
    from megatron_cases import on_cpu

    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    end.send((None, "ready"))
    with on_cpu():
        for number, world, case, options in _asked(end):
            module, _, name = case.rpartition(".")
            answer = None
            try:
                mine = dist.PrefixStore(f"case {number}", store)
                dist.init_process_group("gloo", store=mine, rank=rank, world_size=world, timeout=limit)
                answer = (None, getattr(importlib.import_module(module), name)(**options))
                _leave_groups()
            finally:
                end.send(answer or (traceback.format_exc(), None))


def _asked(end: Connection) -> Iterator[Any]:
    while True:
        try:
            yield end.recv()
        except EOFError:  # the tests have ended
            return


def _leave_groups() -> None:
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()
