"""This module treats state tensors of any optimizer as bytes.

It says which may be offloaded, how they are stored in a host slab, and how they are rebuilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hostward.core.inventory import align
from hostward.model.parameters import local_of, sharded_as, sharding_of
from hostward.optim.any_optimizer.state_entry import Entry, only_here
from hostward.runtime.backend import Backend, Buffer, Event, Tier

ALIGNMENT_BYTES = 256
"""Least alignment, as of torch's own device allocator: kernels that check alignment choose as without hostward."""

HOST_OWNER = "optimizer state"

Bundle = dict[Hashable, torch.Tensor]
"""State tensors of one parameter that are offloaded, by key."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout holds what it takes, besides its bytes, to rebuild a strided tensor, or a DTensor over this rank's part.

    dtype, shape and strides are the part's. sharding: None for a plain tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sharding: object = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        part = local_of(tensor)
        return cls(part.dtype, tuple(part.shape), part.stride(), sharding_of(tensor))

    @property
    def span(self) -> int:
        """Return the number of elements from the first to the last, holes included."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize

    def view(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the tensor over the bytes of `memory` (uint8, flat) from `offset` on."""
        part = memory[offset : offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.strides)
        return sharded_as(part, self.sharding)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocate a tensor of this layout on `device`."""
        part = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return sharded_as(part, self.sharding)


def span_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes that this rank has of a strided tensor, uint8 [nbytes], holes included."""
    return local_of(tensor).detach().as_strided((Layout.of(tensor).span,), (1,)).view(torch.uint8)


def may_leave(value: object) -> bool:
    """Return whether a state entry is a tensor of several elements in memory, without attributes that its user has set.

    It is a plain tensor, or a DTensor of which this rank has several elements.
    """
    if not isinstance(value, torch.Tensor) or value.__dict__ or value.requires_grad:
        return False
    part = local_of(value)
    return (
        type(part) is torch.Tensor
        and part.layout is torch.strided
        and part.numel() > 1
        and part.data_ptr() != 0
        and not (part.requires_grad or part.is_conj() or part.is_neg() or part.__dict__)
    )


def bundles(
    state: Mapping[torch.Tensor, Any], parameters: Iterable[torch.Tensor], device: torch.device, *, loaded: bool = False
) -> dict[torch.Tensor, Bundle]:
    """Return the tensors that can be offloaded, of each parameter that has some.

    Left out are tensors on another device, those that share memory with another tensor (a view of a larger buffer, the
    weight or the gradient itself): moving them would free nothing, or tear the two apart; and those that other code
    refers to besides `state`, which would go on with the old one. `loaded`: the tensors are those of a file, whatever
    else refers to them.
    """
    keys: dict[torch.Tensor, list[Hashable]] = {}
    for p in parameters:
        if isinstance(state, dict) and p in state and _is_ours(state, p):
            entry = state[p]
            keys[p] = [key for key, value in dict.items(entry) if may_leave(value) and value.device == device]
    keys = {p: candidates for p, candidates in keys.items() if candidates}
    shared: Counter[int] = Counter()
    for p, candidates in keys.items():
        shared.update(_address(t) for t in (p, p.grad) if t is not None and t.layout is torch.strided)
        shared.update(_address(dict.__getitem__(state[p], key)) for key in candidates)
    found: dict[torch.Tensor, Bundle] = {}
    for p, candidates in keys.items():
        free = [key for key in candidates if loaded or only_here(state[p], key)]
        bundle = {key: dict.__getitem__(state[p], key) for key in free}
        bundle = {key: t for key, t in bundle.items() if shared[_address(t)] == 1 and _owns_its_memory(t)}
        if bundle:
            found[p] = bundle
    return found


def _is_ours(state: dict[torch.Tensor, Any], parameter: torch.Tensor) -> bool:
    """Return whether a parameter's state is a dict that may be replaced.

    No other code goes on with the old one then.
    """
    kind = type(dict.__getitem__(state, parameter))
    return kind is Entry or (issubclass(kind, dict) and only_here(state, parameter))


def bundle_bytes(bundle: Bundle) -> int:
    return sum(Layout.of(t).nbytes for t in bundle.values())


def padded_bytes(bundle: Bundle) -> int:
    """Return the bytes that the bundle takes in a slab."""
    return sum(align(Layout.of(t).nbytes, ALIGNMENT_BYTES) for t in bundle.values())


def _address(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def _owns_its_memory(tensor: torch.Tensor) -> bool:
    part = local_of(tensor)
    return part.storage_offset() == 0 and part.untyped_storage().nbytes() == Layout.of(part).nbytes


@dataclass(slots=True)
class Share:
    """Share keeps the offloaded bytes within half of one bundle of `fraction` of all, whatever is added."""

    fraction: float
    total_bytes: int = 0
    left_bytes: int = 0

    def leaves(self, nbytes: int) -> bool:
        """Count a bundle, and return whether it is offloaded."""
        self.total_bytes += nbytes
        wanted = self.fraction * self.total_bytes
        leaves = abs(self.left_bytes + nbytes - wanted) < abs(self.left_bytes - wanted)
        self.left_bytes += nbytes if leaves else 0
        return leaves

    def forget(self, nbytes: int) -> None:
        """Stop counting a bundle that was offloaded."""
        self.total_bytes -= nbytes
        self.left_bytes -= nbytes


@dataclass(frozen=True, slots=True)
class Place:
    """Place says where a state tensor is stored in its chunk, in bytes.

    It also has the view of it on the host, and its bytes there for copies.
    """

    offset: int
    layout: Layout
    home: torch.Tensor
    memory: Buffer


@dataclass(eq=False, slots=True)
class Chunk:
    """Chunk holds the state of some parameters in one host slab; it is reloaded at once.

    `places` by parameter and key. `drained`: the newest copy into the slab.
    """

    slab: Buffer
    name: str
    drained: Event
    places: dict[torch.Tensor, dict[Hashable, Place]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, backend: Backend, content: Mapping[torch.Tensor, Bundle], number: int) -> Chunk:
        """Allocate a chunk with room for these bundles, all zero. Raises MemoryLimitError."""
        size = sum(map(padded_bytes, content.values()))
        (slab,) = backend.allocate(Tier.HOST, [size], torch.uint8, HOST_OWNER, pinned=True)
        chunk, offset = cls(slab, f"{number:04d}", backend.event()), 0
        for p, bundle in content.items():
            places = {}
            for key, tensor in bundle.items():
                layout = Layout.of(tensor)
                (memory,) = pieces(slab, [(offset, offset + layout.nbytes)])
                places[key] = Place(offset, layout, layout.view(slab.data, offset), memory)
                offset += align(layout.nbytes, ALIGNMENT_BYTES)
            chunk.places[p] = places
        return chunk

    @property
    def size_bytes(self) -> int:
        return self.slab.nbytes

    def bytes_of(self, parameter: torch.Tensor) -> int:
        return sum(place.layout.nbytes for place in self.places[parameter].values())

    def holds(self, parameter: torch.Tensor, state: Mapping[torch.Tensor, Any]) -> bool:
        """Return whether the optimizer's state still is what is stored here: nothing else was put in its place."""
        entry = state.get(parameter)
        places = self.places[parameter]
        return isinstance(entry, dict) and all(dict.get(entry, key) is place.home for key, place in places.items())

    def homes(self, parameter: torch.Tensor) -> Bundle:
        return {key: place.home for key, place in self.places[parameter].items()}

    def layouts(self, parameter: torch.Tensor) -> list[Layout]:
        return [place.layout for place in self.places[parameter].values()]


def pieces(buffer: Buffer, runs: Iterable[tuple[int, int]]) -> list[Buffer]:
    """Return one buffer per byte range of a slab or GPU staging buffer."""
    return [Buffer(buffer.tier, buffer.data[a:b], buffer.owner, buffer.pinned) for a, b in runs]


def cut(sizes: Iterable[tuple[torch.Tensor, int]], limit_bytes: int) -> list[list[torch.Tensor]]:
    """Cut parameters into runs of at most `limit_bytes`; one that is larger is a run of its own."""
    runs: list[list[torch.Tensor]] = []
    filled = 0
    for p, nbytes in sizes:
        if not runs or filled + nbytes > limit_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(p)
        filled += nbytes
    return runs


def settle(entry: dict[Hashable, Any], given: Bundle, layouts: Sequence[Layout], device: torch.device) -> bool:
    """Copy what the optimizer has put in place of a given tensor into that tensor's memory, after its use.

    Returns False where that cannot be done, because the parameter's state has other tensors than before, or a given one
    has another layout than `layouts` says: then they are all made independent of the GPU staging buffer.
    """
    kept = all(Layout.of(t) == layout and t.device == device for t, layout in zip(given.values(), layouts, strict=True))
    now: dict[Hashable, Any] = {key: dict.get(entry, key) for key in given}
    replaced = [(tensor, now[key]) for key, tensor in given.items() if now[key] is not tensor]
    same = kept and all(may_leave(value) and Layout.of(value) == Layout.of(t) for t, value in replaced)
    more = [key for key, value in dict.items(entry) if key not in given and may_leave(value) and value.device == device]
    if same and not any(_is_more(entry, key, given) for key in more):
        # A swap of two state tensors makes each the source of the other.
        sources = [value.clone() for _, value in replaced]
        for (tensor, _), source in zip(replaced, sources, strict=True):
            tensor.copy_(source)
        return True
    for key, value in list(dict.items(entry)):
        if any(value is tensor for tensor in given.values()):
            dict.__setitem__(entry, key, value.clone())
    return False


def _is_more(entry: dict[Hashable, Any], key: Hashable, given: Bundle) -> bool:
    """Return whether a tensor under a new key is one of `given`, or could be offloaded as well."""
    if any(dict.__getitem__(entry, key) is tensor for tensor in given.values()):
        return True
    return only_here(entry, key) and _owns_its_memory(dict.__getitem__(entry, key))
