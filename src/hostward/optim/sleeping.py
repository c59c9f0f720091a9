"""Move optimizer state, gradients and weights to pinned memory while other programs use the device, and back.

The storage objects stay, and with them parameters, gradients and all views; their bytes are freed and allocated again
(`resize_`). A storage that other code holds stays on the device, because its holder would read freed memory. The pinned
memory is kept, so that a later sleep only copies.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from hostward.core.full_device import fix_of
from hostward.core.inventory import align
from hostward.core.units import size_bytes
from hostward.errors import ConfigError, MemoryLimitError, ModelError
from hostward.model.autograd import is_saved
from hostward.model.fence import Fence, plain_type, up
from hostward.model.parameters import ParamRecord, can_resize, local_of
from hostward.optim.bucket_lifecycle import Asleep, Kinds
from hostward.optim.bucket_state import BucketState
from hostward.optim.offloaded_grad import Fate, OffloadedGrad, Where
from hostward.runtime.backend import Backend, Buffer, DeviceMemory, Event, Tier
from hostward.runtime.pinned_arena import ALIGNMENT_BYTES, Block, HostArena
from hostward.schedule.ops import Lane

if TYPE_CHECKING:
    from hostward.optim.master_sync import WeightWatch
    from hostward.optim.step_executor import StepExecutor

OWNER = "asleep"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
COPIED_TOGETHER_BYTES = 1 << 29
"""Memory that `wake` allocates before it issues the copies to it."""


class Why(StrEnum):
    """Name the reason for which memory stays on the device."""

    HELD = "other code holds its memory: a view, .data, or a graph between forward and backward"
    SHARED = "it shares its memory with another one"
    PART = "it is a part of a larger buffer, which is freed as a whole"
    FIXED = "its memory cannot be freed and allocated again: it is shared with another process, or with numpy"
    KIND = "it is no plain dense tensor"
    BORROWED = "its memory is its owner's (take_gradient)"
    BUDGET = "device_bytes are free without it"


@dataclass(frozen=True, slots=True)
class Stays:
    """Names memory that `sleep` left on the device: its kind ("state", "gradients", "weights"), name, bytes, reason."""

    kind: str
    name: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class SleepReport:
    """Reports one call of `AdamW.sleep`.

    freed: bytes freed by this call, by kind. asleep: all kinds that are asleep now. stays: what was asked for and is on
    the device still. torch_freed: bytes by which the count of torch's allocator fell; driver_freed: bytes by which the
    driver's count of free memory rose, with what torch had cached; None without a GPU. pinned: held for sleeping
    memory, and kept until the optimizer is gone; pinned_now: the part that this call pinned.
    """

    freed_bytes: Mapping[str, int]
    asleep: tuple[str, ...]
    stays: tuple[Stays, ...]
    torch_freed_bytes: int | None
    driver_freed_bytes: int | None
    pinned_bytes: int
    pinned_now_bytes: int

    def explain(self) -> str:
        """Return a readable report of a few lines."""
        moved = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self.freed_bytes.items()) or "nothing"
        lines = [f"asleep: {', '.join(self.asleep) or 'nothing'}; bytes freed by this call: {moved}"]
        if self.torch_freed_bytes is not None:
            lines.append(
                f"  freed says torch: {self.torch_freed_bytes:,} bytes; the driver: {self.driver_freed_bytes:,}"
            )
        lines.append(f"  pinned for it: {self.pinned_bytes:,} bytes, {self.pinned_now_bytes:,} of them by this call")
        lines += [f"  stays, because {s.why}: {s.kind} of {s.name}, {s.nbytes:,} bytes" for s in self.stays]
        return "\n".join(lines)


class Fetcher(Protocol):
    """Frees offloaded weights that are on the device between two uses; `hostward.weights.residency.Residency`."""

    def sweep(self) -> None:
        """Free the weights of all layers."""


@dataclass(slots=True, eq=False)
class Memory:
    """Describes one storage of device memory. `owner`: whose bytes the ledger counts it as; "": it does not."""

    kind: Kinds
    name: str
    storage: torch.UntypedStorage
    owner: str = ""
    nbytes: int = field(init=False)
    block: Block | None = None
    """Where its bytes are while it is asleep."""
    counted: bool = True
    """The ledger counts its bytes as memory of the device."""

    def __post_init__(self) -> None:
        self.nbytes = self.storage.nbytes()

    def count(self, backend: Backend, *, here: bool) -> None:
        """Let the ledger count its bytes as memory of the device, or not."""
        if self.owner and self.counted is not here:
            backend.ledger.held_bytes[Tier.DEVICE, self.owner] += self.nbytes if here else -self.nbytes
        self.counted = here

    def free(self, backend: Backend) -> None:
        """Give its bytes back to the device's allocator."""
        self.storage.resize_(0)
        self.count(backend, here=False)

    def stays(self, why: Why) -> Stays:
        return Stays(self.kind.names[0], self.name, self.nbytes, why.value)

    def here(self) -> Buffer:
        """Return a buffer over all bytes of the storage."""
        view = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        view.set_(self.storage, 0, (self.nbytes,), (1,))
        return Buffer(Tier.DEVICE, view, OWNER, resized=True)

    def there(self, block: Block) -> Buffer:
        """Return a buffer over as many bytes of a block."""
        return Buffer(Tier.HOST, block.buffer.data[: self.nbytes], OWNER, block.buffer.pinned)


@dataclass(frozen=True, slots=True)
class Parts:
    """Holds what a sleeping optimizer consists of.

    holders: returns how many tensors always use the memory of a parameter's part. root: the module; None: not known.
    """

    backend: Backend
    executor: StepExecutor
    watch: WeightWatch
    tracked: Sequence[ParamRecord]
    states: Sequence[BucketState]
    root: torch.nn.Module | None
    holders: Callable[[torch.nn.Parameter], int]


def checked_kinds(kinds: object) -> Kinds:
    """Return the kinds that a caller names. Raises ConfigError."""
    names = Kinds.STATE | Kinds.GRADIENTS | Kinds.WEIGHTS
    if isinstance(kinds, str) or not isinstance(kinds, Collection) or not kinds or set(kinds) - set(names.names):
        raise ConfigError(
            f"{kinds!r} does not say what is to sleep or wake",
            fix=f"one or several of {', '.join(names.names)}, as in sleep(('state', 'gradients'))",
        )
    found = Kinds.NONE
    for name in kinds:
        found |= Kinds[name.upper()]
    return found


def checked_budget(device_bytes: object) -> int | None:
    """Return a number of bytes to free; None: all. Raises ConfigError."""
    if isinstance(device_bytes, str):
        return size_bytes(device_bytes, "device_bytes")
    if device_bytes is None or (type(device_bytes) is int and device_bytes > 0):
        return device_bytes
    raise ConfigError(f"device_bytes={device_bytes!r}", fix='bytes to free, such as 10 * 2**30 or "10GiB"; None: all')


class Sleeper:
    """Puts an optimizer's device memory to sleep and wakes it. `asleep` is asked by whoever uses that memory."""

    def __init__(self) -> None:
        self.asleep = Asleep()
        self.fetchers: weakref.WeakSet[Fetcher] = weakref.WeakSet()
        """Bring offloaded weights of the module, whose bytes are on the host already."""
        self._moved: list[Memory] = []
        self._arena: HostArena | None = None
        self._fence: Fence | None = None
        self._known: list[ParamRecord] = []
        """Weights that nobody but the optimizer had written when weights fell asleep."""
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor, OffloadedGrad]] = []
        """Gradients that are to return to `.grad`, and what stands there."""

    # ---------------------------------------------------------------- to sleep

    def sleep(self, parts: Parts, kinds: Kinds, budget: int | None) -> SleepReport:
        """Move these kinds to the host, as much of it as frees `budget` bytes. Everything is moved, or nothing.

        The caller has waited for readers of the state, and followed weights that others have written.

        Raises:
            MemoryLimitError: less than `budget` bytes can leave, or the host has no room for them.
        """
        backend = parts.backend
        self._settle(backend)
        if Kinds.WEIGHTS in kinds:
            for fetcher in self.fetchers:
                fetcher.sweep()
        parts.executor.rest()
        for memory in self._moved:  # what a call that was interrupted has copied
            memory.free(backend)
        before = backend.device_memory(release=False)
        found, stays = self._found(parts, kinds)
        chosen = found
        if budget is not None:
            chosen = _within(found, budget, stays)
            kinds = functools.reduce(operator.or_, (memory.kind for memory in chosen))
        pinned_before = 0 if self._arena is None else self._arena.slab_bytes
        anew = kinds & ~self.asleep.kinds
        # Before the copies: what is retired afterwards holds arbitrary bytes, and weights may be known by theirs.
        known = parts.watch.known() if Kinds.WEIGHTS in anew else self._known
        try:
            copied = self._copy_out(backend, chosen)
            self._known = known
            self._moved += chosen
            self.asleep.kinds |= kinds  # the host has the bytes: from here on waking is right, whatever interrupts this
        except BaseException:
            backend.drain()
            raise
        if Kinds.WEIGHTS in self.asleep.kinds and self._fence is None:
            self._fence = Fence(_parameters(parts), _Refusal(self.asleep))
            up(self._fence.entries())
        if Kinds.GRADIENTS in kinds:
            self._stand_in(parts, {m.storage._cdata for m in self._moved if m.kind is Kinds.GRADIENTS})
        if copied is not None:
            backend.wait(backend.retire([m.here() for m in chosen], Lane.COMPUTE, waits=[copied]).issue())
        freed: Counter[str] = Counter()
        for memory in chosen:
            freed[memory.kind.names[0]] += memory.nbytes
            memory.free(backend)
        after = backend.device_memory(release=True)
        pinned = 0 if self._arena is None else self._arena.slab_bytes
        return SleepReport(
            dict(freed), tuple(self.asleep.kinds.names), tuple(stays), *_difference(before, after), pinned,
            pinned - pinned_before,
        )  # fmt: skip

    def _found(self, parts: Parts, kinds: Kinds) -> tuple[list[Memory], list[Stays]]:
        """Return what can leave and what has to stay, state first and weights last."""
        found: list[Memory] = []
        stays: list[Stays] = []
        wanted = ((Kinds.STATE, state_memory), (Kinds.GRADIENTS, gradient_memory), (Kinds.WEIGHTS, weight_memory))
        for kind, memory_of in wanted:
            if kind in kinds:
                for memory, why in memory_of(parts):
                    if why is None:
                        found.append(memory)
                    else:
                        stays.append(memory.stays(why))
        return found, stays

    def _copy_out(self, backend: Backend, chosen: Sequence[Memory]) -> Event | None:
        """Copy memory to the host, and return when all of it is there, with the event of the copies."""
        if not chosen:
            return None
        arena = self._arena = self._arena or HostArena(backend, OWNER)
        taken: list[Block] = []
        try:
            self._reserve(arena, chosen)
            for memory in chosen:
                taken.append(arena.take(memory.nbytes))
            here = [memory.here() for memory in chosen]
            pairs = [(m.there(b), buffer) for m, b, buffer in zip(chosen, taken, here, strict=True)]
            made = backend.mark("offload/sleep/made", Lane.COMPUTE, writes=here).issue()
            copied = backend.copy(Lane.D2H, pairs, name="offload/d2h/sleep", waits=[made]).issue()
            backend.wait(copied)
        except BaseException:
            backend.drain()
            for block in taken:
                arena.give(block, None)
            raise
        for memory, block in zip(chosen, taken, strict=True):
            memory.block = block
        return copied

    def _reserve(self, arena: HostArena, chosen: Sequence[Memory]) -> None:
        """Pin in one piece what the arena lacks."""
        in_use = sum(memory.block.buffer.nbytes for memory in self._moved if memory.block is not None)
        missing = sum(align(memory.nbytes, ALIGNMENT_BYTES) for memory in chosen) - (arena.slab_bytes - in_use)
        if missing <= 0:
            return
        try:
            arena.reserve(missing)
        except MemoryLimitError as error:
            raise type(error)(
                f"sleep() needs {missing:,} more bytes of pinned host memory: {error.what}",
                why=error.why,
                fix="name fewer kinds, or the bytes to free: sleep(device_bytes=...)",
            ) from error

    def _stand_in(self, parts: Parts, leaving: Collection[int]) -> None:
        """Put stand-ins into `.grad` for gradients in these storages."""
        fate = Fate()
        fate.now = Where.ASLEEP
        for t in parts.tracked:
            gradient = t.parameter.grad
            if gradient is None or isinstance(gradient, OffloadedGrad):
                continue
            if _cdata(local_of(gradient)) in leaving:
                stand_in = OffloadedGrad(t.name, t.parameter, gradient.dtype, fate, _refuse_unscaling)
                self._gradients.append((t.parameter, gradient, stand_in))
                t.parameter.grad = stand_in

    # ---------------------------------------------------------------- awake

    def wake(self, parts: Parts, kinds: Kinds) -> None:
        """Bring these kinds back to the device, and return when they are there. Everything is moved, or nothing.

        Raises:
            MemoryLimitError: the device has no room for them; they are asleep still.
        """
        kinds &= self.asleep.kinds
        if not kinds:
            self._settle(parts.backend)
            return
        coming = [memory for memory in self._moved if memory.kind in kinds]
        self._bring_back(parts.backend, coming)
        parts.executor.woken()
        if Kinds.WEIGHTS in kinds:
            parts.watch.relocated(self._known)
        if Kinds.GRADIENTS in kinds:
            for parameter, gradient, stand_in in self._gradients:
                if parameter.grad is stand_in:  # else it was cleared
                    parameter.grad = gradient
        self.asleep.kinds &= ~kinds  # until here all of it is asleep, and is done again where this was interrupted
        self._settle(parts.backend)
        if self._arena is not None:
            self._arena.rest()

    def _settle(self, backend: Backend) -> None:
        """Let go of what is kept for kinds that are awake, also where `sleep` or `wake` was interrupted before it."""
        asleep = self.asleep.kinds
        for memory in [memory for memory in self._moved if memory.kind not in asleep]:
            block, memory.block = memory.block, None
            if block is not None and self._arena is not None:
                self._arena.give(block, None)
            memory.count(backend, here=True)
        self._moved = [memory for memory in self._moved if memory.kind in asleep]
        if Kinds.WEIGHTS not in asleep:
            self._known = []
            if self._fence is not None:
                self._fence.close()
                self._fence = None
        if Kinds.GRADIENTS not in asleep:
            self._gradients.clear()

    def _bring_back(self, backend: Backend, coming: Sequence[Memory]) -> None:
        """Give storages their bytes again, on the current stream, and copy to them: all of them, or none.

        The driver takes time to find memory, so what was allocated first is copied to meanwhile.
        """
        given: list[Memory] = []
        if any(memory.storage.nbytes() for memory in coming):
            backend.synchronise()  # sleep() was interrupted, and its copies may read what is about to be written
        try:
            for together in _groups(coming):
                for memory in together:
                    given.append(memory)
                    _allocate(memory, coming)
                _copy_back(backend, together)
            # The host waits: whoever uses the memory next, on any stream, comes after the copies.
            backend.synchronise()
            given.clear()
        finally:
            if given:  # something was raised, or Ctrl-C; what was copied to is about to be freed
                backend.synchronise()
                for memory in given:
                    memory.free(backend)


def _groups(coming: Sequence[Memory]) -> Iterator[list[Memory]]:
    """Yield memory in parts that `wake` copies to together."""
    group, nbytes = list[Memory](), 0
    for memory in coming:
        group.append(memory)
        nbytes += memory.nbytes
        if nbytes >= COPIED_TOGETHER_BYTES:
            yield group
            group, nbytes = [], 0
    yield group


def _allocate(memory: Memory, coming: Sequence[Memory]) -> None:
    try:
        memory.storage.resize_(memory.nbytes)
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        raise MemoryLimitError(
            f"wake() needs {sum(m.nbytes for m in coming):,} bytes of device memory",
            why=str(error).splitlines()[0],
            fix=fix_of(error, "free what uses the device meanwhile, and call wake() again; or wake one kind at a time"),
        ) from error


def _copy_back(backend: Backend, coming: Sequence[Memory]) -> None:
    here = [memory.here() for memory in coming]
    blocks = [memory.block for memory in coming]
    pairs = [(to, m.there(b)) for m, b, to in zip(coming, blocks, here, strict=True) if b is not None]
    if pairs:
        # The memory may be that of work which the compute stream still holds.
        room = backend.retire(here, Lane.COMPUTE).issue()
        backend.copy(Lane.H2D, pairs, name="offload/h2d/wake", waits=[room]).issue()


def _within(found: Sequence[Memory], budget: int, stays: list[Stays]) -> list[Memory]:
    """Return the first storages that together free `budget` bytes, and add the others to `stays`."""
    there = sum(memory.nbytes for memory in found)
    if there < budget:
        reasons = "; ".join(f"{s.name}: {s.why}" for s in stays[:3])
        raise MemoryLimitError(
            f"sleep(device_bytes={budget:,}), and {there:,} bytes can leave the device",
            why=reasons or "no more of what was asked for is there",
            fix="name more kinds, ask for fewer bytes, or leave device_bytes out",
        )
    freed = accumulate(memory.nbytes for memory in found)
    enough = 1 + next(i for i, nbytes in enumerate(freed) if nbytes >= budget)
    stays += [memory.stays(Why.BUDGET) for memory in found[enough:]]
    return list(found[:enough])


def _difference(before: DeviceMemory | None, after: DeviceMemory | None) -> tuple[int | None, int | None]:
    if before is None or after is None:
        return None, None
    return before.allocated_bytes - after.allocated_bytes, after.free_bytes - before.free_bytes


def _refuse_unscaling(*_: object) -> None:
    """Do nothing: a stand-in for a sleeping gradient raises before it could be unscaled."""


class _Refusal:
    """Refuses every read of weights that are asleep, as the reader of a fence."""

    def __init__(self, asleep: Asleep) -> None:
        self._asleep = asleep

    def read(self, parameters: Sequence[torch.Tensor]) -> None:
        self._asleep.require(Kinds.WEIGHTS, f"a weight of shape {tuple(parameters[0].shape)} is read or written")

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        """Do nothing: `read` comes first, and raises."""


# What is in device memory, and who holds it.


def state_memory(parts: Parts) -> Iterator[tuple[Memory, Why | None]]:
    """Yield the storages of state on the device, and why they stay: of device buckets, step counts of streamed ones."""
    seen: set[int] = set()
    for buffer in (buffer for state in parts.states for buffer in state.buffers()):
        storage = buffer.data.untyped_storage()
        if buffer.tier is Tier.DEVICE and storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield Memory(Kinds.STATE, buffer.owner, storage, buffer.owner), None if can_resize(storage) else Why.FIXED


def gradient_memory(parts: Parts) -> Iterator[tuple[Memory, Why | None]]:
    """Yield the storages of gradients: those in `.grad`, and those that the optimizer has taken, and why they stay."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    known: dict[int, set[int]] = {}
    reasons: dict[int, Why] = {}
    in_grad = ((t.name, t.parameter.grad) for t in parts.tracked)
    here = [(name, local_of(g), False) for name, g in in_grad if g is not None and not isinstance(g, OffloadedGrad)]
    for name, tensor, borrowed in (*parts.executor.gradients_here(), *here):
        if plain_type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            continue
        at = _cdata(tensor)
        found.setdefault(at, (name, tensor))
        known.setdefault(at, set()).update(t._cdata for t in (tensor, tensor._base) if t is not None)
        if borrowed:
            reasons[at] = Why.BORROWED
    for at, (name, tensor) in found.items():
        memory = Memory(Kinds.GRADIENTS, name, tensor.untyped_storage())
        if memory.nbytes and tensor.device == parts.backend.device:
            yield memory, reasons.get(at) or _held(memory.storage, len(known[at]))


def weight_memory(parts: Parts) -> Iterator[tuple[Memory, Why | None]]:
    """Yield the storages of all weights of the module, trained or frozen, and why they stay."""
    sharing = Counter(_cdata(local_of(p)) for p in _parameters(parts) if plain_type(local_of(p)) in _PLAIN)
    if parts.root is not None:
        sharing.update(_cdata(b) for b in parts.root.buffers() if plain_type(b) in _PLAIN)
    tracked = {id(t.parameter): t.name for t in parts.tracked}
    names = {} if parts.root is None else {id(p): name for name, p in parts.root.named_parameters()}
    for parameter in _parameters(parts):
        local = local_of(parameter)
        if local.device != parts.backend.device:
            continue
        name = tracked.get(id(parameter)) or names[id(parameter)]
        plain = plain_type(local) in _PLAIN and local.layout is torch.strided
        if not plain:
            unknown = Memory(Kinds.WEIGHTS, name, torch.empty(0, device="cpu").untyped_storage())
            unknown.nbytes = parameter.numel() * parameter.element_size()
            yield unknown, Why.KIND
            continue
        memory = Memory(Kinds.WEIGHTS, name, local.untyped_storage(), "weights" if id(parameter) in tracked else "")
        if not memory.nbytes:
            continue  # offloaded, or asleep already
        why = _shares(local, memory, sharing, sharded=local is not parameter)
        if why is None and is_saved(parameter):
            why = Why.HELD
        views = parts.executor.weight_views(name) if id(parameter) in tracked else 0
        yield memory, why or _held(memory.storage, parts.holders(parameter) + views)


def _shares(local: torch.Tensor, memory: Memory, sharing: Mapping[int, int], *, sharded: bool) -> Why | None:
    larger = memory.nbytes > local.nbytes and not sharded  # FSDP2 pads parts
    if larger and local.is_contiguous():
        return Why.PART
    return Why.SHARED if sharing[memory.storage._cdata] > 1 or larger else None


def _held(storage: torch.UntypedStorage, tensors: int) -> Why | None:
    """Return why a storage stays that `tensors` known tensors use, besides its Python object."""
    if not can_resize(storage):
        return Why.FIXED
    return Why.HELD if torch._C._storage_Use_Count(storage._cdata) > tensors + 1 else None


def _cdata(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _parameters(parts: Parts) -> list[torch.nn.Parameter]:
    """Return all parameters of the module and of the optimizer, each once."""
    every = [t.parameter for t in parts.tracked]
    if parts.root is not None:
        every += parts.root.parameters()
    return list({id(p): p for p in every}.values())


def require_possible(kinds: Kinds, parts: Parts, *, manual: bool, captured: bool) -> None:
    """Raise ModelError where memory of these kinds must not move. `captured`: a CUDA graph writes the gradients."""
    here = kinds & (Kinds.GRADIENTS | Kinds.WEIGHTS)
    if torch._C._current_graph_task_id() != -1:
        raise ModelError("sleep() inside backward", why="it goes on with what would be freed", fix="call it afterwards")
    if parts.backend.capturing():
        raise ModelError("sleep() while a CUDA graph is captured", fix="call it after the capture")
    if here and manual:
        raise ModelError(
            f"sleep() of {' and '.join(here.names)} with waits='manual'",
            why="they are parts of buffers of their owner (Megatron's data parallelism), which frees them as a whole",
            fix="sleep(('state',)), and let the owner offload its buffers",
        )
    if here and (captured or parts.executor.read_by_graph):
        raise ModelError(
            f"sleep() of {' and '.join(here.names)} that a CUDA graph uses",
            why="a replay uses the addresses of its capture, and memory that was freed comes back at others",
            fix="sleep(('state',)), or capture anew after wake() with a new optimizer",
        )
