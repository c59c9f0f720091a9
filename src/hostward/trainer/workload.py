"""Compute what a model's step computes and holds, without allocating it, and cache the answers.

A traced workload is cached between calls, so that planning it again imports neither torch nor transformers.
The key has everything that the answer depends on: the question, hostward's own source, every installed package and
version, Python's version, and the variables that torch and transformers read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import hostward
from hostward.config.schema import Config, ModelConfig
from hostward.core.inventory import Dtype, Inventory
from hostward.errors import ConfigError, ModelError, needed_for
from hostward.files.atomic_file import replace_text
from hostward.plan.lengths import at_length, lengths_around
from hostward.plan.workload import Workload, from_text, to_text
from hostward.trainer.data.tokenizer import ByteTokenizer

log = logging.getLogger("hostward")

MOST_FILES = 64
"""Files in the cache folder, at most; the oldest are removed."""
_TRACING = ("torch", "transformers")
_VARIABLES = ("TORCH", "TRANSFORMERS_", "USE_", "XLA_")
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
"""Model options that place or recompute what it computes, but do not change it."""


def recipe_workload(
    config: Config, *, name: str = "", vocab_size: int | None = None, folder: Path | None = None
) -> Workload:
    """Return the workload of `hostward train` with these options.

    Args:
        name: of the recipe; by default the architecture.
        vocab_size: rows of the embedding where neither `model.vocab_size` nor a pretrained folder gives them; by
            default those of the byte tokenizer, if that is the one.
        folder: the cache folder; None: always trace the model.

    Raises:
        ConfigError: no vocabulary size. ModelError: the pretrained folder cannot be read.
    """
    model, train = config.model, config.train
    if vocab_size is None and config.tokenizer.tokenizer_type != "huggingface":
        vocab_size = ByteTokenizer.vocab_size
    options = traced_options(config)

    def trace(lengths: Sequence[int]) -> list[Workload]:
        with needed_for("planning", "train,plan"):
            from hostward.trainer.meta_trace import trace_recipe  # imports torch

        return trace_recipe(options, vocab_size, lengths)

    question = {"recipe": asdict(options), "vocab_size": vocab_size, "sizes": _sizes_of(model)}
    return replace(
        cached_workload(folder, question, model.seq_length, trace),
        name=name or model.architecture,
        microbatches=max(1, train.global_batch_size // train.micro_batch_size),
        snapshot=config.checkpoint.async_save and config.checkpoint.async_save_mode == "snapshot",
        pin_gradients=config.optimizer.pin_cpu_grads,
        pin_weights=config.optimizer.pin_cpu_params,
        step_early=config.optimizer.step_early,
    )


def traced_options(config: Config) -> Config:
    """Return the options that tracing may depend on, with all others at their defaults."""
    usual, found = ModelConfig(), Config()
    found.model = replace(config.model, **{option: getattr(usual, option) for option in NOT_TRACED})
    found.model.seq_length = usual.seq_length  # a microbatch has it; the model only states a longest one
    found.train.micro_batch_size = config.train.micro_batch_size
    for option in ("use_torch_optimizer_for_cpu_offload", "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
        setattr(found.optimizer, option, getattr(config.optimizer, option))
    return found


def _sizes_of(model: ModelConfig) -> str | None:
    """Return the configuration text of a pretrained folder; unreadable files raise later, in tracing."""
    if model.hf_model_path is None:
        return None
    try:
        return (Path(model.hf_model_path) / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Hold what a config.json says, which names a model type."""

    path: Path
    content: Mapping[str, Any]


def config_workload(
    model: ModelFile,
    *,
    sequence_tokens: int,
    microbatch_sequences: int = 1,
    microbatches: int = 1,
    dtype: Dtype = Dtype.BF16,
    folder: Path | None = None,
) -> Workload:
    """Return the workload of a causal language model that transformers knows.

    Args:
        model: its config.json, as `read_model_file` returns it.
        dtype: of the weights.
        folder: the cache folder; None: always trace the model.

    Raises:
        ModelError: none of a causal language model.
    """

    def trace(lengths: Sequence[int]) -> list[Workload]:
        with needed_for("planning", "train,plan"):
            from hostward.trainer.meta_trace import trace_config_file

        return trace_config_file(model.path, model.content, dtype, microbatch_sequences, lengths)

    question = {"config": model.content, "dtype": dtype, "microbatch_sequences": microbatch_sequences}
    return replace(cached_workload(folder, question, sequence_tokens, trace), microbatches=microbatches)


_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of names of transformers' causal language models, with images or without."""


def not_planned(model: ModelFile) -> list[str]:
    """Return what a config.json describes and its plan does not have, in sentences: other weights, or another head."""
    content = model.content
    quantized, dtype = content.get("quantization_config"), content.get("dtype", content.get("torch_dtype"))
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    weights = [f"quantized weights ({method})"] if method else []
    weights += [f"{dtype} weights"] if dtype not in (None, "auto", "bfloat16", "torch.bfloat16") else []
    said = [f"the file says {' and '.join(weights)}: the plan is for training all weights in bf16"] if weights else []
    classes = content.get("architectures")
    others = [name for name in classes if not str(name).endswith(_CAUSAL)] if isinstance(classes, list) else []
    if others:
        said.append(f"the file says {others[0]}: the plan is for a causal language model, which learns the next token")
    return said


def read_model_file(path: Path) -> ModelFile:
    """Read a config.json, or that of a folder. Raises ModelError for what is no configuration."""
    file = path / "config.json" if os.path.isdir(path) else path
    fix = "name a config.json of a causal language model of transformers, or the folder that holds it"
    if not os.path.exists(file):  # also for a name that is too long, for which Path raises
        raise ModelError(f"there is no {file}", why="models are read from disk; nothing is downloaded", fix=fix)
    try:
        content: Any = json.loads(
            file.read_text(encoding="utf-8"), object_pairs_hook=_each_once, parse_constant=_constant
        )
        content["model_type"]
    except (KeyError, TypeError) as error:
        why = "it is not a JSON object with a model_type"
        raise ModelError(f"{file} does not describe a model", why=why, fix=fix) from error
    except (OSError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ModelError(f"{file} does not describe a model", why=why, fix=fix) from error
    return ModelFile(file, content)


def _constant(word: str) -> float:
    """Return an infinity, which configurations have as a limit. Raises ValueError for NaN."""
    if word == "NaN":
        raise ValueError("NaN is no number")
    return float(word)


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a name that is there twice: which one counts, nobody says."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is there twice")
    return found


# The cache of traced workloads.


def usual_folder() -> Path | None:
    """Return `hostward/workloads` in the user's cache folder; None if nothing can be cached.

    That is if there is no such user, or torch or transformers may change without a new version: installed from an
    editable folder, or imported from elsewhere.
    """
    try:
        if any('"editable": true' in _origin(p) or _shadowed(p) for p in _TRACING):
            return None
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (named if named.is_absolute() else Path.home() / ".cache") / "hostward" / "workloads"
    except (metadata.PackageNotFoundError, RuntimeError):
        return None


def cached_workload(
    folder: Path | None,
    question: Mapping[str, Any],
    sequence_tokens: int,
    trace: Callable[[Sequence[int]], list[Workload]],
) -> Workload:
    """Return the workload that `trace` finds for sequences of this length, from the cache if it can be.

    It can if it was asked the same question for this length before, or for one near it: of three lengths, and found the
    same in all but bytes and operations (`hostward.plan.lengths`).

    Args:
        folder: the cache folder; None: `trace` is called, for this length alone.
        question: JSON values. `trace` may depend on nothing else but the lengths and installed software.
    """
    if folder is None:
        return trace((sequence_tokens,))[0]
    key = _key(question)
    own = folder / f"{key}-{sequence_tokens}.json"
    for path in (own, *sorted(folder.glob(f"{key}-*.json"))):
        with suppress(OSError, ValueError):
            if (known := _read(path, sequence_tokens)) is not None:
                return known
    log.info("tracing the model, once for all later calls; loading PyTorch")
    found = trace(lengths_around(sequence_tokens))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(own, _text(found), what="trace of a model")
        for old in sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime)[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, ValueError, ConfigError) as error:
        # Without a cached answer the next call takes as long as this one.
        log.info("the model's workload was not cached: %s", error)
    return found[0]


def _text(traced: Sequence[Workload]) -> str:
    """Write a workload in each line, with the inventory, which is that of all, in the first alone."""
    first, *others = traced
    return "\n".join([to_text(first), *(to_text(replace(w, inventory=Inventory((), ()))) for w in others)])


def _read(path: Path, sequence_tokens: int) -> Workload | None:
    """Return the workload of this length from a file of the cache; None if it does not tell it."""
    first, *others = path.read_text(encoding="utf-8").split("\n")
    own = from_text(first)
    if own.sequence_tokens == sequence_tokens:
        return own
    return at_length([own, *map(from_text, others)], sequence_tokens)


def _key(question: Mapping[str, Any]) -> str:
    known = {
        "question": question,
        "source": _source(),
        "packages": sorted(set(_packages())),
        "origins": [_origin(package) for package in _TRACING],
        "python": platform.python_version(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _origin(package: str) -> str:
    """Return where a package was installed from, down to the commit, if not from an index."""
    return metadata.distribution(package).read_text("direct_url.json") or ""


def _shadowed(package: str) -> bool:
    """Return whether Python would import a package from another folder than the one it is installed in."""
    found = importlib.util.find_spec(package)
    installed = Path(str(metadata.distribution(package).locate_file(""))).resolve()
    return found is None or found.origin is None or not Path(found.origin).resolve().is_relative_to(installed)


def _source() -> str:
    """Return a digest of hostward's own modules, because tracing changes more often than the version."""
    root = Path(hostward.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _packages() -> Iterator[str]:
    """Yield names with versions, as found in the folders that Python imports from."""
    for entry in sys.path:
        with suppress(OSError):
            yield from (name for name in os.listdir(entry or ".") if name.endswith((".dist-info", ".egg-info")))
