"""Operations bound for a CUDA device: what is known beforehand is a list of driver commands, enqueued in one call."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
    Held,
    Scalars,
    Tier,
    Work,
    require_copyable,
)
from hostward.runtime.cuda.argument_tables import Table
from hostward.runtime.cuda.commands import Command, CommandBatch, CommandList, Streams, Verb
from hostward.runtime.cuda.streams import INDEX, copy_commands
from hostward.runtime.cuda.timing import UNTIMED, Timed
from hostward.runtime.host_tasks import host_task
from hostward.schedule.ops import Lane

if TYPE_CHECKING:
    from hostward.runtime.cuda.backend import CudaBackend


TOGETHER = 32
"""Works in one native call, at most: the device need not wait for the last of hundreds to be written."""


class CudaEvent(Event):
    """An event whose handle goes back for reuse: waits that are enqueued hold for what it stood for then."""

    __slots__ = ("_unused",)

    def __init__(self, handle: int, unused: list[int]) -> None:
        super().__init__(handle)
        self._unused = unused

    def __del__(self) -> None:
        if isinstance(self.native, int):
            self._unused.append(self.native)


def is_timed(backend: CudaBackend) -> bool:
    """Whether works that are issued now are timed: there is a meter, and no capture, whose events have no times."""
    return backend.meter is not None and not backend.capturing()


class CudaWork(Work):
    """Waits, then the operation proper, then the record of `done`, all on one lane.

    With a meter, two timed events of this issue stand before and after the operation; without, these two commands
    record nothing. On the host lane there are none (`hostward.runtime.cuda.timing`).
    """

    __slots__ = ("_backend", "_timed", "_waits", "nbytes")

    def __init__(self, backend: CudaBackend, name: str, lane: Lane, waits: Sequence[Event], done: Event) -> None:
        super().__init__(name, lane, done)
        self._backend = backend
        self._waits = [Command(Verb.WAIT, INDEX[lane], backend.handle_of(event)) for event in waits]
        self._timed: list[tuple[memoryview, int]] = []
        """Where the two timed events stand."""
        self.nbytes = 0

    def time(self) -> Timed:
        """Write the timed events of an issue into the commands. Done if `is_timed`; `untime` comes afterwards."""
        if not self._timed:
            return UNTIMED
        events = self._backend.timings.take(self._backend.turn)
        for (words, at), event in zip(self._timed, events, strict=True):
            words[at] = event
        return events

    def untime(self) -> None:
        """Take them out: the next issue may be without a meter."""
        for words, at in self._timed:
            words[at] = 0

    def prepare(self) -> None:
        """Write what this issue needs into the commands. The first part of every issue."""

    def forget(self) -> None:
        """The issue that `prepare` began has failed."""

    def commands(
        self, before: Sequence[Command], operation: Sequence[Command], after: Sequence[Command]
    ) -> CommandList:
        """The list of all of these, the operation between timed events."""
        if self.lane is Lane.HOST:
            return CommandList([*before, *operation, *after], self._backend.driver)
        timed = Command(Verb.RECORD, INDEX[self.lane], 0)
        made = CommandList([*before, timed, *operation, timed, *after], self._backend.driver)
        for at in (len(before), len(before) + 1 + len(operation)):
            self._timed.append((made.words, made.word(at, Verb.RECORD, "a")))
        return made

    def recording(self) -> list[Command]:
        return [Command(Verb.RECORD, INDEX[self.lane], self._backend.handle_of(self.done))]


class ListedWork(CudaWork):
    """A work that is one command list. Several that follow one another are enqueued by one call."""

    __slots__ = ("listed",)
    listed: CommandList

    @property
    def changes(self) -> bool:
        """Whether there is anything to prepare."""
        return True

    def issue(self) -> Event:
        enqueue(self._backend, (self,), (self.prepare,), self.listed)
        return self.done


def enqueue(
    backend: CudaBackend,
    works: Sequence[ListedWork],
    prepares: Sequence[Callable[[], None]],
    commands: CommandList | CommandBatch,
) -> None:
    """Issue works whose lists, in the same order, are `commands`; `prepares` are those of them that have anything to
    prepare. Raises DeviceError.
    """
    backend.follow_compute()
    timed: list[Timed] = []
    metered = is_timed(backend)
    try:
        if metered:
            timed = [work.time() for work in works]
        for prepare in prepares:
            prepare()
        commands.issue(backend.streams)
    except BaseException:
        for work in works:
            work.forget()
        raise
    finally:
        if metered:
            for work in works:
                work.untime()
    for work, when in zip(works, timed, strict=False):
        backend.timings.note(backend.turn, work.name, work.lane, work.nbytes, when)


def batch_of(backend: CudaBackend, works: Sequence[Work]) -> Batch:
    """Works in order; neighbours that are command lists are enqueued together."""
    parts: list[list[ListedWork] | Work] = []
    for work in works:
        last = parts[-1] if parts else None
        if not isinstance(work, ListedWork):
            parts.append(work)
        elif isinstance(last, list) and len(last) < TOGETHER:
            last.append(work)
        else:
            parts.append([work])
    made = [Together(backend, part) if isinstance(part, list) else part for part in parts]
    return made[0] if len(made) == 1 and isinstance(made[0], Together) else Batch(made)


class Together(Batch):
    """Works that one call enqueues."""

    def __init__(self, backend: CudaBackend, works: Sequence[ListedWork]) -> None:
        super().__init__(works)
        self._backend = backend
        self._listed = tuple(works)
        self._prepares = tuple(work.prepare for work in works if work.changes)
        self._commands = CommandBatch([work.listed for work in works], backend.driver)

    def issue(self) -> None:
        enqueue(self._backend, self._listed, self._prepares, self._commands)


class CommandWork(ListedWork):
    """Copies, or nothing but waits."""

    __slots__ = ("_addresses", "_resized")

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
        sizes = [source.nbytes for _, source in pairs]
        self.nbytes = sum(sizes)
        moves, copies = copy_commands(lane, sizes, backend.turned[lane]) if pairs else ([], [])
        # What a pure wait costs is the wait itself.
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
                elif buffer.tier is Tier.DEVICE:  # host memory stays where it is
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
            self._backend.ledger.copied_bytes[self.lane] += self.nbytes


class TableKernel(ABC):
    """Launches over tables of addresses."""

    tables: tuple[Table, ...]
    n_launches: int

    @abstractmethod
    def prepare(self, slot: int) -> tuple[Sequence[int], Sequence[KernelLaunch]]:
        """For a turn of `slot`: of each table the host address to copy from, 0 if nothing has changed, and the
        launches.
        """

    @abstractmethod
    def forget(self) -> None:
        """What was prepared last has not been enqueued."""


class TableWork(ListedWork):
    """A kernel over tables of addresses: what has changed in them is copied first, on the kernel's own lane."""

    __slots__ = ("_copies", "_kernel", "_launches", "_starts")

    def __init__(
        self,
        backend: CudaBackend,
        name: str,
        lane: Lane,
        kernel: TableKernel,
        waits: Sequence[Event],
        done: Event,
    ) -> None:
        super().__init__(backend, name, lane, waits, done)
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
        sources, launches = self._kernel.prepare(self._backend.turn % RING)
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
    """Kernels that torch or Triton launch, between two command lists."""

    __slots__ = ("_after", "_before", "_kernel")

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
        timed = Command(Verb.RECORD, INDEX[lane], 0)
        self._before = CommandList([*self._waits, timed], backend.driver)
        self._after = CommandList([timed, *self.recording()], backend.driver)
        self._timed = [
            (self._before.words, self._before.word(len(self._waits), Verb.RECORD, "a")),
            (self._after.words, self._after.word(0, Verb.RECORD, "a")),
        ]

    def issue(self) -> Event:
        backend = self._backend
        backend.follow_compute()
        timed = self.time() if is_timed(backend) else UNTIMED
        try:
            if self._waits or timed is not UNTIMED:
                self._before.issue(backend.streams)
            with torch.no_grad(), backend.current(self.lane):
                self._kernel()
            self._after.issue(backend.streams)
        finally:
            if timed is not UNTIMED:
                self.untime()
        backend.timings.note(backend.turn, self.name, self.lane, self.nbytes, timed)
        return self.done


# Host functions bound for a CUDA device's host lane.


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


# Copies of a CUDA device: those from host memory that is not page-locked wait on the host.


class UnlockedCopy(Work):
    """A copy to the device from memory that is not page-locked. The driver may read that when the copy is enqueued,
    whatever the stream still waits for: so the caller waits for it first.
    """

    __slots__ = ("_backend", "_copy", "_waits")

    def __init__(self, backend: CudaBackend, copy: CommandWork, waits: Sequence[Event]) -> None:
        super().__init__(copy.name, copy.lane, copy.done)
        self._backend = backend
        self._copy = copy
        self._waits = tuple(waits)

    def issue(self) -> Event:
        for event in self._waits:
            self._backend.wait(event)
        return self._copy.issue()


def copying(
    backend: CudaBackend,
    name: str,
    lane: Lane,
    waits: Sequence[Event],
    done: Event,
    pairs: Sequence[tuple[Buffer, Buffer]],
) -> Work:
    """Copies (destination, source) on a copy lane. Raises PlacementError."""
    for destination, source in pairs:
        require_copyable(lane, destination, source)
    copy = CommandWork(backend, name, lane, waits, done, pairs)
    if lane is Lane.H2D and not all(source.pinned for _, source in pairs):
        return UnlockedCopy(backend, copy, waits)
    return copy


# Streams of somebody else that wait for events of ours, and the compute lane, which then waits for what they do.


def hold(backend: CudaBackend, stream: torch.Stream, waits: Sequence[Event], timed: Held = UNTIMED) -> None:
    """As `Backend.hold`, between two events. Raises DeviceError."""
    others = Streams(1, backend.context)
    others.set(0, stream.cuda_stream)  # type: ignore[attr-defined]
    before, after = (Command(Verb.RECORD, 0, event) for event in timed)
    commands = [Command(Verb.WAIT, 0, backend.handle_of(event)) for event in waits]
    CommandList([before, *commands, after], backend.driver).issue(others)


def hold_timed(backend: CudaBackend, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
    """As `Backend.hold_timed`. Raises DeviceError."""
    timed = backend.timings.take(backend.turn) if is_timed(backend) else UNTIMED
    hold(backend, stream, waits, timed)
    return None if timed is UNTIMED else timed


def wait_behind(backend: CudaBackend, name: str, held: Held, event: torch.Event | None) -> None:
    """As `Backend.wait_behind`. Raises DeviceError."""
    if event is None or not is_timed(backend):
        return
    backend.follow_compute()
    timed = backend.timings.take(backend.turn)
    lane = INDEX[Lane.COMPUTE]
    before, after = (Command(Verb.RECORD, lane, each) for each in timed)
    wait = Command(Verb.WAIT, lane, event.cuda_event)  # type: ignore[attr-defined]
    # In one call: of a lane that has nothing to do, the host's time between two calls would count.
    CommandList([before, wait, after], backend.driver).issue(backend.streams)
    # When this is over, so is the hold: what was waited for comes behind it.
    backend.timings.note(backend.turn, name, Lane.COMPUTE, 0, timed, held=held)
