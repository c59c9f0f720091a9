"""What the processes of a run say of themselves, as a part of its report. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankRow:
    """One process of a run of several. Bytes at its end; seconds per iteration, None where they were not measured."""

    rank: int
    node: str
    device: str
    host_bytes: int
    pinned_bytes: int
    device_peak_bytes: int | None
    data_s: float
    """Reading samples."""
    host_step_s: float | None
    transfer_s: float | None
    """Both directions together."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Sums over the ranks of one node."""

    node: str
    ranks: int
    host_bytes: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class RanksReport:
    """What the ranks of a run say of themselves, in order."""

    ranks: tuple[RankRow, ...]
    nodes: tuple[NodeRow, ...]
    stragglers: tuple[str, ...]
    """Ranks that take much longer for something than the others, one sentence each."""
