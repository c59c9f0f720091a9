"""Predicted step times beside measured ones: step.py, activations.py, scaling.py and reports of runs against the time
model.

    python benchmarks/prediction_times.py [--json FILE] [--hardware h200] [RESULTS.json ...]

Rows are predicted for the models that were measured, traced on the meta device, with the shares that were placed. Rows
of activations.py have no optimizer; what the prediction has of it is taken off. `step_s` of a row is taken as it is: of
activations.py the mean of iterations issued back to back where there is an `alone_s` besides, in older files the median
of iterations each waited for. Of a run it is the median of its iterations but the first and the last. Of several GPUs
it is that of the slowest; memory that torch's allocator gives back and takes again is not timed. Several GPUs that the
hardware file is not of are predicted with the rate of their memory, by the vendor, and else with that file. With
`--own-rates` rows of scaling.py are predicted with the rates of copies and CPU step that each measured before it began,
and those that measured none are left out.
Left out are weights on the host, serial schedules, deterministic kernels, rows with another number of threads, and rows
of scaling.py that do not tell rates (they are of versions with other slots).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from activations import row_of
from hostward.core.host_limits import Rates
from hostward.core.placement import Placement, place_fraction
from hostward.plan.cost_model import Speeds, measured, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import PROFILES, Hardware, load, profile, profile_of
from hostward.plan.step_time import predict
from predictions import keeps_of, recipe_run, scaled, scaled_name, shape_of, tells_rates, workload
from training_row import STATES, row_options

from machine import describe

RESULTS = Path(__file__).parent / "results"
_RATES = {field.name for field in fields(Rates)}
_ROW = re.compile(
    rf"(?:(?:host|streamed|auto|mix[\d.]+):)?[\d.]+(?:\+(?:{'|'.join(STATES)}))?(?:\+calm(?:\+early[\d.]*)?)?"
)
"""Steps of which every one clips are not predicted with steps during backward, which then wait for the norm."""


@dataclass(frozen=True)
class Row:
    """One measured row, and what the model says of it."""

    file: str
    row: str
    tokens: int
    measured_s: float
    predicted_s: float
    gpus: int = 1

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def step_rows(name: str, content: dict[str, Any], speeds: Speeds) -> Iterator[Row]:
    shape, sequence = shape_of(content["shape"]), content["shape"]["seq"]
    for row in content["rows"]:
        placed = row.get("placed_parameters")
        if row.get("status") != "ok" or placed is None or not _ROW.fullmatch(row["row"]):
            continue
        options = row_options(row["row"].replace(":best", ":1"))
        of = workload(shape, row["tokens"], sequence, options)
        of = replace(of, step_early=options.early if options else 0.0)
        away = placed["host"] + placed["streamed"]
        plan = place_fraction(
            of.inventory.buckets, away / of.inventory.numel, placed["streamed"] / away if away else 0.0
        )
        placements = tuple(bucket.placement for bucket in plan.buckets)
        choice = Choice(placements, (Keep.RECOMPUTE,) * len(of.repeated))
        yield Row(name, row["row"], row["tokens"], row["step_s"], predict(of, choice, speeds).step_s)


def is_choice(text: str) -> bool:
    """Whether a row of activations.py is one that a plan can describe: no other library's, norms and activations
    recomputed together or not at all, one buffer.
    """
    try:
        row = row_of(text)
    except ValueError:
        return False
    return not (row.by_others() or row.unpredicted() or row.double_buffering)


def activation_rows(name: str, content: dict[str, Any], speeds: Speeds) -> Iterator[Row]:
    of = workload(shape_of(content["shape"]), content["tokens"], content["seq"])
    here = (Placement.DEVICE,) * len(of.inventory.buckets)
    # The step of all state and the norm, which these runs do not have: 26 and 2 bytes of traffic per parameter.
    step_s = 28 * of.inventory.numel / speeds.traffic_bytes_per_s
    for row in content["rows"]:
        if row.get("status") != "ok" or not is_choice(row["row"]):
            continue
        keeps = keeps_of(row["row"], len(of.repeated))
        predicted = predict(of, Choice(here, keeps), speeds).step_s - step_s
        yield Row(name, row["row"], content["tokens"], row["step_s"], predicted)


def scaling_rows(name: str, content: dict[str, Any], hardware: Hardware, *, own_rates: bool) -> Iterator[Row]:
    machine, ranks = speeds_of(hardware, content["ranks"]), content["ranks"]
    for row in content["rows"]:
        deterministic, threads = "same" in row, "@" in row.get("mix", "")
        if row["status"] == "ok" and not deterministic and not threads and tells_rates(row):
            (work, choice), speeds = scaled(content, row), machine
            if own_rates:
                rates = row["of_ranks"][0]["rates"] or {}
                if rates.keys() != _RATES:
                    continue  # nothing is offloaded, a share was given, or the version is an older one
                speeds = measured(machine, Rates(**rates), work.inventory.as_asked)
            predicted = predict(work, choice, speeds)
            yield Row(name, scaled_name(content, row), row["length"], row["step_s"], predicted.step_s, ranks)


def run_row(name: str, result: dict[str, Any], hardware: Hardware) -> Row | None:
    run = recipe_run(result)
    if run is None:
        return None
    row, work, choice = run
    measured_s = statistics.median(result["iteration_s"][1:-1])
    predicted = predict(work, choice, speeds_of(hardware, work.ranks))
    return Row(name, row, work.microbatch_tokens, measured_s, predicted.step_s, work.ranks)


def with_memory_of(result: dict[str, Any], hardware: Hardware) -> Hardware:
    devices = result["machine"].get("devices") or [{"name": ""}]
    shipped = profile_of(devices[0]["name"])
    if hardware.gpu is None or shipped is None or shipped.gpu is None:
        return hardware
    return replace(hardware, gpu=replace(hardware.gpu, memory_peak_bytes_per_s=shipped.gpu.memory_peak_bytes_per_s))


def rows_of(files: Sequence[Path], hardware: Hardware, *, own_rates: bool = False) -> list[Row]:
    found: list[Row] = []
    speeds = speeds_of(hardware)
    for path in files:
        content = json.loads(path.read_text())
        if content.get("benchmark") == "scaling":
            found += scaling_rows(path.stem, content, with_memory_of(content, hardware), own_rates=own_rates)
        if "device_peak_bytes" in content.get("memory", {}):
            found += [row for row in [run_row(path.stem, content, hardware)] if row is not None]
        if "rows" not in content or not isinstance(content.get("shape"), dict):
            continue
        if content.get("benchmark") == "step":
            found += step_rows(path.stem, content, speeds)
        elif "tokens" in content:
            found += activation_rows(path.stem, content, speeds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--own-rates", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = ("*step*.json", "*activations*.json", "*scaling*.json", "*recipe*.json")
    files = arguments.files or sorted({path for pattern in names for path in RESULTS.glob(pattern)})
    name = arguments.hardware
    rows = rows_of(files, profile(name) if name in PROFILES else load(Path(name)), own_rates=arguments.own_rates)
    width = max(len(row.file) for row in rows)
    print(f"{'result':{width}}  {'row':28} {'tokens':>6} {'measured ms':>11} {'predicted ms':>12} {'error':>7}")
    for row in rows:
        numbers = f"{row.tokens:6} {row.measured_s * 1e3:11.1f} {row.predicted_s * 1e3:12.1f} {row.error:+7.1%}"
        print(f"{row.file:{width}}  {row.row:28} {numbers}")
    for several in (False, True):
        errors = [abs(row.error) for row in rows if (row.gpus > 1) is several]
        within = sum(error <= 0.1 for error in errors)
        print(f"{'several GPUs' if several else 'one GPU'}: {within} of {len(errors)} rows within 10 %")
    if arguments.json is not None:
        result = {
            "benchmark": "prediction times",
            "machine": describe(),
            "hardware": name,
            "own_rates": arguments.own_rates,
            "rows": [{**asdict(row), "error": row.error} for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
