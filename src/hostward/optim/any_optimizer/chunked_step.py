"""This module runs one step of an optimizer whose state is offloaded.

It is one call of the optimizer's own step, in which state is reloaded when it is read and offloaded when nothing refers
to it any more (staging.py): nothing can tell it from a step without offloading. Steps of torch's own classes read all
state before they use any. Where it is known that each parameter is stepped by itself, such a step is made of calls for
the parameters of one chunk each.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hostward.errors import ConfigError, MemoryLimitError, ModelError
from hostward.model.parameters import local_of, sharding_of
from hostward.optim.any_optimizer.combined import CombinedOptimizer
from hostward.optim.any_optimizer.host_state import Chunk, cut
from hostward.optim.any_optimizer.own_step import check_step, narrowed, step_hooks
from hostward.optim.any_optimizer.staging import AwayState
from hostward.optim.any_optimizer.state_entry import Entry, at_rest, version_of


@dataclass(slots=True)
class _Parts:
    """_Parts sorts the parameters of one step by what must happen to their state.

    rest: nothing, because it stays, there is none, or there is no gradient; or it is reloaded when it is read, because
    one call steps all of them. fresh: what the step will make is not known yet. away: it is reloaded and offloaded, by
    chunk.
    """

    rest: list[torch.Tensor] = field(default_factory=list)
    fresh: list[torch.Tensor] = field(default_factory=list)
    away: dict[Chunk, list[torch.Tensor]] = field(default_factory=dict)


class OffloadedStep:
    """OffloadedStep is one step of `optimizer`, in which `call` steps whatever its groups hold."""

    def __init__(self, optimizer: torch.optim.Optimizer, away: AwayState, call: Callable[[], object]) -> None:
        """Prepare the step. Raises ModelError for a parameter that cannot be followed."""
        self._optimizer = optimizer
        self._away = away
        self._call = call
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        away.follow(optimizer.state, self._parameters)
        for p in self._parameters:
            if p not in away.chunk_of:
                check_parameter(p, away.backend.device)
        self.refused: MemoryLimitError | None = None
        """Error that kept new state on the device. The step is complete all the same."""
        self.torn = False
        """Set after an error: whether something has been written."""

    def run(self) -> object:
        """Issue the whole step and return what the last call returned.

        Raises what the optimizer raises, with idle streams.
        """
        away, state = self._away, self._optimizer.state
        separate = stepped_alone(self._optimizer)
        parts = self._parts(separate) if separate else None
        before = fingerprint(self._optimizer)
        whole = False
        away.backend.begin_step()
        try:
            away.begin(state, self._parameters, None if parts is None else self._order(parts))
            with without_hooks(self._optimizer):
                result = self._call() if parts is None else self._call_in(parts)
            away.finish(self._optimizer.state, self._all())
            whole = True
        finally:
            if not whole:
                away.abort(self._optimizer.state)
                self.torn = away.staging.wrote or not same_fingerprint(before, fingerprint(self._optimizer))
            away.backend.end_step()
        self.refused = away.refused
        return result

    def _all(self) -> list[torch.Tensor]:
        """Return the parameters that the groups hold now: a step may have changed them."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _order(self, parts: _Parts) -> list[Chunk]:
        """Return the chunks in the order in which the calls are going to use them."""
        together = (self._away.chunk_of[p] for p in parts.rest if p in self._away.chunk_of and p.grad is not None)
        return [*dict.fromkeys(together), *parts.away]

    def _parts(self, separate: Set[torch.Tensor]) -> _Parts:
        """Sort the parameters, of which `separate` may be stepped in calls of their own."""
        parts, away, state = _Parts(), self._away, self._optimizer.state
        for p in dict.fromkeys(self._parameters):
            chunk = away.chunk_of.get(p)
            if p not in separate or p.grad is None or p in away.staying or (chunk is None and p in state):
                parts.rest.append(p)
            elif chunk is not None:
                parts.away.setdefault(chunk, []).append(p)
            else:
                parts.fresh.append(p)
        return parts

    def _call_in(self, parts: _Parts) -> object:
        """Make one call for what does not move, and one for each chunk; returns what the last returned."""
        away, result = self._away, None
        limit_bytes = away.limit_bytes(sum(map(expected_bytes, parts.fresh)))
        fresh = cut([(p, expected_bytes(p)) for p in parts.fresh], limit_bytes)
        for part in ([parts.rest] if parts.rest else []) + fresh:
            with narrowed(self._optimizer, part):
                result = self._call()
            away.release(keep=1)
            away.take_new(self._optimizer.state, part)
        for part in parts.away.values():
            with narrowed(self._optimizer, part):
                result = self._call()
            away.staging.send_home()
        return result


def expected_bytes(parameter: torch.Tensor) -> int:
    """Return a guess at the state bytes that a first step will make: two tensors like the parameter."""
    return 2 * local_of(parameter).numel() * parameter.element_size()


# Which optimizers have their state offloaded, whose step may be made of several calls, and how one is narrowed.


_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_EACH_ALONE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.Adafactor,
        torch.optim.SparseAdam,
        torch.optim.Muon,
    }
)
"""Torch classes whose step uses nothing but one parameter, its gradient and state, and constants of its group."""

_SUMS_OVER_A_PARAMETER = (torch.optim.Adafactor, torch.optim.Muon)
"""Of these, the classes that sum over a parameter: of a sharded one over ranks, which all have to do in one order."""

_HARMLESS = {
    *("__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__parameters__", "__orig_bases__"),
    *("__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__annotate__", "__repr__"),
}
"""Names that a subclass may define of its own and still step as its parent does."""


def check_optimizer(optimizer: object) -> torch.device:
    """Return the device of all its parameters. Raises ModelError for an optimizer that cannot be stepped in parts."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer",
            fix="pass the optimizer itself; of a wrapper, the optimizer inside",
        )
    name = type(optimizer).__name__
    if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        raise ModelError(
            f"{name} has never called torch.optim.Optimizer.__init__",
            why="it has none of the hooks by which its state is saved and loaded",
            fix="pass the optimizer inside, if it wraps one",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ModelError(
            f"{name} was made with differentiable=True",
            why="its state is part of an autograd graph, which copies would cut",
            fix="differentiable=False",
        )
    check_step(optimizer)
    if not isinstance(optimizer.state, dict):
        raise ModelError(
            f"the state of this {name} is a {type(optimizer.state).__name__}, not a dict",
            why="what it does when state is read is not known",
            fix="keep its state on the device",
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        raise ModelError(f"{name} has no parameter", fix="add parameters before its state is offloaded")
    for p in parameters:
        check_parameter(p, parameters[0].device)
    device: torch.device = parameters[0].device
    return device


def check_parameter(parameter: torch.Tensor, device: torch.device) -> None:
    """Raise ModelError unless the parameter is a plain tensor or DTensor on `device`.

    Raises ConfigError where FSDP2 itself offloads it.
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and parameter.device.type == "cpu" != mesh.device_type:
        raise ConfigError(
            "FSDP2's CPUOffloadPolicy together with offload_optimizer_states",
            why="FSDP2 has the step of its host weights made on the CPU, and state stays there",
            fix="fully_shard without offload_policy",
        )
    problem = None
    if type(local_of(parameter).data) is not torch.Tensor:
        problem = f"is a {type(parameter.data).__name__}"
    elif parameter.device != device:
        problem = f"lies on {parameter.device}, others on {device}"
    if problem:
        raise ModelError(
            f"a parameter {tuple(parameter.shape)} {problem}",
            why="the state that moves belongs to plain parameters of one device, sharded or not",
            fix="one optimizer for each device, of plain parameters",
        )


def _is_wrapped_step(step: Any, of: Any) -> bool:
    """Return whether torch has put the step into a class: its own wrapper, which calls hooks, around that of a base.

    It does so for the first object of a class, unless there was one of the base before.
    """
    return getattr(step, "hooked", False) and step.__wrapped__ in (of, getattr(of, "__wrapped__", None))


@functools.cache
def _names_of_torch(kind: Any) -> frozenset[str] | None:
    """Return the names of the torch class whose step `kind` has unchanged; None where there is none.

    Only classes that step each parameter by itself count.
    """
    base = next((c for c in kind.__mro__ if c in _EACH_ALONE), None)
    if base is None:
        return None
    names = frozenset(dir(base))
    derived = kind.__mro__[: kind.__mro__.index(base)]
    own = {
        name for c in derived for name in vars(c) if name != "step" or not _is_wrapped_step(vars(c)[name], base.step)
    }
    return names if own & names <= _HARMLESS else None


def has_a_step_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is stepped by torch's own code, of a class that steps each parameter by itself."""
    kind: Any = type(optimizer)
    names = _names_of_torch(kind)
    return names is not None and vars(optimizer).keys() & names <= {"step"}


def closes_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step calls its closure once, before anything else."""
    return isinstance(optimizer, CombinedOptimizer) or has_a_step_of_torch(optimizer)


def stepped_alone(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """Return the parameters for which separate calls for some each are bitwise identical to one call for all.

    torch's own steps treat each parameter alone, but choose between kernels by all that a call is given: gradients of
    which some only are sparse, or have other strides than their parameters, need one call, and so does a momentum of
    SGD that some only have yet, and Adafactor of several dtypes. So do all parameters of steps of other packages.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return set().union(*map(stepped_alone, optimizer.optimizers))
    if not has_a_step_of_torch(optimizer):
        return set()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, _SUMS_OVER_A_PARAMETER) and any(sharding_of(p) is not None for p in parameters):
        return set()
    for group in optimizer.param_groups:
        gradients = [(p, p.grad) for p in group["params"] if p.grad is not None]
        if any(g.layout is not torch.strided for _, g in gradients):
            if any(g.layout is torch.strided for _, g in gradients):
                return set()
        elif not all(p.stride() == g.stride() and p.dtype is g.dtype and _is_dense(p) for p, g in gradients):
            return set()
        if isinstance(optimizer, torch.optim.SGD) and _begins_for_some(optimizer, group):
            return set()
        if isinstance(optimizer, torch.optim.Adafactor) and _takes_eps_of_first(group):
            return set()
    return set(parameters)


def _begins_for_some(optimizer: torch.optim.SGD, group: dict[str, Any]) -> bool:
    """Return whether SGD with foreach=True decays 16-bit momentum on a CPU by the kernel for a call in which some have
    none yet: it rounds otherwise.
    """
    stepped = [p for p in group["params"] if p.grad is not None]
    if not (group["foreach"] and group["momentum"] and stepped and stepped[0].is_cpu):
        return False
    has = {at_rest(optimizer.state.get(p, {})).get("momentum_buffer") is not None for p in stepped}
    return len(has) == 2 and any(p.element_size() == 2 for p in stepped)


def _takes_eps_of_first(group: dict[str, Any]) -> bool:
    """Return whether Adafactor's first eps is not given, and its parameters differ in dtype: torch derives it from the
    first parameter of a call, and then uses it for all others.
    """
    return group["eps"][0] is None and len({p.dtype for p in group["params"] if p.grad is not None}) > 1


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements fill a stretch of memory, each once, in some order of its dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Disable the optimizer's step hooks inside the block.

    They have run already; a step that calls its parent's would run them again.
    """
    hooks = step_hooks(optimizer)
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def fingerprint(optimizer: torch.optim.Optimizer) -> list[object]:
    """Return a list that changes when a weight, or a state value on the device, is written or replaced.

    It keeps no tensor.
    """
    found: list[object] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            found.append(version_of(p))
            entry = optimizer.state.get(p)
            if isinstance(entry, dict):
                away = entry.away if isinstance(entry, Entry) else ()  # H2D and D2H copies write these
                for key, value in dict.items(entry):
                    tensor = isinstance(value, torch.Tensor)
                    found += (
                        key,
                        id(value) if tensor else value,
                        version_of(value) if tensor and key not in away else 0,
                    )
    return found


def same_fingerprint(a: Sequence[object], b: Sequence[object]) -> bool:
    """Return whether nothing has changed between the two."""
    return len(a) == len(b) and all(x is y or (type(x) in _PLAIN and x == y) for x, y in zip(a, b, strict=True))
