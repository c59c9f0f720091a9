"""One microbatch of a training step: which gradients the optimizer takes from its backward, and what if that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch._compile import _disable_dynamo

from hostward.errors import HostwardError, ModelError
from hostward.fence import unfenced

if TYPE_CHECKING:
    from .gradients import Handover
    from .step import StepIssuer


class Accumulation:
    """What `AdamW.accumulate` returns: gradients are taken as they become final, and those that are added up on the
    host in every microbatch.
    """

    def __init__(self, handover: Handover, issuer: StepIssuer, abandon: Callable[[], None], *, last: bool) -> None:
        self._handover = handover
        self._issuer = issuer
        self._abandon = abandon
        self._last = last

    @_disable_dynamo
    @unfenced
    def __enter__(self) -> None:
        if self._handover.inside:
            raise ModelError(
                "accumulate() inside accumulate()", why="a microbatch is the last one or not", fix="use one block each"
            )
        self._handover.drop_cleared()
        self._handover.armed, self._handover.inside = self._last, True
        self._handover.reduced_later = False

    @_disable_dynamo
    @unfenced
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        handover = self._handover
        handover.armed = handover.inside = False
        if kind is not None:
            if self._last or handover.summed & handover.taken:
                self._abandon()
            return
        try:
            if self._last:
                # Gradients that the last microbatch did not touch are final all the same.
                for t in handover.waiting():
                    if t.name not in handover.tied:
                        handover.hand_over(t)
            self._issuer.flush(last=self._last)
        except HostwardError:
            self._abandon()
            raise
