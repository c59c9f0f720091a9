"""Find the layers of a model: modules that forward calls one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hostward.errors import ConfigError, ModelError

_SHARE = 0.1
"""Module lists with less than this share of the largest list's parameters are not layers (adapters, heads)."""


def find_layers(
    root: torch.nn.Module, given: Sequence[torch.nn.Module] | None = None
) -> list[tuple[str, torch.nn.Module]]:
    """Return (path, module) of the layers, in order of use.

    Args:
        given: the layers, if the caller names them; None: the members of the outermost module list (or sequence, or
            dict with the keys "0", "1", ... in order) of the model with at least two members. Lists inside its members,
            such as experts, do not count.

    Raises:
        ModelError: there is no such list, or several; or a given module is not part of the model.
    """
    if given is not None:
        return _named(root, given)
    found: list[tuple[str, torch.nn.Module]] = []
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer, _ in found)
        if _is_list(module) and not inside:
            found.append((name, module))
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in found}
    found = [(name, module) for name, module in found if sizes[name] >= _SHARE * max(sizes.values())]
    if len(found) != 1:
        names = ", ".join(name or "the model itself" for name, _ in found)
        lists = ", ".join(f"*model.{name}" if name else "*model" for name, _ in found) or "*model.encoder.layers"
        raise ModelError(
            f"the model has {len(found) or 'no'} lists of layers{': ' if found else ''}{names}",
            why="layers are offloaded in the order in which forward calls them",
            fix=f"name them: layers=[{lists}]",
        )
    path, held = found[0]
    return [(f"{path}.{name}" if path else name, child) for name, child in held.named_children()]


def _is_list(module: torch.nn.Module) -> bool:
    """Return whether a module holds at least two modules in an order of its own."""
    if isinstance(module, torch.nn.ModuleDict):
        numbers = [int(key) if key.isdecimal() else -1 for key in module]
        return len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] >= 0
    return isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1


def _named(root: torch.nn.Module, given: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    paths = {module: name for name, module in root.named_modules()}
    missing = [type(module).__name__ for module in given if module not in paths]
    if missing or not given:
        raise ModelError(
            f"{missing[0]} is no module of the model" if missing else "no layers were given",
            why="layers are named by their path in the model",
            fix="pass modules of the model, in the order in which forward calls them",
        )
    if len(set(given)) != len(given):
        raise ModelError("a layer was given twice", fix="name each module once, however often forward calls it")
    return [(paths[module], module) for module in given]


# Layers that are called one after another: all layers, or those of each pipeline stage that a process has.


@dataclass(frozen=True, slots=True)
class Runs:
    """Divide the layers, or FSDP2's groups of them, into runs that are each called in one piece.

    lengths: number of layers of each run, in order.
    """

    lengths: tuple[int, ...]

    def run(self, number: int) -> range:
        """Return the layer numbers of a run. Raises ConfigError if there is no run of that number."""
        if not 0 <= number < len(self.lengths):
            raise ConfigError(
                f"run {number} of layers does not exist: there are {len(self.lengths)} runs",
                fix="attachment.in_runs(lengths) sets the number of runs; they count from 0",
            )
        first = sum(self.lengths[:number])
        return range(first, first + self.lengths[number])

    def beside(self, layer: int) -> range:
        """Return the layer numbers of the run that contains `layer`; empty if there is no such layer."""
        runs = (self.run(number) for number in range(len(self.lengths)))
        return next((run for run in runs if layer in run), range(0))
