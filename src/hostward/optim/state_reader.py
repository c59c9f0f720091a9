"""Other threads read the state in place, piece by piece, to write checkpoints from it.

A source is one tensor of the state, or this process's part of it. Nothing is copied to make one. Each reader of a
source registers with its `readers`, and the optimizer waits for them before it changes what they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from hostward.core.inventory import FP8_BLOCK, MOMENTS, MasterKind, Range, StateFormat
from hostward.core.placement import Placement
from hostward.kernels.cpu.memory_copy import Copy, copy
from hostward.model.parameters import ParamRecord
from hostward.optim.bucket_state import BucketState, fp8_values, slab_views
from hostward.optim.state_dict import saved_dtype
from hostward.runtime.backend import DTYPES, Backend


class Readers:
    """Readers waits for everyone who is reading the state at the moment."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def add(self, wait: Callable[[], None]) -> None:
        """Register a reader: `wait` returns when it has read all that it wants, and does not raise."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when nobody reads."""
        while self._waits:
            self._waits[-1]()
            self._waits.pop()


Where: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Function from memory of a source to the memory that it is to be read from."""


def as_it_lies(memory: torch.Tensor) -> torch.Tensor:
    return memory


@dataclass(frozen=True, slots=True)
class Stretch:
    """Stretch says where elements [start, stop) of a flattened tensor are stored.

    They are in `data`, flat; or are the halves of fp32 main weights, bfloat16 in `data` and int16 in `low`; or are FP8
    moments, uint8 in `data` and, for each block from `start` on, in `scales`.
    """

    start: int
    stop: int
    data: torch.Tensor
    low: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    role: str = ""
    """Of an FP8 moment its name: the two are encoded differently."""

    @property
    def memory(self) -> list[torch.Tensor]:
        return [memory for memory in (self.data, self.low, self.scales) if memory is not None]

    def lies_here(self) -> bool:
        """Return whether the stretch can be read in place."""
        return len(self.memory) == 1 and on_host(self.data)

    def lying(self, where: Where) -> Stretch:
        """Return the same stretch in the memory that `where` returns."""
        low, scales = (None if memory is None else where(memory) for memory in (self.low, self.scales))
        return replace(self, data=where(self.data), low=low, scales=scales)

    def parts_of(self, part: slice) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield each memory with the elements of it that store elements `part` of the stretch."""
        for memory in self.memory:
            yield memory, _blocks(part) if memory is self.scales else part


@dataclass(frozen=True, slots=True)
class Source:
    """Source is one tensor of the state, read in boxes, each one run of its elements.

    shape: that of this process's part, which is contiguous. whole: what a checkpoint gets as its description, a tensor
    without memory, sharded as the parameter is.
    """

    shape: torch.Size
    dtype: torch.dtype
    stretches: tuple[Stretch, ...]
    whole: torch.Tensor
    backend: Backend
    readers: Readers

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def memory(self) -> list[torch.Tensor]:
        """Return the flat tensors it is stored in.

        fp32 main weights share memory with the weights that are their halves.
        """
        return [memory for stretch in self.stretches for memory in stretch.memory]

    def needs_room(self) -> bool:
        """Return whether some of it has to be copied to be read."""
        return len(self.stretches) > 1 or not all(s.lies_here() for s in self.stretches)

    def memory_of(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield the parts of `memory` that store a box, and the bytes [start, stop) it takes of each."""
        for stretch, part in self._found(*self._run(offsets, sizes)):
            for memory, taken in stretch.parts_of(part):
                yield memory, taken.start * memory.itemsize, taken.stop * memory.itemsize

    def read(
        self,
        offsets: Sequence[int],
        sizes: Sequence[int],
        room: torch.Tensor | None,
        where: Where = as_it_lies,
    ) -> torch.Tensor:
        """Return a box of the tensor on the host.

        It is read in place where it is stored there in one piece, else into `room`, uint8, which holds the box, or
        twice that where some of it is stored on the device.

        where: maps each of `memory` to the tensor of the same shape and dtype that it is read from.
        """
        start, stop = self._run(offsets, sizes)
        found = [(stretch.lying(where), part) for stretch, part in self._found(start, stop)]
        if len(found) == 1 and found[0][0].lies_here():
            ((stretch, part),) = found
            return stretch.data[part].view(tuple(sizes))
        if not found:  # a rank without an element of it
            return torch.empty(tuple(sizes), dtype=self.dtype)
        if room is None:
            raise ValueError("a box that does not lie on the host in one piece needs room")
        nbytes = (stop - start) * self.dtype.itemsize
        into, halves = room[:nbytes].view(self.dtype), room[nbytes:]
        fetches: list[tuple[torch.Tensor, torch.Tensor]] = []
        copies: list[Copy] = []
        decoded: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, str, int]] = []

        def here(data: torch.Tensor) -> torch.Tensor:
            """Return where it is on the host once `fetches` are made.

            Each fetch has a part of the room of its own.
            """
            nonlocal halves
            if on_host(data):
                return data
            place, halves = halves[: data.nbytes].view(data.dtype), halves[data.nbytes :]
            fetches.append((place, data))
            return place

        end = 0
        for stretch, part in found:
            data = stretch.data[part]
            begin, end = end, end + len(data)
            if stretch.scales is not None:
                scales = here(stretch.scales[_blocks(part)])
                decoded.append((into[begin:end], here(data), scales, stretch.role, part.start % FP8_BLOCK))
            elif stretch.low is not None:
                copies.append(Copy(into[begin:end], here(data), here(stretch.low[part])))
            elif on_host(data):
                copies.append(Copy(into[begin:end].view(torch.uint8), data.view(torch.uint8)))
            else:
                fetches.append((into[begin:end], data))
        self.backend.fetch(fetches)
        copy(copies)
        for place, codes, scales, role, first in decoded:
            place.copy_(fp8_values(codes, scales, role, first))
        return into.view(tuple(sizes))

    def _run(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        """Return the flat elements [start, stop) of a box."""
        start = sum(o * math.prod(self.shape[i + 1 :]) for i, o in enumerate(offsets))
        return start, start + math.prod(sizes)

    def _found(self, start: int, stop: int) -> Iterator[tuple[Stretch, slice]]:
        """Yield the stretches that hold these flat elements, in order, and which elements of each."""
        for s in self.stretches:
            if s.start < stop and start < s.stop:
                yield s, slice(max(start, s.start) - s.start, min(stop, s.stop) - s.start)


def _blocks(part: slice) -> slice:
    """Return the blocks of FP8 moments that hold these elements."""
    return slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))


def on_host(data: torch.Tensor) -> bool:
    return data.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class StateSources:
    """StateSources holds the sources of an optimizer's state and of the weights that it steps, by parameter name."""

    format: int
    weights: Mapping[str, Source]
    state: Mapping[str, Mapping[str, Source]]
    """Moments, and fp32 main weights of 16-bit weights, by role."""
    steps: Mapping[str, torch.Tensor]
    """Step counts, int64 []."""
    param_groups: Sequence[Mapping[str, Any]]
    names: Mapping[int, str]
    """Names by the id of the parameter object."""


class Describer:
    """Describer makes the sources of one optimizer's parameters."""

    def __init__(self, backend: Backend, readers: Readers, form: StateFormat) -> None:
        self._backend = backend
        self._form = form
        self._readers = readers

    def state(self, tracked: ParamRecord, found: Sequence[tuple[BucketState, int, Range]]) -> dict[str, Source]:
        """Return the sources of moments and of the fp32 main weights of 16-bit weights, by role."""
        views = [(state, index, r, dict(slab_views(state, index))) for state, index, r in found]
        made = {}
        for role in MOMENTS:
            stretches = tuple(
                Stretch(r.start, r.stop, v[role], scales=v.get(f"{role}_scales"), role=role) for _, _, r, v in views
            )
            made[role] = self._source(tracked, saved_dtype(self._form.moments[role]), stretches)
        if self._form.master_kind(DTYPES[tracked.local.dtype]) is not MasterKind.WEIGHT:
            weight = _flat(tracked)
            masters = tuple(_master(state, index, r, v, weight) for state, index, r, v in views)
            made["master"] = self._source(tracked, torch.float32, masters)
        return made

    def weight(self, tracked: ParamRecord, found: Sequence[tuple[BucketState, int, Range]]) -> Source:
        """Return the source of the weight; it is read from the host where a CPU optimizer step writes it."""
        weight = _flat(tracked)
        stretches = tuple(Stretch(r.start, r.stop, _weight(state, index, r, weight)) for state, index, r in found)
        return self._source(tracked, tracked.local.dtype, stretches)

    def _source(self, tracked: ParamRecord, dtype: torch.dtype, stretches: tuple[Stretch, ...]) -> Source:
        shape = tracked.local.shape
        whole = tracked.like(torch.empty(shape, dtype=dtype, device="meta"))
        return Source(shape, dtype, stretches, whole, self._backend, self._readers)


def _flat(tracked: ParamRecord) -> torch.Tensor:
    return tracked.local.detach().reshape(-1)


def _weight(state: BucketState, index: int, r: Range, weight: torch.Tensor) -> torch.Tensor:
    if state.placement is Placement.HOST:
        return state.weights[index].data
    return weight[r.start : r.stop]


def _master(state: BucketState, index: int, r: Range, views: dict[str, torch.Tensor], weight: torch.Tensor) -> Stretch:
    if state.bucket.kind is MasterKind.PLAIN:
        return Stretch(r.start, r.stop, views["master"])
    return Stretch(r.start, r.stop, _weight(state, index, r, weight), views["remainder"])
