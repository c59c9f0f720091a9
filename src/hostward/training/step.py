"""A training step carried out: the operations of its schedule, bound to buffers, issued as training reaches their
points.

`hostward.lowering.optimizer` decides what is issued when, and what waits for what.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hostward.engine.backend import Backend, Clipping
from hostward.errors import ModelError, NativeError, OrderingError
from hostward.inspect import Tracked
from hostward.lowering.optimizer import (
    STEP,
    StepShape,
    kept_apart,
    stage_point,
    unstage_point,
    use_point,
)
from hostward.plan import Placement
from hostward.schedule import Schedule

from .binding import Bindings, Memory, mixed_gradients
from .points import serialised
from .schedules import Schedules
from .slots import Slots
from .state import BucketState, pending_in_capture, pieces, require_arrived, require_no_capture
from .taking import TOGETHER, TakenGradients
from .targets import Targets
from .totals import Totals

log = logging.getLogger("hostward")


class StepIssuer(TakenGradients):
    """Carries out the schedule of steps for a fixed set of bucket states.

    Args:
        layers: the use point's layer of each bucket.
        slots: device staging of streamed buckets.
        totals: of the host buckets whose gradients are added up on the host.
        together: names of parameters whose gradients are made in one memory, for each such memory.
        holders: how many tensors always lie in the memory of a parameter's part here, itself among them. None: weights
            of which there are more do not arrive at once.
        overlap: False: everything happens within `step`.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        tracked: Mapping[str, Tracked],
        memory: Memory,
        *,
        layers: Sequence[str],
        slots: Slots,
        totals: Totals,
        together: Iterable[Sequence[str]],
        holders: Callable[[Tracked], int] | None,
        overlap: bool,
        use_torch_optimizer: bool,
    ) -> None:
        self._tracked = tracked
        self._slots = slots
        self._layers = tuple(layers)
        self._overlap = overlap
        index = {state: b for b, state in enumerate(states)}
        # Of some sharded parameters this process may have nothing.
        held_by = dict.fromkeys(tracked, ()) | pieces(states)
        self._parts = {
            name: [(index[s], i, slice(r.start, r.stop) if len(held) > 1 else None) for s, i, r in held]
            for name, held in held_by.items()
        }
        """By parameter: bucket, range, and which elements; None: all."""
        self._of_bucket = [tuple(dict.fromkeys(r.name for r in s.bucket.ranges)) for s in states]
        memories = [{b for name in names for b, *_ in self._parts[name]} for names in together]
        self._apart = kept_apart([s.placement for s in states], memories) if overlap else frozenset()
        # Those whose new values come from elsewhere: what the compute lane steps is there for whatever it does next.
        self._layers_of = {
            name: {layers[index[s]] for s, _, _ in held if s.placement is not Placement.DEVICE}
            for name, held in held_by.items()
        }
        self._read_with = {name: {layers[index[s]] for s, _, _ in held} for name, held in held_by.items()}
        """By parameter: the layers whose use points everything that its bytes hold comes before."""
        self._holders_count = holders is not None
        self._targets = Targets(backend, states, tracked, holders or (lambda _: 1))
        bindings = Bindings(backend, states, memory, slots, totals, self._targets, by_torch=use_torch_optimizer)
        super().__init__(backend, states, bindings, totals)
        self._uses = dict.fromkeys(layers)
        self._streamed_of: dict[str, list[int]] = {}
        for b, state in enumerate(states):
            if state.placement is Placement.STREAMED:
                self._streamed_of.setdefault(layers[b], []).append(b)
        self.pending: set[str] = set()
        """Layers whose weights have not been waited for since the last step."""
        self._unreported: set[str] = set()
        """Those that backward found so: their weights have arrived then, but no use of them was ever reported."""
        self._waited: dict[str, set[int]] = {}
        """By layer: the streams that have waited for its weights since the last step."""
        self.read_by_graph = False
        """Weights were read while a CUDA graph was captured: its replay reads them again, and nothing tells of that."""
        self.shared: frozenset[str] = frozenset()
        """Names of weights that others held memory of when the last step ended: they arrived at once."""
        self._lower()
        self._reset()
        # What is pending writes to memory that this object holds.
        weakref.finalize(self, backend.drain)

    def _lower(self) -> None:
        """Make the schedule anew: slots have changed. Nothing is pending."""
        placements = tuple(s.placement for s in self._states)
        slots = self._slots
        shape = StepShape(
            placements,
            self._layers,
            slots=slots.count,
            ahead=slots.ahead,
            transient=slots.transient,
            overlap=self._overlap,
            summed=self._totals.summed,
            fetched=frozenset(b for b, names in enumerate(self._of_bucket) if set(names) <= self.fetched),
        )
        schedules = Schedules(shape)
        self._plan_uploads(shape)
        self._schedules, self._points = schedules, schedules.points()
        self._bindings.forget()
        self._shape = shape  # last: an interrupt before this is noticed below

    def _follow_slots(self) -> None:
        """An interrupt may have come between the settling of slots and the schedule for them."""
        if (self._shape.slots, self._shape.ahead) != (self._slots.count, self._slots.ahead):
            self._lower()

    @property
    def schedule(self) -> Schedule:
        """That of a turn in which every bucket has a gradient."""
        return self._schedules.whole

    def _reset(self) -> None:
        """No turn is on."""
        self.turning = False
        self._held: dict[str, torch.Tensor] = {}
        self._chosen = [set() for _ in self._states]
        self._fresh = [set() for _ in self._states]
        self._reported: set[int] = set()
        self._in_flight: deque[int] = deque()
        self._staged = 0
        self._made_on: set[int] = set()
        self._totals.reset()

    def forget_step_bound(self) -> None:
        """Step counts were loaded: look them up again before the next step."""
        self._bindings.forget_step_bound()

    # ---------------------------------------------------------------- during backward

    def require_used(self, name: str) -> None:
        """Backward has made a gradient of this parameter. Raises OrderingError if forward never reported its use."""
        missed = (self.pending | self._unreported) & self._layers_of[name] if self.pending or self._unreported else ()
        if missed:
            raise OrderingError(
                f"parameter {name!r} of layer {min(missed)!r} was used before its new value had arrived",
                why="its forward ran without the hooks that wait for it: the module was not called, or by compiled "
                "code that knows nothing of them",
                fix="call the module, call optimizer.arrive() before reading weights in another way, or "
                "torch.compiler.reset() after making the optimizer",
            )

    @serialised
    def discard(self) -> None:
        """No step will be made with what was taken; its memory goes back."""
        if not self.turning:
            return
        self._release_all()
        self._drop(range(len(self._states)))
        staged = self._staged
        self._reset()
        # What has been read stays in its slots, and counts for the turn that follows.
        self.turning, self._staged = True, staged
        self._points = self._schedules.points()  # a step that was cut short may have left those without absent buckets

    def _begin(self) -> None:
        unreported = set(self.pending)
        self.use_all()
        self._unreported = unreported
        self._follow_slots()
        self._bindings.trim()
        try:
            self._backend.begin_turn()
        except NativeError:
            self.torn = True
            raise
        self._points = self._schedules.points()
        self.turning = True

    def _stage(self, slots: int) -> None:
        if self._shape.transient:
            self._slots.acquire(slots)
        filled = min(slots, self._slots.ahead)
        while self._staged < filled:
            self._slots.pace.begins()
            self._issue_point(stage_point(self._staged))
            self._slots.pace.issued()
            self._staged += 1
        if self._staged < slots:
            self._issue_point(*map(stage_point, range(self._staged, slots)))
            self._staged = slots

    def _unstage(self, slots: Sequence[int]) -> None:
        if slots:
            self._issue_point(*map(unstage_point, slots))
            self._slots.give_back(slots)

    # ---------------------------------------------------------------- the step

    def check(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Raises ModelError for gradients that cannot be stepped, before anything is changed, at any placement; and
        while a CUDA graph is captured.
        """
        require_no_capture(self._backend)
        dtypes = {name: gradient.dtype for name, gradient in gradients.items()}
        if not any(self._fresh) and len(set(dtypes.values())) <= 1:
            return
        for b, state in enumerate(self._states):
            found = {self._gradients[b][i].data.dtype for i in self._fresh[b] if b not in self._reported}
            found.update(dtypes[name] for name in self._of_bucket[b] if name in dtypes)
            if len(found) > 1:
                raise mixed_gradients(state, sorted(map(str, found)))

    @serialised
    def step(self, groups: Sequence[Mapping[str, Any]], clipping: Clipping) -> None:
        """Step every range whose gradient was taken. `clipping` is this step's."""
        if not self.turning:
            self._begin()
        self.forward_is_here()
        self._before_step()
        self._bindings.set_constants(groups)
        for name in ("max_norm", "inv_scale", "found_inf", "overflow_out"):
            setattr(self._bindings.clipping, name, getattr(clipping, name))
        scattered = self._targets.refresh(dict.fromkeys(self._stepped()))
        for b in reversed(range(len(self._states))):
            if self._chosen[b]:
                if b not in self._reported:
                    self._gradient_point(b)
                self._clear_missing(b)
        absent = frozenset(b for b, chosen in enumerate(self._chosen) if not chosen)
        self._points = self._schedules.points(absent)
        self._release_all()
        if self._staged < self._slots.count:
            self._stage(self._slots.count)
        self._slots.pace.backward_is_over()
        self._issue_point(STEP)
        self._backend.end_turn()
        self._end(scattered)

    def _stepped(self) -> Iterator[str]:
        """Names of parameters with a gradient, some more than once."""
        for b, chosen in enumerate(self._chosen):
            if len(chosen) == len(self._gradients[b]):
                yield from self._of_bucket[b]
            else:
                ranges = self._states[b].bucket.ranges
                yield from (ranges[i].name for i in chosen)

    def _end(self, scattered: bool) -> None:
        """Everything of the step has been issued but the arrivals."""
        self._drop(b for b, s in enumerate(self._states) if s.placement is not Placement.STREAMED)
        self._last_chosen = self._chosen
        self._reset()
        self.pending = set(self._uses)
        self._unreported.clear()
        self._after_step()
        self._use_shared()
        if not self._shape.overlap or scattered or self.read_by_graph:
            self.use_all()
        if scattered:
            self._targets.scatter()
        if self._slots.settle():
            self.use_all()
            self._lower()

    def _use_shared(self) -> None:
        """A view that was kept, or `.data`, is read without the weight: what others hold memory of arrives at once."""
        if self._holders_count:
            shared = self._targets.shared().union(() if self._residency is None else self._residency.use_held())
        else:
            shared = frozenset()
        if shared != self.shared and shared:
            log.info(
                "%d weights arrive at the end of step(), because others hold their memory (views, .data): %s%s",
                len(shared), ", ".join(sorted(shared)[:5]), ", ..." if len(shared) > 5 else "",
            )  # fmt: skip
        self.shared = shared
        wanted = {layer for name in shared for layer in self._read_with[name]}
        for layer in [layer for layer in self._uses if layer in wanted]:
            self.use(layer)

    @serialised
    def read(self, names: Sequence[str]) -> None:
        """The caller is about to read or write these weights, outside of their layers' forward or before it: the
        stream that is current waits for them.

        Raises:
            ModelError: they are on their way while a CUDA graph is captured.
        """
        if self.issuing:
            return  # by the step's own operations, which somebody's dispatch mode looks at
        backend = self._backend
        if backend.capturing():
            for name in names:
                if not self.pending.isdisjoint(self._layers_of[name]):
                    raise pending_in_capture(f"weight {name!r} is")
                self.read_by_graph = self.read_by_graph or bool(self._layers_of[name])
            return
        stream = None if backend.at_compute() else backend.caller_stream()
        for layer in dict.fromkeys(layer for name in names for layer in self._read_with[name]):
            if stream is None:
                self.use(layer)
            else:  # the compute lane need not wait for what this stream does besides
                self.hold(layer, stream)

    @serialised
    def use(self, layer: str) -> None:
        """The caller is about to use a layer's weights: its stream waits for them, and for nothing else."""
        self._unreported.discard(layer)
        if not self.read_by_graph and self._backend.capturing():
            self.read_by_graph = True
        if layer in self.pending:
            self._use([layer])
        elif (key := self._backend.compute_key()) not in self._waited.get(layer, (key,)):
            self._waited[layer].add(key)
            if (stream := self._backend.caller_stream()) is not None:
                self.hold(layer, stream)

    def forward_is_here(self) -> None:
        """The caller's forward and backward run on the stream that is current, or begin there: under FSDP2 that of
        forward, else, as far as is known, that of `step`. Staging takes memory of theirs, also where gradients come on
        another one.
        """
        self._slots.stream = self._backend.caller_stream()

    @serialised
    def use_all(self) -> None:
        """The same for all layers."""
        self._unreported.clear()
        layers = [layer for layer in self._uses if layer in self.pending]
        at_once = 1 if self._uploads else TOGETHER  # points of uploads stand between those of uses
        for first in range(0, len(layers), at_once):
            self._use(layers[first : first + at_once])

    def _use(self, layers: Sequence[str]) -> None:
        """These are pending, and used now; several at once where no upload waits for a use."""
        require_arrived(self._backend, layers[0])
        self._unstage(self._slots.held if len(self.pending) == len(layers) else self._slots.wanted_back(layers))
        for layer in layers:
            self._slots.sample_use(layer)
        self._upload(layers)
        self._issue_point(*map(use_point, layers))
        key = self._backend.compute_key()
        for layer in layers:
            self._waited[layer] = {key}
            self._upload_behind(layer)
        self.pending.difference_update(layers)
        self._drop(b for layer in layers for b in self._streamed_of.get(layer, ()))

    # ---------------------------------------------------------------- binding

    def require_whole(self) -> None:
        """Raises ModelError while the state is torn."""
        if self.torn:
            raise ModelError(
                "a step was interrupted half way",
                why="some buckets have taken it and others have not, so the state belongs to no step",
                fix="load the last checkpoint into model and optimizer (load_state_dict makes the optimizer whole)",
            )

    def synchronise(self) -> None:
        """Return when all lanes are empty. Raises NativeError for a host step that failed; the state is torn then."""
        try:
            self._backend.synchronise()
        except NativeError:
            self.torn = True
            raise

    def state_changed(self) -> None:
        """State on the host was written between empty lanes: what has been staged of it is read again."""
        self._staged = 0

    @serialised
    def abort(self) -> None:
        """Forget the turn that was cut short. All lanes are empty, and the state is about to be replaced."""
        self.pending.clear()
        self._slots.give_back(self._slots.held)
        self._drop(range(len(self._states)))
        self._reset()
        self._follow_slots()
        self._points = self._schedules.points()
