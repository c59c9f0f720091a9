"""Combine a recipe with the options of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hostward.cli import ranks

if TYPE_CHECKING:
    from hostward.config.schema import Config

DEFAULT_RECIPE = "qwen3_moe_tiny_pretrain_config"


def configured(recipe: str, overrides: Sequence[str] | None) -> Config:
    """Return the recipe's options with these overrides.

    Raises ConfigError, UnknownNameError.
    """
    from hostward import recipes
    from hostward.config.overrides import apply_overrides

    return apply_overrides(recipes.load(recipe), overrides or [])


def checked(recipe: str, overrides: Sequence[str] | None) -> Config:
    """Return the options as `configured`, after checking them and the pretrained folder here: importing the trainer
    takes seconds.

    Several processes are counted there first.
    """
    from hostward.config.validate import check
    from hostward.trainer.models import type_of_folder

    with ranks.same_errors_on_all_ranks():
        config = configured(recipe, overrides)
        if ranks.alone():
            check(config, world_size=1)
            if config.model.hf_model_path is not None:
                type_of_folder(config.model.hf_model_path)
    return config


def listing() -> list[str]:
    """Return a line for each recipe: name, layers and their width, length of sequences, dtype, and required options."""
    from hostward import recipes

    rows = [(name, *_needs(recipes.load(name))) for name in recipes.names()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _needs(config: Config) -> tuple[str, str, str, str]:
    from hostward.config.rules.table import unset_sizes

    model, sizes, asks = config.model, "sizes of the folder", "needs model.hf_model_path=FOLDER"
    if not unset_sizes(config):
        experts = f", {model.num_moe_experts} experts" if model.num_moe_experts else ""
        sizes, asks = f"{model.num_layers} layers of {model.hidden_size}{experts}", ""
    return sizes, f"sequences of {model.seq_length}", model.params_dtype, asks
