"""A training step carried out: the operations of its schedule, bound to buffers, issued as training reaches their
points.

`hostward.lowering.optimizer` decides what is issued when, and what waits for what.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hostward.engine.backend import (
    ALL_ZERO,
    AdamWOperands,
    Backend,
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
from hostward.inspect import Tracked
from hostward.lowering.optimizer import (
    GRADIENTS_IN_FLIGHT,
    STAGE,
    STEP,
    UNSTAGE,
    StepShape,
    gradient_point,
    lower,
    lower_step,
    release_point,
    use_point,
)
from hostward.plan import Placement
from hostward.schedule import Kind, Lane, Op, Schedule

from .gradients import Gradient
from .slots import Slots
from .state import BucketState, allocate_gradients, pieces
from .targets import Targets
from .torch_host import TorchHostStep

_FIRST_TABLE_LENGTH = 1024
_KEPT_SCHEDULES = 64


@dataclass(frozen=True, slots=True)
class Memory:
    """What all buckets share: scalars on both sides and the partial sums of the norm, by bucket."""

    device_scalars: Scalars
    host_scalars: Scalars
    partials: Partials
    first_chunks: Sequence[Sequence[int]]
    """By bucket and range: the first chunk in `partials`."""


class StepIssuer:
    """Carries out the schedule of steps for a fixed set of bucket states.

    Args:
        layers: the use point's layer of each bucket.
        slots: device staging of streamed buckets.
        overlap: False: everything happens within `step`.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        tracked: Mapping[str, Tracked],
        memory: Memory,
        *,
        layers: Sequence[str],
        slots: Slots,
        overlap: bool,
        use_torch_optimizer: bool,
    ) -> None:
        self._backend = backend
        self._states = states
        self._tracked = tracked
        self._memory = memory
        self._slots = slots
        self._layers = tuple(layers)
        self._overlap = overlap
        self._torch_host = TorchHostStep() if use_torch_optimizer else None
        self._events: defaultdict[str, Event] = defaultdict(backend.event)
        self._pieces = pieces(states)
        self._index = {state: b for b, state in enumerate(states)}
        self._of_bucket = [tuple(dict.fromkeys(r.name for r in s.bucket.ranges)) for s in states]
        self._gradients = [[empty_buffer("gradients") for _ in s.bucket.ranges] for s in states]
        self._targets = Targets(backend, states, tracked)
        self._constants: dict[int, Constants] = {}
        self._clipping = Clipping()
        self._tables: dict[tuple[float, float], tuple[FloatTable, FloatTable]] = {}
        self._step_bound: int | None = None
        self.torn = False
        """Some buckets may have taken a step that others have not. Set here; cleared by who sees the step through."""
        self._uses = dict.fromkeys(layers)
        self._streamed_of: dict[str, list[int]] = {}
        for b, state in enumerate(states):
            if state.placement is Placement.STREAMED:
                self._streamed_of.setdefault(layers[b], []).append(b)
        self.pending: set[str] = set()
        """Layers whose weights have not been waited for since the last step."""
        self._unstaged = True
        self._last_chosen: list[set[int]] = [set() for _ in states]
        self._lower()
        self._reset()
        # What is pending writes to memory that this object holds.
        weakref.finalize(self, backend.drain)

    def _lower(self) -> None:
        """Make the schedule anew: slots have changed. Nothing is pending."""
        placements = tuple(s.placement for s in self._states)
        slots = self._slots
        self._shape = StepShape(
            placements, self._layers, slots=slots.count, transient=slots.transient, overlap=self._overlap
        )
        self.schedule = lower_step(self._shape)
        self._schedules: dict[frozenset[int], Schedule] = {frozenset(): self.schedule}
        self._points: Mapping[str, tuple[Op, ...]] = self.schedule.points
        self._works: dict[tuple[Op, tuple[int, ...]], Work] = {}

    def _reset(self) -> None:
        """No turn is on."""
        self.turning = False
        self._held: dict[str, torch.Tensor] = {}
        self._chosen: list[set[int]] = [set() for _ in self._states]
        self._fresh: list[set[int]] = [set() for _ in self._states]
        self._reported: set[int] = set()
        self._in_flight: deque[int] = deque()
        self._staged = False

    def forget_step_bound(self) -> None:
        """Step counts were loaded: look them up again before the next step."""
        self._step_bound = None

    # ---------------------------------------------------------------- during backward

    def take(self, gradient: Gradient) -> None:
        """A gradient is final. Once all those of a bucket are, its gradient point has come.

        Raises:
            ModelError: gradients of one bucket differ in dtype.
        """
        if not self.turning:
            self._begin()
        self._held[gradient.name] = gradient.flat
        for state, i, r in self._pieces[gradient.name]:
            b = self._index[state]
            self._backend.refill(self._gradients[b][i], gradient.flat[r.start : r.stop])
            self._chosen[b].add(i)
            self._fresh[b].add(i)
            if len(self._chosen[b]) == len(state.bucket.ranges):
                self._gradient_point(b)

    def give_back(self, name: str) -> torch.Tensor:
        """Return a taken gradient, flat, because more will be added to it; `take` will be called for it again."""
        parameter = self._tracked[name].parameter
        held = self._held.pop(name, None)
        if held is None:
            dtype = next(s.gradients[i].data.dtype for s, i, _ in self._pieces[name] if s.gradients)
            held = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
            for state, i, r in self._pieces[name]:
                b, target = self._index[state], held[r.start : r.stop]
                if self._gradients[b][i].data.numel():
                    target.copy_(self._gradients[b][i].data)
                else:
                    self._fetch_back(b, i, target)
        for state, i, _ in self._pieces[name]:
            b = self._index[state]
            self._gradients[b][i].data = held.new_empty(0)
            self._chosen[b].discard(i)
            self._fresh[b].discard(i)
            self._reported.discard(b)
        return held

    def _fetch_back(self, b: int, i: int, target: torch.Tensor) -> None:
        """Copy one range of a gradient from its landing place to the device, before whatever comes on compute."""
        backend, state = self._backend, self._states[b]
        made = backend.mark("offload/gradient/wanted", Lane.COMPUTE).issue()
        waits = [self._events[f"download/{b}"], made]
        pairs = [(backend.adopt(target, "gradients"), state.gradients[i])]
        back = backend.copy(Lane.H2D, pairs, name=f"offload/h2d/grad/{state.bucket.name}", waits=waits).issue()
        backend.mark("offload/gradient/back", Lane.COMPUTE, waits=[back]).issue()

    def discard(self) -> None:
        """No step will be made with what was taken; its memory goes back."""
        if not self.turning:
            return
        while self._in_flight:
            self._release(self._in_flight.popleft())
        self._drop(range(len(self._states)))
        staged = self._staged
        self._reset()
        # What has been read stays in its slots, and counts for the turn that follows.
        self.turning, self._staged = True, staged

    def _begin(self) -> None:
        for layer in self._uses:
            self.use(layer)
        self._backend.begin_turn()
        self._points = self._schedule(frozenset()).points
        self.turning = True

    def _gradient_point(self, b: int) -> None:
        if b in self._reported:
            return
        if self._fresh[b]:
            self._require_one_dtype(b)
        self._reported.add(b)
        self._issue_point(gradient_point(b))
        if self._shape.overlap:
            self._fresh[b].clear()
        self._slots.sample(b)
        if self._shape.overlap and self._states[b].placement is Placement.HOST:
            self._in_flight.append(b)
            if len(self._in_flight) > GRADIENTS_IN_FLIGHT:
                self._release(self._in_flight.popleft())
        if not self._staged and self._shape.overlap and self._slots.ready(b):
            self._stage()

    def _release(self, b: int) -> None:
        if b in self._reported:
            self._issue_point(release_point(b))
            self._drop([b])

    def _drop(self, buckets: Iterable[int]) -> None:
        """Forget gradients that the compute lane may overwrite from here on."""
        for b in buckets:
            for buffer in self._gradients[b]:
                buffer.data = buffer.data.new_empty(0)
            for name in self._of_bucket[b]:
                self._held.pop(name, None)

    def _stage(self) -> None:
        self._staged = True
        self._unstaged = False
        if self._shape.transient:
            self._slots.acquire()
        self._issue_point(STAGE)

    # ---------------------------------------------------------------- the step

    def check(self, gradients: Sequence[Gradient]) -> None:
        """Raises ModelError for gradients that cannot be stepped, before anything is changed, at any placement."""
        dtypes = {g.name: g.flat.dtype for g in gradients}
        for b, state in enumerate(self._states):
            taken = {str(self._gradients[b][i].data.dtype) for i in self._chosen[b] if b not in self._reported}
            found = sorted(taken | {str(dtypes[r.name]) for r in state.bucket.ranges if r.name in dtypes})
            if len(found) > 1:
                raise _mixed(state, found)

    def step(self, groups: Sequence[Mapping[str, Any]], clipping: Clipping) -> None:
        """Step every range whose gradient was taken. `clipping` is this step's."""
        if not self.turning:
            self._begin()
        self._set_constants(groups)
        for name in ("max_norm", "inv_scale", "found_inf", "overflow_out"):
            setattr(self._clipping, name, getattr(clipping, name))
        ranges = [s.bucket.ranges for s in self._states]
        stepped = dict.fromkeys(ranges[b][i].name for b, chosen in enumerate(self._chosen) for i in chosen)
        scattered = self._targets.refresh(stepped)
        for b in reversed(range(len(self._states))):
            if self._chosen[b]:
                self._gradient_point(b)
                self._clear_missing(b)
        absent = frozenset(b for b in range(len(self._states)) if not self._chosen[b])
        self._points = self._schedule(absent).points
        while self._in_flight:
            self._release(self._in_flight.popleft())
        if self._slots.count and not self._staged:
            self._stage()
        self._issue_point(STEP)
        self._backend.end_turn()
        self._end(scattered)

    def _end(self, scattered: bool) -> None:
        """Everything of the step has been issued but the arrivals."""
        self._drop(b for b, s in enumerate(self._states) if s.placement is not Placement.STREAMED)
        self._last_chosen = self._chosen
        self._reset()
        self.pending = set(self._uses)
        if not self._shape.overlap or scattered:
            self.use_all()
        if scattered:
            self._targets.scatter()
        if self._slots.settle():
            self.use_all()
            self._lower()

    def use(self, layer: str) -> None:
        """The caller is about to use a layer's weights: the compute lane waits for them, and for nothing else."""
        if layer not in self.pending:
            return
        self._slots.sample_use(layer)
        if self._unstaged is False and (self._slots.wanted_back(layer) or len(self.pending) == 1):
            self._issue_point(UNSTAGE)
            self._slots.give_back()
            self._unstaged = True
        self.pending.discard(layer)
        self._issue_point(use_point(layer))
        self._drop(self._streamed_of.get(layer, ()))

    def use_all(self) -> None:
        """The same for all layers."""
        for layer in list(self._uses):
            self.use(layer)

    # ---------------------------------------------------------------- binding

    def _schedule(self, absent: frozenset[int]) -> Schedule:
        found = self._schedules.get(absent)
        if found is None:
            shape = self._shape
            found = self._schedules[absent] = lower(replace(shape, absent=absent))
            if len(self._schedules) > _KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
        return found

    def _issue_point(self, point: str) -> None:
        for op in self._points.get(point, ()):
            if op.kind is Kind.MODEL:
                continue
            if op.kind is Kind.ADAMW:
                self.torn = True
                if op.lane is Lane.HOST and op.bucket is not None and self._torch_host is not None:
                    self._step_by_torch(op.bucket)
                    continue
            self._work(op).issue()

    def _work(self, op: Op) -> Work:
        chosen = () if op.bucket is None else tuple(sorted(self._chosen_of(op, op.bucket)))
        key = (op, chosen)
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = self._bind(op, chosen)
        return found

    def _chosen_of(self, op: Op, b: int) -> set[int]:
        if op.kind is Kind.PARTIALS or op.name.startswith("download/"):
            return self._fresh[b]
        return self._chosen[b] or self._last_chosen[b]

    def _bind(self, op: Op, chosen: tuple[int, ...]) -> Work:
        backend, memory = self._backend, self._memory
        waits = [self._events[name] for name in (*op.waits, *op.prior)]
        rest: dict[str, Any] = {"waits": waits, "done": self._events[op.name]}
        if op.bucket is not None:
            return self._bind_bucket(op, op.bucket, chosen, rest)
        if op.kind is Kind.NORM:
            return backend.norm(memory.partials, memory.device_scalars, self._clipping, **rest)
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
        gradients = [self._gradients[b][i] for i in chosen]
        name = state.bucket.name
        if op.kind is Kind.PARTIALS:
            if b not in self._reported:  # absent
                return self._bind_clear(b, range(len(self._gradients[b])), rest)
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
        return backend.adamw(op.lane, f"offload/{state.placement.value}/adamw/{name}", operands, scalars, **rest)

    def _bind_copy(self, op: Op, b: int, chosen: tuple[int, ...], rest: Mapping[str, Any]) -> Work:
        state, down = self._states[b], op.lane is Lane.D2H
        if state.placement is Placement.STREAMED:
            what = "state"
            there, here = self._slots.of(b), state.streamed()
        elif down:
            what = "grad"
            there, here = [self._gradients[b][i] for i in chosen], [state.gradients[i] for i in chosen]
        else:
            what = "weight"
            there, here = [self._targets.weights[b][i] for i in chosen], [state.weights[i] for i in chosen]
        pairs = list(zip(here, there, strict=True) if down else zip(there, here, strict=True))
        return self._backend.copy(op.lane, pairs, name=f"offload/{op.lane.value}/{what}/{state.bucket.name}", **rest)

    def _operands(
        self, b: int, chosen: tuple[int, ...], gradients: Sequence[Buffer], weights: Sequence[Buffer]
    ) -> AdamWOperands:
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

    def _bind_clear(self, b: int, missing: Iterable[int], rest: Mapping[str, Any]) -> Work:
        """Ranges without a gradient count as all zero."""
        first, ranges = self._memory.first_chunks[b], self._states[b].bucket.ranges
        parts = [self._memory.partials.part(first[i], chunks_of(ranges[i].numel)) for i in missing]

        def run() -> None:
            for part in parts:
                part.sums.data.zero_()
                part.exponents.data.fill_(ALL_ZERO)

        writes = [buffer for part in parts for buffer in part.all()]
        return self._backend.launch("offload/norm/clear", run, reads=[], writes=writes, **rest)

    def _clear_missing(self, b: int) -> None:
        missing = set(range(len(self._gradients[b]))) - self._chosen[b]
        if missing:
            self._bind_clear(b, sorted(missing), {}).issue()

    def _step_by_torch(self, b: int) -> None:
        """On this thread, between empty lanes."""
        state, chosen = self._states[b], sorted(self._chosen[b])
        self._backend.synchronise()
        sources, targets = [state.gradients[i] for i in chosen], [state.weights[i] for i in chosen]
        operands = self._operands(b, tuple(chosen), sources, targets)
        if self._torch_host is not None:
            self._torch_host.step(operands, self._memory.host_scalars)

    def _require_one_dtype(self, b: int) -> None:
        """Raises ModelError if the gradients about to be stepped together differ; makes landing places fit them."""
        state = self._states[b]
        dtypes = {self._gradients[b][i].data.dtype for i in self._fresh[b]}
        if len(dtypes) > 1:
            raise _mixed(state, sorted(map(str, dtypes)))
        if state.placement is Placement.HOST:
            (dtype,) = dtypes
            if state.gradient is None or state.gradient.data.dtype is not dtype:
                pinned = state.gradient is None or state.gradient.pinned
                allocate_gradients(self._backend, [state], [dtype], pinned=pinned)
                self._works = {key: work for key, work in self._works.items() if key[0].bucket != b}

    # ---------------------------------------------------------------- hyper-parameters

    def _set_constants(self, groups: Sequence[Mapping[str, Any]]) -> None:
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


def _mixed(state: BucketState, found: Sequence[str]) -> ModelError:
    return ModelError(
        f"gradients of bucket {state.bucket.name} have dtypes {', '.join(found)}",
        why="one kernel steps a bucket, and takes gradients of one dtype",
        fix="give all parameters of a layer the same grad_dtype",
    )
