"""One step of an optimizer whose state is away: chunk by chunk through a few device slots.

    compute      acquire  step of what stays  step/0  step/1  ...          free
    h2d          read/0  read/1  read/2               read/3 (slot of 0)
    d2h                                       drain/0  drain/1  ...

Each chunk of state comes into a slot, the optimizer steps exactly its parameters, and the chunk goes back. Slots exist
only during the step. When it ends, the compute lane waits for the last drain, so that whatever comes later, the next
step's reads included, comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hostward.engine.backend import Buffer, Event, Tier
from hostward.errors import MemoryLimitError
from hostward.schedule import Lane

from .foreign_away import AwayState
from .foreign_calls import PartCalls, check_parameter
from .foreign_state import HOST_OWNER, Chunk, cut, pieces, settle

SLOTS = 3
"""One chunk comes, one is stepped, one goes."""


@dataclass(slots=True)
class _Parts:
    """The parameters of one step, by what must happen to their state.

    rest: nothing: it stays, there is none, or there is no gradient. fresh: nobody knows yet what the step will make.
    away: it comes and goes, by chunk.
    """

    rest: list[torch.Tensor] = field(default_factory=list)
    fresh: list[torch.Tensor] = field(default_factory=list)
    away: dict[Chunk, list[torch.Tensor]] = field(default_factory=dict)


class ChunkedStep:
    """One step of `optimizer`, in which `call` steps whatever its groups hold."""

    def __init__(self, optimizer: torch.optim.Optimizer, away: AwayState, call: Callable[[], object]) -> None:
        """Raises ModelError for a parameter that cannot be followed."""
        self._optimizer = optimizer
        self._away = away
        self._backend = away.backend
        parts = self._sorted()
        self._rest = parts.rest
        self._turns = list(parts.away.items())
        self._limit_bytes = away.limit_bytes(sum(map(expected_bytes, parts.fresh)))
        self._fresh = cut([(p, expected_bytes(p)) for p in parts.fresh], self._limit_bytes)
        self._calls = PartCalls(optimizer, call, bool(parts.rest) + len(self._fresh) + len(self._turns))
        self.refused: MemoryLimitError | None = None
        """What kept new state on the device. The step is whole all the same."""
        self.torn = False
        """After an error: whether some parameters have been stepped and others have not."""

    def run(self) -> object:
        """Issue all of it; returns what the last call returned. Raises what the optimizer raises, with empty lanes."""
        backend = self._backend
        backend.begin_turn()
        slots: list[Buffer] = []
        drains: list[Event] = []
        whole = False
        try:
            slots = self._acquire([chunk for chunk, _ in self._turns])
            acquired = backend.mark("offload/acquire", Lane.COMPUTE).issue()
            reads = [self._read(k, slot, acquired) for k, slot in enumerate(slots)]
            self._step_unmoved()
            for k in range(len(self._turns)):
                slot = slots[k % SLOTS]
                drains.append(self._step_chunk(k, slot, reads[k]))
                if k + SLOTS < len(self._turns):
                    reads.append(self._read(k + SLOTS, slot, drains[k]))
            self._calls.finish()
            whole = True
        finally:
            if not whole:
                backend.drain()
                self.torn = not self._calls.undo()
            backend.free(slots, after=drains[-SLOTS:] if whole else ())
            self._away.release()
            backend.end_turn()
        return self._calls.result

    def _sorted(self) -> _Parts:
        optimizer, parts, away = self._optimizer, _Parts(), self._away
        for p in dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]):
            chunk = away.chunk_of.get(p)
            if chunk is not None and not chunk.holds(p, optimizer.state):
                away.forget(p)
                chunk = None
            if p.grad is None or p in away.staying or p in away.stateless:
                parts.rest.append(p)
            elif chunk is not None:
                parts.away.setdefault(chunk, []).append(p)
            else:
                check_parameter(p, self._backend.device)
                parts.fresh.append(p)
        return parts

    def _acquire(self, chunks: Sequence[Chunk]) -> list[Buffer]:
        """Device slots, each as large as the largest chunk that will use it. The compute lane makes them."""
        sizes = [max(c.size_bytes for c in chunks[k::SLOTS]) for k in range(min(SLOTS, len(chunks)))]
        if not sizes:
            return []
        return self._backend.allocate(Tier.DEVICE, sizes, torch.uint8, f"{HOST_OWNER} slots", zero=False)

    def _read(self, k: int, slot: Buffer, after: Event) -> Event:
        chunk, active = self._turns[k]
        runs, name = chunk.runs(active), f"offload/h2d/state/{chunk.name}"
        pairs = list(zip(pieces(slot, runs), pieces(chunk.slab, runs), strict=True))
        return self._backend.copy(Lane.H2D, pairs, name=name, waits=[after]).issue()

    def _step_chunk(self, k: int, slot: Buffer, read: Event) -> Event:
        """Step the parameters of one chunk, with their state in `slot`, and send it back."""
        (chunk, active), state, device = self._turns[k], self._optimizer.state, self._backend.device
        changed: list[torch.Tensor] = []

        def run() -> None:
            staged = {p: chunk.staged(p, slot) for p in active}
            for p, bundle in staged.items():
                state[p].update(bundle)
            returning = active
            try:
                self._calls.call(active)
                settled = {p: settle(state, p, staged[p], device) for p in active}
                changed.extend(p for p in active if not settled[p])
                returning = [p for p in active if settled[p]]
            finally:
                for p in returning:
                    state[p].update(chunk.homes(p))

        stepped = self._launch(active, f"offload/update/{chunk.name}", run, [slot], [read])
        runs, name = chunk.runs(active), f"offload/d2h/state/{chunk.name}"
        pairs = list(zip(pieces(chunk.slab, runs), pieces(slot, runs), strict=True))
        drained = self._backend.copy(Lane.D2H, pairs, name=name, waits=[stepped]).issue()
        for p in changed:
            self._away.forget(p)
        self._take(changed)
        return drained

    def _step_unmoved(self) -> None:
        """Step what has its state on the device, or none yet, and take away what has come."""
        if self._rest:
            self._launch(self._rest, "offload/update/rest", partial(self._calls.call, self._rest))
            self._take([p for p in self._rest if p in self._away.stateless])
        for part in self._fresh:
            self._away.release(keep=1)
            self._launch(part, "offload/update/new", partial(self._calls.call, part))
            self._take(part)

    def _launch(
        self,
        parameters: list[torch.Tensor],
        name: str,
        run: Callable[[], None],
        writes: Sequence[Buffer] = (),
        waits: Sequence[Event] = (),
    ) -> Event:
        """Run it on the compute lane. What it does to Python objects is done when this returns."""
        self._calls.begin(parameters)
        self._backend.launch(name, run, reads=(), writes=writes, waits=waits).issue()
        return self._backend.mark("offload/updated", Lane.COMPUTE).issue()

    def _take(self, parameters: list[torch.Tensor]) -> None:
        """Move the state that a step has made, if it shall leave."""
        if not parameters:
            return
        try:
            self._away.take(self._optimizer.state, parameters, self._limit_bytes)
        except MemoryLimitError as error:
            self.refused = error
        else:
            known = self._away.chunk_of.keys() | self._away.staying
            self._away.stateless.update(p for p in parameters if p not in known)


def expected_bytes(parameter: torch.Tensor) -> int:
    """A guess at the state that a first step will make: two tensors like the parameter."""
    return 2 * parameter.numel() * parameter.element_size()
