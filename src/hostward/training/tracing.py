"""From what a backend's meter reports to a trace: kinds of spans, and the caller's own passes between them."""

from __future__ import annotations

from itertools import pairwise
from types import TracebackType

from hostward.engine.backend import Backend
from hostward.engine.trace import Span, SpanKind, Trace
from hostward.schedule import Lane

from .step import StepIssuer
from .weight_residency import GATHERED, ROOM

_WAIT = "offload/wait/"
_NO_LAYER = ("offload/wait/weights/", "offload/wait/activation/")
"""Waits for one thing of a layer, in forward or backward."""
_WITHIN = (GATHERED, ROOM)
"""Where FSDP2 gathers these come behind the hook of their layer, and end no pass."""
_NORM = "offload/norm/"
_NOTHING_DONE = ("offload/retire", "offload/slots", "offload/gradient/", "offload/written")


class Tracing:
    """A context in which every operation is timed; `trace` is whole after it. Timing costs two events per operation.

    Between two operations of the compute lane the caller's own code ran: a span that begins where a layer has arrived
    is that layer's forward, one that ends where the norm of a bucket's gradients begins is backward.
    """

    def __init__(self, backend: Backend, issuer: StepIssuer) -> None:
        self._backend = backend
        self._issuer = issuer
        self._compute: list[Span] = []
        self._trace = Trace()

    def __enter__(self) -> Trace:
        self._issuer.use_all()
        self._backend.synchronise()
        self._backend.meter = self._note
        return self._trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._issuer.use_all()
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
