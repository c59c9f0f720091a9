"""Carry out a training step: issue the operations of its schedule, bound to buffers, as training reaches triggers.

`hostward.schedule.optimizer` decides what is issued when, and what waits for what; `bucket_lifecycle` records how far
each bucket and layer has come.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, final

import torch

from hostward.core.placement import Placement
from hostward.errors import ModelError, NativeError, OrderingError
from hostward.model.fence import unfenced
from hostward.model.parameters import ParamRecord
from hostward.model.transforms import untransformed
from hostward.optim.bucket_lifecycle import (
    AWAKE,
    SENT,
    Asleep,
    BucketPhase,
    BucketStep,
    Kinds,
    LayerPhase,
    LayerStep,
)
from hostward.optim.bucket_state import BucketState, allocate_gradients
from hostward.optim.host_accumulation import HostGradAccumulator
from hostward.optim.op_binding import Bindings, Memory, Schedules, mixed_gradients
from hostward.optim.param_groups import is_valid
from hostward.optim.range_selection import Part, bucket_map
from hostward.optim.staging_buffers import StagingBuffers
from hostward.optim.stream_sync import StreamSync
from hostward.optim.weight_views import ParamViews
from hostward.runtime.backend import Backend, Clipping, Event
from hostward.schedule.ops import Lane, Op, Schedule
from hostward.schedule.optimizer import (
    GRADIENTS_IN_FLIGHT,
    GUESSES,
    MOST_GUESSES_APART,
    STEP,
    StepShape,
    acquire_staging_trigger,
    deferred_uploads,
    grad_ready_trigger,
    guess_trigger,
    pre_forward_trigger,
    release_grad_trigger,
    release_staging_trigger,
    upload_trigger,
)

TOGETHER = 8
"""Maximum number of buckets whose triggers are issued together: the device need not wait for the last of
hundreds.
"""

log = logging.getLogger("hostward")

_Given = ParamSpec("_Given")
_Self = TypeVar("_Self", bound="StepExecutor")
_Result = TypeVar("_Result")


def serialised(method: Callable[Concatenate[_Self, _Given], _Result]) -> Callable[Concatenate[_Self, _Given], _Result]:
    """Let one thread in at a time: another one may read a weight while the training loop issues operations.

    These are none of the program's, whose transforms and modes do not apply to them.
    """

    plain = untransformed(method)

    @functools.wraps(method)
    def alone(self: _Self, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self.lock:
            return plain(self, *args, **kwargs)

    return alone


class WeightFetcher(Protocol):
    """Brings offloaded weights to the device when their layers are used.

    The executor knows nothing else of weight offloading. `hostward.weights.residency.Residency` is one.
    """

    def bring_all(self) -> None:
        """Reload all offloaded weights on the compute stream."""

    def before_step(self) -> None:
        """Make the CPU optimizer steps that are issued next wait for what still reads the weights' host copies."""

    def after_step(self) -> None:
        """Make later prefetches wait for the CPU optimizer steps that have been issued, and begin the first ones."""

    def use_held(self) -> Sequence[str]:
        """Wait for offloaded weights whose memory others hold. Returns their names."""


@final
class StepExecutor:
    """Carries out the schedule of steps for a fixed set of bucket states.

    Args:
        layers: of each bucket, the layer whose use waits for its weights; in order of use in forward.
        slots: GPU staging buffers of streamed buckets.
        totals: accumulates on the host the gradients of host buckets that are accumulated there.
        together: names of parameters whose gradients are made in one memory, for each such memory.
        holders: how many tensors always use the memory of a parameter's part here, itself among them. None: weights
            of which there are more are not waited for at once.
        asleep: what `AdamW.sleep` has moved to the host; its use is refused.
        overlap: False: everything happens within `step`.
        use_torch_optimizer: torch.optim.AdamW steps the host buckets.
        groups: parameter groups, whose hyper-parameters guesses are made with.
    """

    _guesses = False
    """Steps are guessed in the present step: the hyper-parameters were valid when it began."""
    _warned_of_change = False

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        tracked: Mapping[str, ParamRecord],
        memory: Memory,
        *,
        layers: Sequence[str],
        slots: StagingBuffers,
        totals: HostGradAccumulator,
        together: Iterable[Sequence[str]],
        holders: Callable[[ParamRecord], int] | None,
        asleep: Asleep,
        overlap: bool,
        use_torch_optimizer: bool,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.lock = threading.RLock()
        self._backend, self._states, self._tracked = backend, states, tracked
        self.asleep = asleep
        self._slots, self._totals, self._overlap, self._groups = slots, totals, overlap, groups
        self._layer_of_bucket = tuple(layers)
        self._map = bucket_map(states, tracked, together, overlap=overlap)
        self._buckets = [
            BucketStep(b, s.placement, len(s.bucket.ranges), overlap=overlap, accumulates=b in totals.summed)
            for b, s in enumerate(states)
        ]
        self._accumulating = [bucket for bucket in self._buckets if bucket.accumulates]
        self._grad_triggers = [grad_ready_trigger(b) for b in range(len(states))]
        self._release_triggers = [release_grad_trigger(b) for b in range(len(states))]
        self._layers = {name: LayerStep(name) for name in layers}
        """Layers by name, in order of use."""
        self._wait_triggers = {name: pre_forward_trigger(name) for name in layers}
        self._buckets_of: dict[str, list[BucketStep]] = {name: [] for name in layers}
        for name, bucket in zip(layers, self._buckets, strict=True):
            self._buckets_of[name].append(bucket)
        self._with_streamed = {
            name for name, bucket in zip(layers, self._buckets, strict=True) if bucket.placement is Placement.STREAMED
        }
        """Layers that use a streamed bucket, whose gradients stay on the device until the layer has been waited for."""
        self._read_with = {name: self._layers_with(name, tuple(Placement)) for name in tracked}
        """Layers whose waits come before everything that a parameter's bytes are read for, by parameter."""
        # What the compute stream steps is there for whatever that stream does next.
        elsewhere = (Placement.HOST, Placement.STREAMED)
        self._waits_of = {name: self._layers_with(name, elsewhere) for name in tracked}
        """Layers in `_read_with` whose new values come from elsewhere, by parameter."""
        self._watches_holders = holders is not None
        self._targets = ParamViews(backend, states, tracked, holders or (lambda _: 1))
        self._bindings = Bindings(
            backend, states, memory, slots, totals, self._targets,
            buckets=self._buckets, by_torch=use_torch_optimizer,
        )  # fmt: skip
        self._gradients = self._bindings.gradients
        self._sync = StreamSync(backend)
        self._nothing = torch.empty(0, device="cpu")
        self._held: dict[str, torch.Tensor] = {}
        """Gradients that were offloaded and whose device memory is not returned yet, as autograd left them."""
        self._in_flight: deque[BucketStep] = deque()
        """Buckets whose gradients are in flight, the oldest first."""
        self._unguessed: list[BucketStep] = []
        """Buckets that have been sent, and whose steps are guessed together with those of the next ones."""
        self._staged = 0
        """Staging buffers that have been acquired, and filled, for this step."""
        self.in_step = False
        """Gradients of a step have come, or the step itself has begun."""
        self.torn = False
        """Some buckets may have taken a step that others have not. Set here; cleared by the caller that completes the
        step.
        """
        self.issuing = False
        """Operations of the step itself are being issued; on the simulated backend some of them run now."""
        self.read_by_graph = False
        """Weights were read while a CUDA graph was captured: its replay reads them again, and reports nothing."""
        self.shared: frozenset[str] = frozenset()
        """Names of weights that others held memory of when the last step ended: they were waited for at once."""
        self.fetched: frozenset[str] = frozenset()
        """Names of the weights that `_fetcher` brings."""
        self._fetcher: WeightFetcher | None = None
        self._lower()
        weakref.finalize(self, backend.drain)  # what is pending writes to memory that this object holds

    def _layers_with(self, name: str, placements: Collection[Placement]) -> tuple[LayerStep, ...]:
        """Return the layers with a part of a parameter in a bucket of one of these placements."""
        held = [b for b, *_ in self._map.parts[name] if self._states[b].placement in placements]
        return tuple(dict.fromkeys(self._layers[self._layer_of_bucket[b]] for b in held))

    def _lower(self) -> None:
        """Lower the schedule anew, because staging buffers, or who brings weights, have changed. Nothing is pending."""
        slots = self._slots
        prefetched = frozenset(b for b, names in enumerate(self._map.names) if set(names) <= self.fetched)
        # Who brings a weight keeps to the host copy that it has found, so the sets of its bucket are not exchanged.
        stays = [self.fetched.isdisjoint(names) for names in self._map.names]
        guessed = frozenset(b for b, s in enumerate(self._states) if s.twin is not None and stays[b])
        shape = StepShape(
            tuple(s.placement for s in self._states),
            self._layer_of_bucket,
            staging_buffers=slots.count,
            prefetch_depth=slots.ahead,
            transient=slots.transient,
            overlap=self._overlap,
            accumulated_on_host=self._totals.summed,
            prefetched=prefetched,
            guessed=guessed,
        )
        for bucket in self._buckets:
            bucket.guesses = bucket.index in guessed
        self._schedules = Schedules(shape)
        self._uploads = deferred_uploads(shape)
        self._points: Mapping[str, tuple[Op, ...]] = self._schedules.points()
        self._bindings.forget()
        self._shape = shape  # last: an interrupt before this is noticed below

    def _follow_slots(self) -> None:
        """Lower the schedule again if an interrupt came between the settling of staging buffers and their schedule."""
        if (self._shape.staging_buffers, self._shape.prefetch_depth) != (self._slots.count, self._slots.ahead):
            self._lower()

    # ---------------------------------------------------------------- facts

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of a step in which every bucket has a gradient."""
        return self._schedules.whole

    @property
    def pending(self) -> set[str]:
        """Return the layers whose weights the compute stream has not waited for since the last step."""
        return {layer.name for layer in self._pending()}

    def _pending(self) -> list[LayerStep]:
        return [layer for layer in self._layers.values() if layer.phase is LayerPhase.PENDING]

    def step_event(self, b: int) -> Event:
        """Return the event of the CPU optimizer step of a bucket."""
        return self._bindings.events[f"step/{b}"]

    def require_whole(self) -> None:
        """Raises ModelError while the state is torn."""
        if self.torn:
            raise ModelError(
                "a step was interrupted half way",
                why="some buckets have taken it and others have not, so the state belongs to no step",
                fix="load the last checkpoint into model and optimizer (load_state_dict makes the optimizer whole)",
            )

    def require_awake(self, name: str) -> None:
        """Check a parameter of which backward is about to make a gradient. Raises AsleepError while gradients sleep."""
        if self.asleep.kinds is not AWAKE:
            self.asleep.require(Kinds.GRADIENTS, f"backward makes a gradient of {name!r}")

    def require_used(self, name: str) -> None:
        """Check a parameter of which backward has made a gradient. Raises OrderingError if forward never reported its
        use.
        """
        for layer in self._waits_of[name]:
            if layer.phase is not LayerPhase.READY:
                raise OrderingError(
                    f"parameter {name!r} of layer {layer.name!r} was used before its new value had arrived",
                    why="its forward ran without the hooks that wait for it: the module was not called, or by compiled "
                    "code that knows nothing of them",
                    fix="call the module, call optimizer.wait_for_weights() before reading weights in another way, or "
                    "torch.compiler.reset() after making the optimizer",
                )

    def require_weights_here(self) -> None:
        """Raises ModelError while weights are offloaded."""
        if self._fetcher is not None:
            raise ModelError(
                "a parameter group added while weights are offloaded",
                why="what fetches them was made for the groups that there were",
                fix="detach() first, and attach again",
            )

    def check(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Raises ModelError for gradients that cannot be stepped, before anything is changed.

        Gradients are checked at any placement. It is also raised while a CUDA graph is captured.
        """
        if self._backend.capturing():
            raise ModelError(
                "step() while a CUDA graph is captured",
                why="it waits for the step before, and the next forward for it: neither is part of the graph",
                fix="capture forward and backward, and call step() after each replay",
            )
        dtypes = {name: gradient.dtype for name, gradient in gradients.items()}
        if not any(bucket.unsent for bucket in self._buckets) and len(set(dtypes.values())) <= 1:
            return
        for bucket, state, names in zip(self._buckets, self._states, self._map.names, strict=True):
            buffers = self._gradients[bucket.index]
            found = {buffers[i].data.dtype for i in bucket.unsent if bucket.phase not in SENT}
            found.update(dtypes[name] for name in names if name in dtypes)
            if len(found) > 1:
                raise mixed_gradients(state, sorted(map(str, found)))

    # ---------------------------------------------------------------- gradients, during backward and at the step

    def grad_made(self) -> None:
        """Record that backward made or added to a gradient on the current stream. It stays in `.grad` for now."""
        self._sync.grad_made()

    def grads_made_on(self, stream: torch.Stream) -> None:
        """Record that gradients offloaded later may be memory of `stream`, on whichever stream their hooks run."""
        self._sync.makers.add(stream)

    @serialised
    def offload_gradient(self, name: str, gradient: torch.Tensor, *, last: bool = True, borrowed: bool = False) -> None:
        """Offload a gradient that is final, or that of a microbatch.

        Once the bucket has all of its gradients, its gradient trigger comes.

        Args:
            gradient: of the parameter `name`, contiguous.
            last: no further microbatch is known to come.
            borrowed: its memory stays the owner's.

        Raises:
            ModelError: gradients of one bucket differ in dtype.
        """
        if self.asleep.kinds is not AWAKE:
            self.asleep.require(Kinds.GRADIENTS, f"a gradient of {name!r} is taken")
        if not self.in_step:
            self._begin_step()
        # Hooks of one backward run on as many streams as its forward did. What is copied next waits for all of them.
        streams = self._sources(self._backend.follow_compute())
        parts, copied_out = self._map.parts[name], self._map.copied_out
        # What several backwards have made is there already, and a copy would come on top of all of it.
        if not copied_out or self._sync.made_on or copied_out.isdisjoint(b for b, *_ in parts):
            copied_out = frozenset()
            self._held[name] = gradient
        self._offload_parts(gradient, parts, streams, last=last, copied_out=copied_out, borrowed=borrowed)

    @serialised
    def offload_gradients(self, gradients: Mapping[str, torch.Tensor], borrowed: Set[str] = frozenset()) -> None:
        """Call `offload_gradient` at the step for each of these gradients, which are all final.

        The triggers of buckets whose gradients are all among them come together. `borrowed`: names of those whose
        memory stays the owner's.
        """
        self.asleep.require(Kinds.GRADIENTS, "gradients are taken")
        if not self.in_step:
            self._begin_step()
        self._held.update(gradients)
        there, refill = gradients.__contains__, self._backend.refill
        streams = self._sources(self._backend.compute_key())
        for bucket in self._buckets:
            bucket.late = True
        dtypes = {gradient.dtype for gradient in gradients.values()}
        whole: list[BucketStep] = []
        for bucket, names in zip(self._buckets, self._map.names, strict=True):
            if bucket.accumulates or bucket.phase is not BucketPhase.IDLE or not all(map(there, names)):
                continue
            b = bucket.index
            for buffer, (name, span) in zip(self._gradients[b], self._map.sources[b], strict=True):
                gradient = gradients[name]
                refill(buffer, gradient if span is None else gradient.view(-1)[span])
                buffer.borrowed = name in borrowed
            bucket.accept_all(streams)
            whole.append(bucket)
        for bucket in whole:
            if len(dtypes) > 1:
                self._require_one_dtype(bucket)
            elif bucket.placement is Placement.HOST:
                self._fit_landing(bucket, *dtypes)
        for first in range(0, len(whole), TOGETHER):
            self._on_grads_ready(whole[first : first + TOGETHER])
        if len(whole) < len(self._buckets):
            done = {bucket.index for bucket in whole}
            for name, gradient in gradients.items():
                parts = [p for p in self._map.parts[name] if p[0] not in done]
                self._offload_parts(gradient, parts, streams, last=True, borrowed=name in borrowed)

    def _sources(self, here: int) -> set[int]:
        """Return the keys of the streams that may own the memory of a gradient offloaded on the stream `here`."""
        if here not in self._sync.known:
            self._sync.note(here)
        return {here, *self._sync.made_on}

    def _offload_parts(
        self,
        gradient: torch.Tensor,
        parts: Iterable[Part],
        streams: Set[int],
        *,
        last: bool,
        copied_out: Set[int] = frozenset(),
        borrowed: bool = False,
    ) -> None:
        refill = self._backend.refill
        for b, i, span in parts:
            bucket = self._buckets[b]
            if bucket.phase in SENT:
                self._reopen(bucket)
            part = gradient if span is None else gradient.view(-1)[span]
            buffer = self._gradients[b][i]
            refill(buffer, part.clone() if b in copied_out else part)
            buffer.borrowed = borrowed and b not in copied_out
            bucket.accept(i, streams)
            if bucket.complete:
                self._send(bucket, last=last)

    def _reopen(self, bucket: BucketStep) -> None:
        """Accept another gradient for a bucket that was sent.

        It is one of the next microbatch, or of a step that failed before anything was stepped.
        """
        if bucket.phase is BucketPhase.GRAD_IN_FLIGHT:
            self._in_flight.remove(bucket)
            if bucket.accumulates:
                self._release_memory([bucket])
                bucket.released()
        bucket.reopen()

    @serialised
    def reload_gradient(self, name: str) -> torch.Tensor:
        """Return an offloaded gradient, on the device, because more will be added to it; it is then offloaded again."""
        if self.asleep.kinds is not AWAKE:
            self.asleep.require(Kinds.GRADIENTS, f"backward adds to the gradient of {name!r}")
        parameter, parts = self._tracked[name].local, self._map.parts[name]
        held = self._held.pop(name, None)
        # Autograd adds in place, which must not happen while a copy still reads.
        waits = [self._bindings.events[f"download/{b}"] for b, *_ in parts if self._buckets[b].phase in SENT]
        self._backend.mark("offload/gradient/kept", Lane.COMPUTE, waits=waits).issue()
        if held is None:
            here = (self._gradients[b][i].data for b, i, _ in parts if self._gradients[b][i].data.numel())
            landed = (self._states[b].gradients[i].data for b, i, _ in parts if self._states[b].gradients)
            dtype = next(chain(here, landed)).dtype
            held = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
            streams = self._sources(self._backend.compute_key())
            for b, i, span in parts:
                self._buckets[b].streams |= streams  # its memory is of this stream, and it may be sent on another
                target = held if span is None else held[span]
                if self._gradients[b][i].data.numel():
                    target.copy_(self._gradients[b][i].data.view(-1))
                else:
                    self._fetch_back(b, i, target)
        for b, i, _ in parts:
            self._gradients[b][i].point_to(self._nothing)
            bucket = self._buckets[b]
            if bucket.phase is BucketPhase.GRAD_IN_FLIGHT:
                self._in_flight.remove(bucket)  # the rest of it is released once all of it is sent again
            bucket.retract(i)
        return held

    def _fetch_back(self, b: int, i: int, target: torch.Tensor) -> None:
        """Copy one range of a gradient from its landing buffer to the device, before whatever comes on the compute
        stream.
        """
        backend, state = self._backend, self._states[b]
        pairs = [(backend.adopt(target, "gradients"), state.gradients[i])]
        made = backend.mark("offload/gradient/wanted", Lane.COMPUTE).issue()
        waits = [self._bindings.events[f"download/{b}"], made]
        back = backend.copy(Lane.H2D, pairs, name=f"offload/h2d/grad/{state.bucket.name}", waits=waits).issue()
        backend.mark("offload/gradient/back", Lane.COMPUTE, waits=[back]).issue()

    @serialised
    def flush(self, name: str | None = None, *, last: bool = False) -> None:
        """Send gradients that wait for others of their bucket to be accumulated on the host.

        `name`: only the gradient of this parameter, because it is about to get another one; None: all.
        """
        self.asleep.require(Kinds.GRADIENTS, "gradients are taken")
        if name is None:
            waiting = [bucket for bucket in self._accumulating if bucket.unsent]
        else:
            holding = {b for b, i, _ in self._map.parts[name] if i in self._buckets[b].unsent}
            waiting = [self._buckets[b] for b in sorted(holding) if self._buckets[b].accumulates]
        for bucket in reversed(waiting):
            self._send(bucket, last=last)

    @serialised
    def discard(self) -> None:
        """Drop the offloaded gradients and return their memory: no step will be made with them."""
        if not self.in_step:
            return
        self._release_in_flight()
        self._release_memory(self._buckets, triggers=False)
        for bucket in self._buckets:
            bucket.discard()
        self._held.clear()
        self._unguessed.clear()
        self._sync.made_on.clear()
        # What has been read stays in its staging buffers, and counts for the step that follows.
        self._points = self._schedules.points()  # an interrupted step may have left those without absent buckets

    @serialised
    def wait_for_gradients(self) -> None:
        """Make the current stream wait for everything that reads the gradients of the last step from device memory."""
        backend = self._backend
        # Those of host buckets were waited for before the step, and device buckets are stepped on the compute stream.
        held = [b for b in self._buckets if b.placement is Placement.STREAMED and b.phase is BucketPhase.STEPPED]
        waits = [self._bindings.events[f"step/{bucket.index}"] for bucket in held]
        stream = None if backend.at_compute() else backend.caller_stream()
        if stream is None:
            backend.mark("offload/gradients/read", Lane.COMPUTE, waits=waits).issue()
        else:  # the compute stream need not wait: what it enqueues next may run beside the step
            with backend.on_compute():
                stepped = backend.mark("offload/gradients/read", Lane.COMPUTE).issue()
            backend.wait_on_stream(stream, [stepped, *waits])

    def _send(self, bucket: BucketStep, *, last: bool = True) -> None:
        """Send the gradients of a bucket, all of which are there, or no more of which will come."""
        if bucket.unsent:
            self._require_one_dtype(bucket)
        self._on_grads_ready([bucket], last=last)

    def _on_grads_ready(self, buckets: Sequence[BucketStep], *, last: bool = True) -> None:
        """Issue the gradient triggers of these buckets."""
        self._issue([self._grad_triggers[bucket.index] for bucket in buckets], last=last)
        for bucket in buckets:
            bucket.sent(last=last)
            if bucket.phase is BucketPhase.GRAD_IN_FLIGHT:
                self._in_flight.append(bucket)
        if len(self._in_flight) > GRADIENTS_IN_FLIGHT:
            self._release_in_flight(GRADIENTS_IN_FLIGHT)
        if self._guesses:
            self._guess(buckets)
        if not self._slots.count:
            return
        for bucket in buckets:
            if last or not bucket.accumulates:
                self._stage_behind(bucket.index)

    def _guess(self, sent: Iterable[BucketStep]) -> None:
        """Guess the steps of buckets that have been sent, as soon as there are enough of them to share a wait."""
        self._unguessed += [bucket for bucket in sent if bucket.can_guess and bucket not in self._unguessed]
        if len(self._unguessed) * MOST_GUESSES_APART >= len(self._shape.guessed):
            self._issue([GUESSES, *(guess_trigger(bucket.index) for bucket in self._unguessed)])
            for bucket in self._unguessed:
                bucket.guess()
            self._unguessed.clear()

    def _stage_behind(self, b: int) -> None:
        """Acquire staging buffers for which there may be room, as all gradients of a bucket are final."""
        self._slots.sample(b)
        if self._overlap and self._staged < self._slots.ahead and self._staged < (n := self._slots.ready(b)):
            self._stage(n)

    def _release_in_flight(self, but: int = 0) -> None:
        """Release the gradients that are in flight, except the newest `but` of them."""
        while (excess := len(self._in_flight) - but) > 0:
            oldest = [self._in_flight[i] for i in range(min(excess, TOGETHER))]
            self._release_memory(oldest)
            for _ in oldest:
                self._in_flight.popleft().released()

    def _release_memory(self, buckets: Iterable[BucketStep], *, triggers: bool = True) -> None:
        """Forget gradients that the compute stream may overwrite from here on.

        Their release triggers come first, where nothing else has made it wait for their readers.
        """
        dropped = [bucket for bucket in buckets if bucket.on_device or triggers]
        if not dropped:
            return
        if triggers:
            self._issue([self._release_triggers[bucket.index] for bucket in dropped])
        owners = {key for bucket in dropped for key in bucket.return_memory()}
        if owners:
            owners.discard(self._backend.compute_key())
            if owners or self._sync.makers:
                self._sync.return_memory(owners)
        nothing, held = self._nothing, self._held
        for bucket in dropped:
            for buffer in self._gradients[bucket.index]:
                buffer.point_to(nothing)
                buffer.borrowed = False
            for name in self._map.names[bucket.index]:
                held.pop(name, None)

    def _require_one_dtype(self, bucket: BucketStep) -> None:
        """Make landing buffers fit gradients about to be sent together. Raises ModelError if their dtypes differ."""
        buffers = self._gradients[bucket.index]
        dtypes = {buffers[i].data.dtype for i in bucket.unsent}
        if len(dtypes) > 1:
            raise mixed_gradients(self._states[bucket.index], sorted(map(str, dtypes)))
        self._fit_landing(bucket, dtypes.pop())

    def _fit_landing(self, bucket: BucketStep, dtype: torch.dtype) -> None:
        """Make landing buffers fit the dtype in which gradients of a bucket are about to be sent."""
        state, b = self._states[bucket.index], bucket.index
        if bucket.accumulates:
            if self._totals.lands(b, dtype):
                self._bindings.forget(b)
        elif state.placement is Placement.HOST and (state.gradient is None or state.gradient.data.dtype is not dtype):
            pinned = state.gradient is None or state.gradient.pinned
            allocate_gradients(self._backend, [state], [dtype], pinned=pinned)
            self._bindings.forget(b)

    # ---------------------------------------------------------------- the step

    @serialised
    def step(self, groups: Sequence[Mapping[str, Any]], clipping: Clipping) -> None:
        """Step every range whose gradient was offloaded. `clipping` is that of this step."""
        if not self.in_step:
            self._begin_step()
        self.forward_is_here()
        if self._fetcher is not None:
            self._fetcher.before_step()
        if self._bindings.set_constants(groups) and any(bucket.guessed for bucket in self._buckets):
            self._warn_of_change()
        for name in ("max_norm", "inv_scale", "found_inf", "overflow_out"):
            setattr(self._bindings.clipping, name, getattr(clipping, name))
        scattered = self._targets.refresh(dict.fromkeys(self._stepped()))
        for bucket in reversed(self._buckets):
            if bucket.ranges:
                if bucket.phase not in SENT:
                    self._send(bucket)
                if len(bucket.ranges) < bucket.size:
                    self._clear_missing(bucket)
        absent = frozenset(bucket.index for bucket in self._buckets if not bucket.ranges)
        self._points = self._schedules.points(absent)
        self._release_in_flight()
        if self._staged < self._slots.count:
            self._stage(self._slots.count)
        if self._slots.count:
            self._slots.pace.backward_is_over()
        self._issue([STEP])
        self._backend.end_step()
        self._end_step(scattered)

    def _begin_step(self) -> None:
        pending = self._pending()
        self.wait_for_all()
        for layer in pending:
            layer.unreported()
        self._follow_slots()
        self._bindings.trim()
        try:
            self._backend.begin_step()
        except NativeError:
            self.torn = True
            raise
        self._points = self._schedules.points()
        # A value that is not valid yet may be set right before the step, which reports it otherwise.
        self._guesses = bool(self._shape.guessed) and all(map(is_valid, self._groups))
        if self._guesses:
            self._bindings.set_constants(self._groups, guess=True)
        self.in_step = True

    def _warn_of_change(self) -> None:
        """Warn once that hyper-parameters changed after steps in backward, which are made again for it."""
        if not self._warned_of_change:
            log.warning(
                "a learning rate or another hyper-parameter changed between backward and step(): the CPU steps that "
                "step_early made during backward are made again, and the next step makes none; set it before "
                "backward, as a scheduler does that is called after step()"
            )
            self._warned_of_change = True

    def _stepped(self) -> Iterator[str]:
        """Yield the names of parameters with a gradient, some more than once."""
        for bucket in self._buckets:
            if len(bucket.ranges) == bucket.size:
                yield from self._map.names[bucket.index]
            else:
                ranges = self._states[bucket.index].bucket.ranges
                yield from (ranges[i].name for i in bucket.ranges)

    def _clear_missing(self, bucket: BucketStep) -> None:
        missing = set(range(bucket.size)) - bucket.ranges
        self._bindings.clear(bucket.index, sorted(missing)).issue()

    def _end_step(self, scattered: bool) -> None:
        """Finish a step of which everything has been issued but the waits for its weights."""
        here = [bucket for bucket in self._buckets if bucket.placement is not Placement.STREAMED]
        self._release_memory(here, triggers=False)
        for bucket in self._buckets:
            if bucket.guessed:
                self._states[bucket.index].exchange()
            bucket.stepped()
        self._held.clear()
        self._unguessed.clear()
        self._sync.made_on.clear()
        self._staged, self.in_step = 0, False
        for layer in self._layers.values():
            layer.stepped()
        if self._fetcher is not None:
            self._fetcher.after_step()
        self._wait_for_shared()
        if not self._shape.overlap or scattered or self.read_by_graph:
            self.wait_for_all()
        if scattered:
            self._targets.scatter()
        if self._slots.count and self._slots.settle():
            self.wait_for_all()
            self._lower()

    def _stage(self, slots: int) -> None:
        """Acquire so many staging buffers, and fill those that are filled in backward."""
        if self._shape.transient:
            self._slots.acquire(slots)
        filled = min(slots, self._slots.ahead)
        while self._staged < filled:
            self._slots.pace.begins()
            self._issue([acquire_staging_trigger(self._staged)])
            self._slots.pace.issued()
            self._staged += 1
        if self._staged < slots:
            self._issue([acquire_staging_trigger(slot) for slot in range(self._staged, slots)])
            self._staged = slots

    def forward_is_here(self) -> None:
        """Record that the caller's forward and backward run on the current stream, or begin there.

        Under FSDP2 it is the stream of forward; otherwise, as far as is known, that of `step`. Staging allocates memory
        of this stream, also where gradients come on another.
        """
        self._slots.stream = self._backend.caller_stream()

    # ---------------------------------------------------------------- weights, between two steps

    @serialised
    def wait_for_params(self, name: str) -> None:
        """Make the caller's stream wait for the weights of a layer it is about to use, and nothing else."""
        if self.asleep.kinds is not AWAKE:
            self.asleep.require(Kinds.WEIGHTS, f"layer {name!r} is used")
        if capturing := self._backend.capturing():
            self.read_by_graph = True
        layer = self._layers.get(name)  # None: other ranks hold all of its parameters
        if layer is None:
            return
        key = self._backend.compute_key()
        if layer.phase is LayerPhase.PENDING:
            self._wait_for([layer], key, capturing=capturing)
            return
        if layer.phase is LayerPhase.UNREPORTED:
            layer.reported()
        if layer.waited_by and key not in layer.waited_by:
            layer.waited_by.add(key)
            if (stream := self._backend.caller_stream()) is not None:
                self._wait_on_stream(layer, stream)

    @serialised
    def wait_for_all(self) -> None:
        """Make the caller's stream wait for the weights of all layers."""
        self.asleep.require(Kinds.WEIGHTS, "weights are read")
        for layer in self._layers.values():
            if layer.phase is LayerPhase.UNREPORTED:
                layer.reported()
        layers = self._pending()
        if not layers:
            return
        capturing, key = self._backend.capturing(), self._backend.compute_key()
        at_once = 1 if self._uploads else TOGETHER  # triggers of uploads come between those of waits
        for first in range(0, len(layers), at_once):
            self._wait_for(layers[first : first + at_once], key, capturing=capturing)

    @serialised
    @unfenced
    def wait_for_weights(self) -> None:
        """Wait for all layers, and reload offloaded weights."""
        self.wait_for_all()
        if self._fetcher is not None:
            self._fetcher.bring_all()

    def _wait_for(self, layers: Sequence[LayerStep], key: int, *, capturing: bool) -> None:
        """Let the stream whose key is `key`, the current one, wait for these layers, which are pending and used now.

        They are several at once where no upload waits for a use. `capturing`: a CUDA graph is captured.
        """
        if capturing:
            raise _pending_in_capture(f"weights of layer {layers[0].name!r} are")
        if self._slots.count:
            self._unstage(layers)
        if self._uploads:
            self._upload(layers)
        waiting = [
            (layer, [bucket for bucket in self._buckets_of[layer.name] if bucket.phase is BucketPhase.STEPPED])
            for layer in layers
        ]
        self._issue([self._wait_triggers[layer.name] for layer in layers])
        for layer, stepped in waiting:
            # What comes after it in order of use and is not prefetched is uploaded now.
            if self._uploads:
                self._upload(self._layers[name] for name in self._uploads.get(layer.name, ()))
            if layer.name in self._with_streamed:
                self._release_memory(stepped, triggers=False)
            for bucket in stepped:
                bucket.used()
            layer.waited(key)  # last: interrupted before, all of it is done again

    def _unstage(self, layers: Sequence[LayerStep]) -> None:
        """Release staging buffers that must be back before the forward of one of these layers."""
        names = {layer.name for layer in layers}
        held = self._slots.held
        # From the last in order of use: while forward runs, that one is pending, and no other is looked at.
        last_first = reversed(self._layers.values())
        if held and any(layer.phase is LayerPhase.PENDING and layer.name not in names for layer in last_first):
            held = self._slots.wanted_back(names)
        if held:
            self._issue([release_staging_trigger(slot) for slot in held])
            self._slots.give_back(held)
        for layer in layers:
            self._slots.sample_use(layer.name)

    def _upload(self, layers: Iterable[LayerStep]) -> None:
        """Issue the upload triggers of these layers, unless they were issued."""
        for layer in layers:
            if not layer.upload_issued:
                self._issue([upload_trigger(layer.name)])
                layer.upload_issued = True

    @serialised
    def wait_on_stream(self, name: str, stream: torch.Stream) -> None:
        """Make another stream, which is about to read a layer's weights, wait for them and for nothing else.

        The compute stream may have waited already, or does so later.
        """
        if self.asleep.kinds is not AWAKE:
            self.asleep.require(Kinds.WEIGHTS, f"layer {name!r} is used")
        layer = self._layers.get(name)
        if layer is None:
            return
        if layer.phase is LayerPhase.PENDING:
            if self._backend.capturing():
                raise _pending_in_capture(f"weights of layer {name!r} are")
            if self._uploads:
                self._upload([layer])
        self._wait_on_stream(layer, stream)

    def _wait_on_stream(self, layer: LayerStep, stream: torch.Stream) -> None:
        if not self._sync.must_wait(layer, stream):
            return
        makers = {Placement.HOST: "upload", Placement.STREAMED: "step"}
        held = [bucket for bucket in self._buckets_of[layer.name] if bucket.placement in makers]
        events = [self._bindings.events[f"{makers[bucket.placement]}/{bucket.index}"] for bucket in held]
        self._sync.wait(layer, stream, events)

    @serialised
    def before_read(self, names: Sequence[str]) -> None:
        """Make the current stream wait for weights that the caller is about to read or write.

        The read or write is outside of their layers' forward, or before it.

        Raises:
            ModelError: their new values are pending while a CUDA graph is captured.
        """
        if self.issuing:
            return  # by the step's own operations, seen by another dispatch mode
        if self.asleep.kinds is not AWAKE:
            self.asleep.require(Kinds.WEIGHTS, f"weight {next(iter(names), None)!r} is read")
        backend = self._backend
        if backend.capturing():
            for name in names:
                if any(layer.phase is LayerPhase.PENDING for layer in self._waits_of[name]):
                    raise _pending_in_capture(f"weight {name!r} is")
                self.read_by_graph = self.read_by_graph or bool(self._waits_of[name])
            return
        stream = None if backend.at_compute() else backend.caller_stream()
        for layer in dict.fromkeys(layer for name in names for layer in self._read_with[name]):
            if stream is None:
                self.wait_for_params(layer.name)
            else:  # the compute stream need not wait for this stream's other work
                self.wait_on_stream(layer.name, stream)

    def shared_now(self) -> frozenset[str]:
        """Return the names of weights on the device whose memory others hold, and may write."""
        return self._targets.shared() if self._watches_holders else frozenset()

    def _wait_for_shared(self) -> None:
        """Wait now for weights whose memory others hold.

        A view that was kept, or `.data`, is read without the weight.
        """
        shared = self.shared_now()
        if self._watches_holders and self._fetcher is not None:
            shared = shared.union(self._fetcher.use_held())
        if shared != self.shared and shared:
            log.info(
                "%d %s at the end of step(), because others hold their memory (views, .data): %s%s",
                len(shared), "weight arrives" if len(shared) == 1 else "weights arrive",
                ", ".join(sorted(shared)[:5]), ", ..." if len(shared) > 5 else "",
            )  # fmt: skip
        self.shared = shared
        wanted = {layer for name in shared for layer in self._read_with[name]}
        for layer in [layer for layer in self._layers.values() if layer in wanted]:
            self.wait_for_params(layer.name)

    def require_no_gradients(self) -> None:
        """Raise ModelError if gradients have been offloaded for a step that is still to come."""
        if any(bucket.ranges for bucket in self._buckets):
            raise ModelError(
                "weights cannot be offloaded, or brought back, between backward and step()",
                why="the optimizer has taken gradients",
                fix="attach and detach after step() or zero_grad()",
            )

    @serialised
    def offload_weights(self, names: Collection[str], fetcher: WeightFetcher | None) -> None:
        """Make `fetcher` bring these weights, all of host buckets, and no others from now on.

        Raises:
            ModelError: gradients have been offloaded.
        """
        self.require_no_gradients()
        self.wait_for_all()
        self.synchronise()
        self._fetcher, self.fetched = fetcher, frozenset(names)
        self._targets.leave_out(self.fetched)
        self._lower()

    # ---------------------------------------------------------------- state that is read or replaced

    def synchronise(self) -> None:
        """Return when all streams are idle. Raises NativeError for a CPU optimizer step that failed; the state is torn
        then.
        """
        try:
            self._backend.synchronise()
        except NativeError:
            self.torn = True
            raise

    def state_changed(self) -> None:
        """Make staging read the state again and drop guesses: state was written while all streams were idle."""
        self._staged = 0
        for bucket in self._buckets:
            bucket.drop_guess()

    def forget_step_bound(self) -> None:
        """Make the next step look up the step counts again, because they were loaded."""
        self._bindings.forget_step_bound()

    @serialised
    def abort(self) -> None:
        """Forget the step that was interrupted. All streams are idle, and the state is about to be replaced."""
        for layer in self._layers.values():
            layer.abort()
        self._slots.give_back(self._slots.held)
        self._release_memory(self._buckets, triggers=False)
        for bucket, state in zip(self._buckets, self._states, strict=True):
            bucket.abort()
            state.settle()
        self._held.clear()
        self._in_flight.clear()
        self._unguessed.clear()
        self._sync.made_on.clear()
        self._staged, self.in_step = 0, False
        self._bindings.forget()
        self._follow_slots()
        self._points = self._schedules.points()

    # ---------------------------------------------------------------- sleep

    @serialised
    def rest(self) -> None:
        """Complete all that was issued, and return the GPU staging buffers, so that device memory can be taken away.

        A step that has begun goes on afterwards. Raises as `synchronise` does.
        """
        if Kinds.WEIGHTS not in self.asleep.kinds:
            self.wait_for_all()
        self._release_in_flight()
        self.synchronise()
        self._slots.give_back(self._slots.held)
        self._slots.pace.interrupted()
        self._staged = 0

    def gradients_here(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the gradients that are taken and in device memory: name, tensor, whether the memory is its owner's."""
        for state, buffers in zip(self._states, self._gradients, strict=True):
            for r, buffer in zip(state.bucket.ranges, buffers, strict=True):
                if buffer.data.numel():
                    yield r.name, buffer.data, buffer.borrowed
        for name, gradient in self._held.items():
            yield name, gradient, False

    def weight_views(self, name: str) -> int:
        """Return how many tensors the executor has over a weight's memory."""
        return self._targets.ours(name)

    @serialised
    def woken(self) -> None:
        """Follow state, gradients and weights whose device memory was allocated again, on the current stream."""
        streams = self._sources(self._backend.compute_key())
        for bucket, buffers in zip(self._buckets, self._gradients, strict=True):
            for buffer in buffers:
                buffer.point_to(buffer.data)
            if bucket.on_device:
                bucket.streams |= streams
        for buffer in (buffer for state in self._states for buffer in state.buffers()):
            buffer.point_to(buffer.data)
        self._targets.woken()
        self._bindings.forget()

    # ---------------------------------------------------------------- issuing

    def _issue(self, triggers: Sequence[str], *, last: bool = True) -> None:
        """Issue the operations of triggers, in this order; only STEP, which comes alone, steps a bucket.

        `last`: no further microbatch is known to come.
        """
        self.issuing = True
        try:
            works = self._bindings.at(tuple(triggers), self._points, last=last)
            works.before.issue()
            if works.stepping is not None:
                self.torn = True
                works.stepping.issue()
        except NativeError:
            self.torn = True  # of some earlier step, whose host function has reported only now
            raise
        finally:
            self.issuing = False


def _pending_in_capture(what: str) -> ModelError:
    """Return the error for a use of weights that nothing in a capture can wait for.

    `what` is the subject of its message, such as "weights of layer 'x' are".
    """
    return ModelError(
        f"{what} still to arrive, and a CUDA graph is captured",
        why="the copies of a step are no part of the graph, and what is captured cannot wait for them",
        fix="call optimizer.wait_for_weights() before the capture",
    )
