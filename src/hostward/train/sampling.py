"""Memory of a run as it goes on: counters that the host has anyway, read while steps are issued. Waits for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import chain

import torch

from hostward.engine.backend import Ledger, Tier
from hostward.hardware import resident_bytes
from hostward.inspect import local_of
from hostward.run_report import OwnerSamples, StepBytes, StepMemory
from hostward.training.placeholder import MovedGradient, Where

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
MOMENTS = {FORWARD: 1 / 3, BACKWARD: 2 / 3, STEP: 1.0}
"""Where each moment is drawn within its iteration: when it comes depends on how far the host is ahead."""
FIRST_ITERATIONS = 8
"""Sampled one and all: memory grows here."""
MOST_SAMPLED = 128
"""Iterations after those that are sampled, at about equal distances, so that no run's report grows large."""


class MemorySampler:
    """Bytes per iteration, and by owner at the moments of some iterations.

    Args:
        parameters: whose gradients count as owner "gradients" on the device.
        staying: names of those whose gradients stay there until the step, also when they have left `.grad`.
        first: the first iteration; `until`: the one after the last.
    """

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        parameters: Iterable[torch.nn.Parameter],
        *,
        staying: Set[str],
        first: int,
        until: int,
    ) -> None:
        self._device = device if device.type == "cuda" else None
        self._ledger = ledger
        self._parameters = list(parameters)
        self._staying = staying
        self._first = first
        self._stride = max(1, -(-(until - first) // MOST_SAMPLED))
        self.steps: list[StepBytes] = []
        """By iteration."""
        self._at: list[float] = []
        self._moments: list[str] = []
        self._rows: dict[Tier, list[dict[str, int]]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._rest: list[int] = []
        self._pinned_then: list[int] = []

    def issued(self, iteration: int) -> None:
        """The step of an iteration has been issued."""
        found = {} if self._device is None else torch.cuda.memory_stats(self._device)
        self.steps.append(
            StepBytes(
                device_allocated_bytes=found.get("allocated_bytes.all.current"),
                device_peak_bytes=found.get("allocated_bytes.all.peak"),
                host_resident_bytes=resident_bytes(),
                pinned_bytes=self._ledger.pinned_bytes,
                device_reserved_bytes=found.get("reserved_bytes.all.current"),
                alloc_retries=found.get("num_alloc_retries"),
            )
        )
        self.sample(iteration, STEP)

    def sample(self, iteration: int, moment: str) -> None:
        """Take bytes by owner, if this iteration is one of those."""
        number = iteration - self._first
        if number >= FIRST_ITERATIONS and number % self._stride:
            return
        held = self._ledger.by_owner(Tier.DEVICE)
        gradients = sum(map(self._gradient_bytes, self._parameters))
        if gradients:
            held["gradients"] = held.get("gradients", 0) + gradients
        if self._device is not None:
            self._rest.append(torch.cuda.memory_allocated(self._device) - sum(held.values()))
        self._rows[Tier.DEVICE].append(held)
        self._rows[Tier.HOST].append(self._ledger.by_owner(Tier.HOST))
        self._pinned_then.append(self._ledger.pinned_bytes)
        self._at.append(iteration + MOMENTS[moment])
        self._moments.append(moment)

    def _gradient_bytes(self, parameter: torch.nn.Parameter) -> int:
        """Return the device bytes of this process's part of a gradient. `nbytes` of a DTensor are those of all ranks
        together, and what stands in `.grad` for a gradient that was taken has its shape and no bytes.
        """
        gradient = parameter.grad
        if gradient is None:
            return 0
        if isinstance(gradient, MovedGradient):
            here = gradient.became is Where.TAKEN and gradient.parameter_name in self._staying
            return local_of(parameter).numel() * gradient.itemsize if here else 0
        return local_of(gradient).nbytes

    def step_memory(self) -> StepMemory:
        """The columns so far."""
        return StepMemory(
            device_allocated_bytes=_known([step.device_allocated_bytes for step in self.steps]),
            device_peak_bytes=_known([step.device_peak_bytes for step in self.steps]),
            host_resident_bytes=tuple(step.host_resident_bytes for step in self.steps),
            pinned_bytes=tuple(step.pinned_bytes for step in self.steps),
            device_reserved_bytes=_known([step.device_reserved_bytes for step in self.steps]),
            alloc_retries=_known([step.alloc_retries for step in self.steps]),
        )

    def owners(self) -> OwnerSamples:
        """The samples so far."""
        return OwnerSamples(
            at_iteration=tuple(self._at),
            moments=tuple(self._moments),
            device_by_owner_bytes=_columns(self._rows[Tier.DEVICE]),
            rest_of_device_bytes=None if self._device is None else tuple(self._rest),
            host_by_owner_bytes=_columns(self._rows[Tier.HOST]),
            pinned_bytes=tuple(self._pinned_then),
        )


def _known(column: list[int | None]) -> tuple[int, ...] | None:
    found = tuple(n for n in column if n is not None)
    return found if len(found) == len(column) else None


def _columns(rows: list[dict[str, int]]) -> dict[str, tuple[int, ...]]:
    owners = dict.fromkeys(chain.from_iterable(rows))
    return {owner: tuple(row.get(owner, 0) for row in rows) for owner in owners}
