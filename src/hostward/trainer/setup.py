"""Turn options into a run: check all that can fail before weights are allocated, then build the rest."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hostward import __version__
from hostward.config.rules.table import captured
from hostward.config.schema import Config, get_option, options
from hostward.config.validate import check, idle_switches, shown
from hostward.core.inventory import Dtype
from hostward.core.startup import Startup
from hostward.core.units import billions
from hostward.errors import ConfigError, DataError, DeviceError
from hostward.optim.adamw import AdamW
from hostward.optim.sharded import StagesScaler
from hostward.plan.plan_file import PlanFile
from hostward.runtime.backend import TORCH_DTYPES
from hostward.trainer import checkpointing
from hostward.trainer.checkpointing import lock_folders
from hostward.trainer.cuda_graph import Captured, CudaGraph, require_capturable, require_graphs
from hostward.trainer.data.dataset import TokenDataset, build_dataset
from hostward.trainer.deferred_init import OffloadedWeights, weights_to_offload
from hostward.trainer.memory_check import (
    MemoryEstimate,
    lock_limit,
    require_fit,
    require_memory,
    require_room,
    require_same_model,
    slow_halves,
)
from hostward.trainer.microbatches import Pipeline, WholeModel
from hostward.trainer.models import parameter_count, pretrained_config, type_of_folder
from hostward.trainer.offload_options import (
    attach_activations,
    make_optimizer,
    recompute_layers,
    share_of,
    with_plan,
)
from hostward.trainer.parallel import Held, hold
from hostward.trainer.process_group import Ranks, bind_beside_gpu
from hostward.trainer.run import Passes, Run
from hostward.weights.deferred_init import move

log = logging.getLogger("hostward")


def prepare(
    recipe: str,
    config: Config,
    *,
    plan: PlanFile | None = None,
    run_dir: Path | None = None,
    force: bool = False,
    startup: Startup | None = None,
) -> Run:
    """Check the options, read the data, build model and optimizer, and load the requested checkpoint.

    Args:
        plan: placements to use instead of the options.
        run_dir: an output folder of this run alone, besides that of `checkpoint.save`.
        force: start even if the memory estimate or a checkpoint does not fit, or the plan is for
            another GPU.
        startup: times the phases; None: a new one, which the run has.

    Raises:
        HostwardError: of the kind that names the cause; whatever can be checked before the weights are allocated is
            checked before.
    """
    ranks = Ranks.of(os.environ)
    check(config, world_size=ranks.size)
    ranks = ranks.placed(config)
    device = choose_device(config.train.device, ranks.local_rank)
    for reported in [*idle_switches(config), *slow_halves(config, device)] if ranks.first else ():
        log.warning("%s", reported)
    if ranks.first and (limit := lock_limit(device)):
        log.info("%s", limit)
    if captured(config):
        require_graphs(device, plan)
    if plan is not None:
        config = with_plan(config, plan)
        if device.type == "cuda" and not force:
            plan.require_machine(torch.cuda.get_device_name(device))
    ranks.join(device, timedelta(minutes=config.dist.distributed_timeout_minutes))
    with ExitStack() as refused:
        locks = lock_folders(config, run_dir, ranks, refused)
        run = _prepared(recipe, config, plan, device, ranks, startup or Startup(), force=force)
        run.locks = locks
        refused.pop_all()
    return run


def _prepared(
    recipe: str,
    config: Config,
    plan: PlanFile | None,
    device: torch.device,
    ranks: Ranks,
    startup: Startup,
    *,
    force: bool,
) -> Run:
    """Build the run once the ranks have met and its output folders are locked."""
    resume_from = ranks.agreed(lambda: checkpointing.checkpoint_to_load(config))
    require_same_on_all_ranks(ranks, what_runs(recipe, config, device.type, resume_from, plan))
    with startup.phase("checks", "checking data and memory", "checked data and memory"):
        dataset, found, waiting = ranks.agreed(
            lambda: estimate_memory(recipe, config, device, plan, resume_from, ranks, force=force)
        )
    require_same_on_all_ranks(ranks, {"the data": f"{dataset.description} ({dataset.fingerprint[:8]})"})
    cpus = bind_beside_gpu(ranks, device)
    threads = config.train.num_threads or ranks.torch_threads(cpus)
    if threads is not None:
        torch.set_num_threads(threads)
    seed = config.rng.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    dtype = TORCH_DTYPES[Dtype(config.model.params_dtype)]
    count, rows, on_cpu = billions(parameter_count(config, dataset.vocab_size)), dataset.vocab_size, waiting is not None
    doing, done = ("drawing", "drew") if config.model.hf_model_path is None else ("reading", "read")
    with startup.phase("weights", f"{doing} {count} weights", f"{done} {count} weights"):
        held = hold(ranks, config, vocab_size=rows, device=device, dtype=dtype, seed=seed, on_cpu=on_cpu)
    model, share = held.model, share_of(config, ranks.data_size)
    _require_vocabulary(model, dataset)
    if waiting is not None:
        with startup.phase("move", "moving weights to the device", "moved weights to the device"):
            if resume_from is not None:
                checkpointing.load_weights(model, resume_from)
            move(model, device, weights=waiting.layers)
    # Each rank estimates with its own memory and GPU; unless all of them can, none uses the estimate.
    mix_of = found.mix_of if all(ranks.gather(found.mix_of is not None)) else None
    # Memory is pinned here. A rank that cannot pin must not leave the others waiting for it.
    of_all = f"state of {count} parameters"
    with startup.phase("state", f"placing the {of_all}", f"placed the {of_all}"):
        optimizer = ranks.agreed(lambda: make_optimizer(held, share, plan, cpus, mix_of))
    found = ranks.agreed(lambda: _as_placed(found, optimizer))
    stages = [part.model for part in held.parts]
    for whole in stages or [model]:
        recompute_layers(whole, config, plan)
    run = Run(
        recipe, config, device, dataset, model, optimizer, scaler_of(held, device, dtype), predicted=found.predicted,
        frontier=found.frontier if plan is None else plan.frontier, ranks=ranks, passes=passes_of(held, share, device),
        startup=startup,
    )  # fmt: skip
    if resume_from is not None and waiting is None:
        with startup.phase("resume", f"loading {resume_from}", f"loaded {resume_from}"):
            checkpointing.load(run, resume_from)
    # It uses the weights as they are.
    with startup.phase("attach", "attaching offloading to layers", "attached offloading to layers"):
        run.attachment = ranks.agreed(lambda: attach_activations(model, optimizer, config, plan, stages))
    if resume_from is not None and waiting is not None:
        with startup.phase("resume", f"loading {resume_from}", f"loaded {resume_from}"):
            checkpointing.load(run, resume_from, with_weights=False)
    run.begin_at(run.iteration)
    return run


def _as_placed(found: MemoryEstimate, optimizer: AdamW) -> MemoryEstimate:
    """Return the estimate for the placements that the optimizer has chosen, by the rates that it measured."""
    if found.measured is None or optimizer.rates is None:
        return found
    return found.measured(optimizer.rates, [bucket.placement for bucket in optimizer.plan.buckets])


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the torch device for `name`; `auto` is cuda if available.

    Raises DeviceError for a device that this machine lacks.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "train.device=cuda, but no CUDA device is available",
            fix="train.device=cpu or auto; hostward doctor reports why none was found",
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"LOCAL_RANK={local_rank} names no CUDA device",
            why=f"this process sees {torch.cuda.device_count()} CUDA devices",
            fix="start one process per device with torchrun, or unset it",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _require_vocabulary(model: torch.nn.Module, dataset: TokenDataset) -> None:
    rows = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if dataset.vocab_size > rows:
        raise DataError(
            f"the data needs {dataset.vocab_size} token ids, the model's embedding has {rows} rows",
            fix="raise model.vocab_size, or use the model's own tokenizer",
        )


def passes_of(held: Held, share: Config, device: torch.device) -> Passes:
    """Return the runner of batches for the part of the model that this process holds."""
    if captured(share):
        return Captured(partial(CudaGraph, device))
    if held.stages is None:
        return WholeModel()
    return Pipeline(held.parts, held.stages, share, device)


def scaler_of(held: Held, device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler | None:
    """Return the loss scaler for weights of this dtype, the same on all stages; None if none is needed."""
    if dtype is not torch.float16:
        return None
    return torch.amp.GradScaler(device.type) if held.stages is None else StagesScaler(device.type, held.stages)


def estimate_memory(
    recipe: str,
    config: Config,
    device: torch.device,
    plan: PlanFile | None,
    resume_from: Path | None,
    ranks: Ranks,
    *,
    force: bool,
) -> tuple[TokenDataset, MemoryEstimate, OffloadedWeights | None]:
    """Return the data, the memory estimate with alternatives, and the weights that start on the CPU.

    Raises for everything that can be checked before weights are allocated.
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
    leaving = weights_to_offload(config, plan, dataset.vocab_size, dtype, ranks)
    require_memory(config, device, dataset.vocab_size, ranks, 0 if leaving is None else leaving.weight_bytes)
    found = MemoryEstimate() if force else require_fit(recipe, config, device, dataset.vocab_size, plan, ranks)
    if not force:
        require_room(config, dataset.vocab_size, resume_from, first=ranks.first)
    return dataset, found, leaving if ranks.size == 1 else None


def _dataset(config: Config) -> TokenDataset:
    options, tokenizer = config.dataset, config.tokenizer
    if config.model.hf_model_path is not None:
        type_of_folder(config.model.hf_model_path)  # before a tokenizer is looked for in it
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


# Options and versions must agree on all ranks before training starts.


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
"""Options that may differ between ranks: threads, output, and the data's path on each node."""


def what_runs(
    recipe: str, config: Config, device: str, resume_from: Path | None, plan: PlanFile | None = None
) -> dict[str, str]:
    """Return what this rank is about to do, and its versions, by name."""
    named = {name: shown(get_option(config, name)) for name in options() if name not in OWN}
    start = "none" if resume_from is None else resume_from.name
    planned = "none" if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]
    reported = {"--plan": planned, "the device": device, "the checkpoint to resume from": start}
    return {"--recipe": recipe, **named, **reported, "hostward": __version__, "torch": torch.__version__}


def require_same_on_all_ranks(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Raise ConfigError on every rank unless these values agree on all of them."""
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16).digest()
    if len(set(ranks.gather(digest))) > 1:
        raise differing(ranks.gather((ranks.name, dict(mine))))


def differing(reported: Sequence[tuple[str, Mapping[str, str]]]) -> ConfigError:
    """Return the error for the values, by rank name, that differ from the first rank's or from each other."""
    first, expected = reported[0]
    names = dict.fromkeys(name for _, values in reported for name in values)
    found = []
    for name in names:
        others = [(rank, values.get(name)) for rank, values in reported if values.get(name) != expected.get(name)]
        if others:
            rank, value = others[0]
            more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            found.append(f"{name} is {expected.get(name)} on {first}, {value} on {rank}{more}")
    error = ConfigError(
        "the ranks of this run were started with different settings",
        why="; ".join(found),
        fix="give every rank the same options, data, folders and versions",
    )
    error.everywhere = True
    return error
