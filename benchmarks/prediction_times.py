"""Predicted step times beside measured ones: results of step.py and activations.py against the time model.

    python benchmarks/prediction_times.py [--json FILE] [--hardware h200] [RESULTS.json ...]

Rows are predicted for the models that were measured, traced on the meta device, with the shares that were placed. Rows
of activations.py have no optimizer; what the prediction has of it is taken off. Weights on the host and serial
schedules are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hostward.choice import Choice, Keep
from hostward.hardware_profile import PROFILES, load, profile
from hostward.plan import Placement
from hostward.planner import place_fraction
from hostward.planning.speeds import Speeds, speeds_of
from hostward.planning.time_model import predict
from hostward.training.workload_of import workload_of
from hostward.workload import Workload
from training_row import SHAPES, Shape, loss_of

RESULTS = Path(__file__).parent / "results"
_ROW = re.compile(r"(?:(?:host|streamed|auto):)?[\d.]+")


@dataclass(frozen=True)
class Row:
    """One measured row, and what the model says of it."""

    file: str
    row: str
    tokens: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@cache
def workload(shape: Shape, sequence: int, batch: int) -> Workload:
    """The model of step.py on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(sequence, 2048),
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)

    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(model, ids, shape.loss_chunk)

    return workload_of(model.train(), sequence_tokens=sequence, microbatch_sequences=batch, loss=loss)


def shape_of(content: dict[str, Any]) -> tuple[Shape, int]:
    """The model of a result, and tokens in a sequence."""
    found = content["shape"]
    known = next(
        s for s in SHAPES.values() if all(getattr(s, k) == found[k] for k in ("layers", "hidden", "ffn") if k in found)
    )
    return known, int(found.get("seq") or content["seq"])


def step_rows(name: str, content: dict[str, Any], speeds: Speeds) -> Iterator[Row]:
    shape, sequence = shape_of(content)
    for row in content["rows"]:
        placed = row.get("placed_parameters")
        if row.get("status") != "ok" or placed is None or not _ROW.fullmatch(row["row"]):
            continue
        of = workload(shape, sequence, row["tokens"] // sequence)
        away = placed["host"] + placed["streamed"]
        plan = place_fraction(
            of.inventory.buckets, away / of.inventory.numel, placed["streamed"] / away if away else 0.0
        )
        placements = tuple(bucket.placement for bucket in plan.buckets)
        choice = Choice(placements, (Keep.RECOMPUTE,) * len(of.repeated))
        yield Row(name, row["row"], row["tokens"], row["step_s"], predict(of, choice, speeds).step_s)


def keeps_of(text: str, layers: int) -> tuple[Keep, ...] | None:
    """What becomes of each layer in a row of activations.py; None for other libraries' rows."""
    if not re.fullmatch(r"(?:(?:keep|checkpoint|elementwise|(?:block|last|offload):\d+)(?:\+|$))+", text):
        return None
    parts = dict(part.partition(":")[::2] for part in text.split("+"))
    first, last = int(parts.get("block", 0)), int(parts.get("last", 0))
    found = []
    for number in range(layers):
        again = "checkpoint" in parts or number < first or number >= layers - last
        kept = Keep.RECOMPUTE if again else Keep.ELEMENTWISE if "elementwise" in parts else Keep.KEEP
        leaves = number < int(parts.get("offload", 0))
        away = {
            Keep.KEEP: Keep.OFFLOAD,
            Keep.RECOMPUTE: Keep.RECOMPUTE_OFFLOAD,
            Keep.ELEMENTWISE: Keep.ELEMENTWISE_OFFLOAD,
        }
        found.append(away[kept] if leaves else kept)
    return tuple(found)


def activation_rows(name: str, content: dict[str, Any], speeds: Speeds) -> Iterator[Row]:
    shape, sequence = shape_of(content)
    of = workload(shape, sequence, content["tokens"] // sequence)
    here = (Placement.DEVICE,) * len(of.inventory.buckets)
    # The step of all state and the norm, which these runs do not have: 26 and 2 bytes of traffic per parameter.
    step_s = 28 * of.inventory.numel / speeds.traffic_bytes_per_s
    for row in content["rows"]:
        keeps = keeps_of(row["row"], len(of.repeated))
        if row.get("status") == "ok" and keeps is not None:
            predicted = predict(of, Choice(here, keeps), speeds).step_s - step_s
            yield Row(name, row["row"], content["tokens"], row["step_s"], predicted)


def rows_of(files: Sequence[Path], speeds: Speeds) -> list[Row]:
    found: list[Row] = []
    for path in files:
        content = json.loads(path.read_text())
        if "rows" not in content or "shape" not in content:
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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = arguments.files or sorted([*RESULTS.glob("*step*.json"), *RESULTS.glob("*activations*.json")])
    name = arguments.hardware
    speeds = speeds_of(profile(name) if name in PROFILES else load(Path(name)))
    rows = rows_of(files, speeds)
    width = max(len(row.file) for row in rows)
    print(f"{'result':{width}}  {'row':24} {'tokens':>6} {'measured ms':>11} {'predicted ms':>12} {'error':>7}")
    for row in rows:
        numbers = f"{row.tokens:6} {row.measured_s * 1e3:11.1f} {row.predicted_s * 1e3:12.1f} {row.error:+7.1%}"
        print(f"{row.file:{width}}  {row.row:24} {numbers}")
    within = sum(abs(row.error) <= 0.1 for row in rows)
    print(f"{within} of {len(rows)} rows within 10 %")
    if arguments.json is not None:
        content = [{**asdict(row), "error": row.error} for row in rows]
        arguments.json.write_text(json.dumps({"benchmark": "prediction times", "rows": content}, indent=1) + "\n")


if __name__ == "__main__":
    main()
