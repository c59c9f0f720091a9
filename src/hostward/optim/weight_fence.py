"""WeightFence holds the fence before one optimizer's weights: up from `step()` until a layer's forward, and again after
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from hostward.model.fence import Fence, down, up
from hostward.model.parameters import ParamRecord
from hostward.optim.master_sync import WeightWatch
from hostward.optim.step_executor import StepExecutor


class WeightFence:
    """WeightFence makes readers wait for weights, and reports to the watch what may be written unnoticed.

    Within forward it is down for the layers that have been entered: their weights are there, so their operations cost
    nothing more. Elsewhere it stays up although nothing may be pending: `p.data` hands out memory that is written
    without the weight's version counter, at any time.

    Args:
        layers: of each tracked parameter, by name, the layer with whose forward it is used.
    """

    def __init__(
        self, executor: StepExecutor, watch: WeightWatch, tracked: Sequence[ParamRecord], layers: Mapping[str, str]
    ) -> None:
        self._executor = executor
        parameters = [t.parameter for t in tracked]
        self._fence = Fence(parameters, _Reads(executor, watch, tracked))
        self._all = self._fence.entries()
        self._layer_of = layers
        of_layer: dict[str, list[torch.nn.Parameter]] = {}
        for t in tracked:
            of_layer.setdefault(layers[t.name], []).append(t.parameter)
        self._of_layer = {layer: self._fence.entries(held) for layer, held in of_layer.items()}
        self._down: set[str] = set(self._of_layer)
        self.raise_all()

    def enter(self, layer: str) -> None:
        """Wait for the weights of a layer before its forward, which then sees plain ones."""
        self._executor.wait_for_params(layer)
        if layer in self._of_layer and layer not in self._down:
            self._down.add(layer)
            down(self._of_layer[layer])

    def leave(self, name: str) -> None:
        """Raise the fence of a parameter's layer after backward has made its gradient.

        Backward may have recomputed the layer before that.
        """
        layer = self._layer_of[name]
        if layer in self._down:
            self._down.discard(layer)
            up(self._of_layer[layer])

    def raise_all(self) -> None:
        """Raise the fence of all layers, after forward of the model or a step."""
        if self._down:
            self._down.clear()
            up(self._all)

    def close(self) -> None:
        self._fence.close()


class _Reads:
    """_Reads is the reader of `Fence`. Records of fences outlive optimizers that are dropped; it keeps none alive."""

    def __init__(self, executor: StepExecutor, watch: WeightWatch, tracked: Sequence[ParamRecord]) -> None:
        self._executor, self._watch = weakref.ref(executor), weakref.ref(watch)
        self._tracked = {id(t.parameter): t for t in tracked}

    def read(self, parameters: Sequence[torch.Tensor]) -> None:
        executor = self._executor()
        if executor is not None:
            executor.before_read([self._tracked[id(p)].name for p in parameters])

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        watch = self._watch()
        if watch is not None:
            watch.exposed(self._tracked[id(parameter)], alias)
