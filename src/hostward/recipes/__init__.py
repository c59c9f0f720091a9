"""Recipes: functions that return a whole configuration, named `<model>_<task>_config` as in Megatron Bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hostward.config.schema import Config, nearest
from hostward.errors import UnknownNameError
from hostward.recipes.llama import llama32_1b_pretrain_config
from hostward.recipes.qwen3 import qwen3_8b_pretrain_config, qwen3_600m_sft_config
from hostward.recipes.qwen3_moe import qwen3_30b_a3b_pretrain_config, qwen3_moe_tiny_pretrain_config

RECIPES: Mapping[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        qwen3_moe_tiny_pretrain_config,
        qwen3_600m_sft_config,
        llama32_1b_pretrain_config,
        qwen3_8b_pretrain_config,
        qwen3_30b_a3b_pretrain_config,
    )
}


def names() -> list[str]:
    """Every recipe, smallest model first."""
    return list(RECIPES)


def load(name: str) -> Config:
    """The configuration of the recipe `name`, fresh on each call.

    Raises:
        UnknownNameError: no such recipe; the text proposes the nearest one.
    """
    if name not in RECIPES:
        closest = nearest(name, RECIPES)
        raise UnknownNameError(
            f"there is no recipe {name!r}",
            fix=f"did you mean {closest}?" if closest else f"the recipes are {', '.join(RECIPES)}",
        )
    return RECIPES[name]()
