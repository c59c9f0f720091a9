"""What a layer is given: which of these tensors stay on the device although the layer saves them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping

import torch

from .saved_tensors import Why


class Given:
    """Inputs of layers, in one forward. Holds none of them."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By the tensor's object: it, and its version."""

    def begin(self) -> None:
        """A forward begins."""
        self._before.clear()

    def staying(self, inputs: object, *, within: bool) -> dict[int, Why]:
        """Storages that stay, by the address of their object, for a layer that is called with `inputs`.

        Those without a gradient are the caller's: masks, rotary tables. Of those with one, which go from layer to layer
        (an encoder's output, a position bias), the caller holds one that an earlier layer of this forward was given as
        well: a copy in every layer would free nothing. `within`: the layer is called by another one, and may pass on
        its inputs.
        """
        found, new = {}, {}
        for tensor in tensors_of(inputs):
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                continue
            if not tensor.requires_grad:
                found[tensor.untyped_storage()._cdata] = Why.SHARED
            elif not within and self._again(tensor):
                found[tensor.untyped_storage()._cdata] = Why.AGAIN
            elif not within:
                new[id(tensor)] = weakref.ref(tensor), tensor._version
        self._before |= new
        return found

    def _again(self, tensor: torch.Tensor) -> bool:
        before = self._before.get(id(tensor))
        return before is not None and before[0]() is tensor and before[1] == tensor._version


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Tensors within arguments or outputs of a module."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
