"""Whether a run can fit, from the sizes of its model alone: refused before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hostward.config import Config
from hostward.engine.backend import TORCH_DTYPES
from hostward.errors import MemoryLimitError
from hostward.hardware import host_memory
from hostward.inventory import Dtype
from hostward.machine.facts import (
    LOCK_LIMIT_FIX,
    LOCK_LIMIT_WHY,
    SLOW_HALVES_FIX,
    SLOW_HALVES_WHY,
    has_slow_halves,
    lock_limit_bytes,
    processor_flags,
)
from hostward.memory_model import LOAD, STEADY_STEP, Needs, PhaseNeeds
from hostward.planning.needs import Budgets
from hostward.planning.refuse import table
from hostward.sizes import size, sizes_apart
from hostward.step_model import Owner

from .models import named_shapes, place_in_model
from .placing import accumulates_in_fp32, gradients_leave, share_of
from .ranks import Ranks
from .shares import shares

STATE_BYTES = {Dtype.FP32: 8, Dtype.BF16: 10, Dtype.FP16: 12}
"""Per parameter: two moments, and the part of the master that is not the weight itself."""

SMALLER = "shrink the model, as in model.num_layers=2"
NONE_FOUND = "no GPU was found: hostward doctor says why, and hostward plan with the same options what GPUs it takes"
NONE_ASKED = "train.device=auto uses GPUs, and hostward plan with the same options says which it takes"


@dataclass(frozen=True, slots=True)
class Need:
    """Least bytes of a run, activations and workspaces left out."""

    parameters: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int


def lock_limit(device: torch.device) -> str | None:
    """What to tell at the start of this process's limit of locked pages; None: it has none, or nothing is locked."""
    limit_bytes = lock_limit_bytes()
    if device.type != "cuda" or limit_bytes is None:
        return None
    return f"ulimit -l is {size(limit_bytes)}: {LOCK_LIMIT_WHY} ({LOCK_LIMIT_FIX})"


def slow_halves(config: Config, device: torch.device) -> list[str]:
    """What to tell of a 16-bit model on a CPU that is slow with it; nothing where it is none."""
    dtype = config.model.params_dtype
    if device.type != "cpu" or Dtype(dtype) is Dtype.FP32 or not has_slow_halves(processor_flags()):
        return []
    return [f"model.params_dtype={dtype} is slow on this CPU: {SLOW_HALVES_WHY} ({SLOW_HALVES_FIX})"]


def need(config: Config, parameters: int) -> Need:
    """What a model of so many parameters needs, wherever it lies."""
    dtype = Dtype(config.model.params_dtype)
    weight_bytes = parameters * TORCH_DTYPES[dtype].itemsize
    gradient_bytes = parameters * 4 if accumulates_in_fp32(config) else weight_bytes
    return Need(parameters, weight_bytes, gradient_bytes, parameters * STATE_BYTES[dtype])


def require_memory(config: Config, device: torch.device, vocab_size: int, ranks: Ranks, away_bytes: int = 0) -> Need:
    """What the model needs, wherever it lies. On a GPU the offloaded share is asked of the host; on a CPU all is. The
    ranks of a node ask it together.

    Args:
        away_bytes: of this rank's weights that leave, and are never all on the device while there are gradients.

    Raises:
        MemoryLimitError: weights, gradients and optimizer state exceed the memory that is free.
    """
    shapes = named_shapes(config, vocab_size)
    held = _held(shapes, ranks, config.model.virtual_pipeline_model_parallel_size or 1)
    count = sum(math.prod(shapes[name]) for name in held)
    of_experts = sum(math.prod(shapes[name]) for name in held if ".experts." in name)
    config = share_of(config, ranks.data_size)
    least = need(config, -(-count // ranks.of_stage) if ranks.divided else count)
    # Divided weights are whole besides, from forward to backward, unless one layer at a time is.
    gathered = (count - of_experts) // ranks.sharing + of_experts // config.model.expert_model_parallel_size
    whole_bytes = need(config, gathered).weight_bytes if ranks.divided and not ranks.resharded else 0
    asked = shares(config)
    offloaded_bytes = int(asked.offload_fraction * least.state_bytes)
    least_share, most_share = asked.host_share
    landing_bytes = int(least_share * least.gradient_bytes)
    leaving_bytes = int(most_share * least.gradient_bytes) if gradients_leave(config) else 0
    parts = {
        Owner.WEIGHTS.value: least.weight_bytes,
        Owner.GATHERED.value: whole_bytes,
        Owner.GRADIENTS.value: least.gradient_bytes,
        Owner.STATE.value: least.state_bytes,
    }
    host, free_bytes = host_memory(), None
    phase = PhaseNeeds(STEADY_STEP, {}, parts, {})
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        there = {Owner.WEIGHTS.value: away_bytes, Owner.STATE.value: offloaded_bytes}
        gone = {**there, Owner.GRADIENTS.value: leaving_bytes}
        here = {owner: size_bytes - gone.get(owner, 0) for owner, size_bytes in parts.items()}
        phase = PhaseNeeds(STEADY_STEP, here, {**there, Owner.GRADIENTS.value: landing_bytes}, {})
    free = Budgets(free_bytes, host.available_bytes // ranks.local_size)
    if phase.host_bytes * ranks.local_size > host.available_bytes:
        fix = SMALLER
        if device.type == "cpu":
            fix = f"{NONE_ASKED if config.train.device == 'cpu' else NONE_FOUND}; or {SMALLER}"
            if slow_halves(config, device):
                fix = f"{fix} {SLOW_HALVES_FIX}"
        raise _too_large(least, phase, free, "host", phase.host_bytes * ranks.local_size, host.available_bytes, fix)
    if free_bytes is not None and phase.device_bytes > free_bytes:
        fix = f"raise optimizer.optimizer_offload_fraction, or {SMALLER}"
        raise _too_large(least, phase, free, "device", phase.device_bytes, free_bytes, fix)
    # Weights that leave do so when all are there, and before there are gradients.
    if free_bytes is not None and ranks.size > 1 and least.weight_bytes > free_bytes:
        loading = PhaseNeeds(LOAD, {Owner.WEIGHTS.value: least.weight_bytes}, {}, {})
        fix = "divide it among more processes: with several, weights that leave lie on the device until training begins"
        raise _too_large(least, loading, free, "device", least.weight_bytes, free_bytes, fix)
    return least


def _held(names: Iterable[str], ranks: Ranks, rounds: int) -> list[str]:
    """Those of a model's parameters that this rank's stages have: the embedding is with the first stage of all, what
    follows the layers with the last, and so is an embedding that is the output layer as well.
    """
    places = {name: place_in_model(name) for name in names}
    layers = 1 + int(max(place for place in places.values() if place < math.inf))
    first, last = (ranks.has_layer(layer, layers, rounds) for layer in (0, layers - 1))
    if not any(name.startswith("lm_head.") for name in places):
        first |= last
    at_ends = {-1: first, math.inf: last}
    return [n for n, p in places.items() if (at_ends[p] if p in at_ends else ranks.has_layer(int(p), layers, rounds))]


def _too_large(
    least: Need, phase: PhaseNeeds, free: Budgets, where: str, needed_bytes: int, available_bytes: int, fix: str
) -> MemoryLimitError:
    why = (
        f"{least.parameters:,} parameters: weights {size(least.weight_bytes)}, gradients {size(least.gradient_bytes)}, "
        f"optimizer state {size(least.state_bytes)}, and activations come on top"
    )
    if free.device_bytes is None:
        why = f"{why}; without a GPU all of it lies there"
    else:
        why = f"{why}; without these, beside what is free:\n{table(Needs((phase,)), free)}"
    asked, there = sizes_apart(needed_bytes, available_bytes)
    return MemoryLimitError(
        f"the run needs at least {asked} of {where} memory, and {there} are available",
        why=why,
        fix=fix,
    )
