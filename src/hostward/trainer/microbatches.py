"""How the microbatches of a step go through the model: the whole of it here, or a stage of it on each process.
`hostward.trainer.cuda_graph` has one more way.
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
    """Each microbatch goes forward and backward before the next."""

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
        """Nothing outlives an iteration."""


class Pipeline:
    """Each microbatch goes from stage to stage and back; several are on their way at once."""

    def __init__(self, parts: Sequence[Part], stages: dist.ProcessGroup, share: Config, device: torch.device) -> None:
        """`share`: the options as this process sees them; `stages`: the processes that hold them."""
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
        """Passes of a step: of which part, and whether backward."""

    def backward(self, run: Run, *, taken: bool) -> torch.Tensor:
        self._run, self._taken = run, taken
        self._total = torch.zeros((), dtype=torch.float32, device=run.device)
        self._left, self._done = len(self._parts) * self._microbatches, 0
        if run.scaler is not None:
            # It makes its factor when it first scales something, and the last stage alone has a loss.
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
        """Nothing outlives an iteration."""

    def _loss(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        from hostward.distributed.pipeline_parallel import loss_of

        mean = loss_of(self._parts[-1].model, output, labels) / self._microbatches
        self._total += mean.detach().float()
        return mean if self._run.scaler is None else self._run.scaler.scale(mean)

    @contextmanager
    def around(self, part: Part, *, last_of_part: bool) -> Iterator[None]:
        """As `pipelines.Told`."""
        run = self._run
        self._left -= 1
        last = self._left == 0
        if last:
            run.sampler.sample(run.iteration, FORWARD)
        synchronise_gradients(part.model, last=last_of_part, resharded=run.ranks.resharded)
        with run.optimizer.accumulate(last=self._taken and last):
            yield

    def passed(self, part: Part, *, backward: bool) -> None:
        """As `pipelines.Told`. Every step has the order of the first: what is next is known from the second on."""
        self._done += 1
        if self._done > len(self._order):
            self._order.append((self._parts.index(part), backward))
        elif self._done < len(self._order) and self._run.attachment is not None:
            place, is_backward = self._order[self._done]
            self._run.attachment.expect(place, backward=is_backward)


def samples(run: Run, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one of this process's microbatches. As in Megatron, the samples of a step go to the ranks in
    turns of a microbatch, so that together they see the batch that one process would see.
    """
    began_s = time.perf_counter()
    size, ranks = run.config.train.micro_batch_size, run.ranks
    first = run.iteration * run.config.train.global_batch_size + (microbatch * ranks.data_size + ranks.data_rank) * size
    inputs, labels = (_to_device(a, run.device) for a in run.dataset.batch(first, size))
    run.data_s += time.perf_counter() - began_s
    return inputs, labels


def _to_device(tokens: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for: from pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(tokens)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
