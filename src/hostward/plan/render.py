"""Render an answer as text for a terminal: needs by phase, placements, time and why, the frontier. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from hostward.core.placement import Placement
from hostward.core.units import GIB, billions, size
from hostward.errors import ConfigError, HostwardError, needed_for
from hostward.plan.budgets import Units, by_owner, by_phase, columns, nearest, needed, short_of, units_of
from hostward.plan.decisions import Choice, FrontierPoint, Keep
from hostward.plan.memory_model import TRAINING
from hostward.plan.result import Answer, Fix, default_budgets, more_gpus_in_vain, offloads, verdict
from hostward.plan.search import Candidate
from hostward.plan.workload import Workload

_APART = 0.005
"""Smallest share of a step's time by which consecutive rows of the frontier's table differ."""
_TRY_RESHARDING = (
    "Plan it with layers resharded after forward as well, which is often faster: --reshard, or of a recipe "
    "ddp.data_parallel_sharding_strategy=optim_grads_params."
)
_KEEPS = {
    Keep.KEEP: "keep",
    Keep.OFFLOAD: "offload",
    Keep.RECOMPUTE: "recompute",
    Keep.RECOMPUTE_OFFLOAD: "recompute, input offloaded",
    Keep.ELEMENTWISE: "recompute layer norms and activations",
    Keep.ELEMENTWISE_OFFLOAD: "offload, but recompute layer norms and activations",
}


def render(found: Answer, command: Callable[[Fix], str] | None = None) -> str:
    """Render the whole answer as text.

    Args:
        command: function that returns the command line with a fix; None: fixes are described alone.
    """
    question, shown = found.question, found.shown
    workload = question.workload
    units = units_of(shown.needs, shown.prediction.step_s)
    blocks = [_title(found), verdict(found)]
    if found.chosen is None:
        short = short_of(shown.needs, question.budgets, question.gpus)
        blocks[-1] += f"\nThe nearest plan is short of {short}."
        blocks += [_fixes(found, command), "The nearest plan:"]
    elif workload.ranks > 1 and not workload.resharded and found.offloads:
        blocks[-1] += f"\n{_TRY_RESHARDING}"
    table = by_phase(shown.needs, question.budgets, units, question.gpus)
    blocks.append("\n".join([table, *_loading(shown.choice, workload.ranks), *_in_vain(found, units)]))
    blocks.append(by_owner(shown.needs, units))
    blocks.append(_placements(workload, shown.choice))
    blocks.append(_time(found, units))
    blocks.append(_frontier(found, units))
    return "\n\n".join(blocks) + "\n"


def _fixes(found: Answer, command: Callable[[Fix], str] | None) -> str:
    """Render what would make the run fit, each with its command line."""
    lines = ["Any one of these alone makes it fit:" if found.fixes[1:] else "This makes it fit:"]
    for fix in found.fixes:
        lines.append(f"  {fix.what}{':' if command else ''}")
        lines += [f"    {command(fix)}"] if command else []
    return "\n".join([*lines, *filter(None, [more_gpus_in_vain(found)])])


_RATES = {
    "gpu.bf16_matmul_flops_per_s": (1e12, "matrix products {:.0f} TFLOP/s"),
    "gpu.memory_peak_bytes_per_s": (1e9, "GPU memory {:.0f} GB/s"),
    "links": (1e9, "copies between host and device {:.1f} GB/s in each direction"),
    "duplex_bytes_per_s": (1e9, "{:.1f} GB/s in both together"),
    "busy_duplex_bytes_per_s": (1e9, "{:.1f} GB/s in both during a CPU optimizer step"),
    "host_parameters_per_s": (1e9, "a CPU optimizer step {:.1f} billion parameters/s"),
    "busy_host_parameters_per_s": (1e9, "{:.1f} billion parameters/s during copies"),
    "node_host_parameters_per_s": (1e9, "CPU optimizer steps of all ranks together {:.1f} billion parameters/s"),
    "node_duplex_bytes_per_s": (1e9, "copies of all ranks together {:.1f} GB/s"),
    "node_memory_bytes_per_s": (1e9, "CPU optimizer steps and copies of all ranks together {:.1f} GB/s of host memory"),
}
"""Unit and words for a rate, by its name in a hardware file."""


def _title(found: Answer) -> str:
    question = found.question
    workload, hardware = question.workload, question.hardware
    gpu = hardware.gpu.name if hardware.gpu else "no GPU"
    sequences = "sequence" if workload.microbatch_sequences == 1 else "sequences"
    # The largest part of each parameter, times the number of ranks, is more than there is.
    numel = question.whole.inventory.numel if question.whole else workload.inventory.numel * workload.ranks
    what = f"{workload.name}: {billions(numel)} trained parameters"
    counts = f"{workload.microbatches} x {workload.microbatch_sequences} {sequences} of {workload.sequence_tokens:,}"
    measured = f", measured {hardware.measured_at}" if hardware.measured_at else ""
    lines = [
        f"{what}, {workload.step_tokens:,} tokens per step and GPU ({counts})",
        f"on {question.gpus} x {gpu} (hardware {hardware.name}{measured})",
    ]
    limit = question.budgets.device_bytes
    if hardware.gpu and limit is not None and limit > hardware.gpu.memory_bytes:
        lines.append(
            f"the limit of device memory, {size(limit)}, is above that GPU's: {size(hardware.gpu.memory_bytes)}"
        )
    elif hardware.gpu and limit is not None and limit == default_budgets(hardware, question.gpus).device_bytes:
        whole, reserve = size(hardware.gpu.memory_bytes), size(hardware.gpu.memory_bytes - limit)
        lines.append(f"limit of device memory: {whole} less {reserve} for the driver, libraries and the allocator")
    if workload.ranks > 1:
        unsharded = "while they run" if workload.resharded else "from forward to backward"
        shared = f"state, gradients and weights sharded among {workload.ranks} GPUs, layers unsharded {unsharded}"
        lines.append(f"{shared}; NVLink between GPUs is assumed: without it a step takes longer")
    pinned = {"gradients": workload.pin_gradients, "weights": workload.pin_weights}
    plain = " and ".join(what for what, locked in pinned.items() if not locked)
    if plain:
        lines.append(f"{plain} of CPU-stepped buckets are not pinned: their copies take longer than predicted")
    if workload.step_early and Placement.HOST in (found.chosen or found.nearest).choice.placements:
        share = "CPU-stepped state" if workload.step_early == 1 else f"{workload.step_early:.0%} of CPU-stepped state"
        lines.append(f"{share} is stepped during backward, into a second set on the host; a step that clips is slower")
    elif workload.step_early:
        lines.append("the CPU steps none of the state, so there is none to be stepped during backward")
    if found.speeds.assumed:
        known = ((*_RATES[name], rate) for name, rate in found.speeds.assumed)
        lines.append(f"not measured, assumed: {'; '.join(words.format(rate / unit) for unit, words, rate in known)}")
    return "\n".join(lines)


def _loading(choice: Choice, ranks: int) -> list[str]:
    """Name the assumption that the load phase makes."""
    count = len(choice.offloaded_weights)
    if not count or ranks > 1:
        return []
    move = f"hostward.move(model, device, weights={count})"
    return [f"load is that of hostward train; a custom training loop begins with {move}"]


def _in_vain(found: Answer, units: Units) -> list[str]:
    """Say if offloaded weights do not lower the peak, as when they are reloaded by the time of the peak."""
    needs, stayed = found.shown.needs, found.peak_without_bytes
    if stayed is None or stayed > needs.device_peak_bytes:
        return []
    highest = max((p for p in needs.phases if p.name in TRAINING), key=lambda phase: phase.device_bytes)
    count = _layers(len(found.shown.choice.offloaded_weights))
    peak = f"{units.size(stayed)} {units.memory}"
    return [
        f"weights of {count} on the host save nothing at the peak ({highest.name}): {peak} with them on the device too"
    ]


def _placements(workload: Workload, choice: Choice) -> str:
    """Render one row per run of layers that are treated alike."""
    by_layer: dict[str, Counter[Placement]] = {}
    for bucket, placement in zip(workload.inventory.buckets, choice.placements, strict=True):
        by_layer.setdefault(bucket.layer, Counter())[placement] += bucket.numel
    keeps = iter(choice.activations)
    described = []
    for layer in workload.layers:
        keep = _KEEPS[next(keeps)] if layer.repeated else "-"
        weights = "host" if layer.name in choice.offloaded_weights else "device"
        described.append((layer.name, (frozenset(by_layer.get(layer.name, ())), keep, weights)))
    rows: list[list[str]] = [["layers", "optimizer state", "weights", "saved activations"]]
    for (_, keep, weights), run in groupby(described, key=lambda entry: entry[1]):
        names = [name for name, _ in run]
        counts = sum((by_layer.get(name, Counter()) for name in names), Counter[Placement]())
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rsplit('.', 1)[-1]}"
        rows.append([shown, _share(counts), weights, keep])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, _state_line(workload, choice)])


def _share(counts: Counter[Placement]) -> str:
    if not counts:
        return "-"
    total = sum(counts.values())
    parts = [(placement, counts[placement]) for placement in Placement if counts[placement]]
    if len(parts) == 1:
        return parts[0][0].value
    return ", ".join(f"{placement.value} {_percent(n / total)}" for placement, n in parts)


def _percent(share: float) -> str:
    """Return a share in whole percent, without calling a part nothing or everything."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def _state_line(workload: Workload, choice: Choice) -> str:
    shares = _state_shares(workload, choice)
    where = {
        Placement.DEVICE: "on the device",
        Placement.STREAMED: "on the host, stepped on the GPU",
        Placement.HOST: "on the host, stepped on the CPU",
    }
    parts = [f"{_percent(shares[p])} {where[p]}" for p in Placement if shares[p]]
    form = workload.inventory.form
    line = f"optimizer state: {'; '.join([*parts, *([] if form.is_fp32 else [str(form)])])}"
    return f"{line}; gradients accumulated on the host" if choice.gradients_on_host else line


def _time(found: Answer, units: Units) -> str:
    prediction, base = found.shown.prediction, found.frontier.base

    def told(seconds: float) -> str:
        return f"{units.seconds(seconds)} {units.time}"

    said = f"predicted step {told(prediction.step_s)}: the GPU computes {told(prediction.compute_s)}"
    if found.offloads:
        said += f", {told(prediction.exposed_s)} exposed"
    if found.shown is not base:
        ratio = prediction.step_s / base.prediction.step_s
        other = "only what was asked for" if offloads(base.choice) else "everything on the device"
        other = f"{other}, {told(base.prediction.step_s)}"
        said += f"; {ratio:.2f} times the step with {other}"
    return "\n".join([said, *(f"  why: {reason}" for reason in found.why if found.offloads)])


def label(workload: Workload, choice: Choice) -> str:
    """Describe a choice in a few words."""
    shares = _state_shares(workload, choice)
    state = [f"{_percent(shares[p])} {p.value}" for p in Placement if p.offloaded and shares[p]]
    parts = [f"state {', '.join(state)}"] if state else []
    parts += ["gradients accumulated on the host"] if choice.gradients_on_host else []
    kept = Counter(choice.activations)
    parts += [f"{_layers(kept[k])} {_KEEPS[k]}" for k in Keep if k is not Keep.KEEP and kept[k]]
    if choice.offloaded_weights:
        parts.append(f"weights of {_layers(len(choice.offloaded_weights))} on the host")
    return "; ".join(parts) or "everything on the device"


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _state_shares(workload: Workload, choice: Choice) -> dict[Placement, float]:
    counts = dict.fromkeys(Placement, 0)
    for bucket, placement in zip(workload.inventory.buckets, choice.placements, strict=True):
        counts[placement] += bucket.state_bytes
    return {placement: size / (sum(counts.values()) or 1) for placement, size in counts.items()}


def frontier_points(found: Answer) -> tuple[FrontierPoint, ...]:
    """Return the choices that no other one beats in both device memory and time, by device memory."""
    return points_of(found.question.workload, _unbeaten(found))


def points_of(workload: Workload, candidates: Sequence[Candidate]) -> tuple[FrontierPoint, ...]:
    """Convert candidates to the points that reports store."""
    return tuple(
        FrontierPoint(label(workload, c.choice), c.needs.device_peak_bytes, c.prediction.step_s) for c in candidates
    )


def _unbeaten(found: Answer) -> list[Candidate]:
    """Return the unbeaten candidates within the budgets of host memory, and the chosen one."""
    shown = {id(c): c for c in (*found.frontier.unbeaten(found.question.budgets), *filter(None, [found.chosen]))}
    return sorted(shown.values(), key=lambda c: c.needs.device_peak_bytes)


def _frontier(found: Answer, units: Units) -> str:
    memory, seconds = units.memory, units.time
    rows = [["", f"device {memory}", f"host {memory}", f"step {seconds}", f"exposed {seconds}"]]
    names = ["choice"]
    for candidate in _apart(found):
        needs, prediction = candidate.needs, candidate.prediction
        rows.append(
            [
                ">" if candidate is found.chosen else "",
                units.size(needs.device_peak_bytes),
                units.size(needs.host_bytes),
                units.seconds(prediction.step_s),
                units.seconds(prediction.exposed_s),
            ]
        )
        names.append(label(found.question.workload, candidate.choice))
    return "\n".join(["device memory against time:", *_named(rows, names)])


def _apart(found: Answer) -> list[Candidate]:
    """Return the unbeaten candidates that differ visibly from the one before, and the chosen one."""
    shown: list[Candidate] = []
    for candidate in _unbeaten(found):
        enough = (1 - _APART) * shown[-1].prediction.step_s if shown else float("inf")
        if candidate is found.chosen or candidate.prediction.step_s < enough:
            shown.append(candidate)
    return shown


def _named(rows: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """Render a table of numbers with words after each row."""
    lines = columns(rows).split("\n")
    width = max(len(line) for line in lines)
    return [f"{line.ljust(width)}  {name}" for line, name in zip(lines, names, strict=True)]


def compared(
    answers: Sequence[Answer],
    undivided: Mapping[int, HostwardError] | None = None,
    command: Callable[[int, Fix], str] | None = None,
) -> str:
    """Render answers for several numbers of GPUs, one line each, and those that cannot divide the step.

    Args:
        command: function that returns the command line with a fix for a number of GPUs; None: fixes are described
            alone.
    """
    first = answers[0]
    units = units_of(first.shown.needs, first.shown.prediction.step_s)
    rows = [["GPUs", f"device {units.memory}", f"host {units.memory}, node", f"step {units.time}", "tokens/s"]]
    names = ["choice"]
    for found in answers:
        gpus, workload, shown = found.question.gpus, found.question.workload, found.shown
        step_s = shown.prediction.step_s
        rows.append(
            [
                str(gpus),
                units.size(shown.needs.device_peak_bytes),
                units.size(shown.needs.host_bytes * gpus),
                units.seconds(step_s),
                f"{workload.step_tokens * gpus / step_s:,.0f}",
            ]
        )
        short = short_of(shown.needs, found.question.budgets, gpus)
        names.append(f"does not fit: short of {short}" if found.chosen is None else label(workload, shown.choice))
    recipe, hardware = first.question.workload.name, first.question.hardware
    gpu = hardware.gpu.name if hardware.gpu else "no GPU"
    title = (
        f"{recipe} on {gpu} (hardware {hardware.name}); NVLink between GPUs is assumed: without it a step takes longer"
    )
    refused = [f"{counted(gpus)}: {error.what}; {error.fix}" for gpus, error in (undivided or {}).items()]
    fixes = [
        f"\n{counted(gpus)}: it does not fit.\n{_fixes(found, command and partial(command, gpus))}"
        for found in answers
        if found.chosen is None
        for gpus in [found.question.gpus]
    ]
    return "\n".join([title, "", *_named(rows, names), *refused, *fixes]) + "\n"


def counted(gpus: int) -> str:
    """Return a number of GPUs in words."""
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"


def beside(found: Answer, others: Sequence[tuple[str, Answer]]) -> str:
    """Render what other flags give beside the answer, one line each.

    Args:
        others: the flags as they were given, and their answers.
    """
    units = units_of(found.shown.needs, found.shown.prediction.step_s)
    several = any(each.question.gpus > 1 for _, each in [("", found), *others])
    host = f"host {units.memory}{', node' if several else ''}"
    rows = [["", f"step {units.time}", "time per token", f"device {units.memory}", host]]
    names = ["fits"]
    per_token_s = _per_token_s(found)
    for text, each in [("this plan", found), *others]:
        question, shown = each.question, each.shown
        most = needed(shown.needs, question.budgets.phases)
        # What does not fit is no gain, however fast it would be.
        more = "" if each is found or each.chosen is None else f"{_per_token_s(each) / per_token_s - 1:+.1%}"
        sizes = units.size(most["device"]), units.size(most["host"] * question.gpus)
        rows.append([text, units.seconds(shown.prediction.step_s), more, *sizes])
        if each.chosen is None:
            names.append(f"no; short of {short_of(shown.needs, question.budgets, question.gpus)}")
        else:
            limit = nearest(shown.needs, question.budgets)
            names.append(f"yes; nearest to its limit: {limit}" if limit else "yes; there are no limits")
    title = "what other flags would change, each with the best plan that they leave:"
    return "\n".join([title, *_named(rows, names)]) + "\n"


def _per_token_s(found: Answer) -> float:
    """Return the seconds per token of all GPUs."""
    return found.shown.prediction.step_s / (found.question.workload.step_tokens * found.question.gpus)


# The frontier as a picture: predicted step time over device memory. Needs matplotlib.


_INK, _LINE, _CHOSEN, _OTHER = "#1f2933", "#3b7dc4", "#c2410c", "#98a1ae"


def draw(found: Answer, path: Path) -> None:
    """Write the frontier as a picture, in the format that the file name's ending gives.

    Raises MissingPackageError without matplotlib, and ConfigError for an ending that it does not support.
    """
    with needed_for("--plot", "plan"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    everything = found.frontier.candidates
    best = found.frontier.unbeaten(found.question.budgets)
    slowest = 3 * min(c.prediction.step_s for c in everything)
    others = [c for c in everything if c.prediction.step_s <= slowest and c not in best]
    axes.scatter(
        [c.needs.device_peak_bytes / GIB for c in others],
        [c.prediction.step_s for c in others],
        s=14,
        color=_OTHER,
        label="other choices",
    )
    axes.step(
        [c.needs.device_peak_bytes / GIB for c in best],
        [c.prediction.step_s for c in best],
        where="post",
        marker="o",
        color=_LINE,
        label="no choice is faster in as little memory",
    )
    if found.chosen is not None:
        axes.scatter(
            [found.chosen.needs.device_peak_bytes / GIB],
            [found.chosen.prediction.step_s],
            s=90,
            zorder=3,
            color=_CHOSEN,
            label="the plan",
        )
    if found.question.budgets.device_bytes is not None:
        axes.axvline(found.question.budgets.device_bytes / GIB, color=_INK, linestyle=":", label="limit")
    axes.set_xlabel("device memory at the peak, GiB")
    axes.set_ylabel("predicted step, s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(f"{found.question.workload.name} on {found.question.gpus} x {found.question.hardware.name}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--plot {path} cannot be written", why=str(error), fix="name a file like FILE.png"
        ) from error
