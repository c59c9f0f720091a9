"""One step of an optimizer whose state is away.

One call of the optimizer's own step, in which state comes when it is read and goes when nobody has it any more
(foreign_staging.py): nothing can tell it from a step without offloading. Steps of torch's own classes read all state
before they use any. Where it is known that each parameter is stepped by itself, such a step is made of calls for the
parameters of one chunk each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hostward.errors import MemoryLimitError

from .foreign_away import AwayState
from .foreign_calls import (
    check_parameter,
    fingerprint,
    may_be_stepped_in_parts,
    narrowed,
    same_fingerprint,
    without_hooks,
)
from .foreign_state import Chunk, cut


@dataclass(slots=True)
class _Parts:
    """The parameters of one step, by what must happen to their state.

    rest: nothing: it stays, there is none, or there is no gradient. fresh: nobody knows yet what the step will make.
    away: it comes and goes, by chunk.
    """

    rest: list[torch.Tensor] = field(default_factory=list)
    fresh: list[torch.Tensor] = field(default_factory=list)
    away: dict[Chunk, list[torch.Tensor]] = field(default_factory=dict)


class OffloadedStep:
    """One step of `optimizer`, in which `call` steps whatever its groups hold."""

    def __init__(self, optimizer: torch.optim.Optimizer, away: AwayState, call: Callable[[], object]) -> None:
        """Raises ModelError for a parameter that cannot be followed."""
        self._optimizer = optimizer
        self._away = away
        self._call = call
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        away.follow(optimizer.state, self._parameters)
        for p in self._parameters:
            if p not in away.chunk_of:
                check_parameter(p, away.backend.device)
        self.refused: MemoryLimitError | None = None
        """What kept new state on the device. The step is whole all the same."""
        self.torn = False
        """After an error: whether something has been written."""

    def run(self) -> object:
        """Issue all of it; returns what the last call returned. Raises what the optimizer raises, with empty lanes."""
        away, state = self._away, self._optimizer.state
        parts = self._parts() if may_be_stepped_in_parts(self._optimizer) else None
        before = fingerprint(self._optimizer)
        whole = False
        away.backend.begin_turn()
        try:
            away.begin(state, self._parameters, None if parts is None else list(parts.away))
            with without_hooks(self._optimizer):
                result = self._call() if parts is None else self._call_in(parts)
            away.finish(self._optimizer.state, self._all())
            whole = True
        finally:
            if not whole:
                away.abort(self._optimizer.state)
                self.torn = away.staging.wrote or not same_fingerprint(before, fingerprint(self._optimizer))
            away.backend.end_turn()
        self.refused = away.refused
        return result

    def _all(self) -> list[torch.Tensor]:
        """What the groups hold now: a step may have changed them."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _parts(self) -> _Parts:
        parts, away, state = _Parts(), self._away, self._optimizer.state
        for p in dict.fromkeys(self._parameters):
            chunk = away.chunk_of.get(p)
            if p.grad is None or p in away.staying or (chunk is None and p in state):
                parts.rest.append(p)
            elif chunk is not None:
                parts.away.setdefault(chunk, []).append(p)
            else:
                parts.fresh.append(p)
        return parts

    def _call_in(self, parts: _Parts) -> object:
        """One call for what does not move, and one for each chunk; returns what the last returned."""
        away, result = self._away, None
        limit_bytes = away.limit_bytes(sum(map(expected_bytes, parts.fresh)))
        fresh = cut([(p, expected_bytes(p)) for p in parts.fresh], limit_bytes)
        for part in ([parts.rest] if parts.rest else []) + fresh:
            with narrowed(self._optimizer, part):
                result = self._call()
            away.release(keep=1)
            away.take_new(self._optimizer.state, part)
        for part in parts.away.values():
            with narrowed(self._optimizer, part):
                result = self._call()
            away.staging.send_home()
        return result


def expected_bytes(parameter: torch.Tensor) -> int:
    """A guess at the state that a first step will make: two tensors like the parameter."""
    return 2 * parameter.numel() * parameter.element_size()
