"""Bind operations of a schedule to the buffers of bucket states, and set what they read in every step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hostward.core.placement import Placement
from hostward.errors import ModelError
from hostward.kernels.cpu.adamw import FloatTable, Role, bias_tables
from hostward.optim.bucket_lifecycle import BucketStep
from hostward.optim.bucket_state import BucketState, rounded
from hostward.optim.host_accumulation import HostGradAccumulator
from hostward.optim.range_selection import Addition, Choice, PointWorks, Stepping, Which, which
from hostward.optim.staging_buffers import StagingBuffers
from hostward.optim.weight_views import ParamViews
from hostward.runtime.backend import (
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
    SecondSet,
    Work,
    chunks_of,
    empty_buffer,
)
from hostward.runtime.global_norm import Across
from hostward.schedule.ops import Kind, Lane, Op, Schedule
from hostward.schedule.optimizer import StepShape, lower_step

_FIRST_TABLE_LENGTH = 1024
_KEPT_WORKS = 4096
_NO_RANGES: frozenset[int] = frozenset()
_KEPT_CHOICES = 4
"""Choices kept per trigger: microbatches that begin totals, add to them, or make their sums alternate."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Holds what all buckets share: scalars on both sides, and the partial sums of the norm by bucket."""

    device_scalars: Scalars
    host_scalars: Scalars
    partials: Partials
    host_partials: Partials | None
    """Partial sums of gradients that are accumulated on the host."""
    first_chunks: Sequence[Sequence[int]]
    """First chunk of each range in both partial sums, by bucket and range."""
    across: Across | None = None
    """Combines the partial sums of parameters that several processes share."""


class Bindings:
    """Binds operations once, and again only for another selection of ranges.

    `gradients[bucket][range]` are the device buffers that gradients are put into. `buckets` say which ranges have
    gradients whenever operations are issued. `by_torch`: torch steps host buckets.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        memory: Memory,
        slots: StagingBuffers,
        totals: HostGradAccumulator,
        targets: ParamViews,
        *,
        buckets: Sequence[BucketStep],
        by_torch: bool,
    ) -> None:
        self._backend = backend
        self._buckets = buckets
        self._states = states
        self._memory = memory
        self._slots = slots
        self._totals = totals
        self._targets = targets
        self._by_torch = by_torch
        self.gradients = [[empty_buffer("gradients") for _ in s.bucket.ranges] for s in states]
        self.events: defaultdict[str, Event] = defaultdict(backend.event)
        """Events by name of the operation."""
        self.clipping = Clipping()
        self._constants: dict[int, Constants] = {}
        self._tables: dict[tuple[float, float], tuple[FloatTable, FloatTable]] = {}
        self._step_bound: int | None = None
        self._works: dict[tuple[Op, tuple[int, ...], tuple[bool, ...]], Work] = {}
        self._points: defaultdict[tuple[str, ...], list[PointWorks]] = defaultdict(list)

    def at(self, triggers: tuple[str, ...], schedule: Mapping[str, tuple[Op, ...]], *, last: bool) -> PointWorks:
        """Return the works of triggers over the ranges that have gradients now.

        They are in the order of `triggers` and then of the schedule. Works of an earlier time are returned when
        schedule and all choices were the same. `last`: no further microbatch is known to come.
        """
        kept = self._points[triggers]
        choice = self._choice
        for found in kept:
            if found.schedule is schedule and found.chosen == [choice(b, which, last) for b, which in found.asked]:
                return found
        if len(kept) == _KEPT_CHOICES:
            del kept[0]
        kept.append(self._gather(triggers, schedule, last=last))
        return kept[-1]

    def _choice(self, b: int, which: Which, last: bool) -> Choice:
        bucket = self._buckets[b]
        if which is Which.ALL:
            return bucket.ranges or bucket.last_ranges
        if which is Which.STEPPED:
            return Stepping(bucket.ranges or bucket.last_ranges, self._states[b].turn, bucket.guessed)
        if which is Which.GUESSED:
            return Stepping(bucket.ranges if bucket.can_guess else _NO_RANGES, self._states[b].turn, True)
        if which is Which.UNSENT:
            return bucket.unsent
        if which is Which.ADDED:
            return Addition(bucket.unsent - bucket.accumulated, bucket.unsent & bucket.accumulated, last)
        return bucket.accumulated - bucket.summed

    def _which(self, op: Op, b: int) -> Which:
        found = which(op)
        return Which.ALL if found is Which.STEPPED and self._states[b].twin is None else found

    def _gather(self, triggers: tuple[str, ...], schedule: Mapping[str, tuple[Op, ...]], *, last: bool) -> PointWorks:
        ops_here = [op for trigger in triggers for op in schedule.get(trigger, ()) if op.kind is not Kind.MODEL]
        asks = {op: (op.bucket, self._which(op, op.bucket)) for op in ops_here if op.bucket is not None}
        # The requested sets go on to change; an answer that is kept must not.
        answers = {ask: _frozen(self._choice(*ask, last)) for ask in asks.values()}
        before: list[Work] = []
        stepping: list[Work] = []
        for op in ops_here:
            part = stepping if stepping or op.kind is Kind.ADAMW else before
            part += self._works_of(op, answers[asks[op]] if op in asks else frozenset())
        batch = self._backend.batch
        return PointWorks(
            schedule, list(answers), list(answers.values()), batch(before), batch(stepping) if stepping else None
        )

    def _works_of(self, op: Op, chosen: Choice) -> list[Work]:
        if isinstance(chosen, Addition):
            parts = [(True, chosen.begin), (False, chosen.go_on)]
            return [self.addition(op, ranges, first=first, last=chosen.last) for first, ranges in parts if ranges]
        if isinstance(chosen, Stepping):
            return [self.step(op, chosen)] if chosen.ranges else []
        if not chosen and which(op) is Which.WITHOUT_SUMS:
            return []
        return [self.work(op, chosen), *self._kept_fragments(op, chosen)]

    def _kept_fragments(self, op: Op, chosen: Choice) -> list[Work]:
        """Return the works that keep elements of these gradients for the norm, after their partial sums.

        Elements of totals on the host are copied to the device with the sums.
        """
        if op.kind is not Kind.PARTIALS or op.lane is Lane.HOST or op.bucket is None or not isinstance(chosen, Set):
            return []
        parts = [(kept, self.gradients[op.bucket][i], span) for i, kept, span in self._fragments(op.bucket, chosen)]
        name = f"offload/norm/fragments/{self._states[op.bucket].bucket.name}"
        return [KeepFragments(self._backend, name, parts)] if parts else []

    def _fragments(self, b: int, chosen: Iterable[int]) -> list[tuple[int, Buffer, slice]]:
        """Return, for each fragment of the chosen ranges, its range, where elements are kept, and which elements."""
        across, wanted = self._memory.across, frozenset(chosen)
        found = () if across is None else across.of(b)
        return [(f.range, kept, slice(f.start, f.stop)) for f, kept in found if f.range in wanted]

    def work(self, op: Op, chosen: Iterable[int]) -> Work:
        """Return the work of an operation over the chosen ranges of its bucket.

        `chosen` is empty for operations on all buckets, and for the partial sums of a bucket without gradients.
        """
        return self._once(op, chosen, (), self._bind)

    def addition(self, op: Op, chosen: Iterable[int], *, first: bool, last: bool) -> Work:
        """Return the work that adds landed gradients to totals.

        `first`: the totals begin with it. `last`: it also makes the partial sums.
        """
        return self._once(op, chosen, (first, last), partial(self._bind_addition, first=first, last=last))

    def step(self, op: Op, chosen: Stepping) -> Work:
        """Return the work of an operation that steps a bucket with two sets of its state, or uploads its weights."""
        return self._once(op, chosen.ranges, (chosen.turn, chosen.guessed), partial(self._bind, second=chosen.guessed))

    def _once(
        self, op: Op, chosen: Iterable[int], kind: tuple[bool, ...], bind: Callable[[Op, tuple[int, ...]], Work]
    ) -> Work:
        """Return the work that `bind` made of this operation, these ranges and this kind before, or makes now."""
        key = (op, tuple(sorted(chosen)), kind)
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = bind(op, key[1])
        return found

    def forget(self, bucket: int | None = None) -> None:
        """Discard the bound operations of a bucket, or all, because buffers have changed. None of them is pending."""
        kept = {} if bucket is None else {k: work for k, work in self._works.items() if k[0].bucket != bucket}
        self._works = kept
        self._points.clear()

    def trim(self) -> None:
        """Limit how many bound operations are kept, because selections of ranges may differ in every step.

        None of them is pending.
        """
        if max(len(self._works), len(self._points)) > _KEPT_WORKS:
            self.forget()

    def _bind(self, op: Op, chosen: tuple[int, ...], *, second: bool = False) -> Work:
        """Return an operation bound to its buffers. `second`: it is of a step that writes the second set of a state."""
        backend, memory = self._backend, self._memory
        waits = [self.events[name] for name in (*op.waits, *op.prior)]
        rest: dict[str, Any] = {"waits": waits, "done": self.events[op.name]}
        if op.bucket is not None:
            return self._bind_bucket(op, op.bucket, chosen, rest, second)
        if op.kind is Kind.NORM:
            return backend.norm(memory.partials, memory.device_scalars, self.clipping, across=memory.across, **rest)
        if op.kind is Kind.COPY:
            pairs = list(zip(memory.host_scalars.all(), memory.device_scalars.all(), strict=True))
            return backend.copy(op.lane, pairs, name="offload/d2h/scalars", **rest)
        if op.kind is Kind.RETIRE:
            return backend.retire(self._slots.all_of(int(op.name.removeprefix("unstage/"))), op.lane, **rest)
        if op.kind is Kind.ACQUIRE:
            return backend.mark("offload/slots", op.lane, **rest)
        name = op.name.removeprefix("arrive/")
        return backend.mark(f"offload/{'wait/' if name != op.name else ''}{name}", op.lane, **rest)

    def _bind_addition(self, op: Op, chosen: tuple[int, ...], *, first: bool, last: bool) -> Work:
        b, memory = int(op.bucket or 0), self._memory
        state = self._states[b]
        totals, landed = [state.gradients[i] for i in chosen], [self._totals.inbox(b, i) for i in chosen]
        out = None
        if last and memory.host_partials is not None:
            out = memory.host_partials, [memory.first_chunks[b][i] for i in chosen]
        waits, name = [self.events[wait] for wait in op.waits], f"offload/host/add/{state.bucket.name}"
        return self._backend.add(
            name, totals, landed, first=first, partials=out, waits=waits, done=self.events[op.name]
        )

    def _bind_bucket(self, op: Op, b: int, chosen: tuple[int, ...], rest: Mapping[str, Any], second: bool) -> Work:
        backend, state = self._backend, self._states[b]
        gradients = [self.gradients[b][i] for i in chosen]
        name = state.bucket.name
        if op.kind is Kind.PARTIALS:
            if not chosen:
                return self.clear(b, range(len(self.gradients[b])), **rest)
            first = self._memory.first_chunks[b]
            lengths = [state.bucket.ranges[i].numel for i in chosen]
            firsts = [first[i] for i in chosen]
            out = self._memory.partials
            if op.lane is Lane.HOST and self._memory.host_partials is not None:
                gradients, out = [state.gradients[i] for i in chosen], self._memory.host_partials
            return backend.partials(f"offload/norm/{name}", gradients, lengths, firsts, out, lane=op.lane, **rest)
        if op.kind is Kind.JOIN:
            return backend.mark("offload/made", op.lane, **rest)
        if op.kind is Kind.RETIRE:
            landing = op.name.startswith("retire/")
            return backend.retire([state.gradients[i] for i in chosen] if landing else gradients, op.lane, **rest)
        if op.kind is Kind.COPY:
            return self._bind_copy(op, b, chosen, rest, second)
        host = op.lane is Lane.HOST
        targets = [state.weights[i] for i in chosen] if host else [self._targets.weights[b][i] for i in chosen]
        sources = [state.gradients[i] for i in chosen] if host else gradients
        scalars = self._memory.host_scalars if host else self._memory.device_scalars
        operands = self._operands(b, chosen, sources, targets)
        guesses = op.kind is Kind.GUESS
        if second:
            operands = _between_sets(operands, state, chosen, Role.GUESS if guesses else Role.CONFIRM)
        name = f"offload/{state.placement.value}/{'guess' if guesses else 'adamw'}/{name}"
        if host and self._by_torch:
            return TorchHostStep(backend, name, operands, scalars, rest["done"])
        return backend.adamw(op.lane, name, operands, scalars, **rest)

    def _bind_copy(self, op: Op, b: int, chosen: tuple[int, ...], rest: Mapping[str, Any], second: bool) -> Work:
        state, down = self._states[b], op.lane is Lane.D2H
        if state.placement is Placement.STREAMED:
            what = "state"
            there, here = self._slots.of(b), state.streamed()
        elif down:
            what, summed = "grad", b in self._totals.summed
            there = [self.gradients[b][i] for i in chosen]
            here = [self._totals.inbox(b, i) if summed else state.gradients[i] for i in chosen]
        elif op.reads == (f"sum/{b}",):
            what = "sums"
            there, here = self._partial_sums(b, chosen)
            for i, kept, span in self._fragments(b, chosen):
                total = state.gradients[i]
                there.append(kept)
                here.append(Buffer(total.tier, total.data[span], total.owner, total.pinned))
        else:
            what = "weight"
            chosen = tuple(
                i for i in chosen if self._targets.weights[b][i].data.numel()
            )  # the others are prefetched later
            new = state.twin.weights if second and state.twin is not None else state.weights
            there, here = [self._targets.weights[b][i] for i in chosen], [new[i] for i in chosen]
        pairs = list(zip(here, there, strict=True) if down else zip(there, here, strict=True))
        return self._backend.copy(op.lane, pairs, name=f"offload/{op.lane.value}/{what}/{state.bucket.name}", **rest)

    def _partial_sums(self, b: int, chosen: tuple[int, ...]) -> tuple[list[Buffer], list[Buffer]]:
        """Return the partial sums of ranges, on the device and on the host, in as few contiguous pieces as possible."""
        runs: list[list[int]] = []
        for i in chosen:
            first = self._memory.first_chunks[b][i]
            end = first + chunks_of(self._states[b].bucket.ranges[i].numel)
            if runs and runs[-1][1] == first:
                runs[-1][1] = end
            else:
                runs.append([first, end])
        sides = (self._memory.partials, self._memory.host_partials or self._memory.partials)
        parts = [[s for first, end in runs for s in side.part(first, end - first).all()] for side in sides]
        return parts[0], parts[1]

    def _operands(
        self, b: int, chosen: tuple[int, ...], gradients: Sequence[Buffer], weights: Sequence[Buffer]
    ) -> AdamWOperands:
        """Return a bucket's state with these gradients and weights, one for each chosen range."""
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
        """Make ranges without a gradient count as all zero."""
        first, ranges = self._memory.first_chunks[b], self._states[b].bucket.ranges
        parts = [self._memory.partials.part(first[i], chunks_of(ranges[i].numel)) for i in missing]

        def run() -> None:
            for part in parts:
                part.sums.data.zero_()
                part.exponents.data.fill_(ALL_ZERO)

        writes = [buffer for part in parts for buffer in part.all()]
        return self._backend.launch("offload/norm/clear", run, reads=[], writes=writes, **rest)

    def forget_step_bound(self) -> None:
        """Make the next step look up the step counts again, because they were loaded."""
        self._step_bound = None

    def set_constants(self, groups: Sequence[Mapping[str, Any]], *, guess: bool = False) -> bool:
        """Set the hyper-parameters of a step that is about to be issued, and return whether others were set before.

        `guess`: of guesses, which come before the step.
        """
        # A schedule that changes betas at every step would otherwise leave a table behind at every step.
        betas = {(float(g["betas"][0]), float(g["betas"][1])) for g in groups}
        self._tables = {key: tables for key, tables in self._tables.items() if key in betas}
        if self._step_bound is None:
            self._backend.synchronise()
            self._step_bound = max((int(s.counts.data.max().item()) for s in self._states), default=0)
        # An upper bound of all step counts without reading them: they advance by at most one a step.
        self._step_bound += 0 if guess else 1
        changed = False
        for i, group in enumerate(groups):
            beta1, beta2 = group["betas"]
            hyper = Hyper(
                float(group["lr"]), float(group["weight_decay"]), float(beta1), float(beta2), float(group["eps"])
            )
            constants, tables = self._constants.get(i), self._bias_tables(hyper)
            if constants is None:
                self._constants[i] = Constants(hyper, tables)
            else:
                changed |= constants.hyper != hyper
                constants.hyper, constants.tables = hyper, tables
        return changed

    def _bias_tables(self, hyper: Hyper) -> tuple[FloatTable, FloatTable]:
        """Return bias corrections that reach the step about to be made."""
        key = (hyper.beta1, hyper.beta2)
        need = (self._step_bound or 0) + 1
        tables = self._tables.get(key)
        if tables is None or (len(tables[0]) <= need and not (tables[0][-1] == 1.0 and tables[1][-1] == 1.0)):
            tables = self._tables[key] = bias_tables(*key, max(_FIRST_TABLE_LENGTH, 2 * need))
        return tables


def _frozen(chosen: Choice) -> Choice:
    if isinstance(chosen, Stepping):
        return replace(chosen, ranges=frozenset(chosen.ranges))
    return chosen if isinstance(chosen, Addition) else frozenset(chosen)


def _between_sets(operands: AdamWOperands, state: BucketState, chosen: Sequence[int], role: Role) -> AdamWOperands:
    """Return the operands of a step from a bucket's state to its second set."""
    twin, guess = state.twin, state.guess
    if twin is None or guess is None:
        raise ValueError("a step between two sets of a state that has one")
    pairs = zip(operands.ranges, chosen, strict=True)
    ranges = [replace(r, weight_out=twin.weights[i], count_out=twin.count_of(i)) for r, i in pairs]
    return replace(operands, ranges=ranges, second=SecondSet(twin.exp_avg, twin.exp_avg_sq, twin.low, guess, role))


def mixed_gradients(state: BucketState, found: Sequence[str]) -> ModelError:
    """Return the error for a bucket whose gradients differ in dtype."""
    return ModelError(
        f"gradients of bucket {state.bucket.name} have dtypes {', '.join(found)}",
        why="one kernel steps a bucket, and takes gradients of one dtype",
        fix="give all parameters of a layer the same grad_dtype",
    )


# The schedules of one optimizer's steps: one for each set of buckets without a gradient.


_KEPT_SCHEDULES = 64


class Schedules:
    """Lowers schedules of a shape when they are needed, each checked by the ordering rule."""

    def __init__(self, shape: StepShape) -> None:
        """Lower the schedule in which every bucket has a gradient.

        Raises OrderingError for a shape whose schedule has a race, which is a defect of the lowering.
        """
        self.shape = shape
        self.whole = lower_step(shape)
        self._kept: dict[frozenset[int], Mapping[str, tuple[Op, ...]]] = {}

    def points(self, absent: frozenset[int] = frozenset()) -> Mapping[str, tuple[Op, ...]]:
        """Return operations by trigger, of a step in which the buckets `absent` have no gradient.

        Raises OrderingError for a schedule that has a race, which is a defect of the lowering.
        """
        found = self._kept.get(absent)
        if found is None:
            schedule: Schedule = lower_step(replace(self.shape, absent=absent)) if absent else self.whole
            found = self._kept[absent] = schedule.triggers
            if len(self._kept) > _KEPT_SCHEDULES:
                del self._kept[next(iter(self._kept))]
        return found


# Elements of chunks that several processes share, kept from the gradients for the norm.


Part = tuple[Buffer, Buffer, slice]
"""Destination, gradient that it is copied from, and the elements of that gradient."""


class KeepFragments(Work):
    """Copies parts of the gradients that exist when it is issued, as float32, on the compute stream."""

    __slots__ = ("_launch", "_parts", "_pending")

    def __init__(self, backend: Backend, name: str, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)
        self._pending: deque[list[tuple[torch.Tensor, torch.Tensor]]] = deque()
        reads, writes = [gradient for _, gradient, _ in parts], [kept for kept, _, _ in parts]
        self._launch = backend.launch(name, self._run, reads=reads, writes=writes)
        super().__init__(name, Lane.COMPUTE, self._launch.done)

    def issue(self) -> Event:
        # The buffers stand for other gradients by the time a queued kernel runs.
        self._pending.append([(kept.data, gradient.data.view(-1)[span]) for kept, gradient, span in self._parts])
        try:
            return self._launch.issue()
        except BaseException:
            self._pending.clear()
            raise

    def _run(self) -> None:
        for to, from_ in self._pending.popleft():
            to.copy_(from_)


# CPU optimizer step by torch.optim.AdamW, for `use_torch_optimizer_for_cpu_offload`.
#
# Torch's kernels round differently (fused multiply-adds, a square root that is not correctly rounded), so the bits are
# torch's own. The step runs on the calling thread, on fp32 main weights; its moments are views of the same slabs, so
# checkpoints do not differ.


class TorchHostStep(Work):
    """Steps a host bucket with torch.optim.AdamW, on the calling thread, while all streams are idle."""

    __slots__ = ("_backend", "_operands", "_scalars")

    def __init__(self, backend: Backend, name: str, operands: AdamWOperands, scalars: Scalars, done: Event) -> None:
        super().__init__(name, Lane.HOST, done)
        self._backend = backend
        self._operands = operands
        self._scalars = scalars

    def issue(self) -> Event:
        """Make one step of every range, unless the skip flag is set; writes the rounded weights."""
        self._backend.synchronise()
        operands, scalars = self._operands, self._scalars
        if not int(scalars.skip.data.item()):
            _step(operands, scalars)
        return self.done


def _step(operands: AdamWOperands, scalars: Scalars) -> None:
    scale = scalars.scale.data
    hyper = operands.constants.hyper
    masters = operands.low.data if operands.low is not None else None
    for r in operands.ranges:
        span = slice(r.offset, r.offset + r.length)
        weight, gradient, count = r.weight.data, r.gradient.data, r.count.data
        master = weight if masters is None else masters[span]
        parameter = torch.nn.Parameter(master)
        parameter.grad = gradient.to(torch.float32) * scale
        optimizer = torch.optim.AdamW(
            [parameter],
            lr=hyper.lr,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            fused=True,
        )
        optimizer.state[parameter] = {
            "step": count.to(torch.float32).squeeze(),
            "exp_avg": operands.exp_avg.data[span],
            "exp_avg_sq": operands.exp_avg_sq.data[span],
        }
        optimizer.step()
        count += 1
        if masters is not None:
            weight.copy_(rounded(master, weight.dtype))
