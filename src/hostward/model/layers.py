"""The layers of a model: a run of modules that forward calls one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hostward.errors import ConfigError, ModelError

_SHARE = 0.1
"""A list with less than this share of the largest list's parameters is none of layers (adapters, heads)."""


def find_layers(
    root: torch.nn.Module, given: Sequence[torch.nn.Module] | None = None
) -> list[tuple[str, torch.nn.Module]]:
    """(path, module) of the layers, in order of use.

    Args:
        given: the layers, where they are to be named; None: the outermost module list (or sequence) of the model with
            at least two members. Lists inside its members, such as experts, do not count.

    Raises:
        ModelError: there is no such list, or several; or a module that is given is not part of the model.
    """
    if given is not None:
        return _named(root, given)
    found: list[tuple[str, torch.nn.Module]] = []
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer, _ in found)
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1 and not inside:
            found.append((name, module))
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in found}
    found = [(name, module) for name, module in found if sizes[name] >= _SHARE * max(sizes.values())]
    if len(found) != 1:
        names = ", ".join(name or "the model itself" for name, _ in found)
        raise ModelError(
            f"the model has {len(found) or 'no'} lists of layers{': ' if found else ''}{names}",
            why="layers are offloaded in the order in which forward calls them",
            fix="name them: layers=list(model.encoder.layers)",
        )
    path, held = found[0]
    return [(f"{path}.{name}" if path else name, child) for name, child in held.named_children()]


def _named(root: torch.nn.Module, given: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    paths = {module: name for name, module in root.named_modules()}
    missing = [type(module).__name__ for module in given if module not in paths]
    if missing or not given:
        raise ModelError(
            f"{missing[0]} is no module of the model" if missing else "no layers were given",
            why="layers are found and named by the model that holds them",
            fix="pass modules of the model, in the order in which forward calls them",
        )
    if len(set(given)) != len(given):
        raise ModelError("a layer was given twice", fix="name each module once, however often forward calls it")
    return [(paths[module], module) for module in given]


# Which layers are called one after another: all, or, of a pipeline, those of each stage that a process has.


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of layers, or of what is gathered of them, in the order in which they are counted.

    lengths: of each.
    """

    lengths: tuple[int, ...]

    def run(self, number: int) -> range:
        """That run: its layers. Raises ConfigError: there is none of that number."""
        if not 0 <= number < len(self.lengths):
            raise ConfigError(
                f"run {number} of layers is expected, and there are {len(self.lengths)}",
                fix="attachment.in_runs(lengths) says how many there are; they count from 0",
            )
        first = sum(self.lengths[:number])
        return range(first, first + self.lengths[number])

    def beside(self, layer: int) -> range:
        """The run that a layer is in; none for what is no layer."""
        runs = (self.run(number) for number in range(len(self.lengths)))
        return next((run for run in runs if layer in run), range(0))
