"""Run the training loop of `hostward train` over a `Run` that `hostward.trainer.setup` has made."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch

from hostward.core.startup import watched
from hostward.runtime.backend import Tier
from hostward.trainer import checkpointing
from hostward.trainer.garbage_collection import collect_if_due, manual_gc_enabled
from hostward.trainer.lr_schedule import learning_rate
from hostward.trainer.report import SLOTS, measured, ranks_report
from hostward.trainer.run import Run

log = logging.getLogger("hostward")

METERED_ITERATIONS = 3
"""Iterations that are timed operation by operation, at the end of a run and soon after its start."""
SETTLED_ITERATIONS = 5
"""Iterations after which memory and the number of GPU staging buffers have settled."""


@contextmanager
def deterministic(enabled: bool) -> Any:
    """Use deterministic algorithms inside the block.

    cuBLAS reads its variable once, when it starts.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def is_over(run: Run) -> bool:
    """Return whether a run that resumes in its own folder has already finished, and log it."""
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
        progress: called once per iteration, when its loss and norm have been copied to the host.
        metered: how many of the last iterations are timed, operation by operation, into `run.trace` and `run.offload`;
            in a long run as many near its start, too. All streams are synchronized before the first of them.
    """
    until = run.config.train.train_iters
    steady = manual_gc_enabled(run.config.train)
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
        with nullcontext() if run.iteration_s else watched(f"running iteration {run.iteration + 1}"):
            train_iteration(run)
        collect_if_due(config.train, run.iteration)
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
    """Enqueue one optimizer step over the microbatches of one global batch, without waiting for it."""
    loss = backward(run)
    step(run, loss)
    run.optimizer.zero_grad(set_to_none=True)


def backward(run: Run, *, taken: bool = True) -> torch.Tensor:
    """Run forward and backward of every microbatch, as `Passes.backward`."""
    set_learning_rate(run)
    return run.passes.backward(run, taken=taken)


def set_learning_rate(run: Run) -> None:
    """Set the scheduled learning rate of the coming step, before its backward: `step_early` makes CPU steps then."""
    lr = learning_rate(run.iteration, run.config.optimizer, run.config.scheduler)
    for group in run.optimizer.param_groups:
        group["lr"] = lr


def step(run: Run, loss: torch.Tensor) -> None:
    """Run the optimizer step at the learning rate that was set, and start copying its loss and norm to the host."""
    optimizer = run.optimizer
    if run.scaler is None:
        optimizer.step()
    else:
        run.scaler.step(optimizer)
        run.scaler.update()
    run.slot_bytes = max(run.slot_bytes, optimizer.backend.ledger.by_owner(Tier.DEVICE).get(SLOTS, 0))
    run.sampler.issued(run.iteration)
    run.learning_rates.append(optimizer.param_groups[0]["lr"])
    run.readback.send(run.iteration, run.ranks.mean(loss), *optimizer.step_scalars())
    run.iteration += 1


def collect(run: Run, progress: Callable[[Run], None] | None = None, *, everything: bool = False) -> None:
    """Record the losses and norms that have reached the host, or wait for all of them."""
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
