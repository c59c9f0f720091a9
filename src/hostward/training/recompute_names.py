"""What names of recomputed modules stand for in a layer: Megatron's names, or paths."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

import torch

from hostward.errors import ConfigError, ModelError


class Found(Enum):
    """How a module is recomputed."""

    WHOLE = auto()
    """From its input."""
    NORM = auto()
    GATED = auto()
    """From the outputs of gate and up projection."""
    EXPERTS = auto()
    """From the output of the first grouped projection."""


_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
_NORMS = ("*_layernorm", "*.[qk]_norm")

Modules = Mapping[str, torch.nn.Module]
Parts = dict[str, Found]


def _layernorm(modules: Modules) -> Parts:
    return {path: Found.NORM for pattern in _NORMS for path in fnmatch.filter(modules, pattern)}


def _mlp(modules: Modules) -> Parts:
    return {"mlp": Found.WHOLE} if "mlp" in modules and not hasattr(modules["mlp"], "experts") else {}


def _moe(modules: Modules) -> Parts:
    return {path: Found.WHOLE for path, module in modules.items() if hasattr(module, "experts")}


def _mlp_act(modules: Modules) -> Parts:
    return {path: Found.GATED for path, m in modules.items() if all(hasattr(m, name) for name in _GATED)}


def _moe_act(modules: Modules) -> Parts:
    found = {path: Found.EXPERTS for path, module in modules.items() if hasattr(module, "_apply_gate")}
    for path in found:
        implementation = getattr(getattr(modules[path], "config", None), "_experts_implementation", None)
        if implementation in (None, "eager"):
            raise ConfigError(
                "moe_act in recompute_modules is only supported with moe_grouped_gemm.",
                why=f"the experts of a {type(modules[path]).__name__} run one by one",
                fix="experts_implementation=grouped_mm, or recompute moe as a whole",
            )
    return found


MEGATRON_RECOMPUTE: Mapping[str, Callable[[Modules], Parts]] = {
    "layernorm": _layernorm,
    "mlp": _mlp,
    "mlp_act": _mlp_act,
    "moe": _moe,
    "moe_act": _moe_act,
}
"""Names of Megatron's recompute_modules, as modules of a layer of transformers."""


def find_parts(layers: Sequence[torch.nn.Module], counts: Mapping[str, int]) -> list[Parts]:
    """By layer: modules by path within it, and how they are recomputed. What is inside of a module that is recomputed
    as a whole is left out. `counts`: by name, in how many layers, from the first on.

    Raises:
        ConfigError: a name that stands for no module of any layer, or only for what is inside of others.
        ModelError: mlp_act in a model without gated MLPs.
    """
    held = [{path: module for path, module in layer.named_modules() if path} for layer in layers]
    by_name = {
        name: [_named(modules, name) if i < count else {} for i, modules in enumerate(held)]
        for name, count in counts.items()
    }
    for name, by_layer in by_name.items():
        if not any(by_layer):
            _refuse(name, held)
    found: list[Parts] = []
    for i in range(len(held)):
        parts: Parts = {}
        for by_layer in by_name.values():
            # The whole of a module goes before a part of it.
            parts |= {path: how for path, how in by_layer[i].items() if parts.get(path) is not Found.WHOLE}
        whole = [path for path, how in parts.items() if how is Found.WHOLE]
        found.append(
            {path: how for path, how in parts.items() if not any(path.startswith(f"{outer}.") for outer in whole)}
        )
    for name, by_layer in by_name.items():
        if not any(found[i].get(path) is how for i, parts in enumerate(by_layer) for path, how in parts.items()):
            raise ConfigError(
                f"recompute={tuple(counts)!r}: {name} is inside of what is recomputed as a whole",
                fix=f"leave {name} out, or the other",
            )
    return found


def _named(modules: Modules, name: str) -> Parts:
    if name == "core_attn":
        raise ConfigError(
            "recompute of core_attn",
            why="in transformers attention is a function that a module calls between its projections, not a module of "
            "its own; sdpa and flash attention save no probabilities that a recomputation would spare",
            fix="attn_implementation=sdpa, or 'self_attn' for attention with its projections",
        )
    known = MEGATRON_RECOMPUTE.get(name)
    if known is not None:
        return known(modules)
    return dict.fromkeys(fnmatch.filter(modules, name), Found.WHOLE)


def _refuse(name: str, held: Sequence[Modules]) -> None:
    paths = sorted({path for modules in held for path in modules})
    mlps = sorted({type(modules[path]).__name__ for modules in held for path in modules if path == "mlp"})
    if name == "mlp_act" and mlps:
        raise ModelError(
            f"mlp_act cannot be recomputed in a {mlps[0]}",
            why=f"it has not all of {', '.join(_GATED)}",
            fix="moe_act for grouped experts, or the module as a whole, by its path within the layer",
        )
    known = sorted({*paths, *MEGATRON_RECOMPUTE} - {name})
    if name == "mlp" and any(_moe(modules) for modules in held):
        known = ["moe"]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise ConfigError(
        f"no layer has a module {name!r} to recompute",
        why=f"paths within a layer are {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}",
        fix=f"did you mean {', '.join(near)}?" if near else f"names are {', '.join(MEGATRON_RECOMPUTE)}, and paths",
    )
