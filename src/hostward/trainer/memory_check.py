"""Check from the sizes of the model alone that a run fits, before anything is allocated."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hostward.checkpoint import api, files
from hostward.config.rules.table import captured, microbatches, serial, widened
from hostward.config.schema import Config
from hostward.core.host_limits import Rates, host_memory
from hostward.core.inventory import Dtype, cut_buckets, state_bytes_per_element
from hostward.core.placement import Placement
from hostward.core.units import MIB, size, sizes_apart
from hostward.errors import CheckpointError, MemoryLimitError, ModelError
from hostward.machine.facts import (
    LOCK_LIMIT_FIX,
    LOCK_LIMIT_WHY,
    SLOW_HALVES_FIX,
    SLOW_HALVES_WHY,
    has_slow_halves,
    lock_limit_bytes,
    processor_flags,
)
from hostward.optim.placement import ShareOf
from hostward.plan.budgets import Budgets, refuse, table
from hostward.plan.cost_model import Costs, Speeds, measured, speeds_of
from hostward.plan.decisions import Choice, FrontierPoint, Keep
from hostward.plan.hardware_profile import profile_of
from hostward.plan.memory_model import LOAD, STEADY_STEP, Needs, PhaseNeeds, required
from hostward.plan.plan_file import PlanFile, layers_of
from hostward.plan.rank_partition import first_parts, required_of, sharded
from hostward.plan.render import points_of
from hostward.plan.result import default_budgets, device_budget, host_budget
from hostward.plan.search import Frontier, best_share
from hostward.plan.solver import Forced
from hostward.plan.step_memory import Owner
from hostward.plan.step_time import predict
from hostward.plan.workload import Workload
from hostward.profiler.workload import inventory_of
from hostward.report.schema import Estimate
from hostward.runtime.backend import TORCH_DTYPES
from hostward.trainer.models import meta_model, named_shapes, parameter_count, place_in_model
from hostward.trainer.offload_options import (
    accumulates_in_fp32,
    gradients_offloaded_in_backward,
    share_of,
    staging_bytes,
    sums_on_host,
)
from hostward.trainer.plan_request import (
    asked_of,
    other_division,
    phases_of,
    require_by_rows,
    shares,
    state_format,
    unplanned,
)
from hostward.trainer.process_group import Ranks
from hostward.trainer.workload import recipe_workload, usual_folder

log = logging.getLogger("hostward")


SMALLER = "shrink the model, as in model.num_layers=2"
NONE_FOUND = (
    "no GPU was found: hostward doctor reports why, and hostward plan with the same options which GPUs it needs"
)
NONE_ASKED = "train.device=auto uses GPUs, and hostward plan with the same options says which it needs"


@dataclass(frozen=True, slots=True)
class Need:
    """Lower bounds on the bytes of a run, without activations and workspaces."""

    parameters: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int


def lock_limit(device: torch.device) -> str | None:
    """Return the warning about this process's limit on pinned memory; None if it has none, or no memory is pinned."""
    limit_bytes = lock_limit_bytes()
    if device.type != "cuda" or limit_bytes is None:
        return None
    return f"ulimit -l is {size(limit_bytes)}: {LOCK_LIMIT_WHY} ({LOCK_LIMIT_FIX})"


def slow_halves(config: Config, device: torch.device) -> list[str]:
    """Return the warning about a 16-bit model on a CPU that is slow with it, if it is one."""
    dtype = config.model.params_dtype
    if device.type != "cpu" or Dtype(dtype) is Dtype.FP32 or not has_slow_halves(processor_flags()):
        return []
    return [f"model.params_dtype={dtype} is slow on this CPU: {SLOW_HALVES_WHY} ({SLOW_HALVES_FIX})"]


def need(config: Config, parameters: int) -> Need:
    """Return what a model of this many parameters needs, on all tiers together."""
    dtype = Dtype(config.model.params_dtype)
    weight_bytes = parameters * TORCH_DTYPES[dtype].itemsize
    gradient_bytes = parameters * 4 if accumulates_in_fp32(config) else weight_bytes
    form = state_format(config)
    state_bytes = parameters * state_bytes_per_element(form.master_kind(dtype), form) + form.scale_bytes(parameters)
    return Need(parameters, weight_bytes, gradient_bytes, state_bytes)


def require_memory(config: Config, device: torch.device, vocab_size: int, ranks: Ranks, away_bytes: int = 0) -> Need:
    """Check that the model fits and return what it needs, on all tiers together.

    On a GPU the offloaded share is counted on the host; on a CPU everything is. The ranks of a node are counted
    together.

    Args:
        away_bytes: bytes of this rank's offloaded weights, which are never all on the device while there are gradients.

    Raises:
        MemoryLimitError: weights, gradients and optimizer state exceed the memory that is free.
    """
    shapes = named_shapes(config, vocab_size)
    held = names_on_rank(shapes, ranks, config.model.virtual_pipeline_model_parallel_size or 1)
    count = sum(math.prod(shapes[name]) for name in held)
    of_experts = sum(math.prod(shapes[name]) for name in held if ".experts." in name)
    config = share_of(config, ranks.data_size)
    least = need(config, -(-count // ranks.of_stage) if ranks.divided else count)
    # Sharded weights are also unsharded from forward to backward, unless resharded layer by layer.
    gathered = (count - of_experts) // ranks.sharing + of_experts // config.model.expert_model_parallel_size
    whole_bytes = need(config, gathered).weight_bytes if ranks.divided and not ranks.resharded else 0
    asked = shares(config)
    offloaded_bytes = int(asked.offload_fraction * least.state_bytes)
    least_share, most_share = asked.host_share
    landing_bytes = int(least_share * least.gradient_bytes)
    leaving_bytes = int(most_share * least.gradient_bytes) if gradients_offloaded_in_backward(config) else 0
    parts = {
        Owner.WEIGHTS.value: least.weight_bytes,
        Owner.GATHERED.value: whole_bytes,
        Owner.GRADIENTS.value: least.gradient_bytes,
        Owner.STATE.value: least.state_bytes,
    }
    host, free_bytes = host_memory(), None
    phase = PhaseNeeds(STEADY_STEP, {}, parts, {})
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        there = {Owner.WEIGHTS.value: away_bytes, Owner.STATE.value: offloaded_bytes}
        gone = {**there, Owner.GRADIENTS.value: leaving_bytes}
        here = {owner: size_bytes - gone.get(owner, 0) for owner, size_bytes in parts.items()}
        phase = PhaseNeeds(STEADY_STEP, here, {**there, Owner.GRADIENTS.value: landing_bytes}, {})
    free = Budgets(free_bytes, host.available_bytes // ranks.local_size)
    if phase.host_bytes * ranks.local_size > host.available_bytes:
        fix = SMALLER
        if device.type == "cpu":
            fix = f"{NONE_ASKED if config.train.device == 'cpu' else NONE_FOUND}; or {SMALLER}"
            if slow_halves(config, device):
                fix = f"{fix} {SLOW_HALVES_FIX}"
        raise _too_large(least, phase, free, "host", phase.host_bytes * ranks.local_size, host.available_bytes, fix)
    if free_bytes is not None and phase.device_bytes > free_bytes:
        fix = f"raise optimizer.optimizer_offload_fraction, or {SMALLER}"
        raise _too_large(least, phase, free, "device", phase.device_bytes, free_bytes, fix)
    # Weights are offloaded after all are on the device, and before there are gradients.
    if free_bytes is not None and ranks.size > 1 and least.weight_bytes > free_bytes:
        loading = PhaseNeeds(LOAD, {Owner.WEIGHTS.value: least.weight_bytes}, {}, {})
        fix = "divide it among more processes: with several, offloaded weights are on the device until training starts"
        raise _too_large(least, loading, free, "device", least.weight_bytes, free_bytes, fix)
    return least


def names_on_rank(names: Iterable[str], ranks: Ranks, rounds: int) -> list[str]:
    """Return the names of the model's parameters that this rank's stages have.

    The embedding is with the first stage of all, what follows the layers with the last, and so is an embedding that is
    the output layer as well.
    """
    places = {name: place_in_model(name) for name in names}
    layers = 1 + int(max(place for place in places.values() if place < math.inf))
    first, last = (ranks.has_layer(layer, layers, rounds) for layer in (0, layers - 1))
    if not any(name.startswith("lm_head.") for name in places):
        first |= last
    at_ends = {-1: first, math.inf: last}
    return [n for n, p in places.items() if (at_ends[p] if p in at_ends else ranks.has_layer(int(p), layers, rounds))]


def _too_large(
    least: Need, phase: PhaseNeeds, free: Budgets, where: str, needed_bytes: int, available_bytes: int, fix: str
) -> MemoryLimitError:
    why = (
        f"{least.parameters:,} parameters: weights {size(least.weight_bytes)}, gradients {size(least.gradient_bytes)}, "
        f"optimizer state {size(least.state_bytes)}, and activations come on top"
    )
    if free.device_bytes is None:
        why = f"{why}; without a GPU all of it is there"
    else:
        why = f"{why}; without these, compared with free memory:\n{table(Needs((phase,)), free)}"
    asked, there = sizes_apart(needed_bytes, available_bytes)
    return MemoryLimitError(
        f"the run needs at least {asked} of {where} memory, and {there} are available",
        why=why,
        fix=fix,
    )


# Checking by the memory estimate that a run fits, before anything is allocated.


FIX = "hostward plan with the same options reports what would fit; --force starts anyway"
FIX_UNPLANNED = (
    "{} saves memory that the estimate does not count; if that is more than is missing, --force starts anyway"
)
FIX_OF_MORE = "leave {} out: it keeps one layer more on the device than the estimate counts"
FIX_OF_COPIES = "ddp.use_distributed_optimizer=true shards the model over the GPUs; --force starts anyway"


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Prediction for a run, None if nothing was estimated, and alternative plans."""

    predicted: Estimate | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    mix_of: ShareOf | None = None
    """Returns the share of offloaded state to stream; None if unknown, or if nothing depends on it."""
    measured: Callable[[Rates, Sequence[Placement]], MemoryEstimate] | None = None
    """Predicts an "auto" mix and its alternatives anew, by measured rates and the placements that followed from them;
    None where neither changes anything.
    """


def require_fit(
    recipe: str,
    config: Config,
    device: torch.device,
    vocab_size: int,
    plan: PlanFile | None,
    ranks: Ranks,
) -> MemoryEstimate:
    """Check that the memory estimate of the options, or of the plan, fits the GPU and the host.

    Nothing is estimated without a GPU, or with layers, experts or matrices sharded over ranks. With several ranks each
    estimates its part, and counts on its share of the free host memory. Predicted seconds are the plan's, or follow
    from the shipped profile of this GPU, as do those of the alternatives.

    Raises:
        MemoryLimitError: it does not fit what is free on the device and on the host.
        ConfigError: the plan is of another model.
    """
    if device.type != "cuda" or other_division(config) is not None:
        return MemoryEstimate()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    try:
        workload = recipe_workload(config, name=recipe, vocab_size=vocab_size, folder=usual_folder())
    except ModelError as error:
        log.warning("the memory that this run needs is not known before it starts: %s", error.what)
        return MemoryEstimate()
    in_fp32 = widened(config, ranks.size)
    if ranks.divided:
        workload = sharded(workload, ranks.size, reduced_in_fp32=in_fp32, resharded=ranks.resharded)
    else:
        workload = replace(workload, microbatches=microbatches(config, ranks.size), reduced_in_fp32=in_fp32)
    choice = asked_choice(config, workload) if plan is None else replace(plan.choice(workload), serial=serial(config))
    needs = required(workload, choice)
    budgets = Budgets(free_bytes, host_memory().available_bytes // ranks.local_size, phases=phases_of(config))
    copies = ranks.size > 1 and not ranks.divided
    fix = FIX_OF_COPIES if copies else fix_for(config)
    refuse(needs, budgets, fix if plan is None else fix_for_plan(budgets, ranks))
    # Predicted seconds are those of a step that overlaps with forward and backward.
    hardware = None if not choice.overlapped else profile_of(torch.cuda.get_device_name(device))
    with_frontier = plan is None and ranks.first and not copies  # a plan has its own; replicas are not offloaded
    speeds = None if hardware is None else speeds_of(hardware, ranks.local_size)
    most_bytes = None if hardware is None else default_budgets(hardware, ranks.local_size).device_bytes
    known = plan is not None or unplanned(config) is None

    def estimated(choice: Choice, needs: Needs, speeds: Speeds | None) -> MemoryEstimate:
        frontier = others(workload, speeds, most_bytes, budgets) if with_frontier and speeds is not None else ()
        return MemoryEstimate(estimate(workload, choice, needs, plan, speeds) if known else None, frontier)

    asked = shares(config)
    if plan is not None or speeds is None or not asked.offload_fraction or isinstance(asked.streamed_fraction, float):
        return estimated(choice, needs, speeds)
    fraction = asked.offload_fraction

    bucket = workload.inventory.as_asked

    def mix_of(rates: Rates) -> float:
        return best_share(Costs(workload, measured(speeds, rates, bucket)), choice, fraction, budgets)

    def again(rates: Rates, placements: Sequence[Placement]) -> MemoryEstimate:
        mixed = replace(choice, placements=tuple(placements))
        return estimated(mixed, required(workload, mixed), measured(speeds, rates, bucket))

    # Its alternatives are looked for once its mix is known, by the same rates.
    first = estimate(workload, choice, needs, plan, speeds) if known else None
    return MemoryEstimate(first, (), mix_of, again)


def fix_for(config: Config) -> str:
    """Return the fix for options that do not fit."""
    found = unplanned(config)
    if found is None:
        return FIX
    return (FIX_OF_MORE if found.adds else FIX_UNPLANNED).format(found.option)


def fix_for_plan(free: Budgets, ranks: Ranks) -> str:
    """Return the fix for a plan that does not fit: the command that plans for the free memory of each GPU and the
    node, less the reserve that plans leave of a machine's.
    """
    limits: dict[str, int] = {}
    if free.device_bytes is not None:
        limits["device"] = device_budget(free.device_bytes, ranks.size)
    if free.host_bytes is not None:
        limits["host"] = host_budget(free.host_bytes * ranks.local_size)
    words = [f"--gpus {ranks.size}"] if ranks.size > 1 else []
    words += [f"--{name}-memory {size_bytes // MIB}MiB" for name, size_bytes in limits.items()]
    return f"hostward plan with the same options and {' '.join(words)} --json FILE; --force starts anyway"


def others(workload: Workload, speeds: Speeds, most_bytes: int | None, budgets: Budgets) -> tuple[FrontierPoint, ...]:
    """Return the Pareto-optimal plans by memory and step time within the host's budget, for the run's report.

    There are none without SciPy, which planning needs and training does not.

    Args:
        most_bytes: the device memory beyond which no plan is of use.
    """
    if importlib.util.find_spec("scipy") is None:
        return ()
    found = Frontier(workload, speeds, required_of(workload), Forced(), most_bytes)
    return points_of(workload, found.unbeaten(budgets))


def estimate(
    workload: Workload, choice: Choice, needs: Needs, plan: PlanFile | None, speeds: Speeds | None
) -> Estimate:
    """Predict memory and step time of a run.

    Seconds are unknown without a plan of this workload and without the speeds of the machine.
    """
    step_s = exposed_s = None
    sizes = workload.sequence_tokens, workload.microbatch_sequences, workload.microbatches
    if plan is not None and not plan.workload.other_sizes(*sizes):
        step_s, exposed_s = plan.predicted.step_s, plan.predicted.exposed_s
    elif speeds is not None:
        found = predict(workload, choice, speeds)
        step_s, exposed_s = found.step_s, found.exposed_s
    return Estimate(needs.device_peak_bytes, needs.host_bytes, needs.pinned_bytes, step_s, exposed_s)


def require_same_model(plan: PlanFile, config: Config, vocab_size: int, ranks: Ranks) -> None:
    """Raise ConfigError if the plan's buckets differ from the model's, sharded over `ranks`, or it cannot be executed.

    Raises NotBuiltError if options divide the model in another way. A plan for a step of other sizes is executed, with
    a warning.
    """
    require_by_rows(config, "--plan", ranks.size)
    plan.require_ranks(ranks.size)
    plan.require_resharded(ranks.resharded)
    sizes = config.model.seq_length, config.train.micro_batch_size, microbatches(config, ranks.size)
    if ranks.first and (others := plan.workload.other_sizes(*sizes)):
        log.warning(
            "the plan is for %s: another may be faster here, or need less memory, and its times do not apply; "
            "hostward plan with the options of this run makes one",
            others,
        )
    form = state_format(config)
    model = meta_model(config, vocab_size, TORCH_DTYPES[Dtype(config.model.params_dtype)])
    whole = inventory_of(model, form)
    plan.placements(cut_buckets(first_parts(whole.parameters, ranks.size), form=form))
    layers_of(plan)  # raises for what cannot be executed


def asked_choice(config: Config, workload: Workload, speeds: Speeds | None = None) -> Choice:
    """Return the choices that the options ask for.

    Without `speeds` an "auto" mix counts as a CPU optimizer step for all of it, which needs the most host memory.
    """
    forced = asked_of(config, workload, speeds)
    buckets, layers = workload.inventory.buckets, workload.repeated
    return Choice(
        tuple(forced.placements.get(i, Placement.DEVICE) for i in range(len(buckets))),
        tuple(forced.activations.get(i, Keep.KEEP) for i in range(len(layers))),
        forced.offloaded_weights or frozenset(),
        sums_on_host(config),
        staging_bytes(config, lambda: workload.inventory),
        captured(config),
        serial(config),
    )


# Checking before any weight is allocated that the checkpoints of a run fit on their disk.


def require_room(config: Config, vocab_size: int, resume_from: Path | None, *, first: bool = True) -> None:
    """Check that the next checkpoint fits the free disk space; rank 0 warns if those kept together do not.

    All ranks compute the same size: they write into one folder, and write replicated tensors once.

    Raises:
        CheckpointError: not even one fits. Retention frees nothing: older checkpoints stay until a new one is complete.
    """
    options = config.checkpoint
    if options.save is None:
        return
    saves = saves_to_come(config, resume_from)
    if not saves:
        return
    save, one_bytes = Path(options.save), checkpoint_bytes(config, vocab_size)
    with files.system_errors(f"checkpoint.save={save} cannot be examined"):
        free_bytes = room_bytes(save)
        if free_bytes is None:
            return
        free_bytes += files.leftover_bytes(save)
        # Retention keeps checkpoints of later iterations, such as those of a run that this one is finetuned from.
        kept = options.most_recent_k is not None
        older_bytes = files.complete_bytes(save, config.train.train_iters) if kept else 0
    if one_bytes > free_bytes:
        asked, there = sizes_apart(one_bytes, free_bytes)
        raise CheckpointError(
            f"checkpoint.save={save} has room for {there}; a checkpoint takes at least {asked}",
            why="older checkpoints are removed when a new one is complete, not before",
            fix="free space there, or set checkpoint.save to a folder on another disk; --force starts anyway",
        )
    together = saves if options.most_recent_k is None else min(saves, options.most_recent_k + 1)
    if first and together * one_bytes > free_bytes + older_bytes:
        log.warning(
            "checkpoint.save=%s would hold %d checkpoints of this run at once, of %s each at least, and has room for "
            "%d; the save without room ends the run (checkpoint.most_recent_k keeps fewer, one more during a save)",
            save,
            together,
            size(one_bytes),
            (free_bytes + older_bytes) // one_bytes,
        )


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Return the bytes of one checkpoint of the whole model, without tables of contents and the like."""
    dtype = Dtype(config.model.params_dtype)
    state_bytes = state_format(config).saved_element_bytes(dtype)
    return parameter_count(config, vocab_size) * (dtype.itemsize_bytes + state_bytes)


def saves_to_come(config: Config, resume_from: Path | None) -> int:
    """Count the checkpoints that a run writes until its end.

    These are one per interval before the last iteration and one after it, which exists already if a finished run
    resumes in its own folder.
    """
    options, until, begun = config.checkpoint, config.train.train_iters, 0
    if resume_from is not None and not options.finetune:
        begun = int(str(api.read_plain(resume_from)["iteration"]))
    if begun >= until:
        return int(options.save != options.load)
    interval = options.save_interval
    return 1 + (0 if interval is None else (until - 1) // interval - begun // interval)


def room_bytes(folder: Path) -> int | None:
    """Return what this user may still write to the folder's file system; None if it does not report that."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    found = os.statvfs(there)
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return blocks * found.f_frsize if found.f_blocks else None
