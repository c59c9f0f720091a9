"""Tensors that autograd saves are sorted into those that are offloaded and those that stay on the device.

An offloaded tensor is a `SavedTensorHandle` on a `StorageSpan`: a run of bytes of one storage, copied once however many
tensors view it. Handles carry all state: each may be unpacked several times, or never, and the last one frees the copy.
A tensor that stays is kept as a `PassThrough`, an alias without a graph, so that an output does not keep itself alive.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from hostward.errors import ModelError
from hostward.model.autograd import raise_modified, tensors_of
from hostward.model.fence import plain_type, unfenced
from hostward.model.parameters import local_of
from hostward.runtime.backend import Event
from hostward.runtime.pinned_arena import Block, HostArena


class Why(StrEnum):
    """Name the reason for which a saved tensor stays on the device."""

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
    HOOKED = "saved-tensor hooks of other code have packed it"


@dataclass(slots=True, eq=False)
class StorageSpan:
    """Describe a run of bytes of one storage.

    `data` is uint8 on the device until it is released; `held` is the same after a reload, until it is unpacked.
    """

    nbytes: int
    start: int
    """Offset in bytes of the first byte in its storage."""
    version: int
    data: torch.Tensor | None
    host_start: int = 0
    handles: int = 0
    """Live handles."""
    awaiting: int = 0
    """Live handles that have not been unpacked since the reload."""
    held: torch.Tensor | None = None
    arrival: Arrival | None = None

    def unpacked(self) -> None:
        """Count one handle as unpacked; after the last one only graph nodes hold the reloaded memory."""
        self.awaiting -= 1
        if self.awaiting <= 0 and self.arrival is not None and self.arrival.waited:
            self.held = self.arrival = None


@dataclass(slots=True, eq=False)
class Arrival:
    """Hold the event of a reload and the compute streams that have waited for it."""

    event: Event
    waited: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False, weakref_slot=True)
class TransferGroup:
    """Hold spans that are offloaded in one copy, and the host block of their bytes.

    A group lives as long as a handle on one of its spans.
    """

    let_go: Callable[[TransferGroup], None]
    """Called when no handle is left, possibly from a finaliser."""
    layer_call: LayerCall | None = None
    """Layer call in which the group was offloaded; it holds no graph."""
    capture: int = 0
    """CUDA graph capture in which the group was offloaded; 0: none."""
    stream: torch.Stream | None = None
    """Compute stream of the layer call, to which the device memory belongs."""
    spans: list[StorageSpan] = field(default_factory=list)
    nbytes: int = 0
    arena: HostArena | None = None
    block: Block | None = None
    """Host memory with the bytes of all spans, in `arena`."""
    offloaded: Event | None = None
    last_read: Event | None = None
    released: bool = False

    def add(self, span: StorageSpan) -> None:
        self.spans.append(span)
        self.nbytes += span.nbytes

    def __del__(self) -> None:
        self.let_go(self)


class PassThrough:
    """Keep a saved tensor on the device."""

    __slots__ = ("data", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A leaf is kept itself: code that swaps its data, as FSDP2 does, means the saved tensor too.
        self.data = tensor if tensor.grad_fn is None and tensor._base is None else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        if self.data._version != self.version:
            raise_modified(self.data.shape)
        return self.data


Hooks = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]
"""Saved-tensor hooks: pack and unpack."""


@dataclass(slots=True, frozen=True)
class PackedByOthers:
    """Hold what saved-tensor hooks of other code, around the layer's call, have made of a saved tensor.

    `ours`: they returned the tensor itself, so that `packed` is our handle on it.
    """

    packed: object
    unpack: Callable[[Any], torch.Tensor]
    ours: bool


class SavedTensorHandle:
    """Stand for an offloaded tensor in the graph: dtype, sizes, strides and offset in its span."""

    __slots__ = ("arrival", "dtype", "group", "offset_bytes", "sizes", "span", "strides", "version", "witness")

    def __init__(self, group: TransferGroup, span: StorageSpan, tensor: torch.Tensor) -> None:
        self.group, self.span = group, span
        self.dtype, self.sizes, self.strides = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self.offset_bytes = int(tensor.storage_offset()) * tensor.element_size() - span.start
        self.version = tensor._version
        # The witness shares the version counter only: autograd skips its own check for tensors with hooks.
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.arrival: Arrival | None = None
        """Reload from which the handle was last unpacked."""
        span.handles += 1

    def __del__(self) -> None:
        self.span.handles -= 1
        self.unpacked()

    def unpacked(self) -> None:
        """Note that the handle does not need the latest reload any more: it was unpacked or deleted."""
        arrival = self.span.arrival
        if arrival is not None and self.arrival is not arrival:
            self.arrival = arrival
            self.span.unpacked()

    def require_unmodified(self) -> None:
        if self.witness._version != self.version:
            raise_modified(self.sizes)

    def view_of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over `data`, the bytes (uint8) of its span, with its sizes, strides and offset."""
        start = (data.storage_offset() + self.offset_bytes) // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=data.device)
        return made.set_(data.untyped_storage(), start, self.sizes, self.strides)


class Sorter:
    """Decide which saved tensors stay on the device, by the first rule that matches, and count bytes by reason.

    Args:
        device: the device from which tensors are offloaded.
        min_bytes: spans of fewer bytes stay. min_elements: tensors of fewer elements stay.
    """

    def __init__(self, device: torch.device, min_bytes: int, min_elements: int = 0) -> None:
        self._device = device
        self.min_bytes = min_bytes
        self._min_elements = min_elements
        self._parameters: list[torch.nn.Parameter] = []
        self._divided: list[list[tuple[torch.nn.Module, str]]] = []
        """Sharded parameters by layer, as (module, attribute)."""
        self._module_buffers: list[torch.Tensor] = []
        self._weights: set[int] = set()
        self._buffers: set[int] = set()
        self.kept_bytes: Counter[Why] = Counter()

    @unfenced
    def know(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Register the weights and buffers of a model; none of them is ever offloaded.

        Parameters that are added later are recognised by their type.
        """
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
        self._module_buffers = [b for b in torch.nn.Module.buffers(module) if type(b) is torch.Tensor]

    @unfenced
    def refresh(self, module: torch.nn.Module) -> None:
        """Look up the storages of weights and buffers, which may have changed since the last forward.

        Raises:
            ModelError: the model was moved to another device.
        """
        first = next(module.parameters(), None)
        if first is not None and first.device != self._device:
            raise ModelError(
                f"the model is on {first.device}, but its saved tensors are offloaded from {self._device}",
                why="it was moved after attach()",
                fix="detach(), move the model, and attach again",
            )
        self._weights = {p.untyped_storage()._cdata for p in self._parameters}
        self._buffers = {b.untyped_storage()._cdata for b in self._module_buffers}

    def keep(self, tensor: torch.Tensor, why: Why) -> PassThrough:
        self.count(tensor, why)
        return PassThrough(tensor)

    def count(self, tensor: torch.Tensor, why: Why) -> None:
        self.kept_bytes[why] += tensor.numel() * tensor.element_size()

    def why_kept(self, tensor: torch.Tensor, shared: Mapping[int, Why], layer: int) -> Why | None:
        """Return the reason for which a tensor stays on the device; None: it is offloaded.

        `shared`: by address of the storage object, inputs of the layer that stay.
        """
        kind = plain_type(tensor)
        if kind is torch.nn.Parameter or isinstance(tensor._base, torch.nn.Parameter):
            return Why.WEIGHT
        if kind is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return Why.KIND
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return Why.KIND  # a flag of the tensor that its bytes do not show; a zero tangent has no bytes
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
        """Return whether a storage belongs to a sharded parameter of the layer, such as experts or a router.

        Such modules compute with plain tensors. FSDP2 has put the unsharded parameters into the modules by now, and may
        free their bytes when the layer has run.
        """
        held = (owner._parameters.get(name) for owner, name in self._divided[layer])
        return any(local_of(p).untyped_storage()._cdata == storage for p in held if p is not None)


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets of the first and last byte (exclusive) of a strided tensor in its storage."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return first * tensor.element_size(), (first + tensor.numel()) * tensor.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), int(last + 1) * tensor.element_size()


def span_of(tensor: torch.Tensor, *, whole: bool = False) -> StorageSpan:
    """Return the bytes to copy for a tensor: its whole storage, unless that has more than twice the tensor's bytes.

    `whole`: take the whole storage in any case, because other parts of it are saved as well.
    """
    first, last = bytes_of(tensor)
    storage = tensor.untyped_storage()
    if whole or storage.nbytes() <= 2 * (last - first):
        first, last = 0, storage.nbytes()
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    data.set_(storage, first, (last - first,), (1,))
    return StorageSpan(last - first, first, tensor._version, data)


def _is_cast_weight(tensor: torch.Tensor) -> bool:
    """Return whether autocast made a tensor from a trainable parameter: autocast itself holds that copy."""
    made_by = (tensor if tensor._base is None else tensor._base).grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    leaf = made_by.next_functions[0][0]
    return leaf is not None and isinstance(getattr(leaf, "variable", None), torch.nn.Parameter)


# Inputs of layers that stay on the device although the layer saves them.


class SharedInputs:
    """Find layer inputs that other code holds during one forward; offloading them would free nothing.

    The inputs are referenced weakly.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Weak references to tensors and their versions, by id."""

    def begin(self) -> None:
        """Forget the inputs of the forward before."""
        self._before.clear()

    def staying(self, inputs: object, *, within: bool) -> dict[int, Why]:
        """Return the input storages that stay on the device, by address of the storage object, with the reason.

        Inputs without a gradient belong to the caller: masks, rotary tables. An input with a gradient stays if an
        earlier layer of this forward received it as well (an encoder's output, a position bias): the caller holds it,
        and offloading it in every layer would free nothing. `within`: another layer calls this one, and may pass on its
        own inputs.
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


# One call of a layer, and the calls that are running.


class LayerCall:
    """Record one call of a layer and the groups offloaded in it, which live as long as handles on them."""

    __slots__ = (
        "__weakref__", "around", "before", "begun", "capture", "groups", "installed", "layer", "number", "open",
        "released", "shared", "stream",
    )  # fmt: skip

    def __init__(
        self, layer: int, number: int, before: LayerCall | None, shared: Mapping[int, Why], capture: int
    ) -> None:
        self.layer = layer
        self.capture = capture
        self.number = number
        self.before = None if before is None else weakref.ref(before)
        self.shared = shared
        self.open: TransferGroup | None = None
        self.groups: list[weakref.ref[TransferGroup]] = []
        self.released = self.begun = False
        self.stream = 0
        self.installed = False
        """True while our saved-tensor hooks are installed for this call."""
        self.around: Hooks | None = None
        """Saved-tensor hooks of other code around this call, while it runs."""

    def alive(self) -> list[TransferGroup]:
        return [group for ref in self.groups if (group := ref()) is not None]


class Stack(threading.local):
    """Hold the layer calls that run in this thread, innermost last; None where nothing is offloaded."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerCall | None]] = []
        self.marks: list[tuple[torch.nn.Module, bool]] = []
        """Marked modules that run now, innermost last, and whether their saved tensors are offloaded."""
