"""Whether what a plan says fits, before `attach` does anything."""

from __future__ import annotations

import os

import torch

from hostward.hardware import host_memory, resident_bytes
from hostward.host.threads import local_ranks
from hostward.planning.needs import Budgets
from hostward.planning.plan_file import PlanFile
from hostward.planning.refuse import refuse

_CURE = "make a plan within these limits (hostward plan --device-memory SIZE --host-memory SIZE); force=True goes on"


def require_room(plan: PlanFile, device: torch.device) -> None:
    """Raises MemoryLimitError, with the plan's needs, where they exceed what is free.

    They are those of the whole run. What this process holds already, weights and optimizer state among it, is part of
    them, and counts as free. Of several ranks of a host each has its share of what is free there.
    """
    device_bytes = None
    if device.type == "cuda":
        device_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    host_bytes = host_memory().available_bytes // local_ranks(os.environ) + resident_bytes()
    refuse(plan.needs, Budgets(device_bytes, host_bytes), _cure(plan))


def _cure(plan: PlanFile) -> str:
    leaving = sum(row.weights == "host" for row in plan.layers)
    if not leaving or plan.workload.ranks > 1:
        return _CURE
    return f"{_CURE}; weights that leave need no room at first: hostward.move(model, device, weights={leaving})"
