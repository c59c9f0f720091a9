"""Finding code that reads weights before they have arrived."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hostward.errors import OrderingError
from hostward.fence import plain_type, unfenced
from hostward.inspect import Tracked

from .step import StepIssuer


class UnfencedReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is on, an operation on a weight that has not been waited for since the last step raises.

    Forward of the module waits by itself. What reads weights in another way (an average kept by hand, a functional use
    outside the module, a copy) must call `AdamW.arrive` or `AdamW.wait` first; this finds where that is missing. It
    looks at the storages of all operands of every operation, in backward as well, and is slow.
    """

    def __init__(self, issuer: StepIssuer, tracked: Sequence[Tracked], layers: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._issuer = weakref.ref(issuer)
        self._tracked = tracked
        self._layers = layers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        issuer = self._issuer()
        if issuer is not None and issuer.pending and not issuer.issuing and not _is_view(func):
            self._look(func, issuer.pending, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @unfenced
    def _look(self, func: Any, pending: set[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        issuer = self._issuer()
        fetched = frozenset[str]() if issuer is None else issuer.fetched  # they wait by themselves
        waiting = {
            t.local.untyped_storage().data_ptr(): t.name
            for t in self._tracked
            if self._layers[t.name] in pending and t.local.numel() and t.name not in fetched
        }
        for tensor in _tensors((*args, *kwargs.values())):
            name = waiting.get(_storage(tensor))
            if name is not None:
                raise OrderingError(
                    f"{func} uses the weight {name!r} before it has arrived",
                    why="the last step is still on its way, and no forward hook stands before this use",
                    fix="call optimizer.arrive() before it (or optimizer.wait() for use on the host)",
                )


def _is_view(func: Any) -> bool:
    """Whether the operation only makes another view: what reads through that will be looked at."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> int:
    # Wrapper subclasses have no storage of their own.
    return tensor.untyped_storage().data_ptr() if plain_type(tensor) in (torch.Tensor, torch.nn.Parameter) else 0
