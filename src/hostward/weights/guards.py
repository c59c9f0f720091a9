"""Guard offloaded weights against state dicts, loads and moves, which replace or read all weights of a module.

Other readers are handled by a fence (`hostward.model.fence`). A copied or pickled module keeps its hooks and guards,
and they do nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from hostward.errors import ModelError
from hostward.weights.residency import Weight


class GuardedWeights(Protocol):
    """List the methods of `hostward.weights.offload.OffloadedWeights` that guards use; see there for each."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...
    def all_present(self, numbers: Iterable[int]) -> AbstractContextManager[None]: ...
    def use(self, number: int) -> None: ...
    def name_only(self, weights: Iterable[Weight]) -> None: ...
    def named(self, weights: Iterable[Weight]) -> None: ...
    def value(self, weight: Weight) -> torch.Tensor: ...
    def loaded(self, numbers: Iterable[int]) -> None: ...


def guarded(owner: object, attribute: str, guard: object) -> Callable[[], None]:
    """Set a guard as an attribute of an object; return a function that removes it."""
    owner.__dict__[attribute] = guard

    def undo() -> None:
        if owner.__dict__.get(attribute) is guard:
            del owner.__dict__[attribute]

    return undo


class _Guard:
    """Hold the offloaded weights that a guard protects; `numbers`: those of their layers (or FSDP2 groups)."""

    def __init__(self, offloaded: GuardedWeights | None = None, numbers: Sequence[int] = (), about: Any = None) -> None:
        self._offloaded, self._numbers, self._about = offloaded, numbers, about

    def _present(self) -> AbstractContextManager[None]:
        return nullcontext() if self._offloaded is None else self._offloaded.all_present(self._numbers)


class Apply(_Guard):
    """Guard `to`, `half`, `cuda` and the like: weights are on the device meanwhile, and moving them raises."""

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        if self._offloaded is None:
            return self._plain(function, recurse)
        for parameter in self._offloaded.parameters():
            probe = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
            made = function(probe)
            if (made.dtype, made.device) != (probe.dtype, probe.device):
                before, after = (
                    (probe.dtype, made.dtype) if made.device == probe.device else (probe.device, made.device)
                )
                raise ModelError(
                    f"the model was about to go from {before} to {after} while its weights are offloaded",
                    why="their copies on the host keep the present dtype, for the present device",
                    fix="detach(), change the model, and attach again",
                )
        with self._present():
            return self._plain(function, recurse)

    def _plain(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> torch.nn.Module:
        applied: torch.nn.Module = type(self._about)._apply(self._about, function, recurse)
        return applied

    def __reduce__(self) -> tuple[type[Apply], tuple[None, tuple[()], torch.nn.Module]]:
        return Apply, (None, (), self._about)


class StateHook(_Guard):
    """Replace weights in a module's `state_dict()` by copies of their values on the host.

    The hook runs before and after `state_dict()`. `about`: weights by name.
    """

    def __call__(self, module: torch.nn.Module, *given: Any) -> None:
        weights: Mapping[str, Weight] = self._about or {}
        if self._offloaded is None:
            return
        if len(given) == 2:  # (prefix, keep_vars): before
            self._offloaded.name_only(weights.values())
            return
        self._offloaded.named(weights.values())
        state_dict: dict[str, Any] = given[0]
        prefix: str = given[1]
        for name, weight in weights.items():
            if isinstance(state_dict.get(prefix + name), torch.nn.Parameter):
                raise ModelError(
                    "state_dict(keep_vars=True) of a model with offloaded weights",
                    why="the memory of the parameters themselves is freed and allocated again",
                    fix="leave keep_vars out, or detach() first",
                )
            weight.require_in(module, name)
            if prefix + name in state_dict:
                state_dict[prefix + name] = self._offloaded.value(weight)

    def __reduce__(self) -> tuple[type[StateHook], tuple[()]]:
        return StateHook, ()


class LoadHook(_Guard):
    """Reload weights before a module's `load_state_dict`, and update their host copies after it.

    `about`: weights by name. A load that would replace the parameters raises, at the first module that has some below.
    """

    def __call__(self, *given: Any) -> None:
        if self._offloaded is None:
            return
        if len(given) == 2:  # (module, incompatible keys): after
            for name, weight in (self._about or {}).items():
                weight.require_in(given[0], name)  # before it FSDP2 may have the gathered one there
            self._offloaded.loaded(self._numbers)
        else:  # (module, state dict, prefix, metadata, ...): before
            # Metadata is the state dict's own, in which torch leaves the mark: without it, the next load would assign.
            if given[3].pop("assign_to_params_buffers", False):
                raise ModelError(
                    "load_state_dict(assign=True) of a model with offloaded weights",
                    why="it replaces the parameters, of which there are copies on the host",
                    fix="leave assign out: values are copied into the parameters; or detach() first",
                )
            for number in self._numbers:
                self._offloaded.use(number)

    def __reduce__(self) -> tuple[type[LoadHook], tuple[()]]:
        return LoadHook, ()
