"""Save and load training state: atomic, sharded, checksummed, beside training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hostward.checkpoint.api import (
        MODES,
        Mode,
        Saver,
        empty_optimizer_tensors,
        latest,
        load,
        load_some,
        optimizer_state,
        parts_of,
        read_own,
        read_plain,
        restore,
        save,
        tensor_index,
        verify,
    )

__all__ = [
    "MODES",
    "Mode",
    "Saver",
    "empty_optimizer_tensors",
    "latest",
    "load",
    "load_some",
    "optimizer_state",
    "parts_of",
    "read_own",
    "read_plain",
    "restore",
    "save",
    "tensor_index",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Loaded at first use: modules of this package are read without torch.
    if name in __all__:
        return getattr(importlib.import_module("hostward.checkpoint.api"), name)
    raise AttributeError(f"module 'hostward.checkpoint' has no attribute {name!r}")
