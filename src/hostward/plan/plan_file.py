"""Read, write and compare plans as files. No torch.

A plan gives for each bucket where its optimizer state is and where it is stepped, for each layer how its saved tensors
are treated and whether its weights are offloaded, and the predictions for that choice. docs/plan-file.md describes the
file.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from hostward.core.inventory import Bucket, Dtype, StateFormat
from hostward.core.placement import Placement, Plan, placed, stepped_early
from hostward.core.units import size
from hostward.errors import ConfigError
from hostward.files import json_schema
from hostward.files.atomic_file import read_text, replace_text
from hostward.plan.budgets import Budgets
from hostward.plan.decisions import ELEMENTWISE, LEAVES, RECOMPUTED, Choice, FrontierPoint, Keep
from hostward.plan.hardware_profile import Hardware
from hostward.plan.memory_model import STEADY_STEP, Needs, PhaseNeeds
from hostward.plan.search import Candidate
from hostward.plan.workload import Workload

VERSION = 1
FORMAT = "hostward-plan"
_TORCH = {Dtype.FP32: "torch.float32", Dtype.BF16: "torch.bfloat16", Dtype.FP8: "torch.uint8"}
"""Dtypes of state as `state_dtypes` of AdamW takes them."""
_WRITE_ONE = "write one with: hostward plan --json FILE"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identify the workload that a plan is for."""

    name: str
    parameters: int
    digest: str
    """Digest for names, sizes and dtypes of buckets and layers: a plan fits no model with another one."""
    sequence_tokens: int
    microbatch_sequences: int
    microbatches: int
    ranks: int
    resharded: bool = False
    """Layers that the ranks share are unsharded only while they run."""
    state: StateFormat | None = None
    """How the optimizer stores state; None in files of earlier versions, which do not say it."""
    weights: tuple[Dtype, ...] = ()
    """Dtypes of the trained weights, each once; none in files of earlier versions."""

    def other_sizes(self, sequence_tokens: int, microbatch_sequences: int, microbatches: int) -> str:
        """Describe how a step of these sizes differs from the plan's; "" where it does not."""
        pairs = (
            ("sequences of {:,} tokens", self.sequence_tokens, sequence_tokens),
            ("{:,} sequences in a microbatch", self.microbatch_sequences, microbatch_sequences),
            ("{:,} microbatches in a step", self.microbatches, microbatches),
        )
        return ", ".join(f"{words.format(ours)} (here {theirs:,})" for words, ours, theirs in pairs if ours != theirs)


@dataclass(frozen=True, slots=True)
class Machine:
    """Identify the machine whose rates the plan was made with."""

    name: str
    gpu: str
    gpus: int


@dataclass(frozen=True, slots=True)
class BucketRow:
    """Hold where the state of a bucket is, and where it is stepped."""

    bucket: str
    numel: int
    placement: Placement

    @property
    def layer(self) -> str:
        """Return the layer from the bucket's name, which is its number and its layer."""
        return self.bucket.partition(".")[2]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Hold the treatment of a layer's saved tensors, and the place of its weights: `device` or `host`."""

    layer: str
    activations: Keep
    weights: str


@dataclass(frozen=True, slots=True)
class Predicted:
    """Hold the predictions for one GPU and one step."""

    step_s: float
    compute_s: float
    exposed_s: float
    device_peak_bytes: int
    host_bytes: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Hold budgets in bytes of one GPU; None: no limit."""

    device_bytes: int | None
    host_bytes: int | None
    pinned_bytes: int | None


@dataclass(frozen=True, slots=True)
class PlanFile:
    """Hold the contents of a plan file."""

    format: str
    version: int
    workload: Fingerprint
    machine: Machine
    limits: Limits
    predicted: Predicted
    gradients_on_host: bool
    staging_bytes: int | None
    buckets: tuple[BucketRow, ...]
    """Buckets in order of use in forward."""
    layers: tuple[LayerRow, ...]
    frontier: tuple[FrontierPoint, ...] = ()
    """Plans that this one was chosen from, for reports; nothing is decided by it."""
    pin_gradients: bool = True
    """True if host memory to which gradients of CPU-stepped buckets are offloaded is pinned. May be missing, as may the
    next.
    """
    pin_weights: bool = True
    """True if host memory from which their weights are copied back is pinned."""
    step_early: float = 0.0
    """Share of the CPU-stepped state that is stepped during backward."""

    def to_json(self) -> str:
        return json_schema.to_text(self)

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> PlanFile:
        """Parse a plan. Raises ConfigError, which names `origin` and the place, if `text` is no plan."""
        try:
            json_schema.require_version(text, VERSION, FORMAT)
            found = json_schema.parse(cls, text)
            _require_whole(found)
        except ValueError as error:
            raise ConfigError(
                f"{origin} cannot be used as a plan", why=str(error), fix=f"correct it there, or {_WRITE_ONE}"
            ) from error
        return found

    def choice(self, workload: Workload) -> Choice:
        """Return the plan's choice for `workload`. Raises ConfigError if the plan is for something else."""
        self.require_ranks(workload.ranks)
        self._require_same(workload.inventory.buckets, [layer.name for layer in workload.repeated])
        if self.workload.digest != digest(workload):
            raise self._of_another_model("layers of the same names have other sizes or element types")
        return Choice(
            tuple(row.placement for row in self.buckets),
            tuple(row.activations for row in self.layers),
            frozenset(row.layer for row in self.layers if row.weights == "host"),
            self.gradients_on_host,
            self.staging_bytes,
        )

    def placements(self, buckets: Sequence[Bucket]) -> Plan:
        """Return the placements of buckets in order of use, for the optimizer alone.

        Layers may be used in another order than in the plan: parameters that FSDP2's root owns come first. Raises
        ConfigError if the buckets are others.
        """
        order = self._order(buckets)
        self._require_same([replace(buckets[at], index=i) for i, at in enumerate(order)], None)
        found = dict(zip(order, (row.placement for row in self.buckets), strict=True))
        return placed(buckets, [found[i] for i in range(len(buckets))], self.asked_fraction)

    def early(self, buckets: Sequence[Bucket]) -> frozenset[int]:
        """Return the positions of buckets in order of use that are stepped during backward: those that it counted."""
        order = self._order(buckets)
        rows = [row.placement for row in self.buckets]
        return frozenset(order[i] for i in stepped_early([buckets[at] for at in order], rows, self.step_early))

    def _order(self, buckets: Sequence[Bucket]) -> list[int]:
        """Return the positions of buckets in order of use, in the plan's order."""
        position = {row.layer: i for i, row in reversed([*enumerate(self.buckets)])}
        return sorted(range(len(buckets)), key=lambda i: position.get(buckets[i].layer, len(self.buckets)))

    @property
    def asked_fraction(self) -> float:
        """Return the share of parameters whose state is offloaded."""
        total = sum(row.numel for row in self.buckets)
        away = sum(row.numel for row in self.buckets if row.placement.offloaded)
        return away / total if total else 0.0

    @property
    def streamed_fraction(self) -> float:
        """Return the share of offloaded parameters whose state is streamed."""
        away = sum(row.numel for row in self.buckets if row.placement.offloaded)
        streamed = sum(row.numel for row in self.buckets if row.placement is Placement.STREAMED)
        return streamed / away if away else 0.0

    @property
    def needs(self) -> Needs:
        """Return the predicted memory of a step, as needs of one phase."""
        sizes = self.predicted.device_peak_bytes, self.predicted.host_bytes, self.predicted.pinned_bytes
        return Needs((PhaseNeeds(STEADY_STEP, *({"the plan": size} for size in sizes)),))

    def _require_state(self, buckets: Sequence[Bucket]) -> None:
        """Raise ConfigError if state would be stored otherwise than the plan counts on."""
        planned = self.workload.state
        if planned is None:
            return
        known = planned.dtypes, planned.of(1).dtypes
        other = next((bucket.form.dtypes for bucket in buckets if bucket.form.dtypes not in known), None)
        if other is None:
            return
        changed = {name: dtype for name, dtype in known[0].items() if dtype is not other[name]}
        ours, theirs = (", ".join(f"{name} in {of[name]}" for name in changed) for of in (known[0], other))
        asked = ", ".join(f'"{name}": {_TORCH[dtype]}' for name, dtype in changed.items())
        raise ConfigError(
            f"the plan is for optimizer state with {ours}, and here it has {theirs}",
            why="state, copies and steps would take other bytes and seconds than planned",
            fix=f"ask for the plan's: AdamW(state_dtypes={{{asked}}}), in a run optimizer.exp_avg_dtype; or "
            "make a plan for the dtypes here",
        )

    def _require_weights(self, buckets: Sequence[Bucket]) -> None:
        """Raise ConfigError if weights have other dtypes than the plan counts on."""
        planned, here = self.workload.weights, _dtypes(buckets)
        if planned and planned != here:
            raise ConfigError(
                f"the plan is for weights in {' and '.join(planned)}, and here they are in {' and '.join(here)}",
                why="weights, gradients, copies and steps would take other bytes and seconds than planned",
                fix="cast the model to the plan's before the optimizer is made, as model.to(torch.bfloat16); or plan a "
                "recipe with model.params_dtype (a config.json is planned in bf16)",
            )

    def _require_same(self, buckets: Sequence[Bucket], layers: Sequence[str] | None) -> None:
        self._require_state(buckets)
        ours = [(row.bucket, row.numel) for row in self.buckets]
        theirs = [(bucket.name, bucket.numel) for bucket in buckets]
        of_layers = "" if layers is None else _first_difference("layer", [r.layer for r in self.layers], list(layers))
        why = of_layers or _first_difference("bucket", ours, theirs)
        if why:
            raise self._of_another_model(why)
        self._require_weights(buckets)

    def _of_another_model(self, why: str) -> ConfigError:
        return ConfigError(
            f"the plan is of another model: {self.workload.name}, {self.workload.parameters:,} parameters",
            why=why,
            fix="make a plan of this model: hostward plan --json FILE",
        )

    def require_ranks(self, ranks: int) -> None:
        """Raise ConfigError if the model is sharded among another number of GPUs."""
        if self.workload.ranks != ranks:
            raise ConfigError(
                f"the plan shards the model among {self.workload.ranks} GPUs, and here it is {ranks}",
                why="its buckets are the part that one of them has",
                fix=f"make a plan for that many: hostward plan --gpus {ranks} --json FILE",
            )

    def require_resharded(self, resharded: bool) -> None:
        """Raise ConfigError if layers stay unsharded until backward where the plan counts on resharding.

        (In the reverse case a GPU takes less memory than planned.)
        """
        if self.workload.resharded and not resharded:
            raise ConfigError(
                "the plan is for layers that are unsharded only while they run, and here they stay unsharded until "
                "backward",
                why="each GPU would need up to all of the unsharded weights on top of the plan",
                fix="ddp.data_parallel_sharding_strategy=optim_grads_params, or in a custom training loop "
                "fully_shard(..., reshard_after_forward=True); or make a plan without that option",
            )

    def require_machine(self, gpu: str) -> None:
        """Raise ConfigError if the plan's rates are of another GPU than the one of this name."""
        if self.machine.gpu != gpu:
            raise ConfigError(
                f"the plan is for {self.machine.gpu}, this GPU is {gpu}",
                why="rates and memory of the two differ, so the plan's placements and predictions do not hold here",
                fix="make a plan for this machine (hostward plan --hardware FILE --json FILE), or use --force",
            )


def _require_whole(plan: PlanFile) -> None:
    """Raise ValueError where parts of the file do not belong together."""
    of = plan.workload
    for name in ("sequence_tokens", "microbatch_sequences", "microbatches", "ranks"):
        if not getattr(of, name):
            raise ValueError(f"workload.{name} is 0")
    if of.ranks != plan.machine.gpus:
        raise ValueError(f"workload.ranks is {of.ranks}, machine.gpus is {plan.machine.gpus}")
    if not 0.0 <= plan.step_early <= 1.0:
        raise ValueError(f"step_early is {plan.step_early}, not in [0, 1]")
    if plan.step_early and plan.gradients_on_host:
        raise ValueError(
            "step_early is set, and gradients_on_host is true: such gradients are final after the last one"
        )
    held = sum(row.numel for row in plan.buckets)
    if of.parameters != held:
        raise ValueError(f"workload.parameters is {of.parameters}, its buckets have {held}")
    not_stepped = {row.layer: i for i, row in enumerate(plan.buckets) if row.placement != "host"}
    for i, layer in enumerate(plan.layers):
        if layer.weights not in ("device", "host"):
            raise ValueError(f"layers[{i}].weights is {layer.weights[:40]!r}, not device or host")
        if layer.weights == "host" and layer.layer in not_stepped:
            raise ValueError(
                f"layers[{i}].weights is host, and buckets[{not_stepped[layer.layer]}] of that layer is not: weights "
                f"are offloaded only with a CPU optimizer step"
            )


def _first_difference(what: str, ours: Sequence[object], theirs: Sequence[object]) -> str:
    if len(ours) != len(theirs):
        return f"it has {len(ours)} {what}s, the model has {len(theirs)}"
    pairs = zip(ours, theirs, strict=True)
    return next((f"{what} {i} is {a} in the plan, {b} in the model" for i, (a, b) in enumerate(pairs) if a != b), "")


def digest(workload: Workload) -> str:
    """Return a digest that is equal for workloads between which a plan can be exchanged."""
    rows = [f"{b.name} {b.numel} {b.dtype.value} {b.kind.value}{_form(b)}" for b in workload.inventory.buckets]
    rows += [f"{layer.name} {layer.weight_bytes} {layer.repeated}" for layer in workload.layers]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def _dtypes(buckets: Sequence[Bucket]) -> tuple[Dtype, ...]:
    return tuple(sorted({bucket.dtype for bucket in buckets}))


def _form(bucket: Bucket) -> str:
    """Return the dtypes of a bucket's moments; nothing for fp32, which plans of earlier versions are for.

    The kind of a bucket tells how its main weights are stored.
    """
    return "" if bucket.form.fp32_moments else f" {bucket.form.exp_avg.value} {bucket.form.exp_avg_sq.value}"


def plan_of(
    workload: Workload,
    hardware: Hardware,
    gpus: int,
    budgets: Budgets,
    candidate: Candidate,
    frontier: tuple[FrontierPoint, ...] = (),
) -> PlanFile:
    """Build the plan file of a candidate, with the frontier that it was chosen from."""
    choice, needs, prediction = candidate.choice, candidate.needs, candidate.prediction
    repeated = [layer.name for layer in workload.repeated]
    return PlanFile(
        FORMAT,
        VERSION,
        Fingerprint(
            workload.name,
            workload.inventory.numel,
            digest(workload),
            workload.sequence_tokens,
            workload.microbatch_sequences,
            workload.microbatches,
            workload.ranks,
            workload.resharded,
            workload.inventory.form,
            _dtypes(workload.inventory.buckets),
        ),
        Machine(hardware.name, hardware.gpu.name if hardware.gpu else "", gpus),
        Limits(budgets.device_bytes, budgets.host_bytes, budgets.pinned_bytes),
        Predicted(
            prediction.step_s,
            prediction.compute_s,
            prediction.exposed_s,
            needs.device_peak_bytes,
            needs.host_bytes,
            needs.pinned_bytes,
        ),
        choice.gradients_on_host,
        choice.staging_bytes,
        tuple(
            BucketRow(bucket.name, bucket.numel, placement)
            for bucket, placement in zip(workload.inventory.buckets, choice.placements, strict=True)
        ),
        tuple(
            LayerRow(name, keep, "host" if name in choice.offloaded_weights else "device")
            for name, keep in zip(repeated, choice.activations, strict=True)
        ),
        frontier,
        workload.pin_gradients,
        workload.pin_weights,
        workload.step_early,
    )


def load(path: Path) -> PlanFile:
    """Read a plan. Raises ConfigError where the file cannot be read or is no plan."""
    return PlanFile.from_json(read_text(path, _WRITE_ONE), str(path))


def save(plan: PlanFile, path: Path) -> None:
    """Write the file atomically. Raises ConfigError where it cannot be written."""
    replace_text(path, plan.to_json(), what="plan")


# What training carries out of a plan.


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """Hold a plan's decisions about layers, as training carries them out.

    activations, weights: number of first layers whose activations or weights are offloaded. parts: number of first
    layers in which layer norms and activations are recomputed. whole: layers that are recomputed as a whole.
    """

    activations: int
    weights: int
    parts: int
    whole: frozenset[int]

    def __bool__(self) -> bool:
        """Report whether anything of layers is offloaded or recomputed."""
        return bool(self.activations or self.weights or self.parts or self.whole)


def layers_of(plan: PlanFile) -> PlannedLayers:
    """Return a plan's decisions about layers.

    Raises:
        ConfigError: a plan made by hand offloads other layers than the first ones, or everything of the last layer.
    """
    keeps = [Keep(row.activations) for row in plan.layers]
    away = [row.weights == "host" for row in plan.layers]
    found = PlannedLayers(
        _first(plan, [k in LEAVES for k in keeps], "activations are offloaded"),
        _first(plan, away, "weights are offloaded"),
        _first(plan, [k in ELEMENTWISE for k in keeps], "layer norms and activations are recomputed"),
        frozenset(i for i, k in enumerate(keeps) if k in RECOMPUTED),
    )
    if keeps and (found.activations == len(keeps) or found.weights == len(keeps)):
        raise ConfigError(
            "the plan offloads everything of the last layer",
            why="its backward begins as soon as its forward ends",
            fix="keep the last layer's activations and weights on the device",
        )
    return found


def _first(plan: PlanFile, yes: Sequence[bool], what: str) -> int:
    count = sum(yes)
    if not all(yes[:count]):
        last, gap = max(i for i, y in enumerate(yes) if y), yes.index(False)
        raise ConfigError(
            f"in the plan, {what} in layers[{last}], {plan.layers[last].layer}, but not in layers[{gap}] before it",
            why="hostward.attach counts layers from the first",
            fix="edit the plan so that these are the first layers, and something of the last one stays",
        )
    return count


# The differences between two plans, as text.

_LINES = 4
"""Largest number of lines for the state of repeated layers.

Plans often place it differently in nearly every layer: where that makes more lines, one line sums up the layers; the
files have the rest.
"""
_NONE = "(not there)"


def differences(a: PlanFile, b: PlanFile) -> list[str]:
    """List what differs, line by line; empty for equal plans."""
    lines = []
    for part in ("workload", "machine", "limits", "predicted"):
        old, new = getattr(a, part), getattr(b, part)
        for name in type(old).__dataclass_fields__:
            before, after = getattr(old, name), getattr(new, name)
            if not _same(before, after):
                lines.append(f"{part}.{name}: {_value(before, name)} -> {_value(after, name)}")
    for name in ("gradients_on_host", "staging_bytes", "pin_gradients", "pin_weights", "step_early"):
        if getattr(a, name) != getattr(b, name):
            lines.append(f"{name}: {_value(getattr(a, name), name)} -> {_value(getattr(b, name), name)}")
    lines += _state_differences(a, b)
    for column, what in (("activations", "saved activations"), ("weights", "weights")):
        old_rows, new_rows = ({row.layer: str(getattr(row, column)) for row in plan.layers} for plan in (a, b))
        lines += [run.told(what) for run in _runs(_changes(old_rows, new_rows))]
    return lines


@dataclass(frozen=True, slots=True)
class _Run:
    """Hold neighbouring names with the same change."""

    names: tuple[str, ...]
    change: str

    def told(self, what: str) -> str:
        return f"{what} of {_range(self.names)}: {self.change}"

    @property
    def stem(self) -> str:
        """Return the common stem of the names of repeated layers, as `model.layers`; "" if they are not of one list."""
        stems = {_stem(name) for name in self.names}
        return stems.pop() if len(stems) == 1 else ""


def _state_differences(a: PlanFile, b: PlanFile) -> list[str]:
    what, lines = "optimizer state", []
    old, new = _state_by_layer(a), _state_by_layer(b)
    changes = _changes(*({layer: _shares(held) for layer, held in state.items()} for state in (old, new)))
    for layer, change in changes.items():
        if not change and _rows_of(a, layer) != _rows_of(b, layer):
            changes[layer] = f"{_shares(old[layer])} in both plans, but not of the same parameters"
    names = list(changes)
    for stem, group in groupby(_runs(changes), key=lambda run: run.stem):
        runs = list(group)
        if not stem or len(runs) <= _LINES:
            lines += [run.told(what) for run in runs]
            continue
        between = names[names.index(runs[0].names[0]) : names.index(runs[-1].names[-1]) + 1]
        before, after = (_shares(sum((s.get(name, Counter()) for name in between), Counter())) for s in (old, new))
        lines.append(f"{what} of {_range(between)}, taken together: {before} -> {after}")
    return lines


def _rows_of(plan: PlanFile, layer: str) -> list[tuple[int, Placement]]:
    return [(row.numel, row.placement) for row in plan.buckets if row.layer == layer]


def _state_by_layer(plan: PlanFile) -> dict[str, Counter[Placement]]:
    """Count the parameters of each layer by the placement of their state."""
    counts: dict[str, Counter[Placement]] = {}
    for row in plan.buckets:
        counts.setdefault(row.layer, Counter())[Placement(row.placement)] += row.numel
    return counts


def _shares(held: Counter[Placement]) -> str:
    """Render a placement, or shares of the parameters."""
    if not held:
        return _NONE
    if len(held) == 1:
        return next(iter(held)).value
    return ", ".join(f"{p.value} {held[p] / held.total():.0%}" for p in Placement if held[p])


def summary(a: PlanFile, b: PlanFile) -> str:
    """Summarize in one line what the second plan gains and loses."""
    if a.predicted == b.predicted and a != b:
        return "both hold the same predictions: those of the second plan are from before it was edited"
    changes = []
    for name, what in (("device_peak_bytes", "device memory"), ("host_bytes", "host memory")):
        more = getattr(b.predicted, name) - getattr(a.predicted, name)
        changes.append(f"{size(abs(more))} {'more' if more > 0 else 'less'} {what}" if more else f"as much {what}")
    same = _same(a.predicted.step_s, b.predicted.step_s)
    longer_s = 0.0 if same else b.predicted.step_s - a.predicted.step_s
    share = f" ({longer_s / a.predicted.step_s:+.1%})" if a.predicted.step_s else ""
    longer = f"{abs(longer_s):.4g} s {'longer' if longer_s > 0 else 'shorter'}{share}" if longer_s else "as long"
    return f"predicted of the second plan: {', '.join(changes)}, a step {longer}"


def _same(before: object, after: object) -> bool:
    """Return whether two values are equal, seconds to within what the order of their addition makes."""
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=1e-9)
    return before == after


def _value(value: object, name: str) -> str:
    """Format the value of a field for people; its name ends with the unit."""
    if isinstance(value, int) and name.endswith("_bytes"):
        return size(value)
    if isinstance(value, tuple):
        return " and ".join(map(str, value)) or _NONE
    if isinstance(value, float):
        return f"{value:.4g}{' s' if name.endswith('_s') else ''}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Describe by name how it changed; empty where it did not."""
    pairs = {name: (old.get(name, _NONE), new.get(name, _NONE)) for name in (*old, *new)}
    return {name: "" if before == after else f"{before} -> {after}" for name, (before, after) in pairs.items()}


def _runs(changes: Mapping[str, str]) -> list[_Run]:
    runs = groupby(changes, key=lambda name: changes[name])
    return [_Run(tuple(names), change) for change, names in runs if change]


def _stem(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return stem if last.isdecimal() else ""


def _range(names: Sequence[str]) -> str:
    first, last = names[0], names[-1]
    if first == last:
        return first
    alike = _stem(first) and _stem(first) == _stem(last)
    return f"{first}-{last.rpartition('.')[2]}" if alike else f"{first} to {last}"
