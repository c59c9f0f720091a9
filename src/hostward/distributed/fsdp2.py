"""Support models sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): their parts, hooks and ranks.

Every use of private parts of FSDP2 and of DTensor is in this file. Tested with torch 2.13; the sources of 2.11 agree.

Glossary:
    part    the elements of a parameter that this rank has, without padding; of some parameters it may have none
    group   parameters that FSDP2 gathers before use and whose gradients it reduces together
    gather  a group's parts of all ranks become whole parameters; its copy-in reads this rank's parts
"""

from __future__ import annotations

import math
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hostward.errors import CheckpointError, ConfigError, ModelError
from hostward.runtime.global_norm import shared_chunks


@dataclass(frozen=True, slots=True)
class Split:
    """Describes a range of rows along dimension `dim`, divided in `n_parts`, of which this rank has part `index`."""

    dim: int
    n_parts: int
    index: int

    def cut(self, first: int, rows: int, index: int) -> tuple[int, int]:
        """Return the first row and number of rows of a part."""
        each = -(-rows // self.n_parts)
        start, stop = min(index * each, rows), min((index + 1) * each, rows)
        return first + start, stop - start


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes how a parameter is sharded: by all `splits`, one within the other; none: it is replicated."""

    shape: tuple[int, ...]
    splits: tuple[Split, ...]

    def rows(self, dim: int) -> tuple[int, int]:
        """Return the first row of this rank's part along a dimension, and its number of rows."""
        first, rows = 0, self.shape[dim]
        for split in self.splits:
            if split.dim == dim:
                first, rows = split.cut(first, rows, split.index)
        return first, rows

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of an unsharded tensor."""
        for dim in dict.fromkeys(split.dim for split in self.splits):
            whole = whole.narrow(dim, *self.rows(dim))
        return whole

    @property
    def is_run(self) -> bool:
        """Return whether the part is one contiguous run of the flattened parameter."""
        return all(split.dim == 0 for split in self.splits)

    @property
    def first(self) -> int:
        """Return the index in the flattened parameter at which the part begins.

        The result is 0 for parts that are not one run of it; their chunks are counted in the part.
        """
        return self.rows(0)[0] * math.prod(self.shape[1:]) if self.shape and self.is_run else 0

    def cuts_at_multiples_of(self, elements: int) -> bool:
        """Return whether the ranks' parts consist of runs that begin at multiples of so many of its elements.

        The answer is the same on all ranks.
        """
        for dim in {split.dim for split in self.splits}:
            parts = [(0, self.shape[dim])]
            for split in (s for s in self.splits if s.dim == dim):
                parts = [split.cut(*part, index) for part in parts for index in range(split.n_parts)]
            row = math.prod(self.shape[dim + 1 :])
            inner_cuts = {first for first, _ in parts if first < self.shape[dim]} | (
                {self.shape[dim]} if dim else set()
            )
            if any(first * row % elements for first in inner_cuts):
                return False
        return True

    def shared_chunks(self) -> list[int]:
        """Return the norm chunks that several ranks share, as ascending indices in the parameter."""
        if not self.is_run or not self.splits:
            return []
        parts = [(0, self.shape[0])]
        for split in self.splits:
            parts = [split.cut(*part, index) for part in parts for index in range(split.n_parts)]
        numel, row = math.prod(self.shape), math.prod(self.shape[1:])
        return shared_chunks((first * row for first, _ in parts), numel)


# Methods of FSDP2's objects that report their calls.


T = TypeVar("T")


class Told(ABC, Generic[T]):
    """Calls a listener before and after a method of an object; both are held weakly."""

    def __init__(self, to: weakref.ref[T], owner: Any) -> None:
        self.to = to
        self._owner = weakref.ref(owner)

    def before(self, *args: Any, **options: Any) -> None:
        to, owner = self.to(), self._owner()
        if to is not None and owner is not None:
            self._before(to, owner, *args, **options)

    def after(self) -> None:
        to, owner = self.to(), self._owner()
        if to is not None and owner is not None:
            self._after(to, owner)

    @abstractmethod
    def _before(self, to: T, owner: Any, /, *args: Any, **options: Any) -> None:
        """Called before the method, with its arguments."""

    def _after(self, to: T, owner: Any, /) -> None:
        """Called after the method."""


class _Announced:
    """Replaces a method: calls its listeners, the method, and the listeners again."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.told: list[Told[Any]] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        told = tuple(self.told)
        for each in told:
            each.before(*args, **options)
        returned = self._method(*args, **options)
        for each in told:
            each.after()
        return returned


def announce(owner: Any, method: str, told: Told[Any]) -> Callable[[], None]:
    """Let an object's method report its calls; return a function that ends this."""
    announced = owner.__dict__.get(method)
    if not isinstance(announced, _Announced):
        announced = owner.__dict__[method] = _Announced(getattr(owner, method))
    announced.told = [t for t in announced.told if t.to() is not None] + [told]

    def remove() -> None:
        if told in announced.told:
            announced.told.remove(told)

    return remove


_LOCAL: Any = DTensor._local_tensor
"""Slot in which a DTensor stores this rank's part."""

_FSDP2 = "torch.distributed.fsdp."

KNOWN_VERSIONS = "2.11 to 2.13"
_USED_OF_GROUPS = (
    "unshard", "wait_for_unshard", "post_backward", "reshard", "is_sharded", "is_unsharded", "fsdp_params", "comm_ctx",
    "mesh_info", "mp_policy", "offload_policy", "reduce_grads", "all_reduce_grads", "_training_state",
    "_all_gather_result", "_reset_sharded_params", "unshard_in_backward",
    "_reshard_after_forward",
)  # fmt: skip
_USED_OF_PARAMETERS = ("sharded_param", "_sharded_param_data", "reset_sharded_param", "_init_extensions")


def is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor: the stored tensor itself, with its version counter."""
    # The slot itself is read, so that a fence on the tensor is not triggered.
    return _LOCAL.__get__(tensor)  # type: ignore[no-any-return]


def fenced_class(
    plain: type,
    function: Any,
    hand_out: Callable[[torch.Tensor], None],
    as_plain: Callable[..., Any],
) -> type:
    """Return the class of a DTensor while its fence is up; `hostward.model.fence` passes the actions of its uses."""

    class FencedDTensor(plain):  # type: ignore[misc]
        __slots__ = ()
        __torch_function__ = function

        # DTensor's own methods (`to_local`, `full_tensor`) take the part without asking `__torch_function__`.
        @property
        def _local_tensor(self) -> torch.Tensor:
            if not sys._getframe(1).f_globals["__name__"].startswith(_FSDP2):  # it tells before it reads: `listen`
                hand_out(self)
            return part_of(self)

        @_local_tensor.setter
        def _local_tensor(self, part: torch.Tensor) -> None:
            _LOCAL.__set__(self, part)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return as_plain(self, "__deepcopy__", memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return as_plain(self, "__reduce_ex__", protocol)

        def __repr__(self) -> str:
            text: str = as_plain(self, "__repr__")
            return text

    return FencedDTensor


def like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a DTensor over `part`, placed as the parameter is; the part may be on the host, of any dtype."""
    spec: Any = sharding_of(parameter)
    return sharded_as(part, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype)))


def sharding_of(tensor: torch.Tensor) -> object:
    """Return how a DTensor is sharded: its mesh, placements, and the shape, strides and dtype of the whole."""
    spec: object = tensor._spec  # type: ignore[attr-defined]
    return spec


def sharded_as(part: torch.Tensor, sharding: object) -> torch.Tensor:
    """Return a DTensor over `part`, sharded as `sharding_of` returned; the part may be on the host."""
    made: torch.Tensor = DTensor(part, sharding, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def same_placement(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether both are sharded over the same ranks in the same way."""
    mine, theirs = parameter._spec, tensor._spec  # type: ignore[attr-defined]
    return bool(mine.mesh == theirs.mesh and mine.placements == theirs.placements)


def part_of_saved(name: str, saved: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a saved value that is sharded like the parameter, or unsharded.

    Raises:
        CheckpointError: the value is sharded in another way.
    """
    if is_sharded(saved):
        if same_placement(saved, parameter):
            return part_of(saved)
        raise CheckpointError(
            f"the saved state of parameter {name!r} is divided over ranks in another way than the parameter",
            why=f"{tuple(_placements(saved))} against {tuple(_placements(parameter))}",
            fix="load with torch.distributed.checkpoint into what optimizer.state_dict() returns",
        )
    return layout_of(name, parameter).part(saved)


def counts(parameter: torch.Tensor) -> bool:
    """Return whether this rank's part counts in sums over ranks: only the first of several replicas does."""
    coordinate = parameter.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    return all(coordinate[i] == 0 for i, p in enumerate(_placements(parameter)) if isinstance(p, Replicate))


def layout_of(name: str, parameter: torch.Tensor) -> Layout:
    """Return how a parameter is sharded.

    Raises:
        ModelError: the sharding is not FSDP2's, over plain parameters or over DTensors.
    """
    mesh, placements = parameter.device_mesh, _placements(parameter)  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ModelError(f"this rank is not part of the mesh of parameter {name!r}", fix="train on ranks of the mesh")
    plain, strided = [], []
    for i, placement in enumerate(placements):
        if type(placement) is Shard:
            plain.append(Split(placement.dim, mesh.size(i), coordinate[i]))
        elif type(placement) is _StridedShard and _is_innermost(mesh, placements, i):
            strided.append(Split(placement.dim, mesh.size(i), coordinate[i]))
        elif not isinstance(placement, Replicate):
            plain.append(Split(-1, 1, 0))
    if len(strided) > 1 or any(split.dim < 0 for split in plain):
        raise ModelError(
            f"parameter {name!r} is placed as {tuple(placements)} on {mesh}",
            why="supported are parameters that FSDP2 divides along a dimension, and DTensors that it divides again",
            fix="distribute parameters with Shard or Replicate, then fully_shard",
        )
    return Layout(tuple(parameter.shape), (*plain, *strided))


def shard_ranks(name: str, parameter: torch.Tensor) -> tuple[Split, dist.ProcessGroup] | None:
    """Return how the one dimension of the mesh that shards a parameter does it, and its ranks.

    None where this rank has the whole parameter.

    Raises:
        ModelError: several dimensions of the mesh shard it, or none does as FSDP2 would.
    """
    splits = [split for split in layout_of(name, parameter).splits if split.n_parts > 1]
    if not splits:
        return None
    mesh, placements = parameter.device_mesh, _placements(parameter)  # type: ignore[attr-defined]
    dims = [i for i, p in enumerate(placements) if not isinstance(p, Replicate) and mesh.size(i) > 1]
    if len(dims) > 1:
        raise ModelError(
            f"parameter {name!r} is placed as {tuple(placements)} on {mesh}",
            why="it is gathered from the ranks of one dimension of a mesh, and several dimensions shard it",
            fix="shard it with fully_shard alone, or step it with an optimizer that treats each element by itself",
        )
    return splits[0], mesh.get_group(dims[0])


def _is_innermost(mesh: Any, placements: Sequence[Any], index: int) -> bool:
    """Return whether a strided placement shards the parts that all later mesh dimensions have sharded before."""
    later, dim = range(index + 1, mesh.ndim), placements[index].dim
    before = [mesh.size(i) for i in later if isinstance(placements[i], Shard) and placements[i].dim == dim]
    return bool(placements[index].split_factor == math.prod(before))


def _placements(tensor: torch.Tensor) -> Sequence[Any]:
    found: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    return found


def mesh_groups(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return the process groups of the device mesh over which a parameter is sharded, by dimension."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return [mesh.get_group(i) for i in range(mesh.ndim)]


class Listener(Protocol):
    """Receives reports of what FSDP2 is about to do with parameters."""

    def before_copy_in(self, parameters: Sequence[torch.Tensor], stream: torch.Stream | None) -> None:
        """Called before the parameters' parts are read on `stream`; None: on the current stream."""

    def before_use(self, parameters: Sequence[torch.Tensor]) -> None:
        """Called before the parameters are unsharded, for the next work of the current stream."""

    def before_gradients(self, parameters: Sequence[torch.Tensor], made_on: torch.Stream) -> None:
        """Called before gradients, allocated by stream `made_on`, are written to `.grad` or accumulated there."""


class Keeper(Protocol):
    """Offloads parts; groups are identified by their number in `Groups.gathered_together`."""

    def needed(self, group: int, stream: torch.Stream | None, *, backward: bool) -> None:
        """Called before the group's parts are read on `stream`; None: on the current stream."""

    def awaited(self, group: int, gather: torch.Event | None) -> None:
        """Called before the current stream waits for a gather on another stream; None: there are no streams."""

    def gathered(self, group: int) -> None:
        """Called after the parts were read: the group stays unsharded until FSDP2 frees it."""


class Groups:
    """Lists the FSDP2 parameter groups of all modules in `root`; empty for models that are not sharded."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        """Raises ModelError for an unknown version of FSDP2."""
        found: dict[int, Any] = {}
        self._inside: dict[int, set[int]] = {}  # by group: those of the modules before whose forward it is gathered
        for module in () if root is None else root.modules():
            for group in fsdp_groups_of(module):
                found[id(group)] = group
                inside = {id(each) for part in module.modules() for each in fsdp_groups_of(part)}
                self._inside[id(group)] = self._inside.get(id(group), set()) | inside
        for group in found.values():
            require_known_fsdp(group)
        self._groups = list(found.values())
        self._removals: list[Callable[[], None]] = []
        self._grad_dtypes: dict[int, torch.dtype] = {}  # by group, where it is not that of the parameters

    def __bool__(self) -> bool:
        return bool(self._groups)

    def gathered_together(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return for each group its parameters, and all parameters of its modules.

        A group is gathered when one of its modules is entered.
        """
        of = {id(group): _parameters(group.fsdp_params) for group in self._groups}
        return [(own, [p for inside in self._inside[number] for p in of[inside]]) for number, own in of.items()]

    def resharded(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether all of these parameters are resharded after forward."""
        asked = {id(p) for p in parameters}
        own = (group for group in self._groups if any(id(p) in asked for p in _parameters(group.fsdp_params)))
        return all(group._reshard_after_forward for group in own)

    def reshard(self) -> None:
        """Reshard unsharded parameters, except in the middle of a pass.

        FSDP2 leaves those of the root unsharded after a forward without backward; a step would not reach them.
        """
        for group in self._groups:
            if not group.is_sharded and group._training_state is TrainingState.IDLE:
                group.reshard()

    def require_supported(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raise unless these are parameters of the groups, on one mesh, that FSDP2 does not offload.

        Raises:
            ModelError, ConfigError: they are not.
        """
        members = {id(p.sharded_param) for group in self._groups for p in group.fsdp_params}
        meshes = []
        for name, parameter in named.items():
            if id(parameter) not in members:
                raise ModelError(
                    f"parameter {name!r} is not sharded by FSDP2, or its module is not known",
                    why="its gradient leaves when FSDP2 has reduced it, and its weight arrives before it is gathered",
                    fix="fully_shard the whole model, then give it to the optimizer, or module=model beside groups",
                )
            layout_of(name, parameter)
            meshes.append(parameter.device_mesh)  # type: ignore[attr-defined]
        if len({frozenset(mesh.mesh.flatten().tolist()) for mesh in dict.fromkeys(meshes)}) > 1:
            raise ModelError(
                "parameters are sharded on several device meshes, of different ranks",
                why="the norm over all of them is a sum over ranks that each know all",
                fix="fully_shard all modules on meshes of the same ranks",
            )
        self.require_no_policy("hostward.AdamW", "offload_fraction= to hostward.AdamW")

    def require_no_policy(self, beside: str, instead: str) -> None:
        """Raise ConfigError if FSDP2 itself offloads parts to the host."""
        if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in self._groups):
            raise ConfigError(
                f"FSDP2's CPUOffloadPolicy together with {beside}",
                why="both would own the host memory of weights, gradients and state",
                fix=f"fully_shard without offload_policy, and say {instead}",
            )

    def fills(self, parameter: torch.Tensor) -> bool:
        """Return whether a part, with FSDP2's padding after it, fills its storage."""
        padded, part = self._padded(parameter), part_of(parameter)
        memory = part.untyped_storage()
        same = bool(padded.untyped_storage()._cdata == memory._cdata and not part.storage_offset())
        return same and part.is_contiguous() and memory.nbytes() == padded.nbytes

    def holders(self, parameter: torch.Tensor) -> int:
        """Return how many tensors of FSDP2 use a part's storage: the part, the padded part, and their bases."""
        own = part_of(parameter), self._padded(parameter)
        return len({t._cdata for t in (*own, *(t._base for t in own)) if t is not None})

    def _padded(self, parameter: torch.Tensor) -> torch.Tensor:
        found = (p for group in self._groups for p in group.fsdp_params if p.sharded_param is parameter)
        padded: torch.Tensor = next(found)._sharded_param_data
        return padded

    def is_divided(self, group: int) -> bool:
        """Return whether the next gather of a group reads its parts: it is not unsharded, nor on fewer ranks."""
        return bool(self._groups[group].is_sharded)

    def settle(self, group: int) -> None:
        """Check now, as FSDP2 does before its first forward, whether the group's parts were replaced.

        FSDP2 compares addresses, and offloaded parts have none.
        """
        found = self._groups[group]
        if not found._reset_sharded_params:
            for p in found.fsdp_params:
                p.reset_sharded_param()
                p._init_extensions()
            found._reset_sharded_params = True

    def settle_all(self) -> None:
        """Settle all groups that are sharded now, before their parts lose their memory."""
        for number in range(len(self._groups)):
            if self.is_divided(number):
                self.settle(number)

    def serve(self, keeper: Keeper) -> None:
        """Report to a keeper, held weakly, when parts are needed and when not, until `close`."""
        this = weakref.ref(keeper)
        for number, group in enumerate(self._groups):
            self._removals.append(announce(group, "unshard", _NeededOnStream(this, group, number)))
            self._removals.append(announce(group, "wait_for_unshard", _NeededHere(this, group, number)))

    def accumulate_in(self, dtype: torch.dtype, besides: Set[int]) -> None:
        """Reduce and accumulate gradients in `dtype` from `listen` on, except in groups of `besides` (ids) only."""
        for group in self._groups:
            parts = _parameters(group.fsdp_params)
            if not all(id(part) in besides for part in parts):
                for part in parts:
                    part.grad_dtype = dtype
                self._grad_dtypes[id(group)] = dtype

    def reduced_as_they_are(self) -> list[list[torch.Tensor]]:
        """Return the parameters by group, of groups that reduce gradients in the dtype of the parameters."""
        policies = [(group.mp_policy, _parameters(group.fsdp_params)) for group in self._groups]
        return [ps for m, ps in policies if all((m.reduce_dtype or m.param_dtype or p.dtype) is p.dtype for p in ps)]

    def listen(self, listener: Listener) -> None:
        """Report to a listener, held weakly, until `close`."""
        this = weakref.ref(listener)
        for group in self._groups:
            for method, told in (
                ("unshard", _BeforeUnshard(this, group)),
                ("wait_for_unshard", _BeforeWait(this, group)),
                ("post_backward", _BeforeReduce(this, group, self._grad_dtypes.get(id(group)))),
            ):
                self._removals.append(announce(group, method, told))

    def close(self) -> None:
        for remove in self._removals:
            remove()
        self._removals.clear()


def fsdp_groups_of(module: torch.nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a module itself; empty for a module that is not sharded."""
    state: Any = _get_module_fsdp_state(module)
    if state is None:
        return []
    several = getattr(state, "_fsdp_param_groups", None)  # one group by another name up to torch 2.11
    return [group for group in ([state._fsdp_param_group] if several is None else several) if group is not None]


def require_known_fsdp(group: Any) -> None:
    """Raise ModelError for a version of torch whose FSDP2 is built differently."""
    missing = [name for name in _USED_OF_GROUPS if not hasattr(group, name)]
    for p in getattr(group, "fsdp_params", [])[:1]:
        missing += [name for name in _USED_OF_PARAMETERS if not hasattr(p, name)]
    if missing:
        raise ModelError(
            f"FSDP2 of torch {torch.__version__} is not known to hostward",
            why=f"its parameter groups have no {', '.join(missing)}",
            fix=f"use torch {KNOWN_VERSIONS}",
        )


def _gathers(group: Any) -> bool:
    """Return whether there are other ranks; else parts are read on the current stream, when the gather is awaited."""
    return isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size > 1


def _read_on(group: Any, async_op: bool) -> torch.Stream | None:
    """Return the stream on which a gather reads parts; None: the current stream."""

    found: torch.Stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]
    return None if found == group.comm_ctx.device_handle.current_stream() else found


class _BeforeUnshard(Told[Listener]):
    def _before(self, to: Listener, group: Any, async_op: bool = False, **_: Any) -> None:
        if group._all_gather_result is None and not group.is_unsharded and _gathers(group):
            to.before_copy_in(_parameters(group.fsdp_params), _read_on(group, async_op))


class _BeforeWait(Told[Listener]):
    def _before(self, to: Listener, group: Any, *args: Any, **options: Any) -> None:
        if group._all_gather_result is not None:
            to.before_use(_parameters(group.fsdp_params))


class _BeforeReduce(Told[Listener]):
    def __init__(self, to: weakref.ref[Listener], group: Any, grad_dtype: torch.dtype | None) -> None:
        super().__init__(to, group)
        self._grad_dtype = grad_dtype

    def _before(self, to: Listener, group: Any, *args: Any, **options: Any) -> None:
        if self._grad_dtype is not None:
            group._orig_dtype = self._grad_dtype  # what FSDP2 casts a reduced gradient to; set by its lazy_init
        partly = isinstance(group.mesh_info, DDPMeshInfo) and not group.all_reduce_grads
        if group.reduce_grads and not partly:
            unused_too = getattr(group, "reduce_scatter_unused_params", False)
            found = [p for p in group.fsdp_params if _has_gradient(p, unused_too)]
            to.before_gradients(_parameters(found), group.comm_ctx.reduce_scatter_stream)


class _Needed(Told[Keeper]):
    def __init__(self, to: weakref.ref[Keeper], group: Any, number: int) -> None:
        super().__init__(to, group)
        self._number = number

    def _needed(self, to: Keeper, group: Any, stream: torch.Stream | None) -> None:
        to.needed(self._number, stream, backward=group._training_state is TrainingState.PRE_BACKWARD)


class _NeededOnStream(_Needed):
    def _before(self, to: Keeper, group: Any, async_op: bool = False, **_: Any) -> None:
        late = group._training_state is TrainingState.PRE_BACKWARD and not group.unshard_in_backward
        if group._all_gather_result is None and group.is_sharded and _gathers(group) and not late:
            self._needed(to, group, _read_on(group, async_op))


class _NeededHere(_Needed):
    def _before(self, to: Keeper, group: Any, *args: Any, **options: Any) -> None:
        if group._all_gather_result is None or not group.is_sharded:
            return
        if _gathers(group):
            to.awaited(self._number, group._all_gather_result.all_gather_event)
        else:
            self._needed(to, group, None)

    def _after(self, to: Keeper, group: Any) -> None:
        if group.is_unsharded:
            to.gathered(self._number)


def _parameters(fsdp_params: Iterable[Any]) -> list[torch.Tensor]:
    return [p.sharded_param for p in fsdp_params]


def _has_gradient(fsdp_param: Any, unused_too: bool) -> bool:
    whole = getattr(fsdp_param, "_unsharded_param", None)
    if whole is None:
        return False
    found = fsdp_param.unsharded_accumulated_grad is not None or whole.grad is not None
    return found or (unused_too and whole.requires_grad)
