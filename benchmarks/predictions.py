"""Predicted bytes beside measured ones: each row of results that tell both what ran and what it took.

    python benchmarks/predictions.py benchmarks/results/*.json --json benchmarks/results/DATE-predictions.json

Rows of step.py, activations.py and scaling.py, and runs of `hostward train --json`. Nothing is allocated: the models
are built on the meta device, and what they hold is found there (`hostward.profiler.workload`). `device` is the peak
of torch's allocator; `host` is what was taken of the host, for activations alone in rows of activations.py. (Older
results of step.py tell what was pinned, which then was all of it.) Of several GPUs both are of one of them.

A row is left out where the result does not tell enough: other libraries, skipped rows, streamed state that was cut into
other buckets than today, rows of scaling.py that do not tell rates (they are of versions with other slots), and rows
with one iteration before those that count (the optimizer measures itself in the second, and begins its peak anew).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from activations import row_of
from capacity import FORMATS
from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.rules.table import resharded, widened
from hostward.config.schema import Config
from hostward.core.placement import Placement, Plan, place_fraction
from hostward.optim.param_groups import checked_form
from hostward.plan.decisions import Choice, Keep
from hostward.plan.memory_model import STEADY_STEP, PhaseNeeds, required
from hostward.plan.plan_file import PlanFile
from hostward.plan.rank_partition import sharded
from hostward.plan.workload import Workload
from hostward.profiler.workload import workload_of
from hostward.trainer.plan_request import asked_of, other_division, shares
from hostward.trainer.workload import recipe_workload
from training_row import SHAPES, TORCH, TORCH_UNCLIPPED, RowOptions, Shape, build, loss_of, row_options

from machine import describe

GIB = 1 << 30
_FINE, _NEAR = 2000, 0.05
_ENOUGH = 600
"""Shares that are tried before one that is off by the smallest bucket will do."""
TRACES = TemporaryDirectory(prefix="traces-")
"""Of models: many rows are of the same one, divided or recomputed otherwise."""
_OFF = 0.001
"""Shares of all parameters may differ by so much: which one was chosen is known in whole buckets alone."""


@dataclass(frozen=True)
class Row:
    """Bytes of one configuration; a side that was not measured is None."""

    file: str
    row: str
    tokens: int
    device_bytes: int
    device_measured_bytes: int
    host_bytes: int | None
    host_measured_bytes: int | None
    gpus: int = 1

    @property
    def device_error(self) -> float:
        return self.device_bytes / self.device_measured_bytes - 1

    @property
    def host_error(self) -> float | None:
        return self.host_bytes / self.host_measured_bytes - 1 if self.host_bytes and self.host_measured_bytes else None


def workload(shape: Shape, tokens: int, seq: int, options: RowOptions | None = None) -> Workload:
    """Of the models of step.py and activations.py, with the state of a row of step.py."""
    state = options.state if options is not None else None
    return _workload(shape, tokens, seq, tuple(state.items()) if state else None)


@cache
def _workload(shape: Shape, tokens: int, seq: int, state: tuple[tuple[str, torch.dtype], ...] | None) -> Workload:
    model = build(shape, seq, torch.device("meta"))
    sizes = {"sequence_tokens": seq, "microbatch_sequences": tokens // seq}
    form = checked_form(dict(state) if state else None, use_torch_optimizer=False)
    return workload_of(model, loss=lambda m, ids: loss_of(m, ids, shape.loss_chunk), form=form, **sizes)


def shape_of(found: dict[str, Any]) -> Shape:
    """The shape that a result tells; where it leaves some of it out, the known one with the rest of it.

    Raises ValueError where there is none.
    """
    names = {field.name for field in fields(Shape)}
    told = {name: value for name, value in found.items() if name in names}
    for shape in SHAPES.values():
        if told.items() <= asdict(shape).items():
            return shape
    if len(told) < len(names):
        raise ValueError(f"no known shape has {told}")
    return Shape(**told)


def streamed_like(work: Workload, fraction: float, asked: float | str, streamed: int) -> Plan:
    """The plan whose streamed buckets hold so many parameters, which tells the share that was chosen at run time."""
    buckets = work.inventory.buckets
    if not isinstance(asked, str):
        return place_fraction(buckets, fraction, asked)

    def plan(share: float) -> tuple[int, Plan]:
        made = place_fraction(buckets, fraction, min(1.0, max(0.0, share)))
        return abs(sum(b.numel for b in made.buckets if b.placement is Placement.STREAMED) - streamed), made

    middle = streamed / (fraction * work.inventory.numel)
    best: tuple[int, Plan] | None = None
    least = min(b.numel for b in buckets)
    for k in range(_FINE):  # from the middle outwards
        made = plan(middle + _NEAR * (k // 2 + k % 2) * (1 - 2 * (k % 2)) / (_FINE // 2))
        best = made if best is None or made[0] < best[0] else best
        if best[0] == 0 or (k > _ENOUGH and best[0] <= least):
            break
    if best is None or best[0] > _OFF * work.inventory.numel:
        raise ValueError(f"no share streams {streamed} parameters")
    return best[1]


def keeps_of(text: str, layers: int) -> tuple[Keep, ...]:
    """What a row of activations.py does with each layer."""
    row, found = row_of(text), []
    for i in range(layers):
        kind = "recompute" if row.checkpoints(i, layers) else "elementwise" if row.elementwise else "keep"
        away = {"keep": "offload"}.get(kind, f"{kind}_offload")
        found.append(Keep(away if i < row.offloaded else kind))
    return tuple(found)


def of_step(file: str, result: dict[str, Any], row: dict[str, Any]) -> Row | None:
    if row["row"] in (TORCH, TORCH_UNCLIPPED) or "device_peak_bytes" not in row or result["shape"]["warmup"] < 2:
        return None
    shape = shape_of(result["shape"])
    options = row_options(row["row"].replace(":best", f":{row.get('asked_fraction')}"))
    if options is not None and options.early:
        return None  # plans do not know the second set of the state
    work = workload(shape, row["tokens"], result["shape"]["seq"], options)
    buckets, layers = work.inventory.buckets, work.repeated
    placements: Sequence[Placement] = (Placement.DEVICE,) * len(buckets)
    if options is not None:
        if row["placed_parameters"]["streamed"] and row["buckets"] != len(buckets):
            return None
        plan = streamed_like(work, options.fraction, options.streamed, row["placed_parameters"]["streamed"])
        placements = tuple(b.placement for b in plan.buckets)
    away = frozenset(layer.name for layer in layers[:-1]) if options is not None and options.weights else frozenset()
    leave = Keep.RECOMPUTE_OFFLOAD if options is not None and options.inputs else Keep.RECOMPUTE
    keeps = (*(leave,) * (len(layers) - 1), Keep.RECOMPUTE)
    choice = Choice(tuple(placements), keeps, away, serial=options is not None and not options.overlap)
    needs = required(work, choice).phase(STEADY_STEP)
    device = device_bytes(needs, with_optimizer=options is not None)
    measured = row["device_peak_bytes"]
    host = needs.host_bytes if options is not None else None
    taken = row.get("host_bytes", row.get("pinned_bytes"))
    return Row(file, row["row"], row["tokens"], device, measured, host, taken)


def of_activations(file: str, result: dict[str, Any], row: dict[str, Any]) -> Row | None:
    asked = row_of(row["row"])
    if asked.by_others() or asked.unpredicted():
        return None
    work = workload(shape_of(result["shape"]), result["tokens"], result["seq"])
    choice = Choice((Placement.DEVICE,) * len(work.inventory.buckets), keeps_of(row["row"], len(work.repeated)))
    needs = required(work, choice).phase(STEADY_STEP)
    device = device_bytes(needs, with_optimizer=False)
    host = needs.host.get("activations") if row.get("host_bytes") else None
    return Row(file, row["row"], result["tokens"], device, row["device_peak_bytes"], host, row.get("host_bytes"))


def of_scaling(file: str, result: dict[str, Any], row: dict[str, Any]) -> Row:
    work, choice = scaled(result, row)
    needs = required(work, choice).phase(STEADY_STEP)
    measured, first = row["device_bytes"], row["of_ranks"][0]
    host = (needs.host_bytes, first["host_bytes"]) if row["fraction"] else (None, None)
    return Row(file, scaled_name(result, row), row["length"], needs.device_bytes, measured, *host, result["ranks"])


def scaled_name(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Of a row of scaling.py."""
    state = f"+{row['state']}" if row.get("state", "fp32") != "fp32" else ""
    return f"{row['fraction']:g}:{row['mix']}{state} of {scaled_layers(result)} layers on {result['ranks']}"


def scaled_layers(result: dict[str, Any]) -> int:
    """Of the model of a result of scaling.py."""
    return apply_overrides(recipes.load(result["recipe"]), result["options"]).model.num_layers


def tells_rates(row: dict[str, Any]) -> bool:
    """Whether it is of a version of scaling.py that does."""
    return "rates" in row["of_ranks"][0]


def _divided(config: Config, ranks: int) -> Workload:
    """What one of several ranks has of a recipe's step."""
    work = recipe_workload(config, folder=Path(TRACES.name))
    return sharded(work, ranks, reduced_in_fp32=widened(config, ranks), resharded=resharded(config))


@cache
def part(recipe: str, options: tuple[str, ...], length: int, ranks: int) -> tuple[Config, Workload]:
    """Of the first rank of so many, each with a sequence of its own."""
    sizes = (f"model.seq_length={length}", f"train.global_batch_size={ranks}", "train.micro_batch_size=1")
    config = apply_overrides(recipes.load(recipe), [*options, *sizes])
    return config, _divided(config, ranks)


def scaled(result: dict[str, Any], row: dict[str, Any]) -> tuple[Workload, Choice]:
    """What the first rank of a row of scaling.py ran."""
    options = (*result["options"], *FORMATS[row.get("state", "fp32")])
    config, work = part(result["recipe"], options, row["length"], result["ranks"])
    buckets = work.inventory.buckets
    placements: Sequence[Placement] = (Placement.DEVICE,) * len(buckets)
    if row["fraction"]:
        share = row["mix"].partition("@")[0]
        asked = "auto" if share == "auto" else float(share)
        streamed = row["of_ranks"][0]["parameters_by_placement"].get("streamed", 0)
        placements = tuple(b.placement for b in streamed_like(work, row["fraction"], asked, streamed).buckets)
    keeps = asked_of(config, work, None).activations
    return work, Choice(tuple(placements), tuple(keeps[i] for i in range(len(work.repeated))))


def recipe_run(result: dict[str, Any]) -> tuple[str, Workload, Choice] | None:
    """A name, and what the first rank of a run's report ran; None of a simulated device, of an "auto" mix, of a model
    that is divided otherwise than by rows, and of a plan that is not in the result as `plan_file`: no report tells how
    it treats layers.
    """
    if result["memory"].get("device_peak_bytes") is None:
        return None
    words = [w for w in result["command"].split() if re.fullmatch(r"\w+\.\w+=\S+", w)]
    config = apply_overrides(recipes.load(result["recipe"]), words)
    asked = shares(config)
    ranks = len(result["ranks"]["ranks"]) if result.get("ranks") else 1
    by_rows = ranks == 1 or (config.ddp.use_distributed_optimizer and other_division(config) is None)
    if isinstance(asked.streamed_fraction, str) or not by_rows:
        return None
    work = _divided(config, ranks)
    if "--plan" in result["command"]:
        return _planned_run(work, result) if "plan_file" in result else None
    plan = place_fraction(work.inventory.buckets, asked.offload_fraction, asked.streamed_fraction)
    on_host = config.optimizer.gradients == "host"
    kept = asked_of(config, work, None).activations
    keeps = tuple(kept.get(i, Keep.KEEP) for i in range(len(work.repeated)))
    name = " ".join([result["recipe"], *(w for w in words if w.startswith(("model.", "optimizer.gradients")))])
    return name, work, Choice(tuple(b.placement for b in plan.buckets), keeps, gradients_on_host=on_host)


def _planned_run(work: Workload, result: dict[str, Any]) -> tuple[str, Workload, Choice]:
    plan = PlanFile.from_json(json.dumps(result["plan_file"]))
    name = f"{result['recipe']} by a plan, {work.sequence_tokens} tokens"
    return name, replace(work, step_early=plan.step_early), plan.choice(work)


def of_recipe(file: str, result: dict[str, Any]) -> Row | None:
    run = recipe_run(result)
    if run is None:
        return None
    name, work, choice = run
    needs, memory = required(work, choice).phase(STEADY_STEP), result["memory"]
    device = device_bytes(needs, with_optimizer=True)
    taken = sum(memory["host_by_owner_bytes"].values())
    return Row(file, name, work.step_tokens, device, memory["device_peak_bytes"], needs.host_bytes, taken, work.ranks)


def device_bytes(needs: PhaseNeeds, *, with_optimizer: bool) -> int:
    """At the peak; rows without an optimizer have no state."""
    return needs.device_bytes - (0 if with_optimizer else needs.device.get("optimizer state", 0))


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file that can be predicted; none for results of other kinds."""
    result = json.loads(path.read_text())
    found: list[Row | None] = []
    held = result.get("rows", ())
    rows = [row for row in held if row.get("status") == "ok"] if isinstance(held, list) else []
    if result.get("benchmark") == "step" and "model" in result.get("shape", {}):
        found = [of_step(path.name, result, row) for row in rows]
    elif result.get("benchmark") == "scaling":
        found = [of_scaling(path.name, result, row) for row in rows if tells_rates(row)]
    elif "activations.py" in str(result.get("command")):
        found = [of_activations(path.name, result, row) for row in rows]
    elif "device_peak_bytes" in result.get("memory", {}):
        found = [of_recipe(path.name, result)]
    yield from (row for row in found if row is not None)


def print_table(rows: Sequence[Row]) -> None:
    print(f"{'':24} {'tokens':>6} {'device GiB':>10} {'measured':>8} {'error':>8}", end=" ")
    print(f"{'host GiB':>8} {'measured':>8} {'error':>8}")
    file = None
    for row in rows:
        if row.file != file:
            file = row.file
            print(file)
        sides = f"{row.device_bytes / GIB:10.3f} {row.device_measured_bytes / GIB:8.3f} {row.device_error:+8.3%}"
        if row.host_error is not None and row.host_bytes is not None and row.host_measured_bytes is not None:
            sides += f" {row.host_bytes / GIB:8.3f} {row.host_measured_bytes / GIB:8.3f} {row.host_error:+8.3%}"
        print(f"  {row.row[:22]:22} {row.tokens:6} {sides}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    rows = [row for path in arguments.results for row in rows_of(path)]
    print_table(rows)
    if arguments.json is not None:
        facts = {"benchmark": "predictions", "machine": describe()}
        found = [{**asdict(row), "device_error": row.device_error, "host_error": row.host_error} for row in rows]
        arguments.json.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
