"""Accumulate the gradients of weights that two pipeline stages share, which completes them.

Such a weight is an embedding that is the output layer as well. They are not accumulated within backward: the last
stage's ends before the first one's begins, and neither could wait for the other there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from hostward.errors import ConfigError, ModelError
from hostward.model.parameters import ParamRecord, local_of
from hostward.optim.offloaded_grad import OffloadedGrad, Where


class Tied:
    """Tied tracks which gradients must be accumulated over stages, and whether they have been.

    Args:
        groups: by name, the processes that have the same part of a weight, one of each stage that has it.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = groups
        self.names = frozenset(groups)
        self._made: set[str] = set()
        """Weights whose gradients backward has added to since they were accumulated over stages."""
        self._added_up: set[str] = set()
        """Weights whose `.grad` is the sum over stages, or was offloaded with it."""

    def uncounted(self) -> frozenset[str]:
        """Return the weights that count elsewhere in a norm or a number of parameters.

        Each counts with the first of its processes.
        """
        return frozenset(name for name, group in self._groups.items() if group.rank())

    def require_known(self, tracked: Sequence[ParamRecord]) -> None:
        """Raise ModelError for a name that no parameter has."""
        unknown = sorted(self.names - {t.name for t in tracked})
        if unknown:
            raise ModelError(
                f"tied={unknown[0]!r} is no parameter of this optimizer",
                fix="give the names that named_parameters() of the module has",
            )

    def before(self, t: ParamRecord) -> None:
        """Record that backward is about to add to a gradient.

        Raises ModelError for one that was accumulated over stages and not used.
        """
        grad = t.parameter.grad
        if grad is None or (isinstance(grad, OffloadedGrad) and grad.fate.now is not Where.TAKEN):
            self._added_up.discard(t.name)
        if t.name in self._added_up:
            raise ModelError(
                f"a backward after the gradient of {t.name!r} was added up over stages",
                why="what it consists of would be added a second time",
                fix="call optimizer.add_up_tied() once, behind all backward passes of a step, and zero_grad() after it",
            )
        self._made.add(t.name)

    def add_up(self, tracked: Mapping[str, ParamRecord]) -> list[ParamRecord]:
        """Sum in place, over the processes that have a weight, what backward has left in `.grad`.

        Returns the parameters that were summed.
        """
        found = [tracked[name] for name in self._groups if name in self._made]
        for t in found:
            if t.parameter.grad is not None:
                dist.all_reduce(local_of(t.parameter.grad), group=self._groups[t.name])
        self._added_up.update(self._made)
        self._made.clear()
        return found

    def require_added_up(self, tracked: Mapping[str, ParamRecord]) -> None:
        """Raise ModelError before a step with a part of a gradient."""
        left = [name for name in sorted(self._made) if tracked[name].parameter.grad is not None]
        if left:
            raise ModelError(
                f"the gradient of {left[0]!r} is that of one stage alone",
                why="other stages have the same weight, and all would step it otherwise",
                fix="call optimizer.add_up_tied() on all of them when the backward passes of a step are over",
            )
        self._made.clear()

    def forget(self) -> None:
        """Forget all gradients, because they are cleared."""
        self._made.clear()
        self._added_up.clear()


def checked_tied(tied: Mapping[str, dist.ProcessGroup] | None, stages: object, *, sums_on_host: bool) -> Tied:
    """Return the tied weights. Raises ConfigError for what they cannot be combined with."""
    if tied and stages is None:
        raise ConfigError(
            "tied=... without stages=...",
            why="of weights that several stages have one counts in the norm over all",
            fix="say stages= too, or leave tied= out",
        )
    if tied and sums_on_host:
        raise ConfigError(
            f'gradients="host" with {next(iter(tied))!r}, which two stages of a pipeline have',
            why="its gradient is added up over them on the device, when all microbatches are over",
            fix='gradients="device" (optimizer.gradients=device)',
        )
    return Tied(tied or {})
