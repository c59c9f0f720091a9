"""The device kernels of a step, bound to tables of addresses that are refreshed when they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hostward.inventory import MasterKind
from hostward.kernels.operand import dtype_code
from hostward.schedule import Lane

from .backend import RING, AdamWOperands, Buffer, Constants, Partials, Scalars
from .cuda_work import Staged
from .uploads import Table, Uploads

_KEPT_LAUNCHES = 8
_KERNEL_KINDS = {MasterKind.WEIGHT: 0, MasterKind.SPLIT: 1, MasterKind.PLAIN: 2}

Prepare = Callable[[], tuple[list[Staged], Callable[[], None]]]
"""Looks up addresses: what the tables are to hold in this turn, and the launch."""


class KernelTables:
    """Kernels of one device. `pinned` makes pinned blocks for the tables."""

    def __init__(self, device: torch.device, pinned: Callable[[int], torch.Tensor]) -> None:
        self._uploads = {lane: Uploads(device, pinned, RING) for lane in (Lane.COMPUTE, Lane.UPDATE)}
        self._hypers: dict[tuple[int, Lane], tuple[Constants, Table]] = {}

    def partials(
        self, gradients: Sequence[Buffer], lengths: Sequence[int], firsts: Sequence[int], out: Partials
    ) -> Prepare:
        """Partial sums of the norm, on the compute lane."""
        from hostward.kernels import norm as kernels

        uploads = self._uploads[Lane.COMPUTE]
        rest = [(length, first) for length, first in zip(lengths, firsts, strict=True)]
        table = uploads.table((len(rest), 3), torch.int64)
        chunk_map = uploads.map(kernels.chunk_map, tuple(lengths))
        launches: dict[torch.dtype, Callable[[], None]] = {}

        def prepare() -> tuple[list[Staged], Callable[[], None]]:
            addresses = tuple([g.data.data_ptr() for g in gradients])
            dtype = gradients[0].data.dtype
            launch = launches.get(dtype)
            if launch is None:
                code = dtype_code(dtype, "gradient")
                launch = kernels.bind_partials(table.data, chunk_map, code, out.sums.data, out.exponents.data)
                launches[dtype] = launch

            def fill(rows: npt.NDArray[np.int64]) -> None:
                rows[:] = [(address, *row) for address, row in zip(addresses, rest, strict=True)]

            return [(table, addresses, fill)], launch

        return prepare

    def adamw(self, lane: Lane, operands: AdamWOperands, scalars: Scalars) -> Prepare:
        """The step of one bucket by the device."""
        from hostward.kernels import adamw as kernels

        uploads, kind, ranges = self._uploads[lane], _KERNEL_KINDS[operands.kind], operands.ranges
        lengths = tuple(r.length for r in ranges)
        blocks = uploads.map(kernels.block_map, lengths)
        table, hyper_table = uploads.table((len(ranges), 5), torch.int64), self._hyper_table(lane, operands.constants)
        state = [operands.exp_avg, operands.exp_avg_sq, operands.low or operands.exp_avg]
        launches: dict[object, tuple[Callable[[], None], object]] = {}

        def prepare() -> tuple[list[Staged], Callable[[], None]]:
            constants = operands.constants
            hyper, (bc1, inv_sqrt_bc2) = constants.hyper, constants.tables
            gradients = [r.gradient.data for r in ranges]
            weights = [r.weight.data for r in ranges]
            addresses = tuple([t.data_ptr() for t in (*gradients, *weights)])
            where = tuple([b.data.data_ptr() for b in state])
            key = (gradients[0].dtype, id(bc1), where)
            found = launches.get(key)
            if found is None:
                codes = dtype_code(gradients[0].dtype, "gradient"), dtype_code(weights[0].dtype, "weight"), kind
                tables = uploads.kept(bc1), uploads.kept(inv_sqrt_bc2), len(bc1)
                tensors = state[0].data, state[1].data, state[2].data
                launch = kernels.bind(
                    table.data, len(ranges), blocks, codes, tensors, (hyper_table.data, *tables), scalars.scale.data,
                    scalars.skip.data, None,
                )  # fmt: skip
                if len(launches) >= _KEPT_LAUNCHES:
                    launches.clear()
                found = launches[key] = launch, bc1  # found by its identity, so it must stay

            def fill(rows: npt.NDArray[np.int64]) -> None:
                rows[:] = [
                    (r.offset, length, gradient.data_ptr(), weight.data_ptr(), r.count.data.data_ptr())
                    for r, length, gradient, weight in zip(ranges, lengths, gradients, weights, strict=True)
                ]

            def fill_hyper(row: npt.NDArray[np.float64]) -> None:
                row[:] = (hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps)

            return [(hyper_table, hyper, fill_hyper), (table, addresses, fill)], found[0]

        return prepare

    def _hyper_table(self, lane: Lane, constants: Constants) -> Table:
        """One for all buckets of a parameter group on a lane."""
        key = id(constants), lane
        if key not in self._hypers:
            self._hypers[key] = constants, self._uploads[lane].table((5,), torch.float64)
        return self._hypers[key][1]
