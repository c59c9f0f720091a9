"""Describe shards that are runs of flattened parameters, as owners of flat buffers cut them.

The gradient norm adds up chunks of 4,096 elements, counted in the whole parameter (docs/exactness.md). Where a border
between shards lies within a chunk, the processes that have parts of it add it up together. All of them have to know of
all these chunks, in one order: so each sends the others which parts it has, once, when its `FlatShards` are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch.distributed as dist

from hostward.errors import ConfigError, ModelError
from hostward.runtime.global_norm import shared_chunks


@dataclass(frozen=True, slots=True)
class FlatPart:
    """FlatPart says which elements of a whole parameter a flat shard has.

    Args:
        whole: name of the whole parameter, the same on all processes that have parts of it.
        start, stop: its elements are [start, stop) of the flattened parameter.
        numel: elements of the whole parameter.

    Raises:
        ConfigError: a name that is no text; not 0 <= start < stop <= numel, in whole numbers.
    """

    whole: str
    start: int
    stop: int
    numel: int

    def __post_init__(self) -> None:
        if [type(value) for value in (self.whole, self.start, self.stop, self.numel)] != [str, int, int, int]:
            raise ConfigError(f"{self} is no part of a parameter", fix="a name, and three whole numbers of elements")
        if not 0 <= self.start < self.stop <= self.numel:
            raise ConfigError(
                f"{self} is no part of a parameter of {self.numel:,} elements",
                why="it has elements [start, stop), at least one of them",
                fix="0 <= start < stop <= numel; of parameters of which a process has nothing it names no part",
            )

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.numel


class FlatShards:
    """FlatShards are the flat parts that this process has, and what is known of those of the others.

    All processes of the group make them together, those without any part as well. This is the only time that they
    exchange anything but the norm itself. Parameters that are cut among other processes, such as experts, have
    `FlatShards` of their own.

    Args:
        parts: by the names that the parameters have in the optimizer; empty where this process has none.
        group: the processes among which these parameters are cut; None: this one has all parts.

    Raises:
        ConfigError: a value that is no FlatPart; a group without this process. ModelError, on all of the processes:
            an element that two parts have, or none; two sizes of one whole parameter.
    """

    def __init__(self, parts: Mapping[str, FlatPart], group: dist.ProcessGroup | None = None) -> None:
        for name, part in parts.items():
            if not isinstance(part, FlatPart):
                raise ConfigError(f"the part of {name!r} is {part!r}", fix="FlatPart(whole, start, stop, numel)")
        if group is not None and dist.get_rank(group) < 0:
            raise ConfigError("FlatShards over a group without this process", fix="make them on its processes alone")
        self.parts: Mapping[str, FlatPart] = MappingProxyType(dict(parts))
        self.group = group
        self._wholes = _wholes(_of_all(list(parts.values()), group))

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that counts, in a larger group, what all of these have."""
        return self.group is None or self.group.rank() == 0

    def shared_chunks(self) -> list[tuple[str, int]]:
        """Return the chunks of the norm of which there are several parts.

        They are (whole parameter, index of the chunk within it), in the same order on all processes of the group.
        """
        return [
            (whole, chunk)
            for whole, parts in self._wholes.items()
            for chunk in shared_chunks((part.start for part in parts), parts[0].numel)
        ]


def _of_all(own: list[FlatPart], group: dist.ProcessGroup | None) -> list[tuple[FlatPart, int]]:
    """Return the parts of all processes, each with the process that has it."""
    parts_of = [own]
    if group is not None and group.size() > 1:
        parts_of = [[] for _ in range(group.size())]
        dist.all_gather_object(parts_of, own, group=group)
    return [(part, process) for process, parts in enumerate(parts_of) for part in parts]


def _wholes(given: Sequence[tuple[FlatPart, int]]) -> dict[str, list[FlatPart]]:
    """Return the parts of each whole parameter in order. Raises ModelError unless each element is in one of them."""
    found: dict[str, list[tuple[FlatPart, int]]] = {}
    for part, process in sorted(given, key=lambda each: (each[0].whole, each[0].start, each[0].stop)):
        found.setdefault(part.whole, []).append((part, process))
    for whole, parts in found.items():
        first, before = parts[0]
        for part, process in parts:
            if part.numel != first.numel:
                raise ModelError(
                    f"{whole!r} has {first.numel:,} elements on process {before}, and {part.numel:,} on {process}",
                    why="parts of one name are parts of one parameter",
                    fix="name parameters apart, or make FlatShards of each group of processes",
                )
        _require_each_once(whole, parts)
    return {whole: [part for part, _ in parts] for whole, parts in found.items()}


def _require_each_once(whole: str, parts: Sequence[tuple[FlatPart, int]]) -> None:
    """Raise ModelError unless each element of a whole parameter is in one of its parts, which are in order."""
    reached, before = 0, -1
    for part, process in parts:
        if part.start < reached:
            raise ModelError(
                f"elements [{part.start:,}, {min(reached, part.stop):,}) of {whole!r} are in two parts, of processes "
                f"{before} and {process}",
                why="both would step them, and the norm would count them twice",
                fix="give each element to one process; replicas are `uncounted`, in another group or in none",
            )
        if part.start > reached:
            break
        reached, before = part.stop, process
    numel, start = parts[0][0].numel, next((part.start for part, _ in parts if part.start > reached), None)
    if reached < numel:
        raise ModelError(
            f"elements [{reached:,}, {numel if start is None else start:,}) of {whole!r} are in no part",
            why="nobody would step them, and the norm would not count them",
            fix="make FlatShards on all processes that have parts, of all parts that each has",
        )
