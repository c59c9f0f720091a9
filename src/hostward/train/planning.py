"""From a recipe or a model's configuration file to a question for the planner. No weight is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hostward.choice import Keep
from hostward.config import Config
from hostward.engine.backend import TORCH_DTYPES
from hostward.errors import ConfigError
from hostward.inventory import Dtype
from hostward.plan import Placement
from hostward.planner import place_fraction
from hostward.planning.assignment import Forced
from hostward.planning.speeds import Speeds, balanced_share
from hostward.workload import Workload

from .models import empty_model, pretrained_config, training_loss, transformers_config

if TYPE_CHECKING:
    import torch

T = TypeVar("T", Placement, Keep)
_ELEMENTWISE = {"layernorm", "mlp_act", "moe_act"}


def recipe_workload(recipe: str, config: Config) -> Workload:
    """The whole model of a recipe, on one GPU."""
    from .tokenizer import load_tokenizer

    path = config.model.hf_model_path
    if path is None:
        rows = config.model.vocab_size
        if rows is None:
            tokenizer = load_tokenizer(config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model)
            rows = tokenizer.vocab_size if tokenizer is not None else None
        described = transformers_config(config.model, vocab_size=rows)
    else:
        described = pretrained_config(config.model, path)
    size = config.train.micro_batch_size
    return _workload(
        recipe,
        described,
        Dtype(config.model.params_dtype),
        config.model.seq_length,
        size,
        -(-config.train.global_batch_size // size),
        split=not config.optimizer.use_torch_optimizer_for_cpu_offload,
    )


def configured_workload(path: Path, sequence_tokens: int, microbatch_sequences: int, microbatches: int) -> Workload:
    """The model of a transformers configuration, a file or a folder with `config.json`, in bf16.

    Raises ConfigError where it cannot be read, or describes no causal language model.
    """
    from transformers import AutoConfig

    try:
        described = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--config {path} is no transformers configuration",
            why=str(error).partition("\n")[0],
            fix="name a config.json, or the folder of a model that has one",
        ) from error
    name = path.parent.name if path.name == "config.json" else path.stem
    return _workload(
        name or described.model_type, described, Dtype.BF16, sequence_tokens, microbatch_sequences, microbatches
    )


def _workload(
    name: str,
    described: Any,
    dtype: Dtype,
    sequence_tokens: int,
    microbatch_sequences: int,
    microbatches: int,
    split: bool = True,
) -> Workload:
    import torch

    from hostward.training.workload_of import workload_of

    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return training_loss(model, ids, ids)

    described.use_cache = False
    try:
        with torch.device("meta"):
            model = empty_model(described, TORCH_DTYPES[dtype])
    except ValueError as error:
        raise ConfigError(
            f"{described.model_type!r} is no causal language model of transformers",
            why=str(error).partition("\n")[0],
            fix="name the configuration of a decoder",
        ) from error
    return workload_of(
        model.train(),
        sequence_tokens=sequence_tokens,
        microbatch_sequences=microbatch_sequences,
        microbatches=microbatches,
        loss=loss,
        name=name,
        split_master=split,
    )


def asked_of(config: Config, workload: Workload, speeds: Speeds) -> Forced:
    """What the options of a recipe say themselves; all else is the planner's to choose."""
    options, model = config.optimizer, config.model
    placements: dict[int, Placement] = {}
    if options.optimizer_cpu_offload or options.offload_optimizer_states:
        from .placing import shares

        asked = shares(config)
        share = asked.streamed_fraction
        streamed = balanced_share(speeds, workload) if isinstance(share, str) else share
        plan = place_fraction(workload.inventory.buckets, asked.offload_fraction, streamed)
        placements = {i: row.placement for i, row in enumerate(plan.buckets)}
    count = len(workload.repeated)
    leaving = model.cpu_offloading_num_layers if model.cpu_offloading and model.cpu_offloading_activations else 0
    keeps: dict[int, Keep] = {}
    if leaving or model.recompute_granularity is not None:
        keeps = {i: _keep(config, i, leaving) for i in range(count)}
    elif model.cuda_graph_impl != "none":
        keeps = dict.fromkeys(range(count), Keep.KEEP)
    weights = None
    if model.cpu_offloading and model.cpu_offloading_weights:
        weights = frozenset(layer.name for layer in workload.repeated[: model.cpu_offloading_num_layers])
    return Forced(placements, keeps, weights)


def _keep(config: Config, layer: int, leaving: int) -> Keep:
    model = config.model
    first = model.recompute_num_layers or 0
    whole = model.recompute_granularity == "full" and (model.recompute_method == "uniform" or layer < first)
    parts = model.recompute_granularity == "selective" and _ELEMENTWISE & set(model.recompute_modules)
    if layer < leaving:
        return Keep.RECOMPUTE_OFFLOAD if whole else Keep.ELEMENTWISE_OFFLOAD if parts else Keep.OFFLOAD
    return Keep.RECOMPUTE if whole else Keep.ELEMENTWISE if parts else Keep.KEEP


def forced_by_hand(
    workload: Workload, before: Forced, places: list[str], keeps: list[str], weights: int | None
) -> Forced:
    """`before`, changed by `--place PATTERN=PLACEMENT` and `--keep PATTERN=WHAT` (patterns of layer or bucket names, as
    in shells) and by the number of first layers whose weights leave.

    Raises ConfigError for a pattern that nothing matches, a word that is none, or more layers than there are.
    """
    placements, activations = dict(before.placements), dict(before.activations)
    buckets = [(bucket.layer, bucket.name) for bucket in workload.inventory.buckets]
    layers = [(layer.name,) for layer in workload.repeated]
    placements |= _matched("--place", places, Placement, buckets)
    activations |= _matched("--keep", keeps, Keep, layers)
    chosen = before.offloaded_weights
    if weights is not None:
        if weights >= len(layers) and weights:
            raise ConfigError(
                f"--weights {weights}: the model has {len(layers)} layers",
                why="the weights of the last layer are wanted by forward and backward in a row, so they stay",
                fix=f"at most --weights {len(layers) - 1}",
            )
        chosen = frozenset(layer.name for layer in workload.repeated[:weights])
    return Forced(placements, activations, chosen)


def _matched(option: str, texts: list[str], cls: type[T], names: Sequence[tuple[str, ...]]) -> Mapping[int, T]:
    found: dict[int, T] = {}
    for text in texts:
        pattern, separator, word = text.rpartition("=")
        if not separator or word not in [known.value for known in cls]:
            raise ConfigError(
                f"{option} {text} is not of the form PATTERN=WHAT",
                why=f"WHAT is one of {', '.join(cls)}",
                fix=f"{option} 'model.layers.0={next(iter(cls)).value}'",
            )
        hit = [i for i, held in enumerate(names) if any(fnmatchcase(name, pattern) for name in held)]
        if not hit:
            raise ConfigError(
                f"{option} {text}: nothing has a name like {pattern}",
                why=f"names are like {names[0][-1]}" if names else "",
            )
        found |= dict.fromkeys(hit, cls(word))
    return found
