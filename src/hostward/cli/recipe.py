"""A recipe with the options of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostward.config import Config

DEFAULT_RECIPE = "qwen3_moe_tiny_pretrain_config"


def configured(recipe: str, overrides: Sequence[str] | None) -> Config:
    """The recipe's options with these in their place. Raises ConfigError, UnknownNameError."""
    from hostward import recipes
    from hostward.overrides import apply_overrides

    return apply_overrides(recipes.load(recipe), overrides or [])
