"""Bind operations for a CUDA device as lists of driver commands, which are prepared once and enqueued in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hostward.kernels.cpu.accumulate import AccumulateTask, NormTask
from hostward.kernels.cpu.adamw import AdamWTask
from hostward.kernels.cpu.library import ClockedCall, load
from hostward.kernels.cuda.launcher import KernelLaunch
from hostward.runtime.backend import (
    RING,
    AdamWOperands,
    Batch,
    Buffer,
    Event,
    Scalars,
    Tier,
    Work,
)
from hostward.runtime.cuda.argument_tables import TableKernel
from hostward.runtime.cuda.commands import Command, CommandBatch, CommandList, Verb
from hostward.runtime.cuda.context import CudaContext
from hostward.runtime.cuda.streams import INDEX, copy_commands
from hostward.runtime.cuda.timing import UNTIMED, Timed
from hostward.runtime.host_tasks import host_task
from hostward.schedule.ops import Lane

TOGETHER = 32
"""Works in one native call at most, so that the device does not wait until hundreds have been prepared."""


class CudaWork(Work):
    """Issues waits, then the operation, then the record of `done`, all on one lane.

    With a meter, two timed events are recorded before and after the operation; without one, these two commands record
    nothing. On the host lane there are none (`hostward.runtime.cuda.timing`).
    """

    __slots__ = ("_timed", "_waits", "context", "nbytes")

    def __init__(self, context: CudaContext, name: str, lane: Lane, waits: Sequence[Event], done: Event) -> None:
        super().__init__(name, lane, done)
        self.context = context
        self._waits = [Command(Verb.WAIT, INDEX[lane], context.handle_of(event)) for event in waits]
        self._timed: list[tuple[memoryview, int]] = []
        """Positions of the two timed events."""
        self.nbytes = 0

    def time(self) -> Timed:
        """Write the timed events of an issue into the commands; called if `is_timed`, and followed by `untime`."""
        if not self._timed:
            return UNTIMED
        events = self.context.timings.take(self.context.turn)
        for (words, at), event in zip(self._timed, events, strict=True):
            words[at] = event
        return events

    def untime(self) -> None:
        """Remove the timed events, since the next issue may be without a meter."""
        for words, at in self._timed:
            words[at] = 0

    def prepare(self) -> None:
        """Write the addresses and arguments of this issue into the commands, at the beginning of every issue."""

    def forget(self) -> None:
        """Undo `prepare` after its issue has failed."""

    def commands(
        self, before: Sequence[Command], operation: Sequence[Command], after: Sequence[Command]
    ) -> CommandList:
        """Return the list of all these commands, with the operation between timed events."""
        if self.lane is Lane.HOST:
            return CommandList([*before, *operation, *after], self.context.driver)
        timed = Command(Verb.RECORD, INDEX[self.lane], 0)
        made = CommandList([*before, timed, *operation, timed, *after], self.context.driver)
        for at in (len(before), len(before) + 1 + len(operation)):
            self._timed.append((made.words, made.word(at, Verb.RECORD, "a")))
        return made

    def recording(self) -> list[Command]:
        return [Command(Verb.RECORD, INDEX[self.lane], self.context.handle_of(self.done))]


class ListedWork(CudaWork):
    """Issues one command list; several consecutive works are enqueued by one call."""

    __slots__ = ("listed",)
    listed: CommandList

    @property
    def changes(self) -> bool:
        """Return whether there is anything to prepare."""
        return True

    def issue(self) -> Event:
        enqueue(self.context, (self,), (self.prepare,), self.listed)
        return self.done


def enqueue(
    context: CudaContext,
    works: Sequence[ListedWork],
    prepares: Sequence[Callable[[], None]],
    commands: CommandList | CommandBatch,
) -> None:
    """Issue works whose lists, in the same order, are `commands`. Raises DeviceError.

    `prepares`: the `prepare` methods of those works that have anything to prepare.
    """
    context.follow_compute()
    timed: list[Timed] = []
    metered = context.is_timed()
    try:
        if metered:
            timed = [work.time() for work in works]
        for prepare in prepares:
            prepare()
        commands.issue(context.streams)
    except BaseException:
        for work in works:
            work.forget()
        raise
    finally:
        if metered:
            for work in works:
                work.untime()
    for work, when in zip(works, timed, strict=False):
        context.timings.note(context.turn, work.name, work.lane, work.nbytes, when)


class Together(Batch):
    """Enqueues works by one call."""

    def __init__(self, context: CudaContext, works: Sequence[ListedWork]) -> None:
        super().__init__(works)
        self.context = context
        self._listed = tuple(works)
        self._prepares = tuple(work.prepare for work in works if work.changes)
        self._commands = CommandBatch([work.listed for work in works], context.driver)

    def issue(self) -> None:
        enqueue(self.context, self._listed, self._prepares, self._commands)


class CommandWork(ListedWork):
    """Issues copies, or only waits."""

    __slots__ = ("_addresses", "_resized")

    def __init__(
        self,
        context: CudaContext,
        name: str,
        lane: Lane,
        waits: Sequence[Event],
        done: Event,
        pairs: Sequence[tuple[Buffer, Buffer]] = (),
    ) -> None:
        super().__init__(context, name, lane, waits, done)
        sizes = [source.nbytes for _, source in pairs]
        self.nbytes = sum(sizes)
        moves, copies = copy_commands(lane, sizes, context.turned[lane]) if pairs else ([], [])
        # The time of a pure wait is that of the wait itself.
        before, operation = (self._waits, moves) if moves else ([], self._waits)
        self.listed = made = self.commands(before, operation, self.recording())
        self._addresses: list[tuple[int, Buffer, int]] = []
        self._resized: list[tuple[int, torch.Tensor, int]] = []
        for index, i, first in copies:
            for field, buffer in zip("ab", pairs[i], strict=True):
                at = made.word(len(before) + 1 + index, Verb.COPY, field)
                made.words[at] = buffer.address + first
                if buffer.resized:
                    self._resized.append((at, buffer.data, first))
                elif buffer.tier is Tier.DEVICE:  # host memory keeps its address
                    self._addresses.append((at, buffer, first))

    @property
    def changes(self) -> bool:
        return self.nbytes > 0

    def prepare(self) -> None:
        words = self.listed.words
        for at, buffer, first in self._addresses:
            words[at] = buffer.address + first
        for at, data, first in self._resized:
            words[at] = data.data_ptr() + first
        if self.nbytes:
            self.context.ledger.copied_bytes[self.lane] += self.nbytes


class TableWork(ListedWork):
    """Launches a kernel over tables of addresses; changed tables are copied first, on the kernel's lane."""

    __slots__ = ("_copies", "_kernel", "_launches", "_starts")

    def __init__(
        self,
        context: CudaContext,
        name: str,
        lane: Lane,
        kernel: TableKernel,
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(context, name, lane, waits, done)
        self._kernel = kernel
        self._launches: Sequence[KernelLaunch] = ()
        copies = [Command(Verb.COPY, INDEX[lane], table.data.data_ptr()) for table in kernel.tables]
        starts = [Command(Verb.KERNEL, INDEX[lane], 0)] * kernel.n_launches
        first = len(self._waits)
        self.listed = made = self.commands([*self._waits, *copies], starts, self.recording())
        self._copies = [
            (made.word(i, Verb.COPY, "b"), made.word(i, Verb.COPY, "nbytes"), table.nbytes)
            for i, table in enumerate(kernel.tables, first)
        ]
        first += len(copies) + 1
        self._starts = [made.word(first + i, Verb.KERNEL, "a") for i in range(len(starts))]

    def prepare(self) -> None:
        words = self.listed.words
        sources, launches = self._kernel.prepare(self.context.turn % RING)
        for (source_at, nbytes_at, nbytes), source in zip(self._copies, sources, strict=True):
            words[source_at] = source
            words[nbytes_at] = nbytes if source else 0
        if launches is not self._launches:
            self._launches = launches
            for at, launch in zip(self._starts, launches, strict=True):
                words[at] = launch.address

    def forget(self) -> None:
        self._kernel.forget()


class KernelWork(CudaWork):
    """Runs kernels that torch or Triton launch, between two command lists."""

    __slots__ = ("_after", "_before", "_kernel")

    def __init__(
        self,
        context: CudaContext,
        name: str,
        lane: Lane,
        kernel: Callable[[], None],
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(context, name, lane, waits, done)
        self._kernel = kernel
        timed = Command(Verb.RECORD, INDEX[lane], 0)
        self._before = CommandList([*self._waits, timed], context.driver)
        self._after = CommandList([timed, *self.recording()], context.driver)
        self._timed = [
            (self._before.words, self._before.word(len(self._waits), Verb.RECORD, "a")),
            (self._after.words, self._after.word(0, Verb.RECORD, "a")),
        ]

    def issue(self) -> Event:
        context = self.context
        context.follow_compute()
        timed = self.time() if context.is_timed() else UNTIMED
        try:
            if self._waits or timed is not UNTIMED:
                self._before.issue(context.streams)
            with torch.no_grad(), context.current(self.lane):
                self._kernel()
            self._after.issue(context.streams)
        finally:
            if timed is not UNTIMED:
                self.untime()
        context.timings.note(context.turn, self.name, self.lane, self.nbytes, timed)
        return self.done


# Host functions bound for a CUDA device's host lane.


class HostCall(ListedWork):
    """Calls a host function; the function and its argument are written at every issue."""

    __slots__ = ("_clocked", "_function_at", "_task_at")

    def __init__(self, context: CudaContext, name: str, waits: Sequence[Event], done: Event) -> None:
        super().__init__(context, name, Lane.HOST, waits, done)
        self.listed = made = self.commands(self._waits, [Command(Verb.HOST, INDEX[Lane.HOST], 0)], self.recording())
        at = len(self._waits)
        self._function_at, self._task_at = made.word(at, Verb.HOST, "a"), made.word(at, Verb.HOST, "b")
        self._clocked: ClockedCall | None = None

    def time(self) -> Timed:
        self._clocked = self.context.timings.take_call(self.context.turn)
        return UNTIMED if self._clocked is None else self._clocked

    def untime(self) -> None:
        self._clocked = None

    def call(self, task: object, function: int, argument: int) -> None:
        """Make this issue call `function(argument)`, and keep `task` alive until then."""
        self.context.keep(task)
        if self._clocked is not None:
            self._clocked.function, self._clocked.argument = function, argument
            self.context.keep(self._clocked)
            function, argument = load().clocked_host_function, ctypes.addressof(self._clocked)
        words = self.listed.words
        words[self._function_at], words[self._task_at] = function, argument


class HostWork(HostCall):
    """Runs AdamW of a bucket as a host function.

    Tasks are immutable once enqueued, so there is one for each step that may be pending, with its own hyper-parameters.
    """

    __slots__ = ("_hypers", "_operands", "_scalars", "_tables", "_tasks")

    def __init__(
        self,
        context: CudaContext,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(context, name, waits, done)
        self._operands = operands
        self._scalars = scalars
        self._tasks: list[tuple[AdamWTask, int, int, Any]] = []
        self._hypers = [np.zeros(5, dtype=np.float64) for _ in range(RING)]
        self._tables: object = None

    def prepare(self) -> None:
        constants = self._operands.constants
        if self._tables is not constants.tables:
            self._make_tasks()
        task, function, argument, hyper = self._tasks[self.context.turn % RING]
        now = constants.hyper
        hyper[0], hyper[1], hyper[2], hyper[3], hyper[4] = now.lr, now.weight_decay, now.beta1, now.beta2, now.eps
        self.call(task, function, argument)

    def _make_tasks(self) -> None:
        context = self.context
        self._tables = self._operands.constants.tables
        self._tasks = []
        for hyper, error in zip(self._hypers, context.errors, strict=True):
            task = host_task(self._operands, self._scalars, context.threads, hyper=hyper, error=error)
            self._tasks.append((task, *task.host_function(), hyper.data))


class TaskWork(HostCall):
    """Calls a host function over operands with fixed addresses.

    There is one immutable task for each step that may be pending; they differ in where they report errors.
    """

    __slots__ = ("_tasks",)

    def __init__(
        self,
        context: CudaContext,
        name: str,
        task: Callable[..., AccumulateTask | NormTask],
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(context, name, waits, done)
        tasks = [task(error=error) for error in context.errors]
        self._tasks = [(made, *made.host_function()) for made in tasks]

    def prepare(self) -> None:
        self.call(*self._tasks[self.context.turn % RING])


class UnlockedCopy(Work):
    """Copies to the device from memory that is not pinned.

    The driver may read such memory when the copy is enqueued, before the stream's waits, so the caller waits first.
    """

    __slots__ = ("_copy", "_waits", "context")

    def __init__(self, context: CudaContext, copy: CommandWork, waits: Sequence[Event]) -> None:
        super().__init__(copy.name, copy.lane, copy.done)
        self.context = context
        self._copy = copy
        self._waits = tuple(waits)

    def issue(self) -> Event:
        for event in self._waits:
            self.context.wait(event)
        return self._copy.issue()
