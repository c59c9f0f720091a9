"""This module decides where the optimizer's state is placed.

A plan says so, or a share of the state that is offloaded; the share of that with a GPU step (streamed) is given or
chosen from measured rates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hostward.core.host_limits import Rates
from hostward.core.inventory import FP32_STATE, Bucket, Dtype, StateFormat, bucket_as_asked, cut_buckets
from hostward.core.placement import Plan, checked_fraction, place_fraction, placed, stepped_early, streamed_share_of
from hostward.core.units import size, size_bytes, size_option
from hostward.errors import ConfigError, MemoryLimitError, PageLockError, RankError
from hostward.model.parameters import ParamRecord, local_of
from hostward.plan.plan_file import PlanFile, load
from hostward.plan.rank_partition import cut_alike, first_parts
from hostward.runtime.backend import Backend
from hostward.runtime.calibrate import measure_rates
from hostward.runtime.global_norm import Ranks
from hostward.schedule.staging import MIN_STAGING_BUFFERS

log = logging.getLogger("hostward")

AUTO = "auto"
ShareOf = Callable[[Rates], float]
"""Function that returns the share of offloaded state to stream, from rates measured on this machine."""


class PlacementPolicy:
    """PlacementPolicy chooses the placement of every bucket.

    Args:
        offload_fraction: share of the state off the device.
        streamed: share of that which is stepped on the GPU, or "auto", or a function that returns it.
        plan: says where each bucket is placed instead; a plan or a file that holds one.
        gradients: where the optimizer accumulates them, "device" or "host"; None: as the plan says, or "device".
        device_memory: with `offload_fraction="auto"`, the most bytes of weights, gradients and state on the device.

    Raises:
        ConfigError: a share outside [0, 1]; no plan, or one that the other arguments contradict.
    """

    def __init__(
        self,
        offload_fraction: object,
        streamed: float | str | ShareOf,
        plan: object = None,
        gradients: str | None = None,
        device_memory: int | str | None = None,
    ) -> None:
        self._budget_bytes = _budget_bytes(offload_fraction, device_memory)
        _require_use(streamed, offload_fraction, plan)
        self.offload_fraction = 0.0 if offload_fraction == AUTO else checked_fraction(offload_fraction)
        self._asked = streamed
        self._told: float | None = None
        self._plan = planned(plan)
        if self._plan is not None:
            _require_alone(self._plan, self.offload_fraction, gradients)
            self.offload_fraction = self._plan.asked_fraction
            gradients = _gradients_of(self._plan)
        self.gradients = "device" if gradients is None else gradients
        self.staging_bytes = None if self._plan is None else self._plan.staging_bytes
        """Device memory for the GPU staging buffers of streamed state, by the plan; None: not bounded."""
        self.pin_gradients = self._plan is None or self._plan.pin_gradients
        self.pin_weights = self._plan is None or self._plan.pin_weights
        rows = () if self._plan is None else self._plan.layers
        self.layers_by_plan = sum(row.activations != "keep" or row.weights == "host" for row in rows)
        """Layers of which the plan offloads or recomputes something, which is `attach`'s part of it."""
        self.rates: Rates | None = None
        """Rates measured once, before state is allocated; None if nothing depended on them."""

    def early(self, asked: float | bool) -> float | bool:
        """Return the share that is stepped during backward, which a plan has counted the memory of.

        Raises ConfigError where another one is asked for.
        """
        if self._plan is None:
            return asked
        planned = self._plan.step_early
        if asked and asked != planned:
            raise ConfigError(
                f"plan=... and step_early={asked!r}",
                why=f"the plan counts on {planned:g}, in host memory and in time",
                fix="leave step_early out, or make the plan with it: hostward plan --step-early SHARE ... --json FILE",
            )
        return planned

    def streamed_share(
        self,
        backend: Backend,
        buckets: Sequence[Bucket],
        offload_fraction: float,
        ranks: Ranks | None = None,
        form: StateFormat = FP32_STATE,
    ) -> float:
        """Return the share of offloaded state to stream, the same on all of `ranks`.

        `form` is the one that is asked for, and measured by a rank that has no buckets. On a device without PCIe or
        NVLink to the host there is nothing to overlap, and all state takes the CPU optimizer step. Raises
        MemoryLimitError where there is no memory to measure.
        """
        if isinstance(self._asked, float):
            return self._asked
        if backend.device.type != "cuda" or not offload_fraction:
            return 0.0
        if self.rates is None:
            dtype = Dtype.BF16
            if buckets:
                dtype, form = bucket_as_asked(buckets).dtype, bucket_as_asked(buckets).form
            self.rates = _measured(backend, ranks, dtype, form)
        if callable(self._asked):
            if self._told is None:  # the same on all ranks, whatever the function returned on each
                asked, rates = self._asked, self.rates
                self._told = _most(lambda: checked_fraction(asked(rates), "streamed_fraction"), backend, ranks)
            return self._told
        if not buckets:  # a rank without any has measured together with the others
            return 0.0
        return streamed_share_of(bucket_as_asked(buckets), self.rates)

    def place(
        self,
        backend: Backend,
        tracked: Sequence[ParamRecord],
        grad_dtype: torch.dtype | None = None,
        first_index: int = 0,
        *,
        form: StateFormat = FP32_STATE,
        ranks: Ranks | None = None,
        step_early: float = 0.0,
    ) -> tuple[tuple[Bucket, ...], Plan, frozenset[int]]:
        """Return buckets of parameters in order of use in forward, their placements, and positions of early steps.

        Buckets are numbered from `first_index` on.

        Args:
            grad_dtype: dtype of gradients; None: that of the weights.
            form: how state is stored.
            ranks: the ranks that have parts of the same parameters; all place now.
            step_early: share of the CPU-stepped state that is stepped during backward; a plan has its own.

        Raises:
            ConfigError: a plan of other buckets, or of another division among ranks. MemoryLimitError: weights and
                gradients alone exceed `device_memory`. RankError: another rank has raised.
        """
        if self._plan is not None:
            return placed_by_plan(self._plan, tracked, first_index=first_index, form=form)
        facts = tuple(t.facts for t in tracked)
        buckets = cut_buckets(facts, first_index=first_index, form=form)
        if self._budget_bytes is not None:
            least = partial(_least_fraction, buckets, grad_dtype, self._budget_bytes)
            self.offload_fraction = _most(least, backend, ranks)
            self._budget_bytes = None  # groups that are added later use the same share
        share = self.streamed_share(backend, buckets, self.offload_fraction, ranks, form)
        plan = place_fraction(buckets, self.offload_fraction, share)
        return buckets, plan, stepped_early(buckets, [b.placement for b in plan.buckets], step_early)


def _measured(backend: Backend, ranks: Ranks | None, dtype: Dtype, form: StateFormat) -> Rates:
    try:
        return measure_rates(backend, ranks, dtype=dtype, form=form)
    except PageLockError as error:
        raise PageLockError(
            error.what,
            why="; ".join(filter(None, (error.why, "the rate of copies is measured to choose what is streamed"))),
            fix="streamed_fraction=0.0 (in a run: no optimizer.offload_mix) steps all of it on the host, whose state "
            f"is not pinned; or {error.fix}",
        ) from error


def _budget_bytes(offload_fraction: object, device_memory: int | str | None) -> int | None:
    if (offload_fraction == AUTO) != (device_memory is not None):
        raise ConfigError(
            f"offload_fraction={offload_fraction!r} and device_memory={device_memory!r}",
            why="a share is chosen where, and only where, there is a limit to choose it by",
            fix='offload_fraction="auto", device_memory="40GiB"',
        )
    if isinstance(device_memory, str):
        return size_bytes(device_memory, "device_memory")
    if device_memory is not None and (isinstance(device_memory, bool) or device_memory < 0):
        raise ConfigError(f"device_memory={device_memory!r} is no number of bytes", fix='device_memory="40GiB"')
    return device_memory


def _least_fraction(buckets: Sequence[Bucket], grad_dtype: torch.dtype | None, budget_bytes: int) -> float:
    """Return the least share of state to offload that keeps to the device memory budget.

    Counted are weights, gradients, the state that stays, and two GPU staging buffers. Placements are rounded to
    buckets, so one more is subtracted.
    """
    gradient = {b.index: grad_dtype.itemsize if grad_dtype is not None else b.dtype.itemsize_bytes for b in buckets}
    fixed = sum(b.numel * (b.dtype.itemsize_bytes + gradient[b.index]) for b in buckets)
    state = sum(b.state_bytes for b in buckets)
    largest = max((b.state_bytes for b in buckets), default=0)
    if fixed + state <= budget_bytes:
        return 0.0
    away = fixed + state + (MIN_STAGING_BUFFERS + 1) * largest - budget_bytes
    if fixed + min(MIN_STAGING_BUFFERS, len(buckets)) * largest > budget_bytes:
        raise MemoryLimitError(
            f"{size(budget_bytes)} of device_memory are too little: weights and gradients alone take {size(fixed)}",
            why=f"with all state off the device, two staging buffers of {size(largest)} come on top",
            fix=f'device_memory="{size_option(fixed + MIN_STAGING_BUFFERS * largest)}" at least, or a plan that lets '
            "weights leave",
        )
    return min(1.0, away / state)


def _most(own: Callable[[], float], backend: Backend, ranks: Ranks | None) -> float:
    """Return the largest value that `own` returns on any rank.

    Parts differ in size, and the decisions that follow are made together. A rank on which `own` raises reports so to
    the others first, which would wait for it.

    Raises RankError where it has raised on another rank.
    """
    if ranks is None:
        return own()
    fraction = math.inf
    try:
        fraction = own()
    finally:
        told = torch.tensor([fraction], dtype=torch.float64, device=backend.device)
        ranks.largest(told)
    if math.isinf(float(told)):
        raise RankError("another rank could not tell what is to leave the device", fix="see the error of that rank")
    return float(told)


def _gradients_of(plan: PlanFile) -> str:
    return "host" if plan.gradients_on_host else "device"


def _require_use(streamed: float | str | ShareOf, offload_fraction: object, plan: object) -> None:
    """Require that a streamed share is a share of something.

    Raises ConfigError together with a plan; warns if nothing is offloaded.
    """
    if isinstance(streamed, str) or not streamed:
        return
    if plan is not None:
        raise ConfigError(
            f"plan=... and streamed_fraction={streamed}",
            why="the plan says where each bucket goes",
            fix="leave streamed_fraction out, or edit the plan",
        )
    if not offload_fraction and not callable(streamed):
        log.warning(
            "streamed_fraction=%s does nothing while offload_fraction=0: it is a share of what is offloaded", streamed
        )


def _require_alone(plan: PlanFile, offload_fraction: float, gradients: str | None) -> None:
    if offload_fraction:
        raise ConfigError(
            f"plan=... and offload_fraction={offload_fraction}",
            why="the plan says where each bucket goes",
            fix="leave offload_fraction out, or edit the plan",
        )
    wanted = _gradients_of(plan)
    if gradients not in (None, wanted):
        raise ConfigError(
            f"the plan adds gradients up on the {wanted}, and gradients={gradients!r}",
            why="its bytes and seconds do not hold otherwise",
            fix=f"leave gradients out, or gradients={wanted!r}",
        )


def planned(plan: object) -> PlanFile | None:
    """Return a plan, read from its file where `plan` names one. Raises ConfigError for anything else."""
    if plan is None or isinstance(plan, PlanFile):
        return plan
    if isinstance(plan, (str, Path)):
        return load(Path(plan))
    raise ConfigError(f"plan={plan!r} is neither a plan nor a file", fix="plan='plan.json', as hostward plan writes it")


# A plan carried out by one of several ranks: each places its part of a bucket where the plan places the bucket.


def placed_by_plan(
    plan: PlanFile, tracked: Sequence[ParamRecord], *, first_index: int, form: StateFormat
) -> tuple[tuple[Bucket, ...], Plan, frozenset[int]]:
    """Return buckets in order of use in forward, where the plan places them, and positions of early steps.

    The first rank's parts say which are stepped during backward, and the plan's order: it has counted their memory.

    Raises ConfigError for a plan of another model, of another number of ranks, or of a model divided in another way.
    """
    ranks = require_division(plan, ((t.name, t.parameter) for t in tracked))
    parts = {t.name: t.facts for t in tracked}
    # A plan knows one group; what it places together stays together where the optimizer has several.
    whole = [replace(parts[t.name], numel=t.parameter.numel(), first=0, group=0) for t in tracked]
    first = cut_buckets(first_parts(whole, ranks), first_index=first_index, form=form)
    of_first = plan.placements(first)
    buckets, origins = cut_alike(first, parts, first_index=first_index)
    rows = [of_first.buckets[i].placement for i in origins]
    early = plan.early(first)
    stepped = frozenset(b for b, i in enumerate(origins) if i in early)
    return buckets, placed(buckets, rows, of_first.asked_fraction), stepped


def require_division(plan: PlanFile, named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return among how many ranks these parameters are sharded.

    Raises ConfigError unless all are divided by rows among as many ranks as the plan is for, and nothing else is done
    with them; for a plan for one GPU, unless they are unsharded.
    """
    for name, parameter in named:
        ranks, by_rows = _division(name, parameter)
        plan.require_ranks(ranks)
        if not by_rows:
            raise ConfigError(
                f"the plan divides parameters by rows among {ranks} GPUs, and parameter {name!r} is divided otherwise",
                why=f"it is {getattr(parameter, 'placements', '')} on {getattr(parameter, 'device_mesh', '')}",
                fix="fully_shard the model over one mesh of all these ranks and nothing else, or leave plan out",
            )
    return plan.workload.ranks


def _division(name: str, parameter: torch.Tensor) -> tuple[int, bool]:
    """Return among how many ranks a parameter is sharded, and whether each has rows that no other has."""
    if local_of(parameter) is parameter:
        return 1, True
    from hostward.distributed import fsdp2

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    (split, *more) = fsdp2.layout_of(name, parameter).splits or (None,)
    return mesh.size(), not more and split is not None and split.dim == 0 and split.n_parts == mesh.size()
