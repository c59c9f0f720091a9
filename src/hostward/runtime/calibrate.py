"""Measure in about a second how fast this machine copies and steps optimizer state."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hostward.core.host_limits import Rates
from hostward.core.inventory import FP32_STATE, Dtype, MasterKind, StateFormat, stored_elements
from hostward.kernels.cpu.adamw import bias_tables
from hostward.kernels.cpu.library import check, load
from hostward.runtime.backend import (
    LOW_DTYPES,
    STATE_DTYPES,
    TORCH_DTYPES,
    AdamWOperands,
    Backend,
    BoundRange,
    Buffer,
    Constants,
    Hyper,
    Scalars,
    Tier,
    Work,
)
from hostward.runtime.global_norm import Ranks
from hostward.runtime.pinned_memory import host_slab
from hostward.schedule.ops import Lane

# Far more than any cache holds, so that memory bandwidth is measured, not that of caches.
_ELEMENTS = 48 * 1024 * 1024
_COPIED_BYTES = 512 * 1024 * 1024
_ROUNDS = 3
_LONGER = 5
"""Competing works are issued for this many times the duration of the timed works, so that they outlast them."""


def measure_rates(
    backend: Backend, ranks: Ranks | None = None, *, dtype: Dtype = Dtype.BF16, form: StateFormat = FP32_STATE
) -> Rates:
    """Measure the rates of copies and of the CPU step on idle lanes of a CUDA backend; frees all that it allocates.

    With `ranks`, all ranks measure concurrently, and each returns the mean over all, so that all decide alike. The step
    is that of weights of `dtype` with state in `form`: fewer bytes are not faster by as much, since rounding at random
    takes the processors time.

    Raises:
        MemoryLimitError: less than 2 GB of host or 1.1 GB of device memory is left, or 1 GiB cannot be pinned.
    """
    taken: list[Buffer] = []

    def take(tier: Tier, elements: int, dtype: torch.dtype, pinned: bool = False) -> Buffer:
        taken.extend(backend.allocate(tier, [elements], dtype, "rate measurement", pinned=pinned))
        return taken[-1]

    def seconds(works: Sequence[Work], last: Sequence[Work]) -> float:
        if ranks is not None:
            backend.synchronise()
            ranks.total(torch.zeros(1, device=backend.device))  # a barrier: all ranks begin together
        return _seconds(backend, works, last)

    def beside(works: list[Work], works_s: float, others: list[Work], others_s: float) -> float:
        """Return the seconds of `works` while `others` run; `_s`: seconds of `_ROUNDS` of each alone."""
        return seconds([*works * _ROUNDS, *others * math.ceil(_LONGER * _ROUNDS * works_s / others_s)], works)

    try:
        # Allocations that may fail come first.
        here = [take(Tier.HOST, _COPIED_BYTES, torch.uint8, pinned=True) for _ in range(2)]
        there = [take(Tier.DEVICE, _COPIED_BYTES, torch.uint8) for _ in range(2)]
        step = _host_step(backend, take, _ELEMENTS, dtype, form)
        pairs = ((Lane.H2D, (there[0], here[0])), (Lane.D2H, (here[1], there[1])))
        copies = [backend.copy(lane, [pair], name="rate") for lane, pair in pairs]
        backend.synchronise()  # no events order the lanes here
        for work in (step, *copies):
            work.issue()
        step_s = seconds([step] * _ROUNDS, [step])
        copy_s = seconds(copies * _ROUNDS, copies)
        d2h_s = seconds([copies[1]] * _ROUNDS, [copies[1]])
        busy_step_s = beside([step], step_s, copies, copy_s)
        # Until both directions have ended: a step copies equal bytes in both, and one slows down more than the other.
        busy_copy_s = beside(copies, copy_s, [step], step_s)
    finally:
        backend.free(taken)
    elements, copied_bytes = _ROUNDS * _ELEMENTS, _ROUNDS * 2 * _COPIED_BYTES
    busy = elements / busy_step_s, copied_bytes / busy_copy_s
    own = (elements / step_s, copied_bytes / copy_s, *busy, copied_bytes / 2 / d2h_s)
    if ranks is None:
        return Rates(*own)
    told = torch.tensor([*own, 1.0], dtype=torch.float64, device=backend.device)
    ranks.total(told)
    *sums, count = told.tolist()
    return Rates(*(rate / count for rate in sums))


def measure_host_step(backend: Backend, elements: int = _ELEMENTS) -> float:
    """Measure the parameters per second of the CPU optimizer step alone; works on any backend.

    Raises:
        MemoryLimitError: less than 14 bytes of host memory per element are left.
    """
    taken: list[Buffer] = []

    def take(tier: Tier, count: int, dtype: torch.dtype) -> Buffer:
        taken.extend(backend.allocate(tier, [count], dtype, "rate measurement", pinned=False))
        return taken[-1]

    try:
        step = _host_step(backend, take, elements, Dtype.BF16, FP32_STATE)
        step.issue()
        return _ROUNDS * elements / _seconds(backend, [step] * _ROUNDS, [step])
    finally:
        backend.free(taken)


def _host_step(
    backend: Backend, take: Callable[[Tier, int, torch.dtype], Buffer], elements: int, dtype: Dtype, form: StateFormat
) -> Work:
    kind = form.master_kind(dtype)
    exp_avg, exp_avg_sq = (
        take(Tier.HOST, stored_elements(moment, elements), STATE_DTYPES[moment]) for moment in form.moments.values()
    )
    low = None if kind is MasterKind.WEIGHT else take(Tier.HOST, elements, LOW_DTYPES[kind])
    gradient, weight = (take(Tier.HOST, elements, TORCH_DTYPES[dtype]) for _ in range(2))
    _fill(gradient.data)
    count, skip = take(Tier.HOST, 1, torch.int64), take(Tier.HOST, 1, torch.int32)
    scale, norm = (take(Tier.HOST, 1, torch.float32) for _ in range(2))
    scale.data.fill_(1.0)
    constants = Constants(Hyper(0.0, 0.0, 0.9, 0.999, 1e-8), bias_tables(0.9, 0.999, 64))
    operands = AdamWOperands([BoundRange(0, gradient, weight, count)], kind, exp_avg, exp_avg_sq, low, constants)
    return backend.adamw(Lane.HOST, "rate", operands, Scalars(scale, skip, norm))


def _fill(gradient: torch.Tensor) -> None:
    """Fill with numbers that are distributed as gradients are: FP8 rounds a block of zeros in another way."""
    numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(gradient.dtype)
    for part in torch.split(gradient, numbers.numel()):
        part.copy_(numbers[: part.numel()])


def _seconds(backend: Backend, works: Sequence[Work], last: Sequence[Work]) -> float:
    """Issue `works`, and return the seconds until the last issue of each of `last` is complete."""
    backend.synchronise()
    started_s = time.perf_counter()
    for work in works:
        work.issue()
    for work in last:
        backend.wait(work.done)
    return time.perf_counter() - started_s


# Bandwidth limits of a machine: of PCIe or NVLink, and of host memory, with nothing else running.


SPAN_BYTES = 1 << 30
"""Bytes copied repeatedly in each direction; far more than any cache holds."""
CHUNK_BYTES = 256 << 20
RMW_ELEMENTS = 64 << 20
RMW_BYTES = 26
"""Memory traffic per element of the read-modify-write loop, as in a CPU step with 16-bit gradient and weight."""


class Links:
    """Enqueues copies between pinned and device memory, in either direction, on two streams."""

    def __init__(self, backend: Backend, span_bytes: int = SPAN_BYTES) -> None:
        """Raises MemoryLimitError if `span_bytes` do not fit twice into host and device memory."""
        self._span_bytes = span_bytes
        self.host = backend.allocate(Tier.HOST, [span_bytes] * 2, torch.uint8, "link roof", pinned=True)
        self._device = [torch.empty(span_bytes, dtype=torch.uint8, device=backend.device) for _ in range(2)]
        self._streams = {name: torch.cuda.Stream(backend.device) for name in ("h2d", "d2h")}  # type: ignore[no-untyped-call]

    def enqueue(
        self, direction: str, count: int, chunk_bytes: int = CHUNK_BYTES, *, timed: bool = True
    ) -> list[torch.cuda.Event]:
        """Enqueue `count` copies on the stream of `direction`; `timed`: with an event before the first, after each."""
        stream, side = self._streams[direction], 0 if direction == "h2d" else 1
        host = torch.split(self.host[side].data, chunk_bytes)
        device = torch.split(self._device[side], chunk_bytes)
        whole = self._span_bytes // chunk_bytes
        events = []
        with torch.cuda.stream(stream):
            if timed:
                events.append(recorded(stream))
            for i in range(count):
                pair = device[i % whole], host[i % whole]
                target, source = pair if direction == "h2d" else pair[::-1]
                target.copy_(source, non_blocking=True)
                if timed:
                    events.append(recorded(stream))
        return events

    def rate(
        self, directions: Sequence[str], count: int = 40, chunk_bytes: int = CHUNK_BYTES, rounds: int = 3
    ) -> float:
        """Measure the bytes per second of each direction while all of them run."""
        rates = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            for direction in directions:
                self.enqueue(direction, count, chunk_bytes, timed=False)
            torch.cuda.synchronize()
            rates.append(count * chunk_bytes / (time.perf_counter() - started_s))
        return statistics.median(rates)


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record a new event with timing on `stream`, and return it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class ReadModifyWrite:
    """Runs the memory accesses of a CPU step over huge pages, with one integer operation on each element."""

    def __init__(self, threads: int, elements: int = RMW_ELEMENTS) -> None:
        """Raises MemoryLimitError if 14 bytes per element do not fit, NativeError without the native library."""
        self.elements = elements
        dtypes = (torch.float32,) * 2 + (torch.int16,) * 3
        sizes = [elements * dtype.itemsize for dtype in dtypes]
        self._streams = [
            host_slab(size, owner="memory roof", threads=threads).view(d) for size, d in zip(sizes, dtypes, strict=True)
        ]
        self._pointers = np.array([stream.data_ptr() for stream in self._streams], dtype=np.int64)
        self._isa = int(load().supported_isas()[-1])

    def run(self, threads: int, prefetch: int) -> float:
        """Run one pass, and return its seconds. Raises NativeError."""
        started_s = time.perf_counter()
        code = load().bench_rmw(self._pointers.ctypes.data, self.elements, threads, self._isa, prefetch)
        check(code, "hostward_bench_rmw")
        return time.perf_counter() - started_s

    def fastest(self, threads: int, rounds: int = 12) -> tuple[float, int]:
        """Return the best median of elements per second, without two warm-up rounds, and its prefetch setting."""
        rates = {}
        for prefetch in (0, 1):
            seconds = [self.run(threads, prefetch) for _ in range(rounds)][2:]
            rates[prefetch] = self.elements / statistics.median(seconds)
        best = max(rates, key=lambda prefetch: rates[prefetch])
        return rates[best], best
