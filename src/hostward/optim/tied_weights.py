"""Weights that two stages of a pipeline have, such as an embedding that is the output layer as well: their gradients
are whole once those of both are added up.

Not within backward: the last stage's ends before the first one's begins, and neither could wait for the other there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from hostward.errors import ConfigError, ModelError
from hostward.model.parameters import ParamRecord, local_of
from hostward.optim.offloaded_grad import OffloadedGrad, Where


class Tied:
    """Which gradients wait until they are added up, and whether they have been.

    Args:
        groups: by name, the processes that have the same part of a weight, one of each stage that has it.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = groups
        self._made: set[str] = set()
        """Those that backward has added to since they were added up."""
        self._added_up: set[str] = set()
        """Those whose `.grad` is the sum, or was taken with it."""

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._groups)

    def uncounted(self) -> frozenset[str]:
        """Those that count elsewhere, in a norm or a number of parameters: with the first of their processes."""
        return frozenset(name for name, group in self._groups.items() if group.rank())

    def require_known(self, tracked: Sequence[ParamRecord]) -> None:
        """Raises ModelError for a name that no parameter has."""
        unknown = sorted(self.names - {t.name for t in tracked})
        if unknown:
            raise ModelError(
                f"tied={unknown[0]!r} is no parameter of this optimizer",
                fix="give the names that named_parameters() of the module has",
            )

    def before(self, t: ParamRecord) -> None:
        """Backward is about to add to a gradient. Raises ModelError for one that has been added up and not used."""
        grad = t.parameter.grad
        if grad is None or (isinstance(grad, OffloadedGrad) and grad.became is not Where.TAKEN):
            self._added_up.discard(t.name)
        if t.name in self._added_up:
            raise ModelError(
                f"a backward after the gradient of {t.name!r} was added up over stages",
                why="what it consists of would be added a second time",
                fix="call optimizer.add_up_tied() once, behind all backward passes of a step, and zero_grad() after it",
            )
        self._made.add(t.name)

    def add_up(self, tracked: Mapping[str, ParamRecord]) -> list[ParamRecord]:
        """Sum in place, over the processes that have a weight, what backward has left in `.grad`. Those that were."""
        found = [tracked[name] for name in self._groups if name in self._made]
        for t in found:
            if t.parameter.grad is not None:
                dist.all_reduce(local_of(t.parameter.grad), group=self._groups[t.name])
        self._added_up.update(self._made)
        self._made.clear()
        return found

    def require_added_up(self, tracked: Mapping[str, ParamRecord]) -> None:
        """Raises ModelError before a step with a part of a gradient."""
        left = [name for name in sorted(self._made) if tracked[name].parameter.grad is not None]
        if left:
            raise ModelError(
                f"the gradient of {left[0]!r} is that of one stage alone",
                why="other stages have the same weight, and all would step it otherwise",
                fix="call optimizer.add_up_tied() on all of them when the backward passes of a step are over",
            )
        self._made.clear()

    def forget(self) -> None:
        """Gradients are cleared."""
        self._made.clear()
        self._added_up.clear()


def checked_tied(tied: Mapping[str, dist.ProcessGroup] | None, stages: object, *, sums_on_host: bool) -> Tied:
    """Raises ConfigError for what tied weights cannot be combined with."""
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
