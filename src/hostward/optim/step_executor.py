"""A training step carried out: the operations of its schedule, bound to buffers, issued as training reaches their
points.

`hostward.schedule.optimizer` decides what is issued when, and what waits for what.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from hostward.core.placement import Placement
from hostward.errors import ModelError, NativeError, OrderingError
from hostward.model.fence import unfenced
from hostward.model.parameters import Tracked
from hostward.optim.bucket_state import (
    BucketState,
    allocate_gradients,
    pending_in_capture,
    pieces,
    require_arrived,
    require_no_capture,
)
from hostward.optim.host_accumulation import Totals
from hostward.optim.op_binding import Bindings, Memory, Schedules, mixed_gradients
from hostward.optim.range_selection import Choice, Which
from hostward.optim.staging_slots import Slots
from hostward.optim.weight_views import Targets
from hostward.runtime.backend import Backend, Clipping, Event
from hostward.schedule.ops import Lane, Op, Schedule
from hostward.schedule.optimizer import (
    GRADIENTS_IN_FLIGHT,
    STEP,
    StepShape,
    gradient_point,
    kept_apart,
    later_uploads,
    release_point,
    stage_point,
    unstage_point,
    upload_point,
    use_point,
)

if TYPE_CHECKING:
    from hostward.weights.residency import Residency


# Operations of a schedule's points, bound to the ranges that have gradients, and issued.


_Given = ParamSpec("_Given")
_Self = TypeVar("_Self", bound="StepIssuer")
_Result = TypeVar("_Result")


def serialised(method: Callable[Concatenate[_Self, _Given], _Result]) -> Callable[Concatenate[_Self, _Given], _Result]:
    """One thread at a time: another one may read a weight while the training loop issues operations."""

    @functools.wraps(method)
    def alone(self: _Self, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return alone


# Steps of an optimizer some of whose weights lie on the host until a layer is used, and come by themselves.


# Gradients that a step has taken: on their way to where buckets are stepped, and back if more is added.


TOGETHER = 8
"""Buckets whose points are issued together, at most: the device need not wait for the last of hundreds."""


log = logging.getLogger("hostward")


class StepIssuer:
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

    _tracked: Mapping[str, Tracked]
    _slots: Slots
    _shape: StepShape
    _parts: Mapping[str, Sequence[tuple[int, int, slice | None]]]
    """By parameter: bucket, range, and which elements; None: all."""
    _of_bucket: Sequence[tuple[str, ...]]
    """By bucket: the parameters in it."""
    turning: bool
    _held: dict[str, torch.Tensor]
    _reported: set[int]
    _in_flight: deque[int]
    _staged: int
    """Slots that have been taken, and filled, for this turn's step."""
    _made_on: set[int]
    """Streams on which backward has made gradients that were not taken at once."""
    _apart: frozenset[int]
    """Buckets whose gradients are copied out of the memory in which a backward has made them."""

    _targets: Targets
    _layers: tuple[str, ...]
    """The use point's layer of each bucket."""
    pending: set[str]

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
        self.lock = threading.RLock()
        self._backend = backend
        self._states = states
        self._bindings = bindings
        self._totals = totals
        self._gradients = bindings.gradients
        self._points: Mapping[str, tuple[Op, ...]] = {}
        self._chosen: list[set[int]] = [set() for _ in states]
        """Ranges with a gradient in this turn."""
        self._fresh: list[set[int]] = [set() for _ in states]
        """Those whose gradient has not left yet."""
        self._last_chosen = self._chosen
        """Those of the turn before."""
        self._last = True
        """Of the gradient point being issued: no further microbatch is known to come."""
        self.torn = False
        """Some buckets may have taken a step that others have not. Set here; cleared by who sees the step through."""
        self.issuing = False
        """Operations of the step itself are being issued; on the simulated backend some of them run now."""
        self.fetched: frozenset[str] = frozenset()
        """Names of these weights."""
        self._residency: Residency | None = None
        self._uploads: dict[str, list[str]] = {}
        self._uploaded: set[str] = set()
        """Layers whose upload point has come since the last step."""
        self._held_back: dict[str, set[torch.Stream]] = {}
        """By layer: streams besides the compute lane that have waited for it since the last step. Before the first
        there is nothing to wait for.
        """
        self._nothing = torch.empty(0, device="cpu")
        self._holding: set[int] = set()
        """Buckets with gradients that are on the device, of this turn or of the one before."""
        self._taken_on: list[set[int]] = [set() for _ in states]
        """By bucket: the streams whose memory gradients in it may be."""
        self._streams: dict[int, torch.Stream | None] = {}
        """By their keys."""
        self._makers: set[torch.Stream] = set()
        self._sources: list[list[tuple[str, slice | None]]] = [[("", None)] * len(s.bucket.ranges) for s in states]
        """By bucket and range: the parameter, and which elements of it."""
        for name, parts in self._parts.items():
            for b, i, span in parts:
                self._sources[b][i] = name, span
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
            self._backend.begin_step()
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
        self._backend.end_step()
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
                "%d %s at the end of step(), because others hold their memory (views, .data): %s%s",
                len(shared), "weight arrives" if len(shared) == 1 else "weights arrive",
                ", ".join(sorted(shared)[:5]), ", ..." if len(shared) > 5 else "",
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

    # -------------------- TakenGradients

    @serialised
    def take(self, name: str, gradient: torch.Tensor, *, last: bool = True) -> None:
        """A gradient is final, or that of a microbatch is. Once all those of a bucket are, its gradient point has come.

        Args:
            gradient: of the parameter `name`, contiguous.
            last: no further microbatch is known to come.

        Raises:
            ModelError: gradients of one bucket differ in dtype.
        """
        if not self.turning:
            self._begin()
        # Hooks of one backward run on as many streams as its forward did. What is copied next waits for all of them.
        self._backend.follow_compute()
        parts = self._parts[name]
        # What several backwards have made is there already, and a copy would come on top of all of it.
        apart = self._apart.intersection(b for b, *_ in parts) if self._apart and not self._made_on else frozenset()
        if not apart:
            self._held[name] = gradient
        self._take_parts(gradient, parts, last=last, apart=apart)
        self._note_streams(b for b, *_ in parts)

    def made(self) -> None:
        """Backward has made a gradient, or added to one, on the stream that is current; it is taken later."""
        self._made_on.add(self._here())

    def _note_streams(self, buckets: Iterable[int]) -> None:
        """Gradients in these are taken: memory of the stream that is current, or of those on which they were made."""
        here = self._here()
        for b in buckets:
            self._taken_on[b].add(here)
            self._taken_on[b] |= self._made_on

    def _here(self) -> int:
        key = self._backend.compute_key()
        if key not in self._streams:
            self._streams[key] = self._backend.caller_stream()
        return key

    def _take_parts(
        self,
        gradient: torch.Tensor,
        parts: Iterable[tuple[int, int, slice | None]],
        *,
        last: bool,
        apart: Set[int] = frozenset(),
    ) -> None:
        summed, refill = self._totals.summed, self._backend.refill
        for b, i, span in parts:
            if b in summed and b in self._reported:
                if b in self._in_flight:
                    self._in_flight.remove(b)  # of the microbatch before
                    self._release(b)
                self._reported.discard(b)
            gradients, chosen, fresh = self._gradients[b], self._chosen[b], self._fresh[b]
            part = gradient if span is None else gradient.view(-1)[span]
            refill(gradients[i], part.clone() if b in apart else part)
            self._holding.add(b)
            chosen.add(i)
            fresh.add(i)
            if len(fresh if b in summed else chosen) == len(gradients):
                self._gradient_point(b, last=last)

    @serialised
    def take_all(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """`take` for each of these, which are all final: the points of buckets whose gradients are all among them come
        together.
        """
        if not self.turning:
            self._begin()
        self._held.update(gradients)
        whole: list[int] = []
        refill, there = self._backend.refill, gradients.__contains__
        for b, names in enumerate(self._of_bucket):
            if b in self._totals.summed or self._chosen[b] or not all(map(there, names)):
                continue
            for buffer, (name, span) in zip(self._gradients[b], self._sources[b], strict=True):
                gradient = gradients[name]
                refill(buffer, gradient if span is None else gradient.view(-1)[span])
            self._chosen[b].update(range(len(self._gradients[b])))
            self._fresh[b].update(self._chosen[b])
            whole.append(b)
        self._holding.update(whole)
        self._note_streams(whole)
        dtypes = {gradient.dtype for gradient in gradients.values()}
        for b in whole:
            if len(dtypes) > 1:
                self._require_one_dtype(b)
            elif self._states[b].placement is Placement.HOST:
                self._fit_landing(b, *dtypes)
        for first in range(0, len(whole), TOGETHER):
            self._gradient_points(whole[first : first + TOGETHER])
        if len(whole) < len(self._of_bucket):
            done = set(whole)
            for name, gradient in gradients.items():
                parts = [p for p in self._parts[name] if p[0] not in done]
                self._note_streams(b for b, *_ in parts)
                self._take_parts(gradient, parts, last=True)

    @serialised
    def flush(self, name: str | None = None, *, last: bool = False) -> None:
        """Let gradients that wait for others of their bucket be added to the totals: that of one parameter, because it
        is about to get another one, or all.
        """
        if name is None:
            waiting = [b for b in self._totals.summed if self._fresh[b]]
        else:
            waiting = [b for b, i, _ in self._parts[name] if b in self._totals.summed and i in self._fresh[b]]
        for b in sorted(waiting, reverse=True):
            self._gradient_point(b, last=last)

    @serialised
    def give_back(self, name: str) -> torch.Tensor:
        """Return a taken gradient because more will be added to it; `take` will be called for it again."""
        parameter, parts = self._tracked[name].local, self._parts[name]
        held = self._held.pop(name, None)
        # Autograd adds in place: not while a copy still reads.
        waits = [self._bindings.events[f"download/{b}"] for b, *_ in parts if b in self._reported]
        self._backend.mark("offload/gradient/kept", Lane.COMPUTE, waits=waits).issue()
        if held is None:
            here = (self._gradients[b][i].data for b, i, _ in parts if self._gradients[b][i].data.numel())
            landed = (self._states[b].gradients[i].data for b, i, _ in parts if self._states[b].gradients)
            dtype = next(chain(here, landed)).dtype
            held = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
            self._note_streams(b for b, *_ in parts)  # its memory is of here, and it may be taken on another stream
            for b, i, span in parts:
                target = held if span is None else held[span]
                if self._gradients[b][i].data.numel():
                    target.copy_(self._gradients[b][i].data.view(-1))
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
            self._reached([b])

    def _gradient_points(self, buckets: Sequence[int]) -> None:
        """As `_gradient_point` for each; none is summed."""
        self._last = True
        self._issue_point(*map(gradient_point, buckets))
        self._reported.update(buckets)
        if self._shape.overlap:
            for b in buckets:
                self._fresh[b].clear()
            self._in_flight.extend(b for b in buckets if self._states[b].placement is Placement.HOST)
            self._release_all(GRADIENTS_IN_FLIGHT)
        self._reached(buckets)

    def _reached(self, buckets: Sequence[int]) -> None:
        """All gradients of these are final."""
        if not self._slots.count:
            return
        for b in buckets:
            self._slots.sample(b)
            if self._shape.overlap and self._staged < self._slots.ahead and self._staged < (n := self._slots.ready(b)):
                self._stage(n)

    def _release_all(self, but: int = 0) -> None:
        """Release what is in flight, but for the newest of it."""
        oldest = [self._in_flight.popleft() for _ in range(len(self._in_flight) - but)]
        # Gradients of a bucket that was given one back have not left.
        released = [b for b in dict.fromkeys(oldest) if b in self._reported]
        for first in range(0, len(released), TOGETHER):
            self._issue_point(*map(release_point, released[first : first + TOGETHER]))
        self._drop(released)

    def _release(self, b: int) -> None:
        if b in self._reported:
            self._issue_point(release_point(b))
            self._drop([b])

    def _drop(self, buckets: Iterable[int]) -> None:
        """Forget gradients that the compute lane may overwrite from here on."""
        nothing, held, dropped = self._nothing, self._held, self._holding.intersection(buckets)
        self._let_overwrite(dropped)
        for b in dropped:
            self._holding.remove(b)
            for buffer in self._gradients[b]:
                buffer.data = nothing
            for name in self._of_bucket[b]:
                held.pop(name, None)

    def made_on(self, stream: torch.Stream) -> None:
        """Gradients that are taken from here on may be memory of this stream, whichever their hooks run on."""
        self._makers.add(stream)

    def _let_overwrite(self, buckets: Iterable[int]) -> None:
        """The allocator gives the memory of gradients back to the streams on which they were made: what comes there
        from here on comes behind the compute lane, which has waited for their readers.
        """
        taken_on: set[int] = set()
        for b in buckets:
            taken_on |= self._taken_on[b]
            self._taken_on[b].clear()
        if not taken_on:
            return
        apart = taken_on - {self._backend.compute_key()}
        if apart or self._makers:
            self._backend.return_memory("gradient", {self._streams[key] for key in apart} | self._makers)

    # -------------------- FetchedWeights

    @serialised
    def offload_weights(self, names: Collection[str], residency: Residency | None) -> None:
        """From now on these weights, all of host buckets, and no others are fetched by `residency`.

        Raises:
            ModelError: gradients have been taken.
        """
        if any(self._chosen):
            raise ModelError(
                "weights cannot be offloaded, or brought back, between backward and step()",
                why="the optimizer has taken gradients",
                fix="attach and detach after step() or zero_grad()",
            )
        self.use_all()
        self.synchronise()
        self._residency, self.fetched = residency, frozenset(names)
        self._targets.leave_out(self.fetched)
        self._lower()

    @serialised
    def hold(self, layer: str, stream: torch.Stream) -> None:
        """Another stream is about to read a layer's weights: it waits for them, and for nothing else. The use point may
        have come, and then only the compute lane has waited, or comes later.
        """
        if layer in self.pending:
            require_arrived(self._backend, layer)
            self._upload([layer])
        held_back = self._held_back.get(layer)
        if held_back is not None and stream not in held_back and not self._backend.capturing():
            held_back.add(stream)
            makers = {Placement.HOST: "upload", Placement.STREAMED: "step"}
            held = [b for b, name in enumerate(self._layers) if name == layer]
            names = [f"{makers[self._states[b].placement]}/{b}" for b in held if self._states[b].placement in makers]
            self._backend.wait_on_stream(stream, [self._bindings.events[name] for name in names])

    @serialised
    @unfenced
    def arrive(self) -> None:
        """All weights arrive, and those that are fetched come."""
        self.use_all()
        if self._residency is not None:
            self._residency.bring_all()

    def stepped(self, b: int) -> Event:
        """Of the host step of a bucket."""
        return self._bindings.events[f"step/{b}"]

    def require_weights_here(self) -> None:
        """Raises ModelError while weights are fetched."""
        if self._residency is not None:
            raise ModelError(
                "a parameter group added while weights are offloaded",
                why="what fetches them was made for the groups that there were",
                fix="detach() first, and attach again",
            )

    def _before_step(self) -> None:
        if self._residency is not None:
            self._residency.before_step()

    def _after_step(self) -> None:
        self._held_back = {layer: set() for layer in self._layers}
        self._uploaded.clear()
        if self._residency is not None:
            self._residency.after_step()

    def _plan_uploads(self, shape: StepShape) -> None:
        self._uploads = later_uploads(shape)

    def _upload(self, layers: Iterable[str]) -> None:
        """The upload points of these layers have come, unless they had."""
        for layer in layers:
            if self._uploads and layer not in self._uploaded:
                self._uploaded.add(layer)
                self._issue_point(upload_point(layer))

    def _upload_behind(self, layer: str) -> None:
        """A layer is used: what stands behind it and is not fetched comes now."""
        self._upload(self._uploads.get(layer, ()))

    # -------------------- PointIssuer

    def _issue_point(self, *points: str) -> None:
        """Issue the operations of a point, or of several in this order, none of which steps a bucket."""
        self.issuing = True
        try:
            self._issue(points)
        except NativeError:
            self.torn = True  # of some earlier step: its host function has reported now
            raise
        finally:
            self.issuing = False

    def _issue(self, points: tuple[str, ...]) -> None:
        works = self._bindings.at(points, self._points, self._choice)
        works.before.issue()
        if works.stepping is not None:
            self.torn = True
            works.stepping.issue()

    def _choice(self, b: int, which: Which) -> Choice:
        if which is Which.ALL:
            return self._chosen[b] or self._last_chosen[b]
        if which is Which.FRESH:
            return self._fresh[b]
        if which is Which.ADDED:
            return self._totals.addition(b, self._fresh[b], last=self._last)
        return self._totals.without_sums(b)

    def _clear_missing(self, b: int) -> None:
        if len(self._chosen[b]) < len(self._gradients[b]):
            missing = set(range(len(self._gradients[b]))) - self._chosen[b]
            self._bindings.clear(b, sorted(missing)).issue()

    def _require_one_dtype(self, b: int) -> None:
        """Raises ModelError if the gradients about to be stepped together differ; makes landing places fit them."""
        dtypes = {self._gradients[b][i].data.dtype for i in self._fresh[b]}
        if len(dtypes) > 1:
            raise mixed_gradients(self._states[b], sorted(map(str, dtypes)))
        self._fit_landing(b, dtypes.pop())

    def _fit_landing(self, b: int, dtype: torch.dtype) -> None:
        """Gradients of a bucket are about to leave in this dtype: make landing places fit it."""
        state = self._states[b]
        if b in self._totals.summed:
            if self._totals.lands(b, dtype):
                self._bindings.forget(b)
        elif state.placement is Placement.HOST and (state.gradient is None or state.gradient.data.dtype is not dtype):
            pinned = state.gradient is None or state.gradient.pinned
            allocate_gradients(self._backend, [state], [dtype], pinned=pinned)
            self._bindings.forget(b)
