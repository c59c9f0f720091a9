"""This module turns what a backend's meter reports into a trace with kinds of spans and the caller's own passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hostward.errors import OrderingError
from hostward.model.fence import plain_type, unfenced
from hostward.model.parameters import ParamRecord
from hostward.optim.step_executor import StepExecutor
from hostward.runtime.backend import Backend
from hostward.runtime.step_trace import Span, SpanKind, Trace
from hostward.schedule.ops import Lane
from hostward.schedule.weights import GATHERED, ROOM

_WAIT = "offload/wait/"
_NO_LAYER = ("offload/wait/weights/", "offload/wait/activation/")
"""Waits for a single tensor of a layer, in forward or backward."""
_WITHIN = (GATHERED, ROOM)
"""Operations that end no pass: where FSDP2 gathers, they follow the hook of their layer."""
_NORM = "offload/norm/"
_NOTHING_DONE = ("offload/retire", "offload/slots", "offload/gradient/", "offload/written")


class Tracing:
    """Tracing is a context that times every operation; `trace` is complete after it.

    Timing costs two events per operation. Between two operations of the compute stream the caller's own code ran: a
    span that begins where the weights of a layer have been reloaded is that layer's forward, one that ends where the
    norm of a bucket's gradients begins is backward.
    """

    def __init__(self, backend: Backend, executor: StepExecutor) -> None:
        self._backend = backend
        self._executor = executor
        self._compute: list[Span] = []
        self._trace = Trace()

    def __enter__(self) -> Trace:
        self._executor.wait_for_all()
        self._backend.synchronise()
        self._backend.meter = self._note
        return self._trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._executor.wait_for_all()
            self._backend.synchronise()
        finally:
            self._backend.meter = None
        self._add_passes()

    def _note(self, name: str, lane: Lane, start_s: float, end_s: float, nbytes: int, turn: int) -> None:
        if name.startswith(_NOTHING_DONE):
            return
        kind = SpanKind.KERNEL
        if name.startswith(_WAIT):
            kind = SpanKind.WAIT
        elif lane is Lane.HOST:
            kind = SpanKind.HOST
        elif lane in (Lane.D2H, Lane.H2D):
            kind = SpanKind.COPY
        span = Span(name, lane, start_s, max(start_s, end_s), nbytes, turn, kind=kind)
        if lane is Lane.COMPUTE and name not in _WITHIN:
            self._compute.append(span)
        self._trace.add(span)

    def _add_passes(self) -> None:
        spans = sorted(self._compute, key=lambda s: s.start_s)
        for before, after in pairwise(spans):
            if after.start_s <= before.end_s:
                continue
            for_layer = before.kind is SpanKind.WAIT and not before.name.startswith(_NO_LAYER)
            if for_layer and not after.name.startswith(_NORM):
                name = f"forward/{before.name.removeprefix(_WAIT)}"
            elif after.name.startswith(_NORM):
                name = f"backward/{after.name.removeprefix(_NORM).partition('.')[2]}"
            else:
                continue
            self._trace.add(Span(name, Lane.COMPUTE, before.end_s, after.start_s, 0, after.step, kind=SpanKind.MARK))


# Finding code that reads weights before their H2D copies are complete.


class UnfencedReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """UnfencedReads makes an operation on a weight raise if nothing waited for it since the last step.

    Forward of the module waits by itself. What reads weights in another way (an average kept by hand, a functional use
    outside the module, a copy) must call `AdamW.wait_for_weights` or `AdamW.wait` first; this mode finds where that is
    missing. It looks at the storages of all operands of every operation, in backward as well, and is slow.

    Raises:
        OrderingError: an operation uses a weight before its H2D copy is complete.
    """

    def __init__(self, executor: StepExecutor, tracked: Sequence[ParamRecord], layers: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._executor = weakref.ref(executor)
        self._tracked = tracked
        self._layers = layers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        executor = self._executor()
        if executor is not None and executor.pending and not executor.issuing and not _is_view(func):
            self._look(func, executor.pending, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @unfenced
    def _look(self, func: Any, pending: set[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        executor = self._executor()
        fetched = frozenset[str]() if executor is None else executor.fetched  # they wait by themselves
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
                    fix="call optimizer.wait_for_weights() before it (or optimizer.wait() for use on the host)",
                )


def _is_view(func: Any) -> bool:
    """Return whether the operation only makes another view: reads through that view are checked themselves."""
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
