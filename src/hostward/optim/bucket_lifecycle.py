"""Track the life of a bucket within one training step, of a layer's weights between two steps, and what is asleep.

`StepExecutor` issues operations; what has happened to a bucket or a layer is recorded here and nowhere else. Each
method is one transition, and raises OrderingError where it is not legal. A transition is recorded after its operations
have been issued, so one that is interrupted is issued again.

                 accept        sent              released         stepped    used
    host         IDLE -> ACCUMULATING -> GRAD_IN_FLIGHT -> GRAD_OFFLOADED -> STEPPED -> IDLE
    streamed     IDLE -> ACCUMULATING -> GRAD_READY  ----------------------> STEPPED -> IDLE
    device       IDLE -> ACCUMULATING -> GRAD_READY  ----------------------> IDLE

`retract` and `reopen` lead back to ACCUMULATING. With overlap=False host buckets take the transitions of streamed ones.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum, Flag, auto

import torch

from hostward.core.placement import Placement
from hostward.errors import AsleepError, OrderingError


class BucketPhase(Enum):
    """Names how far a bucket has come in the present step, and where its bytes are meanwhile.

    Optimizer state is stored where `Placement` says (in pinned host memory for streamed buckets, which are copied to a
    GPU staging buffer for their step); weights are on the device, unless they are offloaded. The members describe what
    differs.
    """

    IDLE = "idle"
    """Gradient: none of this step. State and weights: final, of the last step that has stepped the bucket."""
    ACCUMULATING = "accumulating"
    """Gradient: some ranges are in device memory, where autograd has made them. Ranges that are not `unsent` were sent
    before (of an earlier microbatch, or before another range was retracted) and are on the host. State and weights:
    final.
    """
    GRAD_READY = "gradient ready"
    """Gradient: all of it is in device memory until the step. Its partial sums for the norm are made, unless nothing
    overlaps. State and weights: final.
    """
    GRAD_IN_FLIGHT = "gradient in flight"
    """Gradient: in device memory, and a D2H copy of it to the host is issued. State and weights: final."""
    GRAD_OFFLOADED = "gradient offloaded"
    """Gradient: in host memory only, in its landing buffer or the float32 total over the microbatches. The device
    memory has been returned. State and weights: final.
    """
    STEPPED = "stepped"
    """The step is issued. Gradient: a host bucket's is read by the CPU optimizer step from host memory, a streamed
    bucket's is still in device memory. State: being updated. Weights: those on the device are old until the compute
    stream has waited for the layer; the new ones are on the host, or in an H2D copy, or being written by the update
    stream.
    """


SENT = (BucketPhase.GRAD_READY, BucketPhase.GRAD_IN_FLIGHT, BucketPhase.GRAD_OFFLOADED)
"""Phases of a bucket whose gradient trigger has come, and none of whose gradients was retracted since."""


class BucketStep:
    """Holds one bucket's phase, and which of its ranges have gradients.

    Args:
        index: the bucket's index, for errors.
        placement: where it is stepped.
        ranges: how many the bucket has.
        overlap: its gradients are offloaded during backward if it takes a CPU optimizer step.
        accumulates: its gradients are accumulated on the host, microbatch by microbatch.
        guesses: its step is guessed when all of its gradients are offloaded.
    """

    __slots__ = (
        "_offloads", "accumulated", "accumulates", "guessed", "guesses", "index", "last_ranges", "late",
        "on_device", "overlap", "phase", "placement", "ranges", "size", "streams", "summed", "unsent",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        placement: Placement,
        ranges: int,
        *,
        overlap: bool = True,
        accumulates: bool = False,
        guesses: bool = False,
    ) -> None:
        self.index, self.placement, self.size = index, placement, ranges
        self.overlap, self.accumulates, self.guesses = overlap, accumulates, guesses
        self.guessed = False
        """A guess of this step was issued, with the gradients and the state that there are now."""
        self.late = False
        """Its gradients are sent at the step, so that a guess gains no time."""
        self._offloads = overlap and placement is Placement.HOST
        self.phase = BucketPhase.IDLE
        self.ranges: set[int] = set()
        """Ranges with a gradient in this step."""
        self.unsent: set[int] = set()
        """Ranges with a gradient in device memory that has not been sent anywhere."""
        self.last_ranges: set[int] = set()
        """Ranges with a gradient in the previous step."""
        self.accumulated: set[int] = set()
        """Ranges with a total of this step on the host."""
        self.summed: set[int] = set()
        """Accumulated ranges whose partial sums for the norm are of the present total."""
        self.on_device = False
        """Some device memory of its gradients has not been returned yet: of this step or, once stepped, of the last."""
        self.streams: set[int] = set()
        """Stream keys of possible owners of its gradients' memory."""

    @property
    def complete(self) -> bool:
        """Report whether every range has a gradient.

        Where gradients are accumulated on the host, only gradients of this microbatch count.
        """
        return len(self.unsent if self.accumulates else self.ranges) == self.size

    @property
    def can_guess(self) -> bool:
        """Report whether its step can be guessed: before the step, and with gradients of all ranges, which are sent."""
        return self.guesses and not self.late and self.phase in SENT and len(self.ranges) == self.size

    def accept(self, index: int, streams: Set[int]) -> None:
        """Record that a range has a gradient, which is memory of one of these streams."""
        if self.phase is not BucketPhase.ACCUMULATING:
            if self.phase is not BucketPhase.IDLE:
                raise self._illegal(f"gets a gradient for range {index}", "retract it first")
            self.phase = BucketPhase.ACCUMULATING
        self.ranges.add(index)
        self.unsent.add(index)
        self.on_device = True
        self.streams |= streams

    def accept_all(self, streams: Set[int]) -> None:
        """Record that all ranges have gradients, which are memory of these streams."""
        if self.phase is not BucketPhase.IDLE:
            raise self._illegal("gets all of its gradients at once", "retract those that it has first")
        self.phase = BucketPhase.ACCUMULATING
        self.ranges, self.unsent = set(range(self.size)), set(range(self.size))
        self.on_device = True
        self.streams |= streams

    def retract(self, index: int) -> None:
        """Withdraw the gradient of a range from this step, because more will be added to it.

        It counts again once it is accepted again. The other ranges stay as they are.
        """
        if index not in self.ranges or self.phase in (BucketPhase.IDLE, BucketPhase.STEPPED):
            raise self._illegal(f"is asked to reload the gradient of range {index}", "accept it first")
        if self.accumulates:
            raise self._illegal(f"is asked to reload range {index} of a total on the host", "flush it instead")
        self.ranges.discard(index)
        self.unsent.discard(index)
        self.guessed = False
        self.phase = BucketPhase.ACCUMULATING if self.ranges else BucketPhase.IDLE

    def sent(self, *, last: bool = True) -> None:
        """Record that the operations of its gradient trigger are issued. `last`: no further microbatch is known to
        come.
        """
        if self.phase is not BucketPhase.ACCUMULATING:
            raise self._illegal("is sent", "accept a gradient first")
        if self.accumulates:
            self.accumulated |= self.unsent
            self.summed = self.summed | self.unsent if last else self.summed - self.unsent
        if self.overlap:
            self.unsent.clear()
        self.guessed = False
        self.phase = BucketPhase.GRAD_IN_FLIGHT if self._offloads else BucketPhase.GRAD_READY

    def released(self) -> None:
        """Record that the compute stream has waited for the copies of its gradients, and their memory is returned."""
        if self.phase is not BucketPhase.GRAD_IN_FLIGHT:
            raise self._illegal("returns the memory of gradients that were copied", "send it first")
        self.phase = BucketPhase.GRAD_OFFLOADED

    def reopen(self) -> None:
        """Accept more gradients after the bucket was sent.

        They are those of the next microbatch, where gradients are accumulated on the host and the previous ones have
        been released, or of a step that failed before anything was stepped.
        """
        if self.phase not in ((BucketPhase.GRAD_OFFLOADED,) if self.accumulates else SENT):
            raise self._illegal("gets more gradients after it was sent", "send it first, and release what is summed")
        self.phase = BucketPhase.ACCUMULATING

    def guess(self) -> None:
        """Record that the operations of its guess trigger are issued; there are none if it cannot be guessed."""
        self.guessed = self.can_guess

    def drop_guess(self) -> None:
        """Make the step without the guess, because the state has changed since. Legal in every phase."""
        self.guessed = False

    def return_memory(self) -> set[int]:
        """Forget the device memory of its gradients. Returns the keys of the streams that it goes back to."""
        streams, self.streams, self.on_device = self.streams, set(), False
        return streams

    def stepped(self) -> None:
        """Record that the step's operations are issued."""
        if self.phase in (BucketPhase.ACCUMULATING, BucketPhase.GRAD_IN_FLIGHT, BucketPhase.STEPPED):
            raise self._illegal("is stepped", "send and release its gradients, and let its layer be used first")
        self.last_ranges = self.ranges
        here = self.placement is Placement.DEVICE or self.phase is BucketPhase.IDLE
        self._clear()
        self.phase = BucketPhase.IDLE if here else BucketPhase.STEPPED

    def used(self) -> None:
        """Record that the compute stream has waited for its new weights."""
        if self.phase is not BucketPhase.STEPPED:
            raise self._illegal("has its new weights waited for", "step it first")
        self.phase = BucketPhase.IDLE

    def discard(self) -> None:
        """Drop its gradients, with which no step will be made.

        A bucket that was stepped before stays so. Legal in every phase.
        """
        self._clear()
        if self.phase is not BucketPhase.STEPPED:
            self.phase = BucketPhase.IDLE

    def abort(self) -> None:
        """Reset the bucket while all streams are idle, before state and weights are replaced. Legal in every phase."""
        self._clear()
        self.phase = BucketPhase.IDLE

    def _clear(self) -> None:
        self.ranges, self.unsent, self.accumulated, self.summed = set(), set(), set(), set()
        self.guessed = self.late = False

    def _illegal(self, what: str, fix: str) -> OrderingError:
        return OrderingError(
            f"bucket {self.index} ({self.placement.value}) {what}, and it is {self.phase.value}",
            why="its bytes are elsewhere, or used by operations that nothing would wait for",
            fix=fix,
        )


class LayerPhase(Enum):
    """Names who has waited for the weights of a layer since the last step."""

    READY = "ready"
    """The compute stream has waited for them, for a use of the layer; or no step was made yet."""
    PENDING = "pending"
    """A step has been issued, and the compute stream has not waited for the new weights."""
    UNREPORTED = "unreported"
    """The compute stream has waited for them because the next step began: no use of the layer was ever reported."""


class LayerStep:
    """Records, for one layer between two steps, who has waited for its weights and whether uploads were issued."""

    __slots__ = ("external", "name", "phase", "upload_issued", "waited_by")

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = LayerPhase.READY
        self.waited_by: set[int] = set()
        """Stream keys of the compute streams that have waited for them since the last step; empty before the first."""
        self.external: set[torch.Stream] | None = None
        """Streams other than the compute stream that have waited. None: no step was made, and there is nothing to wait
        for.
        """
        self.upload_issued = False
        """Its upload trigger has come since the last step."""

    def stepped(self) -> None:
        """Record that a step has been issued."""
        if self.phase is LayerPhase.PENDING:
            raise self._illegal("is stepped again", "let the compute lane wait for it first")
        self.phase = LayerPhase.PENDING
        self.waited_by, self.external, self.upload_issued = set(), set(), False

    def waited(self, key: int) -> None:
        """Record that the compute stream, whose key is `key`, has waited for its weights."""
        if self.phase is not LayerPhase.PENDING:
            raise self._illegal("is waited for", "ask whether it is pending")
        self.phase = LayerPhase.READY
        self.waited_by = {key}

    def waited_on(self, stream: torch.Stream) -> None:
        """Record that a stream besides the compute stream has been made to wait for its weights."""
        if self.external is None:
            raise self._illegal("is waited for on another stream", "make a step first")
        self.external.add(stream)

    def unreported(self) -> None:
        """Record that the next step waited for its weights because no use of the layer was reported."""
        if self.phase is not LayerPhase.READY:
            raise self._illegal("is found not to have been used", "let the compute lane wait for it first")
        self.phase = LayerPhase.UNREPORTED

    def reported(self) -> None:
        """Record that a use of the layer is reported, if late. Legal in every phase."""
        if self.phase is LayerPhase.UNREPORTED:
            self.phase = LayerPhase.READY

    def abort(self) -> None:
        """Reset the layer while all streams are idle, before its weights are replaced. Legal in every phase."""
        if self.phase is LayerPhase.PENDING:
            self.phase = LayerPhase.READY

    def _illegal(self, what: str, fix: str) -> OrderingError:
        return OrderingError(
            f"layer {self.name!r} {what}, and its weights are {self.phase.value}",
            why="a wait that is not recorded would be left out, or made twice",
            fix=fix,
        )


class Kinds(Flag):
    """Names what `AdamW.sleep` moves to the host; a value is any set of them."""

    NONE = 0
    STATE = auto()
    """Optimizer state that is stored on the device. Asleep: no step, and nothing that reads or sets the state."""
    GRADIENTS = auto()
    """Gradients in device memory. Asleep: none is read, added to or taken; weights may be read."""
    WEIGHTS = auto()
    """Weights, trained or frozen. Asleep: nobody reads or writes them, and nothing of the optimizer runs."""

    @property
    def names(self) -> list[str]:
        """Return the names that a caller gives: "state", "gradients", "weights"."""
        return [str(kind.name).lower() for kind in self]


AWAKE = Kinds.NONE
"""Nothing is asleep. Whoever is called for every weight compares with this by identity before it asks `require`."""


class Asleep:
    """Holds which kinds of device memory are asleep, in one value, and refuses what needs them.

    Every set may follow every other: a kind falls asleep once its bytes are on the host, before its device memory is
    freed, and is awake again once its bytes are back. Both are recorded after the copies, so that one that fails or is
    interrupted leaves the value that tells where the bytes are.
    """

    __slots__ = ("kinds",)

    def __init__(self) -> None:
        self.kinds = AWAKE

    def require(self, needed: Kinds, use: str) -> None:
        """Raise AsleepError if one of the kinds `needed` is asleep. `use`: what is refused, the error's subject."""
        away = self.kinds & needed
        if away:
            names = " and ".join(away.names)
            raise AsleepError(
                f"{use} while {names} {'is' if away is Kinds.STATE else 'are'} asleep",
                why="sleep() has moved the bytes to the host, and freed their device memory",
                fix="call optimizer.wake() first",
            )
