"""Pre-forward hooks make each layer wait, on the device, for its own weights.

A layer is what `hostward.core.inventory.layer_of` calls so: `model.layers.3`, `lm_head`. Its hook fires when its
module, or any module inside that owns one of its parameters, is about to run. Parameters outside numbered layers may
also be read without their module being called (fused losses take `lm_head.weight`): they are waited for no later than
the numbered layer registered before them, or than the root, if there is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hostward.distributed import ddp
from hostward.model.layer_hooks import forget_compiled
from hostward.model.parameter_names import plain_name
from hostward.model.parameters import ParamRecord

Use = Callable[[str], None]


class ForwardHooks:
    """ForwardHooks reports when forward of a module is about to use the weights of its layers.

    Args:
        module: the module whose forward uses the parameters, without wrappers around it.
        layers: the layer of each tracked parameter, by name; in order of use in forward.
        tracked: the parameters.
        use: called with the layer whose weights are about to be used.
        use_all: called when all weights are about to be read.
        leave: called when forward of the module is over.
        in_ddp: called when the module runs within DistributedDataParallel.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        layers: Mapping[str, str],
        tracked: Sequence[ParamRecord],
        use: Use,
        use_all: Callable[[], None],
        leave: Callable[[], None] | None = None,
        in_ddp: Callable[[], None] | None = None,
    ) -> None:
        forget_compiled()
        self._leave = leave
        self._in_ddp = in_ddp
        self._use = use
        self._use_all = use_all
        self._handles: list[RemovableHandle] = []
        by_module: dict[torch.nn.Module, list[str]] = {}
        modules: dict[str, torch.nn.Module] = {}
        for path, part in module.named_modules():
            modules.setdefault(plain_name(path), part)  # the wrapper wins over what it wraps
        before: str | None = None
        for t in tracked:
            layer = layers[t.name]
            for owner, _ in t.homes:
                _add(by_module, owner, layer)
            held = modules.get(layer)
            if held is not None and layer:
                _add(by_module, held, layer)
            if _numbered(layer):
                before = layer
            else:
                _add(by_module, module if before is None else modules.get(before, module), layer)
        this = weakref.ref(self)
        for held, names in by_module.items():
            hook = _UseHook(this, tuple(names))
            self._handles.append(held.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(held.register_state_dict_pre_hook(_StateHook(this)))  # type: ignore[no-untyped-call]
        if module not in by_module:
            self._handles.append(module.register_state_dict_pre_hook(_StateHook(this)))  # type: ignore[no-untyped-call]

        if leave is not None:
            self._handles.append(module.register_forward_hook(_LeaveHook(this)))

    def leave(self) -> None:
        if self._leave is not None:
            self._leave()

    def use(self, layers: Sequence[str]) -> None:
        if ddp.in_forward() and self._in_ddp is not None:
            self._in_ddp()
        for layer in layers:
            self._use(layer)

    def use_all(self) -> None:
        self._use_all()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _add(by_module: dict[torch.nn.Module, list[str]], module: torch.nn.Module, layer: str) -> None:
    names = by_module.setdefault(module, [])
    if layer not in names:
        names.append(layer)


def _numbered(layer: str) -> bool:
    return layer.rpartition(".")[2].isdecimal()


class _UseHook:
    """_UseHook is the forward pre-hook that reports layers.

    A module that is copied or pickled takes its hooks along; the copy's weights are not the optimizer's, so there the
    hook does nothing.
    """

    def __init__(self, arrivals: weakref.ref[ForwardHooks] | None = None, layers: tuple[str, ...] = ()) -> None:
        self._forward_hooks = arrivals
        self._layers = layers

    def __call__(self, *_: object) -> None:
        _report(self._forward_hooks, self._layers)

    def __reduce__(self) -> tuple[type[_UseHook], tuple[()]]:
        return _UseHook, ()


class _LeaveHook:
    """_LeaveHook is the forward hook that reports the end of the module's forward."""

    def __init__(self, arrivals: weakref.ref[ForwardHooks] | None = None) -> None:
        self._forward_hooks = arrivals

    @_disable_dynamo
    def __call__(self, *_: object) -> None:
        arrivals = None if self._forward_hooks is None else self._forward_hooks()
        if arrivals is not None:
            arrivals.leave()

    def __reduce__(self) -> tuple[type[_LeaveHook], tuple[()]]:
        return _LeaveHook, ()


class _StateHook:
    """_StateHook runs before `state_dict()` of a module, which reads all its weights."""

    def __init__(self, arrivals: weakref.ref[ForwardHooks] | None = None) -> None:
        self._forward_hooks = arrivals

    def __call__(self, *_: object) -> None:
        arrivals = None if self._forward_hooks is None else self._forward_hooks()
        if arrivals is not None:
            arrivals.use_all()

    def __reduce__(self) -> tuple[type[_StateHook], tuple[()]]:
        return _StateHook, ()


# A compiled caller breaks its graph here and goes on after the wait; nothing inside is compiled. Does the same as
# torch.compiler.disable, which would import the compiler for those who do not compile.
@_disable_dynamo
def _report(arrivals: Any, layers: tuple[str, ...]) -> None:
    alive = None if arrivals is None else arrivals()
    if alive is not None:
        alive.use(layers)
