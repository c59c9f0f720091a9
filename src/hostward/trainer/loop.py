"""The training loop behind `hostward train`: each process has one device."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hostward.attachment import Attachment
from hostward.checkpoint.api import Saver
from hostward.config.rules.table import captured
from hostward.config.schema import Config
from hostward.config.validate import check, idle_switches
from hostward.core.inventory import Dtype
from hostward.errors import DataError, DeviceError
from hostward.files.folder_lock import FolderLock
from hostward.optim.adamw import AdamW
from hostward.plan.decisions import FrontierPoint
from hostward.plan.plan_file import PlanFile
from hostward.report.schema import Estimate, OffloadReport, RanksReport
from hostward.runtime.backend import TORCH_DTYPES, Tier
from hostward.runtime.step_trace import Trace
from hostward.trainer import checkpointing
from hostward.trainer.checkpointing import lock_folders
from hostward.trainer.cuda_graph import require_graphs
from hostward.trainer.data.dataset import TokenDataset
from hostward.trainer.garbage_collection import collect_garbage, collected_by_hand
from hostward.trainer.lr_schedule import learning_rate
from hostward.trainer.memory_check import lock_limit, slow_halves
from hostward.trainer.memory_sampler import FullDevice, MemorySampler, Watermark
from hostward.trainer.microbatches import Passes, WholeModel, passes_of, scaler_of
from hostward.trainer.offload_options import (
    attach_activations,
    make_optimizer,
    recompute_layers,
    share_of,
    staying_gradients,
    with_plan,
)
from hostward.trainer.parallel import hold
from hostward.trainer.process_group import Ranks, bind_beside_gpu
from hostward.trainer.readback import Readback
from hostward.trainer.report import SLOTS, measured, ranks_report
from hostward.trainer.setup import require_alike, weighed, what_runs
from hostward.weights.deferred_init import move

log = logging.getLogger("hostward")

METERED_ITERATIONS = 3
"""Iterations at the end of a run that are timed, operation by operation, and as many soon after its start."""
SETTLED_ITERATIONS = 5
"""After so many, memory and the number of slots have settled."""


@dataclass(slots=True)
class Run:
    """Everything that one training run holds.

    `losses`, `grad_norms`, `skipped` and `iteration_s` lag behind `iteration` by those numbers that are still on their
    way from the device; `collect` brings them up to date.
    """

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
    slot_bytes: int = 0
    """Most device memory of streamed state seen between a step and the next forward."""
    graph_bytes: int = 0
    """Device memory that a CUDA graph of forward and backward keeps between iterations, gradients left out."""
    save_bytes: dict[str, int] = field(default_factory=dict)
    """Host memory that saving has kept from one checkpoint to the next, by owner."""
    save_pinned_bytes: int = 0
    """Of these, page-locked."""
    attachment: Attachment | None = None
    """Offloading of activations, where it is asked for."""
    saved: Path | None = None
    """The newest checkpoint that is complete."""
    saver: Saver | None = None
    """What saves them, from the first save on."""
    locks: list[FolderLock] = field(default_factory=list)
    """That no other run writes into its folders; of the first rank."""
    keeps_folders: bool = False
    """They stay its own when training is over: whoever writes more files there lets go of them."""
    first_iteration: int = 0
    trace: Trace | None = None
    """Of the newest metered iterations, once they are over."""
    offload: OffloadReport | None = None
    """What these say."""
    learning_rates: list[float] = field(default_factory=list)
    predicted: Estimate | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    """Of the plan that the run was started with."""
    watermark: Watermark = field(default_factory=Watermark)
    full_device: FullDevice = field(default_factory=FullDevice)
    ranks: Ranks = field(default_factory=Ranks)
    passes: Passes = field(default_factory=WholeModel)
    """How a batch goes through the model."""
    data_s: float = 0.0
    """Seconds that this process has spent on reading samples."""
    of_ranks: RanksReport | None = None
    """Of a run of several ranks, once it is over."""
    stop_asked: bool = False
    """A signal has asked this process to stop,"""
    stopped: bool = False
    """and the run ends before its last iteration, on all of them (train.exit_signal_handler)."""
    model_parameters: int = field(init=False)
    """Of the whole model, wherever they are."""
    trained_parameters: int = field(init=False)
    """Of these, the ones that are trained."""
    share: Config = field(init=False)
    """`config` as this process sees it: its share of the global batch."""
    sampler: MemorySampler = field(init=False)
    readback: Readback = field(init=False)
    clock_s: float = 0.0
    """When the newest collected iteration ended."""

    def __post_init__(self) -> None:
        self.readback = Readback(self.device)
        self.share = share_of(self.config, self.ranks.data_size)
        elsewhere = self.optimizer.tied.uncounted()
        counted = [p for name, p in self.model.named_parameters() if name not in elsewhere]
        # A DTensor's number is that of all ranks together.
        self.model_parameters = self.ranks.of_model(sum(p.numel() for p in counted))
        self.trained_parameters = self.ranks.of_model(sum(p.numel() for p in counted if p.requires_grad))
        self.begin_at(self.iteration)

    def begin_at(self, iteration: int) -> None:
        """The run begins, or goes on from a checkpoint, with so many iterations done."""
        self.iteration = self.first_iteration = iteration
        self.sampler = MemorySampler(
            self.device,
            self.optimizer.backend.ledger,
            self.model.parameters(),
            staying=staying_gradients(self.share, self.optimizer.inventory, self.optimizer.plan)
            | self.optimizer.tied.names,
            first=iteration,
            until=self.config.train.train_iters,
        )

    def let_go(self) -> None:
        """Other runs may write into its folders."""
        for lock in self.locks:
            lock.release()

    @property
    def microbatches(self) -> int:
        """Of one step, in this process."""
        return self.share.train.global_batch_size // self.share.train.micro_batch_size

    @property
    def tokens_per_iteration(self) -> int:
        return self.config.train.global_batch_size * self.dataset.seq_length


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto`: cuda where there is one. Raises DeviceError for a device that this machine lacks."""
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "train.device=cuda, and no CUDA device is there",
            fix="train.device=cpu or auto; hostward doctor says why none was found",
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"LOCAL_RANK={local_rank} names no CUDA device",
            why=f"this process sees {torch.cuda.device_count()} of them",
            fix="start one process per device with torchrun, or unset it",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


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


def prepare(
    recipe: str, config: Config, *, plan: PlanFile | None = None, run_dir: Path | None = None, force: bool = False
) -> Run:
    """Check the options, read the data, build model and optimizer, and load the checkpoint asked for.

    Args:
        plan: where everything goes, instead of the options.
        run_dir: a folder that the run has to itself, besides that of `checkpoint.save`.
        force: start even if it does not fit by the memory model, or no checkpoint fits the disk, or the plan is for
            another GPU.

    Raises:
        HostwardError: of the kind that names the cause; everything that can be refused before the weights are
            allocated is.
    """
    ranks = Ranks.of(os.environ)
    check(config, world_size=ranks.size)
    ranks = ranks.placed(config)
    device = choose_device(config.train.device, ranks.local_rank)
    for told in [*idle_switches(config), *slow_halves(config, device)] if ranks.first else ():
        log.warning("%s", told)
    if ranks.first and (limit := lock_limit(device)):
        log.info("%s", limit)
    if captured(config):
        require_graphs(device, plan)
    if plan is not None:
        config = with_plan(config, plan)
        if device.type == "cuda" and not force:
            plan.require_machine(torch.cuda.get_device_name(device))
    ranks.join(device, timedelta(minutes=config.dist.distributed_timeout_minutes))
    with ExitStack() as refused:
        locks = lock_folders(config, run_dir, ranks, refused)
        run = _prepared(recipe, config, plan, device, ranks, force=force)
        run.locks = locks
        refused.pop_all()
    return run


def _prepared(
    recipe: str, config: Config, plan: PlanFile | None, device: torch.device, ranks: Ranks, *, force: bool
) -> Run:
    """What `prepare` does once the ranks have met, and no other run saves where this one does."""
    resume_from = ranks.agreed(lambda: checkpointing.checkpoint_to_load(config))
    require_alike(ranks, what_runs(recipe, config, device.type, resume_from, plan))
    dataset, found, waiting = ranks.agreed(
        lambda: weighed(recipe, config, device, plan, resume_from, ranks, force=force)
    )
    require_alike(ranks, {"the data": f"{dataset.description} ({dataset.fingerprint[:8]})"})
    cpus = bind_beside_gpu(ranks, device)
    threads = config.train.num_threads or ranks.torch_threads(cpus)
    if threads is not None:
        torch.set_num_threads(threads)
    seed = config.rng.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    dtype = TORCH_DTYPES[Dtype(config.model.params_dtype)]
    held = hold(
        ranks, config, vocab_size=dataset.vocab_size, device=device, dtype=dtype, seed=seed, on_cpu=waiting is not None
    )
    model, share = held.model, share_of(config, ranks.data_size)
    _require_vocabulary(model, dataset)
    if waiting is not None:
        if resume_from is not None:
            checkpointing.load_weights(model, resume_from)
        move(model, device, weights=waiting.layers)
    # By each rank's own memory and GPU; where one does not know, none uses it.
    mix_of = found.mix_of if all(ranks.gather(found.mix_of is not None)) else None
    # Pages are locked here. A rank that may lock none must not leave the others waiting for it.
    optimizer = ranks.agreed(lambda: make_optimizer(held, share, plan, cpus, mix_of))
    stages = [part.model for part in held.parts]
    for whole in stages or [model]:
        recompute_layers(whole, config, plan)
    run = Run(
        recipe, config, device, dataset, model, optimizer, scaler_of(held, device, dtype), predicted=found.predicted,
        frontier=found.frontier if plan is None else plan.frontier, ranks=ranks, passes=passes_of(held, share, device),
    )  # fmt: skip
    if resume_from is not None and waiting is None:
        checkpointing.load(run, resume_from)
    # It takes weights over as they are.
    run.attachment = ranks.agreed(lambda: attach_activations(model, optimizer, config, plan, stages))
    if resume_from is not None and waiting is not None:
        checkpointing.load(run, resume_from, with_weights=False)
    run.begin_at(run.iteration)
    return run


def is_over(run: Run) -> bool:
    """Whether a run that goes on in its own folder has come to its end before. That there is nothing to do is said."""
    until = run.config.train.train_iters
    if run.iteration >= until:
        log.warning(
            "the checkpoint is at iteration %d and train.train_iters is %d: nothing to do; raise the latter to go on",
            run.iteration,
            until,
        )
    return run.iteration >= until and checkpointing.is_as_it_was(run)


def train(run: Run, *, progress: Callable[[Run], None] | None = None, metered: int = 0) -> None:
    """Train to `train.train_iters`, saving on the way and after the last iteration.

    Args:
        progress: called once per iteration, when its numbers have arrived.
        metered: how many of the last iterations are timed, operation by operation, into `run.trace` and `run.offload`;
            in a long run as many near its start, too. All lanes are emptied before the first of them.
    """
    until = run.config.train.train_iters
    steady = collected_by_hand(run.config.train)
    with checkpointing.saves(run), deterministic(run.config.model.deterministic_mode), closing(run.passes), steady:
        run.clock_s = time.perf_counter()
        for first, end in _windows(run.iteration, until, metered):
            _iterate(run, first, progress)
            if first < end and not run.stopped:
                run.optimizer.wait()
                with run.optimizer.trace() as trace:
                    _iterate(run, end, progress)
                run.trace, run.offload = trace, measured(trace, run.iteration, end - first)
        run.optimizer.wait()
        collect(run, progress, everything=True)
    run.of_ranks = ranks_report(run)


def _windows(iteration: int, until: int, metered: int) -> list[tuple[int, int]]:
    """Iterations [first, end) to meter, in order; the last window ends the run."""
    last = max(iteration, until - metered), max(iteration, until)
    early = iteration + SETTLED_ITERATIONS
    return [(early, early + metered), last] if metered and early + 2 * metered <= last[0] else [last]


def _iterate(run: Run, until: int, progress: Callable[[Run], None] | None) -> None:
    config = run.config
    interval = config.checkpoint.save_interval if config.checkpoint.save is not None else None
    while run.iteration < until and not run.stopped:
        train_iteration(run)
        collect_garbage(config.train, run.iteration)
        checkpointing.look(run)
        run.watermark.look(run.iteration)
        run.full_device.look(run.iteration, run.sampler.steps[-1])
        more = run.iteration < config.train.train_iters  # the last one is saved anyway
        run.stopped = more and config.train.exit_signal_handler and any(run.ranks.gather(run.stop_asked))
        due = more and not run.stopped and interval is not None and run.iteration % interval == 0
        collect(run, progress, everything=due)
        if due:
            checkpointing.save(run)
            run.clock_s = time.perf_counter()


def train_iteration(run: Run) -> None:
    """One optimizer step over the microbatches of one global batch. Enqueued, not waited for."""
    loss = backward(run)
    step(run, loss)
    run.optimizer.zero_grad(set_to_none=True)


def backward(run: Run, *, taken: bool = True) -> torch.Tensor:
    """As `Passes.backward`: forward and backward of every microbatch."""
    return run.passes.backward(run, taken=taken)


def step(run: Run, loss: torch.Tensor) -> None:
    """The optimizer step of the iteration, at the learning rate of the schedule. Its numbers are sent to the host."""
    optimizer = run.optimizer
    lr = learning_rate(run.iteration, run.config.optimizer, run.config.scheduler)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if run.scaler is None:
        optimizer.step()
    else:
        run.scaler.step(optimizer)
        run.scaler.update()
    run.slot_bytes = max(run.slot_bytes, optimizer.backend.ledger.by_owner(Tier.DEVICE).get(SLOTS, 0))
    run.sampler.issued(run.iteration)
    run.learning_rates.append(lr)
    run.readback.send(run.iteration, run.ranks.mean(loss), *optimizer.step_scalars())
    run.iteration += 1


def collect(run: Run, progress: Callable[[Run], None] | None = None, *, everything: bool = False) -> None:
    """Take over the numbers that have arrived, or wait for everything."""
    for numbers in run.readback.arrived(everything=everything):
        run.losses.append(numbers.loss)
        run.grad_norms.append(numbers.grad_norm)
        if numbers.skipped:
            run.skipped.append(numbers.iteration)
        now_s = time.perf_counter()
        run.iteration_s.append(now_s - run.clock_s)
        run.clock_s = now_s
        if progress is not None:
            progress(run)


def _require_vocabulary(model: torch.nn.Module, dataset: TokenDataset) -> None:
    rows = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if dataset.vocab_size > rows:
        raise DataError(
            f"the data needs {dataset.vocab_size} token ids, the model's embedding has {rows} rows",
            fix="raise model.vocab_size, or use the model's own tokenizer",
        )
