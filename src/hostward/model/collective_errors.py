"""Ranks that share a model go on together or not at all: what one of them cannot do, all of them refuse."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hostward.distributed.rank_failures import Failure, raised_by_all
from hostward.errors import HostwardError, MemoryLimitError
from hostward.model.parameters import local_of

T = TypeVar("T")


def agreed(parameters: Iterable[torch.Tensor], device: torch.device, body: Callable[[], T]) -> T:
    """What `body` returns here, if it raises on none of the ranks that share these parameters; else every rank raises
    the error of the first that did, which is named. Where all say the same, each raises its own.

    Called by all of them. What this rank has done by then is the caller's to undo.

    Args:
        device: of the parameters. With NCCL alone what ranks say goes over it.
    """
    groups = _sharing(parameters)
    if not groups:
        return body()
    found, error = attempted(body)
    told = _gathered(groups, device, None if error is None else Failure.of(error))
    failures = [failure for _, failure in told]
    if any(failures):
        if error is not None and all(failure == failures[0] for failure in failures):
            raise error
        raise raised_by_all(told) from error
    return cast("T", found)


def attempted(body: Callable[[], T]) -> tuple[T | None, HostwardError | None]:
    """What it returns, or what keeps this rank from going on, for the others to hear."""
    try:
        return body(), None
    except HostwardError as raised:
        return None, raised
    except torch.OutOfMemoryError as raised:
        return None, MemoryLimitError("out of device memory", why=str(raised).partition("\n")[0])


def _sharing(parameters: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The groups of the mesh over whose ranks most are divided, by its dimensions; none where no other rank shares."""
    found: list[dist.ProcessGroup] = []
    most, known = 1, set[Any]()
    for parameter in parameters:
        if local_of(parameter) is parameter:
            continue
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        if mesh in known or mesh.get_coordinate() is None:
            continue
        known.add(mesh)
        if mesh.size() > most:
            from hostward.distributed import fsdp2

            most, found = mesh.size(), fsdp2.mesh_groups(parameter)
    return [group for group in found if group.size() > 1]


def _gathered(
    groups: Iterable[dist.ProcessGroup], device: torch.device, failure: Failure | None
) -> list[tuple[str, Failure | None]]:
    """What each rank of a mesh is called and says, in order of ranks: gathered dimension by dimension."""
    rank = dist.get_rank()
    told = [(rank, f"rank {rank} on {platform.node()}", failure)]
    # Objects travel over a device, if they must, on the one that is current.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for group in groups:
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, told, group=group)
            told = [each for part in parts for each in part]
    return [(name, said) for _, name, said in sorted(told, key=lambda each: each[0])]
