"""Offload in `transformers.Trainer` and in every trainer that is built on it, such as those of TRL.

    trainer = offloading(Trainer, offload_fraction=1.0)(model=model, args=args, train_dataset=data)  # the one line
    trainer.train()

`TrainingArguments` keep their meaning: optimizer, groups, schedule and clipping are made of them as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hostward.errors import ConfigError, needed_for
from hostward.optim.adamw import AdamW

with needed_for("hostward.integrations.transformers", "transformers"):
    import accelerate  # noqa: F401
    from transformers import Trainer

from hostward.integrations.accelerate import (
    OffloadedOptimizer,
    has_scheduler,
    offload,
    require_options,
    require_supported,
)

T = TypeVar("T", bound=Trainer)
_Base: Any = Trainer if TYPE_CHECKING else object


class OffloadingTrainer(_Base):  # type: ignore[misc]
    """Comes before a trainer among the bases of a class: `class Mine(OffloadingTrainer, SFTTrainer)`.

    Methods of that trainer may be overridden as before. `trainer.optimizer.optimizer` is the `hostward.AdamW` while it
    trains and afterwards.
    """

    optimizer: Any
    offload_options: Mapping[str, Any] = {"offload_fraction": 1.0}
    """Options of `hostward.AdamW` and `hostward.attach`, as for `offloading`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        require_options("offloading()", cls.offload_options)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator. Raises ConfigError for DeepSpeed, FSDP1 and DataParallel."""
        super().create_accelerator_and_postprocess()
        require_supported(self.accelerator)
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"one process with {self.args.n_gpu} GPUs is not supported",
                why="Trainer would copy the model to each of them in every step (DataParallel)",
                fix=f"torchrun --nproc-per-node {self.args.n_gpu}, or CUDA_VISIBLE_DEVICES=0",
            )
        if "max_grad_norm" in self.offload_options:
            raise ConfigError("max_grad_norm as an option of offloading", fix="TrainingArguments(max_grad_norm=...)")

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Make the trainer's own AdamW, and have it offloaded.

        Raises:
            ConfigError: `args.optim` or `optimizers=` is another optimizer than torch.optim.AdamW, or `offload` refuses
                an option.
        """
        given = self.optimizer
        made = super().create_optimizer(*args, **options)
        if not isinstance(made, OffloadedOptimizer):
            if type(made) is not torch.optim.AdamW:
                raise self._not_offloaded(made, given=made is given)
            if has_scheduler(made):
                source = "optimizers= holds" if made is given else "create_optimizer() makes"
                raise ConfigError(
                    f"{source} a learning-rate scheduler as well",
                    why="the scheduler would go on with that optimizer, which is not the one that steps",
                    fix="TrainingArguments(lr_scheduler_type=..., lr_scheduler_kwargs=...), or an overridden "
                    "create_scheduler(num_training_steps, optimizer)",
                )
            made = self.optimizer = offload(self.accelerator, made, self.model, **self.offload_options)
        return made

    def _not_offloaded(self, made: torch.optim.Optimizer, *, given: bool) -> ConfigError:
        asked = str(getattr(self.args.optim, "value", self.args.optim))
        source = "optimizers= holds" if given else f"optim={asked!r} makes"
        why = "hostward.AdamW is made in place of it, and would train differently"
        if isinstance(made, AdamW):
            why = "a trainer of offloading() makes hostward.AdamW itself, of its arguments"
        fix = 'TrainingArguments(optim="adamw_torch")'
        if given:
            fix = f"leave optimizers= out; {fix} and its learning_rate, adam_beta1, ... make the optimizer"
        others = "" if isinstance(made, AdamW) else "; or a plain trainer, with hostward.offload_optimizer_states()"
        return ConfigError(
            f"{source} {type(made).__module__}.{type(made).__qualname__}, which is not offloaded",
            why=why,
            fix=fix + others,
        )

    def train(self, *args: Any, **options: Any) -> Any:
        """Train; activations and weights are offloaded until it returns or raises."""
        failed = True
        try:
            trained = super().train(*args, **options)
            failed = False
        finally:
            if isinstance(self.optimizer, OffloadedOptimizer):
                self.optimizer.end(failed=failed)
        return trained


def offloading(trainer: type[T], **options: Any) -> type[T]:
    """Return a subclass of a trainer class that offloads; its instances are made and used as before.

    Args:
        trainer: `transformers.Trainer`, or any subclass of it.
        options: of `hostward.AdamW` (offload_fraction, streamed_fraction, gradients, ...), of `hostward.attach`
            (activations, weights, recompute, layers), and plan for both. Where none says what to offload,
            offload_fraction is 1.0. What `TrainingArguments` say is none of them.

    Returns:
        The class; the same one for the same trainer and equal options.

    Raises:
        UnknownNameError: an option that does not exist. ConfigError: `trainer` is no subclass of Trainer. When the
            trainer is made: DeepSpeed, FSDP1 and DataParallel. When it begins to train: an optimizer that
            is not AdamW, and what `offload` and `hostward.AdamW` raise.
    """
    given: object = trainer
    if not (isinstance(given, type) and issubclass(given, Trainer)):
        raise ConfigError(
            f"offloading() of {given!r}, which is no class of trainers",
            fix="offloading(Trainer, offload_fraction=1.0)(model=model, args=args, ...)",
        )
    found = next((c for c in _MADE.get(trainer, ()) if c.offload_options == options), None)
    if found is None:
        bases = (trainer,) if issubclass(trainer, OffloadingTrainer) else (OffloadingTrainer, trainer)
        body = {"__module__": trainer.__module__, "__doc__": trainer.__doc__, "offload_options": options}
        found = type(f"Offloading{trainer.__name__}", bases, body)
        _MADE.setdefault(trainer, []).append(found)
    return found


_MADE: dict[type, list[Any]] = {}
"""Classes that were made, by trainer."""
