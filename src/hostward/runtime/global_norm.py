"""Compute the norm of gradients that are sharded over processes, bitwise identical to the norm in one process.

A chunk of 4,096 elements, counted in the unsharded parameter, may be divided over several processes: a *shared* chunk.
Its sum depends on its largest exponent, which no process knows alone. So the elements of shared chunks are kept until
the norm is taken; then the exponents are compared, and each process sums its own elements on the common scale. The two
collectives on the compute lane reduce integers: no order of processes changes a bit, and nothing waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist

from hostward.kernels.reference import NOT_FINITE
from hostward.runtime.operands import ALL_ZERO, CHUNK_ELEMENTS, Buffer, Partials

_LIMB_BITS = 31
_FIXED_POINT = 2.0**50


def shared_chunks(borders: Iterable[int], numel: int) -> list[int]:
    """Return the chunks of a parameter of `numel` elements within which a border lies, as ascending indices."""
    return sorted({b // CHUNK_ELEMENTS for b in borders if b % CHUNK_ELEMENTS and b < numel})


class Ranks(Protocol):
    """Reduces over the processes that share the parameters, in place; both verbs enqueue on the current stream.

    The values are two of the whole gradient, and one for each shared chunk.
    """

    def largest(self, values: torch.Tensor) -> None:
        """Replace every element by the largest one of all ranks."""

    def total(self, values: torch.Tensor) -> None:
        """Replace every element by the sum over all ranks."""


class GroupRanks:
    """Reduces over process groups, one after the other.

    Collectives run on the current stream: with NCCL nothing waits on the host.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [group for group in groups if group.size() > 1]

    def largest(self, values: torch.Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)

    def total(self, values: torch.Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)


class ShardRanks:
    """Reduces the values of shared chunks over the processes that share them, and leaves those of the whole gradient.

    Args:
        runs: process groups, and how many of the shared chunks each has, in order; None: this process alone.
    """

    def __init__(self, runs: Sequence[tuple[dist.ProcessGroup | None, int]]) -> None:
        self._runs = [(GroupRanks([] if group is None else [group]), count) for group, count in runs]

    def largest(self, values: torch.Tensor) -> None:
        for ranks, run in self._of(values):
            ranks.largest(run)

    def total(self, values: torch.Tensor) -> None:
        for ranks, run in self._of(values):
            ranks.total(run)

    def _of(self, values: torch.Tensor) -> Iterator[tuple[GroupRanks, torch.Tensor]]:
        first = 2
        for ranks, count in self._runs:
            if count:
                yield ranks, values[first : first + count]
            first += count


@dataclass(frozen=True, slots=True)
class Fragment:
    """Describes the elements of a shared chunk that this process has.

    Args:
        bucket, range, start, stop: its elements are [start, stop) of a range of a bucket.
        chunk: index of its partial sum.
        shared: index of the whole chunk among the shared ones of the model; the same on every rank.
    """

    bucket: int
    range: int
    start: int
    stop: int
    chunk: int
    shared: int


class Across:
    """Combines partial sums of all ranks, including those of chunks that ranks share.

    Args:
        fragments: fragments of shared chunks that this process has.
        n_shared: number of shared chunks of the model.
        allocate: allocates the buffer that keeps the elements of fragments: float32 [elements].
        counted: int64 [partial sums], 0 for replicated parts that another rank counts, else 1.
        stages: pipeline stages, which have other parameters and their own sums; None: there are none.
        adds: int64 [shared chunks], 1 where this process adds the chunk's sum to those of `stages`; None: everywhere.
    """

    def __init__(
        self,
        ranks: Ranks,
        fragments: Sequence[Fragment],
        n_shared: int,
        allocate: Callable[[int], Buffer],
        counted: torch.Tensor,
        stages: Ranks | None = None,
        adds: torch.Tensor | None = None,
    ) -> None:
        self.ranks = ranks
        self._adds = adds
        self._stages = stages
        self._counted = counted
        self.n_shared = n_shared
        sizes = [f.stop - f.start for f in fragments]
        self._kept = allocate(sum(sizes)) if fragments else None
        self._of_bucket: dict[int, list[tuple[Fragment, Buffer]]] = {}
        first = 0
        for fragment, size in zip(fragments, sizes, strict=True):
            if self._kept is not None:
                part = Buffer(self._kept.tier, self._kept.data[first : first + size], self._kept.owner)
                self._of_bucket.setdefault(fragment.bucket, []).append((fragment, part))
            first += size
        device = None if self._kept is None else self._kept.data.device
        self._chunks = torch.tensor([f.chunk for f in fragments], dtype=torch.int64, device=device)
        self._shared = torch.tensor([f.shared for f in fragments], dtype=torch.int64, device=device)
        owners = chain.from_iterable([i] * size for i, size in enumerate(sizes))
        self._owners = torch.tensor(list(owners), dtype=torch.int64, device=device)

    def of(self, bucket: int) -> Sequence[tuple[Fragment, Buffer]]:
        """Return the bucket's fragments, and the float32 buffers to which their final elements are to be copied."""
        return self._of_bucket.get(bucket, ())

    def kept(self) -> Sequence[Buffer]:
        """Return the buffers that keep the elements of fragments."""
        return [part for parts in self._of_bucket.values() for _, part in parts]

    def totals(
        self, partials: Partials, found_inf: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sum of squares over all ranks, its scale and the overflow flag.

        They are int64 [2], in units of 2**31 and 1; int32 [1], the exponent of its scale; and float32 [1], not 0 if
        `found_inf` is not 0 on any rank.
        """
        sums, exponents = partials.sums.data, partials.exponents.data
        largest = torch.full((2 + self.n_shared,), ALL_ZERO, dtype=torch.int32, device=sums.device)
        if len(exponents):
            largest[:1] = exponents.amax()
        if found_inf is not None:
            largest[1:2] = found_inf.ne(0).to(torch.int32)
        shared = largest[2:]
        if self._kept is not None:
            # A process may have several fragments of one chunk.
            own_exponents = exponents.index_select(0, self._chunks)
            shared.scatter_reduce_(0, self._shared, own_exponents, "amax")
        self.ranks.largest(largest)
        if self._stages is not None:
            self._stages.largest(largest[:2])  # shared chunks are not those of all stages
        top = largest[:1]
        totals = torch.zeros(2 + self.n_shared, dtype=torch.int64, device=sums.device)
        if self._kept is not None:
            sums = sums.index_fill(0, self._chunks, 0)
            own = self._fragment_sums(self._kept.data, shared.index_select(0, self._shared), own_exponents)
            totals[2:].index_add_(0, self._shared, own)
        totals[:2] = _limbs(sums * self._counted, exponents, top)
        self.ranks.total(totals)
        totals[:2] += _limbs(totals[2:] if self._adds is None else totals[2:] * self._adds, shared, top)
        if self._stages is not None:
            self._stages.total(totals[:2])
        return totals[:2], top, largest[1:2].gt(0).to(torch.float32)

    def _fragment_sums(self, values: torch.Tensor, exponents: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the sums of this process's fragments, on the scales of their unsharded chunks.

        `own`: their own exponents. A fragment without a gradient counts as zeros; its `values` are of a step before.
        """
        ordinary = (exponents != ALL_ZERO) & (exponents != NOT_FINITE) & (own != ALL_ZERO)
        # 2**-exponent is made from its bits: a power computed in floating point need not be exact.
        scales = ((1023 - torch.where(ordinary, exponents, 0).to(torch.int64)) << 52).view(torch.float64)
        scaled = values.to(torch.float64) * scales.index_select(0, self._owners)
        squares = torch.where(ordinary.index_select(0, self._owners), scaled * scaled * _FIXED_POINT, 0.0)
        made = torch.zeros(len(exponents), dtype=torch.int64, device=exponents.device)
        return made.index_add_(0, self._owners, squares.to(torch.int64)) * self._counted.index_select(0, self._chunks)


def _limbs(sums: torch.Tensor, exponents: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Add up chunk sums on the scale of exponent `top`: int64 [2], in units of 2**31 and 1."""
    shift = (2 * (top.to(torch.int64) - exponents.to(torch.int64))).clamp_(0, 63)
    scaled = sums >> shift
    return torch.stack([(scaled >> _LIMB_BITS).sum(), (scaled & (2**_LIMB_BITS - 1)).sum()])
