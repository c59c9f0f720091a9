"""How a parameter is divided over ranks: which rows are whose. Arithmetic alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hostward.core.inventory import SPLIT_ELEMENTS


@dataclass(frozen=True, slots=True)
class Split:
    """A range of rows along dimension `dim` is divided in `n_parts`, of which this rank has part `index`."""

    dim: int
    n_parts: int
    index: int

    def cut(self, first: int, rows: int, index: int) -> tuple[int, int]:
        """First row and number of rows of a part."""
        each = -(-rows // self.n_parts)
        start, stop = min(index * each, rows), min((index + 1) * each, rows)
        return first + start, stop - start


@dataclass(frozen=True, slots=True)
class Layout:
    """How a parameter is divided: by all `splits`, one within the other. None: in one part on every rank."""

    shape: tuple[int, ...]
    splits: tuple[Split, ...]

    def rows(self, dim: int) -> tuple[int, int]:
        """First row of this rank's part along a dimension, and how many it has."""
        first, rows = 0, self.shape[dim]
        for split in self.splits:
            if split.dim == dim:
                first, rows = split.cut(first, rows, split.index)
        return first, rows

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of what this rank has of a whole tensor."""
        for dim in dict.fromkeys(split.dim for split in self.splits):
            whole = whole.narrow(dim, *self.rows(dim))
        return whole

    @property
    def is_run(self) -> bool:
        """Whether the part is one run of the flattened parameter."""
        return all(split.dim == 0 for split in self.splits)

    @property
    def first(self) -> int:
        """Where the part begins in the flattened parameter. 0 for parts that are not one run of it: their chunks are
        counted in the part.
        """
        return self.rows(0)[0] * math.prod(self.shape[1:]) if self.shape and self.is_run else 0

    def shared_chunks(self) -> list[int]:
        """Chunks of the norm that lie in several ranks' parts: their indices in the parameter, rising."""
        if not self.is_run or not self.splits:
            return []
        parts = [(0, self.shape[0])]
        for split in self.splits:
            parts = [split.cut(*part, index) for part in parts for index in range(split.n_parts)]
        numel, row = math.prod(self.shape), math.prod(self.shape[1:])
        borders = {first * row for first, _ in parts}
        return sorted({b // SPLIT_ELEMENTS for b in borders if b % SPLIT_ELEMENTS and b < numel})
