"""The training loop behind `hostward train`: one process, one device."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hostward.config import Config
from hostward.engine.backend import TORCH_DTYPES, Tier
from hostward.errors import ConfigError, DataError, DeviceError
from hostward.hardware import resident_bytes
from hostward.inventory import Dtype
from hostward.plan import Placement
from hostward.rules import check
from hostward.schedule import Lane
from hostward.training.optimizer import AdamW

from . import resume
from .data import TokenDataset, build_dataset
from .memory import require_memory
from .models import build_model, training_loss
from .report import MemoryReport, RunReport
from .schedule_lr import learning_rate

log = logging.getLogger("hostward")


@dataclass(slots=True)
class Run:
    """Everything that one training run holds."""

    recipe: str
    config: Config
    device: torch.device
    dataset: TokenDataset
    model: torch.nn.Module
    optimizer: AdamW
    scaler: torch.amp.GradScaler | None
    iteration: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    gradient_bytes: int = 0
    saved: Path | None = None
    first_iteration: int = 0

    @property
    def microbatches(self) -> int:
        return self.config.train.global_batch_size // self.config.train.micro_batch_size


def world_size() -> int:
    """Processes of this run, as torchrun says; 1 without it. Raises ConfigError for what is no number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE={text!r} is not a positive number", fix="start with torchrun, or unset it")
    return int(text)


def choose_device(name: str) -> torch.device:
    """`auto`: cuda where there is one. Raises DeviceError for a device that this machine lacks."""
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("train.device=cuda, and no CUDA device is there", fix="train.device=cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    text = os.environ.get("LOCAL_RANK", "0")
    if not text.isdecimal() or int(text) >= torch.cuda.device_count():
        raise DeviceError(
            f"LOCAL_RANK={text!r} names no CUDA device",
            why=f"this process sees {torch.cuda.device_count()} of them",
            fix="start one process per device with torchrun, or unset it",
        )
    index = int(text)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def deterministic(enabled: bool) -> Any:
    """Deterministic algorithms inside the block. cuBLAS reads its variable once, when it starts."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def prepare(recipe: str, config: Config) -> Run:
    """Check the options, read the data, build model and optimizer, and load the checkpoint asked for.

    Raises:
        HostwardError: of the kind that names the cause; everything that can be refused before the weights are
            allocated is.
    """
    check(config, world_size=world_size())
    device = choose_device(config.train.device)
    resume_from = resume.checkpoint_to_load(config)
    dataset = _dataset(config)
    if resume_from is not None and not config.checkpoint.finetune:
        resume.require_same_samples(config, dataset, resume_from)
    require_memory(config, device, dataset.vocab_size)
    resume.require_writable(config)
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    seed = config.rng.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    dtype = TORCH_DTYPES[Dtype(config.model.params_dtype)]
    model = build_model(config, vocab_size=dataset.vocab_size, device=device, dtype=dtype, seed=seed)
    _require_vocabulary(model, dataset)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(device.type) if dtype is torch.float16 else None
    run = Run(recipe, config, device, dataset, model, optimizer, scaler)
    if resume_from is not None:
        resume.load(run, resume_from)
    run.first_iteration = run.iteration
    return run


def make_optimizer(model: torch.nn.Module, config: Config) -> AdamW:
    """The optimizer that the options describe."""
    options, train = config.optimizer, config.train
    fraction = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    accumulates = train.global_batch_size > train.micro_batch_size and config.model.params_dtype != "fp32"
    return AdamW(
        model,
        lr=options.lr,
        **resume.group_settings(config),
        max_grad_norm=options.clip_grad,
        offload_fraction=fraction,
        use_torch_optimizer=options.use_torch_optimizer_for_cpu_offload,
        grad_dtype=torch.float32 if accumulates else None,
        host_threads=options.host_threads,
    )


def train(run: Run, *, progress: Callable[[Run], None] | None = None) -> None:
    """Train to `train.train_iters`, saving on the way and after the last iteration."""
    config = run.config
    if run.iteration >= config.train.train_iters:
        log.warning(
            "the checkpoint is at iteration %d and train.train_iters is %d: nothing to do; raise the latter to go on",
            run.iteration,
            config.train.train_iters,
        )
    with deterministic(config.model.deterministic_mode):
        while run.iteration < config.train.train_iters:
            started = time.perf_counter()
            train_iteration(run)
            run.iteration_s.append(time.perf_counter() - started)
            if progress is not None:
                progress(run)
            interval, last = config.checkpoint.save_interval, run.iteration == config.train.train_iters
            if config.checkpoint.save is not None and not last and interval and run.iteration % interval == 0:
                run.saved = resume.save(run)
    if config.checkpoint.save is not None:
        run.saved = resume.save(run)


def train_iteration(run: Run) -> None:
    """One optimizer step over the microbatches of one global batch."""
    backward(run)
    step(run)
    run.optimizer.zero_grad(set_to_none=True)


def backward(run: Run) -> None:
    """Forward and backward of every microbatch; the mean loss goes to `run.losses`."""
    config = run.config
    size = config.train.micro_batch_size
    first = run.iteration * config.train.global_batch_size
    total = torch.zeros((), dtype=torch.float32, device=run.device)
    for microbatch in range(run.microbatches):
        inputs, labels = run.dataset.batch(first + microbatch * size, size)
        loss = training_loss(
            run.model, torch.from_numpy(inputs).to(run.device), torch.from_numpy(labels).to(run.device)
        )
        share = loss / run.microbatches
        total += share.detach().float()
        (share if run.scaler is None else run.scaler.scale(share)).backward()  # type: ignore[no-untyped-call]
    run.losses.append(float(total.item()))
    run.gradient_bytes = sum(p.grad.nbytes for p in run.model.parameters() if p.grad is not None)


def step(run: Run) -> None:
    """The optimizer step of the iteration, at the learning rate of the schedule."""
    lr = learning_rate(run.iteration, run.config.optimizer, run.config.scheduler)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    if run.scaler is None:
        run.optimizer.step()
    else:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    run.grad_norms.append(run.optimizer.grad_norm)
    if run.optimizer.last_step_skipped:
        run.skipped.append(run.iteration)
    run.iteration += 1


def report(run: Run) -> RunReport:
    """What the run did and what it holds now."""
    plan, ledger = run.optimizer.plan, run.optimizer.backend.ledger
    cuda = run.device.type == "cuda"
    tokens = run.config.train.global_batch_size * run.dataset.seq_length
    steady = run.iteration_s[1:] or run.iteration_s
    memory = MemoryReport(
        device_by_owner_bytes={**ledger.by_owner(Tier.DEVICE), "gradients": run.gradient_bytes},
        host_by_owner_bytes=ledger.by_owner(Tier.HOST),
        pinned_bytes=ledger.pinned_bytes,
        resident_bytes=resident_bytes(),
        device_allocated_bytes=torch.cuda.memory_allocated(run.device) if cuda else None,
        device_peak_bytes=torch.cuda.max_memory_allocated(run.device) if cuda else None,
    )
    return RunReport(
        recipe=run.recipe,
        first_iteration=run.first_iteration,
        last_iteration=run.iteration,
        losses=run.losses,
        grad_norms=run.grad_norms,
        skipped_iterations=run.skipped,
        tokens_per_s=tokens * len(steady) / sum(steady) if steady else 0.0,
        iteration_s=run.iteration_s,
        asked_fraction=plan.asked_fraction,
        placed_fraction=plan.placed_fraction,
        state_bytes=plan.state_bytes,
        offloaded_bytes=plan.offloaded_bytes,
        buckets=len(plan.buckets),
        host_buckets=sum(b.placement is Placement.HOST for b in plan.buckets),
        memory=memory,
        moved_d2h_bytes=ledger.copied_bytes[Lane.D2H],
        moved_h2d_bytes=ledger.copied_bytes[Lane.H2D],
        parameters=run.optimizer.inventory.numel,
        model_parameters=sum(p.numel() for p in run.model.parameters()),
        data=run.dataset.description,
        machine={**run.optimizer.backend.describe(), "torch": torch.__version__},
        checkpoint=None if run.saved is None else str(run.saved),
    )


def _dataset(config: Config) -> TokenDataset:
    options, tokenizer = config.dataset, config.tokenizer
    return build_dataset(
        path=options.path,
        data_format=options.format,
        text_key=options.text_key,
        tokenizer_type=tokenizer.tokenizer_type,
        tokenizer_model=tokenizer.tokenizer_model or config.model.hf_model_path,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size,
        seed=config.rng.seed if options.random_seed is None else options.random_seed,
    )


def _require_vocabulary(model: torch.nn.Module, dataset: TokenDataset) -> None:
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if dataset.vocab_size > rows:
        raise DataError(
            f"the data needs {dataset.vocab_size} token ids, the model's embedding has {rows} rows",
            fix="raise model.vocab_size, or use the model's own tokenizer",
        )
