"""The schedules that turns of one optimizer go by: one for each set of buckets without a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hostward.lowering.optimizer import StepShape, lower_step
from hostward.schedule import Op, Schedule

_KEPT_SCHEDULES = 64


class Schedules:
    """Lowers schedules of a shape when they are needed, each checked by the ordering rule."""

    def __init__(self, shape: StepShape) -> None:
        """Raises OrderingError for a shape whose schedule has a race, which is a defect of the lowering."""
        self.shape = shape
        self.whole = lower_step(shape)
        self._kept: dict[frozenset[int], Mapping[str, tuple[Op, ...]]] = {}

    def points(self, absent: frozenset[int] = frozenset()) -> Mapping[str, tuple[Op, ...]]:
        """Operations by point, of a turn in which the buckets `absent` have no gradient.

        Raises OrderingError as above.
        """
        found = self._kept.get(absent)
        if found is None:
            schedule: Schedule = lower_step(replace(self.shape, absent=absent)) if absent else self.whole
            found = self._kept[absent] = schedule.points
            if len(self._kept) > _KEPT_SCHEDULES:
                del self._kept[next(iter(self._kept))]
        return found
