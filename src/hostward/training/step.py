"""A training step carried out: the operations of its schedule, bound to buffers, issued as training reaches their
points.

`hostward.lowering.optimizer` decides what is issued when, and what waits for what.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hostward.engine.backend import Backend, Clipping
from hostward.errors import ModelError, NativeError, OrderingError
from hostward.inspect import Tracked
from hostward.lowering.optimizer import (
    GRADIENTS_IN_FLIGHT,
    STAGE,
    STEP,
    UNSTAGE,
    StepShape,
    gradient_point,
    release_point,
    use_point,
)
from hostward.plan import Placement
from hostward.schedule import Lane, Schedule

from .binding import Bindings, Memory, mixed_gradients
from .fetched import FetchedWeights
from .gradients import Gradient
from .schedules import Schedules
from .slots import Slots
from .state import BucketState, pieces, require_no_capture
from .targets import Targets
from .totals import Totals


class StepIssuer(FetchedWeights):
    """Carries out the schedule of steps for a fixed set of bucket states.

    Args:
        layers: the use point's layer of each bucket.
        slots: device staging of streamed buckets.
        totals: of the host buckets whose gradients are added up on the host.
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
        overlap: bool,
        use_torch_optimizer: bool,
    ) -> None:
        self._tracked = tracked
        self._slots = slots
        self._layers = tuple(layers)
        self._overlap = overlap
        index, held_by = {state: b for b, state in enumerate(states)}, pieces(states)
        self._parts = {
            name: [(index[s], i, slice(r.start, r.stop) if len(held) > 1 else None) for s, i, r in held]
            for name, held in held_by.items()
        }
        """By parameter: bucket, range, and which elements; None: all."""
        self._of_bucket = [tuple(dict.fromkeys(r.name for r in s.bucket.ranges)) for s in states]
        # Those whose new values come from elsewhere: what the compute lane steps is there for whatever it does next.
        self._layers_of = {
            name: {layers[index[s]] for s, _, _ in held if s.placement is not Placement.DEVICE}
            for name, held in held_by.items()
        }
        self._targets = Targets(backend, states, tracked)
        bindings = Bindings(backend, states, memory, slots, totals, self._targets, by_torch=use_torch_optimizer)
        super().__init__(backend, states, bindings, totals)
        self._uses = dict.fromkeys(layers)
        self._streamed_of: dict[str, list[int]] = {}
        for b, state in enumerate(states):
            if state.placement is Placement.STREAMED:
                self._streamed_of.setdefault(layers[b], []).append(b)
        self._nothing = torch.empty(0, device="cpu")
        self.pending: set[str] = set()
        """Layers whose weights have not been waited for since the last step."""
        self._unreported: set[str] = set()
        """Those that backward found so: their weights have arrived then, but no use of them was ever reported."""
        self._unstaged = True
        self._lower()
        self._reset()
        # What is pending writes to memory that this object holds.
        weakref.finalize(self, backend.drain)

    def _lower(self) -> None:
        """Make the schedule anew: slots have changed. Nothing is pending."""
        placements = tuple(s.placement for s in self._states)
        slots = self._slots
        self._shape = StepShape(
            placements,
            self._layers,
            slots=slots.count,
            transient=slots.transient,
            overlap=self._overlap,
            summed=self._totals.summed,
            fetched=frozenset(b for b, names in enumerate(self._of_bucket) if set(names) <= self.fetched),
        )
        self._plan_uploads(self._shape)
        self._schedules = Schedules(self._shape)
        self._points = self._schedules.points()
        self._bindings.forget()

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
        self._staged = False
        self._totals.reset()

    def forget_step_bound(self) -> None:
        """Step counts were loaded: look them up again before the next step."""
        self._bindings.forget_step_bound()

    # ---------------------------------------------------------------- during backward

    def take(self, gradient: Gradient, *, last: bool = True) -> None:
        """A gradient is final, or that of a microbatch is. Once all those of a bucket are, its gradient point has come.

        Args:
            last: no further microbatch is known to come.

        Raises:
            ModelError: gradients of one bucket differ in dtype.
        """
        if not self.turning:
            self._begin()
        flat = self._held[gradient.name] = gradient.flat
        summed = self._totals.summed
        for b, i, span in self._parts.get(gradient.name, ()):
            if b in summed and b in self._reported:
                if b in self._in_flight:
                    self._in_flight.remove(b)  # of the microbatch before
                    self._release(b)
                self._reported.discard(b)
            self._backend.refill(self._gradients[b][i], flat if span is None else flat[span])
            self._chosen[b].add(i)
            self._fresh[b].add(i)
            there = self._fresh[b] if b in summed else self._chosen[b]
            if len(there) == len(self._gradients[b]):
                self._gradient_point(b, last=last)

    def require_used(self, name: str) -> None:
        """Backward has made a gradient of this parameter. Raises OrderingError if forward never reported its use."""
        missed = (self.pending | self._unreported) & self._layers_of.get(name, set())
        if missed:
            raise OrderingError(
                f"parameter {name!r} of layer {min(missed)!r} was used before its new value had arrived",
                why="its forward ran without the hooks that wait for it: the module was not called, or by compiled "
                "code that knows nothing of them",
                fix="call the module, call optimizer.arrive() before reading weights in another way, or "
                "torch.compiler.reset() after making the optimizer",
            )

    def flush(self, name: str | None = None, *, last: bool = False) -> None:
        """Let gradients that wait for others of their bucket be added to the totals: that of one parameter, because it
        is about to get another one, or all.
        """
        if name is None:
            waiting = [b for b in self._totals.summed if self._fresh[b]]
        else:
            parts = self._parts.get(name, ())
            waiting = [b for b, i, _ in parts if b in self._totals.summed and i in self._fresh[b]]
        for b in sorted(waiting, reverse=True):
            self._gradient_point(b, last=last)

    def give_back(self, name: str) -> torch.Tensor:
        """Return a taken gradient, flat, because more will be added to it; `take` will be called for it again."""
        parameter, parts = self._tracked[name].local, self._parts.get(name, ())
        held = self._held.pop(name, None)
        # Autograd adds in place: not while a copy still reads.
        waits = [self._bindings.events[f"download/{b}"] for b, *_ in parts if b in self._reported]
        self._backend.mark("offload/gradient/kept", Lane.COMPUTE, waits=waits).issue()
        if held is None:
            dtype = next(self._states[b].gradients[i].data.dtype for b, i, _ in parts if self._states[b].gradients)
            held = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
            for b, i, span in parts:
                target = held if span is None else held[span]
                if self._gradients[b][i].data.numel():
                    target.copy_(self._gradients[b][i].data)
                else:
                    self._fetch_back(b, i, target)
        for b, i, _ in parts:
            self._gradients[b][i].data = self._nothing
            self._chosen[b].discard(i)
            self._fresh[b].discard(i)
            self._reported.discard(b)
        return held

    def _fetch_back(self, b: int, i: int, target: torch.Tensor) -> None:
        """Copy one range of a gradient from its landing place to the device, before whatever comes on compute."""
        backend, state = self._backend, self._states[b]
        pairs = [(backend.adopt(target, "gradients"), state.gradients[i])]
        made = backend.mark("offload/gradient/wanted", Lane.COMPUTE).issue()
        waits = [self._bindings.events[f"download/{b}"], made]
        back = backend.copy(Lane.H2D, pairs, name=f"offload/h2d/grad/{state.bucket.name}", waits=waits).issue()
        backend.mark("offload/gradient/back", Lane.COMPUTE, waits=[back]).issue()

    def discard(self) -> None:
        """No step will be made with what was taken; its memory goes back."""
        if not self.turning:
            return
        while self._in_flight:
            self._release(self._in_flight.popleft())
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
        self._bindings.trim()
        try:
            self._backend.begin_turn()
        except NativeError:
            self.torn = True
            raise
        self._points = self._schedules.points()
        self.turning = True

    def _gradient_point(self, b: int, *, last: bool = True) -> None:
        if b in self._reported:
            return
        if self._fresh[b]:
            self._require_one_dtype(b)
        self._reported.add(b)
        self._last = last
        self._issue_point(gradient_point(b))
        if b in self._totals.summed:
            self._totals.added(b, self._fresh[b], last=last)
        if self._shape.overlap:
            self._fresh[b].clear()
        if self._shape.overlap and self._states[b].placement is Placement.HOST:
            self._in_flight.append(b)
            if len(self._in_flight) > GRADIENTS_IN_FLIGHT:
                self._release(self._in_flight.popleft())
        if last or b not in self._totals.summed:
            self._slots.sample(b)
            if not self._staged and self._shape.overlap and self._slots.ready(b):
                self._stage()

    def _release(self, b: int) -> None:
        if b in self._reported:
            self._issue_point(release_point(b))
            self._drop([b])

    def _drop(self, buckets: Iterable[int]) -> None:
        """Forget gradients that the compute lane may overwrite from here on."""
        for b in buckets:
            for buffer in self._gradients[b]:
                buffer.data = self._nothing
            for name in self._of_bucket[b]:
                self._held.pop(name, None)

    def _stage(self) -> None:
        if self._shape.transient:
            self._slots.acquire()
        self._unstaged = False
        self._issue_point(STAGE)
        self._staged = True  # all of it: what was cut short is read again

    # ---------------------------------------------------------------- the step

    def check(self, gradients: Sequence[Gradient]) -> None:
        """Raises ModelError for gradients that cannot be stepped, before anything is changed, at any placement; and
        while a CUDA graph is captured.
        """
        require_no_capture(self._backend)
        dtypes = {g.name: g.flat.dtype for g in gradients}
        for b, state in enumerate(self._states):
            found = {self._gradients[b][i].data.dtype for i in self._fresh[b] if b not in self._reported}
            found.update(dtypes[name] for name in self._of_bucket[b] if name in dtypes)
            if len(found) > 1:
                raise mixed_gradients(state, sorted(map(str, found)))

    def step(self, groups: Sequence[Mapping[str, Any]], clipping: Clipping) -> None:
        """Step every range whose gradient was taken. `clipping` is this step's."""
        if not self.turning:
            self._begin()
        self._before_step()
        self._bindings.set_constants(groups)
        for name in ("max_norm", "inv_scale", "found_inf", "overflow_out"):
            setattr(self._bindings.clipping, name, getattr(clipping, name))
        ranges = [s.bucket.ranges for s in self._states]
        stepped = dict.fromkeys(ranges[b][i].name for b, chosen in enumerate(self._chosen) for i in chosen)
        scattered = self._targets.refresh(stepped)
        for b in reversed(range(len(self._states))):
            if self._chosen[b]:
                self._gradient_point(b)
                self._clear_missing(b)
        absent = frozenset(b for b in range(len(self._states)) if not self._chosen[b])
        self._points = self._schedules.points(absent)
        while self._in_flight:
            self._release(self._in_flight.popleft())
        if self._slots.count and not self._staged:
            self._stage()
        self._issue_point(STEP)
        self._backend.end_turn()
        self._end(scattered)

    def _end(self, scattered: bool) -> None:
        """Everything of the step has been issued but the arrivals."""
        self._drop(b for b, s in enumerate(self._states) if s.placement is not Placement.STREAMED)
        self._last_chosen = self._chosen
        self._reset()
        self.pending = set(self._uses)
        self._unreported.clear()
        self._after_step()
        if not self._shape.overlap or scattered:
            self.use_all()
        if scattered:
            self._targets.scatter()
        if self._slots.settle():
            self.use_all()
            self._lower()

    def use(self, layer: str) -> None:
        """The caller is about to use a layer's weights: the compute lane waits for them, and for nothing else."""
        self._unreported.discard(layer)
        if layer not in self.pending:
            return
        if self._unstaged is False and (self._slots.wanted_back(layer) or len(self.pending) == 1):
            self._issue_point(UNSTAGE)
            self._slots.give_back()
            self._unstaged = True
        self._slots.sample_use(layer)
        self._upload([layer])
        self._issue_point(use_point(layer))
        self._upload_behind(layer)
        self.pending.discard(layer)
        self._drop(self._streamed_of.get(layer, ()))

    def use_all(self) -> None:
        """The same for all layers."""
        for layer in list(self._uses):
            self.use(layer)

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
        self._staged = False

    def abort(self) -> None:
        """Forget the turn that was cut short. All lanes are empty, and the state is about to be replaced."""
        self.pending.clear()
        if not self._unstaged:
            self._slots.give_back()
            self._unstaged = True
        self._drop(range(len(self._states)))
        self._reset()
        self._points = self._schedules.points()
