"""The hooks that report to `hostward.activations.module_hooks` and `hostward.weights.offload`. A module that is copied
or pickled takes its hooks along, and they do nothing there.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from hostward.activations.module_hooks import Visits
    from hostward.activations.saved_tensors import Visit
    from hostward.weights.offload import OffloadedWeights


class _Hook:
    # It keeps the offloading alive, whether anybody holds the attachment or not, until it is taken off.
    def __init__(self, visits: Visits | OffloadedWeights | None = None, about: Any = None) -> None:
        self._visits, self._about = visits, about

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()


class Enter(_Hook):
    """Forward pre-hook of a layer, `about` its number."""

    def __call__(self, _: object, args: object, kwargs: object) -> None:
        call(self._visits, "enter", self._about, (args, kwargs))


def is_attached(layer: torch.nn.Module) -> bool:
    """Whether calls of a module are reported to anybody. A copy has the hooks, and they do nothing."""
    hooks = layer._forward_pre_hooks.values()
    return any(isinstance(hook, Enter) and hook._visits is not None for hook in hooks)


class Leave(_Hook):
    """Forward hook of a layer, called also where forward fails."""

    def __call__(self, _: object, __: object, output: object) -> None:
        call(self._visits, "leave", self._about, output)


class Mark(_Hook):
    """Forward pre-hook of a marked module; `about`: what it saves leaves."""

    def __call__(self, module: torch.nn.Module, *_: object) -> None:
        call(self._visits, "mark", module, self._about)


class Unmark(_Hook):
    """Forward hook of a marked module."""

    def __call__(self, module: torch.nn.Module, *_: object) -> None:
        call(self._visits, "unmark", module)


class Back:
    """Before backward of a layer's output. It holds the visit, which holds no graph."""

    def __init__(self, visits: weakref.ref[Visits], visit: Visit) -> None:
        self._visits, self._visit = visits, visit

    def __call__(self, _: object) -> None:
        visits = self._visits()
        if visits is not None:
            visits.back(self._visit)


@_disable_dynamo
def call(visits: Visits | OffloadedWeights | None, method: str, *arguments: object) -> None:
    """Report to `visits`, if there are any. A compiled caller breaks its graph here."""
    if visits is not None:
        getattr(visits, method)(*arguments)


def inside_checkpoint() -> bool:
    """Whether what is saved now goes to a checkpoint, which will make it again."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(top) and getattr(top[0], "__module__", "") == torch.utils.checkpoint.__name__


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
