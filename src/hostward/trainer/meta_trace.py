"""Trace models on the meta device: the part of `hostward.trainer.workload` that imports torch and transformers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from hostward.config.schema import Config
from hostward.core.inventory import Dtype
from hostward.errors import ModelError
from hostward.plan.workload import Workload
from hostward.profiler.workload import workload_of
from hostward.runtime.backend import TORCH_DTYPES
from hostward.trainer.models import meta_model, on_meta, training_loss


def trace_recipe(config: Config, vocab_size: int | None) -> Workload:
    """Trace the model of `config` on one microbatch.

    Raises as `recipe_workload`.
    """
    model = config.model
    return _traced(
        meta_model(config, vocab_size, TORCH_DTYPES[Dtype(model.params_dtype)]),
        sequence_tokens=model.seq_length,
        microbatch_sequences=config.train.micro_batch_size,
        split_master=not config.optimizer.use_torch_optimizer_for_cpu_offload,
    )


def trace_config_file(
    file: Path, content: Mapping[str, Any], dtype: Dtype, attn_implementation: str, **sizes: int
) -> Workload:
    """Trace the model of the configuration in `file`.

    Raises ModelError if it is not a causal language model.
    """
    fix = "name a config.json of a causal language model of transformers, or the folder that holds it"
    given = dict(content)
    if (kind := str(given["model_type"])) not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
        raise ModelError(
            f"{file} does not describe a model",
            why=f"transformers {transformers.__version__} knows no model type {kind!r}",
            fix=f"did you mean {near[0]!r}? Else {fix}" if near else fix,
        )
    try:
        described: Any = AutoConfig.for_model(given.pop("model_type"), **given)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"{file} does not describe a model", why=f"{type(error).__name__}: {error}", fix=fix
        ) from error
    described._attn_implementation = attn_implementation
    described.use_cache = False
    try:
        return _traced(on_meta(described, TORCH_DTYPES[dtype]), name=str(described.model_type), **sizes)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{file} does not describe a causal language model", why=str(error), fix=fix) from error


def _traced(model: Any, **options: Any) -> Workload:
    return workload_of(model.train(), loss=_loss, **options)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return training_loss(model, ids, ids)
