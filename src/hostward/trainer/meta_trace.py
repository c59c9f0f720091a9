"""Trace models on the meta device: the part of `hostward.trainer.workload` that imports torch and transformers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from hostward.config.schema import Config
from hostward.core.inventory import Dtype
from hostward.errors import ModelError
from hostward.plan.workload import Workload
from hostward.profiler.workload import workloads_of
from hostward.runtime.backend import TORCH_DTYPES
from hostward.trainer.models import meta_model, on_meta, training_loss
from hostward.trainer.plan_request import state_format

NAME_ANOTHER = "name a config.json of a causal language model of transformers, or the folder that holds it"
_NO_MODEL = (
    ValueError, TypeError, LookupError, AttributeError, ImportError, ArithmeticError, RuntimeError,
    StrictDataclassError,
)  # fmt: skip
"""What transformers and torch raise where a configuration describes no model."""
_SIZES = {
    "num_hidden_layers": (2, 4096),
    "hidden_size": (1, 1 << 20),
    "vocab_size": (1, 1 << 28),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (0, 1 << 16),
    "intermediate_size": (0, 1 << 24),
}
"""Sizes that most models have, by their name, and the least and the most that is planned."""
_NEAR = 0.85
"""Likeness of names from which on one is taken to be misspelt."""


def trace_recipe(config: Config, vocab_size: int | None, lengths: Sequence[int]) -> list[Workload]:
    """Trace the model of `config` on one microbatch of sequences of each length.

    Raises as `recipe_workload`.
    """
    model = config.model
    return _traced(
        meta_model(config, vocab_size, TORCH_DTYPES[Dtype(model.params_dtype)]),
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
    return _traced(model, name=name, microbatch_sequences=microbatch_sequences, lengths=lengths)


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
    for part in (given, given.get("text_config")):
        if isinstance(part, dict):
            require_sizes(file, part)
    try:
        described: Any = AutoConfig.for_model(given.pop("model_type"), **given)
    except _NO_MODEL as error:
        raise _no_model(file, error) from error
    if type(described) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{file} does not describe a causal language model",
            why=f"transformers {transformers.__version__} has none of model type {kind!r}",
            fix=NAME_ANOTHER,
        )
    described.use_cache = False
    try:
        model = on_meta(described, dtype)
    except _NO_MODEL as error:
        raise _no_model(file, error) from error
    attention = model.config._attn_implementation
    return model, kind if attention == "sdpa" else f"{kind} ({attention} attention)"


def require_sizes(file: Path, given: Mapping[str, Any]) -> None:
    """Raise ModelError where a size of a model is none, or a name of one is misspelt: transformers would take both."""
    for name, (least, most) in _SIZES.items():
        value = given.get(name)
        if isinstance(value, int) and not least <= value <= most:
            shown = value if abs(value) < 10**12 else f"a number of {len(str(abs(value)))} digits"
            raise ModelError(f"{file}: {name} is {shown}", fix=f"a whole number from {least} to {most:,}")
    for name in given.keys() - _SIZES.keys():
        near = difflib.get_close_matches(name, _SIZES.keys() - given.keys(), n=1, cutoff=_NEAR)
        if near:
            raise ModelError(
                f"{file}: no model has {name}",
                why=f"transformers would ignore it, and take its own {near[0]}",
                fix=f"did you mean {near[0]}?",
            )


def _no_model(file: Path, error: Exception) -> ModelError:
    why = " ".join(f"{type(error).__name__}: {error}".split("\nException raised from")[0].split())
    return ModelError(f"{file} does not describe a model", why=why, fix=f"correct it there, or {NAME_ANOTHER}")


def _traced(model: Any, **options: Any) -> list[Workload]:
    return workloads_of(model.train(), loss=_loss, **options)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return training_loss(model, ids, ids)
