"""A recipe with the options of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import ranks

if TYPE_CHECKING:
    from hostward.config import Config

DEFAULT_RECIPE = "qwen3_moe_tiny_pretrain_config"


def configured(recipe: str, overrides: Sequence[str] | None) -> Config:
    """The recipe's options with these in their place. Raises ConfigError, UnknownNameError."""
    from hostward import recipes
    from hostward.overrides import apply_overrides

    return apply_overrides(recipes.load(recipe), overrides or [])


def checked(recipe: str, overrides: Sequence[str] | None) -> Config:
    """As `configured`, and refused here if the options alone say that nothing will come of it: to import what trains
    takes seconds. Several processes are counted there first.
    """
    from hostward.rules import check

    with ranks.alike():
        config = configured(recipe, overrides)
        if ranks.alone():
            check(config, world_size=1)
    return config
