"""Compare two runs, the same training with and without offloading, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hostward.core.inventory import FP8_BLOCK, FP32_STATE, Dtype, StateFormat, align, stored_elements
from hostward.core.placement import Placement
from hostward.kernels import reference
from hostward.kernels.cpu.adamw import bias_tables
from hostward.optim.adamw import AdamW
from hostward.optim.bucket_state import same_bits
from hostward.optim.state_dict import state_dtypes

MEMORY_TOLERANCE = 0.02
"""Allowed relative difference between the drop in device bytes and the drop that the placement promised."""

_NAMED = 3
"""Ranks at most whose details are reported for a claim that fails."""

ALLOCATOR_SLACK_BYTES = 2 * 1024 * 1024
"""Bytes that torch's CUDA allocator may leave unused at the end of a large block, up to 1 MiB; seen only at models of a
few MiB.
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds the result of one comparison."""

    name: str
    held: bool
    detail: str
    broken_on: tuple[str, ...] = ()
    """Names of the ranks on which it fails, in a run of several."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what one run leaves on this rank for comparison: copies on the CPU of the rank's own part."""

    losses: list[float]
    grad_norms: list[float]
    skipped: list[int]
    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    device_bytes: int | None
    placed_fraction: float
    offloaded_bytes: int
    left_bytes: Mapping[str, int]
    """Bytes that layers have offloaded since the run started, on all ranks together, by kind."""
    placements: tuple[Placement, ...]
    """Placements that some bucket has."""
    settings: dict[str, Any]
    unchanged_weights: bool


def claims(base: Outcome, other: Outcome, kernels: Mapping[Placement, str | None]) -> list[Claim]:
    """Return every claim about one run with offloading.

    `kernels` holds for each placement the value that its kernel computes differently from the reference, or None.
    """
    found = [
        _trained(base),
        _defined({p: kernels[p] for p in Placement if p in (*base.placements, *other.placements)}),
        _equal_numbers("losses", base.losses, other.losses),
        _equal_numbers("gradient norms", base.grad_norms, other.grad_norms),
        _equal_numbers("skipped steps", base.skipped, other.skipped),
        _equal_tensors("final weights", base.weights, other.weights),
    ]
    roles = sorted({role for entry in base.state.values() for role in entry})
    for role in roles:
        mine = {n: e[role] for n, e in base.state.items() if role in e}
        theirs = {n: e[role] for n, e in other.state.items() if role in e}
        found.append(_equal_tensors(f"final {role}", mine, theirs))
    found += [
        Claim(f"{what} were offloaded", count > 0, f"{count:,} bytes") for what, count in other.left_bytes.items()
    ]
    return [*found, _memory_fell(base, other)]


def of_all(reported: Sequence[tuple[str, Sequence[Claim]]]) -> list[Claim]:
    """Merge the claims of all ranks, by name: a claim holds if it holds on all of them."""
    if len(reported) == 1:
        return list(reported[0][1])
    return [_of_ranks(name, reported) for name in dict.fromkeys(claim.name for _, found in reported for claim in found)]


def _of_ranks(name: str, reported: Sequence[tuple[str, Sequence[Claim]]]) -> Claim:
    found = [(rank, claim) for rank, of_rank in reported for claim in of_rank if claim.name == name]
    broken = [(rank, claim) for rank, claim in found if not claim.held]
    if not broken:
        rank, first = found[0]
        return Claim(name, True, f"{rank}: {first.detail}; held on {len(found)} ranks")
    more = f"; and on {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    detail = "; ".join(f"{rank}: {claim.detail}" for rank, claim in broken[:_NAMED])
    return Claim(name, False, detail + more, tuple(rank for rank, _ in broken))


def _trained(base: Outcome) -> Claim:
    """Check that the run without offloading has trained: equal wrong values would prove nothing."""
    problem = None
    moments = [t for entry in base.state.values() for t in entry.values()]
    if not all(math.isfinite(loss) for loss in base.losses):
        problem = f"loss {next(i for i, loss in enumerate(base.losses) if not math.isfinite(loss))} is not finite"
    elif len(base.skipped) == len(base.losses):
        problem = "every step was skipped"
    elif not all(t.isfinite().all() for t in (*base.weights.values(), *moments)):
        problem = "a final weight or moment is not finite"
    elif base.unchanged_weights:
        problem = "the weights are those of the start"
    return Claim("the run without offloading trained", problem is None, problem or "finite losses, weights moved")


def _defined(kernels: Mapping[Placement, str | None]) -> Claim:
    name = "kernels equal the definition"
    for placement, role in kernels.items():
        if role is not None:
            return Claim(name, False, f"{role} of a {placement.value} bucket differs from numpy")
    return Claim(name, True, f"{', '.join(p.value for p in kernels)}, against numpy")


def _equal_numbers(name: str, mine: Sequence[float], theirs: Sequence[float]) -> Claim:
    # repr distinguishes 0.0 from -0.0, and NaN equals itself.
    different = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if repr(a) != repr(b)]
    if len(mine) != len(theirs):
        return Claim(f"{name} equal", False, f"{len(mine)} against {len(theirs)}")
    if not different:
        return Claim(f"{name} equal", True, f"{len(mine)} values")
    i = different[0]
    return Claim(f"{name} equal", False, f"{len(different)} differ, first at {i}: {mine[i]!r} and {theirs[i]!r}")


def _equal_tensors(name: str, mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> Claim:
    different = [n for n in mine if n not in theirs or not same_bits(mine[n], theirs[n])]
    if not different and mine.keys() == theirs.keys():
        elements = sum(t.numel() for t in mine.values())
        return Claim(f"{name} equal", True, f"{len(mine)} tensors, {elements:,} elements")
    return Claim(f"{name} equal", False, f"{len(different)} of {len(mine)} tensors differ: {', '.join(different[:3])}")


def _memory_fell(base: Outcome, other: Outcome) -> Claim:
    fell, promised = (base.device_bytes or 0) - (other.device_bytes or 0), other.offloaded_bytes
    slack = 0 if base.settings.get("backend") == "simulated" else ALLOCATOR_SLACK_BYTES
    allowed = max(int(MEMORY_TOLERANCE * promised), slack)
    detail = f"{fell:,} fell, {promised:,} promised, within {allowed:,}"
    return Claim("device bytes fell as promised", abs(fell - promised) <= allowed, detail)


# Comparing this machine's kernels with the numpy reference of the step.


_ELEMENTS = 100_003
_STEPS = 3


def differing_role(
    device: torch.device, dtype: torch.dtype, placement: Placement, form: StateFormat = FP32_STATE
) -> str | None:
    """Return the first of exp_avg, exp_avg_sq, master and weight that differs from the numpy reference, or None.

    Three clipped steps of one matrix of `dtype` on `device`, with all its buckets at `placement`, and its state in the
    dtypes of `form`.
    """
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(_ELEMENTS, generator=generator).to(dtype)
    parameter = torch.nn.Parameter(start.to(device).view(1, -1))
    hyper = reference.Hyper(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    optimizer = AdamW(
        [("w", parameter)],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        max_grad_norm=1.0,
        offload_fraction=1.0 if placement.offloaded else 0.0,
        streamed_fraction=1.0 if placement is Placement.STREAMED else 0.0,
        state_dtypes=state_dtypes(form),
    )
    tables = bias_tables(hyper.beta1, hyper.beta2, 16)
    master = start.float().numpy().copy()
    if dtype is torch.bfloat16 and form.main_param is Dtype.BF16:
        master = reference.bf16_bits(master)
    exp_avg, exp_avg_sq = (
        np.zeros(stored_elements(moment, align(_ELEMENTS, FP8_BLOCK)), np.uint8)
        if moment is Dtype.FP8
        else np.zeros_like(master, dtype=np.float32 if moment is Dtype.FP32 else np.uint16)
        for moment in form.moments.values()
    )
    for step in range(1, _STEPS + 1):
        gradient = torch.randn(_ELEMENTS, generator=generator).to(dtype)
        parameter.grad = gradient.to(device).view(1, -1)
        optimizer.step()
        flat = gradient.float().numpy()
        norm, _ = reference.norm_from_partials(*reference.norm_partials(flat))
        scale = float(reference.clip_scale(float(norm), 1.0))
        master, exp_avg, exp_avg_sq = reference.adamw(master, exp_avg, exp_avg_sq, flat, step, hyper, tables, scale)
    optimizer.wait()
    state = optimizer.state_dict()["state"]["w"]
    expected = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master}
    for role, value in expected.items():
        if role in state:
            if value.dtype == np.uint8:
                value = reference.bf16_bits(reference.float_of_fp8(value, signed=role == "exp_avg")[:_ELEMENTS])
            bits = value.view(np.int16) if value.dtype == np.uint16 else value  # bf16
            if not same_bits(state[role].view(-1), torch.from_numpy(bits)):
                return role
    weight = master
    if dtype is torch.bfloat16:
        weight = (master if master.dtype == np.uint16 else reference.bf16_bits(master)).view(np.int16)
    elif dtype is torch.float16:
        weight = reference.fp16_weight(master)
    held = parameter.detach().cpu().view(-1)
    held = held.view(torch.int16) if dtype is torch.bfloat16 else held
    return None if same_bits(held, torch.from_numpy(np.ascontiguousarray(weight))) else "weight"
