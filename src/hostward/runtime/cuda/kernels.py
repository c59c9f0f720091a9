"""Bind the device kernels of a step to tables of addresses, which are updated when they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from hostward.core.inventory import MasterKind
from hostward.kernels.cpu.adamw import FloatTable
from hostward.kernels.cuda.adamw import STATE_PARAMETERS
from hostward.kernels.cuda.launcher import ALIGNMENT_BYTES, KernelLaunch, Launch
from hostward.kernels.cuda.operand import dtype_code
from hostward.runtime.backend import RING, AdamWOperands, Buffer, Constants, Hyper, Partials, Scalars
from hostward.runtime.cuda.argument_tables import Table, TableKernel, Uploads
from hostward.schedule.ops import Lane

_KEPT_LAUNCHES = 8
_KERNEL_KINDS = {MasterKind.WEIGHT: 0, MasterKind.SPLIT: 1, MasterKind.PLAIN: 2}


class KernelTables:
    """Binds kernels of one device.

    `pinned` allocates pinned blocks for the tables; inside `current()` the device and its context are current.
    """

    def __init__(
        self,
        device: torch.device,
        pinned: Callable[[int], torch.Tensor],
        current: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._uploads = {lane: Uploads(device, pinned, RING) for lane in (Lane.COMPUTE, Lane.UPDATE)}
        self._current = current
        self._hypers: dict[tuple[int, Lane], tuple[Constants, HyperTable]] = {}

    def partials(
        self, gradients: Sequence[Buffer], lengths: Sequence[int], firsts: Sequence[int], out: Partials
    ) -> TableKernel:
        """Bind partial sums of the norm, on the compute lane."""
        uploads = self._uploads[Lane.COMPUTE]
        rows = np.array([(0, *row) for row in zip(lengths, firsts, strict=True)], dtype=np.int64)
        table = uploads.table(rows, range(0, rows.size, 3))
        return PartialsKernel(table, gradients, tuple(lengths), out, uploads, self._current)

    def adamw(self, lane: Lane, operands: AdamWOperands, scalars: Scalars) -> TableKernel:
        """Bind the GPU step of one bucket."""
        uploads, key = self._uploads[lane], (id(operands.constants), lane)
        if key not in self._hypers:  # one for all buckets of a parameter group on a lane
            hyper = HyperTable(uploads.table(np.zeros(5), range(5)))
            self._hypers[key] = operands.constants, hyper
        rows = np.array([(r.offset, r.length, 0, 0, r.count.data.data_ptr()) for r in operands.ranges], dtype=np.int64)
        table = uploads.table(rows, [5 * i + column for column in (2, 3) for i in range(len(rows))])
        return AdamWKernel(table, self._hypers[key][1], operands, scalars, uploads, self._current)


class Bound:
    """Holds launches as the driver takes them, and keeps their tensors and lookup keys alive."""

    __slots__ = ("_kept", "native")

    def __init__(self, launches: Sequence[Launch], *kept: object) -> None:
        self.native = [launch.native() for launch in launches]
        self._kept = launches, kept


class HyperTable:
    """Holds the hyper-parameters of a parameter group on the device: float64 [5]."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._last: Hyper | None = None

    def stage(self, hyper: Hyper, slot: int) -> int:
        """Write the hyper-parameters, see `Table.stage`."""
        if hyper is self._last:
            return 0
        self._last = hyper
        return self.table.stage((hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps), slot)

    def forget(self) -> None:
        self._last = None
        self.table.forget()


class PartialsKernel(TableKernel):
    """Takes partial sums of gradients; the table has a row (address, length, first chunk) for each."""

    def __init__(
        self,
        table: Table,
        gradients: Sequence[Buffer],
        lengths: tuple[int, ...],
        out: Partials,
        uploads: Uploads,
        current: Callable[[], AbstractContextManager[None]],
    ) -> None:
        from hostward.kernels.cuda import norm as kernels

        self.tables = (table,)
        self._table = table
        self._gradients = tuple(gradients)
        self._out = out
        self._current = current
        self._chunk_map = uploads.map(kernels.chunk_map, lengths)
        self.n_launches = 1 if len(self._chunk_map) else 0
        self._bound: dict[torch.dtype, Bound] = {}

    def prepare(self, slot: int) -> tuple[Sequence[int], Sequence[KernelLaunch]]:
        dtype = self._gradients[0].data.dtype
        bound = self._bound.get(dtype)
        if bound is None:
            bound = self._bound[dtype] = self._bind(dtype)
        return (self._table.stage([g.address for g in self._gradients], slot),), bound.native

    def forget(self) -> None:
        self._table.forget()

    def _bind(self, dtype: torch.dtype) -> Bound:
        from hostward.kernels.cuda import norm as kernels

        code, out = dtype_code(dtype, "gradient"), self._out
        with self._current():
            return Bound(
                kernels.bind_partials(self._table.data, self._chunk_map, code, out.sums.data, out.exponents.data)
            )


class AdamWKernel(TableKernel):
    """Runs AdamW of a bucket; the table has a row (offset, length, gradient, weight, count) for each range."""

    def __init__(
        self,
        table: Table,
        hyper: HyperTable,
        operands: AdamWOperands,
        scalars: Scalars,
        uploads: Uploads,
        current: Callable[[], AbstractContextManager[None]],
    ) -> None:
        from hostward.kernels.cuda import adamw as kernels

        self.tables = (hyper.table, table)
        self._table, self._hyper = table, hyper
        self._operands, self._scalars = operands, scalars
        self._uploads, self._current = uploads, current
        self._addressed = (*(r.gradient for r in operands.ranges), *(r.weight for r in operands.ranges))
        self._state = (operands.exp_avg, operands.exp_avg_sq, operands.low or operands.exp_avg)
        self._blocks = uploads.map(kernels.block_map, tuple(r.length for r in operands.ranges))
        self._has_blocks = len(self._blocks) > 0
        self.n_launches = 2 if self._has_blocks else 1
        self._bound: dict[object, Bound] = {}
        self._launches: Sequence[KernelLaunch] = ()
        self._dtype: torch.dtype | None = None
        self._bc1: FloatTable | None = None
        self._where: tuple[int, int, int] | None = None

    def prepare(self, slot: int) -> tuple[Sequence[int], Sequence[KernelLaunch]]:
        exp_avg, exp_avg_sq, low = self._state
        constants = self._operands.constants
        where = exp_avg.address, exp_avg_sq.address, low.address
        dtype, bc1 = self._addressed[0].data.dtype, constants.tables[0]
        if where != self._where or bc1 is not self._bc1 or dtype is not self._dtype:
            self._fit(dtype, bc1, where)
        hyper = self._hyper.stage(constants.hyper, slot)
        return (hyper, self._table.stage([b.address for b in self._addressed], slot)), self._launches

    def forget(self) -> None:
        self._table.forget()
        self._hyper.forget()

    def _fit(self, dtype: torch.dtype, bc1: FloatTable, where: tuple[int, int, int]) -> None:
        """Choose the launches; the state may be in another GPU staging buffer than last time."""
        # The tables are found by their identity: a Bound keeps them.
        key = dtype, id(bc1), tuple(address % ALIGNMENT_BYTES for address in where)
        if key not in self._bound:
            if len(self._bound) >= _KEPT_LAUNCHES:
                self._bound.clear()
            self._bound[key] = self._bind()
        self._launches = self._bound[key].native
        if self._has_blocks:
            for at, address in zip(STATE_PARAMETERS, where, strict=True):
                self._launches[0].words[at] = address
        self._dtype, self._bc1, self._where = dtype, bc1, where

    def _bind(self) -> Bound:
        from hostward.kernels.cuda import adamw as kernels

        operands, scalars = self._operands, self._scalars
        bc1, inv_sqrt_bc2 = operands.constants.tables
        first = operands.ranges[0]
        codes = dtype_code(first.gradient.data.dtype, "gradient"), dtype_code(first.weight.data.dtype, "weight")
        exp_avg, exp_avg_sq, low = self._state
        with self._current():
            constants = self._hyper.table.data, self._uploads.kept(bc1), self._uploads.kept(inv_sqrt_bc2), len(bc1)
            launches = kernels.bind(
                self._table.data, len(operands.ranges), self._blocks, (*codes, _KERNEL_KINDS[operands.kind]),
                (exp_avg.data, exp_avg_sq.data, low.data), constants, scalars.scale.data, scalars.skip.data, None,
            )  # fmt: skip
            return Bound(launches, bc1)
