"""A recipe on several GPUs of one node: step time and memory by sequence length and share of the state on the host.

    torchrun --nproc-per-node 8 benchmarks/scaling.py --recipe qwen3_30b_a3b_pretrain_config \\
        --lengths 8192,16384,32768 --fractions 0,0.25,0.5,0.75,1 --json benchmarks/results/DATE-scaling.json [OPTIONS]

OPTIONS are those of `hostward train`. Each rank trains on one sequence per step. Every row is prepared as `hostward
train` would, clipping on, placement chosen by measured rates (`optimizer.offload_mix=auto`); a row at fraction 0 comes
first for each length, and is what the others are compared with. Columns:

    step       median seconds from the start of an iteration to that of the next on the compute stream, slowest rank
    ratio      step over that of fraction 0 at the same length
    floor      the same ratio, if the host's memory and each direction of the link did what they do alone (below)
    both       the same, if a link besides carried in both directions together what it does when both are full
    held       the same, if before the norm no more is read than the staging slots of the row hold
    device     most bytes allocated on a GPU, and reserved; host: bytes of all ranks, pinned ones in brackets
    same       losses and norms of all iterations are those of fraction 0 in every bit (with --deterministic)

    python benchmarks/scaling.py --again RESULTS.json ... --json benchmarks/results/DATE-floors.json

computes the floors anew from what earlier runs measured, without a GPU, and beside them what each GPU computed at
fraction 0: matrix operations of forward, and twice as many in backward, over the seconds of a step. What is computed
again is left out.

One process (`torchrun --nproc-per-node 1`) shows what several take beyond what they share: compare `over floor`.

Roofs are measured by all ranks at once before each row, because hosts that are shared change from minute to minute:
parameters per second that the host's cores read, modify and write, bytes per second of the links, bytes per second of
the host's memory with both. With an exact norm the state that is on the host is written after backward, so the floor is

    base + max(0, after - forward)
    after = min over s of max((1 - s) P / cores, B s P / link, (left + 2 (1 - s) P) / link,
                              ((2 B + 8) (1 - s) P + B s P + left) / memory)
    left = max(0, B s P - (base - forward) link)

with P parameters on the host, base and forward the seconds of an iteration and of its forward at fraction 0, and s the
share that is streamed: B bytes of it, 10 with fp32 state, are written, and read, as far as the link can while backward
runs. Of a parameter stepped on the host memory moves 2 B + 6 bytes in the step, at the rate of the cores for 26, and 2
for its weight, which cross the link as well.

`both` has one limit more, which the sum of both directions meets: (B s P + left + 2 (1 - s) P) / (2 duplex), by the
rate of one direction while the other is full as well.

`held` has left = max(B s P - slots, ...) besides: state that is read while backward runs lies on the GPU until the
norm is known, in memory that backward has freed. The first two say what more memory could bring, this one what is left
with the memory that the row took.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from capacity import FORMATS
from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.core.inventory import Dtype, state_bytes_per_element
from hostward.core.placement import HOST_STEP_BYTES, host_step_bytes
from hostward.optim.param_groups import checked_form
from hostward.runtime.backend import Tier
from hostward.runtime.backend_choice import backend_for
from hostward.runtime.calibrate import Links, ReadModifyWrite
from hostward.trainer import loop, setup
from hostward.trainer.garbage_collection import manual_gc_enabled
from hostward.trainer.process_group import Ranks
from hostward.trainer.run import Run
from hostward.trainer.workload import recipe_workload
from roofs import rmw_alone, rmw_with_copies
from training_row import STATES, rates_of

from machine import describe

GIB = 1 << 30
SHARES = [share / 100 for share in range(101)]


def measured_roofs(ranks: Ranks) -> dict[str, Any]:
    """Of this rank while all others measure the same, and their sums."""
    backend = backend_for(torch.device("cuda", ranks.local_rank), None)
    threads = backend.threads
    links, loop_ = Links(backend), ReadModifyWrite(threads)
    mine: dict[str, float] = {}
    ranks.gather(None)
    mine["d2h_bytes_per_s"] = links.rate(["d2h"])
    ranks.gather(None)
    mine["duplex_each_way_bytes_per_s"] = links.rate(["h2d", "d2h"])
    ranks.gather(None)
    alone = rmw_alone(loop_, threads)
    mine["parameters_per_s"] = alone["parameters_per_s"]
    ranks.gather(None)
    both = rmw_with_copies(loop_, links, alone)
    mine["memory_bytes_per_s"] = max(both["dram_bytes_per_s"], alone["bytes_per_s"])
    backend.free(links.host)
    of_ranks = ranks.gather(mine)
    sums = {name: sum(one[name] for one in of_ranks) for name in mine}
    return {"threads_per_rank": threads, "of_ranks": of_ranks, **sums}


def element_bytes(form: str) -> int:
    """State of a bf16 weight in a format of FORMATS, without the scales of blocks."""
    found = checked_form(dict(STATES[form]) if form in STATES else None, use_torch_optimizer=False)
    return state_bytes_per_element(found.master_kind(Dtype.BF16), found)


def after_norm_s(
    parameters: float,
    backward_s: float,
    roofs: dict[str, Any],
    *,
    both_ways: bool,
    slot_bytes: float = math.inf,
    form: str = "fp32",
) -> float:
    """Least seconds between the norm and the last weight's arrival, for so many parameters and staging slots of the
    node.
    """
    link, found, each = roofs["d2h_bytes_per_s"], [], element_bytes(form)
    step_bytes = host_step_bytes(state_bytes=each, weight_bytes=2)
    for s in SHARES:
        on_host, state_bytes = (1 - s) * parameters, each * s * parameters
        left_bytes = max(0.0, state_bytes - backward_s * link, state_bytes - slot_bytes)
        there_bytes = left_bytes + 2 * on_host
        limits_s = [
            on_host * step_bytes / HOST_STEP_BYTES / roofs["parameters_per_s"],
            state_bytes / link,
            there_bytes / link,
            ((step_bytes + 2) * on_host + state_bytes + left_bytes) / roofs["memory_bytes_per_s"],
        ]
        if both_ways:
            limits_s.append((state_bytes + there_bytes) / (2 * roofs["duplex_each_way_bytes_per_s"]))
        found.append(max(limits_s))
    return min(found)


class Clock:
    """Seconds on the compute stream: from iteration to iteration, and of each forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._begun: list[Any] = []
        self._ended: list[Any] = []
        model.register_forward_pre_hook(lambda *_: self._begun.append(_now()))
        model.register_forward_hook(lambda *_: self._ended.append(_now()))

    def forward_s(self, first: int) -> float:
        pairs = zip(self._begun[first:], self._ended[first:], strict=True)
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs)


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def row(a: argparse.Namespace, ranks: Ranks, length: int, fraction: float, mix: str, form: str) -> dict[str, Any]:
    """Prepared, trained for --warmup and --steps iterations, measured, and let go."""
    words = [
        *a.options,
        f"model.seq_length={length}",
        f"train.global_batch_size={ranks.size}",
        "train.micro_batch_size=1",
        f"train.train_iters={a.warmup + a.steps + 3}",
        "dataset.format=mock",
        f"model.deterministic_mode={a.deterministic}",
        *FORMATS[form],
    ]
    if fraction:
        words += ["optimizer.optimizer_cpu_offload=True", f"optimizer.optimizer_offload_fraction={fraction}"]
        share, _, threads = mix.partition("@")
        words += [f"optimizer.offload_mix={share}"] + [f"optimizer.host_threads={threads}"] * bool(threads)
    began_s = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    run = setup.prepare(a.recipe, apply_overrides(recipes.load(a.recipe), words))
    prepared_s = time.perf_counter() - began_s
    clock, starts = Clock(run.model), []
    with loop.deterministic(a.deterministic), manual_gc_enabled(run.config.train):
        for _ in range(a.warmup + a.steps):
            starts.append(_now())
            loop.train_iteration(run)
        starts.append(_now())
        torch.cuda.synchronize()
        run.optimizer.wait()
    loop.collect(run, everything=True)
    steps = [b.elapsed_time(c) / 1e3 for b, c in zip(starts[a.warmup :], starts[a.warmup + 1 :], strict=False)]
    ledger = run.optimizer.backend.ledger
    placements: dict[str, int] = {}
    for bucket in run.optimizer.plan.buckets:
        placements[bucket.placement.value] = placements.get(bucket.placement.value, 0) + bucket.numel
    mine = {
        "step_s": statistics.median(steps),
        "steps_s": steps,
        "forward_s": clock.forward_s(a.warmup),
        "device_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "reserved_bytes_by_stream": reserved_by_stream(),
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
        "host_bytes": ledger.total_bytes(Tier.HOST),
        "pinned_bytes": ledger.pinned_bytes,
        "parameters_by_placement": placements,
        "slot_bytes": run.slot_bytes,
        "rates": rates_of(run.optimizer),
        "prepared_s": prepared_s,
    }
    if a.trace is not None and fraction:
        with loop.deterministic(a.deterministic), manual_gc_enabled(run.config.train):
            traced(run, a.trace / f"{length}-{fraction}-{mix.replace('@', '-')}-{form}-rank{ranks.rank}.json")
    found = {
        "length": length,
        "fraction": fraction,
        "mix": mix,
        "state": form,
        "status": "ok",
        "losses": [loss.hex() for loss in run.losses],
        "norms": [norm.hex() for norm in run.grad_norms],
        "of_ranks": ranks.gather(mine),
    }
    if run.attachment is not None:
        run.attachment.detach()
    return found


def reserved_by_stream() -> dict[str, int]:
    """Bytes that torch's allocator keeps for each stream, which no other can have."""
    found: dict[str, int] = {}
    for segment in torch.cuda.memory_snapshot():
        found[str(segment["stream"])] = found.get(str(segment["stream"]), 0) + segment["total_size"]
    return found


def traced(run: Run, path: Path) -> None:
    """Two further iterations with every operation timed: of what is behind the first norm, the second waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with run.optimizer.trace() as trace:
        for _ in range(2):
            loop.train_iteration(run)
    trace.write(path)


def derive(rows: list[dict[str, Any]], *, deterministic: bool) -> None:
    """What follows from rows of all ranks."""
    whole = [r for r in rows if r["status"] == "ok"]
    for r in whole:
        of_ranks = r["of_ranks"]
        r["step_s"] = max(one["step_s"] for one in of_ranks)
        r["forward_s"] = max(one["forward_s"] for one in of_ranks)
        r["device_bytes"] = max(one["device_bytes"] for one in of_ranks)
        r["reserved_bytes"] = max(one["reserved_bytes"] for one in of_ranks)
        r["host_bytes"] = sum(one["host_bytes"] for one in of_ranks)
        r["pinned_bytes"] = sum(one["pinned_bytes"] for one in of_ranks)
    compare(whole)
    for base, r in pairs(whole):
        if deterministic:
            r["same"] = (r["losses"], r["norms"]) == (base["losses"], base["norms"])


def pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row behind that of fraction 0 which it is compared with."""
    bases: dict[int, dict[str, Any]] = {}
    for r in rows:
        base = r if r["fraction"] == 0 else bases.get(r["length"])
        if base is not None:
            bases[r["length"]] = base
            yield base, r


def compare(rows: list[dict[str, Any]]) -> None:
    """With fraction 0, and with what was measured of the machine."""
    for base, r in pairs(rows):
        away = sum(
            n
            for one in r["of_ranks"]
            for where, n in one["parameters_by_placement"].items()
            if where in ("host", "streamed")
        )
        r["parameters_away"] = away
        r["ratio"] = r["step_s"] / base["step_s"]
        floors: dict[str, dict[str, Any]] = {"floor": {"both_ways": False}, "floor_both_ways": {"both_ways": True}}
        if all("slot_bytes" in one for one in r["of_ranks"]):  # earlier results do not tell
            slots = sum(one["slot_bytes"] for one in r["of_ranks"])
            floors["floor_held"] = {"both_ways": True, "slot_bytes": slots}
        for floor, limits in floors.items():
            limits["form"] = r.get("state", "fp32")  # earlier results have no other
            after_s = after_norm_s(away, base["step_s"] - base["forward_s"], r["roofs"], **limits)
            r[f"{floor}_ratio"] = 1 + max(0.0, after_s - base["forward_s"]) / base["step_s"]
            r[f"over_{floor}"] = r["ratio"] / r[f"{floor}_ratio"]


_FOUND = (
    "length",
    "fraction",
    "mix",
    "ratio",
    "floor_ratio",
    "over_floor",
    "floor_both_ways_ratio",
    "over_floor_both_ways",
    "floor_held_ratio",
    "over_floor_held",
    "base_flops_per_s",
    "memory_bytes_per_s",
)


def model_flops(result: dict[str, Any], length: int) -> float:
    """Of a step on each GPU, with a sequence of so many tokens."""
    words = [*result["options"], f"model.seq_length={length}", "train.micro_batch_size=1"]
    layers = recipe_workload(apply_overrides(recipes.load(result["recipe"]), words)).layers
    return 3 * sum(layer.forward_flops.of(length, length) for layer in layers)


def again(files: list[Path], out: Path | None) -> None:
    """Floors of rows that were measured with these roofs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        result = json.loads(file.read_text())
        rows = [r for r in result["rows"] if r["status"] == "ok" and "memory_bytes_per_s" in r.get("roofs", {})]
        compare(rows)
        flops = {length: model_flops(result, length) for length in dict.fromkeys(r["length"] for r in rows)}
        for base, r in pairs(rows):
            r["base_flops_per_s"] = flops[r["length"]] / base["step_s"]
            r["memory_bytes_per_s"] = r["roofs"]["memory_bytes_per_s"]
        found[file.name] = [
            {name: r[name] for name in _FOUND if name in r} for r in rows if r["fraction"] and "ratio" in r
        ]
        for r in found[file.name]:
            told = (f"{n}={v:.4g}" if isinstance(v, float) else f"{n}={v}" for n, v in r.items())
            print(file.stem, *told)
    if out is not None:
        written = {"benchmark": "floors", "machine": describe(), "files": found}
        out.write_text(json.dumps(written, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe")
    parser.add_argument("--again", type=Path, nargs="+", metavar="RESULTS", help="floors of these, and nothing is run")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[8192])
    parser.add_argument("--fractions", type=lambda text: [float(word) for word in text.split(",")], default=[0.0, 1.0])
    parser.add_argument(
        "--mix",
        default="auto",
        help="optimizer.offload_mix of rows with a fraction, @N: and N host threads; several: one row each",
    )
    parser.add_argument(
        "--formats", nargs="+", default=["fp32"], choices=list(FORMATS), help="of the state, a row each"
    )
    parser.add_argument(
        "--warmup", type=int, default=7, help="staging is settled after the third step, and paced after the fifth"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--time-limit-s", type=float, default=1e9, help="no row is begun later than this")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write each row's traces there, a file per rank")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*")
    a = parser.parse_args()
    if a.again:
        again(a.again, a.json)
        return
    if a.recipe is None:
        parser.error("--recipe or --again")
    began_s = time.monotonic()
    ranks = Ranks.of(os.environ)
    torch.cuda.set_device(ranks.local_rank)
    ranks.join(torch.device("cuda"), timedelta(minutes=10))
    rows: list[dict[str, Any]] = []
    for length in a.lengths:
        fractions = dict.fromkeys([0.0, *a.fractions])  # in the order given: the time limit takes the last ones
        with_offloading = [(m, form) for m in a.mix.split(",") for form in a.formats]
        for fraction, mix, form in [
            (f, *how) for f in fractions for how in (with_offloading if f else [("auto", "fp32")])
        ]:
            if max(ranks.gather(time.monotonic() - began_s)) > a.time_limit_s:
                continue
            roofs = measured_roofs(ranks)
            rows.append(row(a, ranks, length, fraction, mix, form) | {"roofs": roofs})
            gc.collect()
            torch.cuda.empty_cache()
            derive(rows, deterministic=a.deterministic)
            if ranks.first:
                show(rows[-1])
                if a.json is not None:
                    machine = describe()
                    launcher = f"torchrun --nproc-per-node {ranks.local_size}"
                    machine["command"] = f"{launcher} {machine['command'].partition(' ')[2]}"
                    written = {"benchmark": "scaling", "machine": machine, "recipe": a.recipe, "ranks": ranks.size}
                    written |= {"options": a.options, "rows": rows}
                    a.json.parent.mkdir(parents=True, exist_ok=True)
                    a.json.write_text(json.dumps(written, indent=1) + "\n")
    ranks.leave()


def show(r: dict[str, Any]) -> None:
    roofs = r["roofs"]
    print(
        f"{r['length']:>6} {r['fraction']:>5.2f} {r['mix']:>7} {r['state']:>12}  step {r['step_s'] * 1e3:7.1f} ms  "
        f"ratio {r['ratio']:5.3f}  "
        f"floor {r['floor_ratio']:5.3f}, both {r['floor_both_ways_ratio']:5.3f}, held {r['floor_held_ratio']:5.3f}  "
        f"device {r['device_bytes'] / GIB:6.1f} ({r['reserved_bytes'] / GIB:.1f}) GiB  "
        f"host {r['host_bytes'] / GIB:6.1f} ({r['pinned_bytes'] / GIB:.1f}) GiB"
        f"  of {roofs['parameters_per_s'] / 1e9:.2f} G/s, {roofs['d2h_bytes_per_s'] / 1e9:.0f} GB/s link, "
        f"{roofs['memory_bytes_per_s'] / 1e9:.0f} memory" + (f"  same {r['same']}" if "same" in r else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
