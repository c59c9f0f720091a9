"""hostward: CPU offloading for PyTorch training that keeps the same bits.

import hostward
optimizer = hostward.AdamW(model, lr=3e-4, weight_decay=0.1, max_grad_norm=1.0, offload_fraction=1.0)
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hostward import errors
from hostward.errors import HostwardError

if TYPE_CHECKING:
    from hostward.attachment import Activations, Attachment, attach, offload_activations
    from hostward.distributed.flat_shards import FlatPart, FlatShards
    from hostward.optim.adamw import AdamW
    from hostward.optim.any_optimizer.combined import CombinedOptimizer
    from hostward.optim.any_optimizer.offload import StreamedStates, offload_optimizer_states
    from hostward.weights.deferred_init import move
    from hostward.weights.offload import Weights

__version__ = "0.1.0"
__all__ = [
    "Activations",
    "AdamW",
    "Attachment",
    "CombinedOptimizer",
    "FlatPart",
    "FlatShards",
    "HostwardError",
    "StreamedStates",
    "Weights",
    "__version__",
    "attach",
    "errors",
    "move",
    "offload_activations",
    "offload_optimizer_states",
]

_HOMES = {
    "Activations": "hostward.attachment",
    "Attachment": "hostward.attachment",
    "attach": "hostward.attachment",
    "offload_activations": "hostward.attachment",
    "AdamW": "hostward.optim.adamw",
    "CombinedOptimizer": "hostward.optim.any_optimizer.combined",
    "FlatPart": "hostward.distributed.flat_shards",
    "FlatShards": "hostward.distributed.flat_shards",
    "Weights": "hostward.weights.offload",
    "move": "hostward.weights.deferred_init",
    "StreamedStates": "hostward.optim.any_optimizer.offload",
    "offload_optimizer_states": "hostward.optim.any_optimizer.offload",
}


_MOVED = {
    "hostward.adapters": "hostward.distributed",
    "hostward.adapters.experts": "hostward.distributed.expert_parallel",
    "hostward.run_report": "hostward.report.schema",
    "hostward.training": "hostward.optim",
    "hostward.training.scaling": "hostward.optim.sharded",
}
"""Modules that documentation named under another name before version 0.2."""


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a module by its old name, with a warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = _MOVED[spec.name]
        warnings.warn(f"{spec.name} is {new} now; the old name goes in version 0.3", DeprecationWarning, stacklevel=2)
        module = ModuleType(spec.name)
        module.__dict__.update({k: v for k, v in vars(importlib.import_module(new)).items() if not k.startswith("__")})
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the names are there."""


sys.meta_path.append(_MovedModules())


def __getattr__(name: str) -> Any:
    # Loaded at first use, so that the command line can answer --help without importing torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "convert":
        return importlib.import_module("hostward.convert")
    raise AttributeError(f"module 'hostward' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "convert"})
