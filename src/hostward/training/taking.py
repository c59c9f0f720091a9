"""Gradients that a step has taken: on their way to where buckets are stepped, and back if more is added."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain

import torch

from hostward.engine.backend import Backend
from hostward.inspect import Tracked
from hostward.lowering.optimizer import GRADIENTS_IN_FLIGHT, StepShape, gradient_point, release_point
from hostward.plan import Placement
from hostward.schedule import Lane

from .binding import Bindings
from .fetched import FetchedWeights
from .points import serialised
from .slots import Slots
from .state import BucketState
from .totals import Totals

TOGETHER = 8
"""Buckets whose points are issued together, at most: the device need not wait for the last of hundreds."""


class TakenGradients(FetchedWeights):
    """The part of a step that takes gradients, and issues what their buckets do then."""

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

    def __init__(self, backend: Backend, states: Sequence[BucketState], bindings: Bindings, totals: Totals) -> None:
        super().__init__(backend, states, bindings, totals)
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

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _stage(self, slots: int) -> None: ...

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
            self._backend.let_overwrite("gradient", {self._streams[key] for key in apart} | self._makers)
