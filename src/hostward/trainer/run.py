"""Hold the state of one training run, which setup makes, the loop advances, and checkpoints and the report read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from hostward.attachment import Attachment
from hostward.checkpoint.api import Saver
from hostward.config.schema import Config
from hostward.core.startup import Startup
from hostward.files.folder_lock import FolderLock
from hostward.optim.adamw import AdamW
from hostward.plan.decisions import FrontierPoint
from hostward.report.schema import Estimate, OffloadReport, RanksReport
from hostward.runtime.step_trace import Trace
from hostward.trainer.data.dataset import TokenDataset
from hostward.trainer.memory_sampler import FullDevice, MemorySampler, Watermark
from hostward.trainer.offload_options import share_of, staying_gradients
from hostward.trainer.process_group import Ranks
from hostward.trainer.readback import Readback


class Passes(Protocol):
    """Runs the forward and backward passes of a batch."""

    def backward(self, run: Run, *, taken: bool) -> torch.Tensor:
        """Run forward and backward of every microbatch and return their mean loss.

        The loss is float32 on the device. On pipeline stages other than the last, which do not know it, it is 0.

        Args:
            taken: let the optimizer offload gradients during the last backward; else all stay in `.grad`.
        """

    def close(self) -> None:
        """Release resources after the run is over or has failed."""


@dataclass(slots=True)
class Run:
    """Holds everything that one training run owns.

    `losses`, `grad_norms`, `skipped` and `iteration_s` lag behind `iteration` while their values are being copied from
    the device; `collect` brings them up to date.
    """

    recipe: str
    config: Config
    device: torch.device
    dataset: TokenDataset
    model: torch.nn.Module
    optimizer: AdamW
    scaler: torch.amp.GradScaler | None
    passes: Passes
    """Runs a batch through the model."""
    iteration: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    slot_bytes: int = 0
    """Peak device bytes of GPU staging buffers between a step and the next forward."""
    graph_bytes: int = 0
    """Device memory that a CUDA graph of forward and backward keeps between iterations, gradients left out."""
    save_bytes: dict[str, int] = field(default_factory=dict)
    """Host memory that saving has kept from one checkpoint to the next, by owner."""
    save_pinned_bytes: int = 0
    """Pinned part of `save_bytes`."""
    attachment: Attachment | None = None
    """Activation and weight offloading, if enabled."""
    saved: Path | None = None
    """Newest complete checkpoint."""
    saver: Saver | None = None
    """Checkpoint saver, made at the first save."""
    locks: list[FolderLock] = field(default_factory=list)
    """Output folders' locks (rank 0 only)."""
    keeps_folders: bool = False
    """True if the folders stay locked after training; the caller that writes more files there releases them."""
    first_iteration: int = 0
    trace: Trace | None = None
    """Trace of the newest metered iterations, once they are over."""
    offload: OffloadReport | None = None
    """Summarizes `trace`."""
    learning_rates: list[float] = field(default_factory=list)
    predicted: Estimate | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    """Alternatives to the plan that the run was started with."""
    watermark: Watermark = field(default_factory=Watermark)
    full_device: FullDevice = field(default_factory=FullDevice)
    ranks: Ranks = field(default_factory=Ranks)
    data_s: float = 0.0
    """Seconds that this process has spent reading samples."""
    startup: Startup = field(default_factory=Startup)
    """Seconds of the phases before the first iteration."""
    of_ranks: RanksReport | None = None
    """Report of all ranks, once a run of several ranks is over."""
    stop_asked: bool = False
    """A signal has asked this process to stop."""
    stopped: bool = False
    """The run ends early on all ranks (train.exit_signal_handler)."""
    model_parameters: int = field(init=False)
    """Parameter number of the whole model, on all ranks and tiers."""
    trained_parameters: int = field(init=False)
    """Trainable part of `model_parameters`."""
    share: Config = field(init=False)
    """`config` with this process's share of the global batch."""
    sampler: MemorySampler = field(init=False)
    readback: Readback = field(init=False)
    clock_s: float = 0.0
    """Time at which the newest collected iteration ended."""

    def __post_init__(self) -> None:
        self.readback = Readback(self.device)
        self.share = share_of(self.config, self.ranks.data_size)
        elsewhere = self.optimizer.tied.uncounted()
        counted = [p for name, p in self.model.named_parameters() if name not in elsewhere]
        # A DTensor counts the elements of all ranks together.
        self.model_parameters = self.ranks.of_model(sum(p.numel() for p in counted))
        self.trained_parameters = self.ranks.of_model(sum(p.numel() for p in counted if p.requires_grad))
        self.begin_at(self.iteration)

    def begin_at(self, iteration: int) -> None:
        """Start the run, or resume it from a checkpoint, with this many iterations done."""
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

    def release_folders(self) -> None:
        """Release the locks, so that other runs may write into the folders."""
        for lock in self.locks:
            lock.release()

    @property
    def microbatches(self) -> int:
        """Return the microbatches of one step in this process."""
        return self.share.train.global_batch_size // self.share.train.micro_batch_size

    @property
    def tokens_per_iteration(self) -> int:
        return self.config.train.global_batch_size * self.dataset.seq_length
