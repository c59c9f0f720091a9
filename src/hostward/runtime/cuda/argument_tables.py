"""Keep small argument tables for device kernels: addresses, hyper-parameters, bias corrections, program maps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from hostward.core.inventory import align
from hostward.kernels.cuda.launcher import KernelLaunch

_KEPT_TABLES = 64
_MAP_BYTES = 256 * 1024 * 1024
_ALIGNMENT_BYTES = 256


Memory = tuple[torch.Tensor, Sequence[npt.NDArray[Any]]]


class Table:
    """Holds a small array that changes from step to step.

    It has one address on the device, so that launches stay bound, and one host copy for each step that may be pending.

    Args:
        data: device memory of the table.
        hosts: as many pinned arrays of its shape and dtype as steps may be pending.
        spare: receives the memory when the table is freed.
        rows: initial values of the table.
        changing: positions of the elements, counted row by row, that `stage` sets.
    """

    __slots__ = (
        "_addresses",
        "_changing",
        "_elements",
        "_fixed",
        "_hosts",
        "_last",
        "_rows",
        "_spare",
        "data",
        "nbytes",
    )

    def __init__(
        self,
        data: torch.Tensor,
        hosts: Sequence[npt.NDArray[Any]],
        spare: list[Memory],
        rows: npt.NDArray[Any],
        changing: Sequence[int],
    ) -> None:
        self.data = data
        self._spare = spare
        self.nbytes = data.nbytes
        self._hosts = hosts
        self._elements: list[Any] = [host.reshape(-1).data for host in hosts]  # memoryviews: fast to write one by one
        self._addresses = [int(host.ctypes.data) for host in hosts]
        self._rows = rows
        self._changing = tuple(changing)
        self._fixed: set[int] = set()
        self._last: Sequence[float] | None = None

    def __del__(self) -> None:
        # Reused on the same lane only, after all work that still reads it.
        self._spare.append((self.data, self._hosts))

    def stage(self, values: Sequence[float], slot: int) -> int:
        """Write `values`, one for each changing element, and return the host address to copy from in steps of `slot`.

        The result is 0 if the device already holds `values`.
        """
        if values == self._last:
            return 0
        if slot not in self._fixed:  # only now: pending steps may have used the memory for another table
            self._hosts[slot][:] = self._rows
            self._fixed.add(slot)
        elements = self._elements[slot]
        for at, value in zip(self._changing, values, strict=True):
            elements[at] = value
        self._last = values
        return self._addresses[slot]

    def forget(self) -> None:
        """Forget the last values, which may not have been copied."""
        self._last = None


class TableKernel(ABC):
    """Launches kernels over tables of addresses."""

    tables: tuple[Table, ...]
    n_launches: int

    @abstractmethod
    def prepare(self, slot: int) -> tuple[Sequence[int], Sequence[KernelLaunch]]:
        """Return, for a step of `slot`, the host address to copy each table from (0: unchanged), and the launches."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what was prepared last, which has not been enqueued."""


class Uploads:
    """Makes the tables of one lane; uploads of two lanes are not ordered, so no table is shared.

    Args:
        device: device of the tables.
        pinned: allocates a pinned block of that many bytes.
        ring: number of steps that may be pending.
    """

    def __init__(self, device: torch.device, pinned: Callable[[int], torch.Tensor], ring: int) -> None:
        self._device = device
        self._pinned = pinned
        self._ring = ring
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used_bytes = 0
        self._spare: dict[tuple[tuple[int, ...], torch.dtype], list[Memory]] = {}
        self._kept: dict[int, tuple[npt.NDArray[Any], torch.Tensor]] = {}
        self._maps: dict[tuple[object, tuple[int, ...]], torch.Tensor] = {}

    def table(self, rows: npt.NDArray[Any], changing: Sequence[int]) -> Table:
        """Return a new table of `rows`, whose elements at `changing` are set by `Table.stage`."""
        dtype = torch.from_numpy(rows).dtype
        spare = self._spare.setdefault((rows.shape, dtype), [])
        if spare:
            return Table(*spare.pop(), spare, rows, changing)
        data = torch.empty(rows.shape, dtype=dtype, device=self._device)
        hosts = [self._take(data.nbytes).view(dtype).view(rows.shape).numpy() for _ in range(self._ring)]
        return Table(data, hosts, spare, rows, changing)

    def kept(self, table: npt.NDArray[Any]) -> torch.Tensor:
        """Return the device copy of a long-lived, constant array, which is found by identity."""
        if id(table) not in self._kept:
            self._kept[id(table)] = (table, torch.from_numpy(table).to(self._device))
            if len(self._kept) > _KEPT_TABLES:
                del self._kept[next(iter(self._kept))]
        return self._kept[id(table)][1]

    def map(self, build: Callable[[Sequence[int]], npt.NDArray[Any]], lengths: tuple[int, ...]) -> torch.Tensor:
        """Return `build(lengths)` on the device, which maps programs of a kernel to pieces."""
        key = (build, lengths)
        found = self._maps.pop(key, None)
        if found is None:
            found = torch.from_numpy(build(lengths)).to(self._device)
        self._maps[key] = found  # the most recently used is last
        while sum(m.nbytes for m in self._maps.values()) > _MAP_BYTES and len(self._maps) > 1:
            del self._maps[next(iter(self._maps))]
        return found

    def _take(self, size_bytes: int) -> torch.Tensor:
        start = align(self._used_bytes, _ALIGNMENT_BYTES)
        if start + size_bytes > self._arena.numel():
            self._arena, start = self._pinned(size_bytes), 0
        self._used_bytes = start + size_bytes
        return self._arena[start : self._used_bytes]
