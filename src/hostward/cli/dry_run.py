"""End `hostward train --dry-run`: tell what the run would do, and leave its folders as they were."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostward.cli import run_files
from hostward.cli.output import fact_lines, text_stream, write_report
from hostward.core.placement import Placement
from hostward.core.units import size
from hostward.report.schema import REPORT_FILE

if TYPE_CHECKING:
    from hostward.report.schema import Estimate
    from hostward.trainer.run import Run


def finish(run: Run, run_dir: Path | None, json_file: Path | None) -> None:
    """Print what a prepared run would do, on the first rank, and release it untrained.

    Args:
        run_dir: the folder of `--run-dir`.
        json_file: gets the same as JSON; see `write_json`.

    Raises ConfigError if the JSON cannot be written.
    """
    run.passes.close()
    for lock in run.locks:
        lock.leave_as_found()
    run.ranks.gather(None)  # a rank that ends makes the launcher end the others
    if run.ranks.first:
        stream = text_stream(json_file)
        print("dry run: all was prepared, nothing was trained, its folders are as they were", file=stream)
        print("\n".join(fact_lines(facts(run, run_dir))), file=stream)
        write_report(json_file, to_dict(run))


def facts(run: Run, run_dir: Path | None) -> dict[str, str]:
    """Return what the run would do, by subject."""
    config, plan, began = run.config, run.optimizer.plan, run.iteration
    start = f"at iteration {began} of {config.train.train_iters}"
    start += f", from {config.checkpoint.load}" if config.checkpoint.load and began else ""
    counts = ((plan.count(where), words) for where, words in _STEPPED.items())
    stepped = ", ".join(f"{count} {words}" for count, words in counts if count)
    saves, interval = config.checkpoint.save, config.checkpoint.save_interval
    every = "after the last iteration" if interval is None else f"every {interval} iterations and after the last"
    folder = run_files.run_folder(run_dir, saves)
    files = [] if folder is None else [f"{REPORT_FILE} in {folder}"]
    files += [] if saves is None else [f"checkpoints in {saves} {every}"]
    return {
        "starts": start if began < config.train.train_iters else f"{start}: nothing to do",
        "data": run.dataset.description,
        "trains": f"{run.trained_parameters:,} of {run.model_parameters:,} parameters",
        "optimizer state"
        if run.ranks.size == 1
        else "state of rank 0": f"{size(plan.offloaded_bytes)} of {size(plan.state_bytes)} on the host",
        "buckets": stepped,
        **predicted(run),
        "writes": "; ".join(files) or "nothing: neither --run-dir nor checkpoint.save is set",
    }


_STEPPED = {
    Placement.DEVICE: "stepped on the device",
    Placement.STREAMED: "streamed",
    Placement.HOST: "stepped by the CPU",
}


def predicted(run: Run) -> dict[str, str]:
    """Return the predicted memory and seconds, by subject, or why nothing is predicted."""
    found: Estimate | None = run.predicted
    if found is None:
        why = "without a GPU" if run.device.type == "cpu" else "for this run: docs/reports.md says for which"
        return {"memory": f"not predicted {why}"}
    host = f"device {size(found.device_peak_bytes)}, host {size(found.host_bytes)}"
    said = {"memory, predicted": f"{host}, pinned {size(found.pinned_bytes)}"}
    if found.step_s is not None and found.exposed_s is not None:
        said["step, predicted"] = f"{found.step_s:.3f} s, {found.exposed_s:.3f} s of it exposed"
    return said


def to_dict(run: Run) -> dict[str, Any]:
    """Return the facts of a dry run for JSON; bytes and seconds are numbers, null where nothing is predicted."""
    found = run.predicted
    return {
        "recipe": run.recipe,
        "first_iteration": run.iteration,
        "train_iters": run.config.train.train_iters,
        "state_bytes": run.optimizer.plan.state_bytes,
        "offloaded_bytes": run.optimizer.plan.offloaded_bytes,
        "start_s": run.startup.seconds,
        "predicted": None if found is None else {name: getattr(found, name) for name in found.__dataclass_fields__},
    }
