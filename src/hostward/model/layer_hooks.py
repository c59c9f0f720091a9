"""Layer hooks report each call of a layer to an observer that offloads activations or weights.

A copied or pickled module keeps its hooks, and they do nothing there.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo


class LayerObserver(Protocol):
    """Receive the reports of layer hooks. `Mark` calls only `mark`, and `Unmark` only `unmark(module)`."""

    def pre_forward(self, layer: int, inputs: Any, /) -> None:
        """Called before layer number `layer` runs; `inputs` is (args, kwargs)."""

    def post_forward(self, layer: int, output: object, /) -> None:
        """Called after the layer has returned or raised."""

    def mark(self, module: torch.nn.Module, about: Any, /) -> None:
        """Called before a marked module runs."""


class _Hook:
    # A hook keeps the observer alive until it is removed, whether or not the caller holds the attachment.
    def __init__(self, observer: LayerObserver | None = None, about: Any = None) -> None:
        self._observer, self._about = observer, about

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()


class PreForwardHook(_Hook):
    """Report a layer call before forward; `about` is the layer's number.

    torch's quantization registers hooks again, on the module that it puts in a layer's place, without `kwargs`.
    """

    def __call__(self, _: object, args: object, kwargs: object = None) -> None:
        call(self._observer, "pre_forward", self._about, (args, {} if kwargs is None else kwargs))


def is_attached(layer: torch.nn.Module) -> bool:
    """Return whether calls of a module are reported to an observer; those of a copy are not."""
    hooks = layer._forward_pre_hooks.values()
    return any(isinstance(hook, PreForwardHook) and hook._observer is not None for hook in hooks)


class PostForwardHook(_Hook):
    """Report a layer call after forward, also if forward raised."""

    def __call__(self, _: object, __: object, output: object) -> None:
        call(self._observer, "post_forward", self._about, output)


class Mark(_Hook):
    """Report a marked module before its forward; `about` is passed to the observer."""

    def __call__(self, module: torch.nn.Module, *_: object) -> None:
        call(self._observer, "mark", module, self._about)


class Unmark(_Hook):
    """Report a marked module after its forward."""

    def __call__(self, module: torch.nn.Module, *_: object) -> None:
        call(self._observer, "unmark", module)


class PreBackwardHook:
    """Call `pre_backward(about)` of the observer before backward of a layer's output; `about` holds no graph."""

    def __init__(self, observer: weakref.ref[Any], about: object) -> None:
        self._observer, self._about = observer, about

    def __call__(self, _: object) -> None:
        observer = self._observer()
        if observer is not None:
            observer.pre_backward(self._about)


@_disable_dynamo
def call(observer: LayerObserver | None, method: str, *arguments: object) -> None:
    """Call a method of `observer`, if there is one. A compiled caller breaks its graph here."""
    if observer is not None:
        getattr(observer, method)(*arguments)


# Compiled models.


log = logging.getLogger("hostward")


def forget_compiled() -> None:
    """Reset the compiler if it has compiled code, so that callers of layers are compiled anew.

    Dynamo looks at a module's hooks only when it compiles a caller, so an older graph would run without our hooks.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:
        log.info("code that was compiled before is compiled anew, so that it calls the hooks of hostward")
        torch.compiler.reset()
