"""What enqueueing costs the calling thread, by kind of operation.

    python benchmarks/enqueue.py --json benchmarks/results/DATE-enqueue.json
    python benchmarks/enqueue.py --off-device

A kind is measured over as many buckets as --buckets says, each with --ranges ranges, with gradients at other addresses
in every turn. Queues are empty before each turn: a full one makes the driver wait. Columns, in microseconds of one
operation, the fastest of --turns turns:

    alone    issued by itself, one native call each
    batch    issued with the others of its kind, as the operations of one point are
    driver   the driver's calls alone: the same command lists without anything written into them
    ratio    batch over driver

Then whole steps of an optimizer are timed, from gradients that lie in `.grad` to weights that have arrived, per bucket;
and, on a GPU, how long step() takes while the device is busy for about a second, with a trace and without: it returns
at once, unless the driver lets no more operations wait.

With --off-device the driver is a few C functions that return at once (a C compiler is needed) and kernels are launches
of nothing, so `driver` is the cost of the calls into native code and everything else is Python's. Without it, on a GPU,
`triton` is a launch of the same kernel by Triton's own launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hostward.core.inventory import MasterKind
from hostward.kernels.cpu.adamw import bias_tables
from hostward.kernels.cuda import adamw, norm
from hostward.kernels.cuda.launcher import KernelLaunch
from hostward.runtime.backend import (
    RING,
    AdamWOperands,
    BoundRange,
    Buffer,
    Constants,
    Event,
    Hyper,
    Ledger,
    Partials,
    Scalars,
    Tier,
    Work,
    chunks_of,
)
from hostward.runtime.cuda.backend import CudaBackend
from hostward.runtime.cuda.commands import CommandBatch, DriverTable, Streams
from hostward.runtime.cuda.context import CudaContext
from hostward.runtime.cuda.kernels import KernelTables
from hostward.runtime.cuda.streams import STREAMS
from hostward.runtime.cuda.work import ListedWork
from hostward.schedule.ops import Lane

from machine import describe

RANGE_ELEMENTS = 4096
BUSY_CYCLES = int(1.7e9)
PENDING = (64, 128, 256, 512)
MIXES: Mapping[str, Mapping[str, float]] = {
    "device": {"offload_fraction": 0.0},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
}

NO_DRIVER = "".join(
    f"int {name}() {{ return 0; }}\n" for name in ("wait", "record", "copy", "host", "kernel", "get", "set")
)


def idle_driver() -> DriverTable:
    """A driver that does nothing, compiled here. Raises SystemExit without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("--off-device needs a C compiler (cc)")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "driver.so")
        source.write_text(NO_DRIVER)
        subprocess.run([compiler, "-O2", "-w", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        functions = ctypes.CDLL(str(library))

    def address(name: str) -> int:
        return int(ctypes.cast(functions[name], ctypes.c_void_p).value or 0)

    return DriverTable(
        stream_wait_event=address("wait"),
        event_record=address("record"),
        memcpy_async=address("copy"),
        launch_host_function=address("host"),
        launch_kernel=address("kernel"),
        context_get_current=address("get"),
        context_set_current=address("set"),
        error_name=str,
    )


class IdleContext(CudaContext):
    """What works need, on a machine without a GPU: a driver that does nothing."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._made = 0
        self.ledger, self.threads, self.turn = Ledger(), 1, 0
        self.driver, self.streams = idle_driver(), Streams(STREAMS)
        self.turned = {lane: i + 1 for i, lane in enumerate(Lane)}
        self.errors = [torch.zeros(1, dtype=torch.int32).numpy() for _ in range(RING)]
        self._kept: list[list[object]] = [[] for _ in range(RING)]
        self.kernels = KernelTables(self.device, self.upload_arena, contextlib.nullcontext)

    def event(self) -> Event:
        self._made += 1
        return Event(self._made)

    def host_blocks(self, sizes: Sequence[int], dtype: torch.dtype, owner: str, pinned: bool) -> list[torch.Tensor]:  # type: ignore[override]
        return [torch.zeros(size, dtype=dtype) for size in sizes]

    def capturing(self) -> bool:
        return False

    def compute_key(self) -> int:
        return 0

    def follow_compute(self) -> int:
        return 0

    def begin_step(self) -> None:
        self.turn += 1
        self._kept[self.turn % RING].clear()

    def end_step(self) -> None:
        pass

    def synchronise(self) -> None:
        pass


class OffDevice(CudaBackend):
    """The CUDA backend's operations on a machine without a GPU: nothing is copied or stepped."""

    def __init__(self) -> None:
        super().__init__(context=IdleContext())

    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        return Buffer(Tier.DEVICE, tensor, owner)

    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        for buffer in buffers:
            buffer.point_to(buffer.data.new_empty(0))

    def launch(
        self,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        lane: Lane = Lane.COMPUTE,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        return self.mark(name, lane, waits=waits, done=done)

    def memory_of(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def caller_stream(self) -> None:
        return None


class NoLaunch:
    """Stands for a bound launch where there is no Triton."""

    def __init__(self, parameters: int) -> None:
        self._native = KernelLaunch(1, programs=1, threads=128, shared_bytes=0, parameters=[bytes(8)] * parameters)

    def native(self) -> KernelLaunch:
        return self._native


class Buckets:
    """Operands of `n` buckets, and the works of each kind over them."""

    def __init__(self, backend: CudaBackend, n: int, ranges: int) -> None:
        self.backend = backend
        self._n, self._ranges = n, ranges
        self._events: list[Event] = []
        self.constants = Constants(Hyper(1e-3, 0.1, 0.9, 0.95, 1e-8), bias_tables(0.9, 0.95, 1000))
        # Two sets, which take turns: an address that stays is not copied again.
        self._gradients = [self._tensors(Tier.DEVICE) for _ in range(2)]
        self.gradients = [[Buffer(Tier.DEVICE, t, "gradients") for t in one] for one in self._gradients[0]]
        landing, sources, weights = self._sets(Tier.HOST), self._sets(Tier.HOST), self._sets(Tier.DEVICE)
        chunks = n * ranges * chunks_of(RANGE_ELEMENTS)
        sums, exponents = self._one(Tier.DEVICE, chunks, torch.int64), self._one(Tier.DEVICE, chunks, torch.int32)
        self.works: dict[str, list[Work]] = {
            "partial sums": [
                backend.partials(
                    "p", g, [RANGE_ELEMENTS] * ranges, range(b * ranges, (b + 1) * ranges), Partials(sums, exponents)
                )
                for b, g in enumerate(self.gradients)
            ],
            "gradients to the host": self._copies(Lane.D2H, landing, self.gradients, waits=1),
            "host step": self._steps(Lane.HOST, landing, sources),
            "device step": self._steps(Lane.UPDATE, self.gradients, weights),
            "weights to the device": self._copies(Lane.H2D, weights, sources, waits=2),
            "wait": [backend.mark("w", Lane.COMPUTE, waits=self._made_events(1)) for _ in range(n)],
        }

    def turn(self) -> None:
        """Begin a turn, with gradients at other addresses and hyper-parameters of its own."""
        self.backend.synchronise()
        self.backend.begin_step()
        now = self._gradients[self.backend.context.turn % 2]
        for buffers, tensors in zip(self.gradients, now, strict=True):
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.point_to(tensor)
        self.constants.hyper = Hyper(1e-3 / self.backend.context.turn, 0.1, 0.9, 0.95, 1e-8)

    def _made_events(self, n: int) -> list[Event]:
        """Events that nobody records; kept, because a handle is used again once its event is gone."""
        self._events += [self.backend.event() for _ in range(n)]
        return self._events[-n:]

    def _one(self, tier: Tier, elements: int, dtype: torch.dtype) -> Buffer:
        device = self.backend.device if tier is Tier.DEVICE else torch.device("cpu")
        pinned = tier is Tier.HOST and self.backend.device.type == "cuda"
        return Buffer(tier, torch.zeros(elements, dtype=dtype, device=device, pin_memory=pinned), "x", pinned)

    def _tensors(self, tier: Tier) -> list[list[torch.Tensor]]:
        """bf16, by bucket and range."""
        whole = self._one(tier, self._n * self._ranges * RANGE_ELEMENTS, torch.bfloat16).data
        return [list(one.split(RANGE_ELEMENTS)) for one in whole.split(self._ranges * RANGE_ELEMENTS)]

    def _sets(self, tier: Tier) -> list[list[Buffer]]:
        return [[Buffer(tier, t, "x", tier is Tier.HOST) for t in one] for one in self._tensors(tier)]

    def _copies(
        self, lane: Lane, to: Sequence[Sequence[Buffer]], source: Sequence[Sequence[Buffer]], waits: int
    ) -> list[Work]:
        return [
            self.backend.copy(lane, list(zip(*pair, strict=True)), name="c", waits=self._made_events(waits))
            for pair in zip(to, source, strict=True)
        ]

    def _steps(
        self, lane: Lane, gradients: Sequence[Sequence[Buffer]], weights: Sequence[Sequence[Buffer]]
    ) -> list[Work]:
        tier = Tier.HOST if lane is Lane.HOST else Tier.DEVICE
        scale, skip, value = (self._one(tier, 1, dtype) for dtype in (torch.float32, torch.int32, torch.float32))
        skip.data.fill_(1)  # nothing is written, so that a turn may be repeated as often as one likes
        elements = self._ranges * RANGE_ELEMENTS
        works = []
        for pair in zip(gradients, weights, strict=True):
            counts = self._one(tier, self._ranges, torch.int64).data.split(1)
            ranges = [
                BoundRange(i * RANGE_ELEMENTS, g, w, Buffer(tier, counts[i], "x"))
                for i, (g, w) in enumerate(zip(*pair, strict=True))
            ]
            exp_avg, exp_avg_sq = (self._one(tier, elements, torch.float32) for _ in range(2))
            low = self._one(tier, elements, torch.int16)
            operands = AdamWOperands(ranges, MasterKind.SPLIT, exp_avg, exp_avg_sq, low, self.constants)
            scalars = Scalars(scale, skip, value)
            works.append(self.backend.adamw(lane, "s", operands, scalars, waits=self._made_events(1)))
        return works


def fastest_s(buckets: Buckets, turns: int, issue: Callable[[], object]) -> float:
    """The shortest of `turns` turns that issue one kind."""
    times = []
    for _ in range(turns):
        buckets.turn()
        start = time.perf_counter()
        issue()
        times.append(time.perf_counter() - start)
        buckets.backend.end_step()
    return min(times)


def kinds(buckets: Buckets, turns: int) -> Iterator[dict[str, Any]]:
    backend = buckets.backend
    for kind, works in buckets.works.items():

        def one_by_one(works: Sequence[Work] = works) -> None:
            for work in works:
                work.issue()

        lists = CommandBatch([work.listed for work in works if isinstance(work, ListedWork)], backend.context.driver)
        row: dict[str, Any] = {"kind": kind}
        ways: dict[str, Callable[[], object]] = {"alone": one_by_one, "batch": backend.batch(works).issue}
        ways["driver"] = lambda lists=lists: lists.issue(backend.context.streams)
        for way, issue in ways.items():
            row[f"{way}_us"] = fastest_s(buckets, turns, issue) / len(works) * 1e6
        row["ratio"] = row["batch_us"] / row["driver_us"]
        yield row


def triton_launch_us(buckets: Buckets, turns: int) -> float:
    """A launch of the kernel of partial sums by Triton's own launcher."""
    device = buckets.backend.device
    items = torch.tensor([[g[0].data.data_ptr(), RANGE_ELEMENTS, 0] for g in buckets.gradients[:1]], device=device)
    chunk_map = torch.from_numpy(norm.chunk_map([RANGE_ELEMENTS])).to(device)
    outputs = [torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32)]
    (launch,) = norm.bind_partials(items, chunk_map, 1, outputs[0], outputs[1])
    launch()
    n = len(buckets.gradients)
    return fastest_s(buckets, turns, lambda: [launch() for _ in range(n)]) / n * 1e6


def pending_steps(counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Seconds of step() behind a busy device, and until all of it is done, by mix and number of buckets."""
    import hostward

    for mix, traced, count in itertools.product(("host", "streamed"), (False, True), counts):
        model = torch.nn.ModuleList(Layer() for _ in range(count)).to("cuda", torch.bfloat16)
        optimizer = hostward.AdamW(model, max_grad_norm=1.0, **MIXES[mix])

        def took_s(cycles: int, model: torch.nn.Module = model, optimizer: Any = optimizer) -> tuple[float, float]:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            torch.cuda._sleep(cycles)
            start = time.perf_counter()
            optimizer.step()
            issued_s = time.perf_counter() - start
            optimizer.wait_for_weights()
            torch.cuda.synchronize()
            return issued_s, time.perf_counter() - start

        for _ in range(6):
            took_s(0)
        optimizer.wait()
        with optimizer.trace() if traced else contextlib.nullcontext():
            took_s(0)
            issued_s, passed_s = took_s(BUSY_CYCLES)
        buckets = len(optimizer.plan.buckets)
        yield {"mix": mix, "traced": traced, "buckets": buckets, "step_s": issued_s, "until_done_s": passed_s}


class Layer(torch.nn.Module):
    """A bucket of three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(256, 256))
        self.bias, self.scale = (torch.nn.Parameter(torch.zeros(256)) for _ in range(2))


def whole_steps(layers: int, turns: int, backend: CudaBackend) -> Iterator[dict[str, Any]]:
    """step() and wait_for_weights() of an optimizer over `layers` layers, per bucket."""
    import hostward

    on_device = backend.device.type == "cuda"
    for mix, options in MIXES.items():
        model = torch.nn.ModuleList(Layer() for _ in range(layers)).to(backend.device, torch.bfloat16)
        own = None if on_device else OffDevice()
        optimizer = hostward.AdamW(model, max_grad_norm=1.0, backend=own, **options)  # type: ignore[arg-type]
        times = []
        for _ in range(turns + 5):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.wait()
            if on_device:
                torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step()
            optimizer.wait_for_weights()
            times.append(time.perf_counter() - start)
            optimizer.zero_grad()
        buckets = len(optimizer.plan.buckets)
        yield {"mix": mix, "buckets": buckets, "us_per_bucket": min(times[5:]) / buckets * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=100)
    parser.add_argument("--ranges", type=int, default=3)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--off-device", action="store_true", help="without a GPU: a driver that does nothing")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    if a.off_device:
        norm.bind_partials = lambda *_: [NoLaunch(6)]  # type: ignore[assignment,list-item]
        adamw.bind = lambda *_: [NoLaunch(13), NoLaunch(8)]  # type: ignore[assignment,list-item]
    backend = OffDevice() if a.off_device else CudaBackend()
    buckets = Buckets(backend, a.buckets, a.ranges)
    result: dict[str, Any] = {"benchmark": "enqueue", "machine": describe(), "off_device": a.off_device}
    result |= {"buckets": a.buckets, "ranges": a.ranges, "kinds": []}
    print(f"{'us of one operation':24}" + "".join(f"{name:>9}" for name in ("alone", "batch", "driver", "ratio")))
    for row in kinds(buckets, a.turns):
        result["kinds"].append(row)
        print(f"{row['kind']:24}" + "".join(f"{row[f'{n}_us']:9.2f}" for n in ("alone", "batch", "driver")), end="")
        print(f"{row['ratio']:9.2f}")
    if not a.off_device:
        result["triton_launch_us"] = triton_launch_us(buckets, a.turns)
        print(f"{'launch by Triton':24}{result['triton_launch_us']:9.2f}")
    result["steps"] = list(whole_steps(a.buckets, a.turns, backend))
    for row in result["steps"]:
        took = f"{row['us_per_bucket']:.1f} us for each of {row['buckets']} buckets"
        print(f"step() and wait_for_weights(), {row['mix']}: {took}")
    if not a.off_device:
        result["pending"] = list(pending_steps(PENDING))
        for row in result["pending"]:
            traced = " with a trace" if row["traced"] else ""
            print(f"step() of {row['buckets']} buckets, {row['mix']}, behind a busy device{traced}: ", end="")
            print(f"{row['step_s'] * 1e3:.1f} ms of {row['until_done_s'] * 1e3:.0f}")
    if a.json:
        a.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
