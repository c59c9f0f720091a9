"""`hostward.AdamW`: AdamW whose state lives partly on the host, with the same bits at every fraction."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from hostward.engine.backend import Backend, Tier
from hostward.engine.choose import backend_for
from hostward.errors import HostwardError, ModelError
from hostward.fence import unfenced
from hostward.inspect import Places, Tracked, check_no_overlap, check_trackable, named_groups, with_module
from hostward.inventory import Inventory
from hostward.plan import PlacedBucket, Plan
from hostward.schedule import Schedule

from .arrival import Arrivals
from .binding import Memory
from .control import ROOT
from .gradients import GradientsClearedError, Handover, gradient_of
from .groups import (
    check_count,
    check_grad_dtype,
    check_group,
    check_keys,
    check_members,
    check_variants,
    checked_backend,
    checked_norm,
    checked_streamed,
    described,
    sums_on_host,
)
from .mix import Mix, ShareOf
from .options import named_options
from .placeholder import Where
from .saving import Saving
from .scaling import require_one_scale
from .sharded import EmptyParts, Sharded, accumulate_in, across_ranks, made_together, ranks_of, require_sharding
from .slots import CudaGauge, Slots
from .sources import Readers
from .state import BucketState, allocate_partials, allocate_scalars, landing_dtypes, pieces
from .state_io import StateAccess
from .state_memory import Asked, explained, take_states
from .step import StepIssuer
from .tied import checked_tied
from .totals import Totals
from .weight_fence import WeightFence
from .weight_values import is_away, waits
from .weights import WeightWatch

if TYPE_CHECKING:
    from hostward.adapters.fsdp2 import Groups
    from hostward.engine.cuda import CudaBackend

log = logging.getLogger("hostward")


class AdamW(Saving):
    """AdamW with decoupled weight decay, gradient clipping and a share of its state on the host.

    The update is defined in docs/exactness.md; weights and state are bit-identical at every `offload_fraction`.
    State, step counts and checkpoints are keyed by parameter name. `optimizer.state` holds no tensor:
    frameworks that move state about find nothing to move.

    Args:
        params: a module (its trainable parameters), an iterable of (name, Parameter) or of parameters, or a list of
            group dicts whose "params" is such an iterable. Parameters are fp32, bf16 or fp16, all on one device. A
            model may be sharded by FSDP2, before the optimizer is made. Parameters without names are named by `module`;
            without it by the outermost module that holds all of them, which is then used as if it had been given.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; per group where groups give their own. Read at every
            step.
        amsgrad, maximize, foreach, capturable, differentiable, fused: of torch.optim.AdamW, at their defaults only.
        max_grad_norm: clip the global L2 norm of all gradients to this; None or 0: no clipping. Clipping is part of
            the step: do not call `clip_grad_norm_` as well. Non-finite gradients skip the step either way.
        offload_fraction: share of the optimizer state's bytes that lives on the host. "auto": the least that keeps
            weights, gradients and state on the device within `device_memory` (bytes, or a text like "40GiB").
        streamed_fraction: of that, the share that comes to the device for its step and goes back; the rest is stepped
            on the host. "auto": the mix that uses memory and link best, by rates measured on this machine. A function
            of these rates (`hostward.hardware.Rates`) tells it instead, where more is known of the step.
        overlap: let gradients leave during backward (see `accumulate`) and weights arrive during the next forward.
            False: everything happens within `step`.
        pin_gradients, pin_weights: page-lock the host memory where gradients of host-stepped buckets arrive, and
            where their weights come back from. Without it the caller waits for copies: same bits, much slower. The
            state of these buckets never is. A plan may say so too.
        use_torch_optimizer: step the host share with torch.optim.AdamW on fp32 masters: other bits, and slower.
        gradients: where gradients of host-stepped buckets are added up over microbatches; None: as the plan says, or
            "device". "device": in `.grad`, which they leave in the last backward. "host": in float32 on the host,
            where they go in every backward; those of other buckets in `.grad`, in float32 too.
        grad_dtype: in which `.grad` accumulates, as torch.float32 for 16-bit models and several microbatches; or None.
        staging_bytes: device memory for state that is being streamed, at least one bucket; None: as the plan says, or
            what backward frees, and two buckets besides.
        host_threads: threads of the host step; None: the CPUs of this process over its local ranks, less two.
        plan: from `hostward plan --json FILE`, or that file: where each bucket goes, instead of `offload_fraction`.
        module: the module that holds the parameters, where `params` is not itself the module: its layers then wait
            for their own weights alone, and its `load_state_dict` is watched, so that loading equal weights leaves the
            masters as they are.
        stages: of a pipeline: the processes that hold the other stages of the model beside this one's, this one among
            them. The norm is over all of them, and all skip together. None: there are no stages.
        tied: by name, the weights that another stage has as well, and the processes that have this part of each. Call
            `add_up_tied` before `step`.
        fence: let whatever reads or writes a weight after `step()` wait for its new value by itself, and notice writes
            through `.data`. False: only the module's own forward and state dicts wait; other readers call `arrive()`
            first, and writes through `.data` need `reseed()`. `find_unfenced_reads` then says what is missed.
        backend: where operations run; by default the CUDA device of the parameters, or a simulated one for CPU
            parameters.

    Raises:
        ConfigError: a value outside its range. ModelError: a parameter that cannot be tracked.
        MemoryLimitError: the state does not fit the host or the device; nothing stays allocated. (PageLockError: the
            driver locks fewer pages than are needed; the text says which of these options need fewer.)
    """

    _step_supports_amp_scaling = True
    # A GradScaler sets these two around step() and deletes them afterwards; without one they do not exist.
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    @named_options
    def __init__(
        self,
        params: object,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        offload_fraction: float | str = 0.0,
        device_memory: int | str | None = None,
        streamed_fraction: float | str | ShareOf = "auto",
        overlap: bool = True,
        pin_gradients: bool = True,
        pin_weights: bool = True,
        use_torch_optimizer: bool = False,
        gradients: str | None = None,
        grad_dtype: torch.dtype | None = None,
        staging_bytes: int | None = None,
        host_threads: int | None = None,
        plan: object = None,
        module: torch.nn.Module | None = None,
        stages: dist.ProcessGroup | None = None,
        tied: Mapping[str, dist.ProcessGroup] | None = None,
        fence: bool = True,
        backend: Backend | None = None,
    ) -> None:
        variants = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "fused": fused}
        check_variants(variants | {"capturable": capturable, "differentiable": differentiable})
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.max_grad_norm = checked_norm(max_grad_norm)
        streamed = checked_streamed(streamed_fraction, use_torch_optimizer)
        self._mix = Mix(offload_fraction, streamed, plan, gradients, device_memory)
        self._pin_gradients = pin_gradients and self._mix.pin_gradients
        self._pin_weights = pin_weights and self._mix.pin_weights
        self._overlap = overlap and not use_torch_optimizer
        self._use_torch_optimizer = use_torch_optimizer
        self._sums_on_host = sums_on_host(self._mix.gradients, overlap=self._overlap, grad_dtype=grad_dtype)
        self._grad_dtype = torch.float32 if self._sums_on_host else grad_dtype
        self._summed: frozenset[int] = frozenset()
        self._backend, self._stages = checked_backend(backend), stages
        self.tied = checked_tied(tied, stages, sums_on_host=self._sums_on_host)
        check_count("host_threads", host_threads)
        self._staging_bytes = self._mix.staging_bytes if staging_bytes is None else staging_bytes
        check_count("staging_bytes", self._staging_bytes)
        self._host_threads = host_threads
        self._tracked: list[Tracked] = []
        self._states: list[BucketState] = []
        self._placements: list[PlacedBucket] = []
        self._pending: list[Tracked] = []
        self._waiting: list[Tracked] = []
        """Those whose weights hostward.move() has left on the CPU, for attach()."""
        self._watch = WeightWatch([])
        self._readers = Readers()
        self._unchanged, self._told_of_writes, self._scaled = True, False, False
        self._memory: Memory
        self._arrivals: Arrivals | None = None
        self._fenced = fence
        self._fence: WeightFence | None = None
        self._handover: Handover
        self._sharded: Sharded | None = None
        self._empty_parts: EmptyParts | None = None
        self._issuer: StepIssuer
        self._building = True
        params, module = with_module(params, module)
        self._places = Places(module)
        super().__init__(named_groups(params, self._places), defaults)
        self._building = False
        self._build()

    # ---------------------------------------------------------------- construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters; its state is placed by the same `offload_fraction`."""
        if not self._building:
            if self._handover.taken:
                raise ModelError(
                    "a parameter group added between backward and step()",
                    why="the optimizer has taken the gradients of the parameters that it has",
                    fix="add it after step() or after zero_grad()",
                )
            self._places = Places(self._places.module)
            (param_group,) = named_groups([param_group], self._places)
            self._issuer.require_weights_here()
            self._readers.wait()
            self.wait()
            self._follow_weights()
        check_keys(param_group, OPTIONS)
        super().add_param_group(param_group)
        try:
            self._take_group(self.param_groups[-1])
            if not self._building:
                self._build()
        except HostwardError:
            self.param_groups.pop()
            self._pending.clear()
            raise

    def _take_group(self, group: Mapping[str, Any]) -> None:
        check_group(group)
        taken = {t.name for t in (*self._tracked, *self._pending)}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if name in taken:
                raise ModelError(
                    f"two parameters are named {name!r}",
                    why="what wrappers put into names (_orig_mod., module.) does not count",
                    fix="give each parameter a name of its own",
                )
            taken.add(name)
            self._pending.append(self._places.tracked(name, parameter, len(self.param_groups) - 1))

    @unfenced
    @torch.inference_mode(False)
    @torch.no_grad()
    def _build(self) -> None:
        """Allocate state for the parameters that have none yet."""
        new, self._pending = self._pending, []
        backend = self._backend or backend_for(new[0].parameter.device, self._host_threads)
        self._backend = backend
        for t in new:
            check_trackable(t.name, t.parameter, backend.device)
        check_no_overlap([*self._tracked, *new])
        require_sharding(self._places, new)
        check_grad_dtype(self._grad_dtype, {t.name: t.parameter for t in new})
        self.tied.require_known([*self._tracked, *new])
        first, split = len(self._states), not self._use_torch_optimizer
        used, ranks = self._places.by_use(new), ranks_of(new)
        buckets, plan = self._mix.place(backend, used, self._grad_dtype, first, split_master=split, ranks=ranks)
        self.offload_fraction = plan.asked_fraction
        placements = [b.placement for b in plan.buckets]
        grad_dtypes = landing_dtypes(buckets, {t.name: t.parameter for t in new}, self._grad_dtype)
        pinned = self._pin_gradients, self._pin_weights
        asked = Asked(buckets, placements, grad_dtypes, self._sums_on_host, *pinned)
        summed = asked.summed
        states = take_states(backend, asked)
        self._tracked += new
        self._waiting += [t for t in new if is_away(t.parameter)]
        # Tools that find no state make one by a step with zero gradients (H61); those that move state find no tensor.
        self.state.update({t.parameter: {} for t in new})
        self._summed |= {len(self._states) + b for b in summed}
        self._states += states
        self._placements += plan.buckets
        if self._grad_dtype is not None:
            accumulate_in(self._grad_dtype, self._places, self._tracked, self._states, self._summed)
        for t in new:
            if not is_away(t.parameter):
                backend.adopt(t.local.data, "weights", counted=True)
        self._by_name = {t.name: t for t in self._tracked}
        self._access = StateAccess(pieces(self._states), self._by_name)
        for t in new:
            self._access.reseed(t.name)
        with explained(backend, asked):
            self._connect(backend)
        backend.synchronise()
        nothing = plan.asked_fraction > 0 and self.plan.state_bytes and not self.plan.offloaded_bytes
        log.log(logging.WARNING if nothing else logging.INFO, "%s", self.plan.explain())

    def _connect(self, backend: Backend) -> None:
        """Schedule, hooks and watches over all buckets that there are now."""
        partials, host_partials, first_chunks = allocate_partials(backend, self._states, on_host=bool(self._summed))
        scalars = allocate_scalars(backend, Tier.DEVICE), allocate_scalars(backend, Tier.HOST)
        groups = self._places.sharding
        of_stages = self._stages, self.tied.uncounted()
        across = across_ranks(backend, self._tracked, self._states, first_chunks, *of_stages)
        memory = Memory(*scalars, partials, host_partials, first_chunks, across)
        gauge = CudaGauge(cast("CudaBackend", backend)) if backend.device.type == "cuda" else None
        layers = {t.name: t.layer or ROOT for t in self._tracked}
        self._issuer = StepIssuer(
            backend,
            self._states,
            self._by_name,
            memory,
            layers=[layers[s.bucket.ranges[0].name] for s in self._states],
            slots=Slots(backend, self._states, gauge=gauge, staging_bytes=self._staging_bytes),
            totals=Totals(backend, self._states, self._summed, pinned=self._pin_gradients),
            together=made_together(groups, self._tracked),
            holders=functools.partial(_holders, groups) if self._fenced else None,
            overlap=self._overlap,
            use_torch_optimizer=self._use_torch_optimizer,
        )
        self._memory = memory
        self._watch.close()
        if hasattr(self, "_handover"):
            self._handover.close()
        if self._arrivals is not None:
            self._arrivals.close()
        if self._fence is not None:
            self._fence.close()
        self._watch = WeightWatch(self._tracked, self._issuer.use_all, self._places.root)
        self._fence = WeightFence(self._issuer, self._watch, self._tracked, layers) if self._fenced else None
        summed = {r.name for b in self._summed for r in self._states[b].bucket.ranges}
        leave = None if self._fence is None else self._fence.leave
        self._handover = Handover(self._tracked, self._issuer, summed, self.tied, leave)
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None
        self._empty_parts = EmptyParts(backend, self._tracked, self._empty_parts)
        self._access.empty_counts = self._empty_parts.counts()
        if groups is not None:
            self._sharded = Sharded(groups, self._tracked, layers, self._issuer, self._handover)
        self._arrivals = None
        root, fence = self._places.root, self._fence
        if root is not None and (self._overlap or fence is not None):
            use = self._issuer.use if fence is None else fence.enter
            leave_root = None if fence is None else fence.raise_all
            in_ddp = self._handover.in_ddp
            self._arrivals = Arrivals(root, layers, self._tracked, use, self._issuer.use_all, leave_root, in_ddp)

    # ---------------------------------------------------------------- facts

    @property
    def plan(self) -> Plan:
        """Placement of every bucket; `plan.asked_fraction` and `plan.placed_fraction` tell the shares."""
        return Plan(self.offload_fraction, tuple(self._placements))

    @property
    def inventory(self) -> Inventory:
        return Inventory(tuple(t.facts for t in self._tracked), tuple(s.bucket for s in self._states))

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step, as data; `print(optimizer.schedule.to_text())` shows it."""
        return self._issuer.schedule

    # ---------------------------------------------------------------- the step

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; a parameter without one keeps its state and its step count.

        Args:
            closure: evaluated once, with gradients enabled, before the update; its result is returned.

        Raises:
            ModelError: a replaced parameter, or a gradient of a kind that cannot be stepped. Nothing has been changed
                then.
        """
        self._issuer.require_whole()
        require_one_scale(self, self._stages)
        self._scaled = self._scaling()[1] is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @unfenced
    def _step(self) -> None:
        check_members(self.param_groups, self._tracked)
        self._waiting = [t for t in self._waiting if is_away(t.parameter)]
        if self._waiting:
            raise waits(self._waiting[0].name)
        self._readers.wait()
        self._follow_weights()
        self._watch.require_no_newcomers()
        for group in self.param_groups:
            check_group(group)
        try:
            waiting = self._handover.waiting()
        except GradientsClearedError:
            self.discard_gradients()
            waiting = self._handover.waiting()
        self.tied.require_added_up(self._by_name)
        gradients = {t.name: gradient_of(t) for t in waiting}
        self._issuer.check(gradients)
        if gradients or self._handover.taken:
            self._issue(waiting, gradients)
        elif self._handover.used_only():
            raise ModelError(
                "step() without a new gradient",
                why="the last step used up what was in .grad",
                fix="run a backward pass between two steps, or make the optimizer with overlap=False",
            )
        else:
            # grad_norm and last_step_skipped speak of this step, not of the one before.
            self._memory.device_scalars.norm.data.zero_()
            self._memory.device_scalars.skip.data.zero_()

    def _issue(self, waiting: Sequence[Tracked], gradients: Mapping[str, torch.Tensor]) -> None:
        """The step proper. Cut short, by Ctrl-C or a failed kernel, it leaves some buckets stepped, others not."""
        stays = not self._overlap or self._handover.captured
        self._unchanged = False
        try:
            if stays:
                self._issuer.take_all(gradients)
            else:
                self._handover.hand_over_all(waiting, gradients)
            stepped = list(gradients) if stays else list(self._handover.taken)
            self._issuer.step(self.param_groups, self._handover.clipping(self.max_grad_norm, *self._scaling()))
            if self._sharded is not None and self._empty_parts is not None:
                self._empty_parts.step(stepped, self._memory.device_scalars.skip)
            torch.autograd.graph.increment_version([self._by_name[name].parameter for name in stepped])
            self._handover.mark(Where.USED)
            if stays or self._arrivals is None:
                self._issuer.use_all()
        except BaseException:
            self.backend.drain()
            raise
        self._watch.remember(self._tracked)
        self._watch.compare([self._by_name[name] for name in self._issuer.shared])
        self._issuer.torn = False
        if self._fence is not None:
            self._fence.raise_all()

    def _scaling(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What a gradient scaler says, if it looked at the gradients."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    __repr__ = described


OPTIONS = frozenset(inspect.signature(AdamW).parameters)
"""Names of what the optimizer takes as a whole."""


def _holders(groups: Groups | None, t: Tracked) -> int:
    """Tensors that always lie in the memory of a parameter's part here: itself, and what FSDP2 has."""
    return groups.holders(t.parameter) if t.sharded and groups is not None else 1
