"""The torch code that turns a module, or named parameters, into what the optimizer tracks."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Tracked:
    """A parameter of the optimizer, and the module attributes that hold it (several when it is tied)."""

    name: str
    parameter: torch.nn.Parameter
    group: int
    homes: tuple[tuple[torch.nn.Module, str], ...] = ()
    path: str = ""
    """Its dotted path in the plain module, where that is known."""
    first: int = 0
    """Where the part that this process has begins in the whole parameter."""
    sharded: bool = field(init=False)

    def __post_init__(self) -> None:
        # A step asks for every parameter.
        object.__setattr__(self, "sharded", local_of(self.parameter) is not self.parameter)

    @property
    def local(self) -> torch.Tensor:
        """The elements that this process has, in a plain tensor with their version counter: the parameter itself, or
        its part here if it is sharded.
        """
        return local_of(self.parameter) if self.sharded else self.parameter

    def part_of(self, saved: torch.Tensor) -> torch.Tensor:
        """What this process has of a saved value of the whole parameter. Raises CheckpointError for one that is divided
        over ranks in another way.
        """
        if not self.sharded:
            return saved
        from hostward.distributed import fsdp2

        return fsdp2.part_of_saved(self.name, saved, self.parameter)

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """`part`, of the elements that this process has, as the parameter is: sharded in the same way, or plain."""
        if not self.sharded:
            return part
        from hostward.distributed import fsdp2

        return fsdp2.like(part, self.parameter)

    @property
    def layer(self) -> str:
        """The layer that uses it; "" for parameters of the module itself."""
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
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of torch's own, or a parameter over one."""
    return plain_type(tensor) in (torch.nn.Parameter, torch.Tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that this process has."""
    if is_plain(tensor) or not _is_sharded(tensor):
        return tensor
    from hostward.distributed import fsdp2

    return fsdp2.part_of(tensor)


def placed_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are divided over the same ranks in the same way, or neither is."""
    if is_plain(one) or is_plain(other):
        return is_plain(one) == is_plain(other)
    from hostward.distributed import fsdp2

    return fsdp2.is_sharded(one) and fsdp2.is_sharded(other) and fsdp2.same_placement(one, other)


def _is_sharded(tensor: torch.Tensor) -> bool:
    # A class that nobody has imported has no objects, and importing it takes longer than torch itself may.
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from hostward.distributed import fsdp2

    return fsdp2.is_sharded(tensor)


class Places:
    """Where the parameters of a module are: the modules that own them, and their paths in the plain module.

    Args:
        module: as it is trained, compiled or wrapped for data parallelism or not; None if it is not known.
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
        """(name, parameter) of all that has requires_grad, tied ones once."""
        named = [] if self.root is None else self.root.named_parameters()
        return [(plain_name(name), p) for name, p in named if p.requires_grad]

    def name(self, given: str, parameter: torch.Tensor) -> str:
        """The name by which state is kept: `given`, without what wrappers have put into it."""
        plain = plain_name(given)
        paths = self._paths.get(id(parameter), ())
        inner = plain.removeprefix(self._prefix)
        return inner if plain not in paths and inner in paths else plain

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The path of a parameter in the plain module; the first one of a tied parameter, None of somebody else's."""
        paths = self._paths.get(id(parameter))
        return paths[0] if paths else None

    def by_use(self, tracked: Sequence[Tracked]) -> list[Tracked]:
        """In order of use in forward, if they are given in order of their modules: FSDP2 reads what a module gathers
        when that is entered. What the root owns, be it a last norm alone, is needed before its first layer.
        """
        if self.sharding is None:
            return list(tracked)
        index = {id(t.parameter): i for i, t in enumerate(tracked)}
        first: dict[int, int] = {}
        for group, inside in self.sharding.gathered_together():
            entered = min((index[id(p)] for p in inside if id(p) in index), default=0)
            first |= {index[id(p)]: entered for p in group if id(p) in index}
        return [t for _, t in sorted(enumerate(tracked), key=lambda at: first.get(at[0], at[0]))]

    def tracked(self, name: str, parameter: torch.nn.Parameter, group: int) -> Tracked:
        """What the optimizer needs to know of a parameter of param_groups[group]."""
        homes, paths = self._homes.get(id(parameter), ()), self._paths.get(id(parameter), [""])
        first = 0
        if _is_sharded(parameter):
            from hostward.distributed import fsdp2

            first = fsdp2.layout_of(name, parameter).first
        return Tracked(name, parameter, group, tuple(homes), paths[0], first)


def groups_of(root: torch.nn.Module | None) -> fsdp2.Groups | None:
    """What FSDP2 made of the module; None if it was not called."""
    if root is None or "torch.distributed.fsdp" not in sys.modules:
        return None
    from hostward.distributed import fsdp2

    return fsdp2.Groups(root) or None


def _plain_root(module: torch.nn.Module | None) -> tuple[torch.nn.Module | None, str]:
    """A module without what it is wrapped in, and what data parallelism has put before its names."""
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
    """(path, owner, attribute, parameter) of every place that holds a parameter; a shared module by each path."""
    for path, owner in () if module is None else module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield plain_name(f"{path}.{attribute}" if path else attribute), owner, attribute, parameter


def paths_of(module: torch.nn.Module | None) -> dict[str, torch.nn.Parameter]:
    """All parameters of a module by path in the plain module, tied ones by each path."""
    return {path: parameter for path, _, _, parameter in _slots(module)}


def with_module(params: object, module: torch.nn.Module | None) -> tuple[object, torch.nn.Module | None]:
    """Parameters as `named_groups` takes them, and the module that holds them: the one that is given, or that of
    parameters without names, if there is one and no other. Raises ModelError.
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


def _listed(item: Any) -> Any:
    """A group whose parameters can be gone through twice; anything else as it is."""
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
            why="their order, which state is placed by, would be another in each process",
            fix="pass a list",
        )


def _owner(parameters: Sequence[torch.Tensor]) -> torch.nn.Module:
    """The outermost module that holds all of these, among all modules that are alive. Raises ModelError."""
    if len(_outermost(parameters)) > 1:
        gc.collect()  # a module that nobody uses any more may wait for this
    found = _outermost(parameters)
    if len(found) == 1:
        return found[0]
    why = "no module that is alive holds all of them, by which they could be named"
    if found:
        kinds = ", ".join(sorted(type(module).__name__ for module in found))
        why = f"{len(found)} modules hold all of them, and none of these holds the others: {kinds}"
    raise _nameless(why)


def _outermost(parameters: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """Modules within no other module that hold all of these; what wraps one and the same module counts once."""
    # Not isinstance(), which asks proxies of other libraries for a class.
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    inner = {id(part) for module in alive for part in module.__dict__.get("_modules", {}).values()}
    wanted = {id(p) for p in parameters}
    found = {}
    for module in alive:
        made = "_parameters" in module.__dict__  # another thread may be in the midst of making it
        if made and id(module) not in inner and wanted <= {id(p) for p in module.parameters()}:
            plain, _ = _plain_root(module)
            found[id(plain)] = module
    return list(found.values())


def named_groups(params: object, places: Places) -> list[dict[str, Any]]:
    """Parameter groups of (name, Parameter) pairs, as torch.optim.Optimizer takes them, in plain names.

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
            # torch asks for names in every group, and finds none in one without parameters.
            groups.append({**group, "params": _pairs(group["params"], places), "param_names": []})
    else:
        groups = [{"params": _pairs(given, places)}]
    if not any(group["params"] for group in groups):
        raise ModelError("no parameters to optimize", fix="pass a module with trainable parameters")
    return groups


def _pairs(params: Iterable[Any], places: Places) -> list[tuple[str, torch.nn.Parameter]]:
    pairs = []
    for item in params:
        if isinstance(item, torch.Tensor):
            name = places.name_of(item)
            if name is None:
                known = "the module that is given does not hold them" if places.module is not None else ""
                raise _nameless(known or "state is kept and saved by parameter name, never by position")
            pairs.append((name, cast("torch.nn.Parameter", item)))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            pairs.append((places.name(*item), item[1]))
        else:
            raise _nameless("state is kept and saved by parameter name, never by position")
    return pairs


def _nameless(why: str) -> ModelError:
    return ModelError(
        "parameters without names",
        why=why,
        fix="hostward.AdamW(model, ...), hostward.AdamW(model.named_parameters(), ...) or "
        "hostward.AdamW(model.parameters(), module=model, ...)",
    )


def check_trackable(name: str, parameter: torch.Tensor, device: torch.device) -> None:
    """Raises ModelError for a parameter that no exact step can be promised for."""
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
        problem = f"lies on {parameter.device}, the optimizer works for {device}"
    elif _may_overlap_itself(parameter.data):
        problem = "has elements that share memory"
    if problem:
        raise ModelError(
            f"parameter {name!r} {problem}",
            why="the exact step is defined for dense fp32, bf16 and fp16 tensors on one device",
            fix="build the model and move it to its device before the optimizer, or leave this parameter out",
        )


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: True unless each stride steps over all smaller ones."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 1
            reach += stride * (size - 1)
    return False


def check_no_overlap(tracked: Sequence[Tracked]) -> None:
    """Raises ModelError if two parameters share bytes: each would be updated from the other's result."""
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
