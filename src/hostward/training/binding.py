"""Operations of a schedule bound to the buffers of bucket states, and what they read anew in every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hostward.engine.backend import (
    ALL_ZERO,
    AdamWOperands,
    Backend,
    Batch,
    BoundRange,
    Buffer,
    Clipping,
    Constants,
    Event,
    Hyper,
    Partials,
    Scalars,
    Work,
    chunks_of,
    empty_buffer,
)
from hostward.errors import ModelError
from hostward.host.adamw import FloatTable, bias_tables
from hostward.plan import Placement
from hostward.schedule import Kind, Lane, Op

from .slots import Slots
from .state import BucketState
from .targets import Targets
from .torch_host import TorchHostStep

_FIRST_TABLE_LENGTH = 1024
_KEPT_WORKS = 4096


@dataclass(frozen=True, slots=True)
class Memory:
    """What all buckets share: scalars on both sides and the partial sums of the norm, by bucket."""

    device_scalars: Scalars
    host_scalars: Scalars
    partials: Partials
    first_chunks: Sequence[Sequence[int]]
    """By bucket and range: the first chunk in `partials`."""


@dataclass(frozen=True, slots=True)
class PointWorks:
    """The operations of a point, bound to one choice of ranges: those before the first AdamW, then the rest."""

    ops: tuple[Op, ...]
    asked: Sequence[tuple[int, bool]]
    """The choices that they depend on: of which bucket, and whether of its fresh ranges."""
    chosen: list[Set[int]]
    before: Batch
    stepping: Batch | None


def takes_fresh(op: Op) -> bool:
    """Whether the operation is over ranges that were not taken before, rather than over all ranges of the step."""
    return op.kind is Kind.PARTIALS or op.name.startswith("download/")


class Bindings:
    """Binds operations once, and again only for another selection of ranges.

    `gradients[bucket][range]` are the device buffers that gradients are put into. `by_torch`: torch steps host buckets.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        memory: Memory,
        slots: Slots,
        targets: Targets,
        *,
        by_torch: bool,
    ) -> None:
        self._backend = backend
        self._states = states
        self._memory = memory
        self._slots = slots
        self._targets = targets
        self._by_torch = by_torch
        self.gradients = [[empty_buffer("gradients") for _ in s.bucket.ranges] for s in states]
        self.events: defaultdict[str, Event] = defaultdict(backend.event)
        """By name of the operation."""
        self.clipping = Clipping()
        self._constants: dict[int, Constants] = {}
        self._tables: dict[tuple[float, float], tuple[FloatTable, FloatTable]] = {}
        self._step_bound: int | None = None
        self._works: dict[tuple[Op, tuple[int, ...]], Work] = {}
        self._points: dict[str, PointWorks] = {}

    def at(self, point: str, ops: tuple[Op, ...], chosen_of: Callable[[int, bool], Set[int]]) -> PointWorks:
        """The works of a point, in the order of `ops`: those of last time if all choices are those of last time.

        `chosen_of(bucket, fresh)` are the ranges of operations that `takes_fresh` or not.
        """
        found = self._points.get(point)
        if found is None or found.ops is not ops or found.chosen != [chosen_of(*ask) for ask in found.asked]:
            found = self._points[point] = self._gather(ops, chosen_of)
        return found

    def _gather(self, ops: tuple[Op, ...], chosen_of: Callable[[int, bool], Set[int]]) -> PointWorks:
        ops_here = [op for op in ops if op.kind is not Kind.MODEL]
        choices = {op: (op.bucket, takes_fresh(op)) for op in ops_here if op.bucket is not None}
        asked = list(dict.fromkeys(choices.values()))
        chosen: list[Set[int]] = [frozenset(chosen_of(*ask)) for ask in asked]
        works = [self.work(op, chosen_of(*choices[op]) if op in choices else ()) for op in ops_here]
        first = next((i for i, op in enumerate(ops_here) if op.kind is Kind.ADAMW), None)
        batch = self._backend.batch
        return PointWorks(ops, asked, chosen, batch(works[:first]), None if first is None else batch(works[first:]))

    def work(self, op: Op, chosen: Iterable[int]) -> Work:
        """The operation over the chosen ranges of its bucket; `chosen` is empty for operations on all buckets, and for
        the partial sums of a bucket without gradients.
        """
        key = (op, tuple(sorted(chosen)))
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = self._bind(*key)
        return found

    def forget(self, bucket: int | None = None) -> None:
        """Bind the operations of a bucket, or all, anew: buffers have changed. Nothing of them is pending."""
        kept = {} if bucket is None else {k: work for k, work in self._works.items() if k[0].bucket != bucket}
        self._works = kept
        self._points.clear()

    def trim(self) -> None:
        """Selections of ranges may differ in every step: do not keep all there ever were. Nothing is pending."""
        if len(self._works) > _KEPT_WORKS:
            self.forget()

    def _bind(self, op: Op, chosen: tuple[int, ...]) -> Work:
        backend, memory = self._backend, self._memory
        waits = [self.events[name] for name in (*op.waits, *op.prior)]
        rest: dict[str, Any] = {"waits": waits, "done": self.events[op.name]}
        if op.bucket is not None:
            return self._bind_bucket(op, op.bucket, chosen, rest)
        if op.kind is Kind.NORM:
            return backend.norm(memory.partials, memory.device_scalars, self.clipping, **rest)
        if op.kind is Kind.COPY:
            pairs = list(zip(memory.host_scalars.all(), memory.device_scalars.all(), strict=True))
            return backend.copy(op.lane, pairs, name="offload/d2h/scalars", **rest)
        if op.kind is Kind.RETIRE:
            return backend.retire(self._slots.buffers(), op.lane, **rest)
        if op.kind is Kind.ACQUIRE:
            return backend.mark("offload/slots", op.lane, **rest)
        name = op.name.removeprefix("arrive/")
        return backend.mark(f"offload/{'wait/' if name != op.name else ''}{name}", op.lane, **rest)

    def _bind_bucket(self, op: Op, b: int, chosen: tuple[int, ...], rest: Mapping[str, Any]) -> Work:
        backend, state = self._backend, self._states[b]
        gradients = [self.gradients[b][i] for i in chosen]
        name = state.bucket.name
        if op.kind is Kind.PARTIALS:
            if not chosen:
                return self.clear(b, range(len(self.gradients[b])), **rest)
            first = self._memory.first_chunks[b]
            lengths = [state.bucket.ranges[i].numel for i in chosen]
            firsts = [first[i] for i in chosen]
            return backend.partials(f"offload/norm/{name}", gradients, lengths, firsts, self._memory.partials, **rest)
        if op.kind is Kind.RETIRE:
            landing = op.name.startswith("retire/")
            return backend.retire([state.gradients[i] for i in chosen] if landing else gradients, op.lane, **rest)
        if op.kind is Kind.COPY:
            return self._bind_copy(op, b, chosen, rest)
        host = op.lane is Lane.HOST
        targets = [state.weights[i] for i in chosen] if host else [self._targets.weights[b][i] for i in chosen]
        sources = [state.gradients[i] for i in chosen] if host else gradients
        scalars = self._memory.host_scalars if host else self._memory.device_scalars
        operands = self._operands(b, chosen, sources, targets)
        name = f"offload/{state.placement.value}/adamw/{name}"
        if host and self._by_torch:
            return TorchHostStep(backend, name, operands, scalars, rest["done"])
        return backend.adamw(op.lane, name, operands, scalars, **rest)

    def _bind_copy(self, op: Op, b: int, chosen: tuple[int, ...], rest: Mapping[str, Any]) -> Work:
        state, down = self._states[b], op.lane is Lane.D2H
        if state.placement is Placement.STREAMED:
            what = "state"
            there, here = self._slots.of(b), state.streamed()
        elif down:
            what = "grad"
            there, here = [self.gradients[b][i] for i in chosen], [state.gradients[i] for i in chosen]
        else:
            what = "weight"
            there, here = [self._targets.weights[b][i] for i in chosen], [state.weights[i] for i in chosen]
        pairs = list(zip(here, there, strict=True) if down else zip(there, here, strict=True))
        return self._backend.copy(op.lane, pairs, name=f"offload/{op.lane.value}/{what}/{state.bucket.name}", **rest)

    def _operands(
        self, b: int, chosen: tuple[int, ...], gradients: Sequence[Buffer], weights: Sequence[Buffer]
    ) -> AdamWOperands:
        """A bucket's state with these gradients and weights, one for each chosen range."""
        state = self._states[b]
        if state.placement is Placement.STREAMED:
            exp_avg, exp_avg_sq, *rest = self._slots.of(b)
            low = rest[0] if rest else None
        else:
            exp_avg, exp_avg_sq, low = state.exp_avg, state.exp_avg_sq, state.low
        ranges = [
            BoundRange(state.bucket.offsets[i], gradient, weight, state.count_of(i))
            for i, gradient, weight in zip(chosen, gradients, weights, strict=True)
        ]
        return AdamWOperands(ranges, state.bucket.kind, exp_avg, exp_avg_sq, low, self._constants[state.bucket.group])

    def clear(self, b: int, missing: Iterable[int], **rest: Any) -> Work:
        """Let ranges without a gradient count as all zero."""
        first, ranges = self._memory.first_chunks[b], self._states[b].bucket.ranges
        parts = [self._memory.partials.part(first[i], chunks_of(ranges[i].numel)) for i in missing]

        def run() -> None:
            for part in parts:
                part.sums.data.zero_()
                part.exponents.data.fill_(ALL_ZERO)

        writes = [buffer for part in parts for buffer in part.all()]
        return self._backend.launch("offload/norm/clear", run, reads=[], writes=writes, **rest)

    def forget_step_bound(self) -> None:
        """Step counts were loaded: look them up again before the next step."""
        self._step_bound = None

    def set_constants(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over the hyper-parameters of a step that is about to be issued."""
        # A schedule that changes betas at every step would otherwise leave a table behind at every step.
        betas = {(float(g["betas"][0]), float(g["betas"][1])) for g in groups}
        self._tables = {key: tables for key, tables in self._tables.items() if key in betas}
        if self._step_bound is None:
            self._backend.synchronise()
            self._step_bound = max((int(s.counts.data.max().item()) for s in self._states), default=0)
        # An upper bound of all step counts without reading them: they advance by at most one a step.
        self._step_bound += 1
        for i, group in enumerate(groups):
            beta1, beta2 = group["betas"]
            hyper = Hyper(
                float(group["lr"]), float(group["weight_decay"]), float(beta1), float(beta2), float(group["eps"])
            )
            constants, tables = self._constants.get(i), self._bias_tables(hyper)
            if constants is None:
                self._constants[i] = Constants(hyper, tables)
            else:
                constants.hyper, constants.tables = hyper, tables

    def _bias_tables(self, hyper: Hyper) -> tuple[FloatTable, FloatTable]:
        """Bias corrections that reach the step about to be taken."""
        key = (hyper.beta1, hyper.beta2)
        need = (self._step_bound or 0) + 1
        tables = self._tables.get(key)
        if tables is None or (len(tables[0]) <= need and not (tables[0][-1] == 1.0 and tables[1][-1] == 1.0)):
            tables = self._tables[key] = bias_tables(*key, max(_FIRST_TABLE_LENGTH, 2 * need))
        return tables


def mixed_gradients(state: BucketState, found: Sequence[str]) -> ModelError:
    """The error for a bucket whose gradients differ in dtype."""
    return ModelError(
        f"gradients of bucket {state.bucket.name} have dtypes {', '.join(found)}",
        why="one kernel steps a bucket, and takes gradients of one dtype",
        fix="give all parameters of a layer the same grad_dtype",
    )
