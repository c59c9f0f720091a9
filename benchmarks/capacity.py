"""The largest dense model that trains on this machine, by the plan, and what a run of it takes.

    python benchmarks/capacity.py find --hardware h200 --device-memory 139GiB --host-memory 122GiB --plans FOLDER
    python benchmarks/capacity.py run --plans FOLDER --json benchmarks/results/DATE-capacity.json

    python benchmarks/capacity.py find --shape 70b --gpus 4 --host-memory 490GiB --plans FOLDER --json FILE

Models have the width of Qwen3-14B (hidden size 5120, FFN 17408, 40 heads; 40 layers are 14.8 B parameters) or of
Llama 70B (8192, 28672, 64 heads; 80 layers), one sequence of 4,096 tokens per step and GPU, and as many layers as fit.
Several GPUs shard all of it (FSDP2). `find` asks `hostward plan` for the largest number of layers
that fits, for each format of the state, and what keeps one more layer from fitting: no GPU is needed. `run` trains five
steps of each by its plan (`hostward train --plan`), and sets the bytes that were measured beside those predicted.

`--host-memory` must be what `free` reports as available on the machine that trains, minus 2 GiB at least: the process
itself takes as much, which no plan counts, and a run whose plan needs more than is available is refused.
Without limits `hostward plan` keeps a tenth of host memory and 2 GiB of the GPU's free: torch's allocator takes up to
1 GiB of them. What a run near a limit loses to full caches shows in the lines that it prints while it starts.
`--time-limit-s` must end a run before anything else ends this program, or what the run has said is lost.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import describe

RECIPE = "qwen3_8b_pretrain_config"
SHAPES = {
    "14b": ["model.hidden_size=5120", "model.ffn_hidden_size=17408", "model.num_attention_heads=40"],
    "70b": ["model.hidden_size=8192", "model.ffn_hidden_size=28672", "model.num_attention_heads=64"],
}
TRAINED = ["train.micro_batch_size=1", "dataset.format=mock", "model.seq_length=4096"]
SHARDED = ["ddp.data_parallel_sharding_strategy=optim_grads_params"]
MOMENTS = {form: [f"optimizer.{name}_dtype={form}" for name in ("exp_avg", "exp_avg_sq")] for form in ("bf16", "fp8")}
FORMATS = {
    "fp32": [],
    "bf16-moments": MOMENTS["bf16"],
    "fp8-moments": MOMENTS["fp8"],
    "all-bf16": [*MOMENTS["bf16"], "optimizer.main_params_dtype=bf16"],
    "fp8-moments-bf16": [*MOMENTS["fp8"], "optimizer.main_params_dtype=bf16"],
}
STEPS = 5
MOST_LAYERS = 256


def options(a: argparse.Namespace, layers: int, form: str) -> list[str]:
    """Options of `hostward train` and `hostward plan` for a model of so many layers."""
    sizes = [f"model.num_layers={layers}", f"train.global_batch_size={a.gpus}"]
    return [*SHAPES[a.shape], *TRAINED, *(SHARDED if a.gpus > 1 else []), *sizes, *FORMATS[form]]


def hostward(*words: str, ranks: int = 1, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    ranked = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *ranked, "hostward", *words]
    print(shlex.join(command), file=sys.stderr, flush=True)
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def planned(a: argparse.Namespace, layers: int, form: str) -> tuple[bool, str]:
    """Whether a plan fits, which is then in the folder, and what `hostward plan` printed."""
    limits = [
        "--gpus",
        str(a.gpus),
        "--hardware",
        a.hardware,
        "--device-memory",
        a.device_memory,
        "--host-memory",
        a.host_memory,
    ]
    file = a.plans / f"{form}-{layers}.json"
    done = hostward("plan", "--recipe", RECIPE, *options(a, layers, form), *limits, "--json", str(file))
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr[-2000:])
    return done.returncode == 0, done.stdout


def found(a: argparse.Namespace, form: str) -> dict[str, Any]:
    """The largest number of layers that fits, by bisection, and what the next one lacks."""
    fits, fails, plan, why = 0, MOST_LAYERS + 1, "", ""
    while fails - fits > 1:
        layers = (fits + fails) // 2
        ok, text = planned(a, layers, form)
        if ok:
            (a.plans / f"{form}-{fits}.json").unlink(missing_ok=True)
            fits, plan = layers, text
        else:
            fails, why = layers, text
    missing = next((line for line in why.splitlines() if line.startswith("short of ")), "")
    head = plan.partition("\nlayers ")[0].splitlines()
    return {"format": form, "layers": fits, "plan": head, "next_one": missing, "next_one_in_full": why.splitlines()}


def said(*texts: str | bytes | None) -> str:
    """The end of what a process has said; a process that ran out of time gives bytes, or None for nothing."""
    return "".join(t.decode(errors="replace") if isinstance(t, bytes) else t or "" for t in texts)[-3000:]


def start(row: dict[str, Any]) -> str:
    """Seconds of each phase before the first step, if a run got so far."""
    phases = row["report"]["start_s"] or {} if "report" in row else {}
    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    return f"start {sum(phases.values()):.0f} s ({each})" if phases else ""


def trained(a: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """Five steps by the plan."""
    form, layers = case["format"], case["layers"]
    report = a.plans / f"{form}-{layers}-report.json"
    words = [
        *options(a, layers, form),
        f"train.train_iters={STEPS}",
        f"scheduler.lr_decay_iters={STEPS}",
        "scheduler.lr_warmup_iters=0",
    ]
    plan = ["--plan", str(a.plans / f"{form}-{layers}.json"), "--json", str(report)]
    try:
        done = hostward("train", "--recipe", RECIPE, *words, *plan, ranks=a.gpus, seconds=a.time_limit_s)
    except subprocess.TimeoutExpired as over:
        return {**case, "status": f"not done after {a.time_limit_s:.0f} s", "why": said(over.stdout, over.stderr)}
    if done.returncode:
        return {**case, "status": "failed", "why": said(done.stdout, done.stderr)}
    content = json.loads(report.read_text())
    losses = content["losses"]
    status = "ok" if len(losses) == STEPS and all(map(math.isfinite, losses)) else "losses are not finite"
    return {**case, "status": status, "report": content}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["find", "run"])
    parser.add_argument("--plans", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--shape", choices=list(SHAPES), default="14b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--device-memory", default="139GiB")
    parser.add_argument("--host-memory", default="122GiB")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--time-limit-s", type=float, default=600.0, help="of each run")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    cases = a.plans / "cases.json"
    if a.what == "find":
        a.plans.mkdir(parents=True, exist_ok=True)
        rows = [found(a, form) for form in a.formats]
        cases.write_text(json.dumps(rows, indent=1) + "\n")
        for row in rows:
            print(f"{row['format']}: {row['layers']} layers; one more: {row['next_one']}")
        written(a, rows)
        return
    rows = []
    for case in json.loads(cases.read_text()):
        if case["format"] in a.formats:
            rows.append(trained(a, case))
            row = rows[-1]
            print(row["format"], row["layers"], row["status"], start(row), row.get("why", ""), flush=True)
        written(a, rows)


def written(a: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the rows to the file that was asked for."""
    if a.json is not None:
        found = {"benchmark": f"capacity: {a.what}", "machine": describe(), "shape": a.shape, "gpus": a.gpus}
        a.json.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
