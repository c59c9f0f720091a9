"""hostward: CPU offloading for PyTorch training that keeps the same bits.

import hostward
optimizer = hostward.AdamW(model, lr=3e-4, weight_decay=0.1, max_grad_norm=1.0, offload_fraction=1.0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import HostwardError

if TYPE_CHECKING:
    from .training.attach import attach, offload_activations
    from .training.attachment import Activations, Attachment
    from .training.away import move
    from .training.foreign import StreamedStates, offload_optimizer_states
    from .training.optimizer import AdamW
    from .training.weight_offload import Weights

__version__ = "0.1.0"
__all__ = [
    "Activations",
    "AdamW",
    "Attachment",
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
    "Activations": "hostward.training.attachment",
    "Attachment": "hostward.training.attachment",
    "attach": "hostward.training.attach",
    "offload_activations": "hostward.training.attach",
    "AdamW": "hostward.training.optimizer",
    "Weights": "hostward.training.weight_offload",
    "move": "hostward.training.away",
    "StreamedStates": "hostward.training.foreign",
    "offload_optimizer_states": "hostward.training.foreign",
}


def __getattr__(name: str) -> Any:
    # Loaded at first use, so that the command line can answer --help without importing torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "convert":
        return importlib.import_module("hostward.convert")
    raise AttributeError(f"module 'hostward' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "convert"})
