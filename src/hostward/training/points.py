"""Operations of a schedule's points, bound to the ranges that have gradients, and issued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hostward.engine.backend import Backend
from hostward.errors import NativeError
from hostward.plan import Placement
from hostward.schedule import Kind, Lane, Op

from .binding import Bindings, Memory, mixed_gradients
from .state import BucketState, allocate_gradients
from .torch_host import TorchHostStep
from .totals import Totals


class PointIssuer:
    """Issues the operations of one point at a time. Which ranges of each bucket have a gradient is kept here.

    Args:
        use_torch_optimizer: step host buckets with torch's optimizer, on the calling thread.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        memory: Memory,
        bindings: Bindings,
        totals: Totals,
        *,
        use_torch_optimizer: bool,
    ) -> None:
        self._backend = backend
        self._states = states
        self._memory = memory
        self._bindings = bindings
        self._totals = totals
        self._gradients = bindings.gradients
        self._torch_host = TorchHostStep() if use_torch_optimizer else None
        self._points: Mapping[str, tuple[Op, ...]] = {}
        self._chosen: list[set[int]] = [set() for _ in states]
        """Ranges with a gradient in this turn."""
        self._fresh: list[set[int]] = [set() for _ in states]
        """Those whose gradient has not left yet."""
        self._last_chosen = self._chosen
        """Those of the turn before."""
        self._last = True
        """Of the gradient point being issued: no further microbatch is known to come."""
        self.torn = False
        """Some buckets may have taken a step that others have not. Set here; cleared by who sees the step through."""
        self.issuing = False
        """Operations of the step itself are being issued; on the simulated backend some of them run now."""

    def _issue_point(self, point: str) -> None:
        self.issuing = True
        try:
            self._issue(point)
        except NativeError:
            self.torn = True  # of some earlier step: its host function has reported now
            raise
        finally:
            self.issuing = False

    def _issue(self, point: str) -> None:
        for op in self._points.get(point, ()):
            if op.kind is Kind.MODEL:
                continue
            if op.kind is Kind.ADAMW:
                self.torn = True
                if op.lane is Lane.HOST and op.bucket is not None and self._torch_host is not None:
                    self._step_by_torch(op.bucket)
                    continue
            if op.bucket in self._totals.summed and self._on_totals(op, op.bucket):
                continue
            chosen = () if op.bucket is None else self._chosen_of(op, op.bucket)
            self._bindings.work(op, chosen).issue()

    def _on_totals(self, op: Op, b: int) -> bool:
        """Issues operations on totals: over ranges by what they have. Whether `op` is one."""
        if op.kind is Kind.ADD:
            for first, ranges in self._totals.add(b, self._fresh[b], last=self._last):
                self._bindings.addition(op, ranges, first=first, last=self._last).issue()
        elif op.kind is Kind.PARTIALS and op.lane is Lane.HOST:
            missing = self._totals.without_sums(b)
            if missing:
                self._bindings.work(op, missing).issue()
        return op.kind is Kind.ADD or (op.lane is Lane.HOST and op.kind is Kind.PARTIALS)

    def _chosen_of(self, op: Op, b: int) -> set[int]:
        if op.kind is Kind.PARTIALS or op.name.startswith("download/"):
            return self._fresh[b]
        return self._chosen[b] or self._last_chosen[b]

    def _clear_missing(self, b: int) -> None:
        missing = set(range(len(self._gradients[b]))) - self._chosen[b]
        if missing:
            self._bindings.clear(b, sorted(missing)).issue()

    def _step_by_torch(self, b: int) -> None:
        """On this thread, between empty lanes."""
        state, chosen = self._states[b], sorted(self._chosen[b])
        self._backend.synchronise()
        sources, targets = [state.gradients[i] for i in chosen], [state.weights[i] for i in chosen]
        operands = self._bindings.operands(b, tuple(chosen), sources, targets)
        if self._torch_host is not None:
            self._torch_host.step(operands, self._memory.host_scalars)

    def _require_one_dtype(self, b: int) -> None:
        """Raises ModelError if the gradients about to be stepped together differ; makes landing places fit them."""
        state = self._states[b]
        dtypes = {self._gradients[b][i].data.dtype for i in self._fresh[b]}
        if len(dtypes) > 1:
            raise mixed_gradients(state, sorted(map(str, dtypes)))
        (dtype,) = dtypes
        if b in self._totals.summed:
            if self._totals.lands(b, dtype):
                self._bindings.forget(b)
        elif state.placement is Placement.HOST and (state.gradient is None or state.gradient.data.dtype is not dtype):
            pinned = state.gradient is None or state.gradient.pinned
            allocate_gradients(self._backend, [state], [dtype], pinned=pinned)
            self._bindings.forget(b)
