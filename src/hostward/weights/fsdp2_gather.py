"""Weights of sharded layers: this rank's parts come before FSDP2's gather reads them, and go when it has.

They come and go by what FSDP2 gathers together, which need not be a layer: experts may be a group of their own, and two
layers one. What is gathered next is guessed from what was; a wrong guess costs a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from hostward.model.layers import Runs
from hostward.schedule.weights import GATHERED_PREFETCH_DEPTH
from hostward.weights.residency import Residency

if TYPE_CHECKING:
    from hostward.distributed import fsdp2


class GatheredLayers:
    """What FSDP2 gathers together of a model's layers, in order of use.

    names: of the layer that each was found in first. offloaded: so many, from the first on, are of layers whose weights
    leave.
    """

    def __init__(self, groups: fsdp2.Groups, layers: Sequence[tuple[str, torch.nn.Module]], count: int) -> None:
        """`count`: so many layers' weights leave. Raises ConfigError if FSDP2 has its parts on the host itself."""
        groups.require_no_policy("weights=", "weights= alone")
        self.groups = groups
        together = [own for own, _ in groups.gathered_together()]
        self._group_of = {id(p): number for number, own in enumerate(together) for p in own}
        found: dict[int, str] = {}
        counts = [0]
        for path, layer in layers:
            # Modules come before what they hold, so the outer group of a layer, which is gathered first, does.
            for number in sorted({self._group_of[id(p)] for p in layer.parameters() if id(p) in self._group_of}):
                found.setdefault(number, path)
            counts.append(len(found))
        self._counts, self.offloaded = counts, counts[count]
        self.numbers, self.names = list(found), list(found.values())
        self.places = {number: at for at, number in enumerate(self.numbers)}
        for number in self.numbers[: self.offloaded]:
            groups.settle(number)

    def runs_of(self, lengths: Sequence[int]) -> Runs:
        """Runs of so many layers, counted in what is gathered of them."""
        ends = [self._counts[end] for end in accumulate(lengths)]
        return Runs(tuple(end - first for first, end in pairwise([0, *ends])))

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether FSDP2 gathers it."""
        return id(parameter) in self._group_of

    def fills(self, parameter: torch.Tensor) -> bool:
        """Whether its part here has its memory for itself."""
        return self.groups.fills(parameter)

    def holders(self, parameter: torch.Tensor) -> int:
        """How many tensors of FSDP2's lie in that memory."""
        return self.groups.holders(parameter)

    def by_group(
        self, found: Sequence[Sequence[tuple[str, torch.nn.Parameter]]]
    ) -> tuple[list[str], list[list[tuple[str, torch.nn.Parameter]]]]:
        """Names, and what was found in layers, of all that leave."""
        held: list[list[tuple[str, torch.nn.Parameter]]] = [[] for _ in range(self.offloaded)]
        for name, parameter in (each for of_layer in found for each in of_layer):
            held[self.places[self._group_of[id(parameter)]]].append((name, parameter))
        return self.names[: self.offloaded], held


class Gathers:
    """Lets parts come and go as FSDP2 tells that it gathers, until `close`."""

    def __init__(self, layers: GatheredLayers, residency: Residency) -> None:
        self._layers, self._residency = layers, residency
        self._runs = Runs((len(layers.numbers),))
        layers.groups.serve(self)

    def needed(self, group: int, stream: torch.Stream | None, *, backward: bool) -> None:
        layers, residency = self._layers, self._residency
        at = layers.places.get(group)
        if at is None:
            if not backward and group < layers.numbers[0]:  # what comes before the layers: a forward begins
                self._fetch(range(GATHERED_PREFETCH_DEPTH))
            return
        if at < layers.offloaded and stream is None:
            residency.ensure(at)
        elif at < layers.offloaded and stream is not None:
            # Not by a wait of the compute lane: what it still has to do would come before the gather then.
            residency.hold(at, stream)
        run = self._runs.beside(at)
        ahead = (at - steps if backward else at + steps for steps in range(1, GATHERED_PREFETCH_DEPTH + 1))
        self._fetch(place for place in ahead if place in run)

    def in_runs(self, lengths: Sequence[int]) -> None:
        """So many layers are gathered one after another; nothing is fetched ahead beyond the end of such a run."""
        self._runs = self._layers.runs_of(lengths)

    def expect(self, number: int, *, backward: bool) -> None:
        """That run comes next."""
        run = self._runs.run(number)
        self._fetch(reversed(run[-GATHERED_PREFETCH_DEPTH:]) if backward else run[:GATHERED_PREFETCH_DEPTH])

    def _fetch(self, places: Iterable[int]) -> None:
        """Ahead of their gathers, unless they are whole."""
        layers = self._layers
        for at in places:
            if 0 <= at < layers.offloaded and layers.groups.is_divided(layers.numbers[at]):
                self._residency.prefetch(at)

    def awaited(self, group: int, gather: torch.Event | None) -> None:
        at = self._layers.places.get(group)
        if at is not None and at < self._layers.offloaded:
            self._residency.awaited(at, gather)

    def gathered(self, group: int) -> None:
        at = self._layers.places.get(group)
        if at is not None and at < self._layers.offloaded:
            self._residency.release(at)
        elif at == len(self._layers.numbers) - 1 and not _backward_follows():
            # FSDP2 leaves the root whole then, so nothing else tells of the next forward.
            self._fetch(range(GATHERED_PREFETCH_DEPTH))

    def close(self) -> None:
        self._layers.groups.close()


def _backward_follows() -> bool:
    """Or is under way: it runs without gradients of its own."""
    return torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
