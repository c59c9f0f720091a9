"""`offload_optimizer_states` keeps the state of any torch optimizer on the host between its steps."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hostward.config.arguments import named_options
from hostward.core.placement import checked_fraction
from hostward.core.units import MIB
from hostward.errors import ConfigError, MemoryLimitError, ModelError
from hostward.optim.adamw import AdamW
from hostward.optim.any_optimizer.chunked_step import (
    OffloadedStep,
    check_optimizer,
    closes_first,
    expected_bytes,
)
from hostward.optim.any_optimizer.host_state import bundle_bytes, bundles, cut, may_leave
from hostward.optim.any_optimizer.own_step import raw_step, watched_step
from hostward.optim.any_optimizer.staging import CHUNKS_AT_ONCE, AwayState
from hostward.optim.any_optimizer.state_entry import Maker, at_rest
from hostward.runtime.backend import Backend
from hostward.runtime.backend_choice import backend_for
from hostward.runtime.pinned_memory import require_host_memory

log = logging.getLogger("hostward")


@named_options
def offload_optimizer_states(
    optimizer: torch.optim.Optimizer,
    *,
    fraction: float = 1.0,
    chunk_size_mb: int = 0,
    backend: Backend | None = None,
) -> StreamedStates:
    """Keep the state tensors of any torch optimizer in pinned host memory between its steps.

    The optimizer stays the caller's object; its `step` is replaced on it. Weights, state and groups are bitwise
    identical to those of training without offloading, whatever the step depends on: attributes, counters, the position
    of a parameter, random numbers, norms over all parameters, a closure. Its own step is called once, and a state
    tensor is copied to the device when `optimizer.state[p]` is asked for it. When nothing but `optimizer.state` refers
    to it any more, it is copied back. The same holds between steps: `optimizer.state[p][key]` is a device tensor, as
    without offloading.

    Optimizers of torch.optim step each parameter by itself and read all state first. Their step, and that of subclasses
    that do not change it, is called for the parameters of one chunk at a time, which is bitwise identical.

    Tensors keep dtype, shape and strides. On the device stay numbers, tensors of one element (step counts), tensors in
    lists, tensors with attributes of their own, tensors that share memory with others, and those that other code refers
    to (an attribute, a variable of the caller), for as long as it does. State that the first step makes is offloaded
    during that step.

    Args:
        optimizer: any torch.optim.Optimizer; its parameters are plain tensors on one device, or DTensors, of which each
            rank offloads the state of its own part. Not `hostward.AdamW`, which has options of its own.
        fraction: share of the state's bytes that is offloaded, to within one parameter's state. 0: nothing is changed.
        chunk_size_mb: largest chunk, in MiB of state; a parameter is never divided. 0: a 64th of all state, at least 16
            MiB. During a step at most four chunks are on the device, if the step releases one parameter's state
            before it reads that of the next chunks. Other steps (foreach and fused ones of other classes than torch's)
            have all state on the device until they end; a warning reports it once.
        backend: where copies run; by default the parameters' CUDA device, or a simulated one for CPU parameters.

    A step that uses state on CUDA streams of its own must let the current stream wait for them before it drops its
    references; torch's own rule for memory (`record_stream`) asks for the same.

    Raises:
        ConfigError: `fraction` or `chunk_size_mb` out of range, or FSDP2 offloads the parameters itself.
        ModelError: the optimizer's step or state cannot be followed (differentiable=True, a replaced step, a state that
            is no dict).
        MemoryLimitError: its present state does not fit the host; everything is as before.
    """
    fraction = checked_fraction(fraction, "fraction")
    chunk_bytes = _checked_mebibytes(chunk_size_mb) * MIB
    if isinstance(optimizer, AdamW):
        raise ModelError(
            "hostward.AdamW places its own state",
            why="its state is no part of optimizer.state, so there is nothing to move",
            fix="hostward.AdamW(..., offload_fraction=...), or optimizer.offload_optimizer_states=True",
        )
    device = check_optimizer(optimizer)
    known = getattr(optimizer.step, "hostward_states", None)
    if known is not None and known.attached:
        raise ModelError("the states of this optimizer are offloaded already", fix="detach() the first offloading")
    chosen = backend_for(device, None) if backend is None else backend
    if chosen.device != device:
        raise ModelError(
            f"the parameters lie on {device}, the backend serves {chosen.device}",
            fix="pass the backend of the parameters' device, or none",
        )
    return StreamedStates(optimizer, fraction, chunk_bytes, chosen)


def _checked_mebibytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"chunk_size_mb must be a whole number of MiB, at least 0, got {value!r}",
            why="it bounds the state that a step has on the device at once",
            fix="chunk_size_mb=0 takes a 64th of all state",
        )
    return value


class StreamedStates:
    """StreamedStates keeps the state of one optimizer on the host; `offload_optimizer_states` makes it.

    Reading `optimizer.state[p][key]` reloads the tensor, in a step and between steps. `state_dict()` waits and returns
    copies on the CPU, `load_state_dict()` puts state on the host again.

    An error of the optimizer is passed on as it is, with idle streams. If something had been written by then, weights
    and state do not belong together: step() and state_dict() raise ModelError until a state is loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, fraction: float, chunk_bytes: int, backend: Backend) -> None:
        self.fraction = fraction
        self.backend = backend
        self.attached = False
        self._kind = type(optimizer).__name__
        self._optimizer = weakref.ref(optimizer)
        self._away = AwayState(backend, fraction, chunk_bytes)
        self._torn = ""
        """Description of what has failed half way."""
        self._told = False
        self._loading: list[tuple[torch.Tensor, object, dict[Any, Any]]] = []
        self._saved_groups: list[dict[str, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._previous: Callable[..., Any] | None = None
        self._replaced: weakref.ref[Callable[..., Any]] | None = None
        if fraction == 0:
            log.info("%s", self.explain())
        else:
            self._attach(optimizer)

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes of state that are stored on the host."""
        return self._away.share.left_bytes

    def explain(self) -> str:
        """Return one line that says how much of the state is where."""
        share, chunks = self._away.share, self._away.chunks
        if self.fraction == 0:
            return f"{self._kind}: fraction=0, no state is offloaded"
        if not share.total_bytes:
            return (
                f"{self._kind}: there is no state yet, the first step makes it; asked {self.fraction:.1%} on the host"
            )
        actual = share.left_bytes / share.total_bytes
        largest = max((chunk.size_bytes for chunk in chunks), default=0)
        return (
            f"{self._kind}: {share.left_bytes:,} of {share.total_bytes:,} bytes of state on the host "
            f"({actual:.1%}, asked {self.fraction:.1%}), in {len(chunks)} chunks of at most {largest:,} bytes; "
            f"at most {min(CHUNKS_AT_ONCE, len(chunks))} of them on the device during a step"
        )

    __repr__ = explain

    def wait(self) -> None:
        """Return when all copies are complete. Raises what one of them reported."""
        self.backend.synchronise()

    @torch.inference_mode(False)
    @torch.no_grad()
    def detach(self) -> None:
        """Reload all state to the device, and give the optimizer its own step again.

        Raises:
            MemoryLimitError: the device has no room; what is still on the host stays offloaded.
        """
        optimizer = self._optimizer()
        if not self.attached or optimizer is None:
            self._away.clear()
            self.attached = False
            return
        self._away.bring_back(optimizer.state)
        if isinstance(getattr(optimizer.state, "default_factory", None), Maker):
            optimizer.state.default_factory = dict
        if self._torn:
            log.warning("%s: %s failed half way; weights and state do not belong together", self._kind, self._torn)
        for handle in self._handles:
            handle.remove()
        if self._replaced is not None and vars(optimizer).get("step") is self._replaced():
            del vars(optimizer)["step"]
            if self._previous is not None:
                vars(optimizer)["step"] = self._previous
        # Where a scheduler has wrapped the replaced step since, that one goes on and passes everything through.
        self.attached = False

    # ---------------------------------------------------------------- attaching

    @torch.inference_mode(False)
    @torch.no_grad()
    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        present = {p: bundle_bytes(b) for p, b in bundles(optimizer.state, parameters, self.backend.device).items()}
        expected = sum(present[p] if p in present else expected_bytes(p) for p in parameters)
        try:
            self._away.take(optimizer.state, list(present), limit_bytes=self._away.limit_bytes(expected))
        except MemoryLimitError:
            self._away.bring_back(optimizer.state)
            raise
        self._away.release()
        self._handles = [
            optimizer.register_state_dict_pre_hook(self._before_save, prepend=True),
            optimizer.register_state_dict_post_hook(self._copied, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True),
        ]
        self._previous = watched_step(optimizer)
        step = _replacement(optimizer, self)
        self._replaced = weakref.ref(step)
        vars(optimizer)["step"] = step
        self.attached = True

    # ---------------------------------------------------------------- the step

    def _step(self, optimizer: torch.optim.Optimizer, call: Callable[[], object]) -> object:
        """Make one step of `optimizer`, in which `call` steps whatever its groups hold.

        Returns what the last call returned.

        Raises:
            ModelError: an earlier step failed half way, or this one is captured in a CUDA graph.
            MemoryLimitError: state that this step has made does not fit the host; the step itself is complete.
        """
        self._require_whole()
        if self.backend.capturing():
            raise ModelError(
                f"a step of this {self._kind} is captured in a CUDA graph",
                why="a graph has fixed addresses, and offloaded state has not",
                fix="capture forward and backward without the step, or detach() first",
            )
        step = OffloadedStep(optimizer, self._away, call)
        try:
            result = step.run()
        finally:
            self._torn = "an earlier step" if step.torn else ""
        self._tell_of_peak()
        if step.refused is not None:
            raise step.refused
        return result

    def _tell_of_peak(self) -> None:
        bound_bytes = CHUNKS_AT_ONCE * max((chunk.size_bytes for chunk in self._away.chunks), default=0)
        if not self._told and self._away.staging.peak_bytes > bound_bytes:
            self._told = True
            log.warning(
                "%s had %s bytes of state on the device at once, where %s chunks take %s: its step reads the state of "
                "further parameters before it lets go of the first; with foreach=False, if it has that, it may not",
                *(self._kind, f"{self._away.staging.peak_bytes:,}", CHUNKS_AT_ONCE, f"{bound_bytes:,}"),
            )

    def _require_whole(self) -> None:
        if self._torn:
            raise ModelError(
                f"{self._torn} of this {self._kind} failed half way",
                why="some parameters are further than others: weights and state do not belong together",
                fix="load the last checkpoint into model and optimizer",
            )

    # ---------------------------------------------------------------- saving and loading

    def _before_save(self, optimizer: torch.optim.Optimizer) -> None:
        self._require_whole()
        self.backend.synchronise()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _copied(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict with copies on the CPU.

        Slabs change with the next step, and would be saved as a whole.
        """
        require_host_memory(self._away.share.total_bytes, owner="a copy of the optimizer state")

        def copied(entry: object) -> object:
            if not isinstance(entry, dict):
                return entry
            return {k: v.to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for k, v in at_rest(entry).items()}

        return {**state_dict, "state": {i: copied(entry) for i, entry in state_dict["state"].items()}}

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep back the tensors that may be offloaded: torch would put all of them on the device at once."""
        self.backend.synchronise()
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        self._saved_groups = state_dict["param_groups"]
        self._loading = []
        state = dict(state_dict["state"])
        for i, p in zip(numbers, mine, strict=False):  # torch raises for other lengths
            entry = state.get(i)
            if isinstance(entry, dict):
                self._loading.append((p, i, entry))
                state[i] = {key: value for key, value in entry.items() if not may_leave(value)}
        return {**state_dict, "state": state}

    @torch.inference_mode(False)
    @torch.no_grad()
    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Load what was kept back to the device, as torch would, and offload it again, one chunk at a time."""
        loading, self._loading = self._loading, []
        self._torn = "loading the state"  # until all of it is loaded
        self._away.clear()
        sizes = [(p, bundle_bytes({k: v for k, v in entry.items() if may_leave(v)})) for p, _, entry in loading]
        limit_bytes = self._away.limit_bytes(sum(nbytes for _, nbytes in sizes))
        entries = {p: (i, entry) for p, i, entry in loading}
        for run in cut(sizes, limit_bytes):
            for p in run:
                optimizer.state[p] = self._loaded(optimizer, p, *entries[p])
            self._away.take(optimizer.state, run, limit_bytes=limit_bytes, loaded=True)
            self._away.release()
        self._torn = ""

    def _loaded(
        self, optimizer: torch.optim.Optimizer, p: torch.Tensor, i: object, entry: dict[Any, Any]
    ) -> dict[Any, Any]:
        """Return the whole state of a parameter, in the order in which it was saved."""
        present = optimizer.state[p]

        def load(key: Any, value: torch.Tensor) -> torch.Tensor:
            groups: Any = self._saved_groups
            return optimizer._process_value_according_to_param_policy(p, value, i, groups, key)  # type: ignore[arg-type]

        restored = {key: present[key] if key in present else load(key, value) for key, value in entry.items()}
        return {**restored, **present}


def _replacement(optimizer: torch.optim.Optimizer, states: StreamedStates) -> Callable[..., Any]:
    """Return what `optimizer.step` is from now on.

    It runs step hooks and closure once, and the optimizer's own step in parts.
    """
    raw = raw_step(type(optimizer))
    signature = inspect.signature(raw)
    watched = watched_step(optimizer)

    # Compiled code that calls the step breaks its graph here.
    @_disable_dynamo
    @functools.wraps(watched or type(optimizer).step)
    def in_parts(own: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if watched is not None:
            vars(own)["_opt_called"] = True
        if not states.attached:
            return raw(own, *args, **kwargs)
        if not closes_first(own):
            return states._step(own, lambda: raw(own, *args, **kwargs))
        bound = signature.bind(own, *args, **kwargs)
        closure = bound.arguments.get("closure")
        if closure is None:
            return states._step(own, lambda: raw(*bound.args, **bound.kwargs))
        # The closure runs first, as in torch's own steps: its gradients say what may be stepped in parts.
        with torch.enable_grad():
            loss = closure()
        bound.arguments["closure"] = None
        states._step(own, lambda: raw(*bound.args, **bound.kwargs))
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(in_parts)
    vars(hooked)["hostward_states"] = states
    reference = weakref.ref(optimizer)

    @_disable_dynamo
    @functools.wraps(hooked)
    def step(*args: Any, **kwargs: Any) -> Any:
        # A bound method would keep the optimizer, and with it the model, alive until the garbage collector runs.
        own = reference()
        if own is None:
            raise ModelError("step() of an optimizer that no longer exists", fix="keep the optimizer itself")
        return hooked(own, *args, **kwargs)

    # Schedulers wrap the function of a bound method.
    vars(step)["__func__"] = hooked
    return step
