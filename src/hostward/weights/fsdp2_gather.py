"""Prefetch this rank's parts of sharded weights before FSDP2's all-gather reads them, and free them afterwards.

Weights are offloaded and prefetched by FSDP2's groups, which need not be layers: experts may be a separate group, and
two layers may share one. The next group is predicted from the one before; a wrong prediction costs one copy.
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
    """List the FSDP2 groups of a model's layers, in order of use.

    names: for each group, the name of the first layer that contains it. offloaded: number of groups, from the first on,
    that belong to layers whose weights are offloaded.
    """

    def __init__(self, groups: fsdp2.Groups, layers: Sequence[tuple[str, torch.nn.Module]], count: int) -> None:
        """`count`: number of layers to offload. Raises ConfigError if FSDP2 itself offloads its parts to the host."""
        groups.require_no_policy("weights=", "weights= alone")
        self.groups = groups
        together = [own for own, _ in groups.gathered_together()]
        self._group_of = {id(p): number for number, own in enumerate(together) for p in own}
        found: dict[int, str] = {}
        counts = [0]
        for path, layer in layers:
            # Modules are listed before their children, so a layer's outer group, which is gathered first, comes first.
            for number in sorted({self._group_of[id(p)] for p in layer.parameters() if id(p) in self._group_of}):
                found.setdefault(number, path)
            counts.append(len(found))
        self._counts, self.offloaded = counts, counts[count]
        self.numbers, self.names = list(found), list(found.values())
        self.places = {number: at for at, number in enumerate(self.numbers)}
        for number in self.numbers[: self.offloaded]:
            groups.settle(number)

    def runs_of(self, lengths: Sequence[int]) -> Runs:
        """Translate run lengths in layers into run lengths in FSDP2 groups."""
        ends = [self._counts[end] for end in accumulate(lengths)]
        return Runs(tuple(end - first for first, end in pairwise([0, *ends])))

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether FSDP2 gathers the parameter."""
        return id(parameter) in self._group_of

    def fills(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank's part of the parameter fills its storage alone."""
        return self.groups.fills(parameter)

    def holders(self, parameter: torch.Tensor) -> int:
        """Return how many tensors of FSDP2 use the storage of this rank's part."""
        return self.groups.holders(parameter)

    def by_group(
        self, found: Sequence[Sequence[tuple[str, torch.nn.Parameter]]]
    ) -> tuple[list[str], list[list[tuple[str, torch.nn.Parameter]]]]:
        """Return the names of the offloaded groups, and the weights that were found in layers, by group."""
        held: list[list[tuple[str, torch.nn.Parameter]]] = [[] for _ in range(self.offloaded)]
        for name, parameter in (each for of_layer in found for each in of_layer):
            held[self.places[self._group_of[id(parameter)]]].append((name, parameter))
        return self.names[: self.offloaded], held


class Gathers:
    """Prefetch and free weights as FSDP2 reports its gathers, until `close`."""

    def __init__(self, layers: GatheredLayers, residency: Residency) -> None:
        self._layers, self._residency = layers, residency
        self._runs = Runs((len(layers.numbers),))
        layers.groups.serve(self)

    def needed(self, group: int, stream: torch.Stream | None, *, backward: bool) -> None:
        layers, residency = self._layers, self._residency
        at = layers.places.get(group)
        if at is None:
            if not backward and group < layers.numbers[0]:  # a group before the layers: a forward begins
                self._fetch(range(GATHERED_PREFETCH_DEPTH))
            return
        if at < layers.offloaded and stream is None:
            residency.ensure(at)
        elif at < layers.offloaded and stream is not None:
            # Not by a wait of the compute stream: the gather would then wait for the work it still holds.
            residency.wait_on_stream(at, stream)
        run = self._runs.beside(at)
        ahead = (at - steps if backward else at + steps for steps in range(1, GATHERED_PREFETCH_DEPTH + 1))
        self._fetch(place for place in ahead if place in run)

    def in_runs(self, lengths: Sequence[int]) -> None:
        """Set the number of layers of each run; nothing is prefetched beyond the end of a run."""
        self._runs = self._layers.runs_of(lengths)

    def expect(self, number: int, *, backward: bool) -> None:
        """Prefetch the weights that the given run needs first, because it runs next."""
        run = self._runs.run(number)
        self._fetch(reversed(run[-GATHERED_PREFETCH_DEPTH:]) if backward else run[:GATHERED_PREFETCH_DEPTH])

    def _fetch(self, places: Iterable[int]) -> None:
        """Prefetch groups before they are gathered, unless they are unsharded now."""
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
            # FSDP2 leaves the root unsharded then, so no other event announces the next forward.
            self._fetch(range(GATHERED_PREFETCH_DEPTH))

    def close(self) -> None:
        self._layers.groups.close()


def _backward_follows() -> bool:
    """Return whether backward will follow or is running; backward itself runs with gradients disabled."""
    return torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
