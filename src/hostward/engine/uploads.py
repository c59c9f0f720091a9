"""Small tables for the device kernels: addresses, hyper-parameters, bias corrections, maps of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from hostward.inventory import align

_KEPT_TABLES = 64
_MAP_BYTES = 256 * 1024 * 1024
_ALIGNMENT_BYTES = 256


Memory = tuple[torch.Tensor, Sequence[npt.NDArray[Any]]]


class Table:
    """A small array that changes from turn to turn: on the device at one address, so that launches stay bound, and on
    the host once for each turn that may be pending.
    """

    __slots__ = ("_hosts", "_last", "_spare", "data", "nbytes")

    def __init__(self, data: torch.Tensor, hosts: Sequence[npt.NDArray[Any]], spare: list[Memory]) -> None:
        self.data = data
        self._spare = spare
        self.nbytes = data.nbytes
        self._hosts = hosts
        self._last: object = None

    def __del__(self) -> None:
        # On the same lane only, where whatever still reads it comes first.
        self._spare.append((self.data, self._hosts))

    def stage(self, key: object, fill: Callable[[npt.NDArray[Any]], None], slot: int) -> int | None:
        """The host address to copy from in turns of `slot`, or None if the device already holds what `key` stands for.
        `fill` writes the values.
        """
        if key == self._last:
            return None
        self._last = key
        host = self._hosts[slot]
        fill(host)
        return int(host.ctypes.data)


class Uploads:
    """Tables of one lane. Nothing orders the two lanes' uploads, so none is shared.

    Args:
        device: where tables go.
        pinned: makes a pinned block of that many bytes.
        ring: turns that may be pending.
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

    def table(self, shape: tuple[int, ...], dtype: torch.dtype) -> Table:
        """A new table, of undefined contents."""
        spare = self._spare.setdefault((shape, dtype), [])
        if spare:
            return Table(*spare.pop(), spare)
        data = torch.empty(shape, dtype=dtype, device=self._device)
        hosts = [self._take(data.nbytes).view(dtype).view(shape).numpy() for _ in range(self._ring)]
        return Table(data, hosts, spare)

    def kept(self, table: npt.NDArray[Any]) -> torch.Tensor:
        """A long-lived array that nobody changes, on the device: found by identity."""
        if id(table) not in self._kept:
            self._kept[id(table)] = (table, torch.from_numpy(table).to(self._device))
            if len(self._kept) > _KEPT_TABLES:
                del self._kept[next(iter(self._kept))]
        return self._kept[id(table)][1]

    def map(self, build: Callable[[Sequence[int]], npt.NDArray[Any]], lengths: tuple[int, ...]) -> torch.Tensor:
        """`build(lengths)` on the device: which program of a kernel works on which piece."""
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
