"""Where the optimizer's state goes: by a plan, or a share of it, and a share of that streamed, asked or by rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hostward.engine.backend import Backend
from hostward.engine.rates import measure_rates
from hostward.errors import ConfigError
from hostward.hardware import Rates
from hostward.inventory import Bucket, Inventory, state_bytes_per_element
from hostward.plan import Plan
from hostward.planner import checked_fraction, place_fraction, streamed_share
from hostward.planning.plan_file import PlanFile, load


class Mix:
    """Chooses placements.

    Args:
        offload_fraction: share of the state off the device.
        streamed: share of that, or "auto".
        plan: says where each bucket goes instead; a plan or a file that holds one.
        gradients: where the optimizer adds them up, "device" or "host".

    Raises:
        ConfigError: a share outside [0, 1]; no plan, or one that the other arguments contradict.
    """

    def __init__(self, offload_fraction: object, streamed: float | str, plan: object, gradients: str) -> None:
        self.offload_fraction = checked_fraction(offload_fraction)
        self._asked = streamed
        self._plan = planned(plan)
        if self._plan is not None:
            _require_alone(self._plan, self.offload_fraction, gradients)
            self.offload_fraction = self._plan.asked_fraction
        self.rates: Rates | None = None
        """Measured once, before state is allocated; None if nothing depended on them."""

    def streamed_share(self, backend: Backend, buckets: Sequence[Bucket], offload_fraction: float) -> float:
        """The share of offloaded state to stream. On a device without a link there is nothing to overlap, and all of
        it is stepped on the host. Raises MemoryLimitError where there is no room to measure.
        """
        if isinstance(self._asked, float):
            return self._asked
        if backend.device.type != "cuda" or not offload_fraction or not buckets:
            return 0.0
        if self.rates is None:
            self.rates = measure_rates(backend)
        first = buckets[0]
        return streamed_share(
            self.rates, state_bytes=state_bytes_per_element(first.kind), weight_bytes=first.dtype.itemsize_bytes
        )

    def place(self, backend: Backend, inventory: Inventory) -> Plan:
        """Placements of all buckets. Raises ConfigError for a plan of other buckets."""
        if self._plan is not None:
            return self._plan.placements(inventory)
        buckets = inventory.buckets
        share = self.streamed_share(backend, buckets, self.offload_fraction)
        return place_fraction(buckets, self.offload_fraction, share)


def _require_alone(plan: PlanFile, offload_fraction: float, gradients: str) -> None:
    if offload_fraction:
        raise ConfigError(
            f"plan=... and offload_fraction={offload_fraction}",
            why="the plan says where each bucket goes",
            fix="leave offload_fraction out, or edit the plan",
        )
    wanted = "host" if plan.gradients_on_host else "device"
    if gradients != wanted:
        raise ConfigError(
            f"the plan adds gradients up on the {wanted}, and gradients={gradients!r}",
            why="its bytes and seconds do not hold otherwise",
            fix=f"gradients={wanted!r}",
        )


def planned(plan: object) -> PlanFile | None:
    """A plan, from its file where `plan` names one. Raises ConfigError for anything else."""
    if plan is None or isinstance(plan, PlanFile):
        return plan
    if isinstance(plan, (str, Path)):
        return load(Path(plan))
    raise ConfigError(f"plan={plan!r} is neither a plan nor a file", fix="plan='plan.json', as hostward plan writes it")
