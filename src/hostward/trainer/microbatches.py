"""Run the microbatches of a step through the whole model, or through the pipeline stages of this process.

`hostward.trainer.cuda_graph` runs them by CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hostward.trainer.memory_sampler import BACKWARD, FORWARD
from hostward.trainer.models import training_loss
from hostward.trainer.parallel import synchronise_gradients

if TYPE_CHECKING:
    import torch.distributed as dist

    from hostward.config.schema import Config
    from hostward.distributed.pipeline_parallel import Part
    from hostward.trainer.run import Run


class WholeModel:
    """Runs forward and backward of each microbatch before the next."""

    def backward(self, run: Run, *, taken: bool) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=run.device)
        for microbatch in range(run.microbatches):
            last = microbatch == run.microbatches - 1
            inputs, labels = samples(run, microbatch)
            if run.ranks.size > 1:
                synchronise_gradients(run.model, last=last, resharded=run.ranks.resharded)
            with run.optimizer.accumulate(last=taken and last):
                mean = training_loss(run.model, inputs, labels) / run.microbatches
                total += mean.detach().float()
                if last:
                    run.sampler.sample(run.iteration, FORWARD)
                (mean if run.scaler is None else run.scaler.scale(mean)).backward()  # type: ignore[no-untyped-call]
        run.sampler.sample(run.iteration, BACKWARD)
        return total

    def close(self) -> None:
        """Do nothing: no resource outlives an iteration."""


class Pipeline:
    """Runs each microbatch through the pipeline's stages and back, with several in flight at once."""

    def __init__(self, parts: Sequence[Part], stages: dist.ProcessGroup, share: Config, device: torch.device) -> None:
        """Build the schedule of `stages`, the process group; `share`: options with this process's share of the
        batch.
        """
        from hostward.distributed.pipeline_parallel import schedule_of

        train = share.train
        self._parts = parts
        self._microbatches = train.global_batch_size // train.micro_batch_size
        self._schedule = schedule_of(
            parts,
            stages,
            sequences=train.micro_batch_size,
            tokens=share.model.seq_length,
            microbatches=self._microbatches,
            device=device,
            loss=self._loss,
            told=self,
        )
        self._run: Run
        self._taken = False
        self._total: torch.Tensor
        self._left = self._done = 0
        self._order: list[tuple[int, bool]] = []
        """Passes of a step, in order: (index of the part, is backward)."""

    def backward(self, run: Run, *, taken: bool) -> torch.Tensor:
        self._run, self._taken = run, taken
        self._total = torch.zeros((), dtype=torch.float32, device=run.device)
        self._left, self._done = len(self._parts) * self._microbatches, 0
        if run.scaler is not None:
            # The scaler initializes its factor when it first scales a tensor, and only the last stage has a loss.
            run.scaler.scale(self._total)
        first, last = (any(getattr(part, end) for part in self._parts) for end in ("first", "last"))
        inputs = labels = None
        if first or last:
            found = [samples(run, microbatch) for microbatch in range(self._microbatches)]
            inputs, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        given = (inputs,) if first else ()
        self._schedule.step(*given, target=labels if last else None, return_outputs=False)
        run.optimizer.add_up_tied()
        run.sampler.sample(run.iteration, BACKWARD)
        return self._total

    def close(self) -> None:
        """Do nothing: no resource outlives an iteration."""

    def _loss(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        from hostward.distributed.pipeline_parallel import loss_of

        mean = loss_of(self._parts[-1].model, output, labels) / self._microbatches
        self._total += mean.detach().float()
        return mean if self._run.scaler is None else self._run.scaler.scale(mean)

    @contextmanager
    def around(self, part: Part, *, last_of_part: bool) -> Iterator[None]:
        """Set up each pass of a part, as `pipelines.Told.around`."""
        run = self._run
        self._left -= 1
        last = self._left == 0
        if last:
            run.sampler.sample(run.iteration, FORWARD)
        synchronise_gradients(part.model, last=last_of_part, resharded=run.ranks.resharded)
        with run.optimizer.accumulate(last=self._taken and last):
            yield

    def passed(self, part: Part, *, backward: bool) -> None:
        """Record a finished pass, as `pipelines.Told.passed`.

        Every step repeats the order of the first, so the next pass is known from the second step on.
        """
        self._done += 1
        if self._done > len(self._order):
            self._order.append((self._parts.index(part), backward))
        elif self._done < len(self._order) and self._run.attachment is not None:
            place, is_backward = self._order[self._done]
            self._run.attachment.expect(place, backward=is_backward)


def samples(run: Run, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of one of this process's microbatches.

    As in Megatron, ranks take the samples of a step alternately, one microbatch each, so that together they see the
    batch that one process would see.
    """
    began_s = time.perf_counter()
    size, ranks = run.config.train.micro_batch_size, run.ranks
    first = run.iteration * run.config.train.global_batch_size + (microbatch * ranks.data_size + ranks.data_rank) * size
    inputs, labels = (_to_device(a, run.device) for a in run.dataset.batch(first, size))
    run.data_s += time.perf_counter() - began_s
    return inputs, labels


def _to_device(tokens: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy to the device without blocking the host, from pinned memory that torch keeps until the copy is done."""
    tensor = torch.from_numpy(tokens)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
