"""The layers of a model: a run of modules that forward calls one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hostward.errors import ModelError

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
