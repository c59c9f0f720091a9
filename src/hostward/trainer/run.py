"""What one training run holds: setup makes it, the loop moves it on, checkpoints and the report read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from hostward.attachment import Attachment
from hostward.checkpoint.api import Saver
from hostward.config.schema import Config
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
    """Knows how a batch is run."""

    def backward(self, run: Run, *, taken: bool) -> torch.Tensor:
        """Forward and backward of every microbatch; returns their mean loss, float32 on the device, and 0 where it is
        not known: of a pipeline the last stage knows it.

        Args:
            taken: let the optimizer take gradients while the last backward makes them; else all stay in `.grad`.
        """

    def close(self) -> None:
        """The run is over, or has failed."""


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
    passes: Passes
    """How a batch goes through the model."""
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
