"""Bytes that a choice takes, by phase and owner: what is compared with budgets. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hostward.choice import Choice
from hostward.workload import Workload


@dataclass(frozen=True, slots=True)
class PhaseNeeds:
    """Bytes at the fullest moment of a phase (`load`, `first step`, `steady step`, `save`, `resume`, `sleep`), by what
    holds them: on the device, in host memory, and of that page-locked.
    """

    name: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    pinned: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(self.pinned.values())


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one rank."""

    phases: tuple[PhaseNeeds, ...]

    @property
    def device_peak_bytes(self) -> int:
        return max(phase.device_bytes for phase in self.phases)

    @property
    def host_bytes(self) -> int:
        return max(phase.host_bytes for phase in self.phases)

    @property
    def pinned_bytes(self) -> int:
        return max(phase.pinned_bytes for phase in self.phases)


Required = Callable[[Workload, Choice], Needs]
"""What tells the needs of a choice."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Most bytes of one rank; None: no limit."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None

    def over(self, needs: Needs) -> dict[str, int]:
        """By how many bytes which budget is exceeded; empty where all are kept."""
        pairs = {
            "device": (needs.device_peak_bytes, self.device_bytes),
            "host": (needs.host_bytes, self.host_bytes),
            "pinned": (needs.pinned_bytes, self.pinned_bytes),
        }
        return {name: need - limit for name, (need, limit) in pairs.items() if limit is not None and need > limit}
