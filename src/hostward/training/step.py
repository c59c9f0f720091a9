"""Issuing one optimizer step to the backend's lanes.

    compute   norm ─┬─ AdamW of device buckets
    d2h             └─ scalars, gradients of host buckets
    host                 └─ AdamW of host buckets
    h2d                       └─ weights of host buckets
    compute                       └─ join

In this version the step is serial: it returns when the lanes are empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostward.engine.backend import DTYPES, AdamWOperands, Backend, Buffer, Event, Hyper, Lane, Scalars
from hostward.errors import ModelError
from hostward.host.adamw import AdamWRange, FloatTable, bias_tables
from hostward.inspect import Tracked
from hostward.plan import Placement

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


class StepIssuer:
    """Issues steps for a fixed set of bucket states."""

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
        """Step every range that has a gradient. `gradients` have passed `check`."""
        backend = self._backend
        # A schedule that changes betas at every step would otherwise leave a table behind at every step.
        betas = {(float(g["betas"][0]), float(g["betas"][1])) for g in groups}
        self._tables = {key: tables for key, tables in self._tables.items() if key in betas}
        self._advance_bound()
        self._match_landing_places(gradients)
        adopted = {g.name: backend.adopt(g.flat, "gradients") for g in gradients}
        targets = {g.name: _target(self._tracked[g.name].parameter) for g in gradients}
        ready = backend.norm(
            list(adopted.values()),
            self._device_scalars,
            max_norm=max_norm,
            inv_scale=None if grad_scale is None else grad_scale.reciprocal(),
            found_inf=found_inf,
        )
        on_host = [s for s in self._states if s.placement is Placement.HOST]
        scalars_ready = self._fetch_scalars(ready) if on_host else []
        arrived: list[Event] = []
        for state in self._states:
            chosen = [i for i, r in enumerate(state.bucket.ranges) if r.name in adopted]
            hyper = _hyper(groups[state.bucket.group])
            if chosen and state.placement is Placement.HOST:
                arrived += self._host_bucket(state, chosen, adopted, targets, hyper, [ready, *scalars_ready])
            elif chosen:
                self._device_bucket(state, chosen, adopted, targets, hyper)
        backend.join(arrived)
        for target in targets.values():
            if target.scatter:
                self._scatter(target)
        backend.synchronise()

    def _device_bucket(
        self,
        state: BucketState,
        chosen: Sequence[int],
        adopted: Mapping[str, Buffer],
        targets: Mapping[str, _Target],
        hyper: Hyper,
    ) -> None:
        ranges, reads, writes = [], [], state.buffers()
        for i in chosen:
            r = state.bucket.ranges[i]
            weight = self._backend.adopt(targets[r.name].flat[r.start : r.stop], "weights")
            gradient = adopted[r.name]
            reads.append(gradient)
            writes.append(weight)
            offset = state.bucket.offsets[i]
            piece = gradient.data[r.start : r.stop]
            ranges.append(AdamWRange(offset, r.numel, piece, weight.data, state.counts.data[i : i + 1]))
        operands = self._operands(state, ranges, hyper)
        name = f"step/device/{state.bucket.name}"
        self._backend.device_adamw(name, operands, self._device_scalars, reads=reads, writes=writes)

    def _host_bucket(
        self,
        state: BucketState,
        chosen: Sequence[int],
        adopted: Mapping[str, Buffer],
        targets: Mapping[str, _Target],
        hyper: Hyper,
        waits: Sequence[Event],
    ) -> list[Event]:
        backend, bucket = self._backend, state.bucket
        landed = []
        for i in chosen:
            r = bucket.ranges[i]
            source = backend.adopt(adopted[r.name].data[r.start : r.stop], "gradients")
            made = backend.record()
            name = f"offload/d2h/grad/{bucket.name}"
            landed.append(backend.copy(Lane.D2H, state.gradients[i], source, name=name, waits=[*waits, made]))
        ranges = [
            AdamWRange(
                bucket.offsets[i],
                bucket.ranges[i].numel,
                state.gradients[i].data,
                state.weights[i].data,
                state.counts.data[i : i + 1],
            )
            for i in chosen
        ]
        own = (state.exp_avg, state.exp_avg_sq, state.counts, *([state.low] if state.low else []))
        operands = self._operands(state, ranges, hyper)
        name = f"step/host/{bucket.name}"
        reads = [state.gradients[i] for i in chosen]
        writes = [*own, *(state.weights[i] for i in chosen)]
        if self._torch_host is not None:
            backend.join(landed)
            backend.synchronise()
            self._torch_host.step(operands, self._host_scalars)
            stepped = backend.record()
        else:
            stepped = backend.host_adamw(
                name, operands, self._host_scalars, reads=reads, writes=writes, waits=[*waits, *landed]
            )
        arrived = []
        for i in chosen:
            r = bucket.ranges[i]
            weight = backend.adopt(targets[r.name].flat[r.start : r.stop], "weights")
            free_to_write = backend.record()
            arrived.append(
                backend.copy(
                    Lane.H2D,
                    weight,
                    state.weights[i],
                    name=f"offload/h2d/weight/{bucket.name}",
                    waits=[stepped, free_to_write],
                )
            )
        backend.retire(reads, Lane.HOST, waits=[stepped])
        return arrived

    def _operands(self, state: BucketState, ranges: Sequence[AdamWRange], hyper: Hyper) -> AdamWOperands:
        return AdamWOperands(
            ranges=ranges,
            kind=state.bucket.kind,
            exp_avg=state.exp_avg.data,
            exp_avg_sq=state.exp_avg_sq.data,
            remainder=state.remainder,
            master=state.master,
            hyper=hyper,
            tables=self._bias_tables(hyper),
        )

    def _fetch_scalars(self, ready: Event) -> list[Event]:
        pairs = zip(self._host_scalars.all(), self._device_scalars.all(), strict=True)
        return [
            self._backend.copy(Lane.D2H, host, device, name="offload/d2h/scalars", waits=[ready])
            for host, device in pairs
        ]

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
