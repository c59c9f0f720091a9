"""Weights of layers that come and go: one host copy each, and storages that have bytes only while they are needed.

The storage object of a weight stays; its bytes are taken and given back (`resize_`), so that parameters, their views
in graphs and whoever knows them stay as they are. A storage that anybody else holds is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from hostward.errors import ModelError
from hostward.model.parameters import local_of
from hostward.runtime.backend import Backend, Batch, Buffer, Event, Held, Tier, Work
from hostward.schedule.ops import Lane
from hostward.schedule.weights import GATHERED, ROOM, WEIGHT_OPS

OWNER = "offloaded weights"


@dataclass(slots=True, eq=False)
class Weight:
    """One weight that comes and goes.

    `pieces`: (first element, its bytes on the host); they cover it. `version`: that of its contents on the host.
    """

    name: str
    parameter: torch.nn.Parameter
    local: torch.Tensor
    """Of a sharded parameter this rank's part, which is what comes and goes; else the parameter itself."""
    storage: torch.UntypedStorage
    """Of `local`."""
    pieces: list[tuple[int, Buffer]]
    here: list[Buffer]
    """On the device, one for each piece: tensors over the weight's storage."""
    changed: Callable[[], bool] | None = None
    """Whether somebody wrote it whom its owner, the optimizer, has not followed yet. None: the host copy is ours."""
    version: int = 0
    handed: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """For each `.data` of it that was handed out: a tensor with its version counter, and that counter then."""
    exposed: bool = False
    """Its address was handed out: it may have been written."""
    holders: int = 1
    """Tensors that always lie in its memory: the parameter, or what FSDP2 has of a part."""

    room_bytes: int = field(init=False)
    """Of the storage."""
    padding: torch.Tensor | None = field(init=False)
    """The zeros that FSDP2 has behind a part."""

    def __post_init__(self) -> None:
        self.room_bytes = self.storage.nbytes() or self.nbytes  # one that waits has none yet
        self.padding = None
        if self.room_bytes > self.nbytes:
            behind = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
            self.padding = behind.set_(self.storage, self.nbytes, (self.room_bytes - self.nbytes,), (1,))

    @property
    def sharded(self) -> bool:
        return self.local is not self.parameter

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.element_size()

    @property
    def counted(self) -> int:
        """Writes so far, as torch counts them."""
        return self.local._version + (self.parameter._version if self.sharded else 0)

    def held(self) -> bool:
        """Whether somebody else holds its memory: a view, or a graph that saved it without our hooks."""
        parameter = self.parameter
        # The parameter, the storage's Python object and our tensors over it.
        ours = 1 + len(self.here) + (self.padding is not None)
        if torch._C._storage_Use_Count(self.storage._cdata) > self.holders + ours:
            return True
        if not self.storage.resizable():
            return True  # numpy has had it
        # The node that accumulates its gradient holds it, too.
        return parameter._use_count() > _alone() + parameter.requires_grad  # type: ignore[attr-defined, no-any-return]

    def require_in(self, module: torch.nn.Module, name: str) -> None:
        """Raises ModelError if a module has another parameter in its place now."""
        if module._parameters.get(name) is not self.parameter:
            raise self.replaced(f"{type(module).__name__} has another parameter as its {name} since attach()")

    def replaced(self, why: str) -> ModelError:
        """The error for it."""
        what = f"weight {self.name!r} of an offloaded layer was replaced"
        return ModelError(what, why=why, fix="detach(), change the model, and attach again")

    def written(self) -> bool:
        """Whether what is on the device now is not what the host copy holds."""
        if self.changed is not None:
            return self.changed()
        moved = any(witness._version != version for witness, version in self.handed)
        return self.counted != self.version or self.exposed or moved

    def saved(self) -> None:
        """The host copy, which is ours, holds what is on the device."""
        self.version, self.exposed = self.counted, False
        self.handed = [(witness, witness._version) for witness, _ in self.handed] if self.held() else []

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """A value of what this rank has, as the parameter is: sharded in the same way, or plain."""
        if not self.sharded:
            return value
        from hostward.distributed import fsdp2

        return fsdp2.like(value, self.parameter)

    def host_value(self) -> torch.Tensor:
        """A copy of the weight, of a sharded one of this rank's part, on the CPU. All lanes are empty."""
        local = self.local
        copied = torch.empty(local.numel(), dtype=local.dtype, device="cpu")
        for start, buffer in self.pieces:
            data = buffer.data.view(local.dtype)
            copied[start : start + data.numel()].copy_(data)
        return copied.view(local.shape)


@functools.cache
def _alone() -> int:
    return torch.nn.Parameter(torch.empty(0, device="cpu"))._use_count()  # type: ignore[attr-defined, no-any-return]


@dataclass(slots=True, eq=False)
class LayerWeights:
    """The weights of one layer, and their operations, bound once. They come and go together."""

    name: str
    weights: list[Weight]
    room: Work
    fetch: Work
    arrive: Work
    empty: Batch
    save: Batch | None
    """Of those whose host copies are ours."""
    resident: bool = True
    stale: bool = False
    """A step has written the host copy since it was fetched."""
    reading: bool = False
    """A gather may still read them, on a stream that the compute lane has not waited for."""
    gather_held: Held | None = None
    """How long the gather that reads them was held. None: nobody looks, or the compute lane has waited for it."""
    stream: int | None = None
    """The compute stream that took the memory; None: it was there before us."""
    read_on: set[torch.Stream] = field(default_factory=set)
    """Streams besides the compute lane's that may read them since they were fetched."""
    waited: set[int] = field(default_factory=set)
    """Compute streams that have waited for the newest fetch."""

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights)

    @property
    def stepped(self) -> bool:
        """Whether the optimizer's host step writes some of their host copies."""
        return any(w.changed is not None for w in self.weights)

    def written(self, *, ours: bool) -> bool:
        """Whether a weight of it was, of those whose host copies are ours, or the optimizer's."""
        return any(w.written() for w in self.weights if (w.changed is None) is ours)


def bind_layer(backend: Backend, name: str, weights: Sequence[Weight], steps: Sequence[Event]) -> LayerWeights:
    """Bind the operations of `hostward.schedule.weights`. `steps`: of the optimizer's buckets that write the copies."""
    here = [buffer for w in weights for buffer in w.here]
    pairs = [(device, host) for w in weights for device, (_, host) in zip(w.here, w.pieces, strict=True)]
    events: dict[str, Event] = {}

    def waits(op: str) -> list[Event]:
        return [events[wait] for wait in WEIGHT_OPS[op].waits]

    room = backend.mark(ROOM, WEIGHT_OPS["room"].lane, writes=here)
    events["room"] = room.done
    # A copy that goes out because somebody has written the weight comes before the next that comes in.
    out = [(h, d) for w in weights if w.changed is None for d, (_, h) in zip(w.here, w.pieces, strict=True)]
    made = backend.mark("offload/wait/weights/made", Lane.COMPUTE, writes=[device for _, device in out])
    save = backend.copy(Lane.D2H, out, name=f"offload/d2h/layer/{name}", waits=[made.done])
    saved = backend.mark("offload/wait/weights/saved", Lane.COMPUTE, waits=[save.done])
    fetch = backend.copy(
        WEIGHT_OPS["fetch"].lane, pairs, name=f"offload/h2d/layer/{name}", waits=[*waits("fetch"), *steps]
    )
    events["fetch"] = fetch.done
    arrive = backend.mark("offload/wait/weights/arrive", WEIGHT_OPS["arrive"].lane, reads=here, waits=waits("arrive"))
    retire = backend.retire(here, WEIGHT_OPS["empty"].lane, waits=waits("empty"))
    # What the compute lane holds comes before the memory goes.
    empty = backend.batch([retire, backend.mark("offload/retire/weights", Lane.COMPUTE)])
    return LayerWeights(
        name, list(weights), room, fetch, arrive, empty, backend.batch([made, save, saved]) if out else None
    )


class Residency:
    """Which layers' weights are on the device.

    Counts, in bytes: `fetched`, and of these `on_demand` (nobody had foreseen it); `held`: what could not go because
    somebody else holds it, each time.
    """

    def __init__(self, backend: Backend, layers: Sequence[LayerWeights | None], ahead: int) -> None:
        """`layers`: in order of use; None: its weights stay. `ahead`: so many are fetched when a step is over."""
        self.backend = backend
        self.layers = list(layers)
        self._ahead = ahead
        self.fetched = self.on_demand = self.held = 0
        self.pinned = False
        """Whoever is here stays."""
        self._read: list[int] = []
        """Layers that were fetched for the reader before."""
        self.expected: int | None = None
        """The layer that was fetched ahead last."""

    def prefetch(self, number: int) -> None:
        """Fetch a layer's weights, because they will be used next."""
        layer = self.layers[number] if 0 <= number < len(self.layers) else None
        if layer is not None:
            self.expected = number
            self._fetch(layer)

    def ensure(self, number: int) -> None:
        """What the compute lane does next may use these weights."""
        layer = self._here(number)
        if layer is None:
            return
        stream = self.backend.compute_key()
        if stream not in layer.waited:
            layer.arrive.issue()
            layer.waited.add(stream)

    def read(self, numbers: Sequence[int]) -> None:
        """So may what the caller does next, on whichever stream, outside of forward and backward. What was fetched for
        the reader before goes: a walk over all weights takes the memory of a few.
        """
        for number in self._read:
            if number not in numbers:
                self.empty(number)
        # Those that somebody holds a view of stay, and are asked again.
        self._read = [n for n in self._read if (layer := self.layers[n]) is not None and layer.resident]
        absent = [n for n in numbers if (layer := self.layers[n]) is not None and not layer.resident]
        self._read += absent
        stream = None if self.backend.at_compute() else self.backend.caller_stream()
        for number in numbers:
            if stream is None:
                self.ensure(number)
            else:
                with self.backend.on_compute():
                    layer = self._here(number)
                if layer is not None:
                    self.backend.hold(stream, [layer.fetch.done])
                    layer.read_on.add(stream)

    def hold(self, number: int, stream: torch.Stream) -> None:
        """So may what this stream does next; the compute lane does not wait. They stay until `release`."""
        layer = self._here(number)
        if layer is not None:
            layer.gather_held = self.backend.hold_timed(stream, [layer.fetch.done])
            layer.reading = True

    def awaited(self, number: int, gather: torch.Event | None) -> None:
        """The compute lane is about to wait for a gather that was held until these weights were there."""
        layer = self.layers[number]
        if layer is not None and layer.gather_held is not None:
            self.backend.wait_behind(GATHERED, layer.gather_held, gather)
            layer.gather_held = None

    def release(self, number: int) -> None:
        """The compute lane has waited for whoever read these weights, and needs them no more."""
        layer = self.layers[number]
        if layer is not None:
            layer.reading = False
            self.empty(number)

    def _here(self, number: int) -> LayerWeights | None:
        layer = self.layers[number]
        if layer is not None and (not layer.resident or layer.stale):
            self.on_demand += layer.nbytes
            self._fetch(layer)
        return layer

    def _fetch(self, layer: LayerWeights) -> None:
        if layer.resident and not layer.stale:
            return
        if self.backend.capturing():
            raise ModelError(
                f"weights of layer {layer.name} are fetched inside the capture of a CUDA graph",
                why="their copies belong to no graph",
                fix="detach() before the capture",
            )
        for weight in layer.weights:
            if local_of(weight.parameter).untyped_storage()._cdata != weight.storage._cdata:
                raise weight.replaced("the model was moved, or .data assigned, after attach()")
            if weight.changed is None and weight.parameter.requires_grad:
                raise ModelError(
                    f"frozen weight {weight.name!r} of an offloaded layer is to be trained now",
                    why="whatever steps it would write memory that comes and goes",
                    fix="detach(), change what is trained, and attach again",
                )
        if not layer.resident:
            with ExitStack() as undo:
                for weight in layer.weights:
                    undo.callback(weight.storage.resize_, 0)
                    weight.storage.resize_(weight.room_bytes)
                    if weight.padding is not None:
                        weight.padding.zero_()
                undo.pop_all()
            self._count(layer, 1)
            layer.stream = self.backend.compute_key()
        layer.room.issue()
        layer.fetch.issue()
        layer.waited.clear()
        layer.resident, layer.stale = True, False
        self.fetched += layer.nbytes

    def bring_all(self) -> None:
        """All come to the device, on the compute lane."""
        for number in range(len(self.layers)):
            self.ensure(number)

    def sweep(self, keep: Collection[int] = ()) -> None:
        """Let all go but these."""
        for number, layer in enumerate(self.layers):
            if layer is not None and layer.resident and number not in keep:
                self.empty(number)

    def empty(self, number: int) -> None:
        """Give the memory of a layer's weights back, unless somebody holds it or has written it."""
        layer = self.layers[number]
        if layer is None or not layer.resident or layer.reading or self.pinned:
            return
        held = [w for w in layer.weights if w.held()]
        if held:
            for weight in held:
                weight.exposed = True  # by way of `.data` it may be written, and torch's counters do not show that
            self.held += layer.nbytes
            return
        if layer.stream is not None and layer.stream != self.backend.compute_key():
            return  # the allocator would give it to who follows on that stream, and this one is still at it
        if layer.written(ours=True):
            self.save(layer)
        if layer.written(ours=False):
            return  # the optimizer follows at its next step
        for stream in layer.read_on:
            self.backend.wait_for(stream)
        layer.read_on.clear()
        layer.empty.issue()
        for weight in layer.weights:
            weight.storage.resize_(0)
        self._count(layer, -1)
        layer.resident = False

    def use_held(self) -> list[str]:
        """Names of the optimizer's weights that others hold memory of: these are here at once when a step is over."""
        names = []
        for number, layer in enumerate(self.layers):
            held = [] if layer is None or not layer.resident else [w for w in layer.weights if w.held()]
            if any(w.changed is not None for w in held):
                self.ensure(number)
                names += [w.name for w in held if w.changed is not None]
        return names

    def _count(self, layer: LayerWeights, sign: int) -> None:
        """Those that the optimizer has are in the ledger."""
        tracked = sum(w.nbytes for w in layer.weights if w.changed is not None)
        self.backend.ledger.held_bytes[Tier.DEVICE, "weights"] += sign * tracked

    def save(self, layer: LayerWeights) -> None:
        """Weights on the device have been written: take them over into our host copies."""
        if layer.save is not None:
            layer.save.issue()
        for weight in layer.weights:
            weight.saved()

    @contextmanager
    def present(self, number: int) -> Iterator[None]:
        """A layer's weights are on the device within; afterwards only if they were before."""
        layer = self.layers[number]
        was = layer is None or layer.resident
        self.ensure(number)
        try:
            yield
        finally:
            if not was:
                self.empty(number)

    # ---------------------------------------------------------------- the optimizer's step

    def before_step(self) -> None:
        """Host steps are about to write host copies: what still reads those comes before, by way of the compute
        lane.
        """
        for number, layer in enumerate(self.layers):
            if layer is not None and layer.resident and not layer.waited:
                self.ensure(number)
        self.sweep()

    def after_step(self) -> None:
        """Host copies are about to be written; fetches from now on wait for that."""
        for layer in self.layers:
            if layer is not None and layer.resident and layer.stepped:
                if layer.written(ours=True):
                    self.save(layer)  # all of the layer is fetched
                layer.stale = True
                self._fetch(layer)
        for number in range(self._ahead):
            self.prefetch(number)


def device_view(storage: torch.UntypedStorage, dtype: torch.dtype, start: int, numel: int, owner: str) -> Buffer:
    """`numel` elements of a storage from `start` on."""
    view = torch.empty(0, dtype=dtype, device=storage.device)
    view.set_(storage, start, (numel,), (1,))
    return Buffer(Tier.DEVICE, view, owner, resized=True)
