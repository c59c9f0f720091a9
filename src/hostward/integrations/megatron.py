"""Step the parameters of Megatron-Core by hostward where its flags ask for the hybrid optimizer.

    hostward.integrations.megatron.use()                     # the line to add, before get_megatron_optimizer
    optimizer = get_megatron_optimizer(config, model_chunks)

Flags keep their meaning: `optimizer_cpu_offload`, `optimizer_offload_fraction`, `overlap_cpu_optimizer_d2h_h2d`,
`pin_cpu_grads`, `pin_cpu_params`, `use_torch_optimizer_for_cpu_offload`, `clip_grad`. No file of Megatron is changed:
`use` replaces names that `megatron.core.optimizer` looks up when it makes an optimizer, and the bucket groups of
Megatron's data parallelism tell when gradients are reduced and when weights are about to be gathered.
"""

from __future__ import annotations

import importlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from hostward.core.inventory import MAIN_PARAM, MOMENTS
from hostward.distributed.flat_shards import FlatPart, FlatShards
from hostward.errors import CheckpointError, ConfigError, ModelError, OrderingError, UnknownNameError, needed_for
from hostward.integrations.megatron_activations import attach as attach
from hostward.model.parameter_names import DATA_PARALLEL
from hostward.optim.adamw import OPTIONS, AdamW
from hostward.optim.param_groups import HYPERPARAMETERS
from hostward.optim.state_dict import drops_masters

if TYPE_CHECKING:
    _Hybrid: Any = torch.optim.Optimizer
    _Chain: Any = object
else:
    with needed_for("hostward.integrations.megatron", "megatron"):
        from megatron.core.optimizer import ChainedOptimizer as _Chain
        from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer as _Hybrid

FROM_FLAGS: Mapping[str, str] = {
    "lr": "lr",
    "betas": "adam_beta1, adam_beta2",
    "eps": "adam_eps",
    "weight_decay": "weight_decay",
    "offload_fraction": "optimizer_offload_fraction",
    "max_grad_norm": "clip_grad",
    "overlap": "overlap_cpu_optimizer_d2h_h2d",
    "pin_gradients": "pin_cpu_grads",
    "pin_weights": "pin_cpu_params",
    "use_torch_optimizer": "use_torch_optimizer_for_cpu_offload",
}
"""Options of `hostward.AdamW` that flags of Megatron say, and which."""
FROM_MEGATRON = (
    "params", "module", "stages", "tied", "uncounted", "shards", "waits", "fence", "grad_dtype", "gradients", "plan",
    "state_dtypes",
)  # fmt: skip
"""Options of `hostward.AdamW` that follow from how Megatron keeps weights and gradients."""
REPLACED = (
    ("megatron.core.optimizer", "HybridDeviceOptimizer"),
    ("megatron.core.optimizer", "ChainedOptimizer"),
    ("megatron.core.optimizer", "_get_megatron_optimizer_based_on_param_groups"),
)
"""Names that `use` replaces."""
COPIED = ("megatron.core.optimizer.distrib_optimizer", "HybridDeviceOptimizer")
"""A name that is replaced while an optimizer is made: by it Megatron knows its own, those made before `use` as well."""
_OTHERS = "Muon, another emerging optimizer, or a layer-wise one"
REFUSED = {
    ("megatron.core.optimizer", "_get_megatron_emerging_optimizer"): _OTHERS,  # of newer versions
    ("megatron.core.optimizer.muon", "_get_param_groups"): _OTHERS,  # of 0.16
    ("megatron.core.optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer.__init__"): _OTHERS,
    ("megatron.core.models.mimo.optimizer", "get_mimo_optimizer"): "a MimoModel",
}
"""What makes optimizers that are not one AdamW over all weights, in the versions that have it, and for what."""
GROUPS = ("megatron.core.process_groups_config", "ProcessGroupCollection.setup_process_groups_for_optimizer")
"""A static method that gets the model chunks right before Megatron reads what only its wrapper of them has."""
CALLED = (
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup.start_param_sync"),
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup.start_grad_sync"),
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup.finish_grad_sync"),
    ("megatron.core.distributed", "DistributedDataParallel.zero_grad_buffer"),
    ("megatron.core.distributed", "DistributedDataParallel.scale_gradients"),
    ("megatron.core.optimizer.optimizer", "MegatronOptimizer.reload_model_params"),
    ("megatron.core.optimizer.optimizer", "MegatronOptimizer.step_with_ready_grads"),
    ("megatron.core.optimizer.optimizer", "MegatronOptimizer.prepare_grads"),
)
"""Methods by which Megatron tells what happens to weights and gradients; all have to be there."""
_KEYS = {"master_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Names of an entry of the state: Megatron's, and hostward's."""
_BY_PARAM = "_build_model_param_to_state_dict_param_map"
"""A method of Megatron's distributed optimizer that finds the tensors of a checkpoint, by parameter."""


@dataclass
class Settings:
    """Holds what `use` was called with, and what it replaced."""

    options: Mapping[str, Any] = field(default_factory=dict)
    clip: str = "hostward"
    early_gradients: bool = True
    originals: dict[tuple[str, str], Any] = field(default_factory=dict)


_SETTINGS = Settings()
"""Those of this process: Megatron makes its optimizers by names of modules, which are one for a process."""


def use(*, clip: str = "hostward", early_gradients: bool = True, **options: Any) -> None:
    """Let `get_megatron_optimizer` make hostward's step where `optimizer_cpu_offload` is set, from now on.

    Args:
        clip: "hostward": `clip_grad` is carried out within the step, by the norm over all optimizers of the chain.
            "megatron": by Megatron's own functions, before the step.
        early_gradients: offload gradients as soon as their bucket group is reduced, while backward goes on; needs
            `overlap_grad_reduce`, `overlap_cpu_optimizer_d2h_h2d` and clip="hostward", and neither a loss scaler nor
            `reduce_scatter_with_fp32_accumulation`. Otherwise they are offloaded at the step, with the same bits.
        options: of `hostward.AdamW`: streamed_fraction, step_early, staging_bytes, host_threads, backend. What flags of
            Megatron say is none of them. `step_early` needs what `early_gradients` does, and no loss per token.

    Raises:
        ConfigError: an option that a flag or Megatron itself says; a Megatron that lacks a name which is needed.
        UnknownNameError: no option of `hostward.AdamW`.
    """
    if clip not in ("hostward", "megatron"):
        raise ConfigError(f"clip={clip!r}", fix='clip="hostward" or clip="megatron"')
    for name in options:
        if name in FROM_FLAGS:
            raise ConfigError(f"{name} as an option of use()", fix=f"the flag of Megatron: {FROM_FLAGS[name]}")
        if name in FROM_MEGATRON:
            raise ConfigError(
                f"{name} as an option of use()",
                why="it follows from how Megatron keeps weights and gradients",
                fix=f"leave {name} out",
            )
        if name not in OPTIONS:
            known = sorted({"clip", "early_gradients", *OPTIONS} - FROM_FLAGS.keys() - set(FROM_MEGATRON))
            raise UnknownNameError(f"use() has no option {name!r}", fix=f"one of {', '.join(known)}")
    require_names()
    _SETTINGS.options, _SETTINGS.clip, _SETTINGS.early_gradients = options, clip, early_gradients
    for where, path in (*REPLACED, *REFUSED, GROUPS):
        if (found := _found(where, path)) is not None:
            found = staticmethod(found) if (where, path) == GROUPS else found
            _SETTINGS.originals.setdefault((where, path), found)
    make, theirs = _SETTINGS.originals[REPLACED[-1]], importlib.import_module(COPIED[0])

    def made(*args: Any, **kwargs: Any) -> Any:
        """Make a part of the chain, and note what it was made for."""
        given = inspect.signature(make).bind(*args, **kwargs).arguments
        require_supported(given["config"], given["model_chunks"])
        if not given["config"].optimizer_cpu_offload:
            leave(given["model_chunks"])
        hybrid = getattr(theirs, COPIED[1])
        setattr(theirs, COPIED[1], OffloadedHybrid)
        try:
            part = make(*args, **kwargs)
        finally:
            setattr(theirs, COPIED[1], hybrid)
        if isinstance(getattr(part, "optimizer", None), OffloadedHybrid):
            part.optimizer.owner, part.optimizer.chunks = part, list(given["model_chunks"])
            if hasattr(part, "model_param_group_index_map"):
                _sort_by_map(part)
            if part.init_state_fn is None:  # Megatron calls it when it loads, and has none for its hybrid optimizer
                part.init_state_fn = _state_is_there
        return part

    for (where, name), value in zip(REPLACED, (OffloadedHybrid, OffloadedChain, made), strict=True):
        _put(where, name, value)
    for (where, path), what in REFUSED.items():
        if (where, path) in _SETTINGS.originals:
            _put(where, path, _refusing(_SETTINGS.originals[where, path], what))
    if GROUPS in _SETTINGS.originals:
        _put(*GROUPS, staticmethod(_of_wrapped(_SETTINGS.originals[GROUPS])))


def stop_using() -> None:
    """Let `get_megatron_optimizer` make Megatron's own optimizers again.

    Those that were made go on stepping their model chunks, until another optimizer is made for these: names that make
    optimizers go on telling them.
    """
    for (where, path), value in _SETTINGS.originals.items():
        _put(where, path, value)
    for where, path in (REPLACED[-1], *REFUSED):
        if (where, path) in _SETTINGS.originals:
            _put(where, path, _leaving(_SETTINGS.originals[where, path]))


def _found(where: str, path: str) -> Any:
    """Return what a module of Megatron has by a dotted name; None: nothing, or this version has no such module."""
    try:
        found: Any = importlib.import_module(where)
    except ImportError:
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _put(where: str, path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(_found(where, owner) if owner else importlib.import_module(where), name, value)


def _refusing(make: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function that calls `make` unless the configuration that it gets asks for offloading."""

    @wraps(make)
    def called(*args: Any, **kwargs: Any) -> Any:
        config = inspect.signature(make).bind(*args, **kwargs).arguments["config"]
        if config.optimizer_cpu_offload:
            raise ConfigError(
                f"optimizer_cpu_offload with {what}",
                why="hostward's step is one AdamW over all weights, with one norm",
                fix='optimizer="adam" for a model with one optimizer, or leave optimizer_cpu_offload out',
            )
        return leaving(*args, **kwargs)

    leaving = _leaving(make)
    return called


def _of_wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `make` with model chunks that Megatron's data parallelism wraps."""

    @wraps(make)
    def called(*args: Any, **kwargs: Any) -> Any:
        require_wrapped(inspect.signature(make).bind(*args, **kwargs).arguments["model_chunks"][:1], "ddp_config")
        return make(*args, **kwargs)

    return called


def _leaving(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `make`, when hostward's optimizers have left the model chunks that it gets."""

    @wraps(make)
    def called(*args: Any, **kwargs: Any) -> Any:
        leave(inspect.signature(make).bind(*args, **kwargs).arguments.get("model_chunks", ()))
        return make(*args, **kwargs)

    return called


def require_names() -> None:
    """Raise ConfigError unless Megatron has all names that `use` needs."""
    version = getattr(importlib.import_module("megatron.core"), "__version__", "of an unknown version")
    for where, path in (*REPLACED, COPIED, *CALLED):
        if _found(where, path) is None:
            raise ConfigError(
                f"megatron-core {version} has no {where}.{path}",
                why="it reports what happens to weights and gradients",
                fix="use megatron-core 0.16 to 0.19, or report this version",
            )


def require_wrapped(chunks: Sequence[Any], attribute: str) -> None:
    """Raise ConfigError for a model chunk that lacks an attribute of Megatron's DistributedDataParallel."""
    for chunk in chunks:
        if not hasattr(chunk, attribute):
            raise ConfigError(
                f"{type(chunk).__name__}, a model chunk that is not wrapped in Megatron's DistributedDataParallel",
                why="the wrapper tells how gradients are reduced, in which buckets, and when",
                fix="megatron.core.distributed.DistributedDataParallel(config, ddp_config, model), on one GPU too",
            )


def require_supported(config: Any, chunks: Sequence[Any]) -> None:
    """Raise ConfigError for what Megatron's flags ask and the step cannot do."""
    if not config.optimizer_cpu_offload:
        return
    ddp = chunks[0].ddp_config

    def refuse(what: str, why: str, fix: str) -> None:
        raise ConfigError(f"{what} with hostward's step", why=why, fix=fix)

    if config.optimizer != "adam":
        refuse(f"optimizer={config.optimizer!r}", "it is AdamW", 'optimizer="adam", or leave optimizer_cpu_offload out')
    if getattr(ddp, "use_megatron_fsdp", False):
        refuse("Megatron-FSDP", "it moves weights and gradients itself", "PyTorch's fully_shard, or data_parallel")
    require_wrapped(chunks, "bucket_groups")
    if getattr(chunks[0].config, "qk_clip", False):
        refuse("qk_clip", "it writes main weights in a way that cannot be noticed", "leave qk_clip out")
    for flag in ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "fp8_param", "fp4_param"):
        if any(getattr(each, flag, False) for each in (ddp, config, chunks[0].config)):
            refuse(flag, "the step writes fp32, bf16 and fp16 weights", f"leave {flag} out")
    if getattr(config, "fp8_recipe", None) and getattr(config, "fp8", None):
        refuse("fp8", "the step writes fp32, bf16 and fp16 weights", "leave fp8 out")
    if getattr(config, "optimizer_cuda_graph", False):
        refuse("optimizer_cuda_graph", "the CPU's part of the step is not in a graph", "leave optimizer_cuda_graph out")
    if getattr(ddp, "num_distributed_optimizer_instances", 1) > 1:
        refuse("num_distributed_optimizer_instances > 1", "each instance has the same shards", "one instance")
    for role, dtype in _state_dtypes(config).items():
        if dtype not in (torch.float32, torch.bfloat16):
            flag = "main_params_dtype" if role == MAIN_PARAM else f"{role}_dtype"
            refuse(f"{flag}={dtype}", "state is fp32 or bf16", f"{flag}=torch.bfloat16")
    if config.clip_grad and config.clip_grad < 0:
        refuse(f"clip_grad={config.clip_grad}", "a limit is positive", "clip_grad=0: no clipping")
    for flag in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(chunks[0].config, flag, 1) > 1:
            refuse(f"{flag} > 1", "gradients and norms are of other processes, too", "tensor_model_parallel_size")
    if _SETTINGS.clip == "hostward":
        by_megatron = 'use(clip="megatron")'
        if getattr(config, "grad_norm_skip_threshold", math.inf) < math.inf:
            refuse("grad_norm_skip_threshold", "norm and clipping are part of the step", by_megatron)
        if any(getattr(p, "grad_norm_group", None) for chunk in chunks for p in chunk.parameters()):
            refuse("grad_norm_group, as of multi-token prediction,", "there is one norm of all gradients", by_megatron)


def _state_dtypes(config: Any) -> dict[str, torch.dtype]:
    """Return the dtypes of moments and main weights that Megatron's options ask for."""
    flags = {**{role: f"{role}_dtype" for role in MOMENTS}, MAIN_PARAM: "main_params_dtype"}
    return {name: getattr(config, flag, torch.float32) for name, flag in flags.items()}


def _as_stored(value: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Return a value on the host in the dtype in which it is stored, or in fp32 where that would lose bits."""
    exact = value.detach().to("cpu", torch.float32)
    rounded = exact.to(stored)
    return rounded if torch.equal(rounded.float().view(torch.int32), exact.view(torch.int32)) else exact


def _state_is_there(*_: Any) -> None:
    """Make no state."""


class OffloadedHybrid(_Hybrid):  # type: ignore[misc]
    """Stands where Megatron makes its HybridDeviceOptimizer: one part of a chain, stepped by `Offloading`.

    It keeps Megatron's parameter groups, whose tensors are the weights or shards of them. Its state is read and written
    by Megatron entry by entry; nothing is kept here.
    """

    owner: Any = None
    """The MegatronOptimizer that has it; None for the first of two that a DistributedOptimizer makes."""

    def __init__(self, params: Any, offload_fraction: float = 0.5, **kwargs: Any) -> None:
        self.chunks: list[Any] = []
        self.offloading: Offloading | None = None
        defaults = {"offload_fraction": offload_fraction, **kwargs}
        # Not that of Megatron's class, which copies every weight.
        torch.optim.Optimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with hyper-parameters and without flags: those would become part of checkpoints.

        torch's own refuses shards of fp32 weights, which are views and no leaves.
        """
        group = dict(param_group)
        held = group["params"]
        group["params"] = [held] if isinstance(held, torch.Tensor) else list(held)
        for key in HYPERPARAMETERS:
            group.setdefault(key, self.defaults[key])
        for key in self.defaults.keys() - set(HYPERPARAMETERS):
            group.pop(key, None)
        self.param_groups.append(group)

    @property
    def shared(self) -> Offloading:
        """Return what steps this part; made at the first use, when Megatron has replaced weights by their shards."""
        if self.offloading is None:
            self.offloading = Offloading([self])
        return self.offloading

    # What Megatron calls.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step all parts of the chain, with the first part that is stepped."""
        if closure is not None:
            raise ConfigError("a closure for Megatron's optimizer", fix="run forward and backward before step()")
        self.shared.step_part(self)

    @property
    def state(self) -> MutableMapping[Any, Any]:
        return _State(self)

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore what torch sets when it is made; there is no state here."""

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer whose state has the step count, which is read where Transformer Engine is installed."""
        dummy = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))])
        count = self.shared.count(self)
        dummy.state[dummy.param_groups[0]["params"][0]] = {"step": torch.tensor(float(count))}
        return [dummy]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of Megatron's tensors; with `set_to_none=False` in the buffers that they are views of."""
        if not set_to_none:
            self.shared.before_zeroing()
        super().zero_grad(set_to_none)

    def dummy_step(self) -> None:
        """Do nothing: the state is there."""

    def update_fp32_param_by_new_param(self) -> None:
        """Take fp32 main weights anew from the weights."""
        self.shared.take_anew(self)

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        self.shared.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state by number, as torch's.

        A DistributedOptimizer reads only step counts of it; others get the whole state.
        """
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups]
        step = {"step": torch.tensor(float(self.shared.count(self)))}
        entries = {id(p): step for group in self.param_groups for p in group["params"]}
        if not hasattr(self.owner, "model_param_group_index_map"):
            entries = {key: {**self.shared.read(key), **step} for key in entries}
        return {"state": {numbers[key]: entry for key, entry in entries.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or what Megatron's own optimizers saved.

        Raises:
            CheckpointError: its groups are not of as many tensors as those here.
        """
        saved = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"a state with groups of {sizes[0]} tensors for an optimizer with groups of {sizes[1]}",
                why="learning rates and weight decay would be those of other weights; megatron-core 0.16 gives all "
                "groups that differ by decoupled_lr alone the tensors and the rate of one",
                fix="the options of the run that saved; with decoupled_lr megatron-core 0.19",
            )
        flags = self.defaults.keys() - set(HYPERPARAMETERS)
        steps = {int(g["step"]) for g in saved if g.get("step") is not None}
        for mine, theirs in zip(self.param_groups, saved, strict=True):
            mine.update({k: v for k, v in theirs.items() if k not in ("params", "step") and k not in flags})
        held = [p for group in self.param_groups for p in group["params"]]
        for number, p in enumerate(held):
            entry = dict(state_dict["state"].get(number, {}))
            step = entry.pop("step", None)
            if step is None and len(steps) == 1:
                step = next(iter(steps))
            self.shared.write(id(p), {**entry, **({} if step is None else {"step": step})})
        self.shared.flush()


class _State(MutableMapping[Any, Any]):
    """What Megatron reads and writes as `optimizer.state`: an entry for each tensor of the groups."""

    def __init__(self, part: OffloadedHybrid) -> None:
        self._part = part

    def __iter__(self) -> Iterator[Any]:
        return iter([p for group in self._part.param_groups for p in group["params"]])

    def __len__(self) -> int:
        return sum(len(group["params"]) for group in self._part.param_groups)

    def __getitem__(self, p: Any) -> _Entry:
        return self._part.shared.entry(id(p))

    def __setitem__(self, p: Any, values: Mapping[str, Any]) -> None:
        self._part.shared.write(id(p), values)

    def __delitem__(self, p: Any) -> None:
        raise ModelError("a part of Megatron's optimizer state deleted", fix="make a new optimizer")

    def __contains__(self, p: object) -> bool:
        return any(p is held for held in self)


class _Entry(dict[str, Any]):
    """The state of one tensor: reads are copies, an assignment is written to the optimizer."""

    def __init__(self, offloading: Offloading, key: int, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._offloading, self._key = offloading, key

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._offloading.write(self._key, {name: value})


def _refuse_to_clip(*_: Any, **__: Any) -> Any:
    """Raise OrderingError: who steps a part alone, or clips before the step, changes gradients that have left."""
    raise OrderingError(
        "clip_grad_norm() before hostward's step",
        why="gradients are offloaded in backward, and norm and clipping are part of the step",
        fix='set clip_grad and step the ChainedOptimizer that get_megatron_optimizer returned, or use(clip="megatron")',
    )


def _refuse_legacy(*_: Any, **__: Any) -> None:
    """Raise ModelError: Megatron writes this format through `.data` of what it reads as state, which are copies."""
    raise ModelError(
        "load_parameter_state(update_legacy_format=True) with hostward's step",
        why="checkpoints of before February 2024 are written to state in a way that cannot be noticed",
        fix="load and save it once with optimizer_cpu_offload=False, and then the new one",
    )


class OffloadedChain(_Chain):  # type: ignore[misc]
    """Stands where Megatron makes its ChainedOptimizer: all parts that are offloaded are stepped together."""

    def __init__(self, chained_optimizers: list[Any]) -> None:
        super().__init__(chained_optimizers)
        parts = [getattr(each, "optimizer", None) for each in chained_optimizers]
        found = [part for part in parts if isinstance(part, OffloadedHybrid)]
        self.offloading = Offloading(found) if found else None
        if self.offloading is not None and self.offloading.early:
            self.clip_grad_norm = _refuse_to_clip

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Step once. Returns whether it was made, the norm before clipping, and the zeros in gradients if logged."""
        offloading = self.offloading
        if offloading is None or not offloading.clips:
            return super().step()  # type: ignore[no-any-return]
        self.grad_norms_by_group: dict[str, float] = {}  # newer versions have it after each step; there is one norm
        if self.prepare_grads():
            return False, None, None
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        updated = self.step_with_ready_grads()
        return updated, offloading.optimizer.grad_norm, zeros

    def get_grad_norm(self) -> Any:
        """Return the norm of all gradients, by Megatron; a factor that is applied within the step is part of it."""
        norm = super().get_grad_norm()
        return norm if self.offloading is None else norm * self.offloading.factor_to_come()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step all parts, whose gradients are all there. Returns whether the step was made."""
        if self.offloading is None:
            return bool(super().step_with_ready_grads())
        with self.offloading.together():
            stepped = super().step_with_ready_grads()
        return bool(stepped) and not self.offloading.optimizer.last_step_skipped


@dataclass(frozen=True, slots=True)
class _Shard:
    """One tensor that Megatron steps, and what it is to hostward."""

    name: str
    tensor: torch.Tensor
    """The tensor in Megatron's parameter groups: a weight, a shard of one, or an fp32 copy of either."""
    weight: torch.nn.Parameter
    """The same memory as a leaf, for `hostward.AdamW`."""
    model_param: torch.nn.Parameter
    part: OffloadedHybrid
    start: int
    stop: int
    """Its elements of the flat `model_param`."""
    changed_later: bool
    """`finalize_model_grads` adds to its gradient after the bucket group is reduced."""


class Offloading:
    """One `hostward.AdamW` over all offloaded parts of a chain, and its place in Megatron's training step.

    `optimizer` is made at the first use: by then Megatron has put shards in the place of weights.
    """

    live: ClassVar[weakref.WeakSet[Offloading]] = weakref.WeakSet()

    def __init__(self, parts: Sequence[OffloadedHybrid]) -> None:
        self._parts = list(parts)
        for part in parts:
            part.offloading = self
        self._settings = Settings(dict(_SETTINGS.options), _SETTINGS.clip, _SETTINGS.early_gradients)
        self._made: AdamW | None = None
        self._shards: dict[int, _Shard] = {}
        self._names_of: dict[int, str] = {}
        """Names by the id of the model's parameter."""
        self._of_param: dict[int, list[_Shard]] = {}
        """Shards by the id of the model's parameter."""
        self._written: dict[int, dict[str, Any]] = {}
        """State that was assigned and is not written to the optimizer yet."""
        self._read: list[tuple[int, dict[str, torch.Tensor], dict[str, int]]] = []
        """Entries that were handed out, with the versions of their tensors: Megatron copies into some of them."""
        self._versions: dict[int, int] = {}
        self._left_to_step: set[int] = set()
        self._read_by_step = False
        """True if a step has been made with gradients that nobody has cleared since."""
        self._together = False
        self._scale: dict[int, list[Any]] = {}
        """Factors by which Megatron scales gradients before the step, where they leave early, by model chunk."""
        held = (p.device for chunk in self.chunks for p in chunk.parameters())
        self._device = next(held, torch.device("cpu"))
        self._nothing: torch.nn.Parameter | None = None
        """What a rank steps that has nothing to step."""
        self._collectives = _SideStream(self._device)
        self._clearing = _Clearing(self._device)
        self._grad_dtype = self._gradient_dtype()
        self._changes = _Changes(self._clearing)
        # A program that drops the optimizer and keeps the model gets its memory back: nothing of a chunk keeps this.
        self._leave = weakref.finalize(self, self._changes.undo)
        self._leave.atexit = False
        self._require_early()
        leave(self.chunks)
        self.live.add(self)
        for chunk in self.chunks:
            self._follow(chunk)
        for part in parts:
            if part.owner is not None:
                self._follow_zeroing(part.owner)
                self._follow_loads(part)
        self._name_parameters()
        self._cut = self._flat_shards()

    # ---------------------------------------------------------------- facts

    @property
    def config(self) -> Any:
        return self._parts[0].owner.config

    @property
    def chunks(self) -> list[Any]:
        return list({id(chunk): chunk for part in self._parts for chunk in part.chunks}.values())

    @property
    def clips(self) -> bool:
        """Return whether norm and clipping are part of the step."""
        return self._settings.clip == "hostward"

    @property
    def early(self) -> bool:
        """Return whether gradients are offloaded when their bucket group is reduced."""
        return not self._late

    @property
    def _late(self) -> list[str]:
        """Name what lets gradients leave at the step alone, as flags and options of `use`."""
        flags = self.chunks[0].ddp_config
        # Its handle adds up whenever it is waited for, in memory that is the current stream's alone.
        in_fp32 = "reduce_scatter_with_fp32_accumulation"
        found = {
            "early_gradients=False": not self._settings.early_gradients,
            'clip="megatron"': not self.clips,
            "overlap_grad_reduce=False": not flags.overlap_grad_reduce,
            "overlap_cpu_optimizer_d2h_h2d=False": not self._parts[0].defaults.get(FROM_FLAGS["overlap"], True),
            "use_torch_optimizer_for_cpu_offload": self.config.use_torch_optimizer_for_cpu_offload,
            "a loss scaler": any(getattr(part.owner, "grad_scaler", None) is not None for part in self._parts),
            in_fp32: getattr(flags, in_fp32, False),
        }
        return [name for name, holds in found.items() if holds]

    @property
    def overlaps(self) -> bool:
        """Return whether anything of the step runs beside backward and forward."""
        asked = bool(self._parts[0].defaults.get(FROM_FLAGS["overlap"], True))
        return asked and not self.config.use_torch_optimizer_for_cpu_offload  # torch's steps within `step` alone

    @property
    def optimizer(self) -> AdamW:
        """Return the optimizer that makes the step; its `plan` says where each bucket's state is."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @cached_property
    def steps_weights(self) -> bool:
        """Return whether it steps what is gathered, and not fp32 copies or weights that forward reads at once."""
        config = self.config
        return bool(config.use_distributed_optimizer and config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)

    # ---------------------------------------------------------------- construction

    def _require_early(self) -> None:
        """Raise ConfigError where `step_early` could step nothing during backward."""
        if not self._settings.options.get("step_early"):
            return
        late = self._late
        per_token = any(getattr(chunk.config, "calculate_per_token_loss", False) for chunk in self.chunks)
        if late or per_token:
            why = "gradients leave at the step" if late else "gradients are divided by the number of tokens"
            found = [*late, *(["calculate_per_token_loss"] if per_token else [])]
            raise ConfigError(
                f"use(step_early=...) with {', '.join(found)}: nothing could be stepped during backward",
                why=f"{why}, and the CPU steps with what it has before, as it is",
                fix=f"leave out step_early, or {', '.join(found)}",
            )

    def _make(self) -> AdamW:
        groups, defaults = [], self._parts[0].defaults
        used = {name: place for place, name in enumerate(self._names_of.values())}
        for part in self._parts:
            whole = _whole_of(part)
            for group in part.param_groups:
                named = []
                for tensor in group["params"]:
                    model_param, start, stop = whole[id(tensor)]
                    name = self._names_of[id(model_param)]
                    weight = torch.nn.Parameter(tensor.detach())
                    late = _changed_later(name, model_param, self.chunks[0])
                    shard = _Shard(name, tensor, weight, model_param, part, start, stop, late)
                    self._shards[id(tensor)] = shard
                    self._of_param.setdefault(id(model_param), []).append(shard)
                    named.append((name, weight))
                named.sort(key=lambda each: used[each[0]])  # a distributed optimizer has them in backward's order
                if named:
                    groups.append({"params": named, **{key: group[key] for key in HYPERPARAMETERS}})
        if not groups:  # of frozen layers, or of a shard that is padding: norms and clipping are with the other ranks
            self._nothing = torch.nn.Parameter(torch.zeros(1, device=self._device))
            groups.append({"params": [("nothing", self._nothing)], "weight_decay": 0.0})
        stages, uncounted = self._counting()
        made = AdamW(
            groups,
            offload_fraction=defaults["offload_fraction"],
            overlap=self.overlaps,
            pin_gradients=bool(defaults.get("pin_cpu_grads", True)),
            pin_weights=bool(defaults.get("pin_cpu_params", True)),
            use_torch_optimizer=bool(self.config.use_torch_optimizer_for_cpu_offload),
            max_grad_norm=self.config.clip_grad if self.clips else None,
            grad_dtype=self._grad_dtype,
            state_dtypes=_state_dtypes(self.config),
            stages=stages,
            uncounted=uncounted,
            shards=self._cut,
            waits="manual",
            **self._settings.options,
        )
        self._changes.made = made
        self._remember()
        return made

    def _name_parameters(self) -> None:
        chunks = self.chunks
        for number, chunk in enumerate(chunks):
            before = f"chunk{number}." if len(chunks) > 1 else ""
            for name, p in chunk.named_parameters():
                while name.startswith(DATA_PARALLEL):
                    name = name.removeprefix(DATA_PARALLEL)
                self._names_of.setdefault(id(p), before + name)

    def _flat_shards(self) -> list[FlatShards]:
        """Tell the other processes how distributed optimizers have cut weights, and be told, where the norm is ours.

        All processes make their chains at the same place. At the first use, in backward, those of other stages of a
        pipeline would still wait for activations.
        """
        if not self.clips or not dist.is_initialized():
            return []
        found = []
        for part in self._parts:
            if hasattr(part.owner, "model_param_group_index_map"):
                named = ((self._names_of[id(p)], p, start, stop) for p, start, stop in _whole_of(part).values())
                parts = {name: FlatPart(name, start, stop, p.numel()) for name, p, start, stop in named}
                found.append(FlatShards(parts, part.owner.data_parallel_group))
        return found

    def _gradient_dtype(self) -> torch.dtype | None:
        """Return the dtype of gradients where it is not that of the weights. Raises ConfigError for several."""
        if not self.steps_weights:
            return None  # fp32 copies have fp32 gradients
        stepped = [p for part in self._parts for p, _, _ in _whole_of(part).values()]
        pairs = {(p.main_grad.dtype, p.dtype) for p in stepped}  # type: ignore[attr-defined]
        if all(gradient is weight for gradient, weight in pairs):
            return None
        dtypes = {gradient for gradient, _ in pairs}
        if len(dtypes) > 1:
            raise ConfigError(
                f"gradients in {len(dtypes)} dtypes",
                why="those of 16-bit weights are added up in one, or in that of each weight",
                fix="DistributedDataParallelConfig(grad_reduce_in_fp32=True)",
            )
        dtype: torch.dtype = dtypes.pop()
        return dtype

    def _counting(self) -> tuple[dist.ProcessGroup | None, list[str]]:
        """Return the processes over which the norm is, and the names that others of them count."""
        if not self.clips or not dist.is_initialized():
            return None, []
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
        from megatron.core.transformer.module import param_is_not_shared

        owners = [part.owner for part in self._parts]
        groups = [owner.get_grad_stats_parallel_group() for owner in owners]
        together = all(group is groups[0] for group in groups)
        uncounted = []
        for shard in self._shards.values():
            owner = shard.part.owner
            counts = param_is_not_shared(shard.tensor)
            # Experts may have a group of their own; megatron-core 0.16 has no name for it.
            of_tensor = {name: getattr(owner, name) for name in ("tp_group", "expert_tp_group") if hasattr(owner, name)}
            counts = counts and param_is_not_tensor_parallel_duplicate(shard.tensor, **of_tensor)
            if not together:  # without a distributed optimizer experts have other replicas than the rest
                chunk = next(c for c in shard.part.chunks if any(p is shard.model_param for p in c.parameters()))
                expert = not getattr(shard.model_param, "allreduce", True)
                counts = counts and (chunk.expt_dp_group if expert else chunk.dp_cp_group).rank() == 0
            if not counts:
                uncounted.append(shard.name)
        return (groups[0] if together else dist.group.WORLD), uncounted

    # ---------------------------------------------------------------- gradients and weights of model chunks

    def _follow(self, chunk: Any) -> None:
        """Be told by a model chunk when gradients are cleared or scaled, and by its bucket groups of the rest."""
        forget, wait_for_readers = _weakly(self._before_clearing), _weakly(self._wait_for_readers)
        if self.early and not _captures(chunk.config):
            self._before(chunk, "zero_grad_buffer", forget)
            clear, clearing = _weakly(self._clear), self._clearing
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                self._changes.replace(buffer, "reset", partial(clear, buffer, buffer.reset))
            innermost = chunk
            while isinstance(getattr(innermost, "module", None), torch.nn.Module):
                innermost = innermost.module
            self._changes.hooks.append(innermost.register_forward_hook(lambda *_: clearing.finish()))
        else:
            self._before(chunk, "zero_grad_buffer", forget, wait_for_readers)
        if hasattr(chunk, "offload_grad_buffers"):
            self._before(chunk, "offload_grad_buffers", forget, wait_for_readers)
        scaled = partial(_weakly(self._scale_gradients), chunk, chunk.scale_gradients)
        self._changes.replace(chunk, "scale_gradients", scaled)
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            held = [p for bucket in group.buckets for p in bucket.params_list]
            if self.config.use_distributed_optimizer:
                self._follow_gather(group, held)
            if self.early:
                self._follow_reduction(group, held)

    def _scale_gradients(self, chunk: Any, scale: Callable[[Any], None], scaling_factor: Any) -> None:
        """Scale the gradients of a chunk; within the step, if gradients leave early.

        Also where none has left: the norm is that of all ranks, which have to scale theirs at the same place.
        """
        if self.early:
            self._scale.setdefault(id(chunk), []).append(scaling_factor)
        else:
            self._clearing.finish()
            scale(scaling_factor)

    def _follow_gather(self, group: Any, held: Sequence[Any]) -> None:
        """Gather new weights of a bucket group when they are there; forward goes on with the group before it."""
        start, finish = group.start_param_sync, group.finish_param_sync
        wait_for, collectives = _weakly(self._wait_for), self._collectives
        beside = False

        def started(force_sync: bool = False) -> Any:
            nonlocal beside
            beside = bool(group.ddp_config.overlap_param_gather and not force_sync)
            if not beside:
                wait_for(held)
                return start(force_sync=force_sync)
            with collectives.beside():
                wait_for(held)
                return start()

        def finished(*args: Any, **kwargs: Any) -> Any:
            nonlocal beside
            found = finish(*args, **kwargs)
            if beside:  # what the stream of forward has waited for is known from here on
                beside = False
                wait_for(held)
            return found

        self._changes.replace(group, "start_param_sync", started)
        self._changes.replace(group, "finish_param_sync", finished)

    def _follow_reduction(self, group: Any, held: Sequence[Any]) -> None:
        """Take the gradients of a bucket group when they are reduced, behind the collective on a stream of its own."""
        start, finish = group.start_grad_sync, group.finish_grad_sync
        take, clearing, collectives = _weakly(self._take), self._clearing, self._collectives
        # Those that are accumulated in fp32 beside the buffer have what was reduced when `finish` returns.
        reduced = [p for p in held if getattr(p, "main_grad_copy_in_grad_buffer", None) is None]

        def started(*args: Any, **kwargs: Any) -> Any:
            clearing.finish()
            found = start(*args, **kwargs)
            handle = group.grad_reduce_handle
            if handle is not None:
                with collectives.beside():
                    handle.wait()
                    take(reduced)
            return found

        def finished(*args: Any, **kwargs: Any) -> Any:
            clearing.finish()
            found = finish(*args, **kwargs)
            take(held)
            return found

        self._changes.replace(group, "start_grad_sync", started)
        self._changes.replace(group, "finish_grad_sync", finished)

    def _before(self, owner: Any, name: str, *told: Callable[[], None]) -> None:
        """Call functions before a method of one object."""
        method = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            for each in told:
                each()
            return method(*args, **kwargs)

        self._changes.replace(owner, name, called)

    def _of(self, model_params: Sequence[Any]) -> list[_Shard]:
        return [shard for p in model_params for shard in self._of_param.get(id(p), ())]

    def _wait_for(self, model_params: Sequence[Any]) -> None:
        """Wait for the new values of weights that are about to be gathered."""
        if self._made is not None:
            self._made.wait_for_weights([shard.name for shard in self._of(model_params)])

    @torch.no_grad()
    def _take(self, model_params: Sequence[Any]) -> None:
        """Take the gradients of a bucket group that is reduced, but for those that Megatron changes afterwards."""
        optimizer = self.optimizer
        taken = optimizer.gradients_taken
        for shard in self._of(model_params):
            if shard.name not in taken and not shard.changed_later:
                self._require_cleared()
                gradient = shard.model_param.main_grad.view(-1)[shard.start : shard.stop]  # type: ignore[attr-defined]
                optimizer.take_gradient(shard.name, self._for_step(shard, gradient), borrowed=True)

    def _for_step(self, shard: _Shard, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient in the dtype in which Megatron hands it to its optimizer."""
        return gradient if self.steps_weights else gradient.to(shard.weight.dtype)

    def _before_clearing(self) -> None:
        """Forget gradients that are about to be cleared, where no step has been made with them."""
        self._read_by_step = False
        self._forget()

    def _forget(self) -> None:
        """Forget gradients with which no step has been made, and the factor that was to come."""
        self._scale.clear()
        if self._made is not None and self._made.gradients_taken:
            self._made.discard_gradients()

    def _follow_zeroing(self, owner: Any) -> None:
        """Be told when a part of the chain writes zeros where its gradients are: in the buffers of model chunks."""
        zero = owner.zero_grad

        def zeroed(set_to_none: bool = True) -> None:
            if not set_to_none:
                self.before_zeroing()
            zero(set_to_none)

        owner.zero_grad = zeroed

    def before_zeroing(self) -> None:
        """Wait until gradients have been read that Megatron writes zeros to; it writes those of this rank's shards."""
        self._forget()
        self._wait_for_readers()

    def _require_cleared(self) -> None:
        """Raise OrderingError where gradients are taken that the last step was made with, or that add to those."""
        if self._read_by_step:
            raise OrderingError(
                "gradients are taken for a step of Megatron's optimizer, but those of the last step were not cleared",
                why="the last step may still read them, and they would be stepped with twice",
                fix="one step() for each backward, and zero_grad_buffer() of every model chunk before the next forward",
            )

    def _wait_for_readers(self) -> None:
        """Wait until gradients have been read that are about to be cleared."""
        self._clearing.finish()
        if self._made is not None:
            self._made.wait_for_gradients()

    def wait_until_cleared(self) -> None:
        """Make the current stream wait until gradient buffers are cleared, for who writes gradients before forward.

        Raises:
            OrderingError: gradients have been written before.
        """
        self._clearing.finish()

    def _clear(self, buffer: Any, reset: Callable[[], None]) -> None:
        """Clear a gradient buffer when it has been read; forward does not use it, and goes on."""

        def clear() -> None:
            if self._made is not None:
                self._made.wait_for_gradients()
            reset()

        self._clearing.clear(buffer.grad_data, clear)

    # ---------------------------------------------------------------- the step

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context in which Megatron steps one part after the other; it has prepared all their gradients."""
        self._left_to_step.clear()  # of a step that was interrupted
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def step_part(self, part: OffloadedHybrid) -> None:
        """Step everything with the first part that Megatron steps; the others have been stepped then."""
        if id(part) in self._left_to_step:
            self._left_to_step.discard(id(part))
            return
        if not self._leave.alive:
            raise OrderingError(
                "a step of an optimizer of Megatron whose model chunks have another one by now",
                why="only the last one that get_megatron_optimizer made for them gets their gradients",
                fix="step that one",
            )
        if len(self._parts) > 1 and not self._together:
            raise OrderingError(
                "a part of Megatron's optimizer is stepped alone",
                why="hostward steps all parts of a chain together, and the other gradients may not be there",
                fix="step the ChainedOptimizer that get_megatron_optimizer returned",
            )
        self.flush()
        self._step()
        self._left_to_step = {id(each) for each in self._parts if each is not part}

    def _step(self) -> None:
        self._clearing.finish()
        optimizer = self.optimizer
        if any(shard.tensor.data_ptr() != shard.weight.data_ptr() for shard in self._shards.values()):
            raise ModelError(
                "a weight of Megatron's optimizer has been moved",
                why="it is stepped where it was when the optimizer was made, and Megatron would copy from elsewhere",
                fix="leave out offload_to_cpu() and restore_from_cpu(), and raise optimizer_offload_fraction",
            )
        theirs = [group for part in self._parts for group in part.param_groups if group["params"]]
        for mine, group in zip(optimizer.param_groups, theirs, strict=self._nothing is None):
            mine.update({key: group[key] for key in HYPERPARAMETERS})
        if self._nothing is not None:
            self._nothing.grad = torch.zeros_like(self._nothing)
        taken = optimizer.gradients_taken
        for shard in self._shards.values():
            if shard.name in taken:
                continue
            gradient = getattr(shard.tensor, "decoupled_grad", None)
            gradient = shard.tensor.grad if gradient is None else gradient
            if gradient is None:
                continue
            if self.overlaps:
                self._require_cleared()
                optimizer.take_gradient(shard.name, gradient.view(-1), borrowed=True)
            else:
                shard.weight.grad = gradient.view_as(shard.weight)
        if self.clips:
            optimizer.max_grad_norm = float(self.config.clip_grad or 0.0)  # Megatron reads it at each step, too
        optimizer.step(gradient_scale=self._gradient_scale())
        self._scale.clear()
        self._read_by_step = self.overlaps
        if not self.steps_weights:
            optimizer.wait_for_weights()
        for shard in self._shards.values():
            shard.weight.grad = None
        self._remember()

    def factor_to_come(self) -> float:
        """Return the factor of gradients that are not scaled until the step. It waits for it."""
        return float(math.prod(next(iter(self._scale.values()), ())))

    def _gradient_scale(self) -> torch.Tensor | None:
        """Return the factor that Megatron has for gradients, which leave before it is known."""
        if not self._scale:
            return None
        first, *others = self._scale.values()
        if len(self._scale) < len(self.chunks) or not all(_are_same(first, each) for each in others):
            raise OrderingError(
                "gradients of some model chunks were scaled, and those of others not, or by another number",
                why="they are scaled within one step, because they are offloaded earlier",
                fix="scale those of all chunks by one number, or use(early_gradients=False)",
            )
        return torch.as_tensor(math.prod(first), dtype=torch.float32, device=self._device).reshape(1)

    # ---------------------------------------------------------------- state

    def count(self, part: OffloadedHybrid) -> int:
        """Return the number of steps of a part's parameters."""
        self.flush()
        names = [shard.name for shard in self._shards_of(part)][:1]
        return int(self.optimizer.step_count(names[0])) if names else 0

    def _shards_of(self, part: OffloadedHybrid) -> list[_Shard]:
        _ = self.optimizer
        return [shard for shard in self._shards.values() if shard.part is part]

    def read(self, key: int) -> dict[str, torch.Tensor]:
        """Return a copy of the state of one of Megatron's tensors, by Megatron's names."""
        optimizer = self.optimizer
        shard = self._shards[key]
        entry = optimizer.state_of(shard.name)
        if self.steps_weights:
            entry.setdefault("master", shard.tensor.detach().to("cpu", torch.float32, copy=True))
        return {theirs: entry[mine] for theirs, mine in _KEYS.items() if mine in entry}

    def entry(self, key: int) -> _Entry:
        """Return the state of one of Megatron's tensors, to be read, assigned to or copied into."""
        self.flush(but_read=True)
        values = self.read(key)
        if not self.steps_weights:
            self._read.append((key, dict(values), {name: value._version for name, value in values.items()}))
        return _Entry(self, key, values)

    def write(self, key: int, values: Mapping[str, Any]) -> None:
        """Note new values of an entry; `flush` writes them."""
        known = {mine: values[theirs] for theirs, mine in _KEYS.items() if theirs in values}
        if "step" in values:
            known["step"] = int(values["step"])
        self._written.setdefault(key, {}).update(known)

    @torch.no_grad()
    def flush(self, *, but_read: bool = False) -> None:
        """Write to the optimizer what Megatron has assigned to entries, or copied into them and into weights."""
        optimizer = self.optimizer
        if not but_read:
            for key, values, versions in self._read:
                copied = {name: value for name, value in values.items() if value._version != versions[name]}
                self.write(key, copied)
            self._read.clear()
        written, self._written = self._written, {}
        for key, values in written.items():
            self._write(self._shards[key], values)
        changed = [s for k, s in self._shards.items() if self._versions and s.tensor._version != self._versions.get(k)]
        if changed and not self.steps_weights:
            optimizer.reseed([shard.name for shard in changed])
            self._remember()

    def _write(self, shard: _Shard, values: Mapping[str, Any]) -> None:
        optimizer = self.optimizer
        stored = _state_dtypes(self.config)
        whole = {
            name: value
            if name == "step"
            else _as_stored(value, stored.get(name, torch.float32)).reshape(shard.weight.shape)
            for name, value in values.items()
        }
        if "master" in whole and (shard.weight.dtype is torch.float32 or stored[MAIN_PARAM] is torch.bfloat16):
            master = _as_stored(whole.pop("master"), shard.weight.dtype)
            if master.dtype is not shard.weight.dtype:
                raise drops_masters(f"master_param of {shard.name!r}")
            shard.weight.data.copy_(master)
            optimizer.reseed([shard.name])
        if whole and (whole.keys() != {"step"} or whole["step"] != optimizer.step_count(shard.name)):
            optimizer.set_state_of(shard.name, whole)

    def _remember(self) -> None:
        """Note which values of fp32 copies are the optimizer's own. Weights are written by collectives as well."""
        if not self.steps_weights:
            self._versions = {key: shard.tensor._version for key, shard in self._shards.items()}

    @torch.no_grad()
    def take_anew(self, part: OffloadedHybrid) -> None:
        """Take fp32 main weights anew from the weights of the model."""
        optimizer = self.optimizer
        optimizer.wait()
        shards = self._shards_of(part)
        for shard in shards:
            whole = shard.model_param.detach().view(-1)[shard.start : shard.stop]
            if whole.data_ptr() != shard.tensor.data_ptr():
                shard.tensor.detach().view(-1).copy_(whole)
        optimizer.reseed([shard.name for shard in shards])
        self._remember()

    @torch.no_grad()
    def _take_from(self, part: OffloadedHybrid, saved: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Take fp32 main weights from those of a checkpoint."""
        shards = self._shards_of(part)
        for shard in shards:
            main = saved[shard.model_param].detach().view(-1)[shard.start : shard.stop]
            if self.steps_weights:
                self.write(id(shard.tensor), {"master_param": main})
            else:
                shard.tensor.detach().view(-1).copy_(main)
        self.flush()
        if not self.steps_weights:
            self.optimizer.reseed([shard.name for shard in shards])
            self._remember()

    def _follow_loads(self, part: OffloadedHybrid) -> None:
        """Be told when Megatron has loaded state, or wants main weights anew. It copies through `.data` there."""
        owner = part.owner
        reload_params, load = owner.reload_model_params, owner.load_state_dict
        if self.early:
            owner.clip_grad_norm = _refuse_to_clip
        owner.load_parameter_state_from_dp_zero_legacy = _refuse_legacy

        def reloaded(state_dict: Any = None) -> None:
            reload_params(state_dict=state_dict)
            if not hasattr(owner, "model_param_group_index_map"):  # it asks by update_fp32_param_by_new_param
                self.optimizer.reseed([shard.name for shard in self._shards_of(part)])
                self._remember()
            elif state_dict is not None:  # which Megatron does not give to its hybrid optimizer
                self._take_from(part, getattr(owner, _BY_PARAM)(state_dict))

        @torch.no_grad()  # Megatron copies into fp32 shards in place, which are views of weights
        def loaded(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            self.flush()
            if not self.steps_weights:
                self.optimizer.reseed([shard.name for shard in self._shards_of(part)])
                self._remember()
            return found

        owner.reload_model_params, owner.load_state_dict = reloaded, loaded


def leave(chunks: Sequence[Any]) -> None:
    """Let the optimizers that step these model chunks leave them to another one, which is made for them."""
    mine = {id(chunk) for chunk in chunks}
    for other in [each for each in Offloading.live if any(id(chunk) in mine for chunk in each.chunks)]:
        Offloading.live.discard(other)
        other._leave()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method, and does not keep its object."""
    held = weakref.WeakMethod(method)

    def called(*args: Any) -> Any:
        found = held()
        return None if found is None else found(*args)

    return called


class _Changes:
    """What an optimizer has changed in model chunks, to be undone when it leaves them, or goes."""

    def __init__(self, clearing: _Clearing) -> None:
        self.made: AdamW | None = None
        """What steps the weights of the chunks."""
        self.hooks: list[Any] = []
        self._clearing = clearing
        self._replaced: list[tuple[weakref.ref[Any], str, Any]] = []
        """Methods of chunks and of their bucket groups: of which object, their names, and what was set there before.

        Objects are not kept: by its configuration a chunk has the optimizer, which would so keep itself.
        """

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Put a function where an object has a method."""
        self._replaced.append((weakref.ref(owner), name, vars(owner).get(name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Undo all changes. Weights then have the values of the last step, and gradient buffers are cleared."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        for held, name, before in reversed(self._replaced):
            owner = held()
            if owner is None:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()
        made, self.made = self.made, None
        if made is not None:
            made.discard_gradients()
            made.wait()
        self._clearing.finish()


class _SideStream:
    """Runs on a stream beside the caller's what that need not wait for; on a CPU there is none, and all is at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._stream: Any = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Enqueue what the block does after what the caller's stream holds, and let that stream go on."""
        if not self._on_device:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the caller's stream wait for everything that has been enqueued beside it."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class _Clearing:
    """Clears gradient buffers beside forward, which does not use them; before backward the caller's stream waits.

    A step reads gradients until its last streamed bucket is stepped, which is late in forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = _SideStream(device)
        self._cleared: list[tuple[torch.Tensor, int]] = []
        """Buffers, and their versions when they had been cleared."""

    def clear(self, gradients: torch.Tensor, clear: Callable[[], None]) -> None:
        """Enqueue `clear`, which waits for the readers of this buffer and clears it."""
        with self._side.beside():
            clear()
        # Cleared again, as after a forward that raised, it is what the last time has left that counts.
        self._cleared = [(each, version) for each, version in self._cleared if each is not gradients]
        self._cleared.append((gradients, gradients._version))

    def finish(self) -> None:
        """Make the caller's stream wait until buffers are cleared. Raises OrderingError if one was written before."""
        if not self._cleared:
            return
        cleared, self._cleared = self._cleared, []
        self._side.join()
        if any(gradients._version != version for gradients, version in cleared):
            raise OrderingError(
                "gradients were written between zero_grad_buffer() and the end of forward",
                why="buffers are cleared beside forward, and what was written may be cleared as well",
                fix="write them after forward, or after optimizer.offloading.wait_until_cleared()",
            )


def _are_same(factors: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two chunks are scaled alike; only of factors that are not the same objects a device is asked."""
    if len(factors) != len(others):
        return False
    return all(one is other or float(one) == float(other) for one, other in zip(factors, others, strict=True))


def _captures(config: Any) -> bool:
    """Return whether forward or backward of a model chunk becomes part of CUDA graphs, where no stream can join."""
    return bool(getattr(config, "cuda_graph_impl", "none") != "none" or getattr(config, "enable_cuda_graph", False))


def _sort_by_map(part: Any) -> None:
    """Put the shards of each group of a DistributedOptimizer where its map says that they are.

    Megatron puts those of fp32 weights first, and looks for them, when it saves, where its buffers have them.
    """
    precise = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    halves = part.shard_float16_groups if precise else part.shard_fp32_from_float16_groups
    shards: dict[int, torch.Tensor] = {}
    for of_weights, of_shards in (
        (part.model_float16_groups, halves),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for held, cut in zip(of_weights, of_shards, strict=True):
            shards.update(zip(map(id, held), cut, strict=True))
    for number, group in enumerate(part.optimizer.param_groups):
        placed = {place: shards[id(p)] for p, (of, place) in part.model_param_group_index_map.items() if of == number}
        group["params"] = [placed[place] for place in sorted(placed)]


def _whole_of(part: OffloadedHybrid) -> dict[int, tuple[torch.nn.Parameter, int, int]]:
    """Return, by the id of each tensor that a part steps, the model's parameter and which elements of it."""
    owner, found = part.owner, {}
    if hasattr(owner, "model_param_group_index_map"):
        for p, (group, order) in owner.model_param_group_index_map.items():
            buffer, dtype, bucket = owner.model_param_gbuf_map[p]
            of = owner.gbuf_ranges[buffer][dtype][bucket]["param_map"][p]["param"]
            found[id(part.param_groups[group]["params"][order])] = p, of.start, of.end
        return found
    copies = {}
    if hasattr(owner, "float16_groups"):
        for mine, theirs in zip(owner.float16_groups, owner.fp32_from_float16_groups, strict=True):
            copies.update({id(copy): p for p, copy in zip(mine, theirs, strict=True)})
    for group in part.param_groups:
        for tensor in group["params"]:
            p = copies.get(id(tensor), tensor)
            found[id(tensor)] = p, 0, p.numel()
    return found


def _changed_later(name: str, p: Any, chunk: Any) -> bool:
    """Return whether `finalize_model_grads` adds to this gradient after its bucket group is reduced."""
    if getattr(p, "pipeline_parallel", False) or getattr(p, "flextron_router_pp_sync", False):
        return True
    if chunk.tp_group.size() > 1:
        if getattr(p, "sequence_parallel", False) or getattr(p, "average_gradients_across_tp_domain", False):
            return True
        if "q_layernorm" in name or "k_layernorm" in name:
            return True
    stages = chunk.pp_group if isinstance(chunk.pp_group, list) else [chunk.pp_group]
    if any(each.size() > 1 for each in stages):
        embeds = "position_embeddings" in name or "word_embeddings" in name or "output_layer" in name
        return embeds or bool(getattr(p, "shared_embedding", False))
    return False
