"""This module gives weight offloading the optimizer's host copies of weights, and who writes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch

from hostward.core.inventory import Range
from hostward.core.placement import Placement
from hostward.model.parameters import ParamRecord
from hostward.optim.bucket_state import BucketState, pieces
from hostward.optim.master_sync import WeightWatch
from hostward.optim.sleeping import Sleeper
from hostward.optim.state_dict import StateAccess
from hostward.optim.step_executor import StepExecutor, WeightFetcher
from hostward.runtime.backend import Buffer, Event

Present = Callable[[str], AbstractContextManager[None]]
"""Context within which the weight of this name is on the device."""


@final
class WeightCopies:
    """WeightCopies gives access to the host copies of weights that the CPU optimizer step writes.

    It covers the buckets that exist when it is made; no parameter group is added while weights are offloaded.
    """

    def __init__(
        self,
        tracked: Sequence[ParamRecord],
        states: Sequence[BucketState],
        steps: StepExecutor,
        watch: WeightWatch,
        access: StateAccess,
        follow: Callable[[], None],
        discard: Callable[[], None],
        sleeper: Sleeper,
    ) -> None:
        self._steps, self._watch, self._access = steps, watch, access
        self._parts = pieces(states)
        self._index = {state: b for b, state in enumerate(states)}
        self.tracked = {t.parameter: t for t in tracked}
        """Records by parameter object."""
        self.lock = steps.lock
        """Lock held while a step is issued, and by whoever reads weights from another thread."""
        self.sleeper = sleeper
        """Frees offloaded weights that are on the device when the optimizer's weights are put to sleep."""
        self.discard_gradients = discard
        """Forget the gradients that have been offloaded."""
        self.follow = follow
        """Take the fp32 main weights anew from weights that other code has written."""

    def placements(self, name: str) -> set[Placement]:
        """Return where the state of a parameter is; empty for one of which this process has no element."""
        return {state.placement for state, _, _ in self._parts.get(name, ())}

    def parts(self, name: str) -> Iterator[tuple[Range, Buffer, Event]]:
        """Yield each part's range, the host copy of its weight, and the event after the CPU step writing it."""
        for state, i, r in self._parts.get(name, ()):
            yield r, state.weights[i], self._steps.step_event(self._index[state])

    def changed(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether other code wrote the weight and the optimizer has not followed that yet."""
        return not self._watch.knows(self.tracked[parameter])

    def offload(self, names: Collection[str], fetcher: WeightFetcher, present: Present) -> None:
        """Let `fetcher` reload these weights and no others from now on.

        They are on the device within `present(name)`.

        Args:
            names: of weights whose state is on the host as a whole.

        Raises:
            ModelError: gradients have been offloaded.
        """
        self._steps.offload_weights(names, fetcher)
        self._watch.follow(names, present)
        self._access.present = present

    def require_no_gradients(self) -> None:
        """Raise ModelError when gradients have been offloaded, so that `give_back` is not possible now."""
        self._steps.require_no_gradients()

    def give_back(self) -> None:
        """Keep all weights on the device for good. Raises ModelError when gradients have been offloaded."""
        self._steps.offload_weights(frozenset(), None)
        self._watch.follow(frozenset(), None)
        self._access.present = None
