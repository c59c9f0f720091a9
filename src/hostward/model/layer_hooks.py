"""Hooks on layers, which report each call to an observer: whatever offloads activations or weights.

A module that is copied or pickled takes its hooks along, and they do nothing there.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo


class LayerObserver(Protocol):
    """What hooks on layers report to. `Mark` asks for `mark` alone, and `Unmark` for `unmark(module)` besides."""

    def enter(self, layer: int, inputs: Any, /) -> None:
        """Layer number `layer` is about to run with these (args, kwargs)."""

    def leave(self, layer: int, output: object, /) -> None:
        """It has run, or failed."""

    def mark(self, module: torch.nn.Module, about: Any, /) -> None:
        """A marked module is about to run."""


class _Hook:
    # It keeps the offloading alive, whether anybody holds the attachment or not, until it is taken off.
    def __init__(self, observer: LayerObserver | None = None, about: Any = None) -> None:
        self._observer, self._about = observer, about

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()


class Enter(_Hook):
    """Forward pre-hook of a layer, `about` its number."""

    def __call__(self, _: object, args: object, kwargs: object) -> None:
        call(self._observer, "enter", self._about, (args, kwargs))


def is_attached(layer: torch.nn.Module) -> bool:
    """Return whether calls of a module are reported to anybody. A copy has the hooks, and they do nothing."""
    hooks = layer._forward_pre_hooks.values()
    return any(isinstance(hook, Enter) and hook._observer is not None for hook in hooks)


class Leave(_Hook):
    """Forward hook of a layer, called also where forward fails."""

    def __call__(self, _: object, __: object, output: object) -> None:
        call(self._observer, "leave", self._about, output)


class Mark(_Hook):
    """Forward pre-hook of a marked module; `about` goes to the observer."""

    def __call__(self, module: torch.nn.Module, *_: object) -> None:
        call(self._observer, "mark", module, self._about)


class Unmark(_Hook):
    """Forward hook of a marked module."""

    def __call__(self, module: torch.nn.Module, *_: object) -> None:
        call(self._observer, "unmark", module)


class Back:
    """Hook before backward of a layer's output; it calls `back(about)` of the observer. `about` holds no graph."""

    def __init__(self, observer: weakref.ref[Any], about: object) -> None:
        self._observer, self._about = observer, about

    def __call__(self, _: object) -> None:
        observer = self._observer()
        if observer is not None:
            observer.back(self._about)


@_disable_dynamo
def call(observer: LayerObserver | None, method: str, *arguments: object) -> None:
    """Report to `observer`, if there is one. A compiled caller breaks its graph here."""
    if observer is not None:
        getattr(observer, method)(*arguments)


# What has to be done about compiled models.


log = logging.getLogger("hostward")


def forget_compiled() -> None:
    """Let whatever a compiler has made be made anew: dynamo looks at a module's hooks when it compiles a caller, and
    never again, so a graph from before would go on without ours.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:
        log.info("code that was compiled before is compiled anew, so that it calls the hooks of hostward")
        torch.compiler.reset()
