"""Offload in backward under Lightning: a callback for its Trainer, and a context for Fabric's loops.

    Trainer(callbacks=[hostward.integrations.lightning.OffloadCallback()], gradient_clip_val=1.0)

`configure_optimizers` returns a `hostward.AdamW` made from the LightningModule; nothing else changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hostward.attachment import Activations, Attachment, attach
from hostward.errors import ConfigError, ModelError, NotBuiltError, needed_for
from hostward.optim.adamw import Accumulation, AdamW
from hostward.weights.offload import Weights

with needed_for("hostward.integrations.lightning", "lightning"):
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy


class OffloadCallback(Callback):  # type: ignore[misc]
    """Offloads gradients in backward, clips in the optimizer's step, and attaches offloading for as long as a fit runs.

    The last microbatch of each step is known from `accumulate_grad_batches` and the end of the epoch; a wrong guess
    (a `training_step` that fetches its own batches) costs time and changes nothing. With manual optimization gradients
    are offloaded at `step()`, or in the module's own `with optimizer.accumulate(last=...)`.

    `gradient_clip_val` becomes the optimizer's `max_grad_norm` during `fit`, in every precision: the trainer itself
    cannot clip gradients that have been offloaded, or that a GradScaler has left for the optimizer to unscale.

    Args:
        activations, weights, recompute, plan, layers: as in `hostward.attach`, which is called when training starts if
            any of the first four is given, and undone when it ends or fails. `attachment` is then its result.

    Raises, before the first batch:
        ModelError: no optimizer of hostward, and nothing to attach. ConfigError: gradients clipped by value or in
            `configure_gradient_clipping`; two different limits of the norm; several optimizers to attach with; what
            `hostward.attach` raises. NotBuiltError: a strategy of DeepSpeed or FSDP1.
    """

    def __init__(
        self,
        *,
        activations: Activations | int | None = None,
        weights: Weights | int | None = None,
        recompute: Sequence[str] | Mapping[str, int | None] | None = None,
        plan: object = None,
        layers: Sequence[torch.nn.Module] | None = None,
    ) -> None:
        asked = {"activations": activations, "weights": weights, "recompute": recompute, "plan": plan}
        self._asked: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        self._layers = layers
        self._undo: list[tuple[Any, str, object]] = []
        self._microbatch: Accumulation | None = None
        self._made = False
        """Backward has made gradients since the last step."""
        self.attachment: Attachment | None = None

    # ---------------------------------------------------------------- the fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = _optimizers(trainer)
        if not mine and not self._asked:
            raise ModelError(
                "OffloadCallback in a fit without an optimizer of hostward",
                why=f"configure_optimizers returned {[type(o).__name__ for o in trainer.optimizers]}",
                fix="return hostward.AdamW(self, ...) from configure_optimizers, or leave the callback out",
            )
        if mine:
            _require_strategy(trainer)
        if mine and pl_module.automatic_optimization:
            self._take_over_clipping(trainer, pl_module, mine[0])

    def _take_over_clipping(self, trainer: Trainer, module: LightningModule, optimizer: AdamW) -> None:
        if type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping:
            raise ConfigError(
                f"{type(module).__name__}.configure_gradient_clipping together with OffloadCallback",
                why="gradients are on the host, or on their way, when it is called",
                fix="remove it and give Trainer(gradient_clip_val=...) or hostward.AdamW(max_grad_norm=...); or leave "
                "the callback out: gradients are then offloaded in step(), after it",
            )
        limit = trainer.gradient_clip_val
        if not limit or limit < 0:
            return  # as in Lightning
        if trainer.gradient_clip_algorithm == "value":
            raise ConfigError(
                'gradient_clip_algorithm="value" together with OffloadCallback',
                why="the optimizer's step clips by the norm of all gradients, and they are offloaded before the "
                "trainer would clip each value",
                fix='gradient_clip_algorithm="norm", or leave the callback out',
            )
        if optimizer.max_grad_norm not in (0, limit):
            raise ConfigError(
                f"Trainer(gradient_clip_val={limit}) and AdamW(max_grad_norm={optimizer.max_grad_norm})",
                why="both limit the norm of the gradients, and only one of them can",
                fix="leave one of them out",
            )
        self._set(optimizer, "max_grad_norm", float(limit))
        self._set(trainer, "gradient_clip_val", None)

    def _set(self, owner: Any, name: str, value: object) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._asked:
            return
        mine = _optimizers(trainer)
        if len(mine) > 1:
            raise ConfigError(
                f"OffloadCallback({', '.join(self._asked)}) with {len(mine)} optimizers of hostward",
                why="copies share the streams of one optimizer",
                fix="call hostward.attach(part, its_optimizer, ...) for each part in the module's own on_train_start",
            )
        self.attachment = attach(pl_module, mine[0] if mine else None, layers=self._layers, **self._asked)

    def _end(self, trainer: Trainer, error: BaseException | None = None) -> None:
        after_backward = self._microbatch is None
        self._leave(error)
        self._made = False
        while self._undo:
            setattr(*self._undo.pop())
        for optimizer in _optimizers(trainer):
            if optimizer.asleep:  # Lightning moves the model next
                optimizer.wake(("weights", "gradients"))
        if self.attachment is not None:
            if after_backward:  # gradients of a step that did not come, with which detaching is refused
                for optimizer in _optimizers(trainer):
                    optimizer.zero_grad()
            self.attachment.detach()
            self.attachment = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer)

    # ---------------------------------------------------------------- one microbatch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Before forward, which is where DistributedDataParallel is noticed. (A batch before which the module ended the
        # epoch was not left.)
        self._leave()
        mine = _optimizers(trainer)
        if mine and pl_module.automatic_optimization:
            number = batch_idx + 1
            ends = number % trainer.accumulate_grad_batches == 0
            last = ends or trainer.is_last_batch or number == trainer.num_training_batches
            microbatch = mine[0].accumulate(last=last)
            microbatch.__enter__()
            self._microbatch = microbatch

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()
        self._made = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._leave()  # training_step returned None: there was no backward
        if isinstance(optimizer, AdamW) and pl_module.automatic_optimization and not self._made:
            # StochasticWeightAveraging runs an epoch without backward for its batch norms, and then a step, in which
            # torch's AdamW uses the gradients of the step before once more.
            optimizer.zero_grad()
        self._made = False

    def _leave(self, error: BaseException | None = None) -> None:
        microbatch, self._microbatch = self._microbatch, None
        if microbatch is not None:
            microbatch.__exit__(None if error is None else type(error), error, None)


def _optimizers(trainer: Trainer) -> list[AdamW]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, AdamW)]


def _require_strategy(trainer: Trainer) -> None:
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        raise NotBuiltError(
            f"OffloadCallback with {type(trainer.strategy).__name__}",
            why="it shards the optimizer's state, or flattens the parameters that the state belongs to",
            fix='strategy="ddp", or ModelParallelStrategy with fully_shard in configure_model',
        )


@contextlib.contextmanager
def accumulate(fabric: Fabric, model: torch.nn.Module, optimizer: AdamW, *, last: bool) -> Iterator[None]:
    """Return a context for forward and `fabric.backward` of one microbatch, in a loop of Fabric.

        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(hostward.AdamW(model.module, max_grad_norm=1.0, offload_fraction=1.0))
        ...
            with accumulate(fabric, model, optimizer, last=i == len(batches) - 1):
                fabric.backward(loss_of(model, batch) / len(batches))

    It is `optimizer.accumulate(last=last)` within `fabric.no_backward_sync(model, enabled=not last)`. The optimizer
    clips; `fabric.clip_gradients` raises ModelError afterwards, because gradients are not in `.grad` any more.

    Args:
        model, optimizer: what `fabric.setup_module` and `fabric.setup_optimizers` returned.
        last: whether no further microbatch will add to the gradients of this step.
    """
    with fabric.no_backward_sync(model, enabled=not last), optimizer.accumulate(last=last):
        yield
