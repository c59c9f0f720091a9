"""What a recipe, or a model of transformers, computes and holds in a step. Nothing is allocated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hostward.config import Config
from hostward.engine.backend import TORCH_DTYPES
from hostward.errors import ModelError
from hostward.inventory import Dtype
from hostward.training.workload_of import workload_of
from hostward.workload import Workload

from .models import meta_model, on_meta, training_loss
from .tokenizer import ByteTokenizer


def recipe_workload(config: Config, *, name: str = "", vocab_size: int | None = None) -> Workload:
    """The workload of `hostward train` with these options.

    Args:
        name: of the recipe; by default the architecture.
        vocab_size: rows of the embedding where neither `model.vocab_size` nor a pretrained folder gives them; by
            default those of the byte tokenizer, if that is the one.

    Raises:
        ConfigError: no vocabulary size. ModelError: the pretrained folder cannot be read.
    """
    model, train = config.model, config.train
    if vocab_size is None and config.tokenizer.tokenizer_type != "huggingface":
        vocab_size = ByteTokenizer.vocab_size
    made = _of(
        meta_model(config, vocab_size, TORCH_DTYPES[Dtype(model.params_dtype)]),
        name=name or model.architecture,
        sequence_tokens=model.seq_length,
        microbatch_sequences=train.micro_batch_size,
        microbatches=max(1, train.global_batch_size // train.micro_batch_size),
        split_master=not config.optimizer.use_torch_optimizer_for_cpu_offload,
    )
    options = config.checkpoint
    return replace(made, snapshot=options.async_save and options.async_save_mode == "snapshot")


def config_workload(
    path: Path,
    *,
    sequence_tokens: int,
    microbatch_sequences: int = 1,
    microbatches: int = 1,
    dtype: Dtype = Dtype.BF16,
    attn_implementation: str = "sdpa",
) -> Workload:
    """The workload of a causal language model that transformers knows.

    Args:
        path: its config.json, or the folder of that.
        dtype: of the weights.

    Raises:
        ModelError: no readable configuration, or none of a causal language model.
    """
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    fix = "name a config.json of a causal language model of transformers, or the folder that holds it"
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        described: Any = AutoConfig.for_model(given.pop("model_type"), **given)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{file} describes no model", why=f"{type(error).__name__}: {error}", fix=fix) from error
    described._attn_implementation = attn_implementation
    described.use_cache = False
    try:
        return _of(
            on_meta(described, TORCH_DTYPES[dtype]),
            name=str(described.model_type),
            sequence_tokens=sequence_tokens,
            microbatch_sequences=microbatch_sequences,
            microbatches=microbatches,
        )
    except (ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{file} describes no causal language model", why=str(error), fix=fix) from error


def _of(model: Any, **sizes: Any) -> Workload:
    return workload_of(model.train(), loss=_loss, **sizes)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return training_loss(model, ids, ids)
