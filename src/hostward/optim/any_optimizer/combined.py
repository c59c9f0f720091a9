"""`CombinedOptimizer` makes several optimizers one, and lets Muon see whole matrices under FSDP2."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch

from hostward.errors import ConfigError, ModelError
from hostward.model.parameters import sharding_of
from hostward.optim.any_optimizer.own_step import check_step, raw_step, step_hooks


class CombinedOptimizer(torch.optim.Optimizer):
    """CombinedOptimizer steps, schedules, saves and loads several optimizers of different parameters as one.

    Its parameter groups are those of the optimizers, in their order, and its state is the state of all: each optimizer
    keeps its own update rule and options. `offload_optimizer_states` takes it as any other optimizer.

    A `torch.optim.Muon` among them orthogonalises whole matrices where FSDP2 shards them: the update of each matrix is
    gathered on one rank, orthogonalised there by torch's own function, and scattered. Weights and momentum are bitwise
    identical to those of one process with the same gradients.

    Args:
        optimizers: any torch optimizers that call their closure once, at least one, each made with its own parameters.
            Use the combined one from then on: they share its groups and state, so their learning rates may be scheduled
            one by one, but `step`, `state_dict`, `load_state_dict` and hooks belong to the combined one.

    Raises:
        ConfigError: there is no optimizer, one is `hostward.AdamW` or LBFGS, or two have a parameter in common.
        ModelError: a step was replaced; Muon has a parameter that is no matrix, or that cannot be gathered.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        _check(optimizers)
        self.optimizers = optimizers
        """They step in this order."""
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            state.update(optimizer.state)
        groups = list(chain.from_iterable(optimizer.param_groups for optimizer in optimizers))
        self._counts = [len(optimizer.param_groups) for optimizer in optimizers]
        self._open = True
        super().__init__(groups, {})
        self._open = False
        self.state = state
        self._share()
        for optimizer in optimizers:
            optimizer.register_state_dict_pre_hook(_refuse_alone, prepend=True)
            optimizer.register_load_state_dict_pre_hook(_refuse_alone, prepend=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ModelError: which of the optimizers is to step the new parameters is not known."""
        if not self._open:
            raise ModelError(
                "add_param_group() of a CombinedOptimizer",
                why="which of its optimizers is to step the new parameters is not known",
                fix="add the group to one of the optimizers, then combine them anew",
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers. Returns what `closure` returns, which is called once, before them.

        Raises:
            ModelError: an optimizer was used on its own since, or has step hooks; a gradient of Muon is not sharded as
                its matrix.
        """
        self._require_shared()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if not parameters:  # where parameters are stepped in several calls, this one is for others
                continue
            own_step = raw_step(type(optimizer))
            if own_step is raw_step(torch.optim.Muon) and any(sharding_of(p) is not None for p in parameters):
                from hostward.optim.any_optimizer.sharded_muon import step_sharded

                step_sharded(cast(torch.optim.Muon, optimizer))
            else:
                own_step(optimizer)
            vars(optimizer)["_opt_called"] = True  # a scheduler of its own looks for it
        return loss

    def _share(self) -> None:
        """Give the optimizers their groups of this one, and its state."""
        first = 0
        for optimizer, count in zip(self.optimizers, self._counts, strict=True):
            groups = self.param_groups[first : first + count]
            optimizer.__setstate__({"state": self.state, "param_groups": groups})
            first += count

    def _require_shared(self) -> None:
        """Raise ModelError where an optimizer has groups, state, a step or step hooks that this one does not know."""
        groups = list(chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers))
        same = len(groups) == len(self.param_groups) and all(map(operator.is_, groups, self.param_groups))
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
            check_step(optimizer)
            if not same or optimizer.state is not self.state:
                raise ModelError(
                    f"the groups or the state of this {name} are no longer those of its CombinedOptimizer",
                    why="it was given parameters or another state on its own",
                    fix="combine the optimizers anew",
                )
            if any(step_hooks(optimizer)):
                raise ModelError(
                    f"this {name} of a CombinedOptimizer has step hooks",
                    why="where parameters are stepped in several calls, they would run several times",
                    fix="register them on the CombinedOptimizer",
                )

    def __getstate__(self) -> dict[str, Any]:
        own = {name: vars(self)[name] for name in ("optimizers", "_counts", "_open")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()


def _refuse_alone(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise ModelError: the state of an optimizer of several is that of all."""
    raise ModelError(
        f"the state of this {type(optimizer).__name__} is saved or loaded on its own",
        why="it shares groups and state with the other optimizers of a CombinedOptimizer",
        fix="save and load the CombinedOptimizer",
    )


def _check(optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Raise ConfigError or ModelError unless these optimizers can be combined."""
    if not optimizers:
        raise ConfigError("CombinedOptimizer() of nothing", fix="CombinedOptimizer(torch.optim.Muon(...), ...)")
    seen: set[torch.Tensor] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"CombinedOptimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer",
                fix="pass optimizers, each made with its own parameters",
            )
        name = type(optimizer).__name__
        state: object = optimizer.state
        ours = type(optimizer).__module__.startswith("hostward.")
        if isinstance(optimizer, torch.optim.LBFGS) or ours or not isinstance(state, dict):
            raise ConfigError(
                f"CombinedOptimizer: {type(optimizer).__module__}.{name} cannot be one of several",
                why="it calls its closure several times, keeps its state elsewhere than in optimizer.state, or is "
                "combined itself",
                fix="step it beside the CombinedOptimizer; of one that is combined, pass the optimizers",
            )
        check_step(optimizer)
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if own & seen:
            shape = tuple(next(iter(own & seen)).shape)
            raise ConfigError(
                f"CombinedOptimizer: a parameter {shape} of this {name} belongs to another of the optimizers too",
                fix="give each parameter to one optimizer",
            )
        seen |= own
        if isinstance(optimizer, torch.optim.Muon):
            _check_matrices(optimizer)
    if len({"param_names" in group for optimizer in optimizers for group in optimizer.param_groups}) > 1:
        raise ConfigError(
            "CombinedOptimizer: some optimizers were made with names of their parameters, others without",
            why="torch saves groups with names or without, not both",
            fix="make all of them from named_parameters(), or none",
        )


def _check_matrices(optimizer: torch.optim.Muon) -> None:
    """Raise ModelError unless all parameters are matrices that are whole or can be gathered."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.ndim != 2:
            raise ModelError(
                f"Muon has a parameter of shape {tuple(p.shape)}",
                why="it orthogonalises matrices",
                fix="give parameters of other than two dimensions to another optimizer, AdamW for one",
            )
        if sharding_of(p) is not None:
            from hostward.optim.any_optimizer.sharded_muon import require_gatherable

            require_gatherable(optimizer, p)
