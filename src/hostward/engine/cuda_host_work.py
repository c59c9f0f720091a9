"""Host functions bound for a CUDA device's host lane."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hostward.host.accumulate import AccumulateTask, NormTask
from hostward.host.adamw import AdamWTask
from hostward.host.library import ClockedCall, load
from hostward.schedule import Lane

from .backend import RING, AdamWOperands, Event, Scalars
from .commands import Command, Verb
from .cuda_lanes import INDEX
from .cuda_timing import UNTIMED, Timed
from .cuda_work import ListedWork
from .host_task import host_task

if TYPE_CHECKING:
    from .cuda import CudaBackend


class HostCall(ListedWork):
    """A host function; which one, and over what, is written at every issue."""

    __slots__ = ("_clocked", "_function_at", "_task_at")

    def __init__(self, backend: CudaBackend, name: str, waits: Sequence[Event], done: Event) -> None:
        super().__init__(backend, name, Lane.HOST, waits, done)
        self.listed = made = self.commands(self._waits, [Command(Verb.HOST, INDEX[Lane.HOST], 0)], self.recording())
        at = len(self._waits)
        self._function_at, self._task_at = made.word(at, Verb.HOST, "a"), made.word(at, Verb.HOST, "b")
        self._clocked: ClockedCall | None = None

    def time(self) -> Timed:
        self._clocked = self._backend.timings.take_call(self._backend.turn)
        return UNTIMED if self._clocked is None else self._clocked

    def untime(self) -> None:
        self._clocked = None

    def call(self, task: object, function: int, argument: int) -> None:
        """This issue calls `function(argument)`, which needs `task` until then."""
        self._backend.keep(task)
        if self._clocked is not None:
            self._clocked.function, self._clocked.argument = function, argument
            self._backend.keep(self._clocked)
            function, argument = load().clocked_host_function, ctypes.addressof(self._clocked)
        words = self.listed.words
        words[self._function_at], words[self._task_at] = function, argument


class HostWork(HostCall):
    """AdamW of a bucket as a host function. Tasks are immutable once enqueued: a ring of them, one for each turn that
    may be pending, each with hyper-parameters of its own.
    """

    __slots__ = ("_hypers", "_operands", "_scalars", "_tables", "_tasks")

    def __init__(
        self,
        backend: CudaBackend,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(backend, name, waits, done)
        self._operands = operands
        self._scalars = scalars
        self._tasks: list[tuple[AdamWTask, int, int, Any]] = []
        self._hypers = [np.zeros(5, dtype=np.float64) for _ in range(RING)]
        self._tables: object = None

    def prepare(self) -> None:
        constants = self._operands.constants
        if self._tables is not constants.tables:
            self._make_tasks()
        task, function, argument, hyper = self._tasks[self._backend.turn % RING]
        now = constants.hyper
        hyper[0], hyper[1], hyper[2], hyper[3], hyper[4] = now.lr, now.weight_decay, now.beta1, now.beta2, now.eps
        self.call(task, function, argument)

    def _make_tasks(self) -> None:
        backend = self._backend
        self._tables = self._operands.constants.tables
        self._tasks = []
        for hyper, error in zip(self._hypers, backend.errors, strict=True):
            task = host_task(self._operands, self._scalars, backend.threads, hyper=hyper, error=error)
            self._tasks.append((task, *task.host_function(), hyper.data))


class TaskWork(HostCall):
    """A host function over operands that stay where they are: one immutable task for each turn that may be pending,
    which differ in where they report errors.
    """

    __slots__ = ("_tasks",)

    def __init__(
        self,
        backend: CudaBackend,
        name: str,
        task: Callable[..., AccumulateTask | NormTask],
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(backend, name, waits, done)
        tasks = [task(error=error) for error in backend.errors]
        self._tasks = [(made, *made.host_function()) for made in tasks]

    def prepare(self) -> None:
        self.call(*self._tasks[self._backend.turn % RING])
