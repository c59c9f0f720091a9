"""Operations bound for a CUDA device: what is known beforehand is a list of driver commands, enqueued in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hostward.host.accumulate import AccumulateTask, NormTask
from hostward.host.adamw import AdamWTask
from hostward.schedule import Lane

from .backend import RING, AdamWOperands, Buffer, Event, Scalars, Work
from .commands import Command, CommandList, Verb
from .host_task import host_task
from .uploads import Table

if TYPE_CHECKING:
    from .cuda import CudaBackend

LANES = tuple(Lane)
INDEX = {lane: i for i, lane in enumerate(LANES)}


class CudaEvent(Event):
    """An event whose handle goes back for reuse: waits that are enqueued hold for what it stood for then."""

    __slots__ = ("_unused",)

    def __init__(self, handle: int, unused: list[int]) -> None:
        super().__init__(handle)
        self._unused = unused

    def __del__(self) -> None:
        if isinstance(self.native, int):
            self._unused.append(self.native)


class CudaWork(Work):
    """Waits, then the operation proper, then the record of `done`, all on one lane.

    With a meter, two timed events of this turn stand before and after the operation.
    """

    __slots__ = ("_backend", "_lists", "_timing", "_waits", "nbytes")

    def __init__(self, backend: CudaBackend, name: str, lane: Lane, waits: Sequence[Event], done: Event) -> None:
        super().__init__(name, lane, done)
        self._backend = backend
        self._waits = [backend.handle_of(event) for event in waits]
        self._lists: dict[tuple[str, int], CommandList] = {}
        self._timing: dict[int, tuple[int, int]] = {}
        self.nbytes = 0

    def waiting(self) -> list[Command]:
        return [Command(Verb.WAIT, INDEX[self.lane], handle) for handle in self._waits]

    def recording(self) -> list[Command]:
        return [Command(Verb.RECORD, INDEX[self.lane], self._backend.handle_of(self.done))]

    def commands(self, part: str, build: Callable[[], list[Command]]) -> CommandList:
        """The command list `part`, built when it is needed first. Timed events differ from turn to turn."""
        turn = self._backend.turn % RING if self._backend.meter is not None else -1
        found = self._lists.get((part, turn))
        if found is None:
            found = self._lists[part, turn] = CommandList(build(), self._backend.driver)
        return found

    def timed(self, which: int) -> list[Command]:
        """The timed event before (0) or after (1) the operation, if somebody looks."""
        if self._backend.meter is None:
            return []
        return [Command(Verb.RECORD, INDEX[self.lane], self.timing(self._backend.turn % RING)[which])]

    def timing(self, slot: int) -> tuple[int, int]:
        """The two timed events of turns of this slot."""
        if slot not in self._timing:
            self._timing[slot] = self._backend.timed_event(), self._backend.timed_event()
        return self._timing[slot]

    def enqueued(self) -> Event:
        """What every issue ends with."""
        if self._backend.meter is not None:
            self._backend.note(self)
        return self.done


class CommandWork(CudaWork):
    """Copies, or nothing but waits."""

    __slots__ = ("_moving", "_pairs", "_wait_is_timed")

    def __init__(
        self,
        backend: CudaBackend,
        name: str,
        lane: Lane,
        waits: Sequence[Event],
        done: Event,
        pairs: Sequence[tuple[Buffer, Buffer]] = (),
    ) -> None:
        super().__init__(backend, name, lane, waits, done)
        self._pairs = tuple(pairs)
        self.nbytes = sum(source.nbytes for _, source in pairs)

    def issue(self) -> Event:
        backend = self._backend
        backend.follow_compute()
        commands = self.commands("all", self._build)
        first = len(commands) - len(self._pairs) - (1 if backend.meter is None else 2)
        for i, (destination, source) in enumerate(self._pairs):
            commands.set_destination(first + i, destination.data.data_ptr())
            commands.set_source(first + i, source.data.data_ptr())
        commands.issue(backend.streams)
        if self.nbytes:
            backend.ledger.copied_bytes[self.lane] += self.nbytes
        return self.enqueued()

    def _build(self) -> list[Command]:
        lane = INDEX[self.lane]
        copies = [Command(Verb.COPY, lane, 1, 1, source.nbytes) for _, source in self._pairs]
        waiting = self.waiting()
        # What a pure wait costs is the wait itself.
        before = [*waiting, *self.timed(0)] if copies else [*self.timed(0), *waiting]
        return [*before, *copies, *self.timed(1), *self.recording()]


class HostWork(CudaWork):
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
        super().__init__(backend, name, Lane.HOST, waits, done)
        self._operands = operands
        self._scalars = scalars
        self._tasks: list[AdamWTask] = []
        self._hypers = [np.zeros(5, dtype=np.float64) for _ in range(RING)]
        self._tables: object = None

    def issue(self) -> Event:
        backend, constants = self._backend, self._operands.constants
        if self._tables is not constants.tables:
            self._make_tasks()
        slot = backend.turn % RING
        hyper = constants.hyper
        self._hypers[slot][:] = (hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps)
        task = self._tasks[slot]
        self.commands(f"task {slot}", lambda: host_commands(self, *task.host_function())).issue(backend.streams)
        backend.keep(task)
        return self.enqueued()

    def _make_tasks(self) -> None:
        backend = self._backend
        self._lists.clear()
        self._tables = self._operands.constants.tables
        self._tasks = [
            host_task(self._operands, self._scalars, backend.threads, hyper=hyper, error=backend.errors[i])
            for i, hyper in enumerate(self._hypers)
        ]


class TaskWork(CudaWork):
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
        super().__init__(backend, name, Lane.HOST, waits, done)
        self._tasks = [task(error=error) for error in backend.errors]

    def issue(self) -> Event:
        backend = self._backend
        slot = backend.turn % RING
        task = self._tasks[slot]
        self.commands(f"task {slot}", lambda: host_commands(self, *task.host_function())).issue(backend.streams)
        backend.keep(task)
        return self.enqueued()


def host_commands(work: CudaWork, function: int, argument: int) -> list[Command]:
    """A host function behind what the work waits for."""
    call = Command(Verb.HOST, INDEX[Lane.HOST], function, argument)
    return [*work.waiting(), *work.timed(0), call, *work.timed(1), *work.recording()]


class KernelWork(CudaWork):
    """Kernels that torch or Triton launch, between two command lists."""

    __slots__ = ("_kernel",)

    def __init__(
        self,
        backend: CudaBackend,
        name: str,
        lane: Lane,
        kernel: Callable[[], None],
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(backend, name, lane, waits, done)
        self._kernel = kernel

    def issue(self) -> Event:
        backend = self._backend
        backend.follow_compute()
        if self._waits or backend.meter is not None:
            self.commands("before", lambda: [*self.waiting(), *self.timed(0)]).issue(backend.streams)
        with torch.no_grad(), backend.current(self.lane):
            self._kernel()
        self.commands("after", lambda: [*self.timed(1), *self.recording()]).issue(backend.streams)
        return self.enqueued()


Staged = tuple[Table, object, Callable[[Any], None]]
"""A table of a kernel, what it is to hold in this turn, and what writes that."""


class TableWork(CudaWork):
    """A kernel over tables of addresses: what has changed in them is copied first, on the kernel's own lane."""

    __slots__ = ("_prepare",)

    def __init__(
        self,
        backend: CudaBackend,
        name: str,
        lane: Lane,
        prepare: Callable[[], tuple[list[Staged], Callable[[], None]]],
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(backend, name, lane, waits, done)
        self._prepare = prepare

    def issue(self) -> Event:
        backend = self._backend
        backend.follow_compute()
        staged, launch = self._prepare()
        slot, lane = backend.turn % RING, INDEX[self.lane]
        copies = []
        for table, key, fill in staged:
            source = table.stage(key, fill, slot)
            if source is not None:
                copies.append(Command(Verb.COPY, lane, table.data.data_ptr(), source, table.nbytes))
        if copies:
            CommandList([*self.waiting(), *copies, *self.timed(0)], backend.driver).issue(backend.streams)
        elif self._waits or backend.meter is not None:
            self.commands("before", lambda: [*self.waiting(), *self.timed(0)]).issue(backend.streams)
        with backend.current(self.lane):
            launch()
        self.commands("after", lambda: [*self.timed(1), *self.recording()]).issue(backend.streams)
        return self.enqueued()
