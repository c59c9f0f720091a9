"""What a training loop tells the optimizer between steps: microbatches, waits, traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._compile import _disable_dynamo

from hostward.errors import ModelError
from hostward.fence import unfenced, without_functions
from hostward.schedule import Lane

from .accumulation import Accumulation
from .placeholder import Where
from .tracing import Tracing
from .unfenced import UnfencedReads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostward.engine.backend import Backend
    from hostward.inspect import Tracked

    from .binding import Memory
    from .gradients import Handover
    from .step import StepIssuer


ROOT = "root"
"""Stands for the layer of parameters that the module itself owns."""


class StepScalars(NamedTuple):
    """What a step tells, on the device: float32 [1] norm before clipping, int32 [1] 1 where the step was skipped."""

    norm: torch.Tensor
    skipped: torch.Tensor


class Control(torch.optim.Optimizer):
    """The part of `hostward.AdamW` that a loop calls besides `step`."""

    _backend: Backend | None
    _issuer: StepIssuer
    _handover: Handover
    _overlap: bool
    _memory: Memory
    _tracked: Sequence[Tracked]
    _scaled: bool
    """A gradient scaler has looked at the gradients of the last step."""

    @property
    def backend(self) -> Backend:
        """The backend that carries out the steps; its `ledger` counts bytes by tier and owner."""
        if self._backend is None:
            raise ModelError("the optimizer has no backend yet")
        return self._backend

    def accumulate(self, *, last: bool) -> Accumulation:
        """A context for the forward and backward of one microbatch.

            for i, batch in enumerate(microbatches):
                with optimizer.accumulate(last=i == len(microbatches) - 1):
                    loss(model, batch).backward()
            optimizer.step()

        In the last one gradients are taken as backward makes them: they leave for the host while backward goes on,
        and their device memory is freed. `.grad` then holds a placeholder that raises ModelError when it is used.
        Without this context gradients are taken at `step`, with the same result. Those that are added up on the host
        (`gradients="host"`) leave in every backward, within this context or not.

        Under DistributedDataParallel, which reduces gradients when backward is over, they are taken at the end of the
        block.

        Rounds add up until `step`, whichever of them was called the last one. `step` uses gradients up: the next round
        starts anew, with `zero_grad` in between or without it. With `overlap=False` `.grad` stays as it is, and what
        `zero_grad` does not clear is added to, as with torch.optim.

        Args:
            last: whether no further microbatch will add to the gradients of this step.
        """
        return Accumulation(self._handover, self._issuer, self._abandon, last=last and self._overlap)

    @_disable_dynamo
    @unfenced
    @torch.no_grad()
    def add_up_tied(self) -> None:
        """Add up the gradients of `tied` weights over the processes that have them. All of these call it when the
        backward passes of a step are over, before `step()`, and before a gradient scaler or a loop of one's own looks
        at gradients. Until then these gradients stay in `.grad`. No wait of the host on a GPU.
        """
        self._handover.add_up_tied()

    @unfenced
    def _abandon(self) -> None:
        """Backward was cut short: what was taken is lost."""
        self._issuer.discard()
        self._handover.mark(Where.LOST)

    @unfenced
    def discard_gradients(self) -> None:
        """Forget what has been taken of gradients; `zero_grad` does this as well."""
        self._issuer.discard()
        self._handover.forget()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, taken ones included."""
        self.discard_gradients()
        with without_functions():
            super().zero_grad(set_to_none)

    def replayed(self) -> None:
        """Say that a CUDA graph has written the gradients in `.grad`: they stay there, whatever ran before the replay.

        A loop that does nothing but replay and step need not call this: the capture says it.
        """
        self._handover.captured = True

    def trace(self) -> Tracing:
        """A context that times every operation of the steps inside: `with optimizer.trace() as trace: ...`.

        Afterwards `trace.write(path)` writes a file for Perfetto, and `trace.summary()` tells what was hidden.
        """
        return Tracing(self.backend, self._issuer)

    def find_unfenced_reads(self) -> UnfencedReads:
        """A context, for debugging, in which a use of a weight that has not arrived raises OrderingError."""
        return UnfencedReads(self._issuer, self._tracked, {t.name: t.layer or ROOT for t in self._tracked})

    def wait(self) -> None:
        """Return when every weight has its new value. Raises what a host step reported."""
        self._issuer.use_all()
        self._issuer.synchronise()

    def arrive(self) -> None:
        """Make the current stream wait for every new weight, without waiting on the host, and bring offloaded weights
        to the device until their layers have run.

        Hooks do this by layer, and the fence for whatever else reads a weight. Call it before the replay of a CUDA
        graph on another stream, before weights are read by their addresses, and with `fence=False` before any read.
        """
        self._issuer.arrive()
        if not self.backend.capturing():
            self.backend.follow_compute()  # what has arrived before was waited for on another stream, maybe

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last step before clipping, inf where a gradient was not finite. Waits for the
        norm, not for the host's part of the step.
        """
        return float(self.step_scalars().norm.item())

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step found non-finite gradients and left everything as it was. Waits for the norm, not for
        the host's part of the step.
        """
        return bool(self.step_scalars().skipped.item())

    @property
    def step_was_skipped(self) -> bool:
        """What accelerate asks of an optimizer that it does not wrap, one that has `_is_accelerate_prepared = True`:
        whether a gradient scaler took part in the last step and it was skipped. Waits for nothing without a scaler.
        """
        return self._scaled and self.last_step_skipped

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself, for accelerate, which looks for what it believes to have wrapped. It exists only where
        `_is_accelerate_prepared` is set: others unwrap for as long as there is an `optimizer`.
        """
        if not vars(self).get("_is_accelerate_prepared", False):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'optimizer'")
        return self

    def step_scalars(self) -> StepScalars:
        """Norm and skip flag of the last step, on the device: for logs that do not wait. The next step overwrites both;
        copy them on the current stream.
        """
        self.backend.mark("offload/scalars", Lane.COMPUTE).issue()
        scalars = self._memory.device_scalars
        return StepScalars(scalars.norm.data, scalars.skip.data)
