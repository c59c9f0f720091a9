"""Operations bound for a CUDA device: what is known beforehand is a list of driver commands, enqueued in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hostward.schedule import Lane

from .backend import RING, Batch, Buffer, Event, Tier, Work
from .commands import Command, CommandBatch, CommandList, KernelLaunch, Verb
from .cuda_lanes import INDEX, copy_commands
from .cuda_timing import UNTIMED, Timed
from .uploads import Table

if TYPE_CHECKING:
    from .cuda import CudaBackend

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
    record nothing. On the host lane there are none (`hostward.engine.cuda_timing`).
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
