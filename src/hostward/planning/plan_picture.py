"""The frontier as a picture: predicted step time against device memory. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from hostward.errors import ConfigError
from hostward.sizes import GIB

from .answer import Answer

_INK, _LINE, _CHOSEN, _OTHER = "#1f2933", "#3b7dc4", "#c2410c", "#98a1ae"


def draw(found: Answer, path: Path) -> None:
    """Write the picture, in the format that the file's name ends with.

    Raises ConfigError where matplotlib is missing, and for an ending that it does not know.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib", why=str(error), fix="pip install 'hostward[plan]'") from error
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
