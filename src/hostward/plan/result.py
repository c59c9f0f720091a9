"""Answer a planning question: the plan, or why nothing fits and the smallest change that would. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from hostward.core.inventory import Dtype, StateFormat
from hostward.core.placement import Placement
from hostward.core.units import GIB, size, size_bytes, size_option
from hostward.plan.budgets import Budgets, Required, needed
from hostward.plan.cost_model import Speeds, speeds_of
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.hardware_profile import PROFILES, Hardware, profile
from hostward.plan.memory_model import Needs
from hostward.plan.rank_partition import UndividedError, required_of, sharded
from hostward.plan.search import Candidate, Frontier
from hostward.plan.solver import LAST_STAY, Forced
from hostward.plan.step_time import explain
from hostward.plan.workload import Workload, in_format

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
_WORTH_IT = 0.005
_MUCH_LESS = 0.95
_RESHARDED = "layers resharded after forward"
_LIMITS = ("host", "pinned", "device")
_MOST_DOUBLINGS = 6
"""Of the number of GPUs, in the search for how many it takes."""
_FEWEST_TOKENS = 256
"""Shorter sequences are not proposed."""
_SMALLER_STATE = (
    StateFormat(Dtype.BF16, Dtype.BF16),
    StateFormat(Dtype.FP8, Dtype.FP8),
    StateFormat(Dtype.BF16, Dtype.BF16, Dtype.BF16),
    StateFormat(Dtype.FP8, Dtype.FP8, Dtype.BF16),
)
"""Formats of the optimizer's state with fewer bytes than fp32, in the order in which they are proposed."""


@dataclass(frozen=True, slots=True)
class Fix:
    """Change a question that no plan fits, so that one does; what is None or False stays as it was asked."""

    what: str
    """The change in words."""
    device_bytes: int | None = None
    """Of each GPU; the other two are of the machine."""
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    hardware: str | None = None
    """Shipped profile whose GPU, with the memory that it has, takes the place of this one."""
    gpus: int | None = None
    step_sequences: int | None = None
    """Sequences in a step of all GPUs."""
    microbatch_sequences: int | None = None
    sequence_tokens: int | None = None
    resharded: bool = False
    unpinned: bool = False
    none_early: bool = False
    """No CPU optimizer steps during backward."""
    unforced: bool = False
    state_dtypes: Mapping[str, Dtype] = field(default_factory=dict)
    """Of those parts of the optimizer's state that change, by their name in `state_dtypes` of AdamW."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Hold a rank's part of a workload, and the least device memory with which it can be trained."""

    workload: Workload
    required: Required
    least: Needs


class Divided:
    """Divide the workload of one GPU that has all parameters among numbers of ranks, each once for all questions.

    Its `reduced_in_fp32` is that of several GPUs.
    """

    def __init__(self, whole: Workload) -> None:
        self.whole = whole
        self._parts: dict[tuple[int, int, bool], _Part | None] = {}

    def of(self, ranks: int, microbatches: int, *, resharded: bool) -> _Part | None:
        """Return a rank's part with a step of so many microbatches in all; None where it cannot be divided."""
        key = ranks, microbatches, resharded
        if key not in self._parts:
            self._parts[key] = None
            if (tried := _among(self.whole, ranks, microbatches)) is not None:
                part = replace(tried, resharded=resharded)
                required = required_of(part)
                self._parts[key] = _Part(part, required, _least_device(part, required))
        return self._parts[key]


@dataclass(frozen=True, slots=True)
class Question:
    """Describe what is to be planned; `budgets` are for one GPU and its share of the node."""

    workload: Workload
    hardware: Hardware
    gpus: int
    budgets: Budgets
    forced: Forced
    divided: Divided | None = None
    """Says how many GPUs it takes; None: it is not said."""

    @property
    def whole(self) -> Workload | None:
        """Return the workload of one GPU that has all parameters, if it is known."""
        return None if self.divided is None else self.divided.whole


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold the answer; `chosen` is None where nothing fits.

    Then `nearest` exceeds the budgets by least, and each of `fixes` alone would make the run fit.
    """

    question: Question
    frontier: Frontier
    speeds: Speeds
    chosen: Candidate | None
    nearest: Candidate
    fixes: tuple[Fix, ...]
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


def host_budget(memory_bytes: int) -> int:
    """Return the memory of a host less a reserve, in bytes."""
    return int(memory_bytes * (1 - HOST_RESERVE_SHARE))


def default_budgets(hardware: Hardware, gpus: int) -> Budgets:
    """Return the machine's memory less a reserve, per GPU; no limit where the hardware file has none."""
    memory = hardware.limits.memory_bytes
    locked = hardware.limits.locked_bytes
    return Budgets(
        device_budget(hardware.gpu.memory_bytes, gpus) if hardware.gpu else None,
        host_budget(memory) // gpus if memory is not None else None,
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
    fixes = [] if chosen else _fixes(question, frontier, required)
    stayed = None
    if nearest.choice.offloaded_weights:
        here = replace(nearest.choice, offloaded_weights=frozenset[str]())
        stayed = required(question.workload, here).device_peak_bytes
    return Answer(question, frontier, speeds, chosen, nearest, tuple(fixes), stayed)


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
        return f"It fits on the device ({peak} at the peak): offloading will not help, it only takes time."
    if not found.offloads:
        return "It fits without offloading: saved tensors are recomputed in backward instead."
    if found.chosen.prediction.exposed_s > found.chosen.prediction.compute_s:
        idle = "the GPU is idle for longer than it computes: more GPUs, or GPUs with more memory, would be faster"
        return f"It fits{there}, but {idle}."
    return f"It fits with offloading{there}."


def _fixes(question: Question, frontier: Frontier, required: Required) -> list[Fix]:
    """List changes that would each make the run fit, those first that need no other machine."""
    found, speeds = list[Fix](), frontier.costs.speeds
    unpinned = replace(question.workload, pin_gradients=False, pin_weights=False)
    limited = question.budgets.pinned_bytes is not None and question.workload != unpinned
    if limited and _fits(replace(question, workload=unpinned), speeds):
        found.append(Fix("gradients and weights not pinned, whose copies then take longer", unpinned=True))
    late = replace(question, workload=replace(question.workload, step_early=0.0))
    if question.workload.step_early and _fits(late, speeds):
        found.append(Fix("no CPU optimizer steps during backward", none_early=True))
    if question.forced != Forced():
        fix = Fix("the planner's own choice of what is offloaded and recomputed", unforced=True)
        # Options that pin less go with those that offload.
        pinned = replace(question.workload, pin_gradients=True, pin_weights=True)
        found += [fix] if _fits(replace(question, workload=pinned, forced=Forced()), speeds) else []
    changes = _changes(question, frontier, required)
    if question.workload.ranks > 1 and not question.workload.resharded:
        again = replace(question, workload=replace(question.workload, resharded=True))
        required = required_of(again.workload)
        other = Frontier(again.workload, speeds, required, again.forced)
        # In the order of `best_at_last`: what a search by bytes finds depends on what was found before.
        if other.fits_by_bytes(again.budgets) or other.fits_at_last(again.budgets):
            found.append(Fix(_RESHARDED, resharded=True))
        else:
            changes = _with_resharding(changes, _changes(again, other, required))
    every = [fix for fix in (*found, *changes.values(), _more_gpus(question)) if fix]
    if all(_is_beyond(fix, question.hardware) for fix in every):
        every = [*_larger_gpus(question), *every]
    # What no GPU has helps only to know how much is missing.
    return [fix for fix in every if not _is_beyond(fix)] or every


def _changes(question: Question, frontier: Frontier, required: Required) -> dict[str, Fix | None]:
    """Find changes of sizes, dtypes and budgets that are each enough, by what they change.

    Where no raise of one budget is enough, it is that of all that are exceeded. The device's is not searched where
    the memory of no shipped profile is enough: what it takes then helps nobody.
    """
    budgets, speeds = question.budgets, frontier.costs.speeds
    nearest = frontier.nearest(budgets).needs
    over = budgets.over(nearest)
    found = {"sizes": _smaller(question, speeds, required, over), "state": _smaller_state(question, speeds)}
    largest = replace(budgets, device_bytes=_largest_bytes(*map(profile, PROFILES)))
    in_vain = () if largest.may_hold(question.workload.least_bytes) else ("device",)
    least = {name: frontier.least(name, budgets) for name in _LIMITS if name in budgets.limits and name not in in_vain}
    raised = {name: _limits(question, {name: nbytes}) for name, nbytes in least.items() if nbytes is not None}
    if not raised:
        most = needed(nearest, budgets.phases)
        raised["all"] = _limits(question, {name: most[name] for name in over})
    return found | raised


def _with_resharding(asked: Mapping[str, Fix | None], again: Mapping[str, Fix | None]) -> dict[str, Fix | None]:
    """Return what changes of the question as asked are enough, or with layers resharded where that spares much."""
    found = dict(asked)
    for kind, fix in again.items():
        if fix is not None and _spares(fix, found.get(kind)):
            found[kind] = replace(fix, what=f"{fix.what}, with {_RESHARDED}", resharded=True)
    if any(name in found for name in _LIMITS):
        found.pop("all", None)
    return found


def _spares(fix: Fix, other: Fix | None) -> bool:
    """Return whether a fix leaves sequences longer than another one of its kind, or raises budgets by much less."""
    if other is None:
        return True
    pairs = [(fix.device_bytes, other.device_bytes), (fix.host_bytes, other.host_bytes)]
    pairs.append((fix.pinned_bytes, other.pinned_bytes))
    sizes = [(ours or 0, theirs or 0) for ours, theirs in pairs]
    less = all(ours <= theirs for ours, theirs in sizes) and any(ours < _MUCH_LESS * theirs for ours, theirs in sizes)
    return less or (fix.sequence_tokens or math.inf) > (other.sequence_tokens or math.inf)


def _smaller_state(question: Question, speeds: Speeds) -> Fix | None:
    """Propose the first format of the optimizer's state with fewer bytes that fits alone."""
    before, placements = question.workload.inventory, question.forced.placements
    if not before.form.split_master:  # torch.optim.AdamW steps state in fp32 alone
        return None
    beside = question.workload.least_bytes - before.state_bytes
    for form in map(before.form.at_most, _SMALLER_STATE):
        moments = before.numel * (form.exp_avg.itemsize_bytes + form.exp_avg_sq.itemsize_bytes)
        if not question.budgets.may_hold(beside + moments):
            continue
        tried = stored_in(question, form)
        # Placements that are asked for are those of the buckets that there are now.
        if tried is None or (placements and len(tried.inventory.buckets) != len(before.buckets)):
            continue
        other = replace(question, workload=tried)
        if _may_fit(tried, question.budgets, required_of(tried)) and _fits(other, speeds):
            changed = {name: dtype for name, dtype in form.dtypes.items() if dtype is not before.form.dtypes[name]}
            words = ", ".join(f"{name} in {dtype}" for name, dtype in changed.items())
            return Fix(
                f"{words}: less memory, and training rounds differently (docs/exactness.md)", state_dtypes=changed
            )
    return None


def stored_in(question: Question, form: StateFormat) -> Workload | None:
    """Return a rank's workload with state in this other format; None if dtypes or the number of ranks rule it out."""
    asked, whole = question.workload, question.whole
    of_fp16 = any(p.dtype is Dtype.FP16 for p in asked.inventory.parameters)
    if form == asked.inventory.form or (of_fp16 and form.main_param is Dtype.BF16):
        return None
    if asked.ranks == 1:
        return in_format(asked, form)
    if whole is None:
        return None
    in_fp32, resharded = asked.reduced_in_fp32, asked.resharded
    try:
        return sharded(in_format(whole, form), asked.ranks, reduced_in_fp32=in_fp32, resharded=resharded)
    except UndividedError:
        return None


def _fits(question: Question, speeds: Speeds) -> bool:
    asked = question.workload, speeds, required_of(question.workload), question.forced
    return _smallest_fits(asked, question.budgets) or Frontier(*asked).fits_at_last(question.budgets)


def _smallest_fits(asked: tuple[Workload, Speeds, Required, Forced], budgets: Budgets) -> bool:
    """Return whether something fits without a frontier, which takes a hundred estimates and more."""
    return Frontier(*asked, weighed=False).smallest(budgets) is not None


def _limits(question: Question, limits: Mapping[str, int]) -> Fix:
    """Return the fix that sets these budgets, in bytes of one GPU and its share of the machine."""
    words, totals = [], dict[str, int]()
    for name, nbytes in limits.items():
        of = 1 if name == "device" else question.gpus
        each = " on each GPU" if name == "device" and question.gpus > 1 else ""
        totals[name] = nbytes * of
        before = question.budgets.limits[name] * of
        words.append(f"{_as_asked(nbytes * of)} of {name} memory{each} instead of {size(before)}")
    device, host, pinned = (totals.get(name) for name in ("device", "host", "pinned"))
    fix = Fix(" and ".join(words), device_bytes=device, host_bytes=host, pinned_bytes=pinned)
    gpu = question.hardware.gpu
    if _is_beyond(fix):
        return replace(fix, what=f"{fix.what} (no GPU of a shipped profile has it)")
    if gpu is not None and (fix.device_bytes or 0) > gpu.memory_bytes:
        return replace(fix, what=f"{fix.what} (more than this GPU has)")
    return fix


def _is_beyond(fix: Fix, *hardware: Hardware) -> bool:
    """Return whether the fix takes more device memory than these GPUs have, less a reserve.

    Without `hardware` they are those of all shipped profiles.
    """
    return (fix.device_bytes or 0) > _largest_bytes(*(hardware or map(profile, PROFILES)))


def _largest_bytes(*hardware: Hardware) -> int:
    """Return the memory of the largest of these GPUs, less a reserve, in bytes."""
    return max(device_budget(each.gpu.memory_bytes, 1) for each in hardware if each.gpu)


def _larger_gpus(question: Question) -> list[Fix]:
    """Propose the smallest larger GPU that is enough, as many as now.

    Where it takes more of the machine than there is, propose also how many of a larger GPU are enough without that.
    """
    gpu = question.hardware.gpu
    # Of GPUs with the same memory, the first of PROFILES.
    cards = {card.gpu.memory_bytes: card for card in map(profile, reversed(PROFILES)) if card.gpu and gpu}
    larger = []
    for memory_bytes, card in sorted(cards.items()):
        if gpu and memory_bytes > gpu.memory_bytes:
            device_bytes = default_budgets(card, question.gpus).device_bytes
            budgets = replace(question.budgets, device_bytes=device_bytes)
            larger.append(replace(question, hardware=card, budgets=budgets))

    @cache
    def asked(resharded: bool) -> tuple[Workload, Required]:
        tried = replace(question.workload, resharded=resharded)
        return tried, required_of(tried)

    there = next(filter(None, (_as_many(each, each.budgets, asked) for each in larger)), None)
    if there is not None:
        return [there]
    machine = replace(question.budgets, host_bytes=None, pinned_bytes=None)
    tried = (_as_many(each, replace(machine, device_bytes=each.budgets.device_bytes), asked) for each in larger)
    more = (_more_gpus(each, other=True) for each in larger)
    return [fix for found in (tried, more) if (fix := next(filter(None, found), None))]


def _as_many(question: Question, budgets: Budgets, asked_as: Callable[[bool], tuple[Workload, Required]]) -> Fix | None:
    """Propose the question's GPUs within these budgets, with what they need of the machine; None if nothing fits.

    `asked_as` returns the workload with layers resharded or not, and what it requires, which no GPU changes.
    """
    asked, speeds = question.workload, speeds_of(question.hardware, question.gpus)
    for resharded in sorted({asked.resharded, asked.ranks > 1}):
        tried, required = asked_as(resharded)
        found = Frontier(tried, speeds, required, question.forced, weighed=False).smallest(budgets)
        if found is not None:
            break
    else:
        return None
    needs, limits = needed(found.needs, budgets.phases), question.budgets.limits
    host, pinned = (max(needs[name], limits.get(name, 0)) * question.gpus for name in ("host", "pinned"))
    parts = [_cards(question, question.gpus), f"{_as_asked(host)} of host memory"]
    parts += [f"{_as_asked(pinned)} of pinned memory"] if "pinned" in limits else []
    again = resharded and not asked.resharded
    parts += [_RESHARDED] if again else []
    return Fix(
        ", ".join(parts),
        host_bytes=host,
        pinned_bytes=pinned if "pinned" in limits else None,
        hardware=question.hardware.name,
        resharded=again,
    )


def _cards(question: Question, gpus: int) -> str:
    gpu = question.hardware.gpu
    return f"{gpus} x {gpu.name} (hardware {question.hardware.name})" if gpu else f"{gpus} GPUs"


def _as_asked(nbytes: int) -> str:
    """Format the size that an option is given, which is rounded up, for people."""
    return size(size_bytes(size_option(nbytes), ""))


def _more_gpus(question: Question, *, other: bool = False) -> Fix | None:
    """Propose the smallest number of GPUs among which it fits, in doublings, each with the limits that it has now.

    `other`: the question's hardware is not the one that was asked for.
    The step stays as it is where it can be divided among them; else each GPU has as many microbatches as now.
    """
    asked, forced, divided = question.workload, question.forced, question.divided
    if divided is None or forced.placements:  # of buckets that other numbers of GPUs do not have
        return None
    whole, budgets, hardware = divided.whole, question.budgets, question.hardware
    if question.gpus == 1 and budgets.device_bytes == default_budgets(hardware, 1).device_bytes:
        budgets = replace(budgets, device_bytes=default_budgets(hardware, 2).device_bytes)

    def possible(ranks: int, microbatches: int, *, resharded: bool) -> _Part | None:
        part = divided.of(ranks, microbatches, resharded=resharded)
        return None if part is None or "device" in budgets.over(part.least) else part

    def fits(ranks: int, microbatches: int, *, resharded: bool) -> bool:
        part = possible(ranks, microbatches, resharded=resharded)
        if part is None:
            return False
        asked = part.workload, speeds_of(hardware, ranks), part.required, forced
        return _smallest_fits(asked, budgets) or Frontier(*asked).fits_at_last(budgets)

    # More ranks than a tensor has rows take more memory again, so the numbers are tried one after the other.
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        ranks = question.gpus << doublings
        if not budgets.may_hold(whole.held_bytes / ranks):
            continue
        kept = whole.microbatches % ranks == 0
        microbatches = whole.microbatches if kept else asked.microbatches * ranks
        if possible(ranks, microbatches, resharded=True) is None:  # which takes the least memory
            continue
        for resharded in sorted({asked.resharded, True}):
            if fits(ranks, microbatches, resharded=resharded):
                step = None if kept else microbatches * asked.microbatch_sequences
                again = resharded and not asked.resharded
                return _machines(question, ranks, step, resharded=again, other=other)
    return None


def _among(whole: Workload, ranks: int, microbatches: int) -> Workload | None:
    """Return a rank's part with a step of so many microbatches in all; None where it cannot be divided."""
    several = replace(whole, microbatches=microbatches)
    try:
        return sharded(several, ranks, reduced_in_fp32=whole.reduced_in_fp32)
    except UndividedError:
        return None


def _machines(question: Question, ranks: int, step_sequences: int | None, *, resharded: bool, other: bool) -> Fix:
    """Return the fix of as many GPUs in machines like this one, with what else has to change."""
    cards = _cards(question, ranks) if other else f"{ranks} GPUs"
    limits, count = question.budgets.limits, ranks // question.gpus
    host, pinned = (limits[name] * ranks if name in limits else None for name in ("host", "pinned"))
    parts = [f"{cards}, as in {count} machines like this one (its predicted seconds assume one machine)"]
    parts += [f"{_as_asked(host)} of host memory in all"] if host is not None else []
    parts += [_RESHARDED] if resharded else []
    parts += [f"a step of {_sequences(step_sequences)}"] if step_sequences else []
    return Fix(
        ", ".join(parts),
        host_bytes=host,
        pinned_bytes=pinned,
        hardware=question.hardware.name if other else None,
        gpus=ranks,
        step_sequences=step_sequences,
        resharded=resharded,
    )


def more_gpus_in_vain(found: Answer) -> str:
    """Say what more GPUs do not make smaller, in a sentence; "" where they would help, or it fits."""
    question, divided = found.question, found.question.divided
    if found.chosen is not None or divided is None or any(fix.gpus and not fix.hardware for fix in found.fixes):
        return ""
    ways = question.gpus << 2, question.gpus << _MOST_DOUBLINGS
    least = {ranks: part.least for ranks in ways if (part := divided.of(ranks, ranks, resharded=True))}
    if not least:
        return ""
    ranks, needs = min(least.items(), key=lambda pair: pair[1].device_peak_bytes)
    if "device" not in question.budgets.over(needs):
        # Placements that are asked for are those of this number of GPUs.
        return "" if question.forced.placements else f"More such machines would not help, with up to {ways[-1]} GPUs."
    fullest = max(needs.phases, key=lambda phase: phase.device_bytes).device
    name, most = max(fullest.items(), key=lambda pair: pair[1])
    peak = size(needs.device_peak_bytes)
    return f"More such GPUs would not help: each of {ranks} needs {peak} of device memory, {size(most)} of it {name}."


def _may_fit(workload: Workload, budgets: Budgets, required: Required) -> bool:
    """Return False where not even offloading all of the state, with and without the weights, leaves enough memory."""
    if not budgets.may_hold(workload.least_bytes):
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


def _smaller(question: Question, speeds: Speeds, required: Required, over: Mapping[str, int]) -> Fix | None:
    """Propose smaller microbatches, or, if none fits, shorter sequences where device memory is short."""
    fix = _smaller_microbatch(question, speeds, required)
    return _shorter(question, speeds, required) if fix is None and "device" in over else fix


def _smaller_microbatch(question: Question, speeds: Speeds, required: Required) -> Fix | None:
    """Propose the largest microbatch that fits and divides the step."""
    sequences = question.workload.microbatch_sequences
    in_step = sequences * question.workload.microbatches
    while sequences > 1:
        sequences = next(n for n in range(sequences // 2, 0, -1) if in_step % n == 0)
        tried = replace(question.workload, microbatch_sequences=sequences, microbatches=in_step // sequences)
        if _fits_so(question, tried, speeds, required):
            return Fix(f"microbatches of {_sequences(sequences)}", microbatch_sequences=sequences)
    return None


def _shorter(question: Question, speeds: Speeds, required: Required) -> Fix | None:
    """Propose the longest of half, a quarter, ... of a sequence that fits, as many of them in a step.

    One is in a microbatch, or, where only that fits, as many as now: sums of several microbatches take memory, too.
    """
    asked = question.workload
    in_step = asked.microbatch_sequences * asked.microbatches
    halves = [asked.sequence_tokens >> n for n in range(1, asked.sequence_tokens.bit_length())]
    lengths = [tokens for tokens in halves if tokens >= _FEWEST_TOKENS]
    for sequences in sorted({1, asked.microbatch_sequences}) if lengths else ():
        workload = replace(asked, microbatch_sequences=sequences, microbatches=in_step // sequences)
        tried = {tokens: replace(workload, sequence_tokens=tokens) for tokens in lengths}
        # The shortest first: where weights alone exceed the memory no length fits.
        if not _fits_so(question, tried[lengths[-1]], speeds, required):
            continue
        fitting = (n for n in lengths[:-1] if _fits_so(question, tried[n], speeds, required))
        tokens = next(fitting, lengths[-1])
        what = f"sequences of {tokens:,} tokens"
        if sequences == asked.microbatch_sequences:
            return Fix(what, sequence_tokens=tokens)
        return Fix(f"{what}, one in a microbatch", sequence_tokens=tokens, microbatch_sequences=1)
    return None


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


def _fits_so(question: Question, tried: Workload, speeds: Speeds, required: Required) -> bool:
    """Return whether the question fits with this workload.

    Sizes of a shorter sequence or a smaller microbatch are those of the traced one in proportion: never too small.
    """
    return _may_fit(tried, question.budgets, required) and _fits(replace(question, workload=tried), speeds)
