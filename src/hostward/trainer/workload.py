"""What a recipe, or a model of transformers, computes and holds in a step. Nothing is allocated, and nothing heavy
imported where what tracing found is kept.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from hostward.config.schema import Config, ModelConfig
from hostward.core.inventory import Dtype
from hostward.errors import ModelError
from hostward.plan.workload import Workload
from hostward.profiler.workload import workload_of
from hostward.runtime.backend import TORCH_DTYPES
from hostward.trainer.data.tokenizer import ByteTokenizer
from hostward.trainer.models import meta_model, on_meta, training_loss
from hostward.trainer.workload_cache import recalled

NOT_TRACED = frozenset(
    {
        "deterministic_mode",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "cpu_offloading_double_buffering",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "fine_grained_activation_offloading",
        "offload_modules",
        "min_offloaded_tensor_size",
        "activation_offload_fraction",
        "fine_grained_offloading_max_inflight_offloads",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "cuda_graph_impl",
    }
)
"""Options of the model that say what becomes of what it computes, not what that is."""


def recipe_workload(
    config: Config, *, name: str = "", vocab_size: int | None = None, folder: Path | None = None
) -> Workload:
    """The workload of `hostward train` with these options.

    Args:
        name: of the recipe; by default the architecture.
        vocab_size: rows of the embedding where neither `model.vocab_size` nor a pretrained folder gives them; by
            default those of the byte tokenizer, if that is the one.
        folder: where what tracing finds is kept between calls; None: the model is traced.

    Raises:
        ConfigError: no vocabulary size. ModelError: the pretrained folder cannot be read.
    """
    model, train = config.model, config.train
    if vocab_size is None and config.tokenizer.tokenizer_type != "huggingface":
        vocab_size = ByteTokenizer.vocab_size
    options = traced_options(config)

    def trace() -> Workload:
        # codemod

        return traced_recipe(options, vocab_size)

    question = {"recipe": asdict(options), "vocab_size": vocab_size, "sizes": _sizes_of(model)}
    return replace(
        recalled(folder, question, trace),
        name=name or model.architecture,
        microbatches=max(1, train.global_batch_size // train.micro_batch_size),
        snapshot=config.checkpoint.async_save and config.checkpoint.async_save_mode == "snapshot",
        pin_gradients=config.optimizer.pin_cpu_grads,
        pin_weights=config.optimizer.pin_cpu_params,
    )


def traced_options(config: Config) -> Config:
    """The options that tracing may look at, and all others at their defaults."""
    usual, found = ModelConfig(), Config()
    found.model = replace(config.model, **{option: getattr(usual, option) for option in NOT_TRACED})
    found.train.micro_batch_size = config.train.micro_batch_size
    found.optimizer.use_torch_optimizer_for_cpu_offload = config.optimizer.use_torch_optimizer_for_cpu_offload
    return found


def _sizes_of(model: ModelConfig) -> str | None:
    """Of a pretrained folder. What cannot be read is refused by who traces."""
    if model.hf_model_path is None:
        return None
    try:
        return (Path(model.hf_model_path) / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def config_workload(
    path: Path,
    *,
    sequence_tokens: int,
    microbatch_sequences: int = 1,
    microbatches: int = 1,
    dtype: Dtype = Dtype.BF16,
    attn_implementation: str = "sdpa",
    folder: Path | None = None,
) -> Workload:
    """The workload of a causal language model that transformers knows.

    Args:
        path: its config.json, or the folder of that.
        dtype: of the weights.
        folder: where what tracing finds is kept between calls; None: the model is traced.

    Raises:
        ModelError: no readable configuration, or none of a causal language model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        content["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{file} describes no model",
            why=f"{type(error).__name__}: {error}",
            fix="name a config.json of a causal language model of transformers, or the folder that holds it",
        ) from error
    sizes = {"sequence_tokens": sequence_tokens, "microbatch_sequences": microbatch_sequences}

    def trace() -> Workload:
        # codemod

        return traced_file(file, content, dtype, attn_implementation, **sizes)

    question = {"config": content, "dtype": dtype, "attention": attn_implementation, **sizes}
    return replace(recalled(folder, question, trace), microbatches=microbatches)


# The runs on the meta device behind `workload`: torch, transformers and the model's own classes.


def traced_recipe(config: Config, vocab_size: int | None) -> Workload:
    """Of one microbatch. Raises as `recipe_workload`."""
    model = config.model
    return _traced(
        meta_model(config, vocab_size, TORCH_DTYPES[Dtype(model.params_dtype)]),
        sequence_tokens=model.seq_length,
        microbatch_sequences=config.train.micro_batch_size,
        split_master=not config.optimizer.use_torch_optimizer_for_cpu_offload,
    )


def traced_file(
    file: Path, content: Mapping[str, Any], dtype: Dtype, attn_implementation: str, **sizes: int
) -> Workload:
    """Of the configuration that `file` holds. Raises ModelError where it is none of a causal language model."""
    fix = "name a config.json of a causal language model of transformers, or the folder that holds it"
    given = dict(content)
    if (kind := str(given["model_type"])) not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
        raise ModelError(
            f"{file} describes no model",
            why=f"transformers {transformers.__version__} knows no model type {kind!r}",
            fix=f"did you mean {near[0]!r}? Else {fix}" if near else fix,
        )
    try:
        described: Any = AutoConfig.for_model(given.pop("model_type"), **given)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{file} describes no model", why=f"{type(error).__name__}: {error}", fix=fix) from error
    described._attn_implementation = attn_implementation
    described.use_cache = False
    try:
        return _traced(on_meta(described, TORCH_DTYPES[dtype]), name=str(described.model_type), **sizes)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{file} describes no causal language model", why=str(error), fix=fix) from error


def _traced(model: Any, **options: Any) -> Workload:
    return workload_of(model.train(), loss=_loss, **options)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return training_loss(model, ids, ids)
