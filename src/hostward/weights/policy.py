"""Choose the weights to offload, allocate or look up their host copies, and report why others stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch

from hostward.core.placement import Placement
from hostward.errors import ConfigError, HostwardError, ModelError
from hostward.model.deferred_weights import drop_value, is_away, taken, value_of
from hostward.model.fence import plain_type
from hostward.model.parameters import ParamRecord, can_resize, local_of
from hostward.optim.weight_copies import WeightCopies
from hostward.runtime.backend import Backend, Buffer, Event, Tier
from hostward.schedule.ops import Lane
from hostward.weights.fsdp2_gather import GatheredLayers
from hostward.weights.residency import OWNER, LayerWeights, Weight, bind_layer, device_view

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Stays(StrEnum):
    """Name the reason for which a weight of an offloaded layer stays on the device."""

    SMALL = "it is small"
    SHARED = "it shares its memory with another one"
    PART = "it is a part of a larger buffer, as with Megatron's data parallelism: buffers are freed as a whole"
    LAYOUT = "it does not fill its memory, in order"
    MAPPED = "its memory is that of a file, of NumPy or of another process, which torch cannot free"
    DTYPE = "its dtype is none of bf16, fp16, fp32"
    TRAINED = "it is trained, and the host does not step it"
    WHOLE = "FSDP2 leaves it whole"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Hold the chosen weights of each layer (or FSDP2 group), in order of use; None: nothing is offloaded there."""

    layers: list[LayerWeights | None]
    """Weights by layer, or by FSDP2 group if the model is sharded."""
    kept_bytes: Mapping[Stays, int]
    buffers: list[Buffer]
    """Host copies that were allocated for the weights, not by the optimizer."""
    stepped: frozenset[str]
    """Weight names whose host copies the CPU optimizer step writes."""


def choose(
    model: torch.nn.Module,
    every_layer: Sequence[tuple[str, torch.nn.Module]],
    count: int,
    copies: WeightCopies | None,
    backend: Backend,
    min_elements: int,
    gathers: GatheredLayers | None,
) -> Chosen:
    """Choose the weights of the first `count` layers that can be offloaded, and fill their host copies.

    Args:
        copies: host copies that the optimizer has; None: there is no optimizer.
        gathers: FSDP2's groups of a sharded model.

    Raises:
        ConfigError: trained weights without a CPU optimizer step, or no weight can be offloaded. ModelError: a weight
            is of a subclass of Parameter or Tensor, or sharded by other code than FSDP2. MemoryLimitError: the host
            copies do not fit.
    """
    sharing, layers = count_sharing(model, [layer for _, layer in every_layer]), every_layer[:count]
    owned = {} if copies is None else copies.tracked
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
            if why is None and not can_resize(local_of(parameter).untyped_storage()):
                why = Stays.MAPPED  # a weight that `move` keeps on the CPU gets other memory
            if why is None and (tracked is not None or parameter.requires_grad):
                problem = _not_stepped_here(copies, tracked)
                if problem is not None:
                    blocking.append((name, problem))
                    blocked_bytes += parameter.numel() * parameter.element_size()
                    why = Stays.TRAINED
            if why is None:
                found[-1].append((name, parameter))
            else:
                kept[why] += local_of(parameter).nbytes
    leaving = {p for held in found for _, p in held}
    # Unsharded sizes, so that a rank without a part counts the weight. Only a rank with a part knows whether the CPU
    # steps it: if not all state is on the host, a rank without parts goes on here, and `attach` makes all ranks raise.
    leaving_bytes = sum(p.numel() * p.element_size() for p in leaving)
    # Trained adapters next to frozen weights may stay; otherwise the user meant to offload the trained weights.
    if blocking and blocked_bytes > leaving_bytes:
        raise _trained(*blocking[0])
    if not leaving_bytes:
        reasons = ", ".join(f"{why.value} ({nbytes:,} bytes)" for why, nbytes in kept.items())
        fix = "leave weights= out"
        if Stays.PART in kept:
            fix += ", and offload optimizer state and activations"
        if Stays.MAPPED in kept:
            fix += ", or copy what was loaded on the CPU: for p in model.parameters(): p.data = p.data.clone()"
        raise ConfigError("no weight can be offloaded", why=reasons or "the layers have none", fix=fix)
    for name, parameter in model.named_parameters():
        if is_away(parameter) and parameter not in leaving:
            raise ConfigError(
                f"weight {name!r} is still on the CPU, and is not among the weights that attach() offloads",
                why="hostward.move() kept it there",
                fix="give the same weights= to move() and attach()",
            )
    names, together = [path for path, _ in layers], found
    if gathers is not None:
        names, together = gathers.by_group(found)
    chosen = _bound(names, together, owned, copies, backend, kept)
    for weight in (w for held in chosen.layers if held is not None for w in held.weights if w.sharded):
        weight.holders = 0 if gathers is None else gathers.holders(weight.parameter)
    return chosen


def _bound(
    names: Sequence[str],
    found: Sequence[Sequence[tuple[str, torch.nn.Parameter]]],
    owned: Mapping[torch.nn.Parameter, ParamRecord],
    copies: WeightCopies | None,
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
            elif copies is not None:
                weight, events = _stepped(parameter, owned[parameter], copies)
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
                weight.storage.resize_(0)  # `here` has allocated device memory that is not needed yet
                taken(weight.parameter)
        made.append(layer)
    backend.synchronise()
    return Chosen(made, kept, buffers, frozenset(stepped))


def _allocated(backend: Backend, owning: Sequence[Sequence[torch.nn.Parameter]]) -> list[Buffer]:
    """Allocate one host buffer for each weight, in one slab for each layer; free all of them if one does not fit."""
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


def _stepped(parameter: torch.nn.Parameter, tracked: ParamRecord, copies: WeightCopies) -> tuple[Weight, list[Event]]:
    """Return a weight whose host copy the CPU optimizer step writes, and the events of that step."""
    storage, name = tracked.local.untyped_storage(), tracked.name
    parts, here, events = [], [], []
    for r, copy, stepped in copies.parts(name):
        parts.append((r.start, copy))
        here.append(device_view(storage, parameter.dtype, r.start, r.stop - r.start, OWNER))
        events.append(stepped)
    changed = partial(copies.changed, parameter)
    return Weight(name, parameter, tracked.local, storage, parts, here, changed), events


def count_sharing(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> Counter[int]:
    """Count the parameters and buffers stored in each storage, over all modules.

    Tensors of a module that several layers share count once for each layer.
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
    """Return the reason for which a weight cannot be offloaded; None: it can.

    Raises:
        ModelError: the weight is quantised, on another device, or sharded by other code than `gathers`.
    """
    local = local_of(parameter)
    if local is not parameter:
        if gathers is None or not gathers.has(parameter):
            raise ModelError(
                f"weight {name!r} is a {type(parameter).__name__} of no known FSDP2 module",
                why="parts are prefetched before FSDP2 gathers them; it is not known when other sharding reads them",
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
            f"weight {name!r} is on {parameter.device}, but copies are made for {device}",
            fix="move the model before attach()",
        )
    # Small trained weights are offloaded as well: one that stayed would need a separate copy in each step.
    if parameter.numel() < (1 if tracked else min_elements):
        return Stays.SMALL
    if parameter.dtype not in _DTYPES:
        return Stays.DTYPE
    storage = local.untyped_storage()
    if sharing[storage._cdata] > 1:
        return Stays.PART if local.is_contiguous() and storage.nbytes() > local.nbytes else Stays.SHARED
    if gathers is not None:
        return None if gathers.fills(parameter) else Stays.LAYOUT
    filled = is_away(parameter) or storage.nbytes() == parameter.nbytes
    return None if parameter.is_contiguous() and filled else Stays.LAYOUT


def _not_stepped_here(copies: WeightCopies | None, tracked: ParamRecord | None) -> str | None:
    """Return the reason for which a trained weight cannot be offloaded; None: it can."""
    if copies is None:
        return "no optimizer was given, and another optimizer does not know when the weight is offloaded"
    if tracked is None:
        return "the given optimizer does not have it"
    away = copies.placements(tracked.name) - {Placement.HOST}
    if away:
        return f"its optimizer state is placed {sorted(str(p) for p in away)[0]!r}, so the GPU steps it"
    return None


def _trained(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"weight {name!r} is trained, and cannot be offloaded",
        why=why,
        fix="train it with hostward.AdamW(model, offload_fraction=1.0, streamed_fraction=0.0) and give that to attach()"
        " (optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=1.0), freeze it, or leave "
        "weights= out",
    )
