"""What is known of a run, and refused, before any weight is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from hostward.config import Config
from hostward.engine.backend import TORCH_DTYPES
from hostward.inventory import Dtype
from hostward.planning.plan_file import PlanFile
from hostward.rule_table import captured

from . import resume
from .captured import require_capturable
from .data import TokenDataset, build_dataset
from .disk import require_room
from .memory import require_memory
from .models import pretrained_config
from .ranks import Ranks
from .refusal import Weighed, require_fit, require_same_model
from .waiting import Leaving, leaving_weights


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
        resume.require_same_samples(config, dataset, resume_from)
    if plan is not None:
        require_same_model(plan, config, dataset.vocab_size, ranks)
    if ranks.stages > 1 and config.model.hf_model_path is not None:
        from hostward.adapters.pipelines import require_divisible

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
