"""What a recipe, or a model of transformers, computes and holds in a step. Nothing is allocated, and nothing heavy
imported where what tracing found is kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hostward.config import Config, ModelConfig
from hostward.errors import ModelError
from hostward.inventory import Dtype
from hostward.workload import Workload

from .kept import recalled
from .tokenizer import ByteTokenizer

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
        from .traced import traced_recipe

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
        from .traced import traced_file

        return traced_file(file, content, dtype, attn_implementation, **sizes)

    question = {"config": content, "dtype": dtype, "attention": attn_implementation, **sizes}
    return replace(recalled(folder, question, trace), microbatches=microbatches)
