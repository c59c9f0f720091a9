"""Weights changed behind the optimizer: noticing it, and the rule for what happens then (DESIGN §4).

Three ways are seen. `load_state_dict` of the module: incoming bits are compared with the present ones before they
are copied; equal bits change nothing. In-place writes: the version counter has moved, so the master is taken anew
from the weight. A replaced Parameter object: a typed error. Writes through `.data` are invisible; they need
`AdamW.reseed()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hostward.errors import ModelError
from hostward.inspect import Tracked

from .state import same_bits


class WeightWatch:
    """Remembers the version counter of every tracked weight, and says which weights somebody else has written since."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self._tracked = list(tracked)
        self._known: dict[str, frozenset[int]] = {}
        self._handles: list[RemovableHandle] = []
        self.remember(self._tracked)
        by_owner: dict[torch.nn.Module, dict[str, str]] = {}
        for t in self._tracked:
            for owner, attribute in t.homes:
                by_owner.setdefault(owner, {})[attribute] = t.name
        names = {t.name: t for t in self._tracked}
        watch = weakref.ref(self)
        for owner, attributes in by_owner.items():
            held = {attribute: names[name] for attribute, name in attributes.items()}
            handle = owner.register_load_state_dict_pre_hook(_LoadHook(watch, held))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def remember(self, tracked: Sequence[Tracked]) -> None:
        """The present contents of these weights are the optimizer's own."""
        for t in tracked:
            self._known[t.name] = frozenset((t.parameter._version,))

    def expect_equal_copy(self, t: Tracked) -> None:
        """One copy of equal bits is about to be written, or may fail to be."""
        known = self._known[t.name]
        if t.parameter._version in known:
            self._known[t.name] = known | {t.parameter._version + 1}

    def changed(self) -> list[Tracked]:
        """Weights written by others since they were last remembered. Raises ModelError for a replaced Parameter."""
        for t in self._tracked:
            for owner, attribute in t.homes:
                if owner._parameters.get(attribute) is not t.parameter:
                    raise ModelError(
                        f"parameter {t.name!r} was replaced by another Parameter object",
                        why="the optimizer would go on updating the old one",
                        fix="copy into it in place (load_state_dict without assign=True), or make a new optimizer",
                    )
        return [t for t in self._tracked if t.parameter._version not in self._known[t.name]]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _LoadHook:
    """Compares incoming weights with the present ones before a module's load_state_dict copies them.

    A module that is copied or pickled takes its hooks along. The copy's weights are not the optimizer's, so there the
    hook watches nothing.
    """

    __slots__ = ("_held", "_watch")

    def __init__(
        self, watch: weakref.ref[WeightWatch] | None = None, held: Mapping[str, Tracked] | None = None
    ) -> None:
        self._watch = watch
        self._held = held or {}

    def __call__(self, module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
        alive = None if self._watch is None else self._watch()
        for attribute, tracked in self._held.items():
            incoming = state_dict.get(prefix + attribute)
            present = tracked.parameter.data
            if alive is None or not isinstance(incoming, torch.Tensor) or incoming.shape != present.shape:
                continue
            if same_bits(incoming.to(device=present.device, dtype=present.dtype), present):
                alive.expect_equal_copy(tracked)

    def __reduce__(self) -> tuple[type[_LoadHook], tuple[()]]:
        return _LoadHook, ()
