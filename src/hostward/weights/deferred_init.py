"""Keep weights on the CPU until `attach`, for models with more weights than device memory.

Such a weight is a parameter on the device whose storage has no bytes; its values stay on the CPU until the optimizer or
`attach` has copied them. Reading the weight before that raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from hostward.errors import ConfigError, DeviceError, ModelError
from hostward.model.deferred_weights import WAITING, is_away, waits
from hostward.model.fence import Fence, unfenced, up
from hostward.model.layers import find_layers
from hostward.model.parameters import local_of
from hostward.weights.guards import guarded
from hostward.weights.offload import Weights, weights_of
from hostward.weights.policy import count_sharing, why_stays


@unfenced
def move(
    model: torch.nn.Module,
    device: torch.device | str,
    *,
    weights: Weights | int | None = None,
    layers: Sequence[torch.nn.Module] | None = None,
) -> None:
    """Move a model from the CPU to a device, except for the weights that `attach` will offload.

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        hostward.move(model, "cuda")
        optimizer = hostward.AdamW(model, offload_fraction=1.0, streamed_fraction=0.0)
        run = hostward.attach(model, optimizer, weights=hostward.Weights())

    The device needs memory for one layer's weights at a time, and for those that are not offloaded. Until `attach`, the
    model's forward, its state_dict, copies and moves raise ModelError. A weight that stays on the CPU has no device
    memory: reading it directly ends the process.

    Args:
        model: on the CPU, without gradients, and not sharded: FSDP2 shards parameters on the device that holds them.
        weights: as for `attach`; None: `Weights()`.
        layers: the layers in order of use, if they cannot be found.

    Raises:
        ConfigError: options out of range. DeviceError: there is no such device. ModelError: no layers were found; a
            weight is not on the CPU, or has a gradient.
    """
    device, found = _checked_device(device), find_layers(model, layers)
    how = weights_of(Weights() if weights is None else weights, len(found))
    for name, parameter in model.named_parameters():
        if local_of(parameter) is not parameter:
            raise ModelError(
                f"move() of a sharded model: weight {name!r} belongs to several ranks",
                why="its parts are on the device on which fully_shard found it, and are offloaded from there",
                fix="leave move() out: fully_shard the model on the device, then attach(weights=...)",
            )
        if parameter.device.type != "cpu" or is_away(parameter) or parameter.grad is not None:
            raise ModelError(
                f"weight {name!r} {'has a gradient' if parameter.grad is not None else 'is not on the CPU'}",
                why="move() takes a model from the CPU to the device, before it is trained",
                fix="call it once, right after the model was built or loaded on the CPU",
            )
    sharing = count_sharing(model, [layer for _, layer in found])
    chosen = found[: len(found) - 1 if how.num_layers is None else how.num_layers]
    leaving = {
        parameter
        for path, layer in chosen
        for name, parameter in layer.named_parameters()
        if why_stays(f"{path}.{name}", parameter, sharing, parameter.requires_grad, how.min_elements, parameter.device)
        is None
    }
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in leaving:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    _Waiting(model, leaving, device)


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:  # torch does not know the device
        raise ConfigError(
            f"device={device!r} is no device", why=str(error).partition("\n")[0], fix='write "cuda", or "cuda:1"'
        ) from error
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise DeviceError(
            f"device={str(found)!r}, but {f'there are {count} CUDA devices' if count else 'there is no CUDA device'}",
            fix='move(model, "cpu") simulates one; hostward doctor reports what torch sees',
        )
    return found


class _Waiting:
    """Hold parameters without bytes, and the hooks that raise when they are read, until all have been attached."""

    def __init__(self, model: torch.nn.Module, leaving: set[torch.nn.Parameter], device: torch.device) -> None:
        self._left = len(leaving)
        self._handles: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []
        for path, module in model.named_modules():
            held = {name: p for name, p in module.named_parameters(path, recurse=False) if p in leaving}
            if held:
                refused = _Refused(next(iter(held)))
                if not self._undo:
                    # Otherwise a move of the model would fail half way, after the modules before this one.
                    self._undo.append(guarded(model, "_apply", refused))
                self._handles.append(module.register_forward_pre_hook(refused))
                self._handles.append(module.register_state_dict_pre_hook(refused))
                self._undo.append(guarded(module, "_apply", refused))
            below = [name for name, p in module.named_parameters(path) if p in leaving]
            if below:  # a load that raised at the first of them would have written those before it
                self._handles.append(module.register_load_state_dict_pre_hook(_Refused(below[0])))
        for parameter in leaving:
            value = parameter.data
            empty = torch.empty(value.shape, dtype=value.dtype, device=device)
            empty.untyped_storage().resize_(0)
            parameter.data = empty
            setattr(parameter, WAITING, (value, self._taken))
        names = {id(p): name for name, p in model.named_parameters()}
        self._fence = Fence(leaving, _Refusing(names), weak=True)
        up(self._fence.entries())
        self._undo.append(self._fence.close)

    def _taken(self) -> None:
        self._left -= 1
        if not self._left:
            for handle in self._handles:
                handle.remove()
            for undo in self._undo:
                undo()


class _Refusing:
    """Raise for every read that a `Fence` reports."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def read(self, parameters: Sequence[torch.Tensor]) -> NoReturn:
        raise waits(self._names[id(parameters[0])])

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        """Never called, since `read` raises first."""


class _Refused:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise waits(self._name)
