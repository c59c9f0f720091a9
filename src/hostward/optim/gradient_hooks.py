"""Offload gradients from autograd to the optimizer, in backward as they become final, or at the step.

An offloaded gradient is replaced by an `OffloadedGrad` in `.grad`. Any use of it raises a typed error, so that a norm
of 0.0 is never reported for gradients that are elsewhere.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hostward.errors import ModelError
from hostward.model.fence import without_functions
from hostward.model.parameters import ParamRecord, is_plain, local_of, placed_alike
from hostward.optim.offloaded_grad import Fate, OffloadedGrad, Where, raise_lost
from hostward.optim.tied_weights import Tied
from hostward.runtime.backend import DTYPES, Clipping


def gradient_of(t: ParamRecord) -> torch.Tensor:
    """Return the gradient of a parameter, or this process's part of it, contiguous.

    It has the shape and dtype in which autograd left it.

    Raises:
        ModelError: the gradient is not a dense floating tensor on the parameter's device, placed as the parameter is.
    """
    parameter: torch.Tensor = t.parameter
    grad = parameter.grad
    if t.sharded:
        if grad is None or not placed_alike(grad, parameter):
            raise _unfit(t)
        parameter, grad = t.local, local_of(grad)
    if (
        grad is None
        or (type(grad) is not torch.Tensor and not is_plain(grad))  # asked for every parameter, at every step
        or grad.layout is not torch.strided
        or grad.dtype not in DTYPES
        or grad.device != parameter.device
        or grad.shape != parameter.shape
    ):
        raise _unfit(t)
    if grad.requires_grad:
        grad = grad.detach()
    return grad if grad.is_contiguous() else grad.contiguous()


def _unfit(t: ParamRecord) -> ModelError:
    grad = t.parameter.grad
    if grad is None:
        problem = "has no gradient"
    elif not placed_alike(grad, t.parameter):
        problem = f"has a gradient that is a {type(grad).__name__}, not placed as the parameter is"
    elif grad.layout is not torch.strided:
        problem = f"has a gradient with layout {grad.layout}"
    elif grad.dtype not in DTYPES:
        problem = f"has a gradient of dtype {grad.dtype}"
    else:
        problem = f"has a gradient {tuple(grad.shape)} on {grad.device}"
    return ModelError(
        f"parameter {t.name!r} {problem}",
        why="the step takes dense fp32, bf16 or fp16 gradients on the parameter's own device",
        fix="give it such a gradient, or leave the parameter out of the optimizer",
    )


def _held_elsewhere(tracked: Iterable[ParamRecord]) -> set[str]:
    """Return names of parameters whose gradient, or its memory, the program holds besides `.grad`.

    Not of sharded ones, whose gradients share memory that FSDP2 has.
    """
    count, alone = torch._C._storage_Use_Count, _references_of_one()
    found, tensors, uses = set(), Counter[int](), dict[str, tuple[int, int]]()
    for t in tracked:
        grad = t.parameter.grad
        if grad is None or t.sharded or grad.layout is not torch.strided:
            continue
        if sys.getrefcount(grad) > alone:
            found.add(t.name)
        storage = grad.untyped_storage()._cdata
        tensors[storage] += 1
        uses[t.name] = storage, count(storage)
    # Autograd makes gradients that share memory among themselves. Its object in Python is one use more.
    return found.union(name for name, (storage, n) in uses.items() if n > tensors[storage] + 1)


def _held_in_backward(t: ParamRecord) -> bool:
    """Report whether the program holds the gradient to which autograd has just added, or its memory, besides `.grad`.

    It may change what it holds when backward is over. Memory counts where `.grad` is a view, which autograd does not
    make: parameters that are concatenated have gradients in one memory, too, and nobody holds it.
    """
    grad = t.parameter.grad
    if grad is None or t.sharded:
        return False
    return sys.getrefcount(grad) > _references_of_one() or grad._base is not None


@functools.cache
def _references_of_one() -> int:
    """Return how many references Python counts to a gradient that nothing but `.grad` and one variable holds."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    grad = parameter.grad
    return sys.getrefcount(grad)


def _of_another(name: str, grad: OffloadedGrad) -> ModelError:
    done = "was used by the last step of" if grad.fate.now is Where.USED else "is offloaded for"
    return ModelError(
        f"the gradient of parameter {name!r} {done} another hostward.AdamW, which has this parameter as well",
        why="a gradient serves one step of one optimizer; this one would leave the parameter as it is",
        fix="give each parameter to one optimizer; if the other one is not needed any more, drop it (schedulers hold "
        'it, too); optimizers that take turns need zero_grad() and a backward before each step, and gradients="device"',
    )


def _misplaced(name: str, grad: OffloadedGrad) -> ModelError:
    return ModelError(
        f"the gradient of parameter {grad.parameter_name!r} was put into .grad of {name!r}",
        why="the optimizer has taken it already; the step would be made as if it had stayed where it was",
        fix='move gradients before the last backward ends, or leave accumulate(last=True) and gradients="host" out',
    )


class Borrowed(Enum):
    """Says what became of gradients that lie in memory of others, who overwrite it for the next step."""

    NONE = "none"
    """None has been taken since their owner was told that all of them had been read."""
    TAKEN = "taken"
    """Some have been taken; the step that reads the rest of them comes."""
    STEPPED = "stepped"
    """The step is issued, and may still read them."""


@dataclass
class Unscaling:
    """A gradient scaler's call to unscale gradients of which some were offloaded: the step unscales those."""

    found_inf: torch.Tensor
    """The scaler's flag, which the step is to set."""
    inv_scale: torch.Tensor
    """Factor that the step is to apply, fp32, of one element."""
    here: dict[str, torch.dtype]
    """Names and dtypes of the gradients that were in `.grad`."""
    left: set[torch.dtype] = field(default_factory=set)
    """Dtypes of those that were offloaded: a scaler passes those of each dtype together, and unscales none of them."""


class Taker(Protocol):
    """Receives gradients that are offloaded from `.grad`."""

    def require_awake(self, name: str) -> None:
        """Check a parameter of which backward is about to make a gradient. Raises AsleepError while gradients sleep."""

    def require_used(self, name: str) -> None:
        """Check a parameter of which backward has made a gradient. Raises OrderingError where its new value was not
        waited for.
        """

    def grad_made(self) -> None:
        """Record that backward made or added to a gradient on the current stream. It stays in `.grad` for now."""

    def offload_gradient(self, name: str, gradient: torch.Tensor, *, last: bool = True, borrowed: bool = False) -> None:
        """Offload a parameter's gradient, which is contiguous.

        `last`: no further microbatch is known to come. `borrowed`: its memory stays the owner's.
        """

    def offload_gradients(self, gradients: Mapping[str, torch.Tensor], borrowed: Set[str]) -> None:
        """Call `offload_gradient` for each of these gradients, which are all final. `borrowed`: names of those that
        stay the owner's.
        """

    def flush(self, name: str) -> None:
        """Send the gradient of a parameter that is accumulated on the host, because another one is about to come."""

    def discard(self) -> None:
        """Drop the gradients that were offloaded: no step will be made with them."""

    def reload_gradient(self, name: str) -> torch.Tensor:
        """Return an offloaded gradient, because more is to be added to it.

        It is a tensor of its own if need be.
        """


class GradientHooks:
    """Offloads gradients from parameters to `taker`, and knows which gradients are in `.grad` and which are offloaded.

    Args:
        tracked: the parameters.
        taker: receives each gradient that has become final, and those of `summed` in every microbatch.
        summed: names of parameters whose gradients are accumulated on the host.
        cast: names of those whose gradients autograd leaves in their dtype, to be accumulated in fp32 in `.grad`.
        late: names of those whose gradients may be read from device memory after step() has returned.
        tied: parameters that wait until `add_up_tied`, because another stage has the other part of their gradient.
        leave: called with the name of each parameter of which backward has made a gradient.
    """

    def __init__(
        self,
        tracked: Sequence[ParamRecord],
        taker: Taker,
        summed: Set[str] = frozenset(),
        cast: Set[str] = frozenset(),
        late: Set[str] = frozenset(),
        tied: Tied | None = None,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        self._tracked = list(tracked)
        self._by_name = {t.name: t for t in tracked}
        self._shapes = {t.name: t.local.shape for t in tracked}
        self._taker = taker
        self.summed = summed
        self._cast, self._late = cast, late
        self.tied = Tied({}) if tied is None else tied
        self._leave = leave
        self._placeholders: dict[str, OffloadedGrad] = {}
        self._lifted: dict[str, OffloadedGrad] = {}
        """Stand-ins taken out of `.grad` in this backward, by name, for a gradient that has not come yet."""
        self._fate = Fate()
        """Fate shared by the gradients that are offloaded now."""
        self.taken: set[str] = set()
        self.held: set[str] = set()
        """Names of those in `.grad` that the program holds, too, and reads or overwrites later."""
        self._unscaling: Unscaling | None = None
        self.armed = False
        """No further microbatch adds to what backward makes now: it is final."""
        self.inside = False
        """The program is within `accumulate`."""
        self.reduced_later = False
        """DistributedDataParallel ran the forward of this microbatch: no gradient is final before backward ends."""
        self.captured = False
        """The last backward was captured in a CUDA graph: its gradients stay where the graph writes them."""
        self._handles: list[RemovableHandle] = []
        self._this = weakref.ref(self)
        self._unscaled = _Unscaled(self._this)
        for t in tracked:
            self._hook(t)
            grad = t.parameter.grad
            if isinstance(grad, OffloadedGrad) and grad.fate.now is Where.USED:
                grad.unscaled = self._unscaled  # of an optimizer that this one replaces

    def _hook(self, t: ParamRecord) -> None:
        """Install the hooks of a parameter; one that is frozen now may be trained later."""
        p, this, trained = t.parameter, self._this, t.parameter.requires_grad
        p.requires_grad_(True)  # torch takes hooks for no others, but keeps them
        if not t.sharded:  # autograd does not know the part: FSDP2 reports it
            self._handles.append(p.register_hook(_Before(this, t.name)))  # type: ignore[no-untyped-call]
        self._handles.append(p.register_post_accumulate_grad_hook(_After(this, t.name)))  # type: ignore[no-untyped-call]
        p.requires_grad_(trained)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before(self, name: str) -> None:
        """Prepare the parameter's `.grad` for autograd, which is about to add to it."""
        t = self._by_name[name]
        self._taker.require_awake(name)
        if name in self.tied.names:
            self.tied.before(t)
        moved = t.parameter.grad
        if not isinstance(moved, OffloadedGrad):
            if name in self.taken:
                self.drop_cleared()
            if name in self.taken:
                raise ModelError(
                    f"the gradient of parameter {name!r} was cleared after the optimizer had taken it",
                    why=f"{len(self.taken)} gradients were taken, and not all of them were cleared",
                    fix="clear all of them with optimizer.zero_grad(), or none",
                )
            return
        if moved.fate.now is Where.LOST:
            raise_lost(t.name)
        if moved.fate.now is Where.TAKEN and moved.parameter_name != name:
            raise _misplaced(name, moved)
        if moved.fate.now is Where.TAKEN and t.name in self.summed:
            self._taker.flush(t.name)
            t.parameter.grad, self._lifted[name] = None, moved
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._put_back, name))
        elif moved.fate.now is Where.TAKEN and t.name in self.taken:
            # A second backward, or a weight that two reentrant checkpoints share: it was not final after all.
            self.taken.discard(t.name)
            # Detached, it is no view, which would count as held by the program.
            t.parameter.grad = t.like(self._taker.reload_gradient(t.name).view(t.local.shape).detach())
        else:
            t.parameter.grad = None

    def _put_back(self, name: str) -> None:
        """Put the stand-in back when backward is over and nothing was added: torch.autograd.grad() runs the hooks of
        the parameters that it is asked for, and leaves `.grad` alone.
        """
        lifted = self._lifted.pop(name, None)
        if lifted is not None:
            with without_functions():
                self._by_name[name].parameter.grad = lifted

    def drop_cleared(self) -> None:
        """Forget all offloaded gradients if they were all cleared through the module.

        Gradients in `.grad` would be forgotten in the same way.
        """
        if self.taken and not any(isinstance(self._by_name[n].parameter.grad, OffloadedGrad) for n in self.taken):
            self._taker.discard()
            self.forget()

    def after(self, name: str) -> None:
        """Offload the parameter's gradient, to which autograd has just added, if it is final or accumulated on the
        host.
        """
        t = self._by_name[name]
        self._lifted.pop(name, None)
        self.captured = _capturing(t.parameter)
        self._taker.require_used(t.name)
        if self._leave is not None:
            self._leave(name)
        grad = t.parameter.grad  # a custom backward may return None
        if self.captured or grad is None or isinstance(grad, OffloadedGrad) or not t.parameter.numel():
            return
        if name in self._cast and grad.dtype is t.parameter.dtype:
            t.parameter.grad = grad.float()
        del grad  # which would count as held
        final = self.armed and not self.reduced_later and name not in self.tied.names
        if name in self.summed:
            self._have_own_memory(t)
            self.hand_over(t, last=self.armed)
        elif final and not _held_in_backward(t):
            self.hand_over(t)
        else:
            self._taker.grad_made()

    def _have_own_memory(self, t: ParamRecord) -> None:
        """Copy a gradient that the program holds, too: it may overwrite it before the microbatch has been read."""
        if _held_in_backward(t) and t.parameter.grad is not None:
            t.parameter.grad = t.parameter.grad.clone()

    def in_ddp(self) -> None:
        """Note that DistributedDataParallel runs the forward, and reduces gradients in `.grad` at the end of backward.

        Raises:
            ModelError: gradients are accumulated on the host, where DistributedDataParallel cannot reach them.
        """
        if self.summed:
            raise ModelError(
                'gradients="host" of a model that is wrapped in DistributedDataParallel',
                why="it reduces gradients in .grad when backward is over, and they would be on the host by then",
                fix='gradients="device"; or shard the model with fully_shard, which reduces before they leave',
            )
        self.reduced_later = True

    def add_up_tied(self) -> None:
        """Add up tied gradients after all backward passes of a step, and offload those that are now complete.

        They are offloaded only where other gradients have been.
        """
        for t in self.tied.add_up(self._by_name):
            if self.taken and t.parameter.grad is not None and t.parameter.numel():
                self.hand_over(t)

    def hand_over(self, t: ParamRecord, *, last: bool = True) -> None:
        """Offload the gradient in `.grad`. Raises ModelError for a gradient that no step is defined for."""
        gradient = gradient_of(t)
        made_for = self._shapes[t.name]
        if gradient.shape != made_for:
            raise ModelError(
                f"parameter {t.name!r} has a gradient {tuple(gradient.shape)}",
                why=f"it was {tuple(made_for)} when the optimizer was made, and its state still is",
                fix="resize before the optimizer is made, or make a new one",
            )
        self._put_placeholder(t, gradient.dtype)
        self._taker.offload_gradient(t.name, gradient, last=last)

    def hand_over_all(self, waiting: Sequence[ParamRecord], gradients: Mapping[str, torch.Tensor]) -> None:
        """Offload the gradients in `.grad` of all these parameters, which are `gradients` by name. They are final."""
        for t in waiting:
            self._put_placeholder(t, gradients[t.name].dtype)
        self._taker.offload_gradients(gradients, self.held)

    def take(self, name: str, gradient: torch.Tensor, *, last: bool, borrowed: bool) -> None:
        """Offload a gradient that never was in `.grad`.

        Raises:
            ModelError: its size, kind or dtype does not fit the parameter, or the parameter's gradient is there.
        """
        t = self._by_name[name]
        if gradient.numel() != t.local.numel() or not gradient.is_contiguous():
            raise ModelError(
                f"the gradient for {name!r} has shape {tuple(gradient.shape)} and strides {gradient.stride()}",
                why=f"the parameter's part in this process has shape {tuple(t.local.shape)}",
                fix="give a contiguous gradient of as many elements",
            )
        if gradient.layout is not torch.strided or gradient.dtype not in DTYPES or gradient.device != t.local.device:
            raise ModelError(
                f"the gradient for {name!r} is {gradient.dtype}, {gradient.layout}, on {gradient.device}",
                why="the step takes dense fp32, bf16 or fp16 gradients on the parameter's own device",
                fix="make it dense, and move it there",
            )
        held = t.parameter.grad
        if name in self.taken and name in self.summed:
            self._taker.flush(name)
        elif name in self.taken or (held is not None and not isinstance(held, OffloadedGrad)):
            raise ModelError(
                f"a second gradient for {name!r} in one step",
                why="the first one was taken" if name in self.taken else "there is one in .grad",
                fix="add them up first, or call discard_gradients() to begin anew",
            )
        self._put_placeholder(t, gradient.dtype)
        self._taker.offload_gradient(name, gradient.detach().view(-1), last=last, borrowed=borrowed)

    def _put_placeholder(self, t: ParamRecord, dtype: torch.dtype) -> None:
        name, parameter = t.name, t.parameter
        placeholder = self._placeholders.get(name)
        ours = placeholder is not None and placeholder.unscaled is self._unscaled  # not taken over by a later optimizer
        if placeholder is None or placeholder.made_for is not dtype or not ours:
            placeholder = OffloadedGrad(name, parameter, dtype, self._fate, self._unscaled)
            self._placeholders[name] = placeholder
        placeholder.fate = self._fate
        parameter.grad = placeholder
        self.taken.add(name)

    def note_unscaled(self, found_inf: torch.Tensor, inv_scale: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep what a gradient scaler passed for the offloaded gradients of this dtype, once for all its dtypes."""
        unscaling = self._unscaling
        if unscaling is None or unscaling.found_inf is not found_inf:
            factor = inv_scale if unscaling is None else unscaling.inv_scale * inv_scale
            grads = {t.name: t.parameter.grad for t in self._tracked if t.parameter.numel()}
            here = {n: g.dtype for n, g in grads.items() if g is not None and not isinstance(g, OffloadedGrad)}
            unscaling = self._unscaling = Unscaling(found_inf, factor, here)
        unscaling.left.add(dtype)

    def require_unscaled_alike(self) -> None:
        """Check that a gradient scaler's factor is still to be applied to all gradients, or to none of them.

        Raises:
            ModelError: it was applied to gradients of one dtype, which were in `.grad`.
        """
        if self._unscaling is None:
            return
        apart = [name for name, dtype in self._unscaling.here.items() if dtype not in self._unscaling.left]
        if apart:
            raise ModelError(
                f"scaler.unscale_() has unscaled the gradient of parameter {apart[0]!r}, and that of others not yet",
                why="gradients of another dtype are offloaded: the step unscales them, and would unscale all alike",
                fix="run the last backward of the step within optimizer.accumulate(last=True) and call unscale_() "
                "after it, or leave unscale_() out: scaler.step() unscales",
            )

    def waiting(self) -> list[ParamRecord]:
        """Return the parameters whose gradient is still in `.grad`.

        Raises:
            ModelError: a gradient was lost, or was cleared or replaced by hand after it had been offloaded, or another
                optimizer has offloaded it.
        """
        found, cleared, taken = [], [], self.taken
        for t in self._tracked:
            grad = t.parameter.grad
            if type(grad) is OffloadedGrad:  # as isinstance, which is slow for tensors
                if grad.fate.now is Where.LOST:
                    raise_lost(t.name)
                if grad.unscaled is not self._unscaled:
                    raise _of_another(t.name, grad)
                if grad.parameter_name != t.name and grad.fate.now is Where.TAKEN:
                    raise _misplaced(t.name, grad)
            elif grad is None:
                if t.name in taken:
                    cleared.append(t.name)
            elif t.name in taken:
                raise ModelError(
                    f"the gradient of parameter {t.name!r} was replaced after the optimizer had taken it",
                    why="the step would be made with the one that was taken",
                    fix="change gradients before the last backward ends, or leave accumulate(last=True) out",
                )
            elif t.parameter.numel():
                found.append(t)
        if cleared and len(cleared) == len(self.taken):
            raise GradientsClearedError(
                "all gradients were cleared after the optimizer had taken them",
                why="zero_grad() of the module ran between backward and step()",
                fix="call zero_grad() after step()",
            )
        if cleared:
            raise ModelError(
                f"the gradient of parameter {cleared[0]!r} was cleared after the optimizer had taken it",
                why=f"{len(cleared)} of {len(self.taken)} taken gradients were cleared by hand",
                fix="clear all of them with optimizer.zero_grad(), or none",
            )
        grad = None  # which would count as held
        self.held = _held_elsewhere(found)
        return found

    def held_late(self) -> set[str]:
        """Return the names of the held gradients that may be read from device memory after step() has returned."""
        return self.held & self._late

    def clipping(
        self,
        max_norm: float,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        scale: torch.Tensor | None = None,
    ) -> Clipping:
        """Return what scales this step's gradients: the norm's limit, a gradient scaler's factors, and `scale`."""
        clipping = Clipping(max_norm, scale if grad_scale is None else grad_scale.reciprocal(), found_inf)
        if grad_scale is not None and scale is not None and clipping.inv_scale is not None:
            clipping.inv_scale = clipping.inv_scale * scale
        if self._unscaling is not None:
            # The scaler could not look at offloaded gradients: it reads the norm's verdict from its flag.
            clipping.overflow_out, inverse = self._unscaling.found_inf, self._unscaling.inv_scale
            clipping.inv_scale = inverse if clipping.inv_scale is None else clipping.inv_scale * inverse
        return clipping

    def forget(self) -> None:
        """Clear the offloaded gradients from `.grad` and forget them."""
        for name in self.taken:
            parameter = self._by_name[name].parameter
            if parameter.grad is self._placeholders[name]:
                parameter.grad = None
        self.taken.clear()
        self.held.clear()
        self._unscaling = None
        if self.tied.names:
            self.tied.forget()

    def mark(self, where: Where) -> None:
        """Record what became of all offloaded gradients; afterwards none counts as offloaded."""
        self._fate.now = where
        self._fate = Fate()
        self.taken.clear()
        self.held.clear()
        self._unscaling = None

    def used_only(self) -> bool:
        """Report whether there are gradients and a step has used all of them."""
        grads = [t.parameter.grad for t in self._tracked if t.parameter.grad is not None]
        return bool(grads) and all(isinstance(g, OffloadedGrad) and g.fate.now is Where.USED for g in grads)


class GradientsClearedError(ModelError):
    """Reports that every offloaded gradient was cleared through the module, so there is nothing to step with."""


def _capturing(parameter: torch.Tensor) -> bool:
    """Report whether a CUDA graph is being captured.

    It keeps its gradients where they are, and no hook runs at its replay.
    """
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


class _Unscaled:
    """Takes a gradient scaler's call to unscale gradients that were offloaded."""

    def __init__(self, grad_hooks: weakref.ref[GradientHooks]) -> None:
        # Not the optimizer: each OffloadedGrad in `.grad` holds this, and the model outlives the optimizer.
        self._grad_hooks = grad_hooks

    def __call__(self, found_inf: torch.Tensor, inv_scale: torch.Tensor, dtype: torch.dtype) -> None:
        grad_hooks = self._grad_hooks()
        if grad_hooks is not None:
            grad_hooks.note_unscaled(found_inf, inv_scale, dtype)


class _Before:
    """Runs as a tensor hook before autograd accumulates into the parameter."""

    def __init__(self, grad_hooks: weakref.ref[GradientHooks], name: str) -> None:
        # Not the parameter: it holds this hook.
        self._grad_hooks = grad_hooks
        self._name = name

    @_disable_dynamo
    def __call__(self, gradient: torch.Tensor | None) -> None:
        grad_hooks = self._grad_hooks()
        if grad_hooks is not None and gradient is not None:
            with without_functions():
                grad_hooks.before(self._name)


class _After:
    """Runs as a hook after autograd has accumulated into the parameter."""

    def __init__(self, grad_hooks: weakref.ref[GradientHooks], name: str) -> None:
        # Not the parameter: it holds this hook.
        self._grad_hooks = grad_hooks
        self._name = name

    @_disable_dynamo
    def __call__(self, _: torch.Tensor) -> None:
        grad_hooks = self._grad_hooks()
        if grad_hooks is not None:
            with without_functions():
                grad_hooks.after(self._name)
