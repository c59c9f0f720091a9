"""Say which plans are predicted to be faster than the one that a run had, for its page and for the terminal."""

from __future__ import annotations

from hostward.core.units import MIB, size
from hostward.plan.decisions import FrontierPoint, faster
from hostward.plan.result import device_budget
from hostward.report.formatting import duration, percent
from hostward.report.schema import Estimate, RunReport

_OF_OFFLOADING = ("offload", "recompute", "optimizer.gradients")
"""Parts of names of options that say what a plan decides instead."""


def sentences(report: RunReport) -> list[str]:
    """Return sentences about plans that are predicted to be faster than the run's own, or why none is named."""
    own = report.predicted
    if own is None or own.step_s is None or own.device_peak_bytes is None:
        return [
            "Whether one of these plans beats the run's own is not known: the report holds no prediction of its step."
        ]
    found = better_plans(report)
    within = faster(report.frontier, own.device_peak_bytes, own.step_s)
    return found if within else [f"{_within(own.device_peak_bytes)} no plan is predicted to be faster.", *found]


def better_plans(report: RunReport) -> list[str]:
    """Return sentences about plans of the report's frontier, all within the host's memory, that are predicted faster.

    Predictions are compared with predictions, by the same rates of the machine, and what the run took stands beside
    them. The first sentence is about as much device memory as the run's plan takes, the second about all of the GPU's,
    the last says how to train by the first plan. None of them is there without such a plan.
    """
    own, gpu_bytes = report.predicted, report.machine.get("device_memory_bytes")
    if own is None or own.step_s is None or own.device_peak_bytes is None:
        return []
    found = []
    better = faster(report.frontier, own.device_peak_bytes, own.step_s)
    if better is not None:
        found.append(f"{_within(own.device_peak_bytes)}, {_gain(better, own, report.measured.step_s)}.")
    if type(gpu_bytes) is int:
        best = faster(report.frontier, device_budget(gpu_bytes, _gpus(report)), own.step_s)
        if best is not None and best != better:
            found.append(
                f"With the rest of the GPU's {size(gpu_bytes)} as well, {_gain(best, own, report.measured.step_s)}."
            )
    return found if better is None else [*found, _change(report, own.device_peak_bytes)]


def _within(device_bytes: int) -> str:
    return f"In no more device memory than the run's own plan ({size(device_bytes)})"


def _gain(plan: FrontierPoint, own: Estimate, measured_s: float | None) -> str:
    share = percent(1 - plan.step_s / (own.step_s or 1.0))
    words = f"“{plan.label}”, {size(plan.device_bytes)}, is predicted to take {duration(plan.step_s)} per step"
    words = f"{words} instead of {duration(own.step_s)} ({share} less)"
    if measured_s is None:
        return words
    words = f"{words}; the run took {duration(measured_s)}"
    slow = measured_s <= plan.step_s
    return f"{words}, so predictions are too slow here to tell which is faster" if slow else words


def _gpus(report: RunReport) -> int:
    return 1 if report.ranks is None else len(report.ranks.ranks)


def _change(report: RunReport, device_bytes: int) -> str:
    """Say which options to leave out, and how to train by a plan within the same device memory."""
    left = [f"{name}={value}" for name, value in report.options.items() if any(o in name for o in _OF_OFFLOADING)]
    within = f" --gpus {_gpus(report)}" if _gpus(report) > 1 else ""
    within += f" --device-memory {-(-device_bytes // MIB)}MiB --json plan.json"
    without = f" Leave out {', '.join(left)}." if left else ""
    return f"To train by such a plan: hostward plan with the run's options and{within}, then --plan plan.json.{without}"
