"""Steps of an optimizer some of whose weights lie on the host until a layer is used, and come by themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from hostward.engine.backend import Backend, Event
from hostward.errors import ModelError
from hostward.fence import unfenced
from hostward.lowering.optimizer import StepShape, later_uploads, upload_point
from hostward.plan import Placement

from .binding import Bindings
from .points import PointIssuer, serialised
from .state import BucketState, require_arrived
from .targets import Targets
from .totals import Totals

if TYPE_CHECKING:
    from .weight_residency import Residency


class FetchedWeights(PointIssuer):
    """The part of a step that knows which weights are fetched, and what is uploaded later because of that."""

    _targets: Targets
    _layers: tuple[str, ...]
    """The use point's layer of each bucket."""
    pending: set[str]

    def __init__(self, backend: Backend, states: Sequence[BucketState], bindings: Bindings, totals: Totals) -> None:
        super().__init__(backend, states, bindings, totals)
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

    @abstractmethod
    def use_all(self) -> None: ...

    @abstractmethod
    def synchronise(self) -> None: ...

    @abstractmethod
    def _lower(self) -> None: ...

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
            self._backend.hold(stream, [self._bindings.events[name] for name in names])

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
