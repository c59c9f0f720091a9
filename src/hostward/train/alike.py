"""What the ranks of a run must have in common before one of them trains."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hostward import __version__
from hostward.config import Config, get_option, options
from hostward.errors import ConfigError
from hostward.planning.plan_file import PlanFile
from hostward.rules import shown

from .ranks import Ranks

OWN = frozenset(
    {
        "dataset.path",
        "logger.log_interval",
        "logger.tensorboard_dir",
        "model.hf_model_path",
        "optimizer.host_threads",
        "tokenizer.tokenizer_model",
        "train.num_threads",
    }
)
"""Options that ranks may set each for itself: threads, what is printed, and where data lie on each node."""


def what_runs(
    recipe: str, config: Config, device: str, resume_from: Path | None, plan: PlanFile | None = None
) -> dict[str, str]:
    """What a rank is about to do, and with which versions, by name."""
    named = {name: shown(get_option(config, name)) for name in options() if name not in OWN}
    start = "none" if resume_from is None else resume_from.name
    planned = "none" if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]
    told = {"--plan": planned, "the device": device, "the checkpoint to go on from": start}
    return {"--recipe": recipe, **named, **told, "hostward": __version__, "torch": torch.__version__}


def require_alike(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Raises ConfigError on every rank if these values are not the same on all of them."""
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16).digest()
    if len(set(ranks.gather(digest))) > 1:
        raise differing(ranks.gather((ranks.name, dict(mine))))


def differing(told: Sequence[tuple[str, Mapping[str, str]]]) -> ConfigError:
    """The error for what ranks, by name, have told, each other than the first or some other one."""
    first, expected = told[0]
    names = dict.fromkeys(name for _, values in told for name in values)
    found = []
    for name in names:
        others = [(rank, values.get(name)) for rank, values in told if values.get(name) != expected.get(name)]
        if others:
            rank, value = others[0]
            more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            found.append(f"{name} is {expected.get(name)} on {first}, {value} on {rank}{more}")
    error = ConfigError(
        "the ranks of this run were not started alike",
        why="; ".join(found),
        fix="give every rank the same options, data, folders and versions",
    )
    error.everywhere = True
    return error
