"""Pre-forward hooks make each layer wait, on the device, for its own weights; elsewhere a fence makes readers wait.

A layer is what `hostward.core.inventory.layer_of` calls so: `model.layers.3`, `lm_head`. Its hook fires when its
module, or any module inside that owns one of its parameters, is about to run. Parameters outside numbered layers may
also be read without their module being called (fused losses take `lm_head.weight`): they are waited for no later than
the numbered layer registered before them, or than the root, if there is none. The fence of a layer is up from `step()`
until its forward, and again after it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hostward.model.autograd import at_end_of_backward
from hostward.model.fence import Fence, down, readers_of, up
from hostward.model.forward_code import layers_that_take_data
from hostward.model.layer_hooks import forget_compiled
from hostward.model.parameter_names import plain_name
from hostward.model.parameters import ParamRecord
from hostward.optim.master_sync import WeightWatch
from hostward.optim.step_executor import StepExecutor

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
            self._handles.append(module.register_forward_hook(_LeaveHook(this), always_call=True))

    def leave(self) -> None:
        if self._leave is not None:
            self._leave()

    def use(self, layers: Sequence[str]) -> None:
        # The forward of a wrapped model is running, on any thread.
        if DistributedDataParallel._active_ddp_module is not None and self._in_ddp is not None:
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
    """_LeaveHook is the forward hook that reports the end of the module's forward, also if that raises."""

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


# The fence of the layers.


class WeightFence:
    """WeightFence makes readers wait for weights, and reports to the watch what may be written unnoticed.

    Within forward it is down for the layers that have been entered: their weights are there, so their operations cost
    nothing more. Only where a layer's code may write a weight through `.data` it still reports that. Elsewhere it stays
    up although nothing may be pending: `p.data` hands out memory that is written without the weight's version counter,
    at any time.

    Args:
        layers: of each tracked parameter, by name, the layer with whose forward it is used.
        root: the module whose forward uses them, if it is known. Where its code takes `.data`, that is reported.
    """

    def __init__(
        self,
        executor: StepExecutor,
        watch: WeightWatch,
        tracked: Sequence[ParamRecord],
        layers: Mapping[str, str],
        root: torch.nn.Module | None,
    ) -> None:
        self._executor = executor
        parameters = [t.parameter for t in tracked]
        self._fence = Fence(parameters, _Reads(executor, watch, tracked))
        self._all = self._fence.entries()
        self._layer_of = layers
        of_layer: dict[str, list[torch.nn.Parameter]] = {}
        for t in tracked:
            of_layer.setdefault(layers[t.name], []).append(t.parameter)
        self._of_layer = {layer: self._fence.entries(held) for layer, held in of_layer.items()}
        self._down: set[str] = set(self._of_layer)
        self._root, self._at = root, {id(t.parameter): layers[t.name] for t in tracked}
        self._task = -1
        """Graph task of the last backward that has recomputed a layer."""
        self.raise_all()

    @functools.cached_property
    def _watched(self) -> frozenset[str]:
        """Return the layers whose forward may write through `.data`; first asked in forward, when hooks are there."""
        return frozenset() if self._root is None else layers_that_take_data(self._root, self._at)

    def enter(self, layer: str) -> None:
        """Wait for the weights of a layer before its forward, which then sees plain ones."""
        self._executor.wait_for_params(layer)
        if layer in self._of_layer and layer not in self._down:
            self._down.add(layer)
            down(self._of_layer[layer], watched=layer in self._watched)
            task = torch._C._current_graph_task_id()
            if task not in (-1, self._task):
                # Entered with a recomputed layer are others, whose gradients backward has perhaps made before.
                self._task, this = task, weakref.ref(self)
                at_end_of_backward(lambda failed: _raise_all(this))

    def leave(self, name: str) -> None:
        """Raise the fence of a parameter's layer after backward has made its gradient.

        Backward may have recomputed the layer before that.
        """
        layer = self._layer_of[name]
        if layer in self._down:
            self._down.discard(layer)
            up(self._of_layer[layer])

    def raise_all(self) -> None:
        """Raise the fence of all layers, after forward of the model or a step."""
        if self._down:
            self._down.clear()
            up(self._all)

    def close(self) -> None:
        self._fence.close()


def _raise_all(fence: weakref.ref[WeightFence]) -> None:
    alive = fence()
    if alive is not None:
        alive.raise_all()


def wait_for_optimizers(parameters: Iterable[torch.Tensor]) -> None:
    """Make the current stream wait for the new values of these weights from all optimizers that have them."""
    asked: dict[_Reads, list[torch.Tensor]] = {}
    for parameter in parameters:
        for reader in readers_of(parameter):
            if isinstance(reader, _Reads):
                asked.setdefault(reader, []).append(parameter)
    for reader, wanted in asked.items():
        reader.read(wanted)


class _Reads:
    """_Reads is the reader of `Fence`. Records of fences outlive what is dropped; it keeps none of it alive."""

    def __init__(self, executor: StepExecutor, watch: WeightWatch, tracked: Sequence[ParamRecord]) -> None:
        self._executor, self._watch = weakref.ref(executor), weakref.ref(watch)
        self._tracked = weakref.WeakValueDictionary({id(t.parameter): t for t in tracked})

    def read(self, parameters: Sequence[torch.Tensor]) -> None:
        executor = self._executor()
        if executor is not None:
            executor.before_read([self._tracked[id(p)].name for p in parameters])

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        watch = self._watch()
        if watch is not None:
            watch.exposed(self._tracked[id(parameter)], alias)
