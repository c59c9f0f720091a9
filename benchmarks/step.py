"""A training step with the optimizer state in several places: time, device memory, host memory.

    python benchmarks/step.py --tokens 8192,32768 --json benchmarks/results/DATE-step.json
    python benchmarks/step.py --model 8b --tokens 16384 --rows auto:1 --device-memory 64GiB --json FILE

Each row runs in a process of its own. The base runs first and last; both are reported, so that a drift of the machine
shows. Rows are separated by commas:

    torch             bf16 weights, fp32 masters and moments on the GPU, clip_grad_norm_ and torch.optim.AdamW(fused)
    torch+unclipped   the same without clip_grad_norm_
    forward-backward  no optimizer at all, gradients are dropped (the base of --model 8b)
    0                 hostward.AdamW with everything on the device
    host:F            share F of the state on the host and stepped there
    streamed:F        share F of the state on the host, streamed through the device and stepped there
    auto:F            share F of the state on the host; hostward chooses which part of it is streamed
    mixS:F            the same with share S of it streamed
    serial-...        any of these without overlap (overlap=False)
    ...+bf16-moments  moments in bf16; ...+all-bf16: and no main weights
    ...+fp8-moments   moments in FP8; ...+fp8-moments-bf16: and no main weights
    ...+unclipped     without clipping
    ...+calm          clipping at a norm that no step reaches; of random tokens, every step reaches 1.0
    ...+early         all host steps are made in backward, as far as the step before did not clip; ...+earlyF: share F
    ...+staging4GiB   so many bytes of GPU staging buffers, instead of as many as hostward chooses
    host:1+weights    the weights of all layers but the last are on the host as well, and come when they are used
    ...+inputs        the inputs of all checkpointed layers but the last are on the host between forward and backward
    ...@N             N threads in the host step, instead of as many as hostward chooses

Clipping at 1.0 is on in every other row with an optimizer. The model is a Llama of transformers with bf16 weights and
checkpointed layers: 1.7b has 24 layers, hidden size 2048, FFN 8192, vocabulary 32,000 (1.74 G parameters); 8b has the
shape of Llama 3 8B (8.03 G), its loss computed in chunks, so that the logits never exist as a whole. Data are random
tokens. With --peers FOLDER other libraries run beside (peers.py). With --device-memory SIZE a row `auto:best` is added:
the largest share of the state on the device that fits, found by trying, under a limit that the allocator enforces.

Iterations follow one another without any synchronisation. `step_s` is the median time from the start of one to the
start of the next on the compute stream, `mean_step_s` the mean; `drain_s` is what the last step left to do after that.
Python's garbage collector stands still in that time. Enqueueing is timed on extra iterations with empty queues, since a
full queue makes every launch wait; the trace is taken on further ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import peers
from hostward.core.host_limits import host_memory
from training_row import NO_OPTIMIZER, SHAPES, TORCH, TORCH_UNCLIPPED, RowJob, measure, row_options

from machine import describe

GIB = 1 << 30
SHORTEST_ROW_S = 20.0
STREAMED_BYTES, HOST_BYTES = 10, 14
"""Host bytes of a bf16 parameter with a split master: 10 of state; stepped on the host, gradient and weight besides."""


class Board:
    """Rows as they come, and the file that holds them: what is cut short keeps the rows before."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows: list[dict[str, Any]] = []
        self.peers: list[dict[str, Any]] = []
        self._ends = time.monotonic() + arguments.time_limit_s

    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def run(self, name: str, tokens: int, limit_bytes: int | None = None, **facts: object) -> dict[str, Any]:
        """Measure one row in a process of its own and keep it."""
        row = {"status": "skipped", "why": "no time left"}
        if self.seconds_left() > SHORTEST_ROW_S:
            row = child(name, tokens, limit_bytes, self.seconds_left())
        row = {"row": name, "tokens": tokens, **row, **facts}
        self.rows.append(row)
        self.save()
        note = f"{row['step_s'] * 1e3:.1f} ms" if row["status"] == "ok" else f"{row['status']}: {row['why'][-300:]}"
        print(f"  {name} at {tokens} tokens: {note}", file=sys.stderr, flush=True)
        return row

    def run_peers(self, tokens: int) -> None:
        a = self.arguments
        shape = SHAPES[a.model]
        job = peers.Job(
            shape.layers, shape.hidden, shape.ffn, shape.heads, shape.vocab, a.seq, tokens, a.warmup, a.steps, a.device
        )
        for name in a.peer_modes:
            self.peers += peers.measure(a.peers, [name], job, self.seconds_left)
            self.save()

    def save(self) -> None:
        a = self.arguments
        derive(self.rows)
        torch_s = {row["tokens"]: row["step_s"] for row in measured(self.rows) if row["row"] == TORCH}
        peers.compare(self.peers, torch_s)
        if a.json is None:
            return
        parameters = SHAPES[a.model].parameters
        result = {
            "benchmark": "step",
            "machine": describe(),
            "shape": {"model": a.model, **asdict(SHAPES[a.model]), "seq": a.seq, "warmup": a.warmup, "steps": a.steps},
            "host_memory": {
                "available_bytes": host_memory().available_bytes,
                "all_streamed_bytes": STREAMED_BYTES * parameters,
                "all_host_bytes": HOST_BYTES * parameters,
            },
            "device_memory_limit_bytes": a.device_memory,
            "rows": self.rows,
            "peers": self.peers,
        }
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps(result, indent=1) + "\n")


def child(name: str, tokens: int, limit_bytes: int | None, seconds: float) -> dict[str, Any]:
    """One row in a new process of this program; a failure is a row that says why."""
    words = [sys.executable, *sys.argv, "--one", name, "--tokens", str(tokens)]
    if limit_bytes is not None:
        words += ["--limit-bytes", str(limit_bytes)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "why": f"not done after {seconds:.0f} s"}
    if done.returncode != 0:
        text = done.stderr.strip()
        out_of_memory = "OutOfMemoryError" in text or "MemoryLimitError" in text
        return {"status": "out of memory" if out_of_memory else "failed", "why": text[-1500:]}
    return {"status": "ok", **json.loads(done.stdout.splitlines()[-1])}


def one(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """One row, in this process."""
    trace = None
    if arguments.trace is not None:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        trace = arguments.trace / f"{arguments.one.replace(':', '-')}-{tokens}.json"
    device = torch.device(arguments.device)
    job = RowJob(
        arguments.one,
        SHAPES[arguments.model],
        tokens,
        arguments.seq,
        arguments.warmup,
        arguments.steps,
        device,
        arguments.limit_bytes,
        not arguments.no_trace,
        trace,
    )
    return measure(job)


def best_fraction(board: Board, tokens: int, limit_bytes: int, tries: int) -> None:
    """Row `auto:best`: shares of the state that stay on the device, tried until the largest that fits is known well.

    The first guess fills what the row `auto:1` left free (`streamed:1` where that does not fit the host); each trial
    moves it by what it missed or left. The best trial gets the name; the others stay `auto:F` with `"trial": true`.
    """
    for kind in ("auto", "streamed"):
        known = [r for r in board.rows if r["row"] == f"{kind}:1" and r["tokens"] == tokens]
        full = known[0] if known else board.run(f"{kind}:1", tokens)
        if full["status"] == "ok":
            break
    else:
        return
    state_bytes = full["offloaded_bytes"] / full["placed_fraction"]
    usable_bytes = 0.95 * limit_bytes  # a caching allocator does not fill its limit to the last byte

    def left_bytes(row: dict[str, Any]) -> float:
        return usable_bytes - max(row["device_peak_bytes"], row["warmup_peak_bytes"])

    fraction = min(1.0, max(0.0, 1 - left_bytes(full) / state_bytes))
    fits: list[dict[str, Any]] = []
    for _ in range(tries):
        row = board.run(f"{kind}:{fraction:.4f}", tokens, limit_bytes, trial=True)
        if row["status"] == "ok" and row["device_used_bytes"] <= limit_bytes:
            fits.append(row)
            if left_bytes(row) < 0.02 * limit_bytes or fraction == 0.0:
                break
            fraction = max(0.0, fraction - left_bytes(row) / state_bytes)
        elif row["status"] in ("ok", "out of memory"):
            if fraction == 1.0:
                break
            fraction = min(1.0, fraction + 0.05 * limit_bytes / state_bytes)
        else:
            break
        if any(abs(r["asked_fraction"] - fraction) < 0.005 for r in fits):
            break
    if fits:
        best = min(fits, key=lambda r: r["asked_fraction"])
        best |= {"row": f"{kind}:best", "trial": False}
    board.save()


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["status"] == "ok" and not row.get("again")]


def derive(rows: Sequence[dict[str, Any]]) -> None:
    """Ratios and differences at equal tokens, in place."""
    by_name = {(row["row"], row["tokens"]): row for row in measured(rows)}
    for row in rows:
        if row["status"] != "ok":
            continue
        bases = {
            "torch": TORCH,
            "torch_unclipped": TORCH_UNCLIPPED,
            "forward_backward": NO_OPTIMIZER,
            "fraction_0": "0",
        }
        for key, base_name in bases.items():
            base = by_name.get((base_name, row["tokens"]))
            row[f"ratio_to_{key}"] = row["step_s"] / base["step_s"] if base else None
        zero = by_name.get(("0", row["tokens"]))
        off = sum(row.get("placed_parameters", {}).get(place, 0) for place in ("host", "streamed"))
        if zero and off:
            row["same_loss_as_0"] = row["last_loss"] == zero["last_loss"]
            row["host_bytes_per_offloaded_parameter"] = (
                row["resident_added_bytes"] - zero["resident_added_bytes"]
            ) / off
            if row.get("device_allocated_bytes"):
                fell = zero["device_allocated_bytes"] - row["device_allocated_bytes"]
                row["device_fell_bytes"] = fell
                row["device_fell_over_promised"] = fell / row["offloaded_bytes"]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'row':>18} {'tokens':>7} {'ms/step':>8} {'x torch':>8} {'x fw-bw':>8} {'x 0':>6} {'exposed':>8} "
        f"{'hidden':>7} {'us/bucket':>9} {'alloc':>7} {'peak':>7} {'pinned':>7} {'B/p':>6} {'streamed':>8}  loss"
    )

    def text(value: float | None, width: int, scale: float = 1.0, digits: int = 2) -> str:
        return f"{value * scale:{width}.{digits}f}" if value is not None else "-".rjust(width)

    for row in rows:
        if row["status"] != "ok":
            print(f"{row['row']:>18} {row['tokens']:>7} {row['status']}: {row['why'].splitlines()[-1][:100]}")
            continue
        trace, placed = row.get("trace", {}), row.get("placed_parameters")
        off = placed["host"] + placed["streamed"] if placed else 0
        print(
            f"{row['row']:>18} {row['tokens']:>7} {text(row['step_s'], 8, 1e3, 1)} {text(row['ratio_to_torch'], 8)} "
            f"{text(row['ratio_to_forward_backward'], 8)} {text(row['ratio_to_fraction_0'], 6)} "
            f"{text(trace.get('exposed_s'), 8, 1e3, 1)} {text(trace.get('hidden_s'), 7, 1e3, 1)} "
            f"{text(row.get('enqueue_per_bucket_s'), 9, 1e6, 1)} "
            f"{text(row.get('device_allocated_bytes'), 7, 1 / GIB)} {text(row.get('device_peak_bytes'), 7, 1 / GIB)} "
            f"{text(row.get('pinned_bytes'), 7, 1 / GIB)} {text(row.get('host_bytes_per_offloaded_parameter'), 6)} "
            f"{text(placed['streamed'] / off if placed and off else None, 8)}  {row['last_loss']:.4f}"
        )


def size_bytes(text: str) -> int:
    """64GiB, 80GB or plain bytes."""
    for unit, factor in (("GiB", GIB), ("GB", 10**9)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def parsed() -> tuple[argparse.Namespace, list[str], list[int]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7b", choices=list(SHAPES))
    parser.add_argument("--tokens", default="8192", help="tokens per step, separated by commas")
    parser.add_argument("--rows", default="0,host:0.5,auto:0.5,host:1,streamed:1,auto:1,serial-host:1")
    parser.add_argument("--base", help=f"row that runs first and last: {TORCH}, {NO_OPTIMIZER} or none")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: smoke test only")
    parser.add_argument("--device-memory", type=size_bytes, metavar="SIZE", help="adds the row auto:best")
    parser.add_argument("--tries", type=int, default=3, help="trials for auto:best")
    parser.add_argument("--peers", type=Path, help="folder with the peers' measuring programs")
    parser.add_argument("--peer-modes", default="native", help="see peers.py")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write each row's trace there")
    parser.add_argument("--no-trace", action="store_true", help="no extra iterations for the trace and for enqueueing")
    parser.add_argument("--time-limit-s", type=float, default=3600.0, help="rows that would end later are skipped")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help="run this one row and print it as JSON (used by the program itself)")
    parser.add_argument("--limit-bytes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.base is None:
        arguments.base = NO_OPTIMIZER if arguments.model == "8b" else TORCH
    names = [name for name in arguments.rows.split(",") if name]
    try:
        for name in [*names, *([] if arguments.base == "none" else [arguments.base])]:
            row_options(name)
        arguments.peer_modes = peers.checked_names(arguments.peer_modes) if arguments.peers else []
        tokens_list = [int(word) for word in arguments.tokens.split(",")]
    except ValueError as error:
        parser.error(str(error))
    for tokens in tokens_list:
        if tokens < arguments.seq or tokens % arguments.seq:
            parser.error(f"{tokens} tokens are no multiple of a sequence of {arguments.seq}")
    if arguments.device == "cpu" and arguments.device_memory is not None:
        parser.error("--device-memory needs --device cuda: it measures what the device holds")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; --device cpu is a smoke test")
    return arguments, names, tokens_list


def main() -> None:
    arguments, names, tokens_list = parsed()
    if arguments.one is not None:
        print(json.dumps(one(arguments, tokens_list[0])))
        return
    board = Board(arguments)
    for tokens in tokens_list:
        if arguments.base != "none":
            board.run(arguments.base, tokens)
        for name in names:
            board.run(name, tokens)
        if arguments.device_memory is not None:
            best_fraction(board, tokens, arguments.device_memory, arguments.tries)
        board.run_peers(tokens)
        if arguments.base != "none":
            board.run(arguments.base, tokens, again=True)
    board.save()
    print_table(board.rows)
    if board.peers:
        peers.print_table(board.peers)


if __name__ == "__main__":
    main()
