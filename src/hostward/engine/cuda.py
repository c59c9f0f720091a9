"""The backend of a CUDA device: lanes are streams, waits happen on the GPU, host functions run in stream order."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostward.errors import DeviceError, MemoryLimitError, PlacementError
from hostward.host.adamw import AdamWRange, AdamWTask
from hostward.inventory import MasterKind, align
from hostward.schedule import Lane

from .backend import (
    DTYPES,
    TORCH_DTYPES,
    AdamWOperands,
    Backend,
    Buffer,
    Event,
    Ledger,
    Scalars,
    Tier,
    require_copyable,
    require_tier,
)
from .driver import launch_host_function, lock_pages, unlock_pages
from .host_task import host_task, isa_name, own_threads
from .pools import host_slab

_CHUNK_ELEMENTS = 4096
_UPLOAD_BYTES = 8 * 1024 * 1024
_CACHED_TABLES = 4096
_KEPT_TABLES = 64
_MAP_BYTES = 256 * 1024 * 1024
_KERNEL_KINDS = {MasterKind.WEIGHT: 0, MasterKind.SPLIT: 1, MasterKind.PLAIN: 2}


class CudaBackend(Backend):
    """Streams of one device. Side streams are made once and only copy or run host functions (H4, H15).

    The compute lane is whatever stream is current when an operation is issued; none is stored (H2).
    """

    def __init__(self, device: torch.device | None = None, *, threads: int | None = None) -> None:
        """Raises DeviceError without a CUDA device."""
        if not torch.cuda.is_available():
            raise DeviceError("no CUDA device", why="torch.cuda.is_available() is false", fix="train.device=cpu")
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.ledger = Ledger()
        self.threads = own_threads() if threads is None else threads
        self._streams = {
            lane: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for lane in (Lane.D2H, Lane.H2D, Lane.HOST)
        }
        self._alive: list[object] = []  # tensors that a side stream may still use (H12)
        self._tasks: list[AdamWTask] = []
        arena = self._host_slab([_UPLOAD_BYTES], torch.uint8, "upload tables", pinned=True)
        self.ledger.add(Buffer(Tier.HOST, arena, "upload tables", pinned=True))
        self._uploads = _Uploads(self.device, arena)

    def allocate(
        self, tier: Tier, sizes: Sequence[int], dtype: torch.dtype, owner: str, *, pinned: bool = False
    ) -> list[Buffer]:
        slab = self._host_slab(sizes, dtype, owner, pinned) if tier is Tier.HOST else self._zeros(sizes, dtype, owner)
        ends = np.cumsum([0, *sizes]).tolist()
        buffers = [Buffer(tier, slab[a:b], owner, pinned) for a, b in pairwise(ends)]
        for buffer in buffers:
            self.ledger.add(buffer)
        return buffers

    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        if any(b.tier is Tier.HOST for b in buffers):
            self.synchronise()  # host pages may go only after every copy and host function over them
        self.join(after)
        for buffer in buffers:
            self.ledger.add(buffer, -1)
            buffer.data = buffer.data.new_empty(0)

    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        buffer = Buffer(_tier(tensor), tensor, owner)
        if counted:
            self.ledger.add(buffer)
        return buffer

    def copy(self, lane: Lane, destination: Buffer, source: Buffer, *, name: str, waits: Sequence[Event] = ()) -> Event:
        require_copyable(lane, destination, source)
        self.ledger.copied_bytes[lane] += source.nbytes
        stream = self._streams[lane]
        self._alive += [destination.data, source.data]
        with torch.no_grad(), torch.cuda.stream(stream):
            _wait(stream, waits)
            with torch.profiler.record_function(name):
                destination.data.copy_(source.data, non_blocking=True)
            return _record(stream)

    def launch(
        self,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        require_tier((*reads, *writes), Tier.DEVICE, name)
        stream = torch.cuda.current_stream(self.device)
        _wait(stream, waits)
        with torch.profiler.record_function(name):
            kernel()
        return _record(stream)

    def norm(
        self,
        gradients: Sequence[Buffer],
        out: Scalars,
        *,
        max_norm: float,
        inv_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        waits: Sequence[Event] = (),
    ) -> Event:
        from hostward.kernels import norm as kernels

        def run() -> None:
            lengths = [g.data.numel() for g in gradients]
            firsts = np.cumsum([0, *(-(-n // _CHUNK_ELEMENTS) for n in lengths)])
            chunks = int(firsts[-1])
            sums = torch.empty(chunks, dtype=torch.int64, device=self.device)
            exponents = torch.empty(chunks, dtype=torch.int32, device=self.device)
            for dtype in sorted({DTYPES[g.data.dtype] for g in gradients}):
                chosen = [i for i, g in enumerate(gradients) if DTYPES[g.data.dtype] is dtype]
                rows = [(gradients[i].data.data_ptr(), lengths[i], int(firsts[i])) for i in chosen]
                items = np.array(rows, dtype=np.int64)
                chunk_map = self._uploads.map(kernels.chunk_map, tuple(lengths[i] for i in chosen))
                kernels.norm_partials(self._uploads.cached(items), chunk_map, TORCH_DTYPES[dtype], sums, exponents)
            kernels.finish(
                sums,
                exponents,
                max_norm=max_norm,
                inv_scale=inv_scale,
                found_inf=found_inf,
                scale_out=out.scale.data,
                skip_out=out.skip.data,
                norm_out=out.norm.data,
            )

        return self.launch("offload/norm", run, reads=gradients, writes=out.all(), waits=waits)

    def device_adamw(
        self,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        from hostward.kernels import adamw as kernels

        require_tier(scalars.all(), Tier.DEVICE, name)

        def run() -> None:
            table = np.array([_row(r) for r in operands.ranges], dtype=np.int64)
            lengths = tuple(r.length for r in operands.ranges)
            kernels.adamw_step(
                table=self._uploads.cached(table),
                n_ranges=len(lengths),
                blocks=self._uploads.map(kernels.block_map, lengths),
                grad_dtype=_tensor(operands.ranges[0].grad).dtype,
                weight_dtype=_tensor(operands.ranges[0].weight).dtype,
                master_kind=_KERNEL_KINDS[operands.kind],
                exp_avg=operands.exp_avg,
                exp_avg_sq=operands.exp_avg_sq,
                remainder=operands.remainder,
                master=operands.master,
                hyper=self._uploads.cached(operands.hyper.as_array()),
                bc1=self._uploads.kept(operands.tables[0]),
                inv_sqrt_bc2=self._uploads.kept(operands.tables[1]),
                table_length=len(operands.tables[0]),
                scale=scalars.scale.data,
                skip=scalars.skip.data,
            )

        return self.launch(name, run, reads=reads, writes=writes, waits=waits)

    def host_adamw(
        self,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event] = (),
    ) -> Event:
        require_tier((*reads, *writes, *scalars.all()), Tier.HOST, name)
        task = host_task(operands, scalars, self.threads)
        self._tasks.append(task)
        stream = self._streams[Lane.HOST]
        _wait(stream, waits)
        launch_host_function(stream.cuda_stream, *task.host_function())
        return _record(stream)

    def record(self) -> Event:
        return _record(torch.cuda.current_stream(self.device))

    def retire(self, buffers: Sequence[Buffer], lane: Lane, waits: Sequence[Event] = ()) -> Event:
        stream = torch.cuda.current_stream(self.device) if lane is Lane.COMPUTE else self._streams[lane]
        _wait(stream, waits)
        return _record(stream)

    def join(self, events: Sequence[Event]) -> None:
        _wait(torch.cuda.current_stream(self.device), events)

    def synchronise(self) -> None:
        for stream in (*self._streams.values(), torch.cuda.current_stream(self.device)):
            stream.synchronize()
        self._alive.clear()
        self._uploads.rewind()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.raise_error()

    def describe(self) -> Mapping[str, object]:
        return {
            "backend": "cuda",
            "device": torch.cuda.get_device_name(self.device),
            "host_threads": self.threads,
            "isa": isa_name(),
        }

    def _zeros(self, sizes: Sequence[int], dtype: torch.dtype, owner: str) -> torch.Tensor:
        try:
            return torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"{owner}: {sum(sizes) * dtype.itemsize:,} bytes of device memory could not be allocated",
                why=str(error).splitlines()[0],
                fix="raise optimizer.optimizer_offload_fraction",
            ) from error

    def _host_slab(self, sizes: Sequence[int], dtype: torch.dtype, owner: str, pinned: bool) -> torch.Tensor:
        def lock(address: int, size_bytes: int) -> Callable[[], None]:
            torch.cuda.current_stream(self.device).query()  # makes the context current in this thread
            lock_pages(address, size_bytes, owner=owner)
            return functools.partial(_unlock, self.device, address, size_bytes)

        size_bytes = sum(sizes) * dtype.itemsize
        return host_slab(size_bytes, owner=owner, threads=self.threads, lock=lock if pinned else None).view(dtype)


class _Uploads:
    """Small tables for the device kernels: uploaded from one pinned arena, and not again while they stay the same.

    Addresses of gradients repeat from step to step once the caching allocator has settled, so most tables are found
    here.
    """

    def __init__(self, device: torch.device, arena: torch.Tensor) -> None:
        self._device = device
        self._arena = arena
        self._used_bytes = 0
        self._tables: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._kept: dict[int, tuple[npt.NDArray[Any], torch.Tensor]] = {}
        self._maps: dict[tuple[object, tuple[int, ...]], torch.Tensor] = {}

    def cached(self, table: npt.NDArray[Any]) -> torch.Tensor:
        """`table` on the device, equal dtype and shape."""
        key = table.dtype.str.encode() + repr(table.shape).encode() + table.tobytes()
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._upload(table)
            if len(self._tables) > _CACHED_TABLES:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return found

    def kept(self, table: npt.NDArray[Any]) -> torch.Tensor:
        """The same for a long-lived array that nobody changes: found by identity."""
        if id(table) not in self._kept:
            self._kept[id(table)] = (table, torch.from_numpy(table).to(self._device))
            if len(self._kept) > _KEPT_TABLES:
                del self._kept[next(iter(self._kept))]
        return self._kept[id(table)][1]

    def map(self, build: Callable[[Sequence[int]], npt.NDArray[Any]], lengths: tuple[int, ...]) -> torch.Tensor:
        """`build(lengths)` on the device: which program of a kernel works on which piece."""
        key = (build, lengths)
        found = self._maps.pop(key, None)
        if found is None:
            found = torch.from_numpy(build(lengths)).to(self._device)
        self._maps[key] = found  # the most recently used is last
        while sum(m.nbytes for m in self._maps.values()) > _MAP_BYTES and len(self._maps) > 1:
            del self._maps[next(iter(self._maps))]
        return found

    def rewind(self) -> None:
        """All uploads are done: the arena may be written again."""
        self._used_bytes = 0

    def _upload(self, table: npt.NDArray[Any]) -> torch.Tensor:
        flat = torch.from_numpy(np.ascontiguousarray(table)).view(-1).view(torch.uint8)
        start = align(self._used_bytes, 256)
        if start + flat.numel() > self._arena.numel():
            torch.cuda.current_stream(self._device).synchronize()
            start = 0
        if flat.numel() > self._arena.numel():
            return torch.from_numpy(table).to(self._device)
        self._used_bytes = start + flat.numel()
        staged = self._arena[start : self._used_bytes]
        staged.copy_(flat)
        device = staged.to(self._device, non_blocking=True)
        return device.view(torch.from_numpy(table).dtype).view(table.shape)


def _unlock(device: torch.device, address: int, size_bytes: int) -> None:
    torch.cuda.synchronize(device)
    unlock_pages(address, size_bytes)


def _row(r: AdamWRange) -> tuple[int, int, int, int, int]:
    return r.offset, r.length, _tensor(r.grad).data_ptr(), _tensor(r.weight).data_ptr(), _tensor(r.count).data_ptr()


def _tensor(memory: object) -> torch.Tensor:
    if not isinstance(memory, torch.Tensor):
        raise PlacementError(f"a device kernel was given a {type(memory).__name__}", fix="pass CUDA tensors")
    return memory


def _tier(tensor: torch.Tensor) -> Tier:
    return Tier.DEVICE if tensor.is_cuda else Tier.HOST


def _wait(stream: torch.cuda.Stream, events: Sequence[Event]) -> None:
    for event in events:
        if not isinstance(event.native, torch.cuda.Event):
            raise PlacementError("an event of another backend", fix="use events of the backend that is waited on")
        stream.wait_event(event.native)


def _record(stream: torch.cuda.Stream) -> Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return Event(event)
