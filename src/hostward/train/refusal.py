"""Refusing a run that cannot fit, by the memory model, before anything is allocated."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace

import torch

from hostward.choice import Choice, Keep
from hostward.config import Config
from hostward.engine.backend import TORCH_DTYPES
from hostward.errors import ModelError
from hostward.hardware import Rates, host_memory
from hostward.hardware_profile import Hardware, profile_of
from hostward.inventory import Dtype, cut_buckets
from hostward.memory_model import Needs, required
from hostward.plan import Placement
from hostward.planning.answer import default_budgets
from hostward.planning.assignment import Forced
from hostward.planning.balance import best_share
from hostward.planning.costs import Costs
from hostward.planning.frontier import Frontier
from hostward.planning.needs import Budgets
from hostward.planning.plan_file import PlanFile
from hostward.planning.plan_text import points_of
from hostward.planning.refuse import refuse
from hostward.planning.shards import required_of, sharded
from hostward.planning.speeds import Speeds, measured, speeds_of
from hostward.planning.time_model import predict
from hostward.rank_parts import first_parts
from hostward.rule_table import captured, microbatches, serial, widened
from hostward.run_report import Estimate, FrontierPoint
from hostward.sizes import MIB
from hostward.training.mix import ShareOf
from hostward.training.planned import layers_of
from hostward.training.workload_of import inventory_of
from hostward.workload import Workload

from .kept import usual_folder
from .models import meta_model
from .placing import staging_bytes, sums_on_host
from .planning import asked_of, other_division, phases_of, require_by_rows, unplanned
from .ranks import Ranks
from .shares import shares
from .workload import recipe_workload

log = logging.getLogger("hostward")

CURE = "hostward plan with the same options says what would fit; --force starts anyway"
CURE_UNPLANNED = "{} is weighed as if what it takes away stayed; if that is more than is missing, --force starts anyway"
CURE_OF_MORE = "leave {} out: it keeps one layer more on the device than has been weighed"
CURE_OF_COPIES = "ddp.use_distributed_optimizer=true divides the model among the GPUs; --force starts anyway"


@dataclass(frozen=True, slots=True)
class Weighed:
    """What is predicted of a run, None where nothing was weighed, and other plans for it."""

    predicted: Estimate | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    mix_of: ShareOf | None = None
    """What to stream of the offloaded state; None: not known, or nothing depends on it."""


def require_fit(
    recipe: str,
    config: Config,
    device: torch.device,
    vocab_size: int,
    plan: PlanFile | None,
    ranks: Ranks,
) -> Weighed:
    """Weigh what the options, or the plan, ask of a GPU. Nothing is weighed without a GPU, or for layers, experts or
    matrices divided over ranks. With several ranks each weighs its part, and asks the host for its share of what is
    free. Seconds are the plan's, or those of the shipped profile of this GPU; and so is what else would do.

    Raises:
        MemoryLimitError: it does not fit what is free on the device and on the host.
        ConfigError: the plan is of another model.
    """
    if device.type != "cuda" or other_division(config) is not None:
        return Weighed()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    try:
        workload = recipe_workload(config, name=recipe, vocab_size=vocab_size, folder=usual_folder())
    except ModelError as error:
        log.warning("what this run needs is not known before it starts: %s", error.what)
        return Weighed()
    in_fp32 = widened(config, ranks.size)
    if ranks.divided:
        workload = sharded(workload, ranks.size, reduced_in_fp32=in_fp32, resharded=ranks.resharded)
    else:
        workload = replace(workload, microbatches=microbatches(config, ranks.size), reduced_in_fp32=in_fp32)
    choice = asked_choice(config, workload) if plan is None else replace(plan.choice(workload), serial=serial(config))
    needs = required(workload, choice)
    budgets = Budgets(free_bytes, host_memory().available_bytes // ranks.local_size, phases=phases_of(config))
    copies = ranks.size > 1 and not ranks.divided
    cure = CURE_OF_COPIES if copies else cure_of(config)
    refuse(needs, budgets, cure if plan is None else cure_of_plan(budgets, ranks))
    # Predicted seconds are those of a step that hides behind forward and backward.
    hardware = None if not choice.overlapped else profile_of(torch.cuda.get_device_name(device))
    drawn = plan is None and ranks.first and not copies  # a plan brings its own; nothing of copies is offloaded
    frontier = others(workload, hardware, ranks.local_size, budgets) if drawn and hardware is not None else ()
    known = plan is not None or unplanned(config) is None
    predicted = estimate(workload, choice, needs, plan, hardware, ranks.local_size) if known else None
    asked = shares(config)
    if plan is not None or hardware is None or not asked.offload_fraction or isinstance(asked.streamed_fraction, float):
        return Weighed(predicted, frontier)
    speeds, fraction = speeds_of(hardware, ranks.local_size), asked.offload_fraction

    def mix_of(rates: Rates) -> float:
        return best_share(Costs(workload, measured(speeds, rates)), choice, fraction, budgets)

    return Weighed(predicted, frontier, mix_of)


def cure_of(config: Config) -> str:
    """What to do about options that do not fit."""
    found = unplanned(config)
    if found is None:
        return CURE
    return (CURE_OF_MORE if found.adds else CURE_UNPLANNED).format(found.option)


def cure_of_plan(free: Budgets, ranks: Ranks) -> str:
    """How to make another one, for what is free on each GPU and on the node."""
    words = [f"--gpus {ranks.size}"] if ranks.size > 1 else []
    for name, size_bytes in (("device", free.device_bytes), ("host", free.host_bytes)):
        if size_bytes is not None:
            words.append(f"--{name}-memory {size_bytes * (ranks.local_size if name == 'host' else 1) // MIB}MiB")
    return f"hostward plan with the same options and {' '.join(words)} --json FILE; --force starts anyway"


def others(workload: Workload, hardware: Hardware, gpus: int, budgets: Budgets) -> tuple[FrontierPoint, ...]:
    """Plans that take less memory, or less time, than one another within the budgets of host memory, for the page of a
    run; none without SciPy, which planning needs and training does not.
    """
    if importlib.util.find_spec("scipy") is None:
        return ()
    most_bytes = default_budgets(hardware, gpus).device_bytes
    found = Frontier(workload, speeds_of(hardware, gpus), required_of(workload), Forced(), most_bytes)
    return points_of(workload, found.unbeaten(budgets))


def estimate(
    workload: Workload, choice: Choice, needs: Needs, plan: PlanFile | None, hardware: Hardware | None, gpus: int = 1
) -> Estimate:
    """What is predicted of a run on so many GPUs of a machine; its seconds are unknown without a plan of this workload
    and without a profile of the GPU.
    """
    step_s = exposed_s = None
    sizes = workload.sequence_tokens, workload.microbatch_sequences, workload.microbatches
    if plan is not None and not plan.workload.other_sizes(*sizes):
        step_s, exposed_s = plan.predicted.step_s, plan.predicted.exposed_s
    elif hardware is not None:
        found = predict(workload, choice, speeds_of(hardware, gpus))
        step_s, exposed_s = found.step_s, found.exposed_s
    return Estimate(needs.device_peak_bytes, needs.host_bytes, needs.pinned_bytes, step_s, exposed_s)


def require_same_model(plan: PlanFile, config: Config, vocab_size: int, ranks: Ranks) -> None:
    """Raises ConfigError if the plan's buckets are not those of the model, divided among `ranks`, or if it cannot be
    carried out; NotBuiltError if options divide it in another way. A plan for a step of other sizes is carried out, and
    it is said.
    """
    require_by_rows(config, "--plan", ranks.size)
    plan.require_ranks(ranks.size)
    plan.require_resharded(ranks.resharded)
    sizes = config.model.seq_length, config.train.micro_batch_size, microbatches(config, ranks.size)
    if ranks.first and (others := plan.workload.other_sizes(*sizes)):
        log.warning(
            "the plan is for %s: another may be faster here, or need less memory, and its seconds are not this run's; "
            "hostward plan with the options of this run makes one",
            others,
        )
    split_master = not config.optimizer.use_torch_optimizer_for_cpu_offload
    model = meta_model(config, vocab_size, TORCH_DTYPES[Dtype(config.model.params_dtype)])
    whole = inventory_of(model, split_master=split_master)
    plan.placements(cut_buckets(first_parts(whole.parameters, ranks.size), split_master=split_master))
    layers_of(plan)  # raises for what cannot be carried out


def asked_choice(config: Config, workload: Workload, speeds: Speeds | None = None) -> Choice:
    """What the options ask for. An "auto" mix is weighed as if the host stepped all of it, which takes most memory of
    the host, unless `speeds` are known.
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
