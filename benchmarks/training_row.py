"""One row of step.py, measured in this process: a model, a contender that updates it, and what an iteration costs."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils.checkpoint

from hostward.core.host_limits import resident_bytes

TORCH, TORCH_UNCLIPPED, NO_OPTIMIZER = "torch", "torch+unclipped", "forward-backward"
MAX_NORM = 1.0
MAX_NORMS = {None: MAX_NORM, "unclipped": None, "calm": 1e3}
"""What the norm is clipped at, by the word in a row's name; the norm of these steps is below 100, and above 1."""
# Of the peers' measuring programs, so that losses can be set side by side.
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
BATCHES, SEED = 4, 0
EXTRA_ITERATIONS = 3
CONTEXT_BYTES = 1 << 30
"""Of a limit of device memory, what is left to the driver's context and modules, which torch's allocator cannot see."""


@dataclass(frozen=True)
class Shape:
    """A Llama shape. `loss_chunk` tokens of logits exist at a time; 0: all, by the model's own loss."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    loss_chunk: int = 0

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        layer = int(attention) + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden


SHAPES = {
    "1.7b": Shape(24, 2048, 8192, 16, 16, 32000),
    "8b": Shape(32, 4096, 14336, 32, 8, 128256, loss_chunk=2048),
    "wide": Shape(4, 8192, 28672, 64, 64, 32000, loss_chunk=2048),
    "tiny": Shape(2, 64, 128, 2, 1, 256, loss_chunk=24),
}


@dataclass(frozen=True)
class RowOptions:
    """How hostward is set up for a row: share of the state that leaves the device, share of that which is streamed,
    whether the layers' weights and inputs leave as well, format of the state, what the norm is clipped at, share of the
    host's steps that are made in backward, bytes of GPU staging buffers and threads of the host step (None: hostward's
    own choice).
    """

    fraction: float
    streamed: float | str
    overlap: bool
    weights: bool
    inputs: bool
    state: Mapping[str, torch.dtype] | None
    max_norm: float | None
    early: float
    staging_bytes: int | None
    threads: int | None


STATES: dict[str, dict[str, torch.dtype]] = {
    "bf16-moments": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "fp8-moments": {"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8},
    "fp8-moments-bf16": {"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8, "main_param": torch.bfloat16},
    "all-bf16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "main_param": torch.bfloat16},
}
"""Formats of the state by name, as `AdamW(state_dtypes=...)` takes them."""
_ROW = re.compile(
    r"(?P<serial>serial-)?(?:(?P<kind>host|streamed|auto|mix(?P<share>[\d.]+)):)?(?P<fraction>[\d.]+)"
    rf"(?:\+(?P<state>{'|'.join(STATES)}))?(?P<weights>\+weights)?(?P<inputs>\+inputs)?(?:\+(?P<norm>unclipped|calm))?"
    r"(?P<early>\+early(?P<early_share>[\d.]+)?)?(?:\+staging(?P<staging>[\d.]+)GiB)?(?:@(?P<threads>\d+))?"
)


def row_options(text: str) -> RowOptions | None:
    """What a row's name says; None for the rows without hostward. Raises ValueError."""
    if text in (TORCH, TORCH_UNCLIPPED, NO_OPTIMIZER):
        return None
    match = _ROW.fullmatch(text)
    if match is None or (match["kind"] is None and float(match["fraction"]) != 0):
        raise ValueError(
            f"{text!r} is no row: torch, forward-backward, 0, host:F, streamed:F, auto:F, mixS:F, serial-.., "
            f"..+{', ..+'.join(STATES)}, ..+weights, ..+inputs, ..+unclipped, ..+calm, ..+early, ..+earlyF, "
            f"..+stagingNGiB, ..@THREADS"
        )
    named: dict[str | None, float | str] = {None: 0.0, "host": 0.0, "streamed": 1.0, "auto": "auto"}
    streamed = float(match["share"]) if match["share"] else named[match["kind"]]
    return RowOptions(
        fraction=float(match["fraction"]),
        streamed=streamed,
        overlap=match["serial"] is None,
        weights=match["weights"] is not None,
        inputs=match["inputs"] is not None,
        state=STATES[match["state"]] if match["state"] else None,
        max_norm=MAX_NORMS[match["norm"]],
        early=float(match["early_share"] or 1) if match["early"] else 0.0,
        staging_bytes=int(float(match["staging"]) * (1 << 30)) if match["staging"] else None,
        threads=int(match["threads"]) if match["threads"] else None,
    )


@dataclass(frozen=True)
class RowJob:
    """One row: name, shape, tokens per step as sequences of `seq`, iterations, device and its memory limit (None: all
    of it), whether to trace, file for the trace.
    """

    row: str
    shape: Shape
    tokens: int
    seq: int
    warmup: int
    steps: int
    device: torch.device
    limit_bytes: int | None = None
    traced: bool = True
    trace: Path | None = None


def build(shape: Shape, seq: int, device: torch.device) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(seq, 2048),
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(SEED)
    # The large model is drawn in bf16 at once: in fp32 it alone would take 32 GB of the device.
    with torch.device(device):
        if shape.loss_chunk:
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        else:
            model = LlamaForCausalLM(config).to(torch.bfloat16)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model.train()


def loss_of(model: Any, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Mean cross entropy of the next token; with `chunk` the logits of that many tokens exist at a time."""
    if not chunk:
        return model(input_ids=ids, labels=ids).loss
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()

    def part(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(states).float(), wanted, reduction="sum")

    parts = [
        torch.utils.checkpoint.checkpoint(part, states, wanted, use_reentrant=False)
        for states, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.stack(parts).sum() / targets.numel()


class Contender(Protocol):
    """What brings the weights forward."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...

    def wait(self) -> None: ...


class NoOptimizer:
    """Forward and backward alone: gradients are dropped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = list(model.parameters())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for weight in self._weights:
            weight.grad = None

    def wait(self) -> None:
        pass


class TorchMasters:
    """bf16 weights, fp32 main weights and moments on the GPU, stepped by torch's fused AdamW, clipped or not."""

    def __init__(self, model: torch.nn.Module, *, clipped: bool) -> None:
        self._clipped = clipped
        self._weights = list(model.parameters())
        self._masters = [torch.nn.Parameter(p.detach().float()) for p in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **ADAMW)  # type: ignore[arg-type]

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self) -> None:
        if self._clipped:
            torch.nn.utils.clip_grad_norm_(self._weights, MAX_NORM)
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = weight.grad.float()  # type: ignore[union-attr]
            weight.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_(self._weights, self._masters)

    def wait(self) -> None:
        pass


class Hostward:
    """hostward.AdamW; gradients are handed over during backward."""

    def __init__(self, model: torch.nn.Module, options: RowOptions) -> None:
        import hostward

        self.optimizer = hostward.AdamW(
            model,
            max_grad_norm=options.max_norm,
            offload_fraction=options.fraction,
            streamed_fraction=options.streamed,
            overlap=options.overlap,
            step_early=options.early,
            host_threads=options.threads,
            staging_bytes=options.staging_bytes,
            state_dtypes=options.state,
            **ADAMW,
        )
        if options.weights or options.inputs:
            self.attachment = hostward.attach(
                model,
                self.optimizer,
                weights=hostward.Weights() if options.weights else None,
                activations=hostward.Activations() if options.inputs else None,
            )

    def backward(self, loss: torch.Tensor) -> None:
        with self.optimizer.accumulate(last=True):
            loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        self.optimizer.wait()


class Clock:
    """Marks on the compute stream, without waiting for it; on a CPU, marks in time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def durations_s(self) -> list[float]:
        """Seconds between neighbouring marks. Waits for the last one."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return [end - start for start, end in pairs]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Run:
    """Iterations of one contender over the same few batches, in the same order in every row."""

    def __init__(self, job: RowJob) -> None:
        self.job = job
        if job.limit_bytes is not None:
            share = (job.limit_bytes - CONTEXT_BYTES) / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        self.model = build(job.shape, job.seq, job.device)
        synchronise(job.device)
        self.resident_before_bytes = resident_bytes()
        started = time.perf_counter()
        self.options = row_options(job.row)
        self.contender: Contender
        if self.options is not None:
            self.contender = Hostward(self.model, self.options)
        elif job.row == NO_OPTIMIZER:
            self.contender = NoOptimizer(self.model)
        else:
            self.contender = TorchMasters(self.model, clipped=job.row == TORCH)
        synchronise(job.device)
        self.setup_s = time.perf_counter() - started
        generator = torch.Generator().manual_seed(SEED + 1)
        size = (job.tokens // job.seq, job.seq)
        self._batches = [
            torch.randint(0, job.shape.vocab, size, generator=generator).to(job.device) for _ in range(BATCHES)
        ]
        self._done = 0
        self.loss: torch.Tensor

    def forward_backward(self) -> None:
        ids = self._batches[self._done % BATCHES]
        self._done += 1
        loss = loss_of(self.model, ids, self.job.shape.loss_chunk)
        self.contender.backward(loss)
        self.loss = loss.detach()

    def iterate(self) -> float:
        """One iteration; returns what the call of step() took on the host."""
        self.forward_backward()
        started = time.perf_counter()
        self.contender.step()
        return time.perf_counter() - started


def measure(job: RowJob) -> dict[str, Any]:
    """The row as a dict of plain values; the module's docstring in step.py says what they mean."""
    on_gpu = job.device.type == "cuda"
    run = Run(job)
    for _ in range(job.warmup):
        run.iterate()
    warmup_peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    # A full collection stops the calling thread for longer than the device has work enqueued.
    gc.collect()
    gc.disable()
    run.iterate()  # what has become idle meanwhile is busy again
    clock = Clock(job.device)
    clock.mark()
    calls_s = []
    for _ in range(job.steps):
        calls_s.append(run.iterate())
        clock.mark()
    durations_s = clock.durations_s()
    gc.enable()
    started = time.perf_counter()
    run.contender.wait()
    synchronise(job.device)
    drain_s = time.perf_counter() - started
    row = {
        "row": job.row,
        "tokens": job.tokens,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "step_s": statistics.median(durations_s),
        "mean_step_s": statistics.fmean(durations_s),
        "step_s_all": durations_s,
        "drain_s": drain_s,
        "step_call_s": statistics.median(calls_s),
        "setup_s": run.setup_s,
        "last_loss": run.loss.item(),
        **(device_memory() if on_gpu else {}),
        "warmup_peak_bytes": warmup_peak_bytes,
        "resident_bytes": resident_bytes(),
        "resident_added_bytes": resident_bytes() - run.resident_before_bytes,
    }
    if isinstance(run.contender, Hostward):
        row |= hostward_facts(run, run.contender)
    return row


def device_memory() -> dict[str, int]:
    """Bytes on the device: by torch's allocator, now and at the peak since the last reset, and by the driver, which
    counts whatever else lies there too. `device_retries`: how often the allocator had to give blocks back first.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "device_allocated_bytes": torch.cuda.memory_allocated(),
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "device_reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total_bytes - free_bytes,
        "device_retries": int(torch.cuda.memory_stats()["num_alloc_retries"]),
    }


def hostward_facts(run: Run, contender: Hostward) -> dict[str, Any]:
    """Plan and memory of a hostward row; if asked for, enqueueing and trace, of extra iterations."""
    optimizer = contender.optimizer
    plan, ledger = optimizer.plan, optimizer.backend.ledger
    shares = {
        placement: sum(b.numel for b in plan.buckets if b.placement == placement)
        for placement in ("device", "host", "streamed")
    }
    return {
        "asked_fraction": plan.asked_fraction,
        "placed_fraction": plan.placed_fraction,
        "offloaded_bytes": plan.offloaded_bytes,
        "placed_parameters": shares,
        "buckets": len(plan.buckets),
        "offloaded_buckets": sum(b.placement != "device" for b in plan.buckets),
        "host_bytes": sum(n for (tier, _), n in ledger.held_bytes.items() if tier == "host"),
        "pinned_bytes": ledger.pinned_bytes,
        "backend": dict(optimizer.backend.describe()),
        "rates": rates_of(optimizer),
        "staging_buffers": optimizer._executor._slots.count,
        "last_norm": optimizer.grad_norm,  # above what it is clipped at: none of that step was made early
        **({**enqueued(run, optimizer), "trace": traced(run, contender)} if run.job.traced else {}),
    }


def rates_of(optimizer: Any) -> dict[str, float] | None:
    """What was measured to choose what is streamed; None: nothing was."""
    rates = optimizer._mix.rates
    return None if rates is None else asdict(rates)


def enqueued(run: Run, optimizer: Any) -> dict[str, float]:
    """Seconds that step() takes on the host while the device is idle, and the same by bucket."""
    calls_s = []
    for _ in range(EXTRA_ITERATIONS):
        run.forward_backward()
        synchronise(run.job.device)
        started = time.perf_counter()
        optimizer.step()
        calls_s.append(time.perf_counter() - started)
        optimizer.zero_grad()
    call_s = statistics.median(calls_s)
    return {"enqueue_s": call_s, "enqueue_per_bucket_s": call_s / max(1, len(optimizer.plan.buckets))}


def traced(run: Run, contender: Hostward) -> dict[str, Any]:
    """Sums of the trace of a few iterations, per step."""
    with contender.optimizer.trace() as trace:
        for _ in range(EXTRA_ITERATIONS):
            run.iterate()
        contender.wait()
    if run.job.trace is not None:
        trace.write(run.job.trace)
    summary = trace.summary()
    steps = max(1, summary.steps)
    return {
        "steps": summary.steps,
        "offload_s": summary.offload_s / steps,
        "hidden_s": summary.hidden_s / steps,
        "exposed_s": summary.exposed_s / steps,
        "host_step_s": summary.host_step_s / steps,
        "transfer_s": {key: value / steps for key, value in summary.transfer_s.items()},
        "transfer_bytes": {key: value / steps for key, value in summary.transfer_bytes.items()},
        "text": summary.explain(),
    }
