"""Calls of layers, by hooks: where saved tensors come from, and where backward is.

A visit is one call of a layer. Its hooks install `pack` and `unpack` for what autograd saves within. They only tell
what comes next, so that it is there in time; that a tensor comes back at all, and as it was, rests on `unpack` alone.
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
    Given,
    Group,
    Handle,
    Kept,
    Sorter,
    Span,
    Stack,
    Visit,
    Why,
    bytes_of,
    span_of,
)
from hostward.activations.transfers import Movement
from hostward.errors import ModelError, OrderingError
from hostward.model.autograd import inside_checkpoint, tensors_of
from hostward.model.layer_hooks import Back, Enter, Leave, Mark, Unmark, call, forget_compiled
from hostward.schedule.activations import FIRST_GROUP_BYTES, GROUP_BYTES

if TYPE_CHECKING:
    from hostward.weights.offload import OffloadedWeights, WeightHandle


log = logging.getLogger("hostward")

_autograd = torch._C._autograd


class Visits:
    """Hooks of layers.

    Args:
        root: whose weights and buffers stay.
        layers: in order of use.
        offloaded: the first of them whose saved tensors leave.
        window: so many visits' tensors stay on the device.
        ahead: reloads come so many visits earlier than needed to keep the window.
        marks: by layer, modules within whose calls saved tensors leave (True) or stay (False); None: all leave.
        in_flight: so many groups at most have left and are still on the device; None: as many as there are.
        weights: those that come and go; what is saved of them is a handle.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        layers: Sequence[tuple[str, torch.nn.Module]],
        sorter: Sorter,
        movement: Movement,
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
        """By layer, those whose calls it may be within: a checkpoint around it counts as a call of itself."""
        self._sorter = sorter
        sorter.know(root, [layer for _, layer in layers])
        self._movement = movement
        self._offloaded = offloaded
        self._weights = weights
        self._hooked = offloaded if weights is None else max(offloaded, weights.count)
        self._window = window
        self._ahead = ahead
        self._stack = Stack()
        self._given = Given()
        self._alone = Alone()
        self._active: dict[int, list[tuple[Span, weakref.ref[Group]]]] = {}
        """Spans on the device, by the storage's object: they hold it, so that the address is its own."""
        self._unreleased: deque[Visit] = deque()
        self._in_flight = InFlight(in_flight, self._release_groups)
        # Under a bound the first group of a layer would wait for the last of the layer before.
        self._first_group_bytes = FIRST_GROUP_BYTES if in_flight is None else GROUP_BYTES
        self._last: weakref.ref[Visit] | None = None
        self._numbers = 0
        self._warned = False
        self._within = 0
        """Calls of layers inside a checkpoint that began outside."""
        # One pair for all layers and for ever: compiled code is tied to what it found installed.
        self._pair = (self._pack, self._unpack)
        self._handles: list[RemovableHandle] = []
        # The first call imports the compiler. Within a forward that would leave the frames of that forward, and its
        # graph with them, in tracebacks that the compiler's modules keep of optional imports that failed.
        call(None, "enter")
        forget_compiled()
        for i, (_, layer) in enumerate(layers):
            self._handles.append(layer.register_forward_pre_hook(Enter(self, i), prepend=True, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(Leave(self, i), always_call=True))
        for module, leaves in (item for held in marks or () for item in held.items()):
            self._handles.append(module.register_forward_pre_hook(Mark(self, leaves), prepend=True))
            self._handles.append(module.register_forward_hook(Unmark(self), always_call=True))

    def close(self) -> None:
        """Take the hooks off. What has been saved stays, and comes back when backward asks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._stack.visits:
            self._take_off()
        self._clean()

    # ---------------------------------------------------------------- forward

    def enter(self, layer: int, inputs: object) -> None:
        """A layer is about to run."""
        while self._stack.visits and self._stack.visits[-1][0] not in self._around[layer]:
            self._take_off()  # what an interrupted forward has left
        self._clean()
        recomputed = torch._C._current_graph_task_id() != -1
        inside = torch.is_grad_enabled() and not recomputed and inside_checkpoint()
        if not torch.is_grad_enabled() or inside or recomputed:
            self._stack.visits.append((layer, None))
            self._within += inside
            if (
                self._within >= 2 * len(self._names)
                and self._offloaded
                and not self._movement.offloaded
                and not self._warned
            ):
                self._warned = True
                log.warning(
                    "nothing is offloaded: layers run inside checkpoints that begin outside of them, and keep nothing; "
                    "let the model checkpoint its layers itself, before attach()"
                )
            return
        self._alone.enter(self._names[layer])
        try:
            self._open(layer, inputs)
        finally:
            self._not_running()  # where that has failed

    def _open(self, layer: int, inputs: object) -> None:
        """A visit begins."""
        if layer < self._hooked and torch._C._functorch.maybe_current_level() is not None:
            raise self._refused(layer, "what a functional transform computes with has no memory of its own")
        capture = self._movement.enter() if self._offloaded else 0
        if layer == 0 or self._last is None:
            self._begin(capture)
        before = None if self._last is None else self._last()
        within = any(outer is not None for _, outer in self._stack.visits)
        visit = Visit(layer, self._numbers, before, self._given.staying(inputs, within=within), capture)
        self._numbers += 1
        self._last = weakref.ref(visit)
        if layer < self._hooked:
            try:
                _autograd._push_saved_tensors_default_hooks(*self._pair)
            except RuntimeError as error:
                raise self._refused(layer, str(error)) from error
            visit.installed, visit.stream = True, self._movement.stream()
        self._stack.visits.append((layer, visit))
        self._stack.marks.clear()
        while self._unreleased and self._unreleased[0].number <= visit.number - self._window:
            self._release(self._unreleased.popleft())

    def _refused(self, layer: int, why: str) -> ModelError:
        return ModelError(
            f"layer {self._names[layer]} cannot be offloaded here",
            why=why,
            fix="detach() before functorch transforms, or call the layers without them",
        )

    def _begin(self, capture: int) -> None:
        """A forward begins."""
        self._sorter.refresh(self._root)
        self._given.begin()
        self._movement.begin(capture)
        if self._numbers and self._offloaded and not self._movement.offloaded and not self._warned:
            self._warned = True
            kept = ", ".join(f"{why.value} ({nbytes:,} bytes)" for why, nbytes in self._sorter.kept_bytes.items())
            log.warning(
                "the first forward has offloaded nothing; what was saved stays because: %s (small: below %s bytes)",
                kept or "nothing was",
                f"{self._sorter.min_bytes:,}",
            )

    def mark(self, module: torch.nn.Module, leaves: bool) -> None:
        """A marked module is about to run."""
        self._stack.marks.append((module, leaves))

    def unmark(self, module: torch.nn.Module) -> None:
        """It has run, or failed; or never began."""
        marks = self._stack.marks
        while any(inner is module for inner, _ in marks) and marks.pop()[0] is not module:
            pass

    def leave(self, layer: int, output: object) -> None:
        """A layer has run, or failed: its hook is called in any case but for KeyboardInterrupt and the like, and even
        where `enter` was not.
        """
        stack = self._stack.visits
        if not any(number == layer for number, _ in stack):
            return
        while stack:
            number, visit = stack.pop()
            try:
                if visit is not None:
                    if visit.installed:
                        self._pop()
                    self._finish(visit)
            finally:
                self._not_running()
            if number == layer:
                break
        if visit is not None:
            back = Back(weakref.ref(self), visit)
            for node in {tensor.grad_fn for tensor in tensors_of(output)}:
                if node is not None:
                    node.register_prehook(back)

    def _finish(self, visit: Visit) -> None:
        if visit.open is not None:
            self._send(visit)
        if visit.groups:
            self._unreleased.append(visit)
        self._in_flight.rest()
        if visit.capture and visit.layer == len(self._names) - 1:
            self._movement.join()  # the capture may end here

    def _send(self, visit: Visit) -> None:
        group, visit.open = visit.open, None
        if group is not None:
            self._in_flight.add(group)
            visit.groups.append(weakref.ref(group))
            self._movement.offload(f"{self._names[visit.layer]}", group)

    def _release(self, visit: Visit) -> None:
        visit.released = True
        self._release_groups(visit.alive())

    def _release_groups(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for span in group.spans:
                if span.data is not None:
                    self._forget(span)
        self._movement.release(groups)

    def _forget(self, span: Span) -> None:
        if span.data is not None:
            key = span.data.untyped_storage()._cdata
            kept = [entry for entry in self._active.get(key, ()) if entry[0] is not span]
            if kept:
                self._active[key] = kept
            else:
                self._active.pop(key, None)

    def held(self, layer: int, values: object) -> None:
        """A layer has called a checkpoint that was given these in a way in which it holds tensors, and saves none."""
        visit = self._stack.visits[-1][1] if self._stack.visits else None
        if visit is None or visit.layer != layer or not visit.installed or layer >= self._offloaded or self._marked:
            return
        for tensor in {id(tensor): tensor for tensor in tensors_of(values)}.values():
            leaves = self._sorter.why_kept(tensor, visit.shared, layer) is None
            if leaves and tensor.untyped_storage()._cdata not in self._active:
                self._sorter.keep(tensor, Why.HELD)

    # ---------------------------------------------------------------- what autograd saves

    # Compiled modules inside a layer save tensors too: without this the compiler would take these two for their code.
    @_disable_dynamo
    def _pack(self, tensor: torch.Tensor) -> Handle | Kept | WeightHandle:
        if self._weights is not None and (weight := self._weights.pack(tensor)) is not None:
            return weight
        visit = next((v for _, v in reversed(self._stack.visits) if v is not None), None)
        sorter = self._sorter
        if visit is None or visit.layer >= self._offloaded:
            return sorter.keep(tensor, Why.LAYER)
        if torch._C._current_graph_task_id() != -1:
            return sorter.keep(tensor, Why.RECOMPUTED)
        marks = self._stack.marks
        if self._marked and not (marks and marks[-1][1]):
            return sorter.keep(tensor, Why.MODULE)
        if self._movement.stream() != visit.stream:
            return sorter.keep(tensor, Why.STREAM)
        why = sorter.why_kept(tensor, visit.shared, visit.layer)
        if why is not None:
            return sorter.keep(tensor, why)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            raise self._refused(visit.layer, "make_fx writes down what is done to the tensors that leave")
        first, last = bytes_of(tensor)
        key = tensor.untyped_storage()._cdata
        entries = self._active.get(key, ())
        for span, ref in entries:
            group = ref()
            fits = span.start <= first and last <= span.start + span.nbytes and span.version == tensor._version
            if fits and group is not None and span.data is not None:
                return Handle(group, span, tensor)
        if visit.open is None:
            visit.open = Group(self._let_go, visit, visit.capture)
        group, span = visit.open, span_of(tensor, whole=bool(entries))
        group.add(span)
        self._active.setdefault(key, []).append((span, weakref.ref(group)))
        handle = Handle(group, span, tensor)
        if group.nbytes >= (GROUP_BYTES if visit.groups else self._first_group_bytes):
            self._send(visit)
        return handle

    def _let_go(self, group: Group) -> None:
        for span in group.spans:
            self._forget(span)
        self._movement.let_go(group)

    @_disable_dynamo
    def _unpack(self, saved: Handle | Kept | WeightHandle) -> torch.Tensor:
        if not isinstance(saved, Handle):
            return saved.unpack()
        saved.require_unmodified()
        span, group = saved.span, saved.group
        if span.data is not None:
            return saved.view_of(span.data)
        visit = group.visit
        if visit is not None and not visit.begun:
            self.back(visit)  # its output's node has been replaced, or was not used
        if span.held is None:
            self._movement.reload(group, "on demand", on_demand=True)
        self._movement.arrive(group, span)
        data = span.held
        if data is None:
            raise ModelError("a saved tensor is gone", why="its group was never sent")
        saved.unpacked()
        return saved.view_of(data)

    # ---------------------------------------------------------------- backward

    def back(self, visit: Visit) -> None:
        """Backward is about to go through the layer of a visit: what the visits before it saved is fetched."""
        self._movement.backward(visit.capture)
        visit.begun = True
        self._movement.collect()
        if not visit.released and visit in self._unreleased:
            self._unreleased.remove(visit)  # still here, and needed now
        self._fetch(visit)
        earlier = visit
        for _ in range(self._window + self._ahead):
            before = None if earlier.before is None else earlier.before()
            if before is None or before.capture != visit.capture:
                break
            earlier = before
            self._fetch(earlier)

    def _fetch(self, visit: Visit) -> None:
        for group in reversed(visit.alive()):
            self._movement.reload(group, self._names[visit.layer])

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
        """Leave the innermost visit without looking at what it saved."""
        _, visit = self._stack.visits.pop()
        self._not_running()
        ours = _autograd._top_saved_tensors_default_hooks(True) == self._pair
        if visit is not None and visit.installed and ours:
            _autograd._pop_saved_tensors_default_hooks()

    def _not_running(self) -> None:
        """Note that this thread has left its outermost layer, if it has."""
        if not any(visit is not None for _, visit in self._stack.visits):
            self._alone.leave()

    def _clean(self) -> None:
        """Outside all layers nothing of ours is installed, whatever others did to the stack of hooks."""
        while not self._stack.visits and _autograd._top_saved_tensors_default_hooks(True) == self._pair:
            _autograd._pop_saved_tensors_default_hooks()


# One thread at a time runs the layers of an attached model: noticing that several do.


class Alone:
    """Threads that are within a layer. Backward's own threads, and those that evaluate, are not to be noted."""

    def __init__(self) -> None:
        self._running: dict[int, threading.Thread] = {}

    def enter(self, layer: str) -> None:
        """This thread is about to run `layer`. Raises OrderingError where another one runs one now."""
        me = threading.current_thread()
        # first, so that of two that begin at once one at least sees the other
        self._running[threading.get_ident()] = me
        others = [thread for thread in list(self._running.values()) if thread is not me and thread.is_alive()]
        if others:
            self.leave()
            raise OrderingError(
                f"layer {layer} is called in thread {me.name} while {others[0].name} runs a layer of the same model",
                why="what backward needs next is known from the order of the layers' calls, and two threads have none",
                fix="run forwards of an attached model one after the other (a lock around each step), or detach() it; "
                "where a forward was interrupted, attach anew",
            )

    def leave(self) -> None:
        """This thread runs no layer."""
        self._running.pop(threading.get_ident(), None)


# A bound on groups of saved tensors that have left for the host and whose device memory is not free yet.


class InFlight:
    """At most `most` groups; None: no bound. `release` lets the compute lane wait for their copies and drops them."""

    def __init__(self, most: int | None, release: Callable[[Sequence[Group]], None]) -> None:
        self._most = most
        self._release = release
        self._groups: deque[weakref.ref[Group]] = deque()

    def add(self, group: Group) -> None:
        """A group is about to be sent. While the layer runs that it comes from there may be one, though there be none
        afterwards.
        """
        if self._most is not None:
            self._land(max(0, self._most - 1))
            self._groups.append(weakref.ref(group))

    def rest(self) -> None:
        """A layer has run."""
        if self._most is not None:
            self._land(self._most)

    def _land(self, most: int) -> None:
        while len(self._groups) > most:
            group = self._groups.popleft()()
            if group is not None:  # the window may have released it before
                self._release([group])
