"""Trace models on the meta device: the part of `hostward.trainer.workload` that imports torch and transformers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from hostward.config.schema import Config
from hostward.core.inventory import Dtype
from hostward.errors import ModelError
from hostward.plan.workload import Workload
from hostward.profiler.workload import workloads_of
from hostward.runtime.backend import TORCH_DTYPES
from hostward.trainer.models import (
    describing,
    meta_model,
    on_meta,
    require_described,
    require_sizes,
    return_loss_alone,
    training_loss,
)
from hostward.trainer.plan_request import state_format

NAME_ANOTHER = "name a config.json of a causal language model of transformers, or the folder that holds it"


def trace_recipe(config: Config, vocab_size: int | None, lengths: Sequence[int]) -> list[Workload]:
    """Trace the model of `config` on one microbatch of sequences of each length.

    Raises as `recipe_workload`.
    """
    model = config.model
    return _traced(
        meta_model(config, vocab_size, TORCH_DTYPES[Dtype(model.params_dtype)]),
        f"choose other options of the model: {_PLANNED}",
        lengths=lengths,
        microbatch_sequences=config.train.micro_batch_size,
        form=state_format(config),
    )


def trace_config_file(
    file: Path, content: Mapping[str, Any], dtype: Dtype, microbatch_sequences: int, lengths: Sequence[int]
) -> list[Workload]:
    """Trace the model of the configuration in `file`, which has this content, for sequences of each length.

    Raises ModelError if it is not a causal language model.
    """
    model, name = described_model(file, content, TORCH_DTYPES[dtype])
    fix = f"correct {file}: {_PLANNED}; or {NAME_ANOTHER}"
    return _traced(model, fix, name=name, microbatch_sequences=microbatch_sequences, lengths=lengths)


def described_model(file: Path, content: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, str]:
    """Build the model of a configuration on torch's meta device, and return it with its name.

    It attends by scaled_dot_product_attention, as transformers chooses; where a class of models has none, the name says
    what it has.
    Raises ModelError if it is not a causal language model.
    """
    given = {name: value for name, value in content.items() if not name.endswith("attn_implementation")}
    if (kind := str(given["model_type"])) not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
        raise ModelError(
            f"{file} does not describe a model",
            why=f"transformers {transformers.__version__} knows no model type {kind!r}",
            fix=f"did you mean {near[0]!r}? Else {NAME_ANOTHER}" if near else NAME_ANOTHER,
        )
    require_sizes(file, given)
    with describing(file, f"correct it there, or {NAME_ANOTHER}"):
        described: Any = AutoConfig.for_model(given.pop("model_type"), **given)
    if type(described) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{file} does not describe a causal language model",
            why=f"transformers {transformers.__version__} has none of model type {kind!r}",
            fix=NAME_ANOTHER,
        )
    require_described(file, described)
    described.use_cache = False
    return_loss_alone(described)
    with describing(file, f"correct it there, or {NAME_ANOTHER}"):
        model = on_meta(described, dtype)
    attention = model.config._attn_implementation
    return model, kind if attention == "sdpa" else f"{kind} ({attention} attention)"


_PLANNED = "a plan takes two layers or more, in one list, whose forward does not depend on values of tensors"


def _traced(model: Any, fix: str, **options: Any) -> list[Workload]:
    try:
        return workloads_of(model.train(), loss=_loss, **options)
    except ModelError as error:  # its fix is for callers of workloads_of
        raise ModelError(error.what, why=error.why, fix=fix) from error


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return training_loss(model, ids, ids)
