"""Modules within a layer whose saved tensors leave: by Megatron's names, or by paths."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hostward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """A pattern of paths within a layer. `whole`: with everything inside; else what the module does itself, outside its
    children.
    """

    pattern: str
    whole: bool = True


MEGATRON_MODULES: Mapping[str, tuple[Part, ...]] = {
    "attn_norm": (Part("input_layernorm"),),
    "qkv_linear": (Part("self_attn.[qkv]_proj"), Part("self_attn.[qk]_norm")),
    # In transformers attention is a function that the module calls between its projections.
    "core_attn": (Part("self_attn", whole=False),),
    "attn_proj": (Part("self_attn.o_proj"),),
    "mlp_norm": (Part("post_attention_layernorm"),),
    # One grouped kernel for both projections of all experts.
    "expert_fc1": (Part("mlp.experts", whole=False),),
    "moe_act": (Part("mlp.experts.act_fn"), Part("mlp.experts.*.act_fn")),
}
"""What Megatron calls parts of a layer, as they are called in the decoder layers of transformers."""


def parts_of(names: Sequence[str]) -> list[Part]:
    """Megatron's names and patterns (`mlp`, `self_attn.*_proj`) as patterns."""
    return [part for name in names for part in MEGATRON_MODULES.get(name, (Part(name),))]


def paths_of(layer: torch.nn.Module, names: Sequence[str]) -> list[str]:
    """Paths within a layer that names stand for."""
    paths = [path for path, _ in layer.named_modules() if path]
    return [path for part in parts_of(names) for path in fnmatch.filter(paths, part.pattern)]


def marks_of(
    layers: Sequence[torch.nn.Module], names: Sequence[str], offloaded: int | None = None, fraction: float = 1.0
) -> list[dict[torch.nn.Module, bool]]:
    """By layer: modules at whose call it begins to hold that saved tensors leave (True), or stay (False).

    Args:
        offloaded: the first so many layers' leave; None: all layers'.
        fraction: of the names in these layers, as many as that; the first of them stay, as many as were left over.

    Raises:
        ConfigError: a name that no module of any layer has.
    """
    paths = sorted({path for layer in layers for path, _ in layer.named_modules() if path})
    for name in names:
        found = [part for part in parts_of([name]) if fnmatch.filter(paths, part.pattern)]
        if not found:
            near = difflib.get_close_matches(name, [*paths, *MEGATRON_MODULES], n=3, cutoff=0.4)
            raise ConfigError(
                f"no layer has a module {name!r}",
                why=f"paths within a layer are {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}",
                fix=f"did you mean {', '.join(near)}?" if near else "name modules by their path within a layer",
            )
    groups = [(i, name) for i, layer in enumerate(layers[:offloaded]) for name in _ordered(layer, names)]
    stay = set(groups[: math.floor(len(groups) * (1 - fraction))])
    return [_marks(layer, parts_of([n for n in names if (i, n) not in stay])) for i, layer in enumerate(layers)]


def _ordered(layer: torch.nn.Module, names: Sequence[str]) -> list[str]:
    """Those of `names` that the layer has, Megatron's in order of use."""
    known = list(MEGATRON_MODULES)
    return sorted(
        (name for name in names if paths_of(layer, [name])),
        key=lambda name: known.index(name) if name in known else len(known),
    )


def _marks(layer: torch.nn.Module, parts: Sequence[Part]) -> dict[torch.nn.Module, bool]:
    modules = {path: module for path, module in layer.named_modules() if path}
    marks: dict[torch.nn.Module, bool] = {}
    for part in parts:
        if not part.whole:
            for path in fnmatch.filter(modules, part.pattern):
                marks |= dict.fromkeys(modules[path].children(), False)
    for part in parts:
        marks |= {modules[path]: True for path in fnmatch.filter(modules, part.pattern)}
    return marks
