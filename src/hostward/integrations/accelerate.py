"""Offload in a loop that accelerate runs, and in every trainer that is built on an `Accelerator`.

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = offload(accelerator, optimizer, model, offload_fraction=1.0)  # the one line
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

hostward's optimizer is made when `prepare` is over, because only then the parameters are those that are trained: on
their device, sharded, cast. Until then a `torch.optim.AdamW` that is never stepped stands for it.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hostward.attachment import Attachment, attach
from hostward.checkpoint.torch_adamw import from_torch_adamw
from hostward.config.schema import nearest
from hostward.core.inventory import MAIN_PARAM, Dtype
from hostward.errors import CheckpointError, ConfigError, ModelError, UnknownNameError, needed_for
from hostward.model.parameters import local_of
from hostward.optim.adamw import OPTIONS, AdamW
from hostward.optim.offloaded_grad import OffloadedGrad
from hostward.optim.param_groups import check_variants
from hostward.optim.placement import planned
from hostward.plan.plan_file import layers_of

with needed_for("hostward.integrations.accelerate", "accelerate"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

log = logging.getLogger("hostward")

_OF_LAYERS = ("activations", "weights", "recompute", "layers", "force")
"""Options of `hostward.attach`; `plan` is one of both."""
_WHAT = ("offload_fraction", "plan", "activations", "weights", "recompute")
"""Options that say what is offloaded; without any of them all optimizer state is."""
_OF_TORCH = OPTIONS & {
    *("params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable"),
    *("fused", "module", "stages", "tied"),
}
"""Arguments of the optimizer that the given torch optimizer or the model decides."""
_DEFAULTS = ("lr", "betas", "eps", "weight_decay")
_EXECUTION = ("foreach", "fused", "capturable", "param_names")
"""Keys of torch's groups that say how torch runs its step."""
_OPTIONS = frozenset({*OPTIONS - _OF_TORCH, *_OF_LAYERS})


def offload(
    accelerator: Accelerator, optimizer: torch.optim.AdamW, model: torch.nn.Module, **options: Any
) -> OffloadedOptimizer:
    """Return an optimizer to be given to `accelerator.prepare` in place of a `torch.optim.AdamW`.

    The loop stays as it is. Within `accelerator.backward` gradients are offloaded as they become final, as soon as
    `accelerator.sync_gradients` says that no further microbatch adds to them. `accelerator.clip_grad_norm_` sets the
    limit for the next `step()`, which clips, and returns a `StepNorm`. Learning-rate schedulers are made over what this
    returns.

    Args:
        accelerator: its `prepare`, `backward`, `clip_grad_norm_` and `clip_grad_value_` are replaced on this object.
        optimizer: never stepped. Its groups, with lr, betas, eps and weight_decay, are taken over.
        model: holds all parameters of the optimizer; not yet prepared, or prepared before.
        options: of `hostward.AdamW` (offload_fraction, streamed_fraction, plan, gradients, ...) and of
            `hostward.attach` (activations, weights, recompute, layers). Where none of them says what to offload,
            offload_fraction is 1.0. Layers are attached when `prepare` is over.
            max_grad_norm holds for steps without a call of `clip_grad_norm_`.

    Raises:
        ConfigError: DeepSpeed, FSDP1 or another strategy that is not supported; another optimizer than AdamW; a
            scheduler was made over the optimizer before; an earlier optimizer waits for `prepare` of this accelerator.
            One that was prepared is replaced. UnknownNameError: an option that does not exist.
    """
    require_supported(accelerator)
    require_options("offload()", options)
    if all(options.get(name) is None for name in _WHAT):
        options["offload_fraction"] = 1.0
    _require_plain_adamw(optimizer)
    hooks = _Hooks.on(accelerator)
    earlier = hooks.optimizer
    if earlier is not None and not earlier.prepared:
        raise ConfigError(
            "a second offload() for an accelerator, before prepare() of what the first has returned",
            why="backward and clip_grad_norm_ of an accelerator follow one optimizer: the first could not step",
            fix="one Accelerator for each optimizer; if the first is not to train, del what offload() returned",
        )
    made = OffloadedOptimizer(accelerator, optimizer, model, options)
    if earlier is not None:
        earlier.close()
    hooks.optimizer = made
    return made


def require_options(function: str, options: Iterable[str]) -> None:
    """Raise UnknownNameError if a function has not got one of the options."""
    for name in options:
        if name not in _OPTIONS:
            closest = nearest(name, _OPTIONS)
            known = ", ".join(sorted(_OPTIONS))
            raise UnknownNameError(
                f"{function} has no option {name!r}",
                why="the given optimizer has it" if name in _OF_TORCH else "",
                fix=f"did you mean {closest}?" if closest else f"options are {known}",
            )


def require_supported(accelerator: Accelerator) -> None:
    """Raise ConfigError where the accelerator trains by other means than one process, DDP or FSDP2."""
    kind = accelerator.distributed_type
    if kind is DistributedType.DEEPSPEED:
        raise ConfigError(
            "hostward under DeepSpeed is not supported",
            why="DeepSpeed brings an engine and an optimizer of its own",
            fix="leave deepspeed= and the DeepSpeedPlugin out; "
            "hostward.integrations.deepspeed.from_deepspeed(config) translates its offloading",
        )
    if kind is DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "hostward under FSDP1 is not supported",
            why="it flattens parameters, so that they have no names of their own",
            fix='fsdp_version=2: FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_config={"version": 2, ...}',
        )
    if kind not in (DistributedType.NO, DistributedType.FSDP) and not kind.value.startswith("MULTI_"):
        raise ConfigError(f"hostward under {kind.value} is not supported", fix="one process, DDP or FSDP2")


def _require_plain_adamw(optimizer: object) -> None:
    if isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError(
            "offload() with an optimizer that accelerator.prepare() or offload() has returned",
            why="hostward.AdamW is made in accelerator.prepare(), and from a torch.optim.AdamW",
            fix="call offload(accelerator, torch.optim.AdamW(...), model) once, before accelerator.prepare(), and give "
            "prepare() what it returns",
        )
    if isinstance(optimizer, AdamW):
        raise ConfigError(
            "offload() with a hostward.AdamW",
            why="offload() makes it itself, in accelerator.prepare(), and from a torch.optim.AdamW",
            fix="offload(accelerator, torch.optim.AdamW(...), model, offload_fraction=1.0)",
        )
    if type(optimizer) is not torch.optim.AdamW:
        raise ConfigError(
            f"offload() with {type(optimizer).__module__}.{type(optimizer).__qualname__}",
            why="hostward.AdamW is made in place of it, and would train differently",
            fix="torch.optim.AdamW(...); other optimizers of torch: hostward.offload_optimizer_states(optimizer)",
        )
    for group in optimizer.param_groups:
        check_variants(_settings(group))
    if optimizer.state:
        raise ConfigError(
            "offload() with an optimizer that was stepped or loaded",
            fix="call offload() first, and load its state with load_state_dict() after prepare()",
        )
    if has_scheduler(optimizer):
        raise ConfigError(
            "offload() with an optimizer that has a learning-rate scheduler",
            why="the scheduler would go on with that optimizer, which is not the one that steps",
            fix="make the scheduler after offload(), over what it returns",
        )


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a learning-rate scheduler was made over the optimizer."""
    return getattr(optimizer.step, "_wrapped_by_lr_sched", False)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _EXECUTION}


@dataclass(frozen=True, slots=True)
class _Limit:
    """Holds what `limit` was asked for the gradients that exist now; the limit itself is the optimizer's.

    norms: what it has returned, each with the limit that held before it; 0: none. clipped: gradients in `.grad` that
    the next step clips: name and parameter, gradient, and its version counter.
    """

    norms: tuple[tuple[StepNorm, float], ...] = ()
    clipped: tuple[tuple[str, torch.Tensor, torch.Tensor | None, int], ...] = ()


_NO_LIMIT = _Limit()


class OffloadedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Stands between a loop of accelerate and `hostward.AdamW`; `offload` makes it.

    `optimizer` is the `hostward.AdamW` once `accelerator.prepare` is over, and `attachment` what offloads activations
    and weights of layers, or None.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        optimizer: torch.optim.AdamW,
        model: torch.nn.Module,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True  # accelerate's own mark: it takes the optimizer as it is
        self._accelerator, self._model = accelerator, model
        self._stand_in = optimizer
        self._of_layers = {name: value for name, value in options.items() if name in _OF_LAYERS and value is not None}
        self._options = {name: value for name, value in options.items() if name not in _OF_LAYERS}
        self._options["plan"] = planned(self._options.get("plan"))
        self._limit = _NO_LIMIT
        self.prepared = False
        """True once `accelerator.prepare` has had it."""
        self.attachment: Attachment | None = None

    # -------------------- From prepare to the end

    def start(self) -> None:
        """Make the optimizer where there is none yet, and attach the offloading of layers.

        `accelerator.prepare` calls it.

        Raises:
            ConfigError, ModelError, MemoryLimitError: as `hostward.AdamW` and `hostward.attach`.
        """
        self.prepared = True
        if self.optimizer is self._stand_in:
            groups = [_settings(group) for group in self._stand_in.param_groups]
            defaults = {name: self._stand_in.defaults[name] for name in _DEFAULTS}  # for groups that are added later
            made = AdamW(groups, module=self._model, **defaults, **self._options)
            super().__init__(made, device_placement=False, scaler=self._accelerator.scaler)
        optimizer = self.made()
        if self.attachment is None:
            plan, of_layers = self._options["plan"], self._of_layers
            if plan is not None and not of_layers and layers_of(plan):
                of_layers = {"plan": plan}
            if of_layers:
                self.attachment = attach(self._model, optimizer, **of_layers)

    def detach(self) -> None:
        """End the offloading of activations and weights; all weights are on the device then. State stays offloaded."""
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None

    def end(self, *, failed: bool = False) -> None:
        """Detach at the end of training, wherever it ended; gradients of a step that did not come are dropped.

        Where training has failed while weights are asleep, layers stay attached, and its error is raised.
        """
        if self.attachment is not None:
            self.made().zero_grad()
            if failed and "weights" in self.made().asleep:
                log.warning("training failed while weights are asleep: wake() the hostward.AdamW before it trains on")
                return
            self.detach()

    def close(self) -> None:
        """Let the optimizer and its memory go; it cannot step any more."""
        self.end()
        self.optimizer = self._stand_in
        self._limit = _NO_LIMIT
        self._optimizer_original_step_method = self._optimizer_patched_step_method = None  # methods of the optimizer

    def made(self) -> AdamW:
        """Return hostward's optimizer. Raises ModelError before `prepare` and after `close`."""
        if not isinstance(self.optimizer, AdamW):
            raise ModelError(
                "the offloaded optimizer is not there",
                why="accelerator.prepare() has not been called with it, or not after offload(), as in prepare(model, "
                "offload(...)); or offload() was called again for the same accelerator, which follows one optimizer",
                fix="model, optimizer = accelerator.prepare(model, optimizer), once offload() has returned it; a "
                "Trainer calls both: use its optimizer after train() has begun",
            )
        return self.optimizer

    # -------------------- The step

    def limit(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> StepNorm:
        """Have the next step clip the norm to `max_norm`, and return what will hold the norm before clipping."""
        optimizer = self.made()
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ with norm_type={norm_type}", fix="norm_type=2, the norm of the step")
        if math.isnan(max_norm) or max_norm <= 0:
            raise ConfigError(f"clip_grad_norm_ with max_norm={max_norm}", fix="a number above 0; inf does not clip")
        self._require_own(optimizer, _listed(parameters))
        self._require_unchanged()
        # As gradients that have been clipped already, which a larger limit leaves as they are.
        before = optimizer.max_grad_norm or 0.0 if self._limit.norms else 0.0
        asked = 0.0 if math.isinf(max_norm) else float(max_norm)
        optimizer.max_grad_norm = min((each for each in (before, asked) if each), default=0.0)
        clipped = zip(_names(optimizer), _parameters(optimizer), strict=True) if optimizer.max_grad_norm else ()
        norm = StepNorm(optimizer.backend.device)
        self._limit = _Limit(
            (*self._limit.norms, (norm, before)),
            # An OffloadedGrad raises if it is changed.
            tuple((name, p, p.grad, _version(p.grad)) for name, p in clipped if not isinstance(p.grad, OffloadedGrad)),
        )
        return norm

    def add_gradients(self) -> None:
        """Note that a backward adds to gradients, or makes others than those for which a limit was set.

        Raises:
            ModelError: it adds to gradients that were to be clipped already.
        """
        optimizer = self.made()
        if not (self._limit.norms and optimizer.max_grad_norm):
            return
        if any(p.grad is not None for p in _parameters(optimizer)):
            raise ModelError(
                "a backward after clip_grad_norm_ and before step()",
                why="the step clips, and would clip the sum of all gradients alone, not what there was before",
                fix="clip once, after the last backward of a step; sums that are not complete are clipped within "
                "accelerator.accumulate(model)",
            )
        self._forget_limit(optimizer)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients as accelerate's wrapper does, and with them the limit that was set for their step."""
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients and isinstance(self.optimizer, AdamW):
            self._forget_limit(self.optimizer)

    def _forget_limit(self, optimizer: AdamW) -> None:
        optimizer.max_grad_norm = self._options.get("max_grad_norm") or 0.0
        self._limit = _NO_LIMIT

    def _require_own(self, optimizer: AdamW, given: list[torch.Tensor]) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = {id(p) for p in given if id(p) not in own and p.grad is not None}
        if others:
            names = [repr(name) for name, p in self._model.named_parameters() if id(p) in others]
            shown = ", ".join(names[:2] + ["..."] * (len(names) > 2))
            raise ConfigError(
                f"clip_grad_norm_ of parameters that the optimizer does not have{': ' if names else ''}{shown}",
                why="they have gradients, which would count in the norm, and the step clips by the norm of its own",
                fix="requires_grad_(False) for what is not trained; give the optimizer what is trained later on at the "
                "start, or by add_param_group()"
                if names
                else "one accelerator for each optimizer, or clip the parameters of the offloaded one alone",
            )
        if not own <= {id(p) for p in given}:
            raise ConfigError(
                "clip_grad_norm_ of a part of the optimizer's parameters",
                why="the step clips by the norm over all of its gradients",
                fix="one accelerator.clip_grad_norm_(model.parameters(), max_norm) for each step",
            )

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step as accelerate's wrapper does: only where gradients are complete, and through its scaler if it has one.

        Raises:
            ModelError: as `hostward.AdamW.step`.
        """
        optimizer = self.made()
        if not self.gradient_state.sync_gradients:
            return
        self._require_unchanged()
        super().step(closure)  # if it raises, the limit holds for the step that is made in its place
        for norm, before in self._limit.norms:
            value = optimizer.step_scalars().norm.clone().squeeze(0)
            norm.value = value * (before / (value + 1e-6)).clamp(max=1.0) if before else value
        self._forget_limit(optimizer)

    def _require_unchanged(self) -> None:
        for name, p, grad, version in self._limit.clipped:
            if p.grad is not grad or _version(grad) != version:
                raise ModelError(
                    f"the gradient of parameter {name!r} was changed between clip_grad_norm_ and step()",
                    why="the step clips, and would clip what was changed as well",
                    fix="change gradients before clip_grad_norm_; in a Trainer in training_step, after backward",
                )

    @property
    def step_was_skipped(self) -> bool:
        """Report whether a gradient scaler took part in the last step and it was skipped."""
        return isinstance(self.optimizer, AdamW) and self.optimizer.step_was_skipped

    # -------------------- State

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, as `hostward.AdamW.state_dict`."""
        return self.made().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of hostward at any fraction, or one of `torch.optim.AdamW` over the same groups.

        Raises:
            CheckpointError: as `hostward.AdamW.load_state_dict` and `hostward.convert.from_torch_adamw`.
        """
        optimizer = self.made()
        if _is_torch(state_dict):
            named = dict(zip(_names(optimizer), _parameters(optimizer), strict=True))
            sharded = next((name for name, p in named.items() if type(p.data) is not torch.Tensor), None)
            if sharded is not None:
                raise CheckpointError(
                    f"a state of torch.optim.AdamW for {sharded!r}, which is sharded",
                    fix="resume once without FSDP2, and save: the state then loads at any sharding",
                )
            # torch has no fp32 main weight of a 16-bit weight: it went on from the weight itself.
            main_param = optimizer.state_format.main_param
            own = {torch.float32, *({torch.bfloat16} if main_param is Dtype.BF16 else ())}
            masters = {n: p.detach().float().cpu() for n, p in named.items() if p.dtype not in own}
            shapes = {n: tuple(p.shape) for n, p in named.items()}
            settings = [_settings(group) for group in state_dict["param_groups"]]
            given = {"state": state_dict["state"], "param_groups": settings}
            state_dict = from_torch_adamw(given, list(named), masters, shapes) | {MAIN_PARAM: main_param.value}
        optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.optimizer)


def _names(optimizer: AdamW) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def _parameters(optimizer: AdamW) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_torch(state_dict: Mapping[str, Any]) -> bool:
    """Return whether torch's AdamW has saved this: it numbers parameters, and counts steps in float32."""
    state = state_dict.get("state")
    if "format" in state_dict or not isinstance(state, Mapping):
        return False
    steps = [entry.get("step") for entry in state.values() if isinstance(entry, Mapping)]
    return all(not isinstance(step, torch.Tensor) or step.is_floating_point() for step in steps)


class StepNorm(torch.Tensor):
    """Holds the norm of all gradients before clipping, float32 [] on the device, from `optimizer.step()` on.

    `accelerator.clip_grad_norm_` returns it before the step, in which the norm is computed. Reading it earlier raises
    ModelError.
    """

    value: torch.Tensor | None

    @staticmethod
    def __new__(cls, device: torch.device) -> StepNorm:
        made: StepNorm = torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32, device=device)
        made.value = None
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*map(_known, args), **{key: _known(value) for key, value in (kwargs or {}).items()})

    def known(self) -> torch.Tensor:
        """Return the norm as a plain tensor. Raises ModelError before the step."""
        if self.value is None:
            raise ModelError(
                "the gradient norm was read before optimizer.step()",
                why="the step computes it, and clips by it",
                fix="read it after optimizer.step(); to look at gradients first, give overlap=False, and read them",
            )
        return self.value

    def numpy(self, **options: Any) -> Any:
        return self.known().numpy(**options)

    def tolist(self) -> Any:
        return self.known().tolist()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.known(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.known().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        return repr(self) if self.value is None and not spec else format(self.known().item(), spec)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"StepNorm({'not yet' if self.value is None else self.value.item()})"


def _known(value: Any) -> Any:
    """Return an argument of an operation with the norm in place of what holds it, in lists too."""
    if isinstance(value, list | tuple):
        return type(value)(map(_known, value))
    return value.known() if isinstance(value, StepNorm) else value


def _version(grad: torch.Tensor | None) -> int:
    return 0 if grad is None else local_of(grad)._version


def _listed(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


class _Hooks:
    """Replaces methods of one accelerator, so that they reach its offloaded optimizer."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._prepare, self._backward = accelerator.prepare, accelerator.backward
        self._clip_grad_norm_ = accelerator.clip_grad_norm_
        self._optimizer: weakref.ref[OffloadedOptimizer] | None = None

    @property
    def optimizer(self) -> OffloadedOptimizer | None:
        """Return the optimizer that is followed. It is not kept alive, so that `free_memory` returns its memory."""
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @classmethod
    def on(cls, accelerator: Accelerator) -> _Hooks:
        """Return the hooks of an accelerator, installed if need be."""
        found = getattr(accelerator.backward, "__self__", None)
        if isinstance(found, cls):
            return found
        made = cls(accelerator)
        for method in (made.prepare, made.backward, made.clip_grad_norm_, made.clip_grad_value_):
            setattr(accelerator, method.__name__, method)
        return made

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare as accelerate does, and then start the offloaded optimizer if it is among `args`."""
        prepared = self._prepare(*args, **options)
        optimizer = self.optimizer
        if optimizer is not None and any(given is optimizer for given in args):
            if not any(p is optimizer for p in (prepared if isinstance(prepared, tuple | list) else [prepared])):
                raise ModelError(
                    "this version of accelerate wraps an optimizer that is prepared", fix="accelerate 1.15"
                )
            optimizer.start()
        return prepared

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward; gradients to which no further microbatch adds are offloaded as they become final."""
        followed = self._of_hostward()
        optimizer = followed.made()
        followed.add_gradients()
        with optimizer.accumulate(last=self._accelerator.sync_gradients):
            self._backward(loss, **options)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Have the next step clip, and return what will hold the norm; before the last microbatch clip what there is.

        A loop that clips after every microbatch clips sums that are not complete, in `.grad`, as accelerate does.
        """
        optimizer = self._of_hostward()
        if self._accelerator.sync_gradients:
            return optimizer.limit(parameters, max_norm, norm_type)
        given = _listed(parameters)
        if any(isinstance(p.grad, OffloadedGrad) for p in given):
            raise ConfigError(
                'clip_grad_norm_ after each microbatch, with gradients="host"',
                why="they leave .grad in each backward, and the step clips by the norm of their sum",
                fix="if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        made: torch.Tensor = self._clip_grad_norm_(given, max_norm, norm_type)
        return made

    def clip_grad_value_(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "clip_grad_value_ with offloaded gradients is not supported",
            why="they leave .grad in backward",
            fix="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
        )

    def _of_hostward(self) -> OffloadedOptimizer:
        optimizer = self.optimizer
        if optimizer is None:
            raise ModelError("the accelerator has no offloaded optimizer", fix="offload(accelerator, optimizer, model)")
        return optimizer
