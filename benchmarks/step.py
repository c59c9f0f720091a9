"""A training step on a GPU at several offload fractions: time, device memory and host memory.

Each row runs in a process of its own, so that its resident set is its own:
    torch      fp32 masters and moments on the GPU, torch.optim.AdamW(fused=True) and clip_grad_norm_
    0 ... 1    hostward.AdamW at that fraction, clipping included

The model is a Llama of transformers with bf16 weights and checkpointed layers; by default 1.74 G parameters: 24 layers,
hidden size 2048, FFN 8192, vocabulary 32,000. Data are random tokens: the time of a step does not depend on them.

    python benchmarks/step.py --fractions 0,0.25,0.5,0.75,1 --json benchmarks/results/DATE-step.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hostward.hardware import resident_bytes

from machine import describe

BASE = "torch"


def build(arguments: argparse.Namespace) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=arguments.hidden // 128,
        max_position_embeddings=arguments.seq,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    return model.train()


class TorchMasters:
    """bf16 weights, fp32 masters and moments on the GPU, stepped by torch's fused AdamW."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = list(model.parameters())
        self._masters = [torch.nn.Parameter(p.detach().float()) for p in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = weight.grad.float()  # type: ignore[union-attr]
            weight.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_(self._weights, self._masters)

    def zero_grad(self) -> None:
        pass


def one(arguments: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    import hostward

    model = build(arguments)
    parameters = sum(p.numel() for p in model.parameters())
    torch.cuda.synchronize()
    resident_before = resident_bytes()
    started = time.perf_counter()
    optimizer: Any
    if arguments.one == BASE:
        optimizer = TorchMasters(model)
    else:
        optimizer = hostward.AdamW(
            model, lr=1e-4, weight_decay=0.1, max_grad_norm=1.0, offload_fraction=float(arguments.one)
        )
    torch.cuda.synchronize()
    setup_s = time.perf_counter() - started
    tokens = torch.randint(0, 32000, (arguments.batch, arguments.seq), device="cuda")
    step_s, optimizer_s = [], []
    for iteration in range(arguments.warmup + arguments.steps):
        if iteration == arguments.warmup:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        end = time.perf_counter()
        step_s.append(end - start)
        optimizer_s.append(end - middle)
    last_loss = loss.item()
    del loss
    gc.collect()
    row = {
        "row": arguments.one,
        "parameters": parameters,
        "step_s": statistics.median(step_s[arguments.warmup :]),
        "step_s_all": step_s[arguments.warmup :],
        "optimizer_s": statistics.median(optimizer_s[arguments.warmup :]),
        "setup_s": setup_s,
        "last_loss": last_loss,
        "device_allocated_bytes": torch.cuda.memory_allocated(),
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "resident_bytes": resident_bytes(),
        "resident_added_bytes": resident_bytes() - resident_before,
    }
    if arguments.one != BASE:
        plan, ledger = optimizer.plan, optimizer.backend.ledger
        row |= {
            "placed_fraction": plan.placed_fraction,
            "offloaded_bytes": plan.offloaded_bytes,
            "offloaded_parameters": sum(b.numel for b in plan.buckets if b.placement == "host"),
            "pinned_bytes": ledger.pinned_bytes,
            "host_threads": optimizer.backend.threads,
        }
    return row


def derive(rows: list[dict[str, Any]]) -> None:
    """Ratios and differences against fraction 0, in place."""
    by_name = {row["row"]: row for row in rows}
    zero, base = by_name.get("0"), by_name.get(BASE)
    for row in rows:
        row["ratio_to_torch"] = row["step_s"] / base["step_s"] if base else None
        row["ratio_to_fraction_0"] = row["step_s"] / zero["step_s"] if zero else None
        offloaded = row.get("offloaded_parameters")
        if zero and offloaded:
            fell = zero["device_allocated_bytes"] - row["device_allocated_bytes"]
            row["device_fell_bytes"] = fell
            row["device_fell_over_promised"] = fell / row["offloaded_bytes"]
            added = row["resident_added_bytes"] - zero["resident_added_bytes"]
            row["host_bytes_per_offloaded_parameter"] = added / offloaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fractions", default="0,0.25,0.5,0.75,1")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help="run this one row and print it as JSON (used by the program itself)")
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(one(arguments)))
        return
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    rows = []
    for name in [BASE, *arguments.fractions.split(",")]:
        words = [sys.executable, *sys.argv, "--one", name]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    derive(rows)
    print(f"{'row':>6} {'ms/step':>8} {'x torch':>8} {'x 0':>6} {'optim ms':>9} {'dev GiB':>8} {'peak':>7} {'B/p':>9}")
    for row in rows:
        per_parameter = row.get("host_bytes_per_offloaded_parameter")
        print(
            f"{row['row']:>6} {row['step_s'] * 1e3:8.1f} {row['ratio_to_torch']:8.2f} "
            f"{row['ratio_to_fraction_0'] or float('nan'):6.2f} {row['optimizer_s'] * 1e3:9.1f} "
            f"{row['device_allocated_bytes'] / 2**30:8.2f} {row['device_peak_bytes'] / 2**30:7.2f} "
            + (f"{per_parameter:9.2f}" if per_parameter else "")
        )
    if arguments.json:
        shape = {k: getattr(arguments, k) for k in ("layers", "hidden", "ffn", "seq", "batch", "warmup", "steps")}
        result = {"benchmark": "step", "machine": describe(), "shape": shape, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
