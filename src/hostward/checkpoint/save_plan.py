"""Plan the pieces that are written: DCP's plan, with every tensor cut into pieces of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from hostward.model.parameters import local_of
from hostward.optim.state_reader import Source, Where, as_it_lies
from hostward.plan.memory_model import BLOCK_BYTES, PIECE_BYTES

Value: TypeAlias = "torch.Tensor | Source"


class PiecePlanner(DefaultSavePlanner):
    """Plan as DCP does over tensors and sources, with large tensors cut into several chunks.

    A tensor above `piece_bytes` becomes several chunks, as DCP has them for sharded tensors: each is a run of its
    elements, of at most `piece_bytes` bytes.
    """

    def __init__(self, values: Mapping[str, Value], *, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__()
        self._values = values
        self._piece_bytes = piece_bytes
        self._begins: dict[str, Sequence[int]] = {}
        self.described = {n: v.whole if isinstance(v, Source) else v for n, v in values.items()}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in self._cut(item)]
        self.plan = replace(plan, items=items)
        return self.plan

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        data = item.tensor_data
        if data is None:
            yield item
            return
        begin, sizes = data.chunk.offsets, data.chunk.sizes
        self._begins[item.index.fqn] = begin
        itemsize = data.properties.dtype.itemsize
        boxes = list(boxes_of(tuple(sizes), max(1, self._piece_bytes // itemsize), BLOCK_BYTES // itemsize))
        if len(boxes) == 1:
            yield item
            return
        for offsets, lengths in boxes:
            at = torch.Size(b + o for b, o in zip(begin, offsets, strict=True))
            chunk = ChunkStorageMetadata(at, torch.Size(lengths))
            index = MetadataIndex(item.index.fqn, at)
            yield replace(item, index=index, type=WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk))

    def read(self, item: WriteItem, room: torch.Tensor | None, where: Where = as_it_lies) -> torch.Tensor:
        """Return the elements of an item on the host: in place if they are stored there contiguously, else copied.

        Args:
            item: of this planner's plan.
            room: buffer for the copy of an item of a source (`Source.read`).
            where: maps the memory of a source to the memory to read.
        """
        offsets, sizes = self.box(item)
        value = self._values[item.index.fqn]
        if isinstance(value, Source):
            return value.read(offsets, sizes, room, where)
        local = local_of(value).detach()
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        piece = local[box].cpu()
        plain = piece.is_contiguous() and not piece.is_conj() and not piece.is_neg()
        return piece if plain else piece.clone(memory_format=torch.contiguous_format)

    @property
    def sources(self) -> list[Source]:
        return sources_of(self._values)

    def source_of(self, item: WriteItem) -> Source | None:
        """Return the source that an item is read from; None for a plain tensor."""
        value = self._values[item.index.fqn]
        return value if isinstance(value, Source) else None

    def box(self, item: WriteItem) -> tuple[Sequence[int], Sequence[int]]:
        """Return offsets and sizes of an item within this process's shard of its tensor."""
        data = item.tensor_data
        if data is None:
            raise ValueError(f"{item.index.fqn} is not a tensor")
        begin = self._begins[item.index.fqn]
        return [o - b for o, b in zip(data.chunk.offsets, begin, strict=True)], data.chunk.sizes


def sources_of(values: Mapping[str, Value]) -> list[Source]:
    return [value for value in values.values() if isinstance(value, Source)]


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of an item's elements."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def boxes_of(sizes: Sequence[int], most_elements: int, block: int = 1) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (offsets, sizes) of boxes that cover a tensor, in order; each is one run of at most `most_elements`.

    Boxes begin at multiples of `block` elements if the rows that this needs fit into `most_elements`. A tensor without
    elements is one box.
    """
    numel = math.prod(sizes)
    if numel <= most_elements:
        yield [0] * len(sizes), list(sizes)
        return
    below = numel // sizes[0]
    rows = max(1, most_elements // below)
    rows -= rows % whole if (whole := block // math.gcd(block, below)) <= rows else 0
    for first in range(0, sizes[0], rows):
        count = min(rows, sizes[0] - first)
        for offsets, lengths in boxes_of(sizes[1:], most_elements, block):
            yield [first, *offsets], [count, *lengths]
