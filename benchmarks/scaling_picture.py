"""Step time by share of the state on the host, of rows of scaling.py, as an SVG. Needs matplotlib.

    python benchmarks/scaling_picture.py OUT.svg benchmarks/results/DATE-scaling.json ... [--title TEXT]

A line for each number of tokens and layers, relative to the step without offloading in the same run; dotted its lower
bound by what PCIe carries in both directions together. Grey are published numbers of others, each relative to its own
step without offloading:

    Megatron Bridge     16 H100, TP2 PP2 EP4, its own batch: 996 ms, and 1871, 2484, 3187, 4189 at 25 to 100 % (its
                        performance card, 2026-03-30)
    prime-rl            8 H200, no clipping: 1.75 to 3.96 s with 8 K tokens, 5.17 to 5.73 with 16 K (pull request 3234)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from predictions import scaled_layers

BRIDGE = {0.0: 1.0, 0.25: 1871 / 996, 0.5: 2484 / 996, 0.75: 3187 / 996, 1.0: 4189 / 996}
PRIME_RL = {"8 K": 3.96 / 1.75, "16 K": 5.73 / 5.17}
COLOURS = ("#3b7dc4", "#c4623b", "#3b9a5f", "#8257b0")
OTHER = "#98a1ae"
Curve = dict[float, tuple[float, float]]


def curves_of(files: Sequence[Path]) -> dict[tuple[int, int], Curve]:
    """By tokens and layers, and share: ratio and floor. Of several rows of one share the first counts."""
    found: dict[tuple[int, int], Curve] = {}
    for path in files:
        result = json.loads(path.read_text())
        for row in result["rows"]:
            if row["status"] == "ok":
                curve = found.setdefault((row["length"], scaled_layers(result)), {})
                curve.setdefault(row["fraction"], (row["ratio"], row["floor_both_ways_ratio"]))
    return dict(sorted(found.items()))


def picture(curves: Mapping[tuple[int, int], Curve], title: str) -> Figure:
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    bridge = [100 * share for share in BRIDGE]
    axes.plot(bridge, list(BRIDGE.values()), "o--", color=OTHER, label="Megatron Bridge, 16 H100 (published)")
    for marker, (tokens, ratio) in zip("sD", PRIME_RL.items(), strict=True):
        axes.plot([100], [ratio], marker, color=OTHER, label=f"prime-rl, 8 H200, {tokens} (published)")
    for colour, ((length, layers), curve) in zip(COLOURS, curves.items(), strict=False):
        shares = sorted(curve)
        ratios, floors = zip(*(curve[share] for share in shares), strict=True)
        across = [100 * share for share in shares]
        axes.plot(across, ratios, "o-", color=colour, label=f"{length // 1024} K tokens, {layers} layers")
        axes.plot(across, floors, ":", color=colour)
    axes.set(title=title, xlabel="% of the optimizer state offloaded", ylabel="step time relative to no offloading")
    axes.set_ylim(bottom=0.9)
    axes.grid(color="#e3e7ec")
    axes.legend(frameon=False, loc="upper left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--title", default="Qwen3-30B-A3B")
    arguments = parser.parse_args()
    picture(curves_of(arguments.files), arguments.title).savefig(arguments.out, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
