"""Keep track of which layers' weights are on the device; each weight has one host copy.

The storage object of a weight stays, but its bytes are allocated and freed (`resize_`), so that parameters, their views
in graphs and other references to them stay valid. A storage that other code holds is not freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from hostward.errors import ModelError
from hostward.model.autograd import is_saved
from hostward.model.parameters import can_resize, local_of
from hostward.model.transforms import untransformed
from hostward.optim.bucket_lifecycle import Asleep, Kinds
from hostward.runtime.backend import Backend, Batch, Buffer, Event, Held, Tier, Work
from hostward.schedule.ops import Lane
from hostward.schedule.weights import GATHERED, ROOM, WEIGHT_OPS

OWNER = "offloaded weights"


@dataclass(slots=True, eq=False)
class Weight:
    """Describe one offloaded weight.

    `pieces`: (first element, host buffer); together they cover the weight. `version`: version of the host copy.
    """

    name: str
    parameter: torch.nn.Parameter
    local: torch.Tensor
    """Offloaded tensor: this rank's part of a sharded parameter, else the parameter itself."""
    storage: torch.UntypedStorage
    """Storage that `local` uses."""
    pieces: list[tuple[int, Buffer]]
    here: list[Buffer]
    """Device buffers over the weight's storage, one for each piece."""
    changed: Callable[[], bool] | None = None
    """Returns whether the weight was written and the optimizer has not noticed yet. None: the host copy is ours."""
    version: int = 0
    handed: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Version witnesses of each `.data` that other code obtained: a tensor with its version counter, and its value."""
    exposed: bool = False
    """True if other code obtained the address, so that the weight may have been written."""
    holders: int = 1
    """Tensors that always use its storage: the parameter, or FSDP2's tensors of a part."""

    room_bytes: int = field(init=False)
    """Storage size in bytes."""
    padding: torch.Tensor | None = field(init=False)
    """Zeros that FSDP2 stores after a part."""

    def __post_init__(self) -> None:
        self.room_bytes = self.storage.nbytes() or self.nbytes  # a weight kept on the CPU has no bytes yet
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
        """Return the number of writes so far, from torch's version counters."""
        return self.local._version + (self.parameter._version if self.sharded else 0)

    def held(self) -> bool:
        """Return whether other code holds its memory: a view, a graph that saved it without our hooks, a process."""
        # The parameter, the storage's Python object and our tensors over it.
        ours = 1 + len(self.here) + (self.padding is not None)
        if torch._C._storage_Use_Count(self.storage._cdata) > self.holders + ours:
            return True
        if not can_resize(self.storage):
            return True
        return is_saved(self.parameter)

    def require_in(self, module: torch.nn.Module, name: str) -> None:
        """Raise ModelError if a module has another parameter in its place now."""
        if module._parameters.get(name) is not self.parameter:
            raise self.replaced(f"{type(module).__name__} has another parameter as its {name} since attach()")

    def replaced(self, why: str) -> ModelError:
        """Return the error for a replaced parameter."""
        what = f"weight {self.name!r} of an offloaded layer was replaced"
        return ModelError(what, why=why, fix="detach(), change the model, and attach again")

    def has_other_memory(self) -> ModelError:
        """Return the error for a parameter whose storage is another one than at `attach`."""
        return self.replaced("the model was moved, or .data assigned, after attach()")

    def written(self) -> bool:
        """Return whether the weight on the device may differ from its host copy."""
        if self.changed is not None:
            return self.changed()
        moved = any(witness._version != version for witness, version in self.handed)
        return self.counted != self.version or self.exposed or moved

    def saved(self) -> None:
        """Note that our host copy equals the weight on the device now."""
        self.version, self.exposed = self.counted, False
        self.handed = [(witness, witness._version) for witness, _ in self.handed] if self.held() else []

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value of this rank's elements, sharded as the parameter is; a plain tensor if it is not."""
        if not self.sharded:
            return value
        from hostward.distributed import fsdp2

        return fsdp2.like(value, self.parameter)

    def host_value(self) -> torch.Tensor:
        """Return a copy of the host copy, of this rank's part if sharded. All streams must be idle."""
        local = self.local
        copied = torch.empty(local.numel(), dtype=local.dtype, device="cpu")
        for start, buffer in self.pieces:
            data = buffer.data.view(local.dtype)
            copied[start : start + data.numel()].copy_(data)
        return copied.view(local.shape)


@dataclass(slots=True, eq=False)
class LayerWeights:
    """Hold the weights of one layer (or FSDP2 group), which move together, and their bound operations."""

    name: str
    weights: list[Weight]
    room: Work
    fetch: Work
    arrive: Work
    empty: Work | Batch
    save: Work | Batch | None
    """Copies to those host copies that are ours."""
    resident: bool = True
    stale: bool = False
    """True if a step has written the host copy since the last fetch."""
    reading: bool = False
    """True while a gather may still read them on a stream that the compute stream has not waited for."""
    gather_held: Held | None = None
    """Timed wait for them by a gather; None: not measured, or the compute stream has waited for the gather."""
    stream: int | None = None
    """Compute stream that allocated the memory; None: it was allocated before `attach`."""
    read_on: set[torch.Stream] = field(default_factory=set)
    """Streams besides the compute stream that may read them since the last fetch."""
    waited: set[int] = field(default_factory=set)
    """Compute streams that have waited for the newest fetch."""

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights)

    @property
    def stepped(self) -> bool:
        """Return whether the CPU optimizer step writes some of their host copies."""
        return any(w.changed is not None for w in self.weights)

    def written(self, *, ours: bool) -> bool:
        """Return whether a weight was written on the device; `ours`: look at weights whose host copies are ours."""
        return any(w.written() for w in self.weights if (w.changed is None) is ours)


def bind_layer(backend: Backend, name: str, weights: Sequence[Weight], steps: Sequence[Event]) -> LayerWeights:
    """Bind the operations of `hostward.schedule.weights` for one layer.

    `steps`: events of the optimizer's buckets that write the host copies.
    """
    here = [buffer for w in weights for buffer in w.here]
    pairs = [(device, host) for w in weights for device, (_, host) in zip(w.here, w.pieces, strict=True)]
    events: dict[str, Event] = {}

    def waits(op: str) -> list[Event]:
        return [events[wait] for wait in WEIGHT_OPS[op].waits]

    room = backend.mark(ROOM, WEIGHT_OPS["room"].lane, writes=here)
    events["room"] = room.done
    # A copy to the host, after other code has written the weight, precedes the next copy to the device.
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
    # Work that the compute stream holds completes before the memory is freed.
    empty = backend.batch([retire, backend.mark("offload/retire/weights", Lane.COMPUTE)])
    return LayerWeights(
        name, list(weights), room, fetch, arrive, empty, backend.batch([made, save, saved]) if out else None
    )


class Residency:
    """Reload and free layers' weights, and keep track of those on the device.

    Counters, in bytes: `fetched`; `on_demand`, the part of it that was not prefetched (a miss); `held`: not freed
    because other code holds it, added up over all attempts.
    """

    def __init__(
        self, backend: Backend, layers: Sequence[LayerWeights | None], ahead: int, asleep: Asleep | None = None
    ) -> None:
        """`layers`: in order of use; None: its weights stay. `ahead`: layers to prefetch after each step. `asleep`:
        what the optimizer has moved to the host; None: no optimizer can.
        """
        self.backend = backend
        self._asleep = Asleep() if asleep is None else asleep
        self.layers = list(layers)
        self._ahead = ahead
        self.fetched = self.on_demand = self.held = 0
        self.pinned = False
        """True while no weights may be freed."""
        self.freed: Callable[[tuple[int]], None] = _tell_nobody
        """Called with the number of a layer whose weights have just been freed: whoever reads them has to wait."""
        self._read: list[int] = []
        """Layers that were fetched for the last `read`."""
        self.expected: int | None = None
        """Layer that was prefetched last."""

    @untransformed
    def prefetch(self, number: int) -> None:
        """Prefetch a layer's weights, because they will be used next."""
        layer = self.layers[number] if 0 <= number < len(self.layers) else None
        if layer is not None:
            self.expected = number
            self._fetch(layer)

    @untransformed
    def ensure(self, number: int) -> None:
        """Make the compute stream wait for a layer's weights, and fetch them if they are not on the device.

        The layer's own operations follow, and no later `read` of others frees what these use.
        """
        if number in self._read:
            self._read.remove(number)
        self._await(number)

    def _await(self, number: int) -> None:
        layer = self._here(number)
        if layer is None:
            return
        stream = self.backend.compute_key()
        if stream not in layer.waited:
            layer.arrive.issue()
            layer.waited.add(stream)

    @untransformed
    def read(self, numbers: Sequence[int]) -> None:
        """Make the caller's stream wait for weights that are read outside of forward and backward.

        Weights fetched for the last such read are freed, so iterating over all weights needs memory for a few.
        """
        for number in self._read:
            if number not in numbers:
                self.empty(number)
        # Weights of which other code holds a view stay, and are tried again next time.
        self._read = [n for n in self._read if (layer := self.layers[n]) is not None and layer.resident]
        absent = [n for n in numbers if (layer := self.layers[n]) is not None and not layer.resident]
        self._read += absent
        stream = None if self.backend.at_compute() else self.backend.caller_stream()
        for number in numbers:
            if stream is None:
                self._await(number)
            else:
                with self.backend.on_compute():
                    layer = self._here(number)
                if layer is not None:
                    self.backend.wait_on_stream(stream, [layer.fetch.done])
                    layer.read_on.add(stream)

    def wait_on_stream(self, number: int, stream: torch.Stream) -> None:
        """Make another stream wait for a layer's weights, not the compute stream; they stay until `release`."""
        layer = self._here(number)
        if layer is not None:
            layer.gather_held = self.backend.wait_on_stream_timed(stream, [layer.fetch.done])
            layer.reading = True

    def awaited(self, number: int, gather: torch.Event | None) -> None:
        """Measure the wait of the compute stream for a gather that had to wait for these weights."""
        layer = self.layers[number]
        if layer is not None and layer.gather_held is not None:
            self.backend.wait_behind(GATHERED, layer.gather_held, gather)
            layer.gather_held = None

    def release(self, number: int) -> None:
        """Free weights after the compute stream has waited for the gather that read them."""
        layer = self.layers[number]
        if layer is not None:
            layer.reading = False
            self.empty(number)

    def _here(self, number: int) -> LayerWeights | None:
        layer = self.layers[number]
        if layer is None:
            return None
        if torch.is_grad_enabled():  # without, a weight that requires a gradient gets none
            self._require_frozen(layer)
        if not layer.resident or layer.stale:
            self.on_demand += layer.nbytes
            self._fetch(layer)
        return layer

    @staticmethod
    def _require_frozen(layer: LayerWeights) -> None:
        for weight in layer.weights:
            if weight.changed is None and weight.parameter.requires_grad:
                raise ModelError(
                    f"frozen weight {weight.name!r} of an offloaded layer is to be trained now",
                    why="its optimizer would write memory that is freed and allocated again",
                    fix="detach(), change what is trained, and attach again",
                )

    def _fetch(self, layer: LayerWeights) -> None:
        self._asleep.require(Kinds.WEIGHTS, f"layer {layer.name!r} is used")
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
                raise weight.has_other_memory()
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

    @untransformed
    def bring_all(self) -> None:
        """Reload all weights, and make the compute stream wait for them."""
        for number in range(len(self.layers)):
            self.ensure(number)

    def sweep(self, keep: Collection[int] = ()) -> None:
        """Free the weights of all layers but these."""
        for number, layer in enumerate(self.layers):
            if layer is not None and layer.resident and number not in keep:
                self.empty(number)

    def empty(self, number: int) -> None:
        """Free the memory of a layer's weights, unless other code holds it or the optimizer must read it first."""
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
            return  # the allocator would reuse it on that stream, while this stream still works on it
        if layer.written(ours=True):
            self.save(layer)
        if layer.written(ours=False):
            return  # the optimizer updates its copy at the next step
        for stream in layer.read_on:
            self.backend.wait_for(stream)
        layer.read_on.clear()
        layer.empty.issue()
        self._count(layer, -1)
        layer.resident = False  # first: Ctrl-C from here on leaves weights that are fetched again
        self.freed((number,))
        for weight in layer.weights:
            weight.storage.resize_(0)

    def use_held(self) -> list[str]:
        """Reload at once, after a step, the optimizer's weights whose memory other code holds; return their names."""
        names = []
        for number, layer in enumerate(self.layers):
            held = [] if layer is None or not layer.resident else [w for w in layer.weights if w.held()]
            if any(w.changed is not None for w in held):
                self.ensure(number)
                names += [w.name for w in held if w.changed is not None]
        return names

    def _count(self, layer: LayerWeights, sign: int) -> None:
        """Add the weights that the optimizer tracks to the ledger (`sign` 1), or take them out (-1)."""
        tracked = sum(w.nbytes for w in layer.weights if w.changed is not None)
        self.backend.ledger.held_bytes[Tier.DEVICE, "weights"] += sign * tracked

    def save(self, layer: LayerWeights) -> None:
        """Copy weights that were written on the device to our host copies."""
        if layer.save is not None:
            layer.save.issue()
        for weight in layer.weights:
            weight.saved()

    @contextmanager
    def present(self, number: int) -> Iterator[None]:
        """Keep a layer's weights on the device within the block; afterwards only if they were before."""
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
        """Order pending reads of host copies before the CPU optimizer step, by a wait of the compute stream."""
        for number, layer in enumerate(self.layers):
            if layer is not None and layer.resident and not layer.waited:
                self.ensure(number)
        self.sweep()

    def after_step(self) -> None:
        """Fetch again the weights whose host copies the step writes, after it, and prefetch the first layers."""
        for layer in self.layers:
            if layer is not None and layer.resident and layer.stepped:
                if layer.written(ours=True):
                    self.save(layer)  # all of the layer is fetched
                layer.stale = True
                self._fetch(layer)
        for number in range(self._ahead):
            self.prefetch(number)


def _tell_nobody(_: tuple[int]) -> None:
    """Stand for whoever wants to know which weights were freed."""


def device_view(storage: torch.UntypedStorage, dtype: torch.dtype, start: int, numel: int, owner: str) -> Buffer:
    """Return a device buffer over `numel` elements of a storage, from element `start` on."""

    view = torch.empty(0, dtype=dtype, device=storage.device)
    view.set_(storage, start, (numel,), (1,))
    return Buffer(Tier.DEVICE, view, owner, resized=True)
