"""What CUDA works need of their context, over a driver that remembers its calls; memory is the host's."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fake_driver import FakeDriver

from hostward.kernels.cuda.launcher import KernelLaunch
from hostward.runtime.backend import RING, Event, Ledger
from hostward.runtime.cuda.argument_tables import Table, TableKernel, Uploads
from hostward.runtime.cuda.commands import Streams
from hostward.runtime.cuda.context import CudaContext
from hostward.runtime.cuda.streams import INDEX, LANES, SECOND, STREAMS
from hostward.runtime.cuda.timing import Timings
from hostward.schedule.ops import Lane

STREAM_OF = {lane: 0x100 * (i + 1) for i, lane in enumerate(LANES)}
SECOND_OF = {lane: 0x10000 + STREAM_OF[lane] for lane in SECOND}
TURNED = 0x2000


class FakeContext:
    """Stands for CudaContext."""

    def __init__(self, refused: int = -1) -> None:
        self.fake = FakeDriver(refused)
        self.driver = self.fake.table()
        self.device = torch.device("cpu")
        self.handle = 0
        self.streams = Streams(STREAMS)
        for lane, handle in STREAM_OF.items():
            self.streams.set(INDEX[lane], handle)
        for lane, handle in SECOND_OF.items():
            self.streams.set(SECOND[lane], handle)
        self.turned = {lane: TURNED + INDEX[lane] for lane in LANES}
        self.ledger = Ledger()
        self.threads = 1
        self.errors = [np.zeros(1, dtype=np.int32) for _ in range(RING)]
        self.turn = 1
        self._meter: Any = None
        self.timed_events = 0
        self.in_capture = False
        self.kept: defaultdict[int, list[object]] = defaultdict(list)
        self._events = 0x1000
        self.timings = Timings(self._timed_event, self._elapsed_ms)
        self.uploads = Uploads(torch.device("cpu"), lambda size: torch.zeros(size, dtype=torch.uint8), RING)

    @property
    def meter(self) -> Any:
        return self._meter

    @meter.setter
    def meter(self, meter: Any) -> None:
        self._meter = meter
        if meter is not None:
            self.timings.anchor(self.fake.records.append)

    def event(self) -> Event:
        self._events += 1
        return Event(self._events)

    def handle_of(self, event: Event) -> int:
        assert isinstance(event.native, int)
        return event.native

    def _timed_event(self) -> int:
        self.timed_events += 1
        return self.handle_of(self.event())

    def _elapsed_ms(self, begin: int, end: int) -> float:
        """One second goes by between two records."""
        newest = {event: at for at, event in enumerate(self.fake.records)}
        return 1e3 * (newest[end] - newest[begin])

    def begin_step(self) -> None:
        self.turn += 1
        self.timings.read(self.turn % RING, self.meter)
        if self.meter is not None:
            self.fake.records += self.timings.begin(self.turn)

    def follow_compute(self) -> int:
        return 0

    def capturing(self) -> bool:
        return self.in_capture

    is_timed = CudaContext.is_timed

    @contextlib.contextmanager
    def current(self, _: Lane) -> Iterator[None]:
        yield

    def wait(self, event: Event) -> None:
        self.fake.calls.append(("the host waits", self.handle_of(event)))

    def keep(self, memory: object) -> None:
        self.kept[self.turn].append(memory)

    def calls(self) -> list[tuple[Any, ...]]:
        """The driver's calls since the last look."""
        found, self.fake.calls = self.fake.calls, []
        return found


class TwoTables(TableKernel):
    """One launch over a table that changes by `values` and one that never does."""

    def __init__(self, uploads: Uploads) -> None:
        rows = np.array([[1, 0], [2, 0]], dtype=np.int64)
        self.changing: Table = uploads.table(rows, [1, 3])
        self.fixed: Table = uploads.table(np.array([0.5, 0.0]), [1])
        self.tables = (self.fixed, self.changing)
        self.n_launches = 1
        self.values: list[int] = [10, 20]
        self.launches = [launch_of(0xF00D)]

    def prepare(self, slot: int) -> tuple[Sequence[int], Sequence[KernelLaunch]]:
        return (self.fixed.stage([0.25], slot), self.changing.stage(list(self.values), slot)), self.launches

    def forget(self) -> None:
        self.fixed.forget()
        self.changing.forget()


def launch_of(function: int) -> KernelLaunch:
    return KernelLaunch(function, programs=3, threads=128, shared_bytes=64, parameters=[bytes(8)] * 5)
