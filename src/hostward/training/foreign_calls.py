"""One step of an optimizer in several calls of its own step, and which optimizers allow that."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hostward.errors import ModelError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's step without the step hooks that torch wraps around it; takes the optimizer first."""
    function: Callable[..., Any] = type(optimizer).step
    return inspect.unwrap(function, stop=lambda f: "hooked" not in vars(f)) if "hooked" in vars(function) else function


def check_optimizer(optimizer: object) -> torch.device:
    """The device of all its parameters. Raises ModelError for an optimizer that cannot be stepped in parts."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer",
            fix="pass the optimizer itself; of a wrapper, the optimizer inside",
        )
    name = type(optimizer).__name__
    closure = inspect.signature(raw_step(optimizer)).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ModelError(
            f"{name} cannot be stepped in parts",
            why="its step needs a closure and looks at all parameters at once",
            fix="keep its state on the device",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ModelError(
            f"{name} was made with differentiable=True",
            why="its state is part of an autograd graph, which copies would cut",
            fix="differentiable=False",
        )
    _check_step(optimizer, name)
    check_state_keys(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        raise ModelError(f"{name} has no parameter", fix="add parameters before its state is offloaded")
    for p in parameters:
        check_parameter(p, parameters[0].device)
    device: torch.device = parameters[0].device
    return device


def watched_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """What a scheduler has put in place of `optimizer.step`, to see that it is called."""
    step = vars(optimizer).get("step")
    return step if getattr(step, "_wrapped_by_lr_sched", False) else None


def _check_step(optimizer: torch.optim.Optimizer, name: str) -> None:
    """What a wrapper other than a scheduler's does would be lost."""
    step = vars(optimizer).get("step")
    own = step is None or getattr(step, "__func__", None) is type(optimizer).step
    if not own and watched_step(optimizer) is None:
        raise ModelError(
            f"the step of this {name} has been replaced by {getattr(step, '__qualname__', step)!s}",
            why="hostward calls the class's own step for some parameters at a time, and would pass that one over",
            fix="offload the states first, then let others wrap the step",
        )


def check_state_keys(optimizer: torch.optim.Optimizer) -> None:
    """Raises ModelError for state that belongs to no parameter."""
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise ModelError(
                f"{type(optimizer).__name__} has state under {key!r}, which is no parameter",
                why="state that all parameters share would be updated once for each part of a step",
                fix="keep its state on the device",
            )


def check_parameter(parameter: torch.Tensor, device: torch.device) -> None:
    """Raises ModelError unless it is a plain tensor on `device`."""
    problem = None
    if type(parameter.data) is not torch.Tensor:
        problem = f"is a {type(parameter.data).__name__}"
    elif parameter.device != device:
        problem = f"lies on {parameter.device}, others on {device}"
    if problem:
        raise ModelError(
            f"a parameter {tuple(parameter.shape)} {problem}",
            why="the state that moves belongs to plain parameters of one device",
            fix="one optimizer for each device, of plain parameters",
        )


class PartCalls:
    """One step, made of calls of the optimizer's own step over some of its parameters each.

    Plain values of the optimizer and of its groups (counters, say) are set back before each call, so that each starts
    from what the step began with. Each call must leave the same values: an optimizer for which it does not computes
    them from all parameters together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, call: Callable[[], object], parts: int) -> None:
        self._optimizer = optimizer
        self._call = call
        self._parts = parts
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        self._contexts: list[MutableMapping[str, Any]] = [vars(optimizer), *optimizer.param_groups]
        self._before = [_plain_values(context) for context in self._contexts]
        self._after: dict[int, dict[str, object]] = {}
        self._tensors = [(t, t._version) for g in optimizer.param_groups for t in g.values() if torch.is_tensor(t)]
        self._stepped = False  # whether a call that had a gradient is over
        self._begun: Sequence[torch.Tensor] = ()
        self._found: list[object] = []
        self.result: object = None
        """What the last call returned."""

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before each call, with the state as it lies between steps."""
        if not self._stepped:
            self._begun = parameters
            self._found = _fingerprint(self._optimizer, parameters)

    def call(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step exactly these parameters.

        Raises:
            ModelError: the optimizer mixes parameters, as far as that shows.
        """
        for context, before in zip(self._contexts, self._before, strict=True):
            _set(context, before)
        with self._narrowed(parameters) as active:
            self.result = self._call()
        for i, context in enumerate(self._contexts):
            if active[i]:
                self._compare(i, _plain_values(context))
        if self._parts > 1 and any(t._version != version for t, version in self._tensors):
            raise self._mixes("changes a tensor of its group in place")
        self._stepped = self._stepped or any(active[1:])

    def finish(self) -> None:
        """All calls are made: the values that they agree on hold."""
        for i, after in self._after.items():
            _set(self._contexts[i], after)

    def undo(self) -> bool:
        """After an error: whether the step has changed nothing. Plain values are then as before."""
        if self._stepped or not _same(self._found, _fingerprint(self._optimizer, self._begun)):
            return False
        for context, before in zip(self._contexts, self._before, strict=True):
            _set(context, before)
        return True

    @contextmanager
    def _narrowed(self, parameters: Sequence[torch.Tensor]) -> Iterator[list[bool]]:
        """The optimizer has only these parameters and no step hooks inside the block; groups keep their place.

        Yields for the optimizer and for each group whether it has a gradient to step with.
        """
        optimizer, members = self._optimizer, set(parameters)
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        active = [True]
        for group, everything in self._groups:
            group["params"] = [p for p in everything if p in members]
            active.append(any(p.grad is not None for p in group["params"]))
        try:
            yield active
        finally:
            for group, everything in self._groups:
                group["params"] = everything
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks

    def _compare(self, i: int, now: dict[str, object]) -> None:
        known = self._after.setdefault(i, now)
        if known != now:
            keys = sorted(str(key) for key in known.keys() | now.keys() if known.get(key) != now.get(key))
            raise self._mixes(f"leaves another {keys[0]!r} for each part of its parameters")

    def _mixes(self, what: str) -> ModelError:
        return ModelError(
            f"{type(self._optimizer).__name__} {what}",
            why="it computes from all parameters together, and a step in parts would give other results",
            fix="keep its state on the device (detach), and load the last checkpoint",
        )


def _plain(value: object) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(_plain(key) and _plain(v) for key, v in value.items())
    return type(value) in _PLAIN


def _plain_values(context: MutableMapping[str, Any]) -> dict[str, object]:
    return {key: _copied(value) for key, value in context.items() if key != "params" and _plain(value)}


def _copied(value: object) -> object:
    return value if type(value) in _PLAIN else copy.deepcopy(value)


def _set(context: MutableMapping[str, Any], values: dict[str, object]) -> None:
    for key in [key for key, value in context.items() if key != "params" and key not in values and _plain(value)]:
        del context[key]
    context.update({key: _copied(value) for key, value in values.items()})


def _fingerprint(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[object]:
    """Changes when a weight or a value of the state is written or replaced."""
    found: list[object] = []
    for p in parameters:
        found.append(p._version)
        entry = optimizer.state.get(p)
        if isinstance(entry, dict):
            found += [part for key, v in entry.items() for part in (key, v, v._version if torch.is_tensor(v) else 0)]
    return found


def _same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(x is y or (type(x) in _PLAIN and x == y) for x, y in zip(a, b, strict=True))
