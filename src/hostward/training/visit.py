"""One call of a layer, and the calls that are on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

import torch

from .saved_tensors import Group, Why


class Visit:
    """One call of a layer, and the groups that left in it (alive as long as handles on them are)."""

    __slots__ = (
        "__weakref__", "before", "begun", "capture", "groups", "installed", "layer", "number", "open", "released",
        "shared", "stream",
    )  # fmt: skip

    def __init__(self, layer: int, number: int, before: Visit | None, shared: Mapping[int, Why], capture: int) -> None:
        self.layer = layer
        self.capture = capture
        self.number = number
        self.before = None if before is None else weakref.ref(before)
        self.shared = shared
        self.open: Group | None = None
        self.groups: list[weakref.ref[Group]] = []
        self.released = self.begun = False
        self.stream = 0
        self.installed = False
        """Our hooks are on for what autograd saves."""

    def alive(self) -> list[Group]:
        return [group for ref in self.groups if (group := ref()) is not None]


class Stack(threading.local):
    """Visits that are on in this thread, innermost last; None where nothing is saved, or not for us."""

    def __init__(self) -> None:
        self.visits: list[tuple[int, Visit | None]] = []
        self.marks: list[tuple[torch.nn.Module, bool]] = []
        """Marked modules that run now, innermost last, and whether what they save leaves."""
