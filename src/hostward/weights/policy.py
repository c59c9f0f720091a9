"""Which weights of which layers go to the host, where their copies lie, and why others stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from hostward.core.placement import Placement
from hostward.errors import ConfigError, HostwardError, ModelError
from hostward.model.deferred_weights import drop_value, is_away, taken, value_of
from hostward.model.fence import plain_type
from hostward.model.parameters import local_of
from hostward.optim.bucket_state import pieces
from hostward.runtime.backend import Backend, Buffer, Event, Tier
from hostward.schedule.ops import Lane
from hostward.weights.fsdp2_gather import GatheredLayers
from hostward.weights.residency import OWNER, LayerWeights, Weight, bind_layer, device_view

if TYPE_CHECKING:
    from hostward.model.parameters import Tracked
    from hostward.optim.adamw import AdamW

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Stays(StrEnum):
    """Why a weight of an offloaded layer stays on the device."""

    SMALL = "it is small"
    SHARED = "it shares its memory with another one"
    LAYOUT = "it does not fill its memory, in order"
    DTYPE = "its dtype is none of bf16, fp16, fp32"
    TRAINED = "it is trained, and the host does not step it"
    WHOLE = "FSDP2 leaves it whole"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What comes and goes together, in order of use, with what was found there; None: nothing of it leaves."""

    layers: list[LayerWeights | None]
    """Of a sharded model by what FSDP2 gathers together, else by layer."""
    kept_bytes: Mapping[Stays, int]
    buffers: list[Buffer]
    """Host copies that we made."""
    stepped: frozenset[str]
    """Names of weights that the optimizer's host step writes."""


def choose(
    model: torch.nn.Module,
    every_layer: Sequence[tuple[str, torch.nn.Module]],
    count: int,
    optimizer: AdamW | None,
    backend: Backend,
    min_elements: int,
    gathers: GatheredLayers | None,
) -> Chosen:
    """Weights of the first `count` layers that can leave, with their host copies filled. `gathers`: of a sharded model.

    Raises:
        ConfigError: they are trained, and the host does not step them; or none can leave. ModelError: a subclass of
            Parameter or of its tensor; one that is sharded, and not by FSDP2. MemoryLimitError: the copies do not fit.
    """
    sharing, layers = count_sharing(model, [layer for _, layer in every_layer]), every_layer[:count]
    owned = {} if optimizer is None else {t.parameter: t for t in optimizer._tracked}
    places = {} if optimizer is None else pieces(optimizer._states)
    kept: Counter[Stays] = Counter()
    found: list[list[tuple[str, torch.nn.Parameter]]] = []
    blocking: list[tuple[str, str]] = []
    blocked_bytes = 0
    for path, layer in layers:
        found.append([])
        for name, parameter in layer.named_parameters():
            name = f"{path}.{name}" if path else name
            tracked = owned.get(parameter)
            why = why_stays(name, parameter, sharing, tracked is not None, min_elements, backend.device, gathers)
            if why is None and not local_of(parameter).untyped_storage().resizable():
                why = Stays.LAYOUT  # memory of a file; a weight that `move` leaves behind gets other memory
            if why is None and (tracked is not None or parameter.requires_grad):
                problem = _not_stepped_here(optimizer, tracked, places)
                if problem is not None:
                    blocking.append((name, problem))
                    blocked_bytes += parameter.numel() * parameter.element_size()
                    why = Stays.TRAINED
            if why is None:
                found[-1].append((name, parameter))
            else:
                kept[why] += local_of(parameter).nbytes
    leaving = {p for held in found for _, p in held}
    # Of whole weights, so that a rank that has none of a weight counts it. Whether the host steps a part is known where
    # it is: with state that is not all on the host a rank without parts goes on here, and `attach` lets all refuse.
    leaving_bytes = sum(p.numel() * p.element_size() for p in leaving)
    # Adapters beside frozen weights may stay; weights that are themselves trained are what was meant.
    if blocking and blocked_bytes > leaving_bytes:
        raise _trained(*blocking[0])
    if not leaving_bytes:
        reasons = ", ".join(f"{why.value} ({nbytes:,} bytes)" for why, nbytes in kept.items())
        raise ConfigError(
            "no weight can leave the device", why=reasons or "the layers have none", fix="leave weights= out"
        )
    for name, parameter in model.named_parameters():
        if is_away(parameter) and parameter not in leaving:
            raise ConfigError(
                f"weight {name!r} waits on the CPU, and is none of those that attach() offloads",
                why="hostward.move() left it there",
                fix="give the same weights= to move() and attach()",
            )
    names, together = [path for path, _ in layers], found
    if gathers is not None:
        names, together = gathers.by_group(found)
    chosen = _bound(names, together, owned, optimizer, backend, kept)
    for weight in (w for held in chosen.layers if held is not None for w in held.weights if w.sharded):
        weight.holders = 0 if gathers is None else gathers.holders(weight.parameter)
    return chosen


def _bound(
    names: Sequence[str],
    found: Sequence[Sequence[tuple[str, torch.nn.Parameter]]],
    owned: Mapping[torch.nn.Parameter, Tracked],
    optimizer: AdamW | None,
    backend: Backend,
    kept: Mapping[Stays, int],
) -> Chosen:
    made: list[LayerWeights | None] = []
    stepped: set[str] = set()
    owning = [[p for _, p in held if p not in owned and local_of(p).numel()] for held in found]
    buffers = _allocated(backend, owning)
    rest = iter(buffers)
    for path, held, own in zip(names, found, owning, strict=True):
        ours = {p: next(rest) for p in own}
        weights, steps = [], dict[Event, None]()
        for name, parameter in held:
            if not local_of(parameter).numel():
                continue  # other ranks have all of it
            if parameter in ours:
                weights.append(_own(name, parameter, ours[parameter]))
            elif optimizer is not None:
                weight, events = _stepped(parameter, owned[parameter], optimizer)
                weights.append(weight)
                steps.update(dict.fromkeys(events))
                stepped.add(weight.name)
        layer = bind_layer(backend, path, weights, list(steps)) if weights else None
        own_here = [w for w in weights if w.parameter in ours and not is_away(w.parameter)]
        if own_here:
            out = [(w.pieces[0][1], w.here[0]) for w in own_here]
            written = backend.mark(
                "offload/wait/weights/made", Lane.COMPUTE, writes=[device for _, device in out]
            ).issue()
            backend.copy(Lane.D2H, out, name=f"offload/d2h/layer/{path}", waits=[written]).issue()
        if layer is not None and any(is_away(w.parameter) for w in weights):
            backend.synchronise()
            layer.resident = False
            for weight in weights:
                weight.storage.resize_(0)  # of those that wait, `here` has made room that nobody needs yet
                taken(weight.parameter)
        made.append(layer)
    backend.synchronise()
    return Chosen(made, kept, buffers, frozenset(stepped))


def _allocated(backend: Backend, owning: Sequence[Sequence[torch.nn.Parameter]]) -> list[Buffer]:
    """A buffer for each, and a slab for each layer; nothing stays allocated if there is no room for all."""
    buffers: list[Buffer] = []
    for own in owning:
        try:
            sizes = [local_of(p).nbytes for p in own]
            buffers += backend.allocate(Tier.HOST, sizes, torch.uint8, OWNER, pinned=True) if own else []
        except HostwardError:
            backend.free(buffers)
            raise
    return buffers


def _own(name: str, parameter: torch.nn.Parameter, copy: Buffer) -> Weight:
    local = local_of(parameter)
    storage = local.untyped_storage()
    here = [device_view(storage, torch.uint8, 0, local.nbytes, OWNER)]
    if is_away(parameter):
        copy.data.copy_(value_of(parameter).data.reshape(-1).view(torch.uint8))
        drop_value(parameter)
    weight = Weight(name, parameter, local, storage, [(0, copy)], here)
    weight.version = weight.counted
    return weight


def _stepped(parameter: torch.nn.Parameter, tracked: Tracked, optimizer: AdamW) -> tuple[Weight, list[Event]]:
    """A weight whose host copy is what the optimizer's host step writes, and the events of that."""
    storage, name = tracked.local.untyped_storage(), tracked.name
    parts, here, events = [], [], []
    for b, state in enumerate(optimizer._states):
        for i, r in enumerate(state.bucket.ranges):
            if r.name == name:
                parts.append((r.start, state.weights[i]))
                here.append(device_view(storage, parameter.dtype, r.start, r.stop - r.start, OWNER))
                events.append(optimizer._executor.step_event(b))

    def changed() -> bool:
        return not optimizer._watch.knows(tracked)

    return Weight(name, parameter, tracked.local, storage, parts, here, changed), events


def count_sharing(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> Counter[int]:
    """How many parameters and buffers, wherever they are held, lie in each storage; those of a module that several
    layers have count for each of them.
    """
    found: Counter[int] = Counter()
    layers_with = Counter(module for layer in layers for module in layer.modules())
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            local = None if tensor is None else local_of(tensor)
            if local is not None and local.layout is torch.strided and plain_type(local) in _PLAIN:
                found[local.untyped_storage()._cdata] += max(1, layers_with[module])
    return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def why_stays(
    name: str,
    parameter: torch.nn.Parameter,
    sharing: Counter[int],
    tracked: bool,
    min_elements: int,
    device: torch.device,
    gathers: GatheredLayers | None = None,
) -> Stays | None:
    """Why a weight cannot leave; None: it can. Raises ModelError for one that is quantised, elsewhere, or sharded in
    another way than by `gathers`.
    """
    local = local_of(parameter)
    if local is not parameter:
        if gathers is None or not gathers.has(parameter):
            raise ModelError(
                f"weight {name!r} is a {type(parameter).__name__} of no known FSDP2 module",
                why="a part of a weight arrives before FSDP2 gathers it, and nobody tells when others read one",
                fix="fully_shard the model first, or leave weights= out",
            )
    elif (kind := plain_type(parameter)) is not torch.nn.Parameter or type(parameter.data) is not torch.Tensor:
        raise ModelError(
            f"weight {name!r} is a {(type(parameter.data) if kind is torch.nn.Parameter else kind).__name__}",
            why="weights are moved as plain bytes of plain tensors",
            fix="offload the weights of a model that is not quantised, or leave weights= out",
        )
    elif gathers is not None:
        return Stays.WHOLE
    if plain_type(local) not in _PLAIN:
        raise ModelError(
            f"this rank's part of weight {name!r} is a {type(local).__name__}",
            why="weights are moved as plain bytes of plain tensors",
            fix="shard a model that is not quantised, or leave weights= out",
        )
    if parameter.device != device:
        raise ModelError(
            f"weight {name!r} lies on {parameter.device}, and copies go to {device}",
            fix="move the model before attach()",
        )
    # Small ones of a trained layer go as well: one that stayed would need a copy of its own in the step.
    if parameter.numel() < (1 if tracked else min_elements):
        return Stays.SMALL
    if parameter.dtype not in _DTYPES:
        return Stays.DTYPE
    storage = local.untyped_storage()
    if sharing[storage._cdata] > 1:
        return Stays.SHARED
    if gathers is not None:
        return None if gathers.fills(parameter) else Stays.LAYOUT
    filled = is_away(parameter) or storage.nbytes() == parameter.nbytes
    return None if parameter.is_contiguous() and filled else Stays.LAYOUT


def _not_stepped_here(
    optimizer: AdamW | None, tracked: Tracked | None, places: Mapping[str, Sequence[tuple[object, int, object]]]
) -> str | None:
    """Why a trained weight cannot have its one copy on the host; None: it can."""
    if optimizer is None:
        return "no optimizer was given, and whatever steps it would have to know that it comes and goes"
    if tracked is None:
        return "the optimizer that was given does not have it"
    placements = {getattr(state, "placement", None) for state, _, _ in places.get(tracked.name, ())}
    away = placements - {Placement.HOST}
    if away:
        return f"its optimizer state is placed {sorted(str(p) for p in away)[0]!r}, so that the device steps it"
    return None


def _trained(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"weight {name!r} is trained, and cannot be offloaded",
        why=why,
        fix="train it with hostward.AdamW(model, offload_fraction=1.0, streamed_fraction=0.0) and give that to attach()"
        " (optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=1.0), freeze it, or leave "
        "weights= out",
    )
