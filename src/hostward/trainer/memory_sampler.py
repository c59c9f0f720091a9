"""Sample the memory of a run from counters on the host while steps are issued, without waiting for the device."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Set
from itertools import chain
from pathlib import Path

import torch

from hostward.core.host_limits import host_memory, resident_bytes
from hostward.core.units import gib
from hostward.model.parameters import local_of
from hostward.optim.offloaded_grad import OffloadedGrad, Where
from hostward.report.schema import OwnerSamples, StepBytes, StepMemory
from hostward.runtime.backend import Ledger, Tier

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
MOMENTS = {FORWARD: 1 / 3, BACKWARD: 2 / 3, STEP: 1.0}
"""Position within its iteration at which charts draw each moment; the real time depends on how far the host is ahead.
"""
FIRST_ITERATIONS = 8
"""First iterations, all of which are sampled, because memory grows in them."""
MOST_SAMPLED = 128
"""Iterations sampled after those, at most and at about equal distances, so that a report stays small."""


class MemorySampler:
    """Records bytes per iteration, and bytes by category at the moments of some iterations.

    Args:
        parameters: parameters whose gradients count as "gradients" on the device.
        staying: names of those whose gradients stay there until the step, also after they were removed from `.grad`.
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
        """Bytes by iteration."""
        self._at: list[float] = []
        self._moments: list[str] = []
        self._rows: dict[Tier, list[dict[str, int]]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._rest: list[int] = []
        self._pinned_then: list[int] = []

    def issued(self, iteration: int) -> None:
        """Record that the step of an iteration has been issued."""
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
        """Record bytes by category, if this iteration is sampled."""
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
        """Return the device bytes of this process's part of a gradient.

        `nbytes` of a DTensor counts all ranks together, and an offloaded gradient's stand-in in `.grad` has its shape
        but no bytes.
        """
        gradient = parameter.grad
        if gradient is None:
            return 0
        if isinstance(gradient, OffloadedGrad):
            here = gradient.fate.now is Where.TAKEN and gradient.parameter_name in self._staying
            return local_of(parameter).numel() * gradient.itemsize if here else 0
        return local_of(gradient).nbytes

    def step_memory(self) -> StepMemory:
        """Return the columns recorded so far."""
        return StepMemory(
            device_allocated_bytes=_known([step.device_allocated_bytes for step in self.steps]),
            device_peak_bytes=_known([step.device_peak_bytes for step in self.steps]),
            host_resident_bytes=tuple(step.host_resident_bytes for step in self.steps),
            pinned_bytes=tuple(step.pinned_bytes for step in self.steps),
            device_reserved_bytes=_known([step.device_reserved_bytes for step in self.steps]),
            alloc_retries=_known([step.alloc_retries for step in self.steps]),
        )

    def owners(self) -> OwnerSamples:
        """Return the samples recorded so far."""
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


# Warnings before the host's memory runs out, as the kernel kills without a message, and where the device's memory is
# full without an error, as torch's allocator then takes time instead.


log = logging.getLogger("hostward")

LEVELS = (0.95, 0.98)
"""Used shares of the memory at which a warning is logged, once each."""


class Watermark:
    """Checks at intervals how full the memory of this process is, until every level has been reported.

    Args:
        root: the folder that has `proc` and `sys`.
        interval_s: least time between two checks.
    """

    def __init__(self, root: Path = Path("/"), *, interval_s: float = 1.0) -> None:
        self._root = root
        self._interval_s = interval_s
        self._looked_s = -math.inf
        self._left = list(LEVELS)

    def look(self, iteration: int) -> None:
        """Warn if a level has been reached since the last check, if that is long enough ago."""
        now_s = time.monotonic()
        if not self._left or now_s - self._looked_s < self._interval_s:
            return
        self._looked_s = now_s
        memory = host_memory(self._root)
        used = 1 - memory.available_bytes / memory.total_bytes
        reached = [level for level in self._left if used >= level]
        if reached:
            self._left = [level for level in self._left if level not in reached]
            log.warning(
                "iteration %d: %.0f %% of the host's memory is in use (%s GiB left of %s by %s; this process has %s). "
                "At the limit the kernel kills with signal 9. Lower optimizer.optimizer_offload_fraction or the data "
                "loader's share, or give the process more memory; `hostward plan` reports what the run needs",
                iteration, 100 * used, gib(memory.available_bytes), gib(memory.total_bytes), memory.limited_by,
                gib(resident_bytes(self._root)),
            )  # fmt: skip


class FullDevice:
    """Warns once when torch's CUDA allocator finds no free memory in several iterations in a row.

    The allocator then returns its cached blocks, which CUDA allows only when the whole GPU is idle, CPU optimizer steps
    and copies included. So nothing overlaps, although no operation is seen to wait.
    """

    PATIENCE = 4
    """Iterations in a row. Fewer may be full while the pools of several streams grow to their sizes."""

    def __init__(self) -> None:
        self._retries: int | None = None
        self._in_a_row = 0
        self._reported = False

    def look(self, iteration: int, step: StepBytes) -> None:
        """Check after the step of an iteration has been issued."""
        now = step.alloc_retries
        if now is None or self._reported:
            return
        more, self._retries = now - (now if self._retries is None else self._retries), now
        self._in_a_row = self._in_a_row + 1 if more else 0
        if self._in_a_row == self.PATIENCE:
            self._reported = True
            log.warning(
                "iterations %d to %d: torch's CUDA allocator found no free memory and returned its cached blocks, %d "
                "times in the last. The host then waits until the GPU has finished, offloaded work too, and nothing of "
                "that overlaps. It holds %s GiB, of which at most %s are in use at a time: pools of several streams "
                "do not share memory. Let the run use less: `hostward plan` lists configurations",
                iteration - self.PATIENCE + 1, iteration, more, gib(step.device_reserved_bytes or 0),
                gib(step.device_peak_bytes or 0),
            )  # fmt: skip
