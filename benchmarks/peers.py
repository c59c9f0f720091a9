"""Other libraries' offloading on the same job, as rows that stand beside those of step.py and activations.py.

    python benchmarks/peers.py FOLDER --tokens 8192 --json peers.json
    python benchmarks/step.py --peers FOLDER ...
    python benchmarks/activations.py --peers FOLDER ...

FOLDER holds the measuring programs measure_native.py and measure_deepspeed.py, and the packages that they need under
peer_site/ (for DeepSpeed under peer_site_deepspeed/ where that exists). Each mode runs in processes of its own; what
cannot run becomes a row that says why. Clipping is on in every mode that can clip, unless its name ends in +unclipped:
each row says which. A ratio is to
the mode's own base, the same dtypes on the GPU and the same clipping; DeepSpeed has a model and a base of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import describe

CLIP = 1.0
UNCLIPPED = "+unclipped"
SECONDS_PER_MODE = 240
GIB = 1 << 30


@dataclass(frozen=True)
class Mode:
    """A mode of one of the two programs, the mode it is compared with, and whether it can clip."""

    program: str
    mode: str
    base: str
    system: str
    clips: bool = True


MODES = {
    "base_bf16_master": Mode("native", "base_bf16_master", "base_bf16_master", "on the GPU: bf16, fp32 master"),
    "hdo_100": Mode("native", "hdo_100", "base_bf16_master", "Megatron-Core HybridDeviceOptimizer"),
    "hdo_100_overlap": Mode("native", "hdo_100_overlap", "base_bf16_master", "the same, overlapped copies"),
    "base_fp32_amp": Mode("native", "base_fp32_amp", "base_fp32_amp", "on the GPU: fp32, autocast"),
    "fsdp2_cpu": Mode("native", "fsdp2_cpu", "base_fp32_amp", "FSDP2 CPUOffloadPolicy"),
    "base_bf16": Mode("native", "base_bf16", "base_bf16", "on the GPU: bf16, no master", clips=False),
    "ao_bf16_grads": Mode(
        "native", "ao_bf16_grads", "base_bf16", "torchao CPUOffloadOptimizer, no master", clips=False
    ),
    "act_none": Mode("native", "act_none", "act_none", "everything stays", clips=False),
    "act_soc": Mode("native", "act_soc", "act_none", "torch save_on_cpu(pin_memory=True)", clips=False),
    "act_tt": Mode("native", "act_tt", "act_none", "torchtune OffloadActivations", clips=False),
    "act_trl": Mode("native", "act_trl", "act_none", "TRL OffloadActivations", clips=False),
    "act_ckpt": Mode("native", "act_ckpt", "act_ckpt", "checkpointed layers", clips=False),
    "act_ckpt_soc": Mode("native", "act_ckpt_soc", "act_ckpt", "the same, torch save_on_cpu", clips=False),
    "act_ckpt_tt": Mode("native", "act_ckpt_tt", "act_ckpt", "the same, torchtune", clips=False),
    "act_ckpt_trl": Mode("native", "act_ckpt_trl", "act_ckpt", "the same, TRL", clips=False),
    "ds_build": Mode("deepspeed", "build", "ds_gpu", "DeepSpeed: compiles its host kernel"),
    "ds_gpu": Mode("deepspeed", "gpu", "ds_gpu", "DeepSpeed on the GPU"),
    "ds_zero2": Mode("deepspeed", "zero2", "ds_gpu", "DeepSpeed ZeRO-2 offload"),
    "ds_zero2_overlap": Mode("deepspeed", "zero2_overlap", "ds_gpu", "DeepSpeed ZeRO-2 offload, overlap_comm"),
    "ds_superoffload_clip": Mode("deepspeed", "superoffload_clip", "ds_gpu", "DeepSpeed SuperOffload"),
}
NATIVE = [name for name, mode in MODES.items() if mode.program == "native" and not name.startswith("act_")]
ACTIVATIONS = [name for name in MODES if name.startswith("act_")]
DEEPSPEED = ["ds_build", "ds_gpu", "ds_zero2"]


@dataclass(frozen=True)
class Job:
    """The training job: a Llama shape, tokens per step as sequences of `seq`, iterations, device."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    seq: int
    tokens: int
    warmup: int
    steps: int
    device: str

    @property
    def batch(self) -> int:
        return self.tokens // self.seq


def measure(folder: Path, names: Sequence[str], job: Job, seconds_left: Callable[[], float]) -> list[dict[str, Any]]:
    """One row per mode, in this order. A mode that fails with clipping runs again without, and says so.

    `seconds_left()` is the time that may still be spent: modes that do not fit are stopped, or not started.
    """
    rows = []
    for name in names:
        plain = name.removesuffix(UNCLIPPED)
        clip = CLIP if MODES[plain].clips and plain == name else 0.0
        row = _run(folder, plain, job, clip, seconds_left())
        if row["status"] == "error" and row["clip"]:
            again = _run(folder, plain, job, 0.0, seconds_left())
            row = again | {"with_clipping": row["why"]}
        rows.append(row)
        print(f"  peer {name}: {row['status']} {row.get('ms', row.get('why'))}", file=sys.stderr, flush=True)
    return rows


def activation_offloading(folder: Path, name: str, model: Any) -> AbstractContextManager[object]:
    """torchtune's or TRL's offloading, to be entered around each forward of this model in this process, with the
    options that measure_native.py has for them. As both do themselves, the head keeps what it saves.
    """
    sys.path.insert(0, str((folder / "peer_site").resolve()))
    spec = importlib.util.spec_from_file_location("measure_native", folder / "measure_native.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} has no measure_native.py")
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    options = SimpleNamespace(device="cuda", max_fwd_stash=5, min_offload_size=1024)
    if name == "torchtune":
        context, keeps = native.torchtune_context(options, use_streams=True)
    else:
        context, keeps = native.trl_context(options, model)
    native.exempt_head(model, keeps)
    found: AbstractContextManager[object] = context
    return found


def compare(rows: Sequence[dict[str, Any]], torch_s: Mapping[int, float]) -> None:
    """Ratios, in place: to a row's own base at equal tokens, and to step.py's row `torch` at these tokens.

    The base clips like the row where such a base was measured; `base_clip` tells. `ratio_to_torch` is None for
    DeepSpeed, whose model is another.
    """
    measured = {(row["row"], row["tokens"], row["clip"]): row for row in rows if row["status"] == "ok"}
    for row in rows:
        mode = MODES[row["row"]]
        same_clip, other_clip = (
            measured.get((mode.base, row["tokens"], clip)) for clip in (row["clip"], not row["clip"])
        )
        base = same_clip or other_clip
        torch = torch_s.get(row["tokens"])
        ms = row.get("ms")
        row["base"] = mode.base
        row["base_clip"] = base["clip"] if base else None
        row["ratio_to_own_base"] = ms / base["ms"] if ms and base and base.get("ms") else None
        row["ratio_to_torch"] = ms / (torch * 1e3) if ms and torch and mode.program == "native" else None


def _run(folder: Path, name: str, job: Job, clip: float, seconds: float) -> dict[str, Any]:
    mode = MODES[name]
    row: dict[str, Any] = {"row": name, "system": mode.system, "tokens": job.tokens, "clip": clip > 0}
    if seconds < 20:
        return row | {"status": "skipped", "why": "no time left"}
    site = folder / "peer_site"
    if mode.program == "deepspeed" and (folder / "peer_site_deepspeed").is_dir():
        site = folder / "peer_site_deepspeed"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site.resolve()), os.environ.get("PYTHONPATH")]))
    }
    limit = int(min(SECONDS_PER_MODE, seconds - 5))
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "result.json"
        build_words = _native_words if mode.program == "native" else _deepspeed_words
        words = [sys.executable, str(folder / f"measure_{mode.program}.py")]
        words += build_words(mode.mode, job, clip, limit, output)
        started = time.perf_counter()
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        row["seconds"] = round(time.perf_counter() - started, 1)
        if not output.is_file():
            return row | {"status": "error", "why": (done.stderr or done.stdout).strip()[-600:]}
        found = json.loads(output.read_text())
    return row | (_native_row(found) if mode.program == "native" else _deepspeed_row(found[0]))


def _native_words(mode: str, job: Job, clip: float, limit_s: int, output: Path) -> list[str]:
    values = {
        "mode": mode,
        "layers": job.layers,
        "hidden": job.hidden,
        "intermediate": job.ffn,
        "heads": job.heads,
        "vocab": job.vocab,
        "seq": job.seq,
        "batch": job.batch,
        "clip": clip,
        "warmup": job.warmup,
        "iters": job.steps,
        "device": job.device,
        "timeout": limit_s,
        "json": output,
    }
    return ["--ckpt", *(word for key, value in values.items() for word in (f"--{key}", str(value)))]


def _deepspeed_words(mode: str, job: Job, clip: float, limit_s: int, output: Path) -> list[str]:
    values = {
        "modes": mode,
        "size": f"{job.layers},{job.hidden},{job.heads}",
        "vocab": job.vocab,
        "seq": job.seq,
        "micro-batch": job.batch,
        "clip": clip,
        "warmup": job.warmup,
        "steps": job.steps,
        "device": job.device,
        "timeout": limit_s,
        "out": output,
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def _native_row(found: Mapping[str, Any]) -> dict[str, Any]:
    if found["status"] != "ok":
        status = "error" if found["status"] in ("error", "crash", "oom") else found["status"]
        return {"status": status, "why": found.get("why", found["status"])}
    return {
        "status": "ok",
        "ms": found["ms_per_iter"],
        "host_step_ms": found["host_step_ms"],
        "parameters": round(found["params_m"] * 1e6),
        "device_peak_bytes": _bytes(found.get("peak_alloc_gib")),
        "pinned_bytes": _bytes(found.get("pinned_peak_gib")),
        "resident_bytes": _bytes(found.get("rss_gib")),
        "losses": found["losses"],
        "last_loss": found["losses"][-1],
        "raw": dict(found),
    }


def _deepspeed_row(found: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return {"status": "error", "why": found["error"][-600:]}
    if "ms_per_iter" not in found:
        return {"status": "ok", "raw": dict(found)}  # the build
    return {
        "status": "ok",
        "ms": found["ms_per_iter"],
        "host_ms_min": found["host_ms_min"],
        "host_ms_max": found["host_ms_max"],
        "parameters": found["params"],
        "device_peak_bytes": _bytes(found["gpu_peak_gib"]),
        "resident_bytes": _bytes(found["rss_gib"]),
        "losses": found["losses"],
        "last_loss": found["losses"][-1],
        "raw": dict(found),
    }


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'peer':>22} {'tokens':>7} {'clip':>5} {'ms/step':>9} {'x base':>7} {'x torch':>8} {'peak GiB':>9}  loss")
    for row in rows:
        if row["status"] != "ok" or "ms" not in row:
            print(f"{row['row']:>22} {row['tokens']:>7} {row['status']:>15}  {row.get('why', '')[-80:]!r}")
            continue
        x_base, x_torch = (f"{row[key]:.2f}" if row[key] else "-" for key in ("ratio_to_own_base", "ratio_to_torch"))
        print(
            f"{row['row']:>22} {row['tokens']:>7} {'on' if row['clip'] else 'off':>5} {row['ms']:9.1f} {x_base:>7}"
            f" {x_torch:>8} {(row['device_peak_bytes'] or 0) / GIB:9.2f}  {row['last_loss']}"
        )


def checked_names(text: str) -> list[str]:
    """Mode names separated by commas; `native`, `deepspeed` and `activations` stand for the usual ones. Raises
    ValueError.
    """
    groups = {"native": NATIVE, "deepspeed": DEEPSPEED, "activations": ACTIVATIONS, "none": []}
    names = [name for word in text.split(",") for name in groups.get(word, [word])]
    for name in names:
        if name.removesuffix(UNCLIPPED) not in MODES:
            raise ValueError(
                f"{name!r} is no mode: choose from native, deepspeed, activations, none, {', '.join(MODES)}, "
                f"any of them with {UNCLIPPED}"
            )
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--modes", default="native,deepspeed", help="names, or native, deepspeed")
    parser.add_argument("--tokens", default="8192", help="tokens per step, separated by commas")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--size", default="24,2048,8192,16,32000", help="layers, hidden, FFN, heads, vocabulary")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--time-limit-s", type=float, default=560.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        names = checked_names(arguments.modes)
        layers, hidden, ffn, heads, vocab = (int(word) for word in arguments.size.split(","))
        tokens_list = [int(word) for word in arguments.tokens.split(",")]
        warmup, steps, device = arguments.warmup, arguments.steps, arguments.device
    except ValueError as error:
        parser.error(str(error))
    ends = time.monotonic() + arguments.time_limit_s
    rows: list[dict[str, Any]] = []
    for tokens in tokens_list:
        job = Job(layers, hidden, ffn, heads, vocab, arguments.seq, tokens, warmup, steps, device)
        for name in names:
            rows += measure(arguments.folder, [name], job, lambda: ends - time.monotonic())
            compare(rows, {})
            if arguments.json:
                result = {"benchmark": "peers", "machine": describe(), "shape": arguments.size, "rows": rows}
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
