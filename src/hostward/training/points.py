"""Operations of a schedule's points, bound to the ranges that have gradients, and issued."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch

from hostward.engine.backend import Backend
from hostward.errors import NativeError
from hostward.plan import Placement
from hostward.schedule import Op

from .binding import Bindings, mixed_gradients
from .choices import Choice, Which
from .state import BucketState, allocate_gradients
from .totals import Totals

_Given = ParamSpec("_Given")
_Self = TypeVar("_Self", bound="PointIssuer")
_Result = TypeVar("_Result")


def serialised(method: Callable[Concatenate[_Self, _Given], _Result]) -> Callable[Concatenate[_Self, _Given], _Result]:
    """One thread at a time: another one may read a weight while the training loop issues operations."""

    @functools.wraps(method)
    def alone(self: _Self, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return alone


class PointIssuer:
    """Issues the operations of one point at a time. Which ranges of each bucket have a gradient is kept here."""

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        bindings: Bindings,
        totals: Totals,
    ) -> None:
        self.lock = threading.RLock()
        self._backend = backend
        self._states = states
        self._bindings = bindings
        self._totals = totals
        self._gradients = bindings.gradients
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

    def _issue_point(self, *points: str) -> None:
        """Issue the operations of a point, or of several in this order, none of which steps a bucket."""
        self.issuing = True
        try:
            self._issue(points)
        except NativeError:
            self.torn = True  # of some earlier step: its host function has reported now
            raise
        finally:
            self.issuing = False

    def _issue(self, points: tuple[str, ...]) -> None:
        works = self._bindings.at(points, self._points, self._choice)
        works.before.issue()
        if works.stepping is not None:
            self.torn = True
            works.stepping.issue()

    def _choice(self, b: int, which: Which) -> Choice:
        if which is Which.ALL:
            return self._chosen[b] or self._last_chosen[b]
        if which is Which.FRESH:
            return self._fresh[b]
        if which is Which.ADDED:
            return self._totals.addition(b, self._fresh[b], last=self._last)
        return self._totals.without_sums(b)

    def _clear_missing(self, b: int) -> None:
        if len(self._chosen[b]) < len(self._gradients[b]):
            missing = set(range(len(self._gradients[b]))) - self._chosen[b]
            self._bindings.clear(b, sorted(missing)).issue()

    def _require_one_dtype(self, b: int) -> None:
        """Raises ModelError if the gradients about to be stepped together differ; makes landing places fit them."""
        dtypes = {self._gradients[b][i].data.dtype for i in self._fresh[b]}
        if len(dtypes) > 1:
            raise mixed_gradients(self._states[b], sorted(map(str, dtypes)))
        self._fit_landing(b, dtypes.pop())

    def _fit_landing(self, b: int, dtype: torch.dtype) -> None:
        """Gradients of a bucket are about to leave in this dtype: make landing places fit it."""
        state = self._states[b]
        if b in self._totals.summed:
            if self._totals.lands(b, dtype):
                self._bindings.forget(b)
        elif state.placement is Placement.HOST and (state.gradient is None or state.gradient.data.dtype is not dtype):
            pinned = state.gradient is None or state.gradient.pinned
            allocate_gradients(self._backend, [state], [dtype], pinned=pinned)
            self._bindings.forget(b)
