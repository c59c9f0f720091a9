"""This module makes steps of torch's Muon where FSDP2 shards matrices: each is whole while it is orthogonalised.

    every rank    momentum and update of its parts, in bf16
    all-to-all    parts of each matrix to its owner
    owner         torch's Newton-Schulz iteration of the whole matrix
    all-to-all    parts of the result to their ranks
    every rank    weights of its parts

Momentum, update and weights are elementwise, and the iteration begins by rounding to bf16: what is exchanged is what it
would round to, so that bits are those of one process. Matrices are exchanged in batches, in the order of parameters, in
which their momentum is reloaded from the host. The first exchange of a batch overlaps with the iterations of the batch
before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import _muon

from hostward.core.units import MIB
from hostward.distributed import fsdp2
from hostward.errors import ModelError
from hostward.model.parameters import local_of, sharding_of
from hostward.optim.any_optimizer.own_step import narrowed, raw_step
from hostward.optim.any_optimizer.state_entry import at_rest

BATCH_BYTES = 64 * MIB
"""A batch takes no more matrices once it has one, and this many bytes of whole ones in bf16, for each rank."""


@dataclass(eq=False, frozen=True, slots=True)
class _Matrix:
    """_Matrix is one parameter, its options, and how the ranks of `ranks` share it; None: this rank has all of it."""

    parameter: torch.Tensor
    group: dict[str, Any]
    split: fsdp2.Split | None
    ranks: dist.ProcessGroup | None

    @property
    def n_ranks(self) -> int:
        return self.split.n_parts if self.split else 1

    @property
    def index(self) -> int:
        return self.split.index if self.split else 0

    def part(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return a view of what rank `index` has of a tensor of the matrix's shape."""
        if self.split is None:
            return whole
        return whole.narrow(self.split.dim, *self.split.cut(0, whole.shape[self.split.dim], index))

    def part_shape(self, index: int) -> tuple[int, int]:
        rows, columns = self.parameter.shape
        if self.split is None:
            return rows, columns
        _, length = self.split.cut(0, self.parameter.shape[self.split.dim], index)
        return (length, columns) if self.split.dim == 0 else (rows, length)

    def part_elements(self, index: int) -> int:
        rows, columns = self.part_shape(index)
        return rows * columns

    @property
    def work(self) -> int:
        """Return what the iteration costs, in multiplications up to a factor that all matrices share."""
        return self.parameter.numel() * min(self.parameter.shape)


def require_gatherable(optimizer: torch.optim.Muon, parameter: torch.Tensor) -> None:
    """Raise ModelError for a matrix that is not sharded by one dimension of a mesh, over ranks."""
    fsdp2.shard_ranks(_name(optimizer, parameter), parameter)


def _name(optimizer: torch.optim.Muon, parameter: torch.Tensor) -> str:
    """Return the parameter's name if the optimizer knows it, or its shape."""
    for group in optimizer.param_groups:
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False):
            if p is parameter:
                return str(name)
    return f"of shape {tuple(parameter.shape)}"


@torch.no_grad()
def step_sharded(optimizer: torch.optim.Muon) -> None:
    """Step all parameters; those that are not sharded are stepped by Muon's own step.

    Raises:
        ModelError: a gradient or momentum is not sharded as its matrix, or the step would write into the momentum.
    """
    plain = [p for group in optimizer.param_groups for p in group["params"] if sharding_of(p) is None]
    if plain:
        with narrowed(optimizer, plain):
            raw_step(torch.optim.Muon)(optimizer)
    by_ranks: dict[dist.ProcessGroup | None, list[_Matrix]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if sharding_of(p) is not None and p.grad is not None:
                matrix = _matrix(optimizer, group, p)
                by_ranks.setdefault(matrix.ranks, []).append(matrix)
    for matrices in by_ranks.values():
        before: Iterator[None] = iter(())
        for batch in _batches(matrices):
            step = _step_batch(optimizer, batch)
            next(step)
            next(before, None)
            before = step
        next(before, None)


def _matrix(optimizer: torch.optim.Muon, group: dict[str, Any], parameter: torch.Tensor) -> _Matrix:
    gradient = parameter.grad
    if gradient is None or sharding_of(gradient) is None or not fsdp2.same_placement(gradient, parameter):
        raise ModelError(
            f"parameter {_name(optimizer, parameter)!r} of Muon has a gradient that is not sharded as it is",
            why="each rank makes the update of its part from its part of the gradient",
            fix="step after FSDP2 has reduced the gradients",
        )
    momentum = at_rest(optimizer.state.get(parameter, {})).get("momentum_buffer")
    if momentum is not None and (sharding_of(momentum) is None or not fsdp2.same_placement(momentum, parameter)):
        raise ModelError(
            f"parameter {_name(optimizer, parameter)!r} of Muon has a momentum that is not sharded as it is",
            why="a state that was saved without FSDP2, or by other ranks, was loaded as it is",
            fix="load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it",
        )
    if gradient.dtype is torch.bfloat16 and not group["nesterov"]:
        raise ModelError(
            f"parameter {_name(optimizer, parameter)!r} of Muon: bf16 gradients with nesterov=False",
            why="torch's step then divides the momentum itself by its norm, which sharded matrices do not repeat",
            fix="nesterov=True, or parameters in float32",
        )
    split, ranks = fsdp2.shard_ranks(_name(optimizer, parameter), parameter) or (None, None)
    return _Matrix(parameter, group, split, ranks)


def _batches(matrices: Iterable[_Matrix]) -> Iterator[list[_Matrix]]:
    """Cut matrices into batches: at least one for each rank, and no more from BATCH_BYTES for each rank on."""
    batch: list[_Matrix] = []
    filled_bytes = 0
    for matrix in matrices:
        batch.append(matrix)
        filled_bytes += matrix.parameter.numel() * torch.bfloat16.itemsize
        if len(batch) >= matrix.n_ranks and filled_bytes >= BATCH_BYTES * matrix.n_ranks:
            yield batch
            batch, filled_bytes = [], 0
    if batch:
        yield batch


def _by_owner(batch: Sequence[_Matrix]) -> list[list[_Matrix]]:
    """Return the matrices that each rank orthogonalises: the largest first, each by the rank with least work so far."""
    owned: list[list[_Matrix]] = [[] for _ in range(batch[0].n_ranks)]
    work = [0] * len(owned)
    for matrix in sorted(batch, key=lambda m: -m.work):
        owner = work.index(min(work))
        owned[owner].append(matrix)
        work[owner] += matrix.work
    return owned


def _step_batch(optimizer: torch.optim.Muon, batch: Sequence[_Matrix]) -> Iterator[None]:
    """Step matrices that the same ranks share. Yields once, while their parts are under way to their owners."""
    owned, me, ranks = _by_owner(batch), batch[0].index, batch[0].ranks
    sent = [sum(m.part_elements(me) for m in matrices) for matrices in owned]
    kept = [sum(m.part_elements(rank) for m in owned[me]) for rank in range(len(owned))]
    device = local_of(batch[0].parameter).device
    mine = torch.empty(sum(sent), dtype=torch.bfloat16, device=device)
    in_order = [m for matrices in owned for m in matrices]
    parts = dict(zip(in_order, _cut(mine, [m.part_shape(me) for m in in_order]), strict=True))
    for matrix in batch:
        parts[matrix].copy_(local_of(_update(optimizer, matrix)))
    gathered, arrival = _exchange(mine, sent, kept, ranks)
    yield
    if arrival is not None:
        arrival.wait()
    shapes = [m.part_shape(rank) for rank in range(len(owned)) for m in owned[me]]
    pieces = list(_cut(gathered, shapes))
    for i, matrix in enumerate(owned[me]):
        of_ranks = list(enumerate(pieces[i :: len(owned[me])]))
        whole = torch.empty(matrix.parameter.shape, dtype=torch.bfloat16, device=device)
        for rank, piece in of_ranks:
            matrix.part(whole, rank).copy_(piece)
        options = matrix.group["ns_coefficients"], matrix.group["ns_steps"], matrix.group["eps"]
        orthogonal = _muon._zeropower_via_newtonschulz(whole, *options)
        for rank, piece in of_ranks:
            piece.copy_(matrix.part(orthogonal, rank))
    back, arrival = _exchange(gathered, kept, sent, ranks)
    if arrival is not None:
        arrival.wait()
    mine.copy_(back)
    for matrix in batch:
        _apply(matrix, parts[matrix])


def _update(optimizer: torch.optim.Muon, matrix: _Matrix) -> torch.Tensor:
    """Return what is to be orthogonalised, sharded as the matrix: its momentum is updated as torch does it."""
    p, momentum = matrix.parameter, matrix.group["momentum"]
    state = optimizer.state[p]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)  # type: ignore[arg-type]
    buffer: torch.Tensor = state["momentum_buffer"]
    buffer.lerp_(p.grad, 1 - momentum)  # type: ignore[arg-type]
    return p.grad.lerp(buffer, momentum) if matrix.group["nesterov"] else buffer  # type: ignore[union-attr]


def _apply(matrix: _Matrix, part: torch.Tensor) -> None:
    """Decay the weight, and subtract this rank's part of the orthogonal matrix, as torch does it."""
    p, group = matrix.parameter, matrix.group
    lr = float(group["lr"])
    p.mul_(1 - lr * group["weight_decay"])
    p.add_(fsdp2.like(part, p), alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], p.shape))


def _cut(flat: torch.Tensor, shapes: Iterable[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Return one matrix after the other as views of a flat tensor."""
    first = 0
    for rows, columns in shapes:
        yield flat[first : first + rows * columns].view(rows, columns)
        first += rows * columns


def _exchange(
    flat: torch.Tensor, sent: Sequence[int], received: Sequence[int], ranks: dist.ProcessGroup | None
) -> tuple[torch.Tensor, dist.Work | None]:
    """Return what the ranks send to this one, once the work is waited for; None: it is there.

    `sent` and `received` are numbers of elements, by rank. `flat` stays as it is until then.
    """
    if ranks is None:
        return flat, None
    result = flat.new_empty(sum(received))
    work = dist.all_to_all_single(result, flat, list(received), list(sent), group=ranks, async_op=True)
    return result, work
