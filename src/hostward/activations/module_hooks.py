"""Layer hooks follow the calls of layers, offload the tensors saved in each call and prefetch them for backward.

The hooks of a layer install `pack` and `unpack` for the tensors that autograd saves in a call. Hooks decide only when a
tensor is prefetched; `unpack` alone guarantees that it is reloaded, bitwise identical.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hostward.activations.saved_tensors import (
    Hooks,
    LayerCall,
    PackedByOthers,
    PassThrough,
    SavedTensorHandle,
    SharedInputs,
    Sorter,
    Stack,
    StorageSpan,
    TransferGroup,
    Why,
    bytes_of,
    span_of,
)
from hostward.activations.transfers import ActivationTransfers
from hostward.errors import ModelError, OrderingError
from hostward.model.autograd import inside_checkpoint, tensors_of
from hostward.model.layer_hooks import (
    Mark,
    PostForwardHook,
    PreBackwardHook,
    PreForwardHook,
    Unmark,
    call,
    forget_compiled,
)
from hostward.schedule.activations import FIRST_GROUP_BYTES, GROUP_BYTES

if TYPE_CHECKING:
    from hostward.weights.offload import OffloadedWeights, WeightHandle


log = logging.getLogger("hostward")

_autograd = torch._C._autograd


class LayerCalls:
    """Install the hooks of all layers and keep track of the layer calls of each forward.

    Args:
        root: the model; its weights and buffers are never offloaded.
        layers: name and module, in order of use.
        offloaded: saved tensors of the first so many layers are offloaded.
        window: number of most recent layer calls whose tensors stay on the device.
        ahead: number of layer calls by which reloads start earlier than the window needs.
        marks: by layer, modules in whose calls saved tensors are offloaded (True) or stay (False); None: offload all.
        in_flight: most groups that are copied to the host and still occupy device memory; None: no limit.
        weights: offloaded weights; a handle is saved in place of each.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        layers: Sequence[tuple[str, torch.nn.Module]],
        sorter: Sorter,
        transfers: ActivationTransfers,
        *,
        offloaded: int,
        window: int,
        ahead: int,
        marks: Sequence[Mapping[torch.nn.Module, bool]] | None = None,
        in_flight: int | None = None,
        weights: OffloadedWeights | None = None,
    ) -> None:
        self._marked = marks is not None
        self._root = root
        self._names = [name for name, _ in layers]
        self._around = [
            {j for j, (_, outer) in enumerate(layers) if any(layer is inner for inner in outer.modules())}
            for _, layer in layers
        ]
        """Layers whose calls may contain each layer; a checkpoint around a layer counts as its own call."""
        self._sorter = sorter
        sorter.know(root, [layer for _, layer in layers])
        self._transfers = transfers
        self._offloaded = offloaded
        self._weights = weights
        self._hooked = offloaded if weights is None else max(offloaded, weights.count)
        self._window = window
        self._ahead = ahead
        self._stack = Stack()
        self._shared_inputs = SharedInputs()
        self._thread_guard = SingleThreadGuard()
        self._active: dict[int, list[tuple[StorageSpan, weakref.ref[TransferGroup]]]] = {}
        """Spans on the device, by the address of the storage object, which the span keeps alive."""
        self._unreleased: deque[LayerCall] = deque()
        self._in_flight = InFlightLimit(in_flight, self._release_groups)
        # With a limit, the first group of a layer would wait for the last group of the layer before.
        self._first_group_bytes = FIRST_GROUP_BYTES if in_flight is None else GROUP_BYTES
        self._last: weakref.ref[LayerCall] | None = None
        self._numbers = 0
        self._warned = False
        self._within = 0
        """Number of layer calls inside a checkpoint that was entered outside of the layer."""
        # All layers share one pair that never changes: compiled code is tied to the hooks it found installed.
        self._pair = (self._pack, self._unpack)
        self._handles: list[RemovableHandle] = []
        # The first call imports the compiler. Within a forward that would leave the frames of that forward, and its
        # graph with them, in tracebacks that the compiler's modules keep of optional imports that failed.
        call(None, "pre_forward")
        forget_compiled()
        for i, (_, layer) in enumerate(layers):
            self._handles.append(
                layer.register_forward_pre_hook(PreForwardHook(self, i), prepend=True, with_kwargs=True)
            )
            self._handles.append(layer.register_forward_hook(PostForwardHook(self, i), always_call=True))
        for module, leaves in (item for held in marks or () for item in held.items()):
            self._handles.append(module.register_forward_pre_hook(Mark(self, leaves), prepend=True))
            self._handles.append(module.register_forward_hook(Unmark(self), always_call=True))

    def close(self) -> None:
        """Remove the hooks; tensors that are offloaded already are still reloaded when backward needs them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._stack.calls:
            self._take_off()
        self._clean()

    # ---------------------------------------------------------------- forward

    def pre_forward(self, layer: int, inputs: object) -> None:
        """Start a layer call, or note that nothing is offloaded in it."""
        while self._stack.calls and self._stack.calls[-1][0] not in self._around[layer]:
            self._take_off()  # an interrupted forward never ended this call
        self._clean()
        recomputed = torch._C._current_graph_task_id() != -1
        self._refuse_traces(layer)
        if self._weights is not None and not recomputed:
            self._weights.require_no_backward(self._names[layer])
            self._thread_guard.enter(self._names[layer])
        inside = torch.is_grad_enabled() and not recomputed and inside_checkpoint()
        if not torch.is_grad_enabled() or inside or recomputed:
            if inside and self._unreleased and not any(outer is not None for _, outer in self._stack.calls):
                # Nothing of this call is offloaded, but what is of earlier ones falls out of the window.
                self._thread_guard.enter(self._names[layer])
                self._pass()
            self._stack.calls.append((layer, None))
            self._within += inside
            if (
                self._within >= 2 * len(self._names)
                and self._offloaded
                and not self._transfers.offloaded
                and not self._warned
            ):
                self._warned = True
                log.warning(
                    "nothing is offloaded: layers run inside checkpoints that begin outside of them, and keep nothing; "
                    "let the model checkpoint its layers itself, before attach()"
                )
            return
        self._thread_guard.enter(self._names[layer])
        try:
            self._open(layer, inputs)
        finally:
            self._not_running()  # in case _open raised

    def _open(self, layer: int, inputs: object) -> None:
        """Start a layer call: install the saved-tensor hooks and release the calls that fall out of the window."""
        if layer < self._hooked and torch._C._functorch.maybe_current_level() is not None:
            raise self._refused(layer, "what a functional transform computes with has no memory of its own")
        capture = self._transfers.enter() if self._offloaded else 0
        if layer == 0 or self._last is None:
            self._begin(capture)
        before = None if self._last is None else self._last()
        within = any(outer is not None for _, outer in self._stack.calls)
        layer_call = LayerCall(
            layer, self._numbers, before, self._shared_inputs.staying(inputs, within=within), capture
        )
        self._last = weakref.ref(layer_call)
        if layer < self._hooked:
            layer_call.around = _hooks_around()
            try:
                _autograd._push_saved_tensors_default_hooks(*self._pair)
            except RuntimeError as error:
                raise self._refused(layer, str(error)) from error
            layer_call.installed, layer_call.stream = True, self._transfers.stream()
        self._stack.calls.append((layer, layer_call))
        self._stack.marks.clear()
        self._pass()

    def _pass(self) -> None:
        """Count a layer call, and release the calls that fall out of the window."""
        self._numbers += 1
        while self._unreleased and self._unreleased[0].number < self._numbers - self._window:
            self._release(self._unreleased.popleft())

    def _refused(self, layer: int, why: str) -> ModelError:
        return ModelError(
            f"layer {self._names[layer]} cannot be offloaded here",
            why=why,
            fix="detach() before functorch transforms and disable_saved_tensors_hooks, or call the layers without them",
        )

    def _refuse_traces(self, layer: int) -> None:
        """Raise ModelError where a trace would hold the copies of offloading as operations of the model."""
        if self._weights is None and not (torch.is_grad_enabled() and layer < self._hooked):
            return
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if torch._C._get_tracing_state() is not None or (fake and self._weights is not None):
            raise ModelError(
                f"layer {self._names[layer]} is called inside {'torch.export' if fake else 'torch.jit.trace'}",
                why="what it does for offloading would become a part of the trace",
                fix="detach() before the trace",
            )

    def _begin(self, capture: int) -> None:
        """Start a forward, and warn once if the forward before has offloaded nothing."""
        self._sorter.refresh(self._root)
        self._shared_inputs.begin()
        self._transfers.begin(capture)
        if self._numbers and self._offloaded and not self._transfers.offloaded and not self._warned:
            self._warned = True
            kept = ", ".join(f"{why.value} ({nbytes:,} bytes)" for why, nbytes in self._sorter.kept_bytes.items())
            log.warning(
                "the first forward has offloaded nothing; what was saved stays because: %s (small: below %s bytes)",
                kept or "nothing was",
                f"{self._sorter.min_bytes:,}",
            )

    def mark(self, module: torch.nn.Module, leaves: bool) -> None:
        """Note that a marked module is about to run."""
        self._stack.marks.append((module, leaves))

    def unmark(self, module: torch.nn.Module) -> None:
        """Note that a marked module has returned or raised, or was never entered."""
        marks = self._stack.marks
        while any(inner is module for inner, _ in marks) and marks.pop()[0] is not module:
            pass

    def post_forward(self, layer: int, output: object) -> None:
        """End a layer call, whether the layer returned or raised.

        The hook does not run after KeyboardInterrupt and the like; it may run where `pre_forward` did not.
        """
        stack = self._stack.calls
        if not any(number == layer for number, _ in stack):
            return
        while stack:
            number, layer_call = stack.pop()
            try:
                if layer_call is not None:
                    if layer_call.installed:
                        self._pop()
                    self._finish(layer_call)
            finally:
                self._not_running()
            if number == layer:
                break
        if layer_call is not None:
            back = PreBackwardHook(weakref.ref(self), layer_call)
            for node in {tensor.grad_fn for tensor in tensors_of(output)}:
                if node is not None:
                    node.register_prehook(back)

    def _finish(self, layer_call: LayerCall) -> None:
        layer_call.around = None
        if layer_call.open is not None:
            self._send(layer_call)
        if layer_call.groups:
            self._unreleased.append(layer_call)
        self._in_flight.rest()
        if layer_call.capture and layer_call.layer == len(self._names) - 1:
            self._transfers.join()  # the capture may end here

    def _send(self, layer_call: LayerCall) -> None:
        group, layer_call.open = layer_call.open, None
        if group is not None:
            self._in_flight.add(group)
            layer_call.groups.append(weakref.ref(group))
            self._transfers.offload(f"{self._names[layer_call.layer]}", group)

    def _release(self, layer_call: LayerCall) -> None:
        layer_call.released = True
        self._release_groups(layer_call.alive())

    def _release_groups(self, groups: Sequence[TransferGroup]) -> None:
        for group in groups:
            for span in group.spans:
                if span.data is not None:
                    self._forget(span)
        self._transfers.release(groups)

    def _forget(self, span: StorageSpan) -> None:
        if span.data is not None:
            key = span.data.untyped_storage()._cdata
            kept = [entry for entry in self._active.get(key, ()) if entry[0] is not span]
            if kept:
                self._active[key] = kept
            else:
                self._active.pop(key, None)

    def held(self, layer: int, values: object) -> None:
        """Count tensors that a layer's checkpoint holds without saving them; they stay on the device.

        Args:
            layer: number of the layer that called the checkpoint.
            values: arguments that the checkpoint received by keyword or within containers.
        """
        layer_call = self._stack.calls[-1][1] if self._stack.calls else None
        if (
            layer_call is None
            or layer_call.layer != layer
            or not layer_call.installed
            or layer >= self._offloaded
            or self._marked
        ):
            return
        for tensor in {id(tensor): tensor for tensor in tensors_of(values)}.values():
            leaves = self._sorter.why_kept(tensor, layer_call.shared, layer) is None
            if leaves and tensor.untyped_storage()._cdata not in self._active:
                self._sorter.keep(tensor, Why.HELD)

    # ---------------------------------------------------------------- saved tensors

    # Compiled modules inside a layer save tensors too: otherwise the compiler would trace these two as their code.
    @_disable_dynamo
    def _pack(self, tensor: torch.Tensor) -> SavedTensorHandle | PassThrough | WeightHandle | PackedByOthers:
        layer_call = self._running()
        if layer_call is None or layer_call.around is None:
            return self._saved(layer_call, tensor)
        pack, unpack = layer_call.around
        packed = pack(tensor)
        if packed is tensor:
            return PackedByOthers(self._saved(layer_call, tensor), unpack, ours=True)
        self._sorter.count(tensor, Why.HOOKED)
        return PackedByOthers(packed, unpack, ours=False)

    def _running(self) -> LayerCall | None:
        """Return the innermost layer call of this thread in which tensors are saved."""
        return next((v for _, v in reversed(self._stack.calls) if v is not None), None)

    def _saved(
        self, layer_call: LayerCall | None, tensor: torch.Tensor
    ) -> SavedTensorHandle | PassThrough | WeightHandle:
        """Offload a tensor that is saved in a layer call, or let it stay."""
        if self._weights is not None and (weight := self._weights.pack(tensor)) is not None:
            return weight
        sorter = self._sorter
        if layer_call is None or layer_call.layer >= self._offloaded:
            return sorter.keep(tensor, Why.LAYER)
        if torch._C._current_graph_task_id() != -1:
            return sorter.keep(tensor, Why.RECOMPUTED)
        marks = self._stack.marks
        if self._marked and not (marks and marks[-1][1]):
            return sorter.keep(tensor, Why.MODULE)
        if self._transfers.stream() != layer_call.stream:
            return sorter.keep(tensor, Why.STREAM)
        why = sorter.why_kept(tensor, layer_call.shared, layer_call.layer)
        if why is not None:
            return sorter.keep(tensor, why)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            raise self._refused(layer_call.layer, "make_fx traces the operations on tensors that are offloaded")
        first, last = bytes_of(tensor)
        key = tensor.untyped_storage()._cdata
        entries = self._active.get(key, ())
        for span, ref in entries:
            group = ref()
            fits = span.start <= first and last <= span.start + span.nbytes and span.version == tensor._version
            if fits and group is not None and span.data is not None:
                return SavedTensorHandle(group, span, tensor)
        if layer_call.open is None:
            layer_call.open = TransferGroup(self._let_go, layer_call, layer_call.capture)
        group, span = layer_call.open, span_of(tensor, whole=bool(entries))
        group.add(span)
        self._active.setdefault(key, []).append((span, weakref.ref(group)))
        handle = SavedTensorHandle(group, span, tensor)
        if group.nbytes >= (GROUP_BYTES if layer_call.groups else self._first_group_bytes):
            self._send(layer_call)
        return handle

    def _let_go(self, group: TransferGroup) -> None:
        for span in group.spans:
            self._forget(span)
        self._transfers.let_go(group)

    @_disable_dynamo
    def _unpack(self, saved: SavedTensorHandle | PassThrough | WeightHandle | PackedByOthers) -> torch.Tensor:
        if isinstance(saved, PackedByOthers):
            return saved.unpack(self._unpack(saved.packed) if saved.ours else saved.packed)  # type: ignore[arg-type]
        if not isinstance(saved, SavedTensorHandle):
            return saved.unpack()
        saved.require_unmodified()
        span, group = saved.span, saved.group
        if span.data is not None:
            return saved.view_of(span.data)
        layer_call = group.layer_call
        if layer_call is not None and not layer_call.begun:
            self.pre_backward(layer_call)  # the node of the layer's output has been replaced, or was not used
        if span.held is None:
            self._transfers.reload(group, "on demand", on_demand=True)
        self._transfers.arrive(group, span)
        data = span.held
        if data is None:
            raise ModelError("a saved tensor is gone", why="its group was never offloaded")
        saved.unpacked()
        return saved.view_of(data)

    # ---------------------------------------------------------------- backward

    def pre_backward(self, layer_call: LayerCall) -> None:
        """Prefetch the tensors of a layer call and of the calls before it, as backward is about to reach its layer."""
        self._transfers.backward(layer_call.capture)
        layer_call.begun = True
        self._transfers.collect()
        if not layer_call.released and layer_call in self._unreleased:
            self._unreleased.remove(layer_call)  # still on the device, and needed now
        self._fetch(layer_call)
        earlier = layer_call
        for _ in range(self._window + self._ahead):
            before = None if earlier.before is None else earlier.before()
            if before is None or before.capture != layer_call.capture:
                break
            earlier = before
            self._fetch(earlier)

    def _fetch(self, layer_call: LayerCall) -> None:
        for group in reversed(layer_call.alive()):
            self._transfers.reload(group, self._names[layer_call.layer])

    # ---------------------------------------------------------------- the stack of hooks

    def _pop(self) -> None:
        if _autograd._top_saved_tensors_default_hooks(True) != self._pair:
            raise ModelError(
                "saved-tensor hooks cross the border of a layer",
                why="others were installed inside the layer and are on at its end, or were taken off too early",
                fix="enter and leave saved_tensors_hooks contexts on the same side of a layer's call",
            )
        _autograd._pop_saved_tensors_default_hooks()

    def _take_off(self) -> None:
        """End the innermost layer call without offloading what it saved."""
        _, layer_call = self._stack.calls.pop()
        self._not_running()
        ours = _autograd._top_saved_tensors_default_hooks(True) == self._pair
        if layer_call is not None and layer_call.installed and ours:
            _autograd._pop_saved_tensors_default_hooks()

    def _not_running(self) -> None:
        """Note that this thread runs no layer any more, if its outermost call has ended."""
        if not any(layer_call is not None or self._weights is not None for _, layer_call in self._stack.calls):
            self._thread_guard.leave()

    def _clean(self) -> None:
        """Remove our saved-tensor hooks outside of all layers, whatever other code did to the stack of hooks."""
        while not self._stack.calls and _autograd._top_saved_tensors_default_hooks(True) == self._pair:
            _autograd._pop_saved_tensors_default_hooks()


def _hooks_around() -> Hooks | None:
    """Return the saved-tensor hooks of other code that are on, beneath those of attached models; None: there are none.

    torch calls the innermost hooks only, so ours call these.
    """
    top: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
    owner = None if top is None else getattr(top[0], "__self__", None)
    if not isinstance(owner, LayerCalls):
        return top
    outer = owner._running()
    return None if outer is None else outer.around


# Layers of an attached model run in one thread at a time.


class SingleThreadGuard:
    """Raise if two threads run layers of one model at the same time.

    Autograd's threads are not registered; without offloaded weights, neither are threads that run without gradients.
    """

    def __init__(self) -> None:
        self._running: dict[int, threading.Thread] = {}

    def enter(self, layer: str) -> None:
        """Register this thread before it runs `layer`. Raises OrderingError if another thread runs a layer now."""
        me = threading.current_thread()
        # first, so that of two that begin at once one at least sees the other
        self._running[threading.get_ident()] = me
        others = [thread for thread in list(self._running.values()) if thread is not me and thread.is_alive()]
        if others:
            self.leave()
            raise OrderingError(
                f"layer {layer} is called in thread {me.name} while {others[0].name} runs a layer of the same model",
                why="prefetching for backward follows the order of layer calls, and two threads have no common order",
                fix="run forwards of an attached model one after the other (a lock around each step), or detach() it; "
                "where a forward was interrupted, attach anew",
            )

    def leave(self) -> None:
        """Unregister this thread."""
        self._running.pop(threading.get_ident(), None)


# A limit on groups of saved tensors that are copied to the host and whose device memory is not free yet.


class InFlightLimit:
    """Keep at most `most` groups in flight (None: no limit).

    `release` makes the compute stream wait for the copies of the oldest groups, and frees their device memory.
    """

    def __init__(self, most: int | None, release: Callable[[Sequence[TransferGroup]], None]) -> None:
        self._most = most
        self._release = release
        self._groups: deque[weakref.ref[TransferGroup]] = deque()

    def add(self, group: TransferGroup) -> None:
        """Register a group before it is offloaded. While its layer runs one group may be in flight, even at limit 0."""
        if self._most is not None:
            self._land(max(0, self._most - 1))
            self._groups.append(weakref.ref(group))

    def rest(self) -> None:
        """Enforce the limit after a layer has run."""
        if self._most is not None:
            self._land(self._most)

    def _land(self, most: int) -> None:
        while len(self._groups) > most:
            group = self._groups.popleft()()
            if group is not None:  # the window may have released it before
                self._release([group])
