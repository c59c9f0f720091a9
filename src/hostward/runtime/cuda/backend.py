"""Implement the backend on a CUDA device: lanes are streams, the GPU waits, host functions run in stream order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from hostward.runtime.backend import (
    AdamWOperands,
    Backend,
    Batch,
    Buffer,
    Clipping,
    DeviceMemory,
    Event,
    Held,
    Meter,
    Partials,
    Scalars,
    Tier,
    Work,
    require_copyable,
    require_tier,
)
from hostward.runtime.cuda.commands import Command, CommandList, Streams, Verb
from hostward.runtime.cuda.context import CudaContext
from hostward.runtime.cuda.memory import device_slab, fetch, memory_of
from hostward.runtime.cuda.streams import INDEX
from hostward.runtime.cuda.timing import UNTIMED
from hostward.runtime.cuda.work import (
    TOGETHER,
    CommandWork,
    HostWork,
    KernelWork,
    ListedWork,
    TableWork,
    TaskWork,
    Together,
    UnlockedCopy,
)
from hostward.runtime.global_norm import Across
from hostward.runtime.host_tasks import add_task, added_partials, isa_name, partials_task
from hostward.schedule.ops import Lane


class CudaBackend(Backend):
    """Implements the verbs for one device: each binds an operation as a work over the device's `context`."""

    def __init__(
        self, device: torch.device | None = None, *, threads: int | None = None, context: CudaContext | None = None
    ) -> None:
        """`context`: use this instead of a new one for `device`. Raises DeviceError without a CUDA device."""
        self.context = CudaContext(device, threads=threads) if context is None else context
        self.device, self.ledger, self.threads = self.context.device, self.context.ledger, self.context.threads

    # ---------------------------------------------------------------- memory

    def allocate(
        self,
        tier: Tier,
        sizes: Sequence[int],
        dtype: torch.dtype,
        owner: str,
        *,
        pinned: bool = False,
        zero: bool = True,
    ) -> list[Buffer]:
        if tier is Tier.HOST:
            blocks = self.context.host_blocks(sizes, dtype, owner, pinned)
        else:
            blocks = list(torch.split(device_slab(self.device, sum(sizes), dtype, owner, zero), list(sizes)))
        buffers = [Buffer(tier, block, owner, pinned) for block in blocks]
        for buffer in buffers:
            self.ledger.add(buffer)
        return buffers

    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        if any(b.tier is Tier.HOST for b in buffers):
            self.synchronise()  # host pages may be freed only after every copy and host function over them
        if after:
            self.mark("free", Lane.COMPUTE, waits=after).issue()
        for buffer in buffers:
            self.ledger.add(buffer, -1)
            buffer.point_to(buffer.data.new_empty(0))

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        # Not on a copy lane: gradients queue there, so the fetch would wait for the backward that produces them.
        fetch(self.context.lanes.fetches, pairs)

    def adopt(self, tensor: torch.Tensor, owner: str, *, counted: bool = False) -> Buffer:
        buffer = Buffer(Tier.DEVICE if tensor.is_cuda else Tier.HOST, tensor, owner)
        if counted:
            self.ledger.add(buffer)
        return buffer

    def refill(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        buffer.point_to(tensor)

    # ---------------------------------------------------------------- operations

    def event(self) -> Event:
        return self.context.event()

    def copy(
        self,
        lane: Lane,
        pairs: Sequence[tuple[Buffer, Buffer]],
        *,
        name: str,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        require_copyable(lane, pairs)
        copy = CommandWork(self.context, name, lane, waits, done or self.event(), pairs)
        if lane is Lane.H2D and not all(source.pinned for _, source in pairs):
            return UnlockedCopy(self.context, copy, waits)
        return copy

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
        require_tier((*reads, *writes), Tier.DEVICE, name)
        return KernelWork(self.context, name, lane, kernel, waits, done or self.event())

    def partials(
        self,
        name: str,
        gradients: Sequence[Buffer],
        lengths: Sequence[int],
        firsts: Sequence[int],
        out: Partials,
        *,
        lane: Lane = Lane.COMPUTE,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        require_tier((*gradients, *out.all()), Tier.HOST if lane is Lane.HOST else Tier.DEVICE, name)
        if lane is Lane.HOST:
            task = functools.partial(partials_task, gradients, firsts, out, self.threads)
            return TaskWork(self.context, name, task, waits, done or self.event())
        kernel = self.context.kernels.partials(gradients, lengths, firsts, out)
        return TableWork(self.context, name, Lane.COMPUTE, kernel, waits, done or self.event())

    def add(
        self,
        name: str,
        totals: Sequence[Buffer],
        gradients: Sequence[Buffer],
        *,
        first: bool,
        partials: tuple[Partials, Sequence[int]] | None = None,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        require_tier([*totals, *gradients, *added_partials(totals, partials)], Tier.HOST, name)
        task = functools.partial(add_task, totals, gradients, self.threads, first=first, partials=partials)
        return TaskWork(self.context, name, task, waits, done or self.event())

    def norm(
        self,
        partials: Partials,
        out: Scalars,
        clipping: Clipping,
        *,
        across: Across | None = None,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        from hostward.kernels.cuda import norm as kernels

        def run() -> None:
            outputs = out.scale.data, out.skip.data, out.norm.data
            inputs = clipping.inv_scale, clipping.found_inf
            if across is None:
                kernels.launch_finish(partials.sums.data, partials.exponents.data, clipping.max_norm, inputs, outputs)
            else:
                totals, top, found = across.totals(partials, clipping.found_inf)
                kernels.bind_finish(totals, top, clipping.max_norm, (clipping.inv_scale, found), outputs)()
            if clipping.overflow_out is not None:
                clipping.overflow_out.add_(out.skip.data.view(clipping.overflow_out.shape))

        return self.launch("offload/norm", run, reads=partials.all(), writes=out.all(), waits=waits, done=done)

    def adamw(
        self,
        lane: Lane,
        name: str,
        operands: AdamWOperands,
        scalars: Scalars,
        *,
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        tier = Tier.HOST if lane is Lane.HOST else Tier.DEVICE
        require_tier([*operands.read(), *operands.written(), *scalars.all()], tier, name)
        if lane is Lane.HOST:
            return HostWork(self.context, name, operands, scalars, waits, done or self.event())
        return TableWork(
            self.context, name, lane, self.context.kernels.adamw(lane, operands, scalars), waits, done or self.event()
        )

    def retire(
        self, buffers: Sequence[Buffer], lane: Lane, *, waits: Sequence[Event] = (), done: Event | None = None
    ) -> Work:
        return CommandWork(self.context, "offload/retire", lane, waits, done or self.event())

    def mark(
        self,
        name: str,
        lane: Lane,
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        waits: Sequence[Event] = (),
        done: Event | None = None,
    ) -> Work:
        return CommandWork(self.context, name, lane, waits, done or self.event())

    def wait_on_stream(self, stream: torch.Stream, waits: Sequence[Event]) -> None:
        self._hold(stream, waits, UNTIMED)

    def _hold(self, stream: torch.Stream, waits: Sequence[Event], timed: Held) -> None:
        """Make the stream wait, between two timed events. Raises DeviceError."""
        context = self.context
        others = Streams(1, context.handle)
        others.set(0, stream.cuda_stream)  # type: ignore[attr-defined]
        before, after = (Command(Verb.RECORD, 0, event) for event in timed)
        commands = [Command(Verb.WAIT, 0, context.handle_of(event)) for event in waits]
        CommandList([before, *commands, after], context.driver).issue(others)

    def wait_on_stream_timed(self, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
        context = self.context
        timed = context.timings.take(context.turn) if context.is_timed() else UNTIMED
        self._hold(stream, waits, timed)
        return None if timed is UNTIMED else timed

    def wait_behind(self, name: str, held: Held, event: torch.Event | None) -> None:
        context = self.context
        if event is None or not context.is_timed():
            return
        context.follow_compute()
        timed = context.timings.take(context.turn)
        lane = INDEX[Lane.COMPUTE]
        before, after = (Command(Verb.RECORD, lane, each) for each in timed)
        wait = Command(Verb.WAIT, lane, event.cuda_event)  # type: ignore[attr-defined]
        # In one call: on an idle lane the host's time between two calls would be counted.
        CommandList([before, wait, after], context.driver).issue(context.streams)
        # When this wait ends, the earlier one has ended: the event was recorded after it.
        context.timings.note(context.turn, name, Lane.COMPUTE, 0, timed, held=held)

    def batch(self, works: Sequence[Work]) -> Batch:
        """Return a batch of works in order; adjacent command lists are enqueued together."""
        parts: list[list[ListedWork] | Work] = []
        for work in works:
            last = parts[-1] if parts else None
            if not isinstance(work, ListedWork):
                parts.append(work)
            elif isinstance(last, list) and len(last) < TOGETHER:
                last.append(work)
            else:
                parts.append([work])
        made = [Together(self.context, part) if isinstance(part, list) else part for part in parts]
        return made[0] if len(made) == 1 and isinstance(made[0], Together) else Batch(made)

    # ---------------------------------------------------------------- steps

    @property
    def meter(self) -> Meter | None:
        return self.context.meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self.context.meter = meter

    def begin_step(self) -> None:
        self.context.begin_step()

    def end_step(self) -> None:
        self.context.end_step()

    def wait(self, event: Event) -> None:
        self.context.wait(event)

    def synchronise(self) -> None:
        self.context.synchronise()

    def device_memory(self, *, release: bool) -> DeviceMemory:
        self.synchronise()
        torch.cuda.synchronize(self.device)  # other streams may still use memory that is freed next
        if release:
            torch.cuda.empty_cache()
        return DeviceMemory(torch.cuda.mem_get_info(self.device)[0], torch.cuda.memory_allocated(self.device))

    # ---------------------------------------------------------------- the caller's streams

    def caller_stream(self) -> torch.Stream | None:
        return torch.cuda.current_stream(self.device)

    def memory_of(self, stream: torch.Stream | None) -> AbstractContextManager[None]:
        return memory_of(self.device, stream)

    def wait_for(self, stream: torch.Stream) -> None:
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def compute_key(self) -> int:
        return self.context.compute_key()

    def at_compute(self) -> bool:
        return self.context.at_compute()

    def on_compute(self) -> AbstractContextManager[None]:
        return self.context.on_compute()

    def follow_compute(self) -> int:
        return self.context.follow_compute()

    def capturing(self) -> bool:
        return self.context.capturing()

    def capture(self) -> int:
        return self.context.capture()

    def describe(self) -> Mapping[str, object]:
        name = torch.cuda.get_device_name(self.device)
        return {"backend": "cuda", "device": name, "host_threads": self.threads, "isa": isa_name()}
