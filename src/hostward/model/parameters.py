"""Turn a module, or named parameters, into the parameter records that the optimizer tracks."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from hostward.core import inventory
from hostward.errors import ModelError
from hostward.model.fence import plain_type
from hostward.model.parameter_names import DATA_PARALLEL, plain_name
from hostward.runtime.backend import DTYPES

if TYPE_CHECKING:
    from hostward.distributed import fsdp2


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ParamRecord:
    """Record a parameter of the optimizer and the module attributes that hold it (several if it is tied)."""

    name: str
    parameter: torch.nn.Parameter
    group: int
    homes: tuple[tuple[torch.nn.Module, str], ...] = ()
    path: str = ""
    """Dotted path in the plain module, if known."""
    first: int = 0
    """First element of this process's part in the unsharded parameter."""
    sharded: bool = field(init=False)

    def __post_init__(self) -> None:
        # Stored, since each step reads this for every parameter.
        object.__setattr__(self, "sharded", local_of(self.parameter) is not self.parameter)

    @property
    def local(self) -> torch.Tensor:
        """Return the elements that this process has, as a plain tensor that has their version counter.

        This is the parameter itself, or this rank's part of a sharded one.
        """
        return local_of(self.parameter) if self.sharded else self.parameter

    def part_of(self, saved: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a saved value of the whole parameter.

        Raises:
            CheckpointError: the saved value is sharded in another way.
        """
        if not self.sharded:
            return saved
        from hostward.distributed import fsdp2

        return fsdp2.part_of_saved(self.name, saved, self.parameter)

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """Return `part`, the elements of this process, sharded as the parameter is; a plain tensor if it is not."""
        if not self.sharded:
            return part
        from hostward.distributed import fsdp2

        return fsdp2.like(part, self.parameter)

    @property
    def layer(self) -> str:
        """Return the name of the layer that uses the parameter; "" for parameters of the module itself."""
        return inventory.layer_of(self.path or self.name)

    @property
    def facts(self) -> inventory.Parameter:
        return inventory.Parameter(
            self.name,
            self.local.numel(),
            DTYPES[self.parameter.dtype],
            self.layer,
            self.group,
            self.first,
            self.parameter.shape[0] if self.parameter.dim() else 1,
            self.parameter.dim(),
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a plain torch.Tensor or Parameter, not a subclass."""
    return plain_type(tensor) in (torch.nn.Parameter, torch.Tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that this process has, as a plain tensor."""
    if is_plain(tensor) or not _is_sharded(tensor):
        return tensor
    from hostward.distributed import fsdp2

    return fsdp2.part_of(tensor)


def can_resize(storage: torch.UntypedStorage) -> bool:
    """Return whether torch can free a storage's memory and allocate it again.

    It cannot if the memory is that of a file or of NumPy, nor, on the CPU, if `share_memory_` or torch.multiprocessing
    has shared it: torch calls that resizable too, and crashes. On a GPU, where all memory counts as shared, a process
    that was sent a tensor keeps the memory as it was.
    """
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def sharding_of(tensor: torch.Tensor) -> object:
    """Return how a tensor is sharded over ranks, for `sharded_as`; None for a plain tensor."""
    if is_plain(tensor) or not _is_sharded(tensor):
        return None
    from hostward.distributed import fsdp2

    return fsdp2.sharding_of(tensor)


def sharded_as(part: torch.Tensor, sharding: object) -> torch.Tensor:
    """Return a tensor over `part`, the elements of this process, sharded as `sharding_of` returned."""
    if sharding is None:
        return part
    from hostward.distributed import fsdp2

    return fsdp2.sharded_as(part, sharding)


def placed_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both tensors are sharded over the same ranks in the same way, or neither is sharded."""
    if is_plain(one) or is_plain(other):
        return is_plain(one) == is_plain(other)
    from hostward.distributed import fsdp2

    return fsdp2.is_sharded(one) and fsdp2.is_sharded(other) and fsdp2.same_placement(one, other)


def _is_sharded(tensor: torch.Tensor) -> bool:
    # A class that has not been imported has no objects, and importing it may take longer than importing torch.
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from hostward.distributed import fsdp2

    return fsdp2.is_sharded(tensor)


class ParamRegistry:
    """Look up the modules that own each parameter, and its paths in the plain module.

    Args:
        module: the module that is trained, compiled or wrapped for data parallelism or not; None if it is not known.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self.module = module
        self.root, self._prefix = _plain_root(module)
        self.sharding = groups_of(self.root)
        if self.sharding is not None:
            self.sharding.reshard()
        self._homes: dict[int, dict[tuple[torch.nn.Module, str], None]] = {}
        self._paths: dict[int, list[str]] = {}
        for path, owner, attribute, parameter in _slots(self.root):
            self._homes.setdefault(id(parameter), {})[owner, attribute] = None
            self._paths.setdefault(id(parameter), []).append(path)

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return (name, parameter) of all parameters with requires_grad, tied ones once."""
        named = [] if self.root is None else self.root.named_parameters()
        return [(plain_name(name), p) for name, p in named if p.requires_grad]

    def name(self, given: str, parameter: torch.Tensor) -> str:
        """Return the name under which state is stored: `given` without the parts that wrappers inserted."""
        plain = plain_name(given)
        paths = self._paths.get(id(parameter), ())
        inner = plain.removeprefix(self._prefix)
        return inner if plain not in paths and inner in paths else plain

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return the path of a parameter in the plain module, the first one if it is tied; None if it has none."""
        paths = self._paths.get(id(parameter))
        return paths[0] if paths else None

    def is_tied(self, parameter: torch.Tensor) -> bool:
        """Return whether the module has the parameter in several places, as tied weights and shared layers are."""
        return len(self._paths.get(id(parameter), ())) > 1

    def by_use(self, tracked: Sequence[ParamRecord]) -> list[ParamRecord]:
        """Sort parameters by their first use in forward, which is taken to be the order of their modules.

        Groups list parameters by their options: those without weight decay are in all layers. FSDP2 gathers a group
        when its module is entered, so parameters of the root, such as the last layer norm, are needed before the first
        layer.
        """
        place = {known: i for i, known in enumerate(self._homes)}
        if len({t.group for t in tracked}) > 1:
            if all(id(t.parameter) in place for t in tracked):
                tracked = sorted(tracked, key=lambda t: place[id(t.parameter)])
            else:  # of no known module: each layer comes where a group first names it
                layers = {layer: i for i, layer in enumerate(dict.fromkeys(t.layer for t in tracked))}
                tracked = sorted(tracked, key=lambda t: layers[t.layer])
        if self.sharding is None:
            return list(tracked)
        index = {id(t.parameter): i for i, t in enumerate(tracked)}
        first: dict[int, int] = {}
        for group, inside in self.sharding.gathered_together():
            entered = min((index[id(p)] for p in inside if id(p) in index), default=0)
            first |= {index[id(p)]: entered for p in group if id(p) in index}
        return [t for _, t in sorted(enumerate(tracked), key=lambda at: first.get(at[0], at[0]))]

    def tracked(self, name: str, parameter: torch.nn.Parameter, group: int, first: int = 0) -> ParamRecord:
        """Return the record of a parameter of param_groups[group].

        `first`: of a plain tensor that is a part of a parameter, its first element there.
        """
        homes, paths = self._homes.get(id(parameter), ()), self._paths.get(id(parameter), [""])
        if _is_sharded(parameter):
            from hostward.distributed import fsdp2

            first = fsdp2.layout_of(name, parameter).first
        return ParamRecord(name, parameter, group, tuple(homes), paths[0], first)


def groups_of(root: torch.nn.Module | None) -> fsdp2.Groups | None:
    """Return FSDP2's groups of the module's parameters; None if the module is not sharded."""
    if root is None or "torch.distributed.fsdp" not in sys.modules:
        return None
    from hostward.distributed import fsdp2

    return fsdp2.Groups(root) or None


def _plain_root(module: torch.nn.Module | None) -> tuple[torch.nn.Module | None, str]:
    """Return a module without its wrappers, and the prefix that data parallelism adds to its names."""
    before = ""
    while module is not None:
        if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            before, module = before + DATA_PARALLEL, module.module
        elif list(module._modules) == ["_orig_mod"]:
            module = module._modules["_orig_mod"]
        else:
            break
    return module, before


def _slots(
    module: torch.nn.Module | None,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter]]:
    """Yield (path, owner, attribute, parameter) of every attribute that holds a parameter, for each path to it."""
    for path, owner in () if module is None else module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield plain_name(f"{path}.{attribute}" if path else attribute), owner, attribute, parameter


def paths_of(module: torch.nn.Module | None) -> dict[str, torch.nn.Parameter]:
    """Return all parameters of a module by path in the plain module, tied ones by each path."""
    return {path: parameter for path, _, _, parameter in _slots(module)}


def with_module(params: object, module: torch.nn.Module | None) -> tuple[object, torch.nn.Module | None]:
    """Return parameters as `named_groups` takes them, and the module that holds them.

    The module is the given one, or the only one that holds parameters without names. Raises ModelError.
    """
    if isinstance(params, torch.nn.Module):
        return params, params
    if isinstance(params, torch.Tensor):
        params = [params]
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise ModelError(f"cannot take parameters from {type(params).__name__}", fix="pass the module")
    _require_order(params)
    given = [_listed(item) for item in params]
    bare = [p for item in given for p in (item.get("params", ()) if isinstance(item, Mapping) else [item])]
    bare = [p for p in bare if isinstance(p, torch.Tensor)]
    return given, module if module is not None or not bare else _owner(bare)


def frozen_in(params: object) -> frozenset[int]:
    """Return the ids of the parameters without requires_grad, if `params` is a module; no others are left out of it."""
    parameters = params.parameters() if isinstance(params, torch.nn.Module) else ()
    return frozenset(id(p) for p in parameters if not p.requires_grad)


def _listed(item: Any) -> Any:
    """Return a group with its parameters in a list, so that they can be read twice; other items unchanged."""
    if not isinstance(item, Mapping) or "params" not in item:
        return item
    held = item["params"]
    if isinstance(held, (torch.Tensor, str)) or not isinstance(held, Iterable):
        held = [held]
    _require_order(held)
    return {**item, "params": list(held)}


def _require_order(params: object) -> None:
    if isinstance(params, (set, frozenset)):
        raise ModelError(
            "parameters in a set",
            why="state is placed in the order of the parameters, and a set has another order in each process",
            fix="pass a list",
        )


def _owner(parameters: Sequence[torch.Tensor]) -> torch.nn.Module:
    """Find the outermost live module that holds all of these parameters. Raises ModelError."""
    if len(_outermost(parameters)) > 1:
        gc.collect()  # modules that are not referenced any more may be part of a cycle
    found = _outermost(parameters)
    if len(found) == 1:
        return found[0]
    why = "no live module holds all of them, so they cannot be named"
    if found:
        kinds = ", ".join(sorted(type(module).__name__ for module in found))
        why = f"{len(found)} modules hold all of them, and none of these holds the others: {kinds}"
    raise _nameless(why)


def _outermost(parameters: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the outermost modules that hold all of these parameters; several wrappers of one module count once."""
    # Not isinstance(), which would call proxy objects of other libraries.
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    inner = {id(part) for module in alive for part in module.__dict__.get("_modules", {}).values()}
    wanted = {id(p) for p in parameters}
    found = {}
    for module in alive:
        made = "_parameters" in module.__dict__  # another thread may be constructing it
        if made and id(module) not in inner and wanted <= {id(p) for p in module.parameters()}:
            plain, _ = _plain_root(module)
            found[id(plain)] = module
    return list(found.values())


def named_groups(params: object, places: ParamRegistry) -> list[dict[str, Any]]:
    """Return parameter groups of (plain name, Parameter) pairs, as torch.optim.Optimizer takes them.

    `params` is a module (its trainable parameters), an iterable of (name, Parameter) or of parameters of the module of
    `places`, or a list of group dicts whose "params" is such an iterable. Raises ModelError for parameters without
    names.
    """
    if isinstance(params, torch.nn.Module):
        trainable = places.trainable()
        if not trainable:
            raise ModelError("the module has no trainable parameter", fix="set requires_grad on what is to be trained")
        return [{"params": trainable}]
    if not isinstance(params, Iterable):
        raise ModelError(f"cannot take parameters from {type(params).__name__}", fix="pass the module")
    given = list(params)
    if given and all(isinstance(item, Mapping) for item in given):
        groups = []
        for group in map(_listed, given):
            if "params" not in group:
                raise ModelError("a parameter group without 'params'", fix='{"params": [(name, parameter), ...], ...}')
            # torch requires names in every group, and finds none in a group without parameters.
            groups.append({**group, "params": _pairs(group["params"], places), "param_names": []})
    else:
        groups = [{"params": _pairs(given, places)}]
    if not any(group["params"] for group in groups):
        raise ModelError("no parameters to optimize", fix="pass a module with trainable parameters")
    return groups


def _pairs(params: Iterable[Any], places: ParamRegistry) -> list[tuple[str, torch.nn.Parameter]]:
    pairs = []
    for item in params:
        if isinstance(item, torch.Tensor):
            name = places.name_of(item)
            if name is None:
                raise _nameless("state is stored and saved by parameter name, never by position", places.module)
            pairs.append((name, cast("torch.nn.Parameter", item)))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            pairs.append((places.name(*item), item[1]))
        else:
            raise _nameless("state is stored and saved by parameter name, never by position")
    return pairs


def _nameless(why: str, module: torch.nn.Module | None = None) -> ModelError:
    if module is not None:
        return ModelError(
            f"parameters without names in the given {type(module).__name__}",
            why="they are those of another model",
            fix="make the optimizer from the parameters of the model that is trained: of one model, not of a copy",
        )
    return ModelError(
        "parameters without names",
        why=why,
        fix="hostward.AdamW(model, ...), hostward.AdamW(model.named_parameters(), ...) or "
        "hostward.AdamW(model.parameters(), module=model, ...)",
    )


def check_trackable(name: str, parameter: torch.Tensor, device: torch.device) -> None:
    """Raise ModelError for a parameter for which the exact step is not defined."""
    problem = None
    parameter = local_of(parameter)
    if isinstance(parameter, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        problem = "has no shape yet"
    elif not is_plain(parameter):
        problem = f"is a {type(parameter).__name__}, a tensor subclass"
    elif getattr(parameter, "_fsdp_flattened", False):
        problem = "belongs to FSDP, which shards it"
    elif parameter.is_inference():
        problem = "was made in torch.inference_mode(), and can never be trained"
    elif torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        problem = "is a tensor of a functional transform, which stands for others"
    elif parameter.layout is not torch.strided:
        problem = f"has layout {parameter.layout}"
    elif parameter.dtype not in DTYPES:
        problem = f"has dtype {parameter.dtype}"
    elif parameter.device != device:
        problem = f"is on {parameter.device}, but the optimizer is for {device}"
    elif _may_overlap_itself(parameter.data):
        problem = "has elements that share memory"
    if problem:
        raise ModelError(
            f"parameter {name!r} {problem}",
            why="the exact step is defined for dense fp32, bf16 and fp16 tensors on one device",
            fix="build the model and move it to its device before the optimizer, or leave this parameter out",
        )


def check_present(name: str, parameter: torch.Tensor) -> None:
    """Raise ModelError for a parameter whose memory another optimizer or attachment has freed."""
    parameter = local_of(parameter)
    if parameter.numel() and not parameter.untyped_storage().nbytes():
        raise ModelError(
            f"parameter {name!r} has no memory on {parameter.device}",
            why="hostward.attach(weights=...) has offloaded it, or it sleeps: another optimizer's sleep() was called",
            fix="detach() that attachment, or wake() that optimizer, before another one is made",
        )


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory: True unless each stride exceeds the extent of smaller ones."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 1
            reach += stride * (size - 1)
    return False


def check_no_overlap(tracked: Sequence[ParamRecord]) -> None:
    """Raise ModelError if two parameters share bytes: each would be updated from the other's result."""

    spans = []
    for t in tracked:
        if t.local.untyped_storage().nbytes():
            p = t.local.data
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size(), t.name, p.untyped_storage()))
    spans.sort(key=lambda s: s[0])
    for (_, end, first, a), (start, _, second, b) in itertools.pairwise(spans):
        if start < end and a.data_ptr() == b.data_ptr():
            raise ModelError(
                f"parameters {first!r} and {second!r} share memory",
                why="tied weights must be one Parameter object, so that they have one gradient and one state",
                fix=f"assign the same Parameter to both, e.g. {second} = {first}",
            )
