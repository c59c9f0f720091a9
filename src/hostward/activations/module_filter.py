"""Module names, Megatron's or paths within a layer, select the modules whose saved tensors are offloaded."""

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
    """Select modules by a pattern of paths within a layer.

    `whole`: include everything inside the module; else only its own operations, outside of its children.
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
"""Megatron's names of parts of a layer, and their paths in the decoder layers of transformers."""


def parts_of(names: Sequence[str]) -> list[Part]:
    """Translate Megatron's names into patterns of paths; patterns (`mlp`, `self_attn.*_proj`) stay as they are."""
    return [part for name in names for part in MEGATRON_MODULES.get(name, (Part(name),))]


def paths_of(layer: torch.nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths within a layer that match the names."""
    paths = [path for path, _ in layer.named_modules() if path]
    return [path for part in parts_of(names) for path in fnmatch.filter(paths, part.pattern)]


def marks_of(
    layers: Sequence[torch.nn.Module], names: Sequence[str], offloaded: int | None = None, fraction: float = 1.0
) -> list[dict[torch.nn.Module, bool]]:
    """Return by layer the modules in whose calls saved tensors are offloaded (True) or stay (False).

    Args:
        offloaded: offload in the first so many layers; None: in all layers.
        fraction: offload this share of the names in these layers; the first names, those left over, stay.

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
    """Return those of `names` that the layer has, Megatron's in order of use."""
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
