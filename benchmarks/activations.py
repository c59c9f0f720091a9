"""What layers save for backward, kept, recomputed, offloaded: time, device memory, host memory, and equal gradients.

    python benchmarks/activations.py --tokens 8192 --seq 4096 --json benchmarks/results/DATE-activations.json
    python benchmarks/activations.py --tokens 32768 --seq 32768 --rows checkpoint,offload:23+checkpoint --json FILE

Forward and backward alone, without an optimizer; gradients are dropped. `step_s` is the median of iterations that are
issued one after another, as a training loop does; `alone_s` that of iterations that each begin on an idle GPU, where
issuing the first layers is part of the time. Each row runs in a process of its own. The
first row is the base and runs last once more, so that a drift of the machine shows. Rows are separated by commas, what
makes up a row by plus signs (`offload:7+elementwise`, `offload:10+last:14`):

    keep           everything stays
    checkpoint     each layer keeps its input and is recomputed (block:M: the first M layers; last:M: the last M;
                   layers:A-B: layers A to B - 1; each:K: every K-th, and the parts below are of the others alone)
    elementwise    norms and activations are recomputed within layers: recompute=("layernorm", "mlp_act")
    act, norms:M   of these, activations alone; norms in the first M layers alone
    mlp            norms and all of the MLPs are recomputed within layers: recompute=("layernorm", "mlp")
    offload:N      the first N layers' saved tensors leave (offload2:N: with double buffering)
    save_on_cpu    torch.autograd.graph.save_on_cpu(pin_memory=True) around the whole forward
    torchtune, trl OffloadActivations of these around the whole forward, but for the head; they need --peers

With --peers FOLDER other libraries' programs may follow (peers.py); theirs is a whole step, with AdamW on the GPU, and
each has a base of its own.

`gradient_bits` is a sum over the bits of all gradients of the first iteration: rows with the same number have, as far
as it can tell, the same gradients. That iteration alone runs with deterministic algorithms. The models are those of
step.py, and `wide`: four layers of hidden size 8,192.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import peers
from training_row import SEED, SHAPES, Clock, build, device_memory, loss_of, synchronise

from machine import describe

GIB = 1 << 30
BATCHES = 4
_PART = re.compile(
    r"keep|checkpoint|elementwise|act|mlp|save_on_cpu|torchtune|trl|(block|last|each|norms|offload2?):\d+|layers:\d+-\d+"
)
_COUNTED = {"block": "first", "last": "last", "each": "each", "norms": "norms"}
_OTHERS = ("save_on_cpu", "torchtune", "trl")
_ROWS = (
    "keep, checkpoint, block:M, last:M, layers:A-B, each:K, elementwise, act, norms:M, mlp, offload:N, offload2:N, "
    "save_on_cpu, torchtune, trl, or several with +"
)


@dataclass(frozen=True)
class Row:
    """What becomes of saved tensors: how many layers' are offloaded, and how many layers are checkpointed."""

    offloaded: int = 0
    double_buffering: bool = False
    save_on_cpu: bool = False
    torchtune: bool = False
    trl: bool = False
    elementwise: bool = False
    act: bool = False
    mlp: bool = False
    norms: int = 0
    checkpoint: bool = False
    first: int = 0
    last: int = 0
    between: tuple[int, int] = (0, 0)
    each: int = 0

    def by_others(self) -> bool:
        """Whether other libraries take what layers save."""
        return self.save_on_cpu or self.torchtune or self.trl

    def unpredicted(self) -> bool:
        """Whether predictions leave it out: layers that recompute other modules than a plan's choices do, which are
        norms and activations together, or that are counted without those in between.
        """
        return self.act or self.mlp or bool(self.norms or self.each)

    def recomputed(self, layers: int) -> dict[str, int]:
        """What is recomputed within layers, and in how many; none of it in the last, checkpointed ones."""
        open_layers = layers - self.last
        counts = {"layernorm": open_layers if self.elementwise or self.mlp else self.norms}
        counts["mlp"] = open_layers if self.mlp else 0
        counts["mlp_act"] = open_layers if (self.elementwise or self.act) and not self.mlp else 0
        return {name: count for name, count in counts.items() if count}

    def checkpoints(self, number: int, layers: int) -> bool:
        """Whether a layer is recomputed from its input."""
        start, end = self.between
        some = number < self.first or number >= layers - self.last or start <= number < end
        return self.checkpoint or some or (self.each > 0 and (number + 1) % self.each == 0)


def row_of(text: str) -> Row:
    """Raises ValueError for a name that is none of a row."""
    found: dict[str, Any] = {}
    for part in text.split("+"):
        if _PART.fullmatch(part) is None:
            raise ValueError(f"{part!r} in {text!r} is no row: {_ROWS}")
        kind, _, count = part.partition(":")
        if kind in ("offload", "offload2"):
            found |= {"offloaded": int(count), "double_buffering": kind == "offload2"}
        elif kind == "layers":
            start, end = count.split("-")
            found["between"] = int(start), int(end)
        elif kind in _COUNTED:
            found[_COUNTED[kind]] = int(count)
        elif kind != "keep":
            found[kind] = True
    if sum(found.get(name, False) for name in _OTHERS) > 1:
        raise ValueError(f"{text!r} has more than one of {', '.join(_OTHERS)}")
    if found.get("each") and found.keys() & {"first", "last", "between"}:
        raise ValueError(f"{text!r} checkpoints some layers twice")
    return Row(**found)


def measure(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    """One row, in this process."""
    row, device = row_of(text), torch.device(arguments.device)
    model: Any = build(SHAPES[arguments.model], arguments.seq, device)
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = row.checkpoints(number, len(layers))
    run = None
    others = [layer for i, layer in enumerate(layers) if not row.each or (i + 1) % row.each]
    if row.offloaded or row.recomputed(len(others)):
        import hostward

        how = None
        if row.offloaded:
            how = hostward.Activations(num_layers=row.offloaded, double_buffering=row.double_buffering)
        run = hostward.attach(model, activations=how, recompute=row.recomputed(len(others)) or None, layers=others)
    other = "torchtune" if row.torchtune else "trl" if row.trl else None
    peer = None if other is None else peers.activation_offloading(arguments.peers, other, model)
    generator = torch.Generator().manual_seed(SEED + 1)
    size = (arguments.tokens // arguments.seq, arguments.seq)
    vocab = SHAPES[arguments.model].vocab
    batches = [torch.randint(0, vocab, size, generator=generator).to(device) for _ in range(BATCHES)]

    def iterate(number: int) -> torch.Tensor:
        for weight in model.parameters():
            weight.grad = None
        save = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda") if row.save_on_cpu else peer
        with save or contextlib.nullcontext():
            loss = loss_of(model, batches[number % BATCHES], SHAPES[arguments.model].loss_chunk)
        loss.backward()
        return loss.detach()

    # Some kernels, of the embedding's backward and of cuDNN's attention among others, add up in any order otherwise.
    torch.use_deterministic_algorithms(True)  # with warnings alone, flash attention adds in any order
    torch.backends.cuda.enable_cudnn_sdp(False)
    started = time.perf_counter()
    loss = iterate(0)
    synchronise(device)
    first_s = time.perf_counter() - started
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    bits = sum(int(p.grad.view(torch.int16).to(torch.int64).sum()) for p in model.parameters())
    for number in range(1, arguments.warmup):
        iterate(number)
    synchronise(device)
    on_gpu = device.type == "cuda"
    weights_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times_s, issue_s = [], []
    for number in range(arguments.steps):
        started = time.perf_counter()
        iterate(number)
        issue_s.append(time.perf_counter() - started)
        synchronise(device)
        times_s.append(time.perf_counter() - started)
    clock = Clock(device)
    for number in range(arguments.steps + 1):
        iterate(number)
        clock.mark()
    durations_s = clock.durations_s()
    found: dict[str, Any] = {
        "step_s": statistics.median(durations_s),
        "step_s_all": durations_s,
        "alone_s": statistics.median(times_s),
        "alone_s_all": times_s,
        "issue_s": statistics.median(issue_s),
        "first_step_s": first_s,
        "loss": loss.item(),
        "gradient_bits": bits,
        "before_bytes": weights_bytes,
        **(device_memory() if on_gpu else {}),
    }
    if run is not None:
        report = run.report()
        iterations = arguments.warmup + 2 * arguments.steps + 1
        found |= {
            "offloaded_bytes": report.offloaded_bytes // iterations,
            "held_bytes": report.held_bytes // iterations,
            "on_demand_bytes": report.on_demand_bytes // iterations,
            "host_bytes": report.host_bytes,
            "report": report.explain(),
        }
        run.detach()
    return found


def child(arguments: argparse.Namespace, text: str, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", text]
    for name in ("model", "tokens", "seq", "warmup", "steps", "device", "peers"):
        if getattr(arguments, name) is not None:
            command += [f"--{name}", str(getattr(arguments, name))]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "why": f"not done within {limit_s:.0f} s"}
    if done.returncode != 0:
        return {"status": "failed", "why": done.stderr.strip()[-800:]}
    return {"status": "ok", **json.loads(done.stdout.strip().splitlines()[-1])}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    base = next((r for r in rows if r["status"] == "ok"), None)
    print(
        f"{'row':28} {'ms':>9} {'alone ms':>9} {'issue ms':>9} {'x base':>7} {'peak GiB':>9} {'host GiB':>9}  gradients"
    )
    for r in rows:
        if r["status"] != "ok" or base is None:
            print(f"{r['row']:28} {r['status']}: {r.get('why', '')[-120:]}")
            continue
        same = "yes" if r["gradient_bits"] == base["gradient_bits"] else "NO"
        peak, host = r.get("device_peak_bytes", 0) / GIB, r.get("host_bytes", 0) / GIB
        ratio = r["step_s"] / base["step_s"]
        times = f"{r['step_s'] * 1e3:9.1f} {r['alone_s'] * 1e3:9.1f} {r['issue_s'] * 1e3:9.1f} {ratio:7.3f}"
        print(f"{r['row']:28} {times} {peak:9.2f} {host:9.2f}  {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument(
        "--rows",
        default="keep,checkpoint,elementwise,offload:4,offload:7+elementwise,offload:10+last:14,offload:23+checkpoint",
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: smoke test only")
    parser.add_argument("--row-limit-s", type=float, default=240.0)
    parser.add_argument("--peers", type=Path, help="folder with the peers' measuring programs")
    parser.add_argument("--peer-modes", default="", help="their programs: see peers.py")
    parser.add_argument("--time-limit-s", type=float, default=3600.0, help="rows that would end later are skipped")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(arguments, arguments.one)))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --device cpu is a smoke test")
    names = arguments.rows.split(",")
    try:
        for name in names:
            row = row_of(name)
            if (row.torchtune or row.trl) and arguments.peers is None:
                raise ValueError(f"row {name} needs --peers")
        modes = peers.checked_names(arguments.peer_modes) if arguments.peer_modes else []
    except ValueError as error:
        parser.error(str(error))
    ends = time.monotonic() + arguments.time_limit_s
    shape = SHAPES[arguments.model]
    job = peers.Job(
        shape.layers, shape.hidden, shape.ffn, shape.heads, shape.vocab, arguments.seq, arguments.tokens,
        arguments.warmup, arguments.steps, arguments.device,
    )  # fmt: skip
    facts: dict[str, Any] = {"command": " ".join(sys.argv), "machine": describe(), "shape": asdict(shape)}
    facts |= {"tokens": arguments.tokens, "seq": arguments.seq, "rows": [], "peers": []}

    def write() -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(facts, indent=1) + "\n")

    rows, others = facts["rows"], facts["peers"]
    for name in [*names, names[0]]:
        left_s = ends - time.monotonic()
        if left_s < arguments.row_limit_s / 8:
            rows.append({"row": name, "status": "skipped", "why": "no time left"})
            continue
        rows.append({"row": name, **child(arguments, name, min(arguments.row_limit_s, left_s))})
        print(f"  {name}: {rows[-1].get('step_s', rows[-1].get('why'))}", file=sys.stderr, flush=True)
        write()
    for mode in modes:
        others += peers.measure(arguments.peers, [mode], job, lambda: ends - time.monotonic())
        peers.compare(others, {})
        write()
    print_table(rows)
    if others:
        peers.print_table(others)


if __name__ == "__main__":
    main()
