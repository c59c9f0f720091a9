"""What is known of a run, and refused, before any weight is allocated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hostward import __version__
from hostward.config.rules.table import captured
from hostward.config.schema import Config, get_option, options
from hostward.config.validate import shown
from hostward.core.inventory import Dtype
from hostward.errors import ConfigError
from hostward.plan.plan_file import PlanFile
from hostward.runtime.backend import TORCH_DTYPES
from hostward.trainer import checkpointing
from hostward.trainer.cuda_graph import require_capturable
from hostward.trainer.data.dataset import TokenDataset, build_dataset
from hostward.trainer.deferred_init import Leaving, leaving_weights
from hostward.trainer.memory_check import Weighed, require_fit, require_memory, require_room, require_same_model
from hostward.trainer.models import pretrained_config
from hostward.trainer.process_group import Ranks


def weighed(
    recipe: str,
    config: Config,
    device: torch.device,
    plan: PlanFile | None,
    resume_from: Path | None,
    ranks: Ranks,
    *,
    force: bool,
) -> tuple[TokenDataset, Weighed, Leaving | None]:
    """The data, what is predicted of the run and of others in its place, and which weights wait on the CPU. Raises for
    all that can be refused before weights are allocated.
    """
    dataset = _dataset(config)
    if resume_from is not None and not config.checkpoint.finetune:
        checkpointing.require_same_samples(config, dataset, resume_from)
    if plan is not None:
        require_same_model(plan, config, dataset.vocab_size, ranks)
    if ranks.stages > 1 and config.model.hf_model_path is not None:
        from hostward.distributed.pipeline_parallel import require_divisible

        described = pretrained_config(config.model, config.model.hf_model_path)
        rounds = config.model.virtual_pipeline_model_parallel_size or 1
        require_divisible(described.num_hidden_layers, ranks.stages * rounds)
    if captured(config) and config.model.hf_model_path is not None:
        require_capturable(pretrained_config(config.model, config.model.hf_model_path))
    dtype = TORCH_DTYPES[Dtype(config.model.params_dtype)]
    leaving = leaving_weights(config, plan, dataset.vocab_size, dtype, ranks)
    require_memory(config, device, dataset.vocab_size, ranks, 0 if leaving is None else leaving.weight_bytes)
    found = Weighed() if force else require_fit(recipe, config, device, dataset.vocab_size, plan, ranks)
    if not force:
        require_room(config, dataset.vocab_size, resume_from, first=ranks.first)
    return dataset, found, leaving if ranks.size == 1 else None


def _dataset(config: Config) -> TokenDataset:
    options, tokenizer = config.dataset, config.tokenizer
    folder = config.model.hf_model_path if tokenizer.tokenizer_type == "huggingface" else None
    return build_dataset(
        path=options.path,
        data_format=options.format,
        text_key=options.text_key,
        tokenizer_type=tokenizer.tokenizer_type,
        tokenizer_model=tokenizer.tokenizer_model or folder,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size,
        seed=config.rng.seed if options.random_seed is None else options.random_seed,
    )


# What the ranks of a run must have in common before one of them trains.


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
