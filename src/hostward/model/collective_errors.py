"""Raise on all ranks that share a model if one of them raises, so that none is left waiting in a collective."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hostward.core.full_device import fix_of
from hostward.distributed.rank_failures import Failure, raised_by_all
from hostward.errors import HostwardError, MemoryLimitError
from hostward.model.parameters import local_of

T = TypeVar("T")


def agreed(parameters: Iterable[torch.Tensor], device: torch.device, body: Callable[[], T]) -> T:
    """Run `body`, and return its result if it raised on none of the ranks that share these parameters.

    Otherwise every rank raises the error of the first rank that failed, which is named; if all ranks fail alike, each
    raises its own error. All these ranks must call this. The caller has to undo what its rank has done by then.

    Args:
        device: of the parameters; with NCCL only, errors are exchanged over it.
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
    """Run `body` and return (result, None), or (None, error) so that other ranks can be told about the error."""
    try:
        return body(), None
    except HostwardError as raised:
        return None, raised
    except torch.OutOfMemoryError as raised:
        fix = fix_of(raised, "raise optimizer.optimizer_offload_fraction")
        return None, MemoryLimitError("out of device memory", why=str(raised).partition("\n")[0], fix=fix)


def _sharing(parameters: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """Return the process groups of the largest mesh over which a parameter is sharded; empty if none is sharded."""
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
    """Gather the name and failure of each rank of a mesh, in order of ranks, one mesh dimension after another."""
    rank = dist.get_rank()
    told = [(rank, f"rank {rank} on {platform.node()}", failure)]
    # NCCL sends objects over the device that is current.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for group in groups:
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, told, group=group)
            told = [each for part in parts for each in part]
    return [(name, said) for _, name, said in sorted(told, key=lambda each: each[0])]
