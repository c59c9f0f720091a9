"""One optimizer step: binding the operands of its schedule to this step's buffers, and issuing it to the backend's
lanes.
 `hostward.lowering.optimizer` decides what is issued and what waits for what. In this version the step is serial: it
returns when the lanes are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostward.engine.backend import DTYPES, AdamWOperands, Backend, Buffer, Event, Hyper, Scalars
from hostward.errors import ModelError
from hostward.host.adamw import AdamWRange, FloatTable, bias_tables
from hostward.inspect import Tracked
from hostward.lowering.optimizer import lower_step
from hostward.plan import Placement
from hostward.schedule import Kind, Lane, Op

from .state import BucketState, allocate_gradients
from .torch_host import TorchHostStep

_FIRST_TABLE_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one parameter, flat and contiguous, in the dtype in which autograd left it."""

    name: str
    flat: torch.Tensor

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter) -> Gradient:
        """Raises ModelError for a gradient that is not a dense floating tensor on the parameter's device."""
        grad = parameter.grad
        problem = None
        if grad is None:
            problem = "has no gradient"
        elif grad.layout is not torch.strided:
            problem = f"has a gradient with layout {grad.layout}"
        elif grad.dtype not in DTYPES:
            problem = f"has a gradient of dtype {grad.dtype}"
        elif grad.device != parameter.device or grad.shape != parameter.shape:
            problem = f"has a gradient {tuple(grad.shape)} on {grad.device}"
        if problem or grad is None:
            raise ModelError(
                f"parameter {name!r} {problem}",
                why="the step takes dense fp32, bf16 or fp16 gradients on the parameter's own device",
                fix="make the gradient dense, or leave the parameter out of the optimizer",
            )
        return cls(name, grad.detach().contiguous().view(-1))


@dataclass(slots=True)
class _Target:
    """A weight as the step writes it: flat. `scatter` copies back where the parameter itself is not contiguous."""

    flat: torch.Tensor
    parameter: torch.nn.Parameter
    scatter: bool


@dataclass(frozen=True, slots=True)
class _Scaling:
    """What the norm needs besides the gradients."""

    max_norm: float
    inv_scale: torch.Tensor | None
    found_inf: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _BoundBucket:
    """One bucket in one step: the ranges that have a gradient, and the device buffers of those."""

    state: BucketState
    chosen: Sequence[int]
    gradients: Sequence[Buffer]
    weights: Sequence[Buffer]
    hyper: Hyper


@dataclass(frozen=True, slots=True)
class _Bound:
    """All buffers of one step."""

    gradients: Sequence[Buffer]
    targets: Sequence[_Target]
    buckets: Mapping[int, _BoundBucket]


class StepIssuer:
    """Carries out the schedule of a step for a fixed set of bucket states."""

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        tracked: Mapping[str, Tracked],
        device_scalars: Scalars,
        host_scalars: Scalars,
        *,
        use_torch_optimizer: bool,
    ) -> None:
        self._backend = backend
        self._states = states
        self._tracked = tracked
        self._device_scalars = device_scalars
        self._host_scalars = host_scalars
        self._tables: dict[tuple[float, float], tuple[FloatTable, FloatTable]] = {}
        self._step_bound: int | None = None
        self._torch_host = TorchHostStep() if use_torch_optimizer else None
        self.schedule = lower_step([s.placement for s in states])
        self.torn = False
        """Some buckets may have taken a step that others have not. Set here; cleared by who sees the step through."""

    def forget_step_bound(self) -> None:
        """Step counts were loaded: look them up again before the next step."""
        self._step_bound = None

    def check(self, gradients: Sequence[Gradient]) -> None:
        """Raises ModelError for gradients that cannot be stepped, before anything is changed, at any placement."""
        dtypes = {g.name: g.flat.dtype for g in gradients}
        for state in self._states:
            found = sorted({str(dtypes[r.name]) for r in state.bucket.ranges if r.name in dtypes})
            if len(found) > 1:
                raise ModelError(
                    f"gradients of bucket {state.bucket.name} have dtypes {', '.join(found)}",
                    why="one kernel steps a bucket, and takes gradients of one dtype",
                    fix="give all parameters of a layer the same grad_dtype",
                )

    def step(
        self,
        gradients: Sequence[Gradient],
        groups: Sequence[Mapping[str, Any]],
        *,
        max_norm: float,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Step every range that has a gradient. `gradients` have passed `check`.

        Operations of buckets without a gradient are left out; who waits for one waits for what it would have waited
        for.
        """
        # A schedule that changes betas at every step would otherwise leave a table behind at every step.
        betas = {(float(g["betas"][0]), float(g["betas"][1])) for g in groups}
        self._tables = {key: tables for key, tables in self._tables.items() if key in betas}
        self._advance_bound()
        self._match_landing_places(gradients)
        bound = self._bind(gradients, groups)
        scaling = _Scaling(max_norm, None if grad_scale is None else grad_scale.reciprocal(), found_inf)
        events: dict[str, list[Event]] = {}
        last: dict[Lane, list[Event]] = {}
        for op in self.schedule.ops:
            waits = [event for name in op.waits for event in events[name]]
            self.torn = self.torn or op.kind is Kind.ADAMW
            if op.bucket is None:
                events[op.name] = [self._whole(op, bound, scaling, waits)]
            elif op.bucket in bound.buckets:
                events[op.name] = [self._bucket(op, bound.buckets[op.bucket], waits)]
            else:
                events[op.name] = [*last.get(op.lane, []), *waits]
                continue
            last[op.lane] = events[op.name]
        for target in bound.targets:
            if target.scatter:
                self._scatter(target)
        self._backend.synchronise()

    def _bind(self, gradients: Sequence[Gradient], groups: Sequence[Mapping[str, Any]]) -> _Bound:
        """The buffers of this step behind the operands of the schedule."""
        backend = self._backend
        flat = {g.name: g.flat for g in gradients}
        targets = {g.name: _target(self._tracked[g.name].parameter) for g in gradients}
        buckets: dict[int, _BoundBucket] = {}
        for b, state in enumerate(self._states):
            chosen = [i for i, r in enumerate(state.bucket.ranges) if r.name in flat]
            pieces = [state.bucket.ranges[i] for i in chosen]
            if chosen:
                buckets[b] = _BoundBucket(
                    state,
                    chosen,
                    [backend.adopt(flat[r.name][r.start : r.stop], "gradients") for r in pieces],
                    [backend.adopt(targets[r.name].flat[r.start : r.stop], "weights") for r in pieces],
                    _hyper(groups[state.bucket.group]),
                )
        wholes = [backend.adopt(tensor, "gradients") for tensor in flat.values()]
        return _Bound(wholes, list(targets.values()), buckets)

    def _whole(self, op: Op, bound: _Bound, scaling: _Scaling, waits: Sequence[Event]) -> Event:
        """An operation on all gradients, all weights or the scalars."""
        backend = self._backend
        if op.kind is Kind.NORM:
            return backend.norm(
                bound.gradients,
                self._device_scalars,
                max_norm=scaling.max_norm,
                inv_scale=scaling.inv_scale,
                found_inf=scaling.found_inf,
                waits=waits,
            )
        if op.kind is Kind.COPY:
            pairs = zip(self._host_scalars.all(), self._device_scalars.all(), strict=True)
            name = "offload/d2h/scalars"
            return [backend.copy(op.lane, host, device, name=name, waits=waits) for host, device in pairs][-1]
        backend.join(waits)
        return backend.record()

    def _bucket(self, op: Op, bound: _BoundBucket, waits: Sequence[Event]) -> Event:
        """An operation on one bucket; of several copies on one lane, the last completes them all."""
        backend, state = self._backend, bound.state
        landing = [state.gradients[i] for i in bound.chosen] if state.placement is Placement.HOST else []
        source = [state.weights[i] for i in bound.chosen] if state.placement is Placement.HOST else []
        if op.kind is Kind.RETIRE:
            return backend.retire(landing, op.lane, waits)
        if op.kind is Kind.COPY:
            down = op.lane is Lane.D2H
            pairs = zip(landing, bound.gradients, strict=True) if down else zip(bound.weights, source, strict=True)
            name = f"offload/{'d2h/grad' if down else 'h2d/weight'}/{state.bucket.name}"
            return [backend.copy(op.lane, to, from_, name=name, waits=waits) for to, from_ in pairs][-1]
        if op.lane is Lane.COMPUTE:
            return self._adamw(backend.device_adamw, self._device_scalars, bound, bound.gradients, bound.weights, waits)
        if self._torch_host is None:
            return self._adamw(backend.host_adamw, self._host_scalars, bound, landing, source, waits)
        backend.join(waits)
        backend.synchronise()
        self._torch_host.step(self._operands(bound, landing, source), self._host_scalars)
        return backend.record()

    def _adamw(
        self,
        launch: Callable[..., Event],
        scalars: Scalars,
        bound: _BoundBucket,
        gradients: Sequence[Buffer],
        weights: Sequence[Buffer],
        waits: Sequence[Event],
    ) -> Event:
        state = bound.state
        own = (state.exp_avg, state.exp_avg_sq, state.counts, *([state.low] if state.low else []))
        operands = self._operands(bound, gradients, weights)
        name = f"step/{state.placement.value}/{state.bucket.name}"
        return launch(name, operands, scalars, reads=gradients, writes=[*own, *weights], waits=waits)

    def _operands(self, bound: _BoundBucket, gradients: Sequence[Buffer], weights: Sequence[Buffer]) -> AdamWOperands:
        state = bound.state
        ranges = [
            AdamWRange(
                state.bucket.offsets[i],
                state.bucket.ranges[i].numel,
                gradient.data,
                weight.data,
                state.counts.data[i : i + 1],
            )
            for i, gradient, weight in zip(bound.chosen, gradients, weights, strict=True)
        ]
        return AdamWOperands(
            ranges=ranges,
            kind=state.bucket.kind,
            exp_avg=state.exp_avg.data,
            exp_avg_sq=state.exp_avg_sq.data,
            remainder=state.remainder,
            master=state.master,
            hyper=bound.hyper,
            tables=self._bias_tables(bound.hyper),
        )

    def _scatter(self, target: _Target) -> None:
        """Copy a weight that was stepped flat back into a parameter that is not contiguous."""
        flat, data = target.flat, target.parameter.data

        def run() -> None:
            data.copy_(flat.view(data.shape))

        self._backend.launch("scatter", run, reads=[self._backend.adopt(flat, "weights")], writes=[])

    def _match_landing_places(self, gradients: Sequence[Gradient]) -> None:
        dtypes = {g.name: g.flat.dtype for g in gradients}
        found = {
            state: dtypes[r.name]
            for state in self._states
            for r in state.bucket.ranges
            if state.placement is Placement.HOST and r.name in dtypes
        }
        allocate_gradients(self._backend, list(found), list(found.values()))

    def _advance_bound(self) -> None:
        """Keep an upper bound of all step counts without reading them: counts advance by at most one a step."""
        if self._step_bound is None:
            self._step_bound = max((int(s.counts.data.max().item()) for s in self._states), default=0)
        self._step_bound += 1

    def _bias_tables(self, hyper: Hyper) -> tuple[FloatTable, FloatTable]:
        """Bias corrections that reach the step about to be taken."""
        key = (hyper.beta1, hyper.beta2)
        need = (self._step_bound or 0) + 1
        tables = self._tables.get(key)
        if tables is None or (len(tables[0]) <= need and not (tables[0][-1] == 1.0 and tables[1][-1] == 1.0)):
            tables = self._tables[key] = bias_tables(*key, max(_FIRST_TABLE_LENGTH, 2 * need))
        return tables


def _hyper(group: Mapping[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), float(group["weight_decay"]), float(beta1), float(beta2), float(group["eps"]))


def _target(parameter: torch.nn.Parameter) -> _Target:
    data = parameter.data
    if data.is_contiguous():
        return _Target(data.view(-1), parameter, scatter=False)
    return _Target(data.contiguous().view(-1), parameter, scatter=True)
