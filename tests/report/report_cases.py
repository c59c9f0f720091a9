"""Reports of runs that never were, for tests of the file and of the page."""

from __future__ import annotations

import math
from dataclasses import replace

from hostward.core.placement import PlacedBucket, Placement
from hostward.plan.decisions import FrontierPoint
from hostward.report.schema import (
    FORMAT,
    VERSION,
    Ended,
    Estimate,
    MemoryReport,
    NodeRow,
    OffloadReport,
    OwnerSamples,
    RankRow,
    RanksReport,
    RunReport,
    StepMemory,
)
from hostward.runtime.step_trace import Span, SpanKind, Trace
from hostward.schedule.ops import Lane

MIB, GIB = 2**20, 2**30
ITERATIONS = 40
BUCKETS = 12


def gpu_report() -> RunReport:
    """A run of 40 iterations on a GPU, planned, metered and finished; 5 of 12 buckets on the host, 3 streamed."""
    moments = ("forward", "backward", "step")
    at = tuple(i + (k + 1) / 3 for i in range(8) for k in range(3))
    state, host_state = 6 * GIB, 9 * GIB
    return RunReport(
        format=FORMAT,
        version=VERSION,
        date="2026-11-21T12:34:56+00:00",
        command="hostward train --recipe llama_1_7b train.train_iters=40",
        versions={"hostward": "0.1.0", "torch": "2.13.0"},
        recipe="llama_1_7b_pretrain_config",
        ended=Ended.FINISHED,
        reason=None,
        first_iteration=0,
        last_iteration=ITERATIONS,
        planned_iterations=ITERATIONS,
        losses=tuple(3 + 8 * math.exp(-i / 12) for i in range(ITERATIONS)),
        grad_norms=tuple(1 + 30 * math.exp(-i / 7) for i in range(ITERATIONS)),
        learning_rates=tuple(3e-4 for _ in range(ITERATIONS)),
        skipped_iterations=(17,),
        tokens_per_iteration=8192,
        tokens_per_s=19_000.0,
        iteration_s=tuple(0.9 if i == 0 else 0.43 for i in range(ITERATIONS)),
        step_memory=StepMemory(
            device_allocated_bytes=(10 * GIB,) * ITERATIONS,
            device_peak_bytes=(17 * GIB,) * ITERATIONS,
            host_resident_bytes=(14 * GIB,) * ITERATIONS,
            pinned_bytes=(11 * GIB,) * ITERATIONS,
        ),
        memory_over_time=OwnerSamples(
            at_iteration=at,
            moments=moments * 8,
            device_by_owner_bytes={
                "weights": (3 * GIB,) * 24,
                "exp_avg": (state // 2,) * 24,
                "exp_avg_sq": (state // 2,) * 24,
                "gradients": (0, 2 * GIB, 0) * 8,
                "staging slots": (0, 700 * MIB, 700 * MIB) * 8,
                "norm partials": (4096,) * 24,
            },
            rest_of_device_bytes=(7 * GIB, GIB, GIB) * 8,
            host_by_owner_bytes={
                "exp_avg": (host_state // 2,) * 24,
                "exp_avg_sq": (host_state // 2,) * 24,
                "gradients": (GIB,) * 24,
                "weights for upload": (GIB,) * 24,
                "saved activations": (0, *(2 * GIB,) * 23),
            },
            pinned_bytes=(11 * GIB,) * 24,
        ),
        asked_fraction=0.6,
        placed_fraction=0.6,
        state_bytes=15 * GIB,
        offloaded_bytes=9 * GIB,
        buckets=BUCKETS,
        host_buckets=5,
        streamed_buckets=3,
        placements="optimizer state on the host: asked 0.6000, placed 0.6000",
        plan=tuple(
            PlacedBucket(f"{i:04}.model.layers.{i}", 10**8, 10**9, 10**9, _placement(i)) for i in range(BUCKETS)
        ),
        activations={"freed_bytes": 80 * GIB, "words": "saved activations: 2 GiB each way"},
        offload=OffloadReport(
            first_iteration=37,
            last_iteration=39,
            hidden_s=0.31,
            exposed_s=0.024,
            offload_s=0.334,
            host_step_s=0.2,
            transfer_s={"d2h": 0.1, "h2d": 0.12},
            transfer_bytes={"d2h": 5e9, "h2d": 6e9},
            lines=("offload work 0.334 s per step: 0.310 s hidden, 0.024 s exposed",),
        ),
        memory=MemoryReport(
            device_by_owner_bytes={"weights": 3 * GIB, "exp_avg": state // 2, "gradients": 2 * GIB},
            host_by_owner_bytes={"exp_avg": host_state // 2, "gradients": GIB},
            pinned_bytes=11 * GIB,
            resident_bytes=14 * GIB,
            device_allocated_bytes=10 * GIB,
            device_peak_bytes=17 * GIB,
        ),
        predicted=Estimate(int(16.6 * GIB), 13 * GIB, 11 * GIB, 0.41, 0.02),
        measured=Estimate(17 * GIB, 13 * GIB, 11 * GIB, 0.43, 0.024),
        frontier=tuple(
            FrontierPoint(f"{percent} % offloaded", int((24 - percent * 0.16) * GIB), 0.30 + (percent / 100) ** 2 * 0.2)
            for percent in (0, 25, 50, 75, 100)
        ),
        moved_d2h_bytes=200 * GIB,
        moved_h2d_bytes=240 * GIB,
        parameters=1_740_000_000,
        model_parameters=1_740_000_000,
        data="text of 3 files",
        options={"optimizer.optimizer_cpu_offload": "true", "optimizer.optimizer_offload_fraction": "0.6"},
        machine={"backend": "cuda", "device": "NVIDIA H200", "host_threads": 14, "isa": "avx512", "torch": "2.13.0"},
        host={"system": "Linux x86_64", "cpus": 16, "memory_bytes": 126 * GIB, "limited_by": "the machine"},
        checkpoint=None,
    )


def _placement(bucket: int) -> Placement:
    return Placement.DEVICE if bucket < 4 else Placement.HOST if bucket < 9 else Placement.STREAMED


def cut_short(ended: Ended, reason: str | None) -> RunReport:
    """The same run, ended after 12 iterations of which 11 had come back, and never planned."""
    whole = gpu_report()
    return replace(
        whole,
        ended=ended,
        reason=reason,
        last_iteration=12,
        losses=(*whole.losses[:10], None),
        grad_norms=(*whole.grad_norms[:10], None),
        iteration_s=whole.iteration_s[:11],
        learning_rates=whole.learning_rates[:12],
        step_memory=StepMemory(None, None, (GIB,) * 12, (GIB,) * 12),
        offload=None,
        predicted=None,
        frontier=(),
    )


def crowded_report() -> RunReport:
    """A run of 2,000 iterations of 48 layers, all of them sampled late, with 36 other plans close to each other."""
    run, n = gpu_report(), 2000
    samples = run.memory_over_time
    columns = {
        "device_by_owner_bytes": {owner: column * 6 for owner, column in samples.device_by_owner_bytes.items()},
        "host_by_owner_bytes": {owner: column * 6 for owner, column in samples.host_by_owner_bytes.items()},
        "rest_of_device_bytes": (samples.rest_of_device_bytes or ()) * 6,
        "pinned_bytes": samples.pinned_bytes * 6,
        "moments": samples.moments * 6,
    }
    plan = tuple(PlacedBucket(f"{i:04}.model.layers.{i}", 10**8, 10**9, 10**9, _placement(i % 10)) for i in range(48))
    return replace(
        run,
        last_iteration=n,
        planned_iterations=n,
        losses=tuple(2 + 9 * math.exp(-i / 300) + 0.1 * math.sin(i * 1.7) for i in range(n)),
        grad_norms=tuple(1 + 30 * math.exp(-i / 200) + 0.3 * math.sin(i) for i in range(n)),
        learning_rates=(3e-4,) * n,
        iteration_s=tuple(0.43 + (0.2 if i % 97 == 0 else 0.01 * math.sin(i)) for i in range(n)),
        step_memory=StepMemory((10 * GIB,) * n, (17 * GIB,) * n, (14 * GIB,) * n, (11 * GIB,) * n),
        memory_over_time=replace(
            samples, at_iteration=tuple(41 * i + 14 + (k + 1) / 3 for i in range(48) for k in range(3)), **columns
        ),
        plan=plan,
        buckets=48,
        frontier=tuple(
            FrontierPoint(f"state {100 - 2 * i}% host; {i} layers recompute", int((8 + 0.3 * i) * GIB), 0.6 - 0.006 * i)
            for i in range(36)
        ),
    )


def ranks_report() -> RunReport:
    """The crowded run on four ranks of two nodes, of which rank 2 reads slowly; weights are sharded and offloaded."""
    rows = tuple(
        RankRow(r, f"gpu-node-{r // 2}.cluster", "NVIDIA H200", (13 + r) * GIB, 11 * GIB, 17 * GIB, 0.01, 0.2, 0.22)
        for r in range(4)
    )
    slow = "rank 2: reading samples takes 0.300 s per iteration, 0.010 s in the median of the ranks"
    rows = (*rows[:2], replace(rows[2], data_s=0.3), rows[3])
    nodes = tuple(NodeRow(f"gpu-node-{n}.cluster", 2, (27 + 4 * n) * GIB, 22 * GIB) for n in range(2))
    return replace(
        crowded_report(),
        division="weights, gradients and state sharded over 4 ranks, gathered layer by layer",
        ranks=RanksReport(rows, nodes, (slow,)),
    )


def ranks_trace(layers: int = 48, microbatches: int = 4) -> Trace:
    """What rank 0 of four traces of steps 5, 6 and 7, of about 2 s: every lane, every kind and both parts of a model.

    Weights are copied for both passes of each microbatch, and some gathers wait for them. Saved activations leave in
    forward and come for backward. Gradients leave in the last backward; the CPU steps two layers of three in the next
    forward, and the GPU steps the third with streamed state.
    """
    trace, each = Trace(), 0.43 / layers / 2

    def add(name: str, lane: Lane, start_s: float, share: float, nbytes: int, step: int, kind: SpanKind) -> float:
        trace.add(Span(name, lane, start_s, start_s + share * each, nbytes, step, kind=kind))
        return start_s + share * each

    for step in (5, 6, 7):
        at = step * microbatches * 0.46
        for microbatch in range(microbatches):
            for i in range(2 * layers):
                backward = i >= layers
                name = f"model.layers.{2 * layers - 1 - i if backward else i}"
                add(f"offload/h2d/layer/{name}", Lane.H2D, at - each, 0.5, 60_000_000, step, SpanKind.COPY)
                if i % 8 == 0:
                    at = add(f"offload/wait/weights/gathered/{name}", Lane.COMPUTE, at, 0.4, 0, step, SpanKind.WAIT)
                end = add(
                    f"{'backward' if backward else 'forward'}/{name}", Lane.COMPUTE, at, 0.97, 0, step, SpanKind.MARK
                )
                way, lane = ("h2d", Lane.H2D) if backward else ("d2h", Lane.D2H)
                add(f"offload/{way}/activation/{name}", lane, at - 0.4 * each, 0.3, 40_000_000, step, SpanKind.COPY)
                if backward and microbatch == microbatches - 1:
                    add(f"offload/norm/{name}", Lane.COMPUTE, end, 0.02, 0, step, SpanKind.KERNEL)
                    add(f"offload/d2h/grad/{name}", Lane.D2H, end, 0.6, 60_000_000, step, SpanKind.COPY)
                at += each
        for layer in range(layers):  # beside the next step's first forward
            name, at_s = f"model.layers.{layer}", at + (layer - 2) * each
            if layer % 3 == 2:
                copied = add(f"offload/h2d/state/{name}", Lane.H2D, at_s, 0.4, 90_000_000, step, SpanKind.COPY)
                done = add(f"offload/update/{name}", Lane.UPDATE, copied, 0.2, 0, step, SpanKind.KERNEL)
                add(f"offload/d2h/state/{name}", Lane.D2H, done, 0.4, 90_000_000, step, SpanKind.COPY)
            else:
                add(f"offload/host/adamw/{name}", Lane.HOST, at_s, 0.9, 0, step, SpanKind.HOST)
    return trace


def gpu_trace(layers: int = 6) -> Trace:
    """Steps 5, 6 and 7 of about 430 ms: backward, the host's steps behind the next forward, and a wait."""
    trace, share = Trace(), 6 / layers
    for step in (5, 6, 7):
        start = step * 0.43
        for layer in range(layers):
            at = start + 0.03 * share * layer
            name, end = f"model.layers.{layers - 1 - layer}", at + 0.03 * share
            trace.add(Span(f"backward/{name}", Lane.COMPUTE, at, end - 0.001 * share, 0, step, kind=SpanKind.MARK))
            norm = end - 0.001 * share, end
            trace.add(Span(f"offload/norm/{name}", Lane.COMPUTE, *norm, 0, step, kind=SpanKind.KERNEL))
            nbytes = int(700_000_000 * share)
            copied = end, end + 0.015 * share
            trace.add(Span(f"offload/d2h/grad/{name}", Lane.D2H, *copied, nbytes, step, kind=SpanKind.COPY))
        for layer in range(layers):
            at, name = start + 0.2 + 0.035 * share * layer, f"model.layers.{layer}"
            stepped = at + 0.03 * share
            trace.add(Span(f"offload/host/adamw/{name}", Lane.HOST, at, stepped, 0, step, kind=SpanKind.HOST))
            up, nbytes = (stepped, stepped + 0.012 * share), int(600_000_000 * share)
            trace.add(Span(f"offload/h2d/weight/{name}", Lane.H2D, *up, nbytes, step, kind=SpanKind.COPY))
            begun = at + 0.01 * share
            waited = begun + (0.024 if layer == 0 else 0.0001) * share
            trace.add(Span(f"offload/wait/{name}", Lane.COMPUTE, begun, waited, 0, step, kind=SpanKind.WAIT))
            run = waited, at + 0.045 * share
            trace.add(Span(f"forward/{name}", Lane.COMPUTE, *run, 0, step, kind=SpanKind.MARK))
    return trace
