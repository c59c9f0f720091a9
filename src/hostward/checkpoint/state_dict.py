"""Name the state of a model and its optimizer for a checkpoint, and convert it back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hostward.checkpoint.save_plan import Value
from hostward.core.inventory import FP8_BLOCK, MOMENTS
from hostward.model.parameter_names import plain_name
from hostward.model.parameters import is_plain, local_of
from hostward.optim.state_dict import Rows, saved_dtypes
from hostward.optim.state_reader import Source, StateSources, Stretch

if TYPE_CHECKING:
    from hostward.optim.adamw import AdamW

MODEL, OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True, slots=True)
class Parts:
    """Hold the arguments of `Saver.save` for a model and its optimizer.

    Attributes:
        tensors: `model/NAME` and `optimizer/NAME/ROLE`.
        optimizer: format, parameter groups and dtypes other than fp32, plain values.
    """

    tensors: dict[str, Value]
    optimizer: dict[str, Any]


def parts_of(model: torch.nn.Module, optimizer: AdamW) -> Parts:
    """Return the state of a model and its optimizer; only buffers and offloaded frozen weights are copied.

    Raises:
        ModelError: as `AdamW.sources`.
    """
    sources = optimizer.sources()
    tensors: dict[str, Value] = {f"{MODEL}{n}": v for n, v in _model_values(model, optimizer, sources)}
    for name, roles in sources.state.items():
        tensors[f"{OPTIMIZER}{name}/step"] = sources.steps[name]
        tensors |= {f"{OPTIMIZER}{name}/{role}": source for role, source in roles.items()}
    groups = [dict(group) for group in sources.param_groups]
    said = {"format": sources.format, "param_groups": groups, **saved_dtypes(optimizer.state_format)}
    return Parts(tensors, said)


def _model_values(model: torch.nn.Module, optimizer: AdamW, sources: StateSources) -> Iterator[tuple[str, Value]]:
    """Yield parameters and saved buffers by plain name, tied ones once."""
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    trained = {plain: sources.names.get(id(p)) for plain, p in parameters.items()}
    saved: Mapping[str, torch.Tensor] = {}
    if None in trained.values():  # only the module knows whether a frozen weight is on the device
        saved = {plain_name(name): t for name, t in model.state_dict().items()}
    readers = next(iter(sources.weights.values())).readers if sources.weights else None
    for plain, parameter in parameters.items():
        name = trained[plain]
        if name is not None:
            yield plain, sources.weights[name]
        elif plain in saved:
            here = saved[plain]
            flat = is_plain(here) and here.is_contiguous() and here.numel() and readers is not None
            if flat and here.data_ptr() == parameter.data_ptr() and readers is not None:
                whole = torch.empty(here.shape, dtype=here.dtype, device="meta")
                stretch = Stretch(0, math.prod(here.shape), here.detach().view(-1))
                yield plain, Source(here.shape, here.dtype, (stretch,), whole, optimizer.backend, readers)
            else:
                yield plain, here
    yield from _saved_buffers(model)


def _saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield plain_name(f"{path}.{name}" if path else name), buffer


def pieces_of(tensors: Mapping[str, torch.Tensor], at_once_bytes: int, uncut: Collection[str] = ()) -> list[list[Rows]]:
    """Return the parameters that have optimizer state among `tensors`, in groups of at most so many bytes of it.

    A parameter with more state is cut into rows, which are groups of their own: as few as fit, but whole blocks of FP8
    moments.

    Args:
        tensors: by the names of `parts_of`; this process's parts count.
        uncut: parameters that are read as a whole.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(OPTIMIZER):
            found.setdefault(key.removeprefix(OPTIMIZER).rsplit("/", 1)[0], []).append(local_of(tensor))
    groups: list[list[Rows]] = []
    held = at_once_bytes
    for name, parts in found.items():
        nbytes = sum(part.nbytes for part in parts)
        largest = max(parts, key=torch.numel)
        if nbytes > at_once_bytes and name not in uncut and largest.dim():
            block = FP8_BLOCK // math.gcd(FP8_BLOCK, largest.numel() // len(largest))
            count = max(1, at_once_bytes * len(largest) // nbytes // block) * block
            bounds = range(0, len(largest), count)
            groups += [[Rows(name, slice(first, min(first + count, len(largest))))] for first in bounds]
            held = at_once_bytes
            continue
        if held + nbytes > at_once_bytes:
            groups.append([])
            held = 0
        groups[-1].append(Rows(name))
        held += nbytes
    return groups


def empty_optimizer_tensors(optimizer: AdamW, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return host tensors by the names of `parts_of`, to load the optimizer's state into.

    Args:
        names: of the parameters; None: all.

    Raises:
        MemoryLimitError: no memory for all of them.
    """
    state = optimizer.empty_state(names)
    return {f"{OPTIMIZER}{n}/{role}": t for n, entry in state.items() for role, t in entry.items()}


def is_moment(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a moment."""
    return name.startswith(OPTIMIZER) and name.rsplit("/", 1)[-1] in MOMENTS


def is_master(name: str) -> bool:
    """Return whether a tensor of a checkpoint is an fp32 main weight."""
    return name.startswith(OPTIMIZER) and name.endswith("/master")


def optimizer_state(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state dict for `AdamW.load_state_dict` from plain values and tensors as `parts_of` names them."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(OPTIMIZER):
            name, role = key.removeprefix(OPTIMIZER).rsplit("/", 1)
            state.setdefault(name, {})[role] = tensor
    return {**plain, "state": state}
