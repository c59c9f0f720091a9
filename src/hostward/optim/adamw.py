"""Provide `hostward.AdamW`: AdamW with part of its state on the host, bitwise identical at every fraction."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from hostward.config.arguments import named_options
from hostward.core.host_limits import Rates
from hostward.core.inventory import Dtype, Inventory, StateFormat
from hostward.core.placement import PlacedBucket, Plan
from hostward.distributed.flat_shards import FlatPart, FlatShards
from hostward.errors import HostwardError, ModelError, OrderingError
from hostward.model.deferred_weights import is_away, waits
from hostward.model.fence import unfenced, without_functions
from hostward.model.parameter_names import matched
from hostward.model.parameters import (
    ParamRecord,
    ParamRegistry,
    check_no_overlap,
    check_present,
    check_trackable,
    frozen_in,
    local_of,
    named_groups,
    with_module,
)
from hostward.optim.bucket_lifecycle import Kinds
from hostward.optim.bucket_state import (
    AllocationRequest,
    BucketState,
    allocate_partials,
    allocate_scalars,
    explained,
    free_states,
    landing_dtypes,
    pieces,
    take_states,
)
from hostward.optim.diagnostics import Tracing, UnfencedReads
from hostward.optim.forward_hooks import ForwardHooks, WeightFence, wait_for_optimizers
from hostward.optim.gradient_hooks import Borrowed, GradientHooks, GradientsClearedError, gradient_of
from hostward.optim.host_accumulation import HostGradAccumulator
from hostward.optim.master_sync import WeightWatch
from hostward.optim.offloaded_grad import Where
from hostward.optim.op_binding import Memory
from hostward.optim.param_groups import (
    StoredElsewhere,
    check_blocks,
    check_counts,
    check_grad_dtype,
    check_group,
    check_keys,
    check_main_params,
    check_members,
    check_state,
    check_variants,
    checked_backend,
    checked_early,
    checked_form,
    checked_norm,
    checked_scale,
    checked_streamed,
    checked_uncounted,
    checked_waits,
    described,
    renew_state,
    require_names,
    shown,
    sums_on_host,
    warn_of_unsaved,
)
from hostward.optim.placement import PlacementPolicy, ShareOf
from hostward.optim.sharded import (
    EmptyParts,
    Sharded,
    accumulate_in,
    across_ranks,
    checked_shards,
    made_together,
    ranks_of,
    require_one_scale,
    require_parts,
    require_sharding,
)
from hostward.optim.sleeping import Parts, Sleeper, SleepReport, checked_budget, checked_kinds, require_possible
from hostward.optim.staging_buffers import CudaGauge, StagingBuffers
from hostward.optim.state_dict import (
    OWNER,
    STATE_FORMAT,
    PiecewiseState,
    Rows,
    StateAccess,
    Unmoved,
    check_same_cut,
    check_same_names,
    checked_dtypes,
    checked_settings,
    dtypes_for_torch,
    is_being_wrapped,
    is_set_by_torch,
    plain,
    require_fp8,
    require_known,
    require_not_flattened,
    require_uncut,
    saved_cut,
    saved_dtypes,
    saved_parts,
    without_master,
)
from hostward.optim.state_reader import Describer, Readers, StateSources
from hostward.optim.step_executor import StepExecutor
from hostward.optim.tied_weights import checked_tied
from hostward.optim.weight_copies import WeightCopies
from hostward.runtime.backend import Backend, Buffer, Tier
from hostward.runtime.backend_choice import backend_for
from hostward.runtime.pinned_memory import require_host_memory
from hostward.schedule.ops import Lane, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostward.distributed.fsdp2 import Groups
    from hostward.model.parameters import ParamRecord, ParamRegistry
    from hostward.optim.gradient_hooks import GradientHooks
    from hostward.optim.master_sync import WeightWatch
    from hostward.optim.op_binding import Memory
    from hostward.optim.state_dict import StateAccess
    from hostward.optim.step_executor import StepExecutor
    from hostward.plan.plan_file import PlanFile
    from hostward.runtime.backend import Backend
    from hostward.runtime.cuda.backend import CudaBackend

log = logging.getLogger("hostward")


# What a training loop reports to the optimizer between steps: microbatches, waits, traces.


_ALL_KINDS = Kinds.STATE | Kinds.GRADIENTS | Kinds.WEIGHTS

_OF_ALL_GROUPS = (
    "_tracked", "_waiting", "_states", "_placements", "_summed", "_by_name", "_access", "offload_fraction",
)  # fmt: skip
"""Attributes that a group adds to, and that it leaves as they were if there is no memory for it."""

ROOT = "root"
"""Layer name of parameters that the module itself owns."""


class StepScalars(NamedTuple):
    """Holds the results of a step on the device.

    float32 [1] norm before clipping, int32 [1] 1 where the step was skipped.
    """

    norm: torch.Tensor
    skipped: torch.Tensor


# One microbatch of a training step: which gradients are offloaded in its backward, and what happens if that fails.


class Accumulation:
    """Offloads gradients of one microbatch as they become final; `AdamW.accumulate` returns it.

    Gradients that are accumulated on the host are offloaded in every microbatch.
    """

    def __init__(
        self, grad_hooks: GradientHooks, executor: StepExecutor, abandon: Callable[[], None], *, last: bool
    ) -> None:
        self._grad_hooks = grad_hooks
        self._executor = executor
        self._abandon = abandon
        self._last = last

    @_disable_dynamo
    @unfenced
    def __enter__(self) -> None:
        self._executor.asleep.require(Kinds.GRADIENTS | Kinds.WEIGHTS, "accumulate() begins")
        if self._grad_hooks.inside:
            raise ModelError(
                "accumulate() inside accumulate()", why="a microbatch is the last one or not", fix="use one block each"
            )
        self._grad_hooks.drop_cleared()
        self._grad_hooks.armed, self._grad_hooks.inside = self._last, True

    @_disable_dynamo
    @unfenced
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        grad_hooks = self._grad_hooks
        # Only here: forward may have run before the block, which then holds backward alone.
        grad_hooks.armed = grad_hooks.inside = grad_hooks.reduced_later = False
        if kind is not None:
            if self._last or grad_hooks.summed & grad_hooks.taken:
                self._abandon()
            return
        try:
            if self._last:
                # Gradients that the last microbatch did not touch are final as well, unless the program holds them.
                for t in grad_hooks.waiting():
                    if t.name not in grad_hooks.tied.names and t.name not in grad_hooks.held:
                        grad_hooks.hand_over(t)
            self._executor.flush(last=self._last)
        except HostwardError:
            self._abandon()
            raise


class AdamW(torch.optim.Optimizer):
    """Runs AdamW with decoupled weight decay, gradient clipping and a share of its state on the host.

    The update is defined in docs/exactness.md; weights and state are bitwise identical at every `offload_fraction`.
    State, step counts and checkpoints are keyed by parameter name. `optimizer.state` holds no tensor: frameworks that
    move state about find nothing to move.

    Args:
        params: a module (its parameters that are trainable now), an iterable of (name, Parameter) or of parameters, or
            a list of group dicts whose "params" is such an iterable. Parameters are fp32, bf16 or fp16, all on one
            device. A model may be sharded by FSDP2, before the optimizer is made. Parameters without names are named by
            `module`; without it by the outermost module that holds all of them, which is then used as if it had been
            given.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; per group where groups give their own. Read at every
            step.
        amsgrad, maximize, foreach, capturable, differentiable, fused: of torch.optim.AdamW, at their defaults only.
        max_grad_norm: clip the global L2 norm of all gradients to this; None or 0: no clipping. Clipping is part of
            the step: do not call `clip_grad_norm_` as well. Non-finite gradients skip the step either way.
        offload_fraction: share of the optimizer state's bytes that lives on the host. "auto": the least that keeps
            weights, gradients and state on the device within `device_memory` (bytes, or a text like "40GiB").
        streamed_fraction: of that, the share that takes a GPU step with state offload: it is copied to the device for
            its step and back. The rest takes a CPU optimizer step. "auto": the mix that uses memory bandwidth and PCIe
            or NVLink best, by rates measured on this machine. A function of these rates
            (`hostward.core.host_limits.Rates`) returns it instead, where more is known of the step.
        overlap: offload gradients during backward (see `accumulate`) and copy weights back during the next forward.
            False: everything happens within `step`.
        pin_gradients, pin_weights: pin the host memory to which gradients of buckets with a CPU optimizer step are
            offloaded, and from which their weights are copied back. Without it the caller waits for copies: bitwise
            identical, much slower. The state of these buckets is never pinned. A plan may say so too.
        use_torch_optimizer: step the host share with torch.optim.AdamW on fp32 main weights: not bitwise identical, and
            slower.
        step_early: share of the state with a CPU optimizer step that is stepped during backward, as its gradients land
            on the host, on the guess that the norm will not clip; True: all of it. The step writes a second set of the
            state, in as much host memory as moments, main weights and weights of these buckets take (12 bytes per bf16
            parameter with fp32 moments, 8 with bf16 ones), and is made again from the first where the guess was wrong:
            bitwise identical. After a step that clipped, none is guessed. Not with `gradients="host"`; weights that are
            offloaded are stepped after the norm.
        gradients: where gradients of buckets with a CPU optimizer step are accumulated over microbatches; None: as the
            plan says, or "device". "device": in `.grad`, from which they are offloaded in the last backward. "host": in
            float32 on the host, to which they are offloaded in every backward; those of other buckets in `.grad`, in
            float32 too. What one backward contributes is added up in the weight's dtype, as torch does it; that of
            weights which the module has in several places in float32.
        grad_dtype: in which `.grad` accumulates, as torch.float32 for 16-bit models and several microbatches; or None.
        state_dtypes: dtype of "exp_avg", of "exp_avg_sq" and of "main_param", the main weights of bf16 weights; each
            torch.float32 (also where it is left out) or torch.bfloat16: half of its bytes, rounded at random when it is
            stored (docs/exactness.md). A main weight in bf16 is the weight, with nothing stored besides. Moments may be
            torch.uint8, too: FP8 for matrices (two dimensions and more), with a scale for each 128 elements, which
            ranks must not cut, and bf16 for vectors.
        staging_bytes: device memory for GPU staging buffers, at least one bucket; None: as the plan says, or
            what backward frees, and two buckets besides.
        host_threads: threads of the CPU optimizer step; None: the CPUs of this process over its local ranks, less two.
        plan: from `hostward plan --json FILE`, or that file: where each bucket goes, instead of `offload_fraction`.
        module: the module that holds the parameters, where `params` is not itself the module: its layers then wait
            for their own weights alone, and its `load_state_dict` is watched, so that loading equal weights leaves the
            fp32 main weights as they are.
        stages: of a pipeline: the processes that hold the other stages of the model, this process among
            them. The norm is over all of them, and all skip together. None: there are no stages.
        tied: by name, the weights that another stage has as well, and the processes that have this part of each. Call
            `add_up_tied` before `step`.
        uncounted: names of parameters whose gradients other processes of `stages` count in the norm: replicas, such as
            those of tensor parallelism.
        shards: which parameters are flat parts of larger ones that other processes have the rest of; several where
            they are cut among several groups of processes. The norm is then the same however parameters are cut. It is
            over all of `stages`, or, without `stages`, over the group of the shards.
        waits: "hooks": forward waits for each layer's weights, by hooks of the module. "manual": the owner of the
            parameters calls `wait_for_weights(names)` before they are read and `reseed` after they are written; there
            are no hooks, and no fence. For parameters that are views of buffers (see docs/gradient-owners.md).
        fence: let whatever reads or writes a weight after `step()` wait for its new value by itself, and notice writes
            through `.data`. False: only the module's own forward and state dicts wait; other readers call
            `wait_for_weights()` first, and writes through `.data` need `reseed()`. `find_unfenced_reads` then says what
            is missed.
        backend: where operations run; by default the CUDA device of the parameters, or a simulated one for CPU
            parameters.

    Raises:
        ConfigError: a value outside its range. ModelError: a parameter that cannot be tracked.
        MemoryLimitError: the state does not fit the host or the device; nothing stays allocated. (PageLockError: the
            driver locks fewer pages than are needed; the text says which of these options need fewer.)
    """

    # A GradScaler sets these two around step() and deletes them afterwards; without one they do not exist.
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    state_format: StateFormat
    """How state is stored, as asked for: the dtypes of moments, FP8 of matrices alone, and what is kept of fp32 main
    weights.
    """

    _step_supports_amp_scaling = True
    _told_of_held = False

    @named_options
    def __init__(
        self,
        params: torch.nn.Module | ParamsT,
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
        step_early: float | bool = False,
        gradients: str | None = None,
        grad_dtype: torch.dtype | None = None,
        state_dtypes: Mapping[str, torch.dtype] | None = None,
        staging_bytes: int | None = None,
        host_threads: int | None = None,
        plan: PlanFile | str | Path | None = None,
        module: torch.nn.Module | None = None,
        stages: dist.ProcessGroup | None = None,
        tied: Mapping[str, dist.ProcessGroup] | None = None,
        uncounted: Collection[str] = (),
        shards: FlatShards | Sequence[FlatShards] = (),
        waits: str = "hooks",
        fence: bool = True,
        backend: Backend | None = None,
    ) -> None:
        variants = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "fused": fused}
        check_variants(variants | {"capturable": capturable, "differentiable": differentiable})
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.max_grad_norm = checked_norm(max_grad_norm)
        self._shards, self._parts, self._stages = checked_shards(shards, stages, plan)
        streamed = checked_streamed(streamed_fraction, use_torch_optimizer)
        self._mix = PlacementPolicy(offload_fraction, streamed, plan, gradients, device_memory)
        self._pin_gradients = pin_gradients and self._mix.pin_gradients
        self._pin_weights = pin_weights and self._mix.pin_weights
        self._overlap, self._host_threads = overlap and not use_torch_optimizer, host_threads
        self._backend, self._use_torch_optimizer = checked_backend(backend), use_torch_optimizer
        self.state_format = checked_form(state_dtypes, use_torch_optimizer)
        self._sums_on_host = sums_on_host(self._mix.gradients, overlap=self._overlap, grad_dtype=grad_dtype)
        early, sums = self._mix.early(step_early), self._sums_on_host
        self._step_early = checked_early(early, overlap=self._overlap, sums_on_host=sums, planned=plan is not None)
        self._grad_dtype = torch.float32 if self._sums_on_host else grad_dtype
        self._summed: frozenset[int] = frozenset()
        self.tied = checked_tied(tied, stages, sums_on_host=self._sums_on_host)
        self._staging_bytes = self._mix.staging_bytes if staging_bytes is None else staging_bytes
        check_counts(host_threads=host_threads, staging_bytes=self._staging_bytes)
        self._tracked: list[ParamRecord] = []
        self._states: list[BucketState] = []
        self._placements: list[PlacedBucket] = []
        self._pending: list[ParamRecord] = []
        self._waiting: list[ParamRecord] = []
        """Parameters whose weights hostward.move() has left on the CPU, for attach()."""
        self._watch, self._readers, self._sleeper = WeightWatch([]), Readers(), Sleeper()
        self._unchanged, self._building, self._told_of_writes, self._scaled = True, True, False, False
        self._memory: Memory
        self._forward_hooks: ForwardHooks | None = None
        self._uncounted, self._by_hooks = checked_uncounted(uncounted, self._stages), checked_waits(waits)
        self._fenced, self._borrowed = fence and self._by_hooks, Borrowed.NONE
        self._fence: WeightFence | None = None
        self._grad_hooks: GradientHooks
        self._sharded: Sharded | None = None
        self._empty_parts: EmptyParts | None = None
        self._executor: StepExecutor
        given, module = with_module(params, module)
        self._places, self._frozen = ParamRegistry(module), frozen_in(given)
        super().__init__(named_groups(given, self._places), defaults)
        self._building = False
        self._build()

    # ---------------------------------------------------------------- construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters; its state is placed by the same `offload_fraction`."""
        if not self._building:
            if self._grad_hooks.taken:
                raise ModelError(
                    "a parameter group added between backward and step()",
                    why="the optimizer has taken the gradients of the parameters that it has",
                    fix="add it after step() or after zero_grad()",
                )
            if self._grad_hooks.inside:
                raise ModelError(
                    "a parameter group added within accumulate()",
                    why="the gradients of this microbatch would be offloaded for the optimizer as it was",
                    fix="add it before accumulate() or after step()",
                )
            self._sleeper.asleep.require(_ALL_KINDS, "a parameter group is added")
            self._places = ParamRegistry(self._places.module)
            (param_group,) = named_groups([param_group], self._places)
            self._executor.require_weights_here()
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
            part = self._parts.get(name)
            first = 0 if part is None else part.start
            self._pending.append(self._places.tracked(name, parameter, len(self.param_groups) - 1, first))

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
            if not is_away(t.parameter):
                check_present(t.name, t.parameter)
        wait_for_optimizers(t.parameter for t in new)  # one that this one replaces has perhaps just made a step
        check_no_overlap([*self._tracked, *new])
        require_sharding(self._places, new)
        check_grad_dtype(self._grad_dtype, {t.name: t.parameter for t in new})
        check_blocks(self.state_format, new, self._shards)
        check_main_params(self.state_format, [t.parameter.dtype for t in (*self._tracked, *new)])
        self.tied.require_known([*self._tracked, *new])
        require_names("uncounted", self._uncounted, [*self._tracked, *new])
        require_parts(self._shards, [*self._tracked, *new])
        first, form = len(self._states), self.state_format
        used, ranks = self._places.by_use(new), ranks_of(new)
        buckets, plan, early = self._mix.place(
            backend, used, self._grad_dtype, first, form=form, ranks=ranks, step_early=self._step_early
        )
        placements = [b.placement for b in plan.buckets]
        grad_dtypes = landing_dtypes(buckets, {t.name: t.parameter for t in new}, self._grad_dtype)
        pinned = self._pin_gradients, self._pin_weights
        asked = AllocationRequest(buckets, placements, grad_dtypes, self._sums_on_host, *pinned, early)
        states = take_states(backend, asked)
        before = {name: vars(self).get(name) for name in _OF_ALL_GROUPS}
        # New lists: what was connected before has the old ones, and stays in use if this fails.
        self._tracked = [*self._tracked, *new]
        self._waiting = [*self._waiting, *(t for t in new if is_away(t.parameter))]
        # Tools that find no state make one by a step with zero gradients; those that move state find no tensor.
        self.state.update({t.parameter: StoredElsewhere() for t in new})
        self._summed |= {len(self._states) + b for b in asked.summed}
        self._states = [*self._states, *states]
        self._placements = [*self._placements, *plan.buckets]
        self.offload_fraction = plan.asked_fraction
        for t in new:
            if not is_away(t.parameter):
                backend.adopt(t.local.data, "weights", counted=True)
        self._by_name = {t.name: t for t in self._tracked}
        self._access = StateAccess(pieces(self._states), self._by_name, form)
        for t in new:
            self._access.reseed(t.name)
        try:
            with explained(backend, asked):
                self._connect(backend)
        except HostwardError:
            vars(self).update(before)
            for t in new:
                del self.state[t.parameter]
                if not is_away(t.parameter):
                    backend.ledger.add(Buffer(Tier.DEVICE, t.local.data, "weights"), -1)
            free_states(backend, states)
            raise
        backend.synchronise()  # what is pending holds weights, too
        self._watch.compare([self._by_name[name] for name in self._executor.shared_now()])
        nothing = plan.asked_fraction > 0 and self.plan.state_bytes and not self.plan.offloaded_bytes
        log.log(logging.WARNING if nothing else logging.INFO, "%s", self.plan.explain())

    def _connect(self, backend: Backend) -> None:
        """Build the schedule, hooks and watches over all buckets that exist now."""
        partials, host_partials, first_chunks = allocate_partials(backend, self._states, on_host=bool(self._summed))
        scalars = allocate_scalars(backend, Tier.DEVICE), allocate_scalars(backend, Tier.HOST)
        groups = self._places.sharding
        of_stages = self._stages, self.tied.uncounted() | self._uncounted
        across = across_ranks(backend, self._tracked, self._states, first_chunks, *of_stages, self._shards)
        memory = Memory(*scalars, partials, host_partials, first_chunks, across)
        gauge = CudaGauge(cast("CudaBackend", backend)) if backend.device.type == "cuda" else None
        layers = {t.name: t.layer or ROOT for t in self._tracked}
        executor = StepExecutor(
            backend,
            self._states,
            self._by_name,
            memory,
            layers=[layers[s.bucket.ranges[0].name] for s in self._states],
            slots=StagingBuffers(backend, self._states, gauge=gauge, staging_bytes=self._staging_bytes),
            totals=HostGradAccumulator(backend, self._states, self._summed, pinned=self._pin_gradients),
            together=made_together(groups, self._tracked),
            holders=functools.partial(_holders, groups) if self._fenced else None,
            asleep=self._sleeper.asleep,
            overlap=self._overlap,
            use_torch_optimizer=self._use_torch_optimizer,
            groups=self.param_groups,
        )
        empty_parts = EmptyParts(backend, self._tracked, self._empty_parts)
        # No memory is allocated from here on: an optimizer to which a group could not be added goes on as it was.
        self._executor, self._memory, self._empty_parts = executor, memory, empty_parts
        self._watch.close()
        if hasattr(self, "_grad_hooks"):
            self._grad_hooks.close()
        if self._forward_hooks is not None:
            self._forward_hooks.close()
        if self._fence is not None:
            self._fence.close()
        watched = self._tracked if self._by_hooks else []
        root = self._places.root if watched else None
        self._watch = WeightWatch(watched, self._executor.wait_for_all, root, self._frozen)
        fenced = self._executor, self._watch, self._tracked, layers, root
        self._fence = WeightFence(*fenced) if self._fenced else None
        summed = {r.name for b in self._summed for r in self._states[b].bucket.ranges}
        leave = None if self._fence is None else self._fence.leave
        to_cast: Set[str] = frozenset()
        if self._grad_dtype is not None:
            known = self._places, self._tracked, self._states, self._summed
            to_cast = accumulate_in(self._grad_dtype, *known, sums_on_host=self._sums_on_host)
        late = {r.name for s in self._states if s.placement.offloaded for r in s.bucket.ranges}
        self._grad_hooks = GradientHooks(self._tracked, self._executor, summed, to_cast, late, self.tied, leave)
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None
        self._access.empty_counts = self._empty_parts.counts()
        if groups is not None:
            self._sharded = Sharded(groups, self._tracked, layers, self._executor, self._grad_hooks)
        self._forward_hooks = None
        root, fence = self._places.root, self._fence
        if root is not None and self._by_hooks and (self._overlap or fence is not None):
            use = self._executor.wait_for_params if fence is None else fence.enter
            leave_root = None if fence is None else fence.raise_all
            in_ddp = self._grad_hooks.in_ddp
            self._forward_hooks = ForwardHooks(
                root, layers, self._tracked, use, self._executor.wait_for_all, leave_root, in_ddp
            )

    # ---------------------------------------------------------------- facts

    @property
    def rates(self) -> Rates | None:
        """Return the rates measured on this machine before state was placed; None if no placement depended on them."""
        return self._mix.rates

    @property
    def plan(self) -> Plan:
        """Return the placement of every bucket.

        `plan.asked_fraction` and `plan.placed_fraction` are the shares.
        """
        return Plan(self.offload_fraction, tuple(self._placements))

    @property
    def inventory(self) -> Inventory:
        return Inventory(tuple(t.facts for t in self._tracked), tuple(s.bucket for s in self._states))

    @property
    def parts(self) -> Mapping[str, FlatPart]:
        """Return, by name, which elements of a larger parameter those of `shards` are: what `state_of` is of."""
        return MappingProxyType(self._parts)

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of a step, as data; `print(optimizer.schedule.to_text())` shows it."""
        return self._executor.schedule

    def weight_copies(self) -> WeightCopies:
        """Return the host copies that the CPU optimizer step writes, for weight offloading. Raises AsleepError."""
        self._sleeper.asleep.require(Kinds.WEIGHTS, "attach() is called")
        return WeightCopies(
            self._tracked, self._states, self._executor, self._watch, self._access, self._follow_weights,
            self.discard_gradients, self._sleeper,
        )  # fmt: skip

    def layers_attached(self) -> None:
        """Report that `attach` carries out what the plan says about layers; without it the first step warns."""
        self._mix.layers_by_plan = 0

    # ---------------------------------------------------------------- the step

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, gradient_scale: torch.Tensor | None = None) -> Any:
        """Update every parameter that has a gradient; a parameter without one keeps its state and its step count.

        Args:
            closure: evaluated once, with gradients enabled, before the update; its result is returned.
            gradient_scale: float32 [] or [1] on the parameters' device; every gradient is multiplied by it first, and
                norm and clipping are those of the products. A clip coefficient that is computed elsewhere goes here,
                with `max_grad_norm` 0. The host does not read it.

        Raises:
            ModelError: a replaced parameter, or a gradient of a kind that cannot be stepped. Nothing has been changed
                then.
        """
        try:
            self._sleeper.asleep.require(_ALL_KINDS, "step() is called")
            self._executor.require_whole()
            if self._stages is not None:
                require_one_scale(self, self._stages)
            self._scaled = self._scaling()[1] is not None
            scale = checked_scale(gradient_scale, self.backend.device)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(scale)
        except BaseException:
            self._forget_scaling()
            raise
        return loss

    @unfenced
    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self, scale: torch.Tensor | None) -> None:
        check_members(self.param_groups, self._tracked)
        check_state(self.state, len(self._tracked))
        self._waiting = [t for t in self._waiting if is_away(t.parameter)]
        if self._waiting:
            raise waits(self._waiting[0].name)
        if self._mix.layers_by_plan:
            log.warning(
                "the plan also offloads or recomputes something of %d layers, which nothing does here: "
                "call hostward.attach(model, optimizer, plan=...)",
                self._mix.layers_by_plan,
            )
            self._mix.layers_by_plan = 0
        self._readers.wait()
        self._follow_weights()
        self._watch.require_no_newcomers()
        for group in self.param_groups:
            check_group(group)
        try:
            waiting = self._grad_hooks.waiting()
        except GradientsClearedError:
            self.discard_gradients()
            waiting = self._grad_hooks.waiting()
        if self.tied.names:
            self.tied.require_added_up(self._by_name)
        if self._scaling()[0] is None:  # else the scaler has looked at gradients, and unscaled none
            self._grad_hooks.require_unscaled_alike()
        gradients = {t.name: gradient_of(t) for t in waiting}
        self._executor.check(gradients)
        if gradients or self._grad_hooks.taken:
            self._issue(waiting, gradients, scale)
        elif self._grad_hooks.used_only():
            by_hooks = "run a backward pass between two steps, or make the optimizer with overlap=False"
            raise ModelError(
                "step() without a new gradient",
                why="the last step used up all that there was",
                fix=by_hooks if self._by_hooks else "take_gradient() between two steps",
            )
        else:
            # grad_norm and last_step_skipped describe this step, not the one before, which may still read its own.
            self.wait()
            self._memory.device_scalars.norm.data.zero_()
            self._memory.device_scalars.skip.data.zero_()

    def _issue(
        self, waiting: Sequence[ParamRecord], gradients: Mapping[str, torch.Tensor], scale: torch.Tensor | None
    ) -> None:
        """Issue the step proper.

        Interrupted, by Ctrl-C or a failed kernel, it leaves some buckets stepped and others not.
        """
        stays = not self._overlap or self._grad_hooks.captured
        self._unchanged = False
        try:
            if stays:
                self._executor.offload_gradients(gradients, self._grad_hooks.held)
            elif gradients:
                self._grad_hooks.hand_over_all(waiting, gradients)
            stepped = list(gradients) if stays else list(self._grad_hooks.taken)
            clipping = self._grad_hooks.clipping(self.max_grad_norm, *self._scaling(), scale)
            self._executor.step(self.param_groups, clipping)
            self._wait_for_held()
            if clipping.overflow_out is not None:
                self.step_scalars()  # the scaler reads its flag next, without asking for it
            if self._sharded is not None and self._empty_parts is not None:
                self._empty_parts.step(stepped, self._memory.device_scalars.skip)
            torch.autograd.graph.increment_version([self._by_name[name].parameter for name in stepped])
            self._grad_hooks.mark(Where.USED)
            if self._borrowed is Borrowed.TAKEN:
                self._borrowed = Borrowed.STEPPED
            if stays or (self._by_hooks and self._forward_hooks is None):
                self._executor.wait_for_all()
        except BaseException:
            self.backend.drain()
            raise
        self._watch.remember(self._tracked)
        self._watch.compare([self._by_name[name] for name in self._executor.shared])
        self._executor.torn = False
        if self._fence is not None:
            self._fence.raise_all()

    def _wait_for_held(self) -> None:
        """Wait for the readers of gradients that the program holds as well, and may overwrite when step() returns."""
        held = self._grad_hooks.held_late()
        if not held:
            return
        if not self._told_of_held:
            self._told_of_held = True
            log.info(
                "step() waits until %d gradients have been read, because others than .grad hold them: %s",
                len(held),
                shown(sorted(held)),
            )
        self._executor.wait_for_gradients()

    def _scaling(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what a gradient scaler says, if it looked at the gradients."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    def _forget_scaling(self) -> None:
        """Delete what a gradient scaler has set for a step that raises, as it does itself after one that does not.

        It multiplies what it finds by its scale: the next step would divide gradients by the scale twice.
        """
        if self._scaling()[1] is not None:
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)

    __repr__ = described

    # -------------------- Saving

    @unfenced
    def reseed(self, names: Iterable[str] | None = None) -> None:
        """Set the fp32 main weight anew from the weight.

        This is needed with `fence=False` after writes through `.data`, which nothing else sees then.

        Args:
            names: parameters to take; None for all. Moments and step counts stay.

        Raises:
            ModelError: a name that the optimizer does not track.
        """
        self._sleeper.asleep.require(Kinds.STATE | Kinds.WEIGHTS, "reseed() is called")
        self._readers.wait()
        self.wait()
        names = [t.name for t in self._tracked] if names is None else list(names)
        for name in names:
            self._access.require(name)
        self._executor.state_changed()
        for name in names:
            self._access.reseed(name)
        self._watch.remember([self._by_name[name] for name in names])
        self.backend.synchronise()

    def _follow_weights(self) -> None:
        if self._places.sharding is not None:
            self._places.sharding.reshard()
        changed = self._watch.changed()
        if changed:
            for t in changed:
                check_trackable(t.name, t.parameter, self.backend.device)
            check_no_overlap(self._tracked)
            self._tell_changed(changed)
            self.reseed([t.name for t in changed])

    def _tell_changed(self, changed: Sequence[ParamRecord]) -> None:
        """Report writes to weights, and warn once of those that may be a mistake.

        Loads, and whatever comes before the first step (DDP's broadcast, initialisation), are in order.
        """
        written = [] if self._unchanged else [t for t in changed if not self._watch.was_loaded(t)]
        level = logging.INFO if self._told_of_writes or not written else logging.WARNING
        self._told_of_writes |= bool(written)
        log.log(
            level,
            "%d weights were %s; their masters are taken anew from them: %s",
            len(changed),
            "changed outside the optimizer" if written else "loaded or initialised",
            shown([t.name for t in changed]),
        )

    @_disable_dynamo
    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the state by parameter name, independent of placement; tensors on the CPU and plain values only.

        The tensors are copies: with fp32 moments 12 bytes of host memory per parameter, 8 for fp32 weights. torch.optim
        returns its own tensors instead. Here they would change under a writer in the background, and each is a part of
        a slab that torch.save would write as a whole.

        Args:
            copy: False: moments that are stored on the host in one piece are views of the state itself, 8 bytes per
                parameter less. They change with the next step. For writers that are done before it and take views as
                they are, such as `hostward.checkpoint.save`; not for torch.save.

        Hooks run as in torch.optim.Optimizer: those of `register_state_dict_pre_hook` before anything is read, those of
        `register_state_dict_post_hook` on the result, which they may change or replace.

        Returns:
            {"format": 1, "optimizer": "hostward.AdamW", "state": {name: {"step": int64 [], "exp_avg", "exp_avg_sq":
            float32 (or bfloat16, by `state_dtypes`, also of FP8) [shape], "master": float32 [shape] for 16-bit weights,
            unless the main weight is the bf16 weight}},
            "param_groups": [{"params": [names], "param_names": [names], "lr", "betas", "eps", "weight_decay",
            ...}]}, and "parts" if parameters are parts of larger ones: {name: {"whole", "start", "stop", "numel"}},
            and "moments": {"exp_avg", "exp_avg_sq"}, their dtypes, if not both are fp32, and "main_param": "bf16"; both
            are in each group as well.
            accelerate, which would move the state to the device and load it back where it wraps an optimizer, is given
            a token for the state that is there.

        Raises:
            ModelError: a step was interrupted, or module or groups are not as they were. MemoryLimitError: the host has
                no room for the copies. CheckpointError: torch.distributed.checkpoint asks for a flattened state.
        """
        require_not_flattened()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._state(copy)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    @unfenced
    def _state(self, copy: bool) -> dict[str, Any]:
        self._settle()
        warn_of_unsaved(self.state)
        # Hooks of other libraries expect tensors.
        if not self._optimizer_state_dict_post_hooks and is_being_wrapped(self):
            state: object = Unmoved(self)
        else:
            if copy:
                require_host_memory(self._access.copied_bytes(), owner="a copy of the optimizer state")
            state = {t.name: self._access.read(t.name, copy=copy) for t in self._tracked}
        said = dtypes_for_torch() if is_set_by_torch() else saved_dtypes(self.state_format)
        groups = [{**group, "param_names": list(group["params"]), **said} for group in self._settings()]
        more = saved_cut(self._parts) | saved_dtypes(self.state_format)
        return {"format": STATE_FORMAT, "optimizer": OWNER, "state": state, "param_groups": groups, **more}

    def _settle(self) -> None:
        """Wait until all streams are idle and the state is that of the last step, whole."""
        self._sleeper.asleep.require(Kinds.STATE | Kinds.WEIGHTS, "the state is read, saved or set")
        check_members(self.param_groups, self._tracked)
        check_state(self.state, len(self._tracked))
        self._follow_weights()
        self._executor.require_whole()
        self.wait()

    def _settings(self) -> list[dict[str, Any]]:
        groups = []
        for group in self.param_groups:
            settings = {key: plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**settings, "params": list(group["param_names"])})
        return groups

    @_disable_dynamo
    @unfenced
    def sources(self) -> StateSources:
        """Return state and weights as they are stored, by parameter name, to be read from other threads.

        Nothing is copied. They are those of this moment until the next `step()`, which waits for registered readers, as
        everything does that changes them. `hostward.checkpoint` writes from them.

        Raises:
            ModelError: a step was interrupted, or module or groups are not as they were; parameters are parts of larger
                ones, of which these sources would not tell.
        """
        require_uncut(self._parts)
        self._settle()
        warn_of_unsaved(self.state)
        describer = Describer(self.backend, self._readers, self.state_format)
        found = {t.name: self._access.pieces(t.name) for t in self._tracked}
        return StateSources(
            STATE_FORMAT,
            {t.name: describer.weight(t, found[t.name]) for t in self._tracked},
            {t.name: describer.state(t, found[t.name]) for t in self._tracked},
            {t.name: torch.tensor(self._access.count(t.name), dtype=torch.int64) for t in self._tracked},
            self._settings(),
            {id(t.parameter): t.name for t in self._tracked},
        )

    def empty_state(self, names: Collection[str] | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """Return host tensors with the names, shapes, dtypes and divisions of the state, to load a checkpoint into.

        Their contents are arbitrary. `load_state_dict` takes them over.

        Args:
            names: of the parameters; None: all.

        Raises:
            MemoryLimitError: the host has no room for the whole state.
        """
        if names is None:
            require_host_memory(self._access.copied_bytes(), owner="a copy of the optimizer state")
        return {t.name: self._access.empty(t.name) for t in self._tracked if names is None or t.name in names}

    @_disable_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, saved at any placement. It is checked as a whole before anything is changed.

        An fp32 main weight whose rounded bits differ from the present weight sets the weight (logged): model and
        optimizer may so be loaded in either order. Names may carry what `torch.compile` or data parallelism put into
        them. A `PiecewiseState` is read while it is written: where that fails, `step()` refuses until a load succeeds.

        Hooks run as in torch.optim.Optimizer: those of `register_load_state_dict_pre_hook` on a shallow copy of
        `state_dict`, which they may change or replace, those of `register_load_state_dict_post_hook` at the end.

        Moments and main weights in bfloat16 load into float32 exactly; the reverse would lose bits. A main weight in
        bfloat16 is the weight, which is not in the state: load the model's weights too.

        Raises:
            CheckpointError: the state of another optimizer; names, shapes, groups or `parts` that differ; moments or
                main weights in float32 where this optimizer has bfloat16.
        """
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        self._load(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @unfenced
    @torch.no_grad()
    def _load(self, given: Mapping[str, Any]) -> None:
        self._sleeper.asleep.require(_ALL_KINDS, "load_state_dict() is called")
        check_members(self.param_groups, self._tracked)
        state = given.get("state")
        if isinstance(state, Unmoved) and state.is_of(self):
            self._set_groups(self._checked({**given, "state": {}})[1])
            return
        self._readers.wait()
        if not self._executor.torn:
            self._executor.wait_for_all()
        self.backend.drain()
        state, settings = self._checked(given)
        require_known(state, self._by_name)
        form = checked_dtypes(given, self.state_format)
        self._check_entries(state, form)
        if form.main_param is Dtype.BF16 and not isinstance(state, PiecewiseState):
            state = {name: without_master(entry) for name, entry in state.items()}
        if self._executor.torn:
            # Gradients offloaded for the step that was interrupted must not be stepped with.
            self._executor.abort()
            self._grad_hooks.forget()
        self._executor.torn = True  # until all of it is written
        pieces = state.whole() if isinstance(state, PiecewiseState) else ((Rows(n), state[n]) for n in self._by_name)
        with_own_weight = [at.name for at, entry in pieces if self._access.write(at.name, entry, at.rows)]
        set_from_master = list(dict.fromkeys(with_own_weight))
        self._set_groups(settings)
        renew_state(self.state, self._tracked)
        if set_from_master:
            log.warning(
                "%d weights were set from the masters of the loaded state: %s",
                len(set_from_master),
                shown(set_from_master),
            )
        self._executor.forget_step_bound()
        self._executor.state_changed()
        self._watch.remember(self._tracked)
        self._watch.expect_broadcast()
        self._unchanged = False
        self._executor.torn = False
        self.backend.synchronise()

    @_disable_dynamo
    @unfenced
    @torch.no_grad()
    def state_of(self, name: str) -> dict[str, torch.Tensor]:
        """Return a copy of one parameter's state: what `state_dict()["state"][name]` is.

        Raises:
            ModelError: an unknown name; a step was interrupted.
        """
        self._access.require(name)
        self._settle()
        return self._access.read(name)

    def step_count(self, name: str) -> int:
        """Return the number of steps of a parameter. It waits for the last step. Raises ModelError."""
        self._access.require(name)
        self._settle()
        return self._access.count(name)

    @_disable_dynamo
    @unfenced
    @torch.no_grad()
    def set_state_of(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace some of one parameter's state; the rest stays. All of it is checked before anything is changed.

        Args:
            name: of the parameter.
            values: any of step (a whole number), exp_avg, exp_avg_sq and, for 16-bit weights, master: float32 of the
                parameter's shape, moments in bfloat16 too, and only so where the optimizer stores them so. A weight
                that is not the rounded master is set to it.

        Raises:
            ModelError: an unknown name; a step was interrupted. CheckpointError: another key, shape or dtype.
        """
        self._access.require(name)
        self._settle()
        entry = self._access.merged(name, values)
        self._readers.wait()
        self._executor.torn = True  # until all of it is written
        self._access.write(name, entry)
        self._executor.forget_step_bound()
        self._executor.state_changed()
        self._watch.remember([self._by_name[name]])
        self._unchanged = False
        self._executor.torn = False
        self.backend.synchronise()

    def _check_entries(self, state: Mapping[str, Mapping[str, Any]], form: StateFormat) -> None:
        """Check a saved state. Raises CheckpointError."""
        if isinstance(state, PiecewiseState):  # whoever made it has compared it
            require_fp8(form, self.state_format)
            self._access.require_present()
        else:
            self._access.check(state, form)

    def _checked(self, given: Mapping[str, Any]) -> tuple[Mapping[str, Mapping[str, Any]], list[dict[str, Any]]]:
        """Return the state by this optimizer's names, and what the groups set. Raises CheckpointError."""
        state, groups = self._in_my_names(*saved_parts(given))
        names = [g["param_names"] for g in self.param_groups]
        check_same_names("parameter group", [g["params"] for g in groups], names)
        check_same_cut(given, self._parts, [t.name for t in self._tracked])
        return state, [checked_settings(theirs, mine) for theirs, mine in zip(groups, self.param_groups, strict=True)]

    def _set_groups(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for mine, theirs in zip(self.param_groups, settings, strict=True):
            mine.update(theirs)

    def _in_my_names(
        self, state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return a saved state under this optimizer's names; names that mean none of its parameters stay."""
        saved = [*state, *(name for group in groups for name in group["params"])]
        mine = {theirs: name for name, theirs in matched([t.name for t in self._tracked], saved).items()}
        renamed = [{**group, "params": [mine.get(name, name) for name in group["params"]]} for group in groups]
        if isinstance(state, PiecewiseState):
            return state, renamed  # it has them already
        return {mine.get(name, name): entry for name, entry in state.items()}, renamed

    def __getstate__(self) -> NoReturn:
        raise ModelError(
            "hostward.AdamW cannot be copied or pickled",
            why="its state lies in memory of the host and the device that belongs to this process",
            fix="use state_dict() and load_state_dict()",
        )

    # -------------------- Control

    @property
    def waits(self) -> str:
        """Return who waits for new weights: "hooks" of the module, or ("manual") the owner of their buffers."""
        return "hooks" if self._by_hooks else "manual"

    @property
    def backend(self) -> Backend:
        """Return the backend that carries out the steps; its `ledger` counts bytes by tier and owner."""
        if self._backend is None:
            raise ModelError("the optimizer has no backend yet")
        return self._backend

    def accumulate(self, *, last: bool) -> Accumulation:
        """Return a context for the forward and backward of one microbatch.

            for i, batch in enumerate(microbatches):
                with optimizer.accumulate(last=i == len(microbatches) - 1):
                    loss(model, batch).backward()
            optimizer.step()

        In the last one gradients are offloaded as backward makes them: they are copied to the host while backward goes
        on, and their device memory is freed. `.grad` then holds an `OffloadedGrad` that raises ModelError when it is
        used. Without this context gradients are offloaded at `step`, with the same result. Gradients that are
        accumulated on the host (`gradients="host"`) are offloaded in every backward, within this context or not.

        Under DistributedDataParallel, which reduces gradients when backward is over, they are offloaded at the end of
        the block.

        Rounds accumulate until `step`, whichever of them was called the last one. `step` uses gradients up: the next
        round starts anew, with `zero_grad` in between or without it. With `overlap=False` `.grad` stays as it is, and
        what `zero_grad` does not clear is added to, as with torch.optim.

        Args:
            last: whether no further microbatch will add to the gradients of this step.
        """
        return Accumulation(self._grad_hooks, self._executor, self._abandon, last=last and self._overlap)

    @_disable_dynamo
    @unfenced
    @torch.no_grad()
    def add_up_tied(self) -> None:
        """Add up the gradients of `tied` weights over the processes that have them.

        All of these processes call it when the backward passes of a step are over, before `step()`, and before a
        gradient scaler or a custom training loop looks at gradients. Until then these gradients stay in `.grad`. On a
        GPU the host does not wait.
        """
        self._grad_hooks.add_up_tied()

    @_disable_dynamo
    @unfenced
    @torch.no_grad()
    def take_gradient(self, name: str, gradient: torch.Tensor, *, last: bool = True, borrowed: bool = False) -> None:
        """Take the final gradient of a parameter from whoever owns it, instead of from `.grad`.

        It is offloaded at once, on the current stream: what has made it comes before on that stream. Call `step` when
        all gradients are taken; those that are in `.grad` by then are stepped with as well.

        Args:
            name: of the parameter.
            gradient: contiguous, with as many elements as the parameter, fp32, bf16 or fp16, on its device. A dtype
                other than that of the parameter is `grad_dtype` of the optimizer.
            last: False: more microbatches come, whose gradients are accumulated on the host (`gradients="host"`).
            borrowed: the memory stays the owner's, who calls `wait_for_gradients` before overwriting it. Otherwise it
                is kept alive until it has been read.

        Raises:
            ModelError: an unknown name; a gradient of another size or kind, or taken already; `overlap=False`.
            OrderingError: new weights were not waited for before they were used; or gradients that were borrowed for
                the step before may still be read, because `wait_for_gradients` was not called.
        """
        self._access.require(name)
        self._sleeper.asleep.require(Kinds.GRADIENTS, "take_gradient() is called")
        if not self._overlap:
            raise ModelError("take_gradient() with overlap=False", fix="leave overlap out, or set .grad")
        if borrowed and self._borrowed is Borrowed.STEPPED:
            raise OrderingError(
                f"the gradient of {name!r} is borrowed while those of the last step may still be read",
                why="wait_for_gradients() was not called since then, so the owner may have overwritten them too early",
                fix="call wait_for_gradients() before gradients are cleared or written",
            )
        self._executor.require_used(name)
        self._grad_hooks.take(name, gradient, last=last, borrowed=borrowed)
        if borrowed:
            self._borrowed = Borrowed.TAKEN

    @property
    def gradients_taken(self) -> frozenset[str]:
        """Return the names of the parameters whose gradients have been offloaded for the step to come."""
        return frozenset(self._grad_hooks.taken)

    @_disable_dynamo
    @unfenced
    def wait_for_gradients(self) -> None:
        """Make the current stream wait until gradients that were borrowed have been read. The host does not wait.

        Afterwards their owner may overwrite them on this stream.

        Raises:
            OrderingError: no step has been made with them yet.
        """
        if self._borrowed is Borrowed.TAKEN:
            raise OrderingError(
                "gradients that were borrowed are given back before the step",
                why="some of them are read by the step alone",
                fix="call step() first, or discard_gradients() to make no step with them",
            )
        self._executor.wait_for_gradients()
        self._borrowed = Borrowed.NONE

    @unfenced
    def _abandon(self) -> None:
        """Mark offloaded gradients as lost, because backward was interrupted."""
        self._executor.discard()
        self._grad_hooks.mark(Where.LOST)

    @unfenced
    def discard_gradients(self) -> None:
        """Forget the gradients that have been offloaded; `zero_grad` does this as well."""
        self._executor.discard()
        self._grad_hooks.forget()
        if self._borrowed is Borrowed.TAKEN:
            self._borrowed = Borrowed.NONE

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including offloaded ones.

        Args:
            set_to_none: False: what is in `.grad` becomes zero, and what is offloaded None. With `gradients="host"`
                all become None, whatever is said, so that a parameter without a new gradient is stepped nowhere.
        """
        self.discard_gradients()
        with without_functions():
            super().zero_grad(set_to_none or self._sums_on_host)

    def replayed(self) -> None:
        """Report that a CUDA graph has written the gradients in `.grad`.

        They stay there, whatever ran before the replay. A loop that does nothing but replay and step need not call
        this: the capture reports it.
        """
        self._grad_hooks.captured = True

    @_disable_dynamo
    @unfenced
    @torch.inference_mode(False)
    @torch.no_grad()
    def sleep(
        self,
        kinds: Collection[str] = ("state", "gradients", "weights"),
        *,
        device_bytes: int | str | None = None,
    ) -> SleepReport:
        """Move what training holds in device memory to pinned host memory, so that another program can use the device.

            optimizer.sleep()  # or ("state", "gradients"), to generate with the weights that are trained
            ...  # generate
            optimizer.wake()

        It may be called at any time between two operations of the loop: before the first step, between microbatches,
        before `step`, while a checkpoint is written in the background (it waits for the writer), twice. Training goes
        on after `wake` with the bits of a run that never slept. The pinned memory is kept for the next sleep. Under
        FSDP2 every rank moves its own parts.

        Args:
            kinds: of "state", "gradients" and "weights". "state": what is stored on the device of it. "weights": of the
                whole module, frozen ones too, if the optimizer knows it.
            device_bytes: how many bytes to free at least (or a text such as "10GiB"): whole storages leave until they
                are reached, state first and weights last, and only kinds of which some leave are asleep. None: all.

        Returns:
            What was freed, by hostward's, torch's and the driver's count, and what stayed and why: weights of which
            other code holds a view, `.data` or a graph, tied storages, parts of larger buffers.

        Raises:
            ConfigError: an unknown kind. MemoryLimitError: the host has no room, or `device_bytes` cannot be reached;
                nothing has moved then. ModelError: gradients or weights in buffers of their owner (`waits="manual"`)
                or in CUDA graphs; a step was interrupted.
        """
        wanted, budget, parts = checked_kinds(kinds), checked_budget(device_bytes), self._parts_of_sleep()
        captured = self._grad_hooks.captured
        require_possible(wanted, parts, manual=not self._by_hooks, captured=captured)
        self._executor.require_whole()
        self._readers.wait()
        if not self._sleeper.asleep.kinds:
            check_members(self.param_groups, self._tracked)
            self._follow_weights()
        elif self._places.sharding is not None:
            self._places.sharding.reshard()
        if self._places.sharding is not None and not self._sleeper.asleep.kinds & Kinds.WEIGHTS:
            self._places.sharding.settle_all()
        report = self._sleeper.sleep(parts, wanted, budget)
        log.info("%s", report.explain())
        return report

    @_disable_dynamo
    @unfenced
    @torch.inference_mode(False)
    @torch.no_grad()
    def wake(self, kinds: Collection[str] | None = None) -> None:
        """Bring what is asleep back to the device, into the same storages, and return when it is there.

        Args:
            kinds: of "state", "gradients" and "weights"; None: all. What is awake stays so.

        Raises:
            ConfigError: an unknown kind. MemoryLimitError: the device has no room; everything is asleep still, and
                `wake` may be called again.
        """
        self._sleeper.wake(self._parts_of_sleep(), _ALL_KINDS if kinds is None else checked_kinds(kinds))

    @property
    def asleep(self) -> tuple[str, ...]:
        """Return which kinds are asleep, by the names that `sleep` takes."""
        return tuple(self._sleeper.asleep.kinds.names)

    def _parts_of_sleep(self) -> Parts:
        places = self._places
        holders = functools.partial(_holders_of, places.sharding)
        return Parts(self.backend, self._executor, self._watch, self._tracked, self._states, places.root, holders)

    def trace(self) -> Tracing:
        """Return a context that times every operation of the steps inside: `with optimizer.trace() as trace: ...`.

        Afterwards `trace.write(path)` writes a file for Perfetto, and `trace.summary()` reports what was overlapped.
        """
        return Tracing(self.backend, self._executor)

    def find_unfenced_reads(self) -> UnfencedReads:
        """Return a debugging context in which a use of a weight before its new value is there raises OrderingError."""
        return UnfencedReads(self._executor, self._tracked, {t.name: t.layer or ROOT for t in self._tracked})

    def wait(self) -> None:
        """Return when every weight has its new value. Raises errors that a CPU optimizer step reported."""
        self._executor.wait_for_all()
        self._executor.synchronise()

    def wait_for_weights(self, names: Iterable[str] | None = None) -> None:
        """Make the current stream wait for every new weight, and reload offloaded ones until their layers have run.

        The host does not wait.

        Hooks do this by layer, and the fence for whatever else reads a weight. Call it before the replay of a CUDA
        graph on another stream, before weights are read by their addresses, and with `fence=False` or `waits="manual"`
        before any read.

        Args:
            names: wait for the layers of these parameters only; they are not offloaded.

        Raises:
            ModelError: an unknown name, or a weight that is offloaded.
        """
        if names is not None:
            self._wait_for_names(list(names))
            return
        self._executor.wait_for_weights()
        if not self.backend.capturing():
            self.backend.follow_compute()  # earlier weights were perhaps waited for on another stream

    @unfenced
    def _wait_for_names(self, names: Sequence[str]) -> None:
        for name in names:
            self._access.require(name)
            if name in self._executor.fetched:
                raise ModelError(f"weight {name!r} is offloaded", fix="wait_for_weights() without names reloads it")
        self._executor.before_read(names)

    def arrive(self) -> None:
        """Do the same as `wait_for_weights`, under its old name."""
        warnings.warn("AdamW.arrive() is wait_for_weights() now", DeprecationWarning, stacklevel=2)
        self.wait_for_weights()

    @property
    def grad_norm(self) -> float:
        """Return the global gradient norm of the last step before clipping, inf where a gradient was not finite.

        It waits for the norm, not for the CPU optimizer step.
        """
        return float(self.step_scalars().norm.item())

    @property
    def last_step_skipped(self) -> bool:
        """Report whether the last step found non-finite gradients and left everything as it was.

        It waits for the norm, not for the CPU optimizer step.
        """
        return bool(self.step_scalars().skipped.item())

    @property
    def step_was_skipped(self) -> bool:
        """Report whether a gradient scaler took part in the last step and it was skipped.

        accelerate asks this of an optimizer that it does not wrap, one that has `_is_accelerate_prepared = True`. It
        waits for nothing without a scaler.
        """
        return self._scaled and self.last_step_skipped

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer itself, for accelerate, which looks for what it believes to have wrapped.

        It exists only where `_is_accelerate_prepared` is set: other libraries unwrap for as long as there is an
        `optimizer`.
        """
        if not vars(self).get("_is_accelerate_prepared", False):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'optimizer'")
        return self

    def step_scalars(self) -> StepScalars:
        """Return norm and skip flag of the last step, on the device, for logs that do not wait.

        The next step overwrites both; copy them on the current stream.
        """
        self.backend.mark("offload/scalars", Lane.COMPUTE).issue()
        scalars = self._memory.device_scalars
        return StepScalars(scalars.norm.data, scalars.skip.data)


OPTIONS = frozenset(inspect.signature(AdamW).parameters)
"""Names of all arguments of the optimizer."""


def _holders(groups: Groups | None, t: ParamRecord) -> int:
    """Count the tensors that always use the memory of a parameter's part here: itself, and what FSDP2 has."""
    return groups.holders(t.parameter) if t.sharded and groups is not None else 1


def _holders_of(groups: Groups | None, parameter: torch.nn.Parameter) -> int:
    """Count them for a parameter that the optimizer need not have."""
    return 1 if groups is None or local_of(parameter) is parameter else groups.holders(parameter)
