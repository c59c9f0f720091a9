"""Answer a planning question: the plan, or why nothing fits and the smallest change that would. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostward.core.placement import Placement
from hostward.core.units import GIB, MIB, gib, size
from hostward.plan.budgets import Budgets, Required, needed
from hostward.plan.cost_model import Speeds, speeds_of
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.hardware_profile import Hardware
from hostward.plan.memory_model import Needs
from hostward.plan.rank_partition import required_of, sharded
from hostward.plan.search import Candidate, Frontier
from hostward.plan.solver import LAST_STAY, Forced
from hostward.plan.step_time import explain
from hostward.plan.workload import Workload

DEVICE_RESERVE_BYTES = 2 * GIB
"""GPU memory left for the driver's context, for libraries, and for what the allocator cannot use."""
POOLS_SHARE = 0.055
"""Additional share of allocated memory that torch's allocator needs on each of several GPUs.

The allocator keeps memory for each stream, FSDP2 gathers and reduces on streams of its own, and no stream can use
another's reserve. On two H200 with Qwen3-30B-A3B it took 134.6 GB for 127.7 GB with 21 layers; with 24 it took 147.9 GB
for 144.3 GB, and released memory in every iteration (benchmarks/results,
2026-11-23-recipe-30b-a3b-21-layers-two-h200.json and 24-layers).
"""
HOST_RESERVE_SHARE = 0.1
"""Share left for the system and the process itself."""
RESHARDED = "ddp.data_parallel_sharding_strategy=optim_grads_params"
_WORTH_IT = 0.005
_MOST_DOUBLINGS = 6
"""Of the number of GPUs, in the search for how many it takes."""
_FEWEST_TOKENS = 256
"""Shorter sequences are not proposed."""


@dataclass(frozen=True, slots=True)
class Question:
    """Describe what is to be planned; `budgets` are for one GPU and its share of the node."""

    workload: Workload
    hardware: Hardware
    gpus: int
    budgets: Budgets
    forced: Forced
    whole: Workload | None = None
    """The workload of one GPU that has all parameters, for saying how many GPUs it takes; None: it is not said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold the answer; `chosen` is None where nothing fits.

    Then `nearest` exceeds the budgets by least, and `changes` would make the run fit.
    """

    question: Question
    frontier: Frontier
    speeds: Speeds
    chosen: Candidate | None
    nearest: Candidate
    changes: tuple[str, ...]
    peak_without_bytes: int | None = None
    """Peak of the shown choice on the device if all weights stayed there; None where they do."""

    @property
    def shown(self) -> Candidate:
        return self.chosen or self.nearest

    @property
    def why(self) -> Sequence[str]:
        """Explain what is exposed, in sentences; empty where nothing fits.

        This simulates longer steps, so read it only to print it.
        """
        return explain(self.frontier.costs, self.chosen.choice, self.chosen.prediction) if self.chosen else ()

    @property
    def offloads(self) -> bool:
        """Return whether the plan offloads anything."""
        return offloads(self.shown.choice)


def offloads(choice: Choice) -> bool:
    """Return whether the choice offloads anything."""
    leaves = any(keep in LEAVES for keep in choice.activations)
    return leaves or bool(choice.offloaded_weights) or any(p.offloaded for p in choice.placements)


def device_budget(gpu_bytes: int, gpus: int) -> int:
    """Return the memory of a GPU, one of `gpus` of a run, less a reserve, in bytes."""
    return int(max(0, gpu_bytes - DEVICE_RESERVE_BYTES) / (1 + (POOLS_SHARE if gpus > 1 else 0)))


def default_budgets(hardware: Hardware, gpus: int) -> Budgets:
    """Return the machine's memory less a reserve, per GPU; no limit where the hardware file has none."""
    memory = hardware.limits.memory_bytes
    locked = hardware.limits.locked_bytes
    return Budgets(
        device_budget(hardware.gpu.memory_bytes, gpus) if hardware.gpu else None,
        int(memory * (1 - HOST_RESERVE_SHARE)) // gpus if memory is not None else None,
        locked // gpus if locked is not None else None,
    )


def answer(question: Question, required: Required) -> Answer:
    """Plan the question.

    Raises:
        ConfigError: the hardware file has no GPU, or SciPy is missing.
    """
    speeds = speeds_of(question.hardware, question.gpus)
    gpu, device_bytes = question.hardware.gpu, question.budgets.device_bytes
    most_bytes = gpu.memory_bytes if gpu and device_bytes is not None and device_bytes <= gpu.memory_bytes else None
    frontier = Frontier(question.workload, speeds, required, question.forced, most_bytes)
    chosen = frontier.best_at_last(question.budgets)
    nearest = chosen or frontier.nearest(question.budgets)
    changes = [] if chosen else _changes(question, frontier, required)
    stayed = None
    if nearest.choice.offloaded_weights:
        here = replace(nearest.choice, offloaded_weights=frozenset[str]())
        stayed = required(question.workload, here).device_peak_bytes
    return Answer(question, frontier, speeds, chosen, nearest, tuple(changes), stayed)


def verdict(found: Answer) -> str:
    """Say in one sentence whether offloading helps, and what the host must have where no limit was given."""
    base, budgets = found.frontier.base, found.question.budgets
    if found.chosen is None:
        return "It does not fit."
    host_bytes = needed(found.chosen.needs, budgets.phases)["host"] * found.question.gpus
    there = "" if budgets.host_bytes is not None else f" if the host has {size(host_bytes)}"
    if not budgets.over(base.needs) and found.chosen.prediction.step_s >= base.prediction.step_s * (1 - _WORTH_IT):
        if found.offloads:  # chosen by hand, or by options
            return f"It fits with what was asked for{there}: offloading more will not help, it only takes time."
        peak = size(base.needs.device_peak_bytes)
        return f"Everything fits on the device ({peak} at the peak): offloading will not help, it only takes time."
    if not found.offloads:
        return "Nothing needs to be offloaded: saved tensors are recomputed in backward instead."
    if found.chosen.prediction.exposed_s > found.chosen.prediction.compute_s:
        idle = "the GPU is idle for longer than it computes: a larger batch or more GPUs will help more"
        return f"It fits{there}, but {idle}."
    return f"It fits with offloading{there}."


def _changes(question: Question, frontier: Frontier, required: Required) -> list[str]:
    """List changes that would each make the run fit.

    They are the smallest raise of one budget, the planner's own choice instead of forced ones, layers that do not stay
    gathered, more GPUs, and the largest microbatch that fits; if no microbatch fits, the longest sequences.
    """
    found, over = [], question.budgets.over(frontier.nearest(question.budgets).needs)
    for name, option in (("device", "--device-memory"), ("host", "--host-memory"), ("pinned", "--pinned-memory")):
        others = _without(question.budgets, name)
        needs = [needed(c.needs, others.phases)[name] for c in frontier.candidates if not others.over(c.needs)]
        if needs:
            least = min(needs) * (1 if name == "device" else question.gpus)
            found.append(f"{option} {-(-least // MIB)}MiB" if least < GIB else f"{option} {_tenths(least):.1f}GiB")
    if _fits_unpinned(question, frontier, required):
        found.append("--no-pin")
    if question.forced != Forced():
        free = Frontier(question.workload, frontier.costs.speeds, required, Forced())
        if free.fits(question.budgets):
            found.append(
                "the planner's own choice: no --place, --keep, --weights, and no options that force offloading"
            )
    if question.workload.ranks > 1 and not question.workload.resharded:
        tried = replace(question.workload, resharded=True)
        again = Frontier(tried, frontier.costs.speeds, required, question.forced)
        if again.fits(question.budgets):
            found.append(f"layers that are unsharded only while they run: {RESHARDED}, or with --config --reshard")
    found += _more_gpus(question, frontier.costs.speeds)
    sequences = question.workload.microbatch_sequences
    in_step = sequences * question.workload.microbatches
    while sequences > 1:
        sequences = next(n for n in range(sequences // 2, 0, -1) if in_step % n == 0)
        tried = replace(question.workload, microbatch_sequences=sequences, microbatches=in_step // sequences)
        if not _may_fit(tried, question.budgets, required):
            continue
        again = Frontier(tried, frontier.costs.speeds, required, question.forced)
        if again.fits(question.budgets):
            found.append(f"a microbatch of {sequences} sequence{'s' if sequences > 1 else ''}")
            break
    else:
        if "device" in over:
            found += _shorter(question, frontier.costs.speeds, required)
    if not found:
        short = " and ".join(f"{gib(size)} GiB more of {name} memory" for name, size in over.items())
        found.append(short)
    return found


def _more_gpus(question: Question, speeds: Speeds) -> list[str]:
    """Propose the smallest number of GPUs among which it fits, in doublings: machines of this kind, as full as this.

    Each GPU has as many microbatches as now, and the limits that it has now.
    """
    asked, whole, forced = question.workload, question.whole, question.forced
    if whole is None or forced.placements:  # of buckets that other numbers of GPUs do not have
        return []
    budgets = question.budgets
    if question.gpus == 1 and budgets.device_bytes == default_budgets(question.hardware, 1).device_bytes:
        budgets = replace(budgets, device_bytes=default_budgets(question.hardware, 2).device_bytes)

    def fits(tried: Workload) -> bool:
        required = required_of(tried)
        return _may_fit(tried, budgets, required) and Frontier(tried, speeds, required, forced).fits_at_last(budgets)

    # More ranks than a tensor has rows take more memory again, so the numbers are tried one after the other.
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        ranks = question.gpus << doublings
        several = replace(whole, microbatches=asked.microbatches * ranks)
        tried = sharded(several, ranks, reduced_in_fp32=asked.reduced_in_fp32)
        for resharded in sorted({asked.resharded, True}):
            if fits(replace(tried, resharded=resharded)):
                also = f", with {RESHARDED}, or --config --reshard" if resharded and not asked.resharded else ""
                return [f"{ranks} GPUs, of {1 << doublings} machines like this one{also}"]
    return []


def more_gpus_in_vain(found: Answer) -> str:
    """Say what more GPUs do not make smaller, in a sentence; "" where they would help, or it fits."""
    question, whole = found.question, found.question.whole
    if found.chosen is not None or whole is None or any(" GPUs, of " in change for change in found.changes):
        return ""
    ranks = question.gpus << 2
    tried = sharded(replace(whole, microbatches=ranks), ranks, resharded=True)
    needs = _least_device(tried, required_of(tried))
    if "device" not in question.budgets.over(needs):
        return ""
    fullest = max(needs.phases, key=lambda phase: phase.device_bytes).device
    name, most = max(fullest.items(), key=lambda pair: pair[1])
    return f"More such GPUs do not: of {ranks}, each needs {size(needs.device_peak_bytes)}, {size(most)} of it {name}."


def _may_fit(workload: Workload, budgets: Budgets, required: Required) -> bool:
    """Return False where not even offloading all of the state, with and without the weights, leaves enough memory."""
    held = workload.weight_bytes + workload.inventory.state_bytes
    limits = budgets.limits
    if "device" in limits and "host" in limits and held > limits["device"] + limits["host"]:
        return False
    return "device" not in budgets.over(_least_device(workload, required))


def _least_device(workload: Workload, required: Required) -> Needs:
    """Return the needs with all state offloaded, layers recomputed, and weights offloaded or not: the smaller peak."""
    layers = workload.repeated
    last = min(LAST_STAY, len(layers))
    keeps = (*[Keep.RECOMPUTE_OFFLOAD] * (len(layers) - last), *[Keep.RECOMPUTE] * last)
    host = (Placement.HOST,) * len(workload.inventory.buckets)
    away = frozenset(layer.name for layer in layers[:-1])
    least = (required(workload, Choice(host, keeps, weights, True)) for weights in (frozenset[str](), away))
    return min(least, key=lambda needs: needs.device_peak_bytes)


def _shorter(question: Question, speeds: Speeds, required: Required) -> list[str]:
    """Propose the longest of half, a quarter, ... of a sequence that fits, as many of them in a step."""
    asked = question.workload
    workload = replace(asked, microbatch_sequences=1, microbatches=asked.microbatch_sequences * asked.microbatches)

    def fits(tokens: int) -> bool:
        tried = replace(workload, sequence_tokens=tokens)
        may_fit = _may_fit(tried, question.budgets, required)
        return may_fit and Frontier(tried, speeds, required, question.forced).fits(question.budgets)

    halves = [asked.sequence_tokens >> n for n in range(1, asked.sequence_tokens.bit_length())]
    lengths = [tokens for tokens in halves if tokens >= _FEWEST_TOKENS]
    if not lengths or not fits(lengths[-1]):  # the shortest first: where weights alone exceed the memory no length fits
        return []
    tokens = next(filter(fits, lengths[:-1]), lengths[-1])
    return [f"sequences of {tokens:,} tokens: model.seq_length={tokens}, or with --config --seq {tokens}"]


def _tenths(nbytes: int) -> float:
    """Convert bytes to GiB, rounded up to tenths."""
    return -(-nbytes // (GIB // 10)) / 10


def _fits_unpinned(question: Question, frontier: Frontier, required: Required) -> bool:
    """Return whether only pinned gradients and weights exceed the budgets."""
    budgets, workload = question.budgets, question.workload
    unpinned = replace(workload, pin_gradients=False, pin_weights=False)
    near = [c.choice for c in frontier.candidates if set(budgets.over(c.needs)) == {"pinned"}]
    return workload != unpinned and any(not budgets.over(required(unpinned, choice)) for choice in near)


def _without(budgets: Budgets, name: str) -> Budgets:
    if name == "device":
        return replace(budgets, device_bytes=None)
    return replace(budgets, host_bytes=None) if name == "host" else replace(budgets, pinned_bytes=None)
