"""A bound on groups of saved tensors that have left for the host and whose device memory is not free yet."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

from .saved_tensors import Group


class InFlight:
    """At most `most` groups; None: no bound. `release` lets the compute lane wait for their copies and drops them."""

    def __init__(self, most: int | None, release: Callable[[Sequence[Group]], None]) -> None:
        self._most = most
        self._release = release
        self._groups: deque[weakref.ref[Group]] = deque()

    def add(self, group: Group) -> None:
        """A group is about to be sent. While the layer runs that it comes from there may be one, though there be none
        afterwards.
        """
        if self._most is not None:
            self._land(max(0, self._most - 1))
            self._groups.append(weakref.ref(group))

    def rest(self) -> None:
        """A layer has run."""
        if self._most is not None:
            self._land(self._most)

    def _land(self, most: int) -> None:
        while len(self._groups) > most:
            group = self._groups.popleft()()
            if group is not None:  # the window may have released it before
                self._release([group])
