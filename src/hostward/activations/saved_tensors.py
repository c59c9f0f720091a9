"""What autograd saves, sorted into what leaves the device and what stays.

A tensor that leaves is a `Handle` on a `Span`: a run of bytes of one storage, of which there is one copy however many
tensors view it. Handles carry all state: they may be unpacked again, or never, and what they hold goes with the last of
them. What stays is kept as an alias without a graph, so that an output does not keep itself alive.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from hostward.errors import ModelError
from hostward.model.autograd import raise_modified, tensors_of
from hostward.model.fence import plain_type, unfenced
from hostward.model.parameters import local_of
from hostward.runtime.backend import Event
from hostward.runtime.pinned_arena import Block, HostArena


class Why(StrEnum):
    """Why a saved tensor stays on the device."""

    LAYER = "its layer stays"
    MODULE = "its module stays"
    RECOMPUTED = "it is made in a recomputation"
    WEIGHT = "it is a weight"
    BUFFER = "it is a buffer"
    SHARED = "it was given to the layer and needs no gradient"
    AGAIN = "several layers were given it"
    SMALL = "it is small"
    KIND = "it is no plain tensor on the device"
    STREAM = "it was made on another stream"
    HELD = "a checkpoint holds it that was not given it by position"


@dataclass(slots=True, eq=False)
class Span:
    """A run of bytes of one storage.

    `data` is uint8 on the device, until it is released; `held` the same after a reload, until it is unpacked.
    """

    nbytes: int
    start: int
    """Of the first byte in its storage."""
    version: int
    data: torch.Tensor | None
    host_start: int = 0
    handles: int = 0
    """Alive."""
    awaiting: int = 0
    """Of these, those that have not been unpacked since the reload."""
    held: torch.Tensor | None = None
    arrival: Arrival | None = None

    def unpacked(self) -> None:
        """One handle less waits for the reload. After the last, the graph's nodes alone hold the memory."""
        self.awaiting -= 1
        if self.awaiting <= 0 and self.arrival is not None and self.arrival.waited:
            self.held = self.arrival = None


@dataclass(slots=True, eq=False)
class Arrival:
    """The event of a reload, and the compute streams that have waited for it."""

    event: Event
    waited: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Group:
    """Spans that leave together, and where their bytes are. It lives as long as a handle on one of them."""

    let_go: Callable[[Group], None]
    """Called when no handle is left; possibly from a finaliser."""
    visit: Visit | None = None
    """In which it left. It holds no graph."""
    capture: int = 0
    """The capture of a CUDA graph in which it left; 0: none."""
    stream: torch.Stream | None = None
    """That of its visit, whose memory it is."""
    spans: list[Span] = field(default_factory=list)
    nbytes: int = 0
    arena: HostArena | None = None
    block: Block | None = None
    """Of `arena`."""
    offloaded: Event | None = None
    last_read: Event | None = None
    released: bool = False

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self.nbytes += span.nbytes

    def __del__(self) -> None:
        self.let_go(self)


class Kept:
    """A saved tensor that stays."""

    __slots__ = ("data", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A leaf as it is: who swaps its data, as sharding does, means this one too.
        self.data = tensor if tensor.grad_fn is None and tensor._base is None else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        if self.data._version != self.version:
            raise_modified(self.data.shape)
        return self.data


class Handle:
    """A saved tensor that leaves: how it lies in its span."""

    __slots__ = ("arrival", "dtype", "group", "offset_bytes", "sizes", "span", "strides", "version", "witness")

    def __init__(self, group: Group, span: Span, tensor: torch.Tensor) -> None:
        self.group, self.span = group, span
        self.dtype, self.sizes, self.strides = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self.offset_bytes = int(tensor.storage_offset()) * tensor.element_size() - span.start
        self.version = tensor._version
        # It shares the version counter and nothing else: autograd's own check is off for tensors with hooks.
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.arrival: Arrival | None = None
        """The reload that it was last unpacked from."""
        span.handles += 1

    def __del__(self) -> None:
        self.span.handles -= 1
        self.unpacked()

    def unpacked(self) -> None:
        """It needs what was reloaded last no more: it has been unpacked from it, or is gone."""
        arrival = self.span.arrival
        if arrival is not None and self.arrival is not arrival:
            self.arrival = arrival
            self.span.unpacked()

    def require_unmodified(self) -> None:
        if self.witness._version != self.version:
            raise_modified(self.sizes)

    def view_of(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor over `data`, the bytes of its span, as it was: sizes, strides and offset."""
        start = (data.storage_offset() + self.offset_bytes) // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=data.device)
        return made.set_(data.untyped_storage(), start, self.sizes, self.strides)


class Sorter:
    """Decides by rules, first match first, and counts bytes by reason.

    Args:
        device: where tensors that may leave lie.
        min_bytes: smaller spans stay. min_elements: so do tensors of fewer elements.
    """

    def __init__(self, device: torch.device, min_bytes: int, min_elements: int = 0) -> None:
        self._device = device
        self.min_bytes = min_bytes
        self._min_elements = min_elements
        self._parameters: list[torch.nn.Parameter] = []
        self._divided: list[list[tuple[torch.nn.Module, str]]] = []
        """By layer, who has its parameters that are divided over ranks, and as what."""
        self._module_buffers: list[torch.Tensor] = []
        self._weights: set[int] = set()
        self._buffers: set[int] = set()
        self.kept_bytes: Counter[Why] = Counter()

    @unfenced
    def know(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Whose weights and buffers stay, and its layers. Those that come later are known by their type."""
        self._parameters = [p for p in module.parameters() if plain_type(p) is torch.nn.Parameter]
        self._divided = [
            [
                (owner, name)
                for owner in layer.modules()
                for name, p in owner.named_parameters(recurse=False)
                if local_of(p) is not p
            ]
            for layer in layers
        ]
        self._module_buffers = [b for b in module.buffers() if type(b) is torch.Tensor]

    @unfenced
    def refresh(self, module: torch.nn.Module) -> None:
        """Look up the storages of weights and buffers; they may have changed since the last forward. Raises ModelError
        for a model that lies elsewhere now.
        """
        first = next(module.parameters(), None)
        if first is not None and first.device != self._device:
            raise ModelError(
                f"the model lies on {first.device}, and what it saves is offloaded from {self._device}",
                why="it was moved after attach()",
                fix="detach(), move the model, and attach again",
            )
        self._weights = {p.untyped_storage()._cdata for p in self._parameters}
        self._buffers = {b.untyped_storage()._cdata for b in self._module_buffers}

    def keep(self, tensor: torch.Tensor, why: Why) -> Kept:
        self.kept_bytes[why] += tensor.numel() * tensor.element_size()
        return Kept(tensor)

    def why_kept(self, tensor: torch.Tensor, shared: Mapping[int, Why], layer: int) -> Why | None:
        """`shared`: storages, by address of their object, that the layer was given and that stay."""
        kind = plain_type(tensor)
        if kind is torch.nn.Parameter or isinstance(tensor._base, torch.nn.Parameter):
            return Why.WEIGHT
        if kind is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return Why.KIND
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return Why.KIND  # a bit of the tensor, not of its bytes; a tangent that is zero has none
        storage = tensor.untyped_storage()._cdata
        if storage in self._weights or _is_cast_weight(tensor):
            return Why.WEIGHT
        if storage in self._buffers:
            return Why.BUFFER  # batch norm changes what it has saved
        if storage in shared:
            return shared[storage]
        first, last = bytes_of(tensor)
        if last - first < self.min_bytes or tensor.numel() < self._min_elements:
            return Why.SMALL
        return Why.WEIGHT if self._is_of_divided(storage, layer) else None

    @unfenced
    def _is_of_divided(self, storage: int, layer: int) -> bool:
        """Whether it is that of a rank's experts or of a router, which compute with plain tensors of what is divided.
        FSDP2 has put what it gathers into the modules by now, and may take the bytes away when the layer has run.
        """
        held = (owner._parameters.get(name) for owner, name in self._divided[layer])
        return any(local_of(p).untyped_storage()._cdata == storage for p in held if p is not None)


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) of a strided tensor in its storage."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return first * tensor.element_size(), (first + tensor.numel()) * tensor.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), int(last + 1) * tensor.element_size()


def span_of(tensor: torch.Tensor, *, whole: bool = False) -> Span:
    """The bytes to copy for a tensor: its storage, unless that is more than twice what the tensor spans. `whole`: its
    storage, because other parts of it are saved as well.
    """
    first, last = bytes_of(tensor)
    storage = tensor.untyped_storage()
    if whole or storage.nbytes() <= 2 * (last - first):
        first, last = 0, storage.nbytes()
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    data.set_(storage, first, (last - first,), (1,))
    return Span(last - first, first, tensor._version, data)


def _is_cast_weight(tensor: torch.Tensor) -> bool:
    """Whether autocast made it from a trainable parameter: it holds the copy itself, for as long as its block lasts."""
    made_by = (tensor if tensor._base is None else tensor._base).grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    leaf = made_by.next_functions[0][0]
    return leaf is not None and isinstance(getattr(leaf, "variable", None), torch.nn.Parameter)


# What a layer is given: which of these tensors stay on the device although the layer saves them.


class Given:
    """Inputs of layers, in one forward. Holds none of them."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By the tensor's object: it, and its version."""

    def begin(self) -> None:
        """A forward begins."""
        self._before.clear()

    def staying(self, inputs: object, *, within: bool) -> dict[int, Why]:
        """Storages that stay, by the address of their object, for a layer that is called with `inputs`.

        Those without a gradient are the caller's: masks, rotary tables. Of those with one, which go from layer to layer
        (an encoder's output, a position bias), the caller holds one that an earlier layer of this forward was given as
        well: a copy in every layer would free nothing. `within`: the layer is called by another one, and may pass on
        its inputs.
        """
        found, new = {}, {}
        for tensor in tensors_of(inputs):
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                continue
            if not tensor.requires_grad:
                found[tensor.untyped_storage()._cdata] = Why.SHARED
            elif not within and self._again(tensor):
                found[tensor.untyped_storage()._cdata] = Why.AGAIN
            elif not within:
                new[id(tensor)] = weakref.ref(tensor), tensor._version
        self._before |= new
        return found

    def _again(self, tensor: torch.Tensor) -> bool:
        before = self._before.get(id(tensor))
        return before is not None and before[0]() is tensor and before[1] == tensor._version


# One call of a layer, and the calls that are on.


class Visit:
    """One call of a layer, and the groups that left in it (alive as long as handles on them are)."""

    __slots__ = (
        "__weakref__", "before", "begun", "capture", "groups", "installed", "layer", "number", "open", "released",
        "shared", "stream",
    )  # fmt: skip

    def __init__(self, layer: int, number: int, before: Visit | None, shared: Mapping[int, Why], capture: int) -> None:
        self.layer = layer
        self.capture = capture
        self.number = number
        self.before = None if before is None else weakref.ref(before)
        self.shared = shared
        self.open: Group | None = None
        self.groups: list[weakref.ref[Group]] = []
        self.released = self.begun = False
        self.stream = 0
        self.installed = False
        """Our hooks are on for what autograd saves."""

    def alive(self) -> list[Group]:
        return [group for ref in self.groups if (group := ref()) is not None]


class Stack(threading.local):
    """Visits that are on in this thread, innermost last; None where nothing is saved, or not for us."""

    def __init__(self) -> None:
        self.visits: list[tuple[int, Visit | None]] = []
        self.marks: list[tuple[torch.nn.Module, bool]] = []
        """Marked modules that run now, innermost last, and whether what they save leaves."""
