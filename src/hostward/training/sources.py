"""The state as it lies, to be read piece by piece from other threads: what checkpoints are written from.

A source is one tensor of the state, or this process's part of it. Nothing is copied to make one. Whoever reads one
registers with its `readers`, and the optimizer waits for them before it changes what they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostward.engine.backend import Backend
from hostward.host.copy import Copy, copy
from hostward.inspect import Tracked
from hostward.inventory import MasterKind, Range
from hostward.plan import Placement

from .state import BucketState, slab_views

_ROLES = ("exp_avg", "exp_avg_sq")


class Readers:
    """Those who read the state at the moment."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def add(self, wait: Callable[[], None]) -> None:
        """`wait` returns when this reader has read all that it wants; it does not raise."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when nobody reads."""
        while self._waits:
            self._waits[-1]()
            self._waits.pop()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements [start, stop) of a flattened tensor and where they lie: `data`, flat, or the halves of float32 masters,
    bfloat16 in `data` and int16 in `low`.
    """

    start: int
    stop: int
    data: torch.Tensor
    low: torch.Tensor | None = None

    def lies_here(self) -> bool:
        """Whether it can be read in place."""
        return self.low is None and _on_host(self.data)


@dataclass(frozen=True, slots=True)
class Taking:
    """What brings a box of a source to its place: `Backend.fetch` of all pairs, then `copy` of the rest."""

    fetches: list[tuple[torch.Tensor, torch.Tensor]]
    copies: list[Copy]


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the state, read in boxes.

    shape: of this process's part, which is contiguous. whole: what a checkpoint is told of it, a tensor without memory,
    sharded as the parameter is.
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

    def needs_room(self) -> bool:
        """Whether some of it has to be copied to be read."""
        return len(self.stretches) > 1 or not all(s.lies_here() for s in self.stretches)

    def on_device(self, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether some of a box lies there."""
        found = self._found(*self._run(offsets, sizes))
        return not all(_on_host(s.data) and (s.low is None or _on_host(s.low)) for s in found)

    def read(self, offsets: Sequence[int], sizes: Sequence[int], room: torch.Tensor | None) -> torch.Tensor:
        """A box of it that is one run of its elements, on the host: in place where it lies there in one piece, else in
        `room`, uint8, which holds twice the box.
        """
        start, stop = self._run(offsets, sizes)
        found = self._found(start, stop)
        if len(found) == 1 and found[0].lies_here():
            return found[0].data[start - found[0].start : stop - found[0].start].view(tuple(sizes))
        if room is None:
            raise ValueError("a box that does not lie on the host in one piece needs room")
        nbytes = (stop - start) * self.dtype.itemsize
        taking = self._taking(start, stop, room[:nbytes], room[nbytes:], straight=True)
        self.backend.fetch(taking.fetches)
        copy(taking.copies)
        return room[:nbytes].view(self.dtype).view(tuple(sizes))

    def taking(
        self, offsets: Sequence[int], sizes: Sequence[int], place: torch.Tensor, room: torch.Tensor | None
    ) -> Taking:
        """How `place`, uint8, comes to hold such a box. What lies on the device goes through `room`, uint8, which holds
        as much as the box. None: nothing of it lies there.
        """
        return self._taking(*self._run(offsets, sizes), place, room)

    def _taking(
        self, start: int, stop: int, place: torch.Tensor, room: torch.Tensor | None, *, straight: bool = False
    ) -> Taking:
        """`straight`: the device is read into `place` itself where nothing is to be joined."""
        taking, size = Taking([], []), self.dtype.itemsize
        for stretch in self._found(start, stop):
            first, last = max(start, stretch.start), min(stop, stretch.stop)
            part, at = slice(first - stretch.start, last - stretch.start), size * (first - start)
            into = place[at : at + size * (last - first)]
            data = stretch.data[part]
            # Each stretch has its own part of the room: what is in it is read later.
            if stretch.low is not None:
                high = _here(data, room, at, taking)
                low = _here(stretch.low[part], room, at + high.nbytes, taking)
                taking.copies.append(Copy(into.view(self.dtype), high, low))
            elif straight and not _on_host(data):
                taking.fetches.append((into.view(self.dtype), data))
            else:
                taking.copies.append(Copy(into, _here(data, room, at, taking).view(torch.uint8)))
        return taking

    def _run(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        """The flat elements [start, stop) of a box."""
        start = sum(o * math.prod(self.shape[i + 1 :]) for i, o in enumerate(offsets))
        return start, start + math.prod(sizes)

    def _found(self, start: int, stop: int) -> list[Stretch]:
        return [s for s in self.stretches if s.start < stop and start < s.stop]


def _here(data: torch.Tensor, room: torch.Tensor | None, at: int, taking: Taking) -> torch.Tensor:
    """Where it is on the host once `taking.fetches` are made."""
    if _on_host(data):
        return data
    if room is None:
        raise ValueError("what lies on the device needs room")
    here = room[at : at + data.nbytes].view(data.dtype)
    taking.fetches.append((here, data))
    return here


def _on_host(data: torch.Tensor) -> bool:
    return data.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class StateSources:
    """All that an optimizer and the weights that it steps consist of, by parameter name."""

    format: int
    weights: Mapping[str, Source]
    state: Mapping[str, Mapping[str, Source]]
    """Moments, and masters of 16-bit weights, by role."""
    steps: Mapping[str, torch.Tensor]
    """Step counts, int64 []."""
    param_groups: Sequence[Mapping[str, Any]]
    names: Mapping[int, str]
    """By the id of the parameter object."""


class Describer:
    """Makes the sources of one optimizer's parameters."""

    def __init__(self, backend: Backend, readers: Readers) -> None:
        self._backend = backend
        self._readers = readers

    def state(self, tracked: Tracked, found: Sequence[tuple[BucketState, int, Range]]) -> dict[str, Source]:
        """Moments, and the masters of 16-bit weights, by role."""
        views = [(state, index, r, dict(slab_views(state, index))) for state, index, r in found]
        made = {}
        for role in _ROLES:
            stretches = tuple(Stretch(r.start, r.stop, v[role]) for _, _, r, v in views)
            made[role] = self._source(tracked, torch.float32, stretches)
        if tracked.local.dtype is not torch.float32:
            weight = _flat(tracked)
            masters = tuple(_master(state, index, r, v, weight) for state, index, r, v in views)
            made["master"] = self._source(tracked, torch.float32, masters)
        return made

    def weight(self, tracked: Tracked, found: Sequence[tuple[BucketState, int, Range]]) -> Source:
        """The weight: from the host where the host steps it."""
        weight = _flat(tracked)
        stretches = tuple(Stretch(r.start, r.stop, _weight(state, index, r, weight)) for state, index, r in found)
        return self._source(tracked, tracked.local.dtype, stretches)

    def _source(self, tracked: Tracked, dtype: torch.dtype, stretches: tuple[Stretch, ...]) -> Source:
        shape = tracked.local.shape
        whole = tracked.like(torch.empty(shape, dtype=dtype, device="meta"))
        return Source(shape, dtype, stretches, whole, self._backend, self._readers)


def _flat(tracked: Tracked) -> torch.Tensor:
    return tracked.local.detach().reshape(-1)


def _weight(state: BucketState, index: int, r: Range, weight: torch.Tensor) -> torch.Tensor:
    if state.placement is Placement.HOST:
        return state.weights[index].data
    return weight[r.start : r.stop]


def _master(state: BucketState, index: int, r: Range, views: dict[str, torch.Tensor], weight: torch.Tensor) -> Stretch:
    if state.bucket.kind is MasterKind.PLAIN:
        return Stretch(r.start, r.stop, views["master"])
    return Stretch(r.start, r.stop, _weight(state, index, r, weight), views["remainder"])
