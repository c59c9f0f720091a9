"""What a plan says about layers, as `attach` carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostward.choice import ELEMENTWISE, LEAVES, RECOMPUTED, Keep
from hostward.errors import ConfigError
from hostward.planning.plan_file import PlanFile

from .recompute import elementwise_in, require_not_compiled

_SWITCH = "gradient_checkpointing"
"""Of a layer of transformers: whether it is checkpointed in training."""


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """How many of the first layers' activations leave, how many of the first layers' weights, in how many of the first
    layers norms and activations run again, and which layers run again as a whole.
    """

    activations: int
    weights: int
    parts: int
    whole: frozenset[int]

    def recompute(self, layers: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, int] | None:
        """The norms and activations that can run again in those of a model's layers where the plan wants it.

        Raises:
            ConfigError: there are none. ModelError: compiled layers.
        """
        if not self.parts:
            return None
        require_not_compiled(layers[: self.parts])
        names = elementwise_in(layers[: self.parts])
        if not names:
            raise ConfigError(
                "the plan recomputes norms and activations, and no layer of the model has any that can be",
                fix="make a plan of this model: hostward plan --json FILE",
            )
        return dict.fromkeys(names, self.parts)


def layers_of(plan: PlanFile) -> PlannedLayers:
    """Raises ConfigError for an edited plan that cannot be carried out: what leaves belongs to the first layers."""
    keeps = [Keep(row.activations) for row in plan.layers]
    away = [row.weights == "host" for row in plan.layers]
    found = PlannedLayers(
        _first(plan, [k in LEAVES for k in keeps], "activations leave"),
        _first(plan, away, "weights leave"),
        _first(plan, [k in ELEMENTWISE for k in keeps], "norms and activations are recomputed"),
        frozenset(i for i, k in enumerate(keeps) if k in RECOMPUTED),
    )
    if keeps and (found.activations == len(keeps) or found.weights == len(keeps)):
        raise ConfigError(
            "the plan lets everything of the last layer leave",
            why="its backward begins as soon as its forward ends",
            fix="keep the last layer's activations and weights on the device",
        )
    return found


def _first(plan: PlanFile, yes: Sequence[bool], what: str) -> int:
    count = sum(yes)
    if not all(yes[:count]):
        last, gap = max(i for i, y in enumerate(yes) if y), yes.index(False)
        raise ConfigError(
            f"in the plan, {what} in layers[{last}], {plan.layers[last].layer}, but not in layers[{gap}] before it",
            why="hostward.attach counts layers from the first",
            fix="edit the plan so that these are the first layers, and something of the last one stays",
        )
    return count


def recompute_whole(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], chosen: frozenset[int], *, draws: bool = True
) -> None:
    """Put transformers' own checkpoint around these layers, and take it from the others.

    Args:
        draws: whether they may draw random numbers, so that the state of the generators is kept; a CUDA graph that is
            being captured cannot read it.

    Raises ConfigError for layers that have none.
    """
    enable = require_whole_again(model, layers, chosen)
    if chosen and enable is not None:
        enable({"use_reentrant": False, "preserve_rng_state": draws})
    for number, layer in enumerate(layers):
        if hasattr(layer, _SWITCH):
            setattr(layer, _SWITCH, number in chosen)


def require_whole_again(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], chosen: frozenset[int]
) -> Callable[[dict[str, bool]], object] | None:
    """What puts transformers' checkpoints around layers, if the model has it. Raises ConfigError where layers are
    chosen that have none.
    """
    causal: Any = model
    # transformers 5.22 has renamed it.
    enable: Callable[[dict[str, bool]], object] | None
    enable = getattr(causal, "activation_checkpointing_enable", None)
    enable = enable or getattr(causal, "gradient_checkpointing_enable", None)
    if chosen and (enable is None or not all(hasattr(layer, _SWITCH) for layer in layers)):
        raise ConfigError(
            f"the plan, or model.recompute_granularity=full, recomputes {len(chosen)} layers of a "
            f"{type(model).__name__}, which cannot be told to",
            why="it is no model of transformers",
            fix="hostward plan --keep '*=keep', or '*=elementwise', makes a plan without it; without a plan: "
            "model.recompute_granularity=selective, or null",
        )
    return enable
